"""BatchQueueManager: queues by name, made once, found, and shut down."""

from __future__ import annotations

import threading
from typing import Any

import pytest

import batchmill
from batchmill import (
    BatchQueueManager,
    BufferStrategy,
    PartitionPolicy,
    QueueConflictError,
    QueueExistsError,
    ThreadPolicy,
)
from tests.kit.queues import Recorder, Red, reds
from tests.kit.threads import WAIT_S, Gate, spawn
from tests.queue.kit import messages
from tests.queue.manager.kit import config, drain_threads, pooled


def test_create_makes_a_running_queue(manager: BatchQueueManager) -> None:
    """A created queue runs under its name."""
    queue = manager.create("new", config())
    assert (queue.name, queue.running) == ("new", True)


def test_create_refuses_a_taken_name(manager: BatchQueueManager) -> None:
    """A name that is taken raises, and says which."""
    manager.create("taken", config())
    with pytest.raises(QueueExistsError) as caught:
        manager.create("taken", config())
    assert caught.value.name == "taken"


def test_refused_create_starts_nothing(manager: BatchQueueManager, started: list[str]) -> None:
    """A duplicate name is noticed before a thread is started."""
    manager.create("taken", config())
    started.clear()
    with pytest.raises(QueueExistsError):
        manager.create("taken", config(threads=ThreadPolicy.fixed(3)))
    assert started == []


def test_refused_create_leaves_the_first_alone(manager: BatchQueueManager) -> None:
    """The queue that has the name goes on."""
    first = manager.create("taken", config())
    with pytest.raises(QueueExistsError):
        manager.create("taken", config())
    assert manager.get("taken") is first
    assert first.running


def test_get_or_create_makes_what_is_missing(manager: BatchQueueManager) -> None:
    """Without a queue of that name, one is made."""
    assert manager.get_or_create("new", config()).running


def test_get_or_create_answers_the_first(manager: BatchQueueManager) -> None:
    """The first caller wins: later ones get the same queue."""
    first = manager.get_or_create("shared", config())
    assert manager.get_or_create("shared", config()) is first


def test_get_or_create_at_once_makes_one(manager: BatchQueueManager, started: list[str]) -> None:
    """Eight threads that ask at the same moment get one queue."""
    together = threading.Barrier(8)

    def ask() -> Any:
        together.wait(WAIT_S)
        return manager.get_or_create("shared", config())

    futures = [spawn(ask) for _ in range(8)]
    assert len({id(future.result(WAIT_S)) for future in futures}) == 1
    assert [name for name in started if name.startswith("batchmill-")] == ["batchmill-shared-0"]


@pytest.mark.parametrize(
    ("first", "later"),
    [({}, {"consumer": print}), ({"consumer": print}, {})],
    ids=["consumer on handlers", "handlers on consumer"],
)
def test_modes_conflict(
    manager: BatchQueueManager, first: dict[str, Any], later: dict[str, Any]
) -> None:
    """A direct consumer where handlers are, or the reverse, would lose items: it raises."""
    manager.get_or_create("shared", config(**first))
    with pytest.raises(QueueConflictError, match="direct consumer") as caught:
        manager.get_or_create("shared", config(**later))
    assert caught.value.name == "shared"


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("threads", ThreadPolicy.fixed(2)),
        ("partitions", PartitionPolicy.fixed(3)),
        ("buffer_size", 7),
        ("strategy", BufferStrategy.IF_POSSIBLE),
    ],
)
def test_differing_settings_warn(
    manager: BatchQueueManager, caplog: pytest.LogCaptureFixture, field: str, value: object
) -> None:
    """A later caller's differing setting is ignored with a warning that names it."""
    manager.get_or_create("shared", config())
    manager.get_or_create("shared", config(**{field: value}))
    [said] = messages(caplog)
    assert f"shared: it runs with {field}=" in said


def test_first_settings_win(manager: BatchQueueManager) -> None:
    """The queue keeps what it was made with."""
    manager.get_or_create("shared", config(buffer_size=5))
    assert manager.get_or_create("shared", config(buffer_size=7)).config.buffer_size == 5


def test_own_threads_against_shared_ones_warn(
    manager: BatchQueueManager, caplog: pytest.LogCaptureFixture
) -> None:
    """Asking for a shared scheduler where the queue has its own threads warns too."""
    manager.get_or_create("shared", config())
    manager.get_or_create("shared", pooled())
    assert any("shared_scheduler=" in said for said in messages(caplog))


def test_same_settings_do_not_warn(
    manager: BatchQueueManager, caplog: pytest.LogCaptureFixture
) -> None:
    """Callers that agree hear nothing."""
    for _ in range(2):
        manager.get_or_create("shared", config(partitions=PartitionPolicy.adaptive()))
    assert messages(caplog) == []


def test_get_answers_the_queue(manager: BatchQueueManager) -> None:
    """get() is the queue of that name."""
    queue = manager.create("known", config())
    assert manager.get("known") is queue


def test_get_answers_none_for_a_stranger(manager: BatchQueueManager) -> None:
    """Without a queue of that name, get() is None."""
    assert manager.get("stranger") is None


def test_names_are_oldest_first(manager: BatchQueueManager) -> None:
    """names() lists the running queues as they came."""
    for name in ("b", "c", "a"):
        manager.create(name, config())
    manager.shutdown("c")
    assert manager.names() == ("b", "a")


def test_shutdown_drains_the_queue(manager: BatchQueueManager) -> None:
    """shutdown(name) is True when all that was accepted was consumed."""
    consumer = Recorder()
    manager.create("one", config(consumer=consumer)).produce_many(reds(100))
    assert manager.shutdown("one")
    assert consumer.items == reds(100)


def test_shutdown_ends_the_threads(manager: BatchQueueManager) -> None:
    """After shutdown(name) the queue's own threads are gone."""
    manager.create("one", config())
    manager.shutdown("one")
    assert drain_threads("one") == set()


def test_shutdown_of_a_stranger_is_false(manager: BatchQueueManager) -> None:
    """shutdown() of a name that no queue has answers False."""
    assert not manager.shutdown("stranger")


def test_shutdown_leaves_the_others_alone(manager: BatchQueueManager) -> None:
    """Only the queue of that name ends."""
    manager.create("one", config())
    other = manager.create("other", config())
    manager.shutdown("one")
    assert other.running


def test_name_is_free_after_shutdown(manager: BatchQueueManager) -> None:
    """A name can be used again when its queue has ended."""
    first = manager.create("again", config())
    manager.shutdown("again")
    assert manager.create("again", config()) is not first


def test_queue_shut_down_by_itself_is_forgotten(manager: BatchQueueManager) -> None:
    """A queue that was shut down directly, not through the manager, frees its name too."""
    manager.create("one", config()).shutdown()
    assert manager.get("one") is None


def test_get_does_not_answer_a_queue_that_is_ending(manager: BatchQueueManager) -> None:
    """get() answers running queues only: one whose shutdown is not over yet is not running."""
    gate = Gate()
    queue = manager.create("ending", config(consumer=gate, shutdown_timeout_ms=1))
    queue.produce(Red())
    gate.wait_entered()
    assert not queue.shutdown()
    assert manager.get("ending") is None


def test_get_or_create_does_not_answer_a_queue_that_is_ending(manager: BatchQueueManager) -> None:
    """A caller of get_or_create() gets a queue that takes items, not one on its way out."""
    gate = Gate()
    queue = manager.create("ending", config(consumer=gate, shutdown_timeout_ms=1))
    queue.produce(Red())
    gate.wait_entered()
    assert not queue.shutdown()
    assert manager.get_or_create("ending", config(consumer=Recorder())).running


def test_default_manager_is_a_manager() -> None:
    """batchmill.default_manager makes queues like any other manager."""
    queue = batchmill.default_manager.create("tests/default", config())
    try:
        assert batchmill.default_manager.get("tests/default") is queue
    finally:
        assert batchmill.default_manager.shutdown("tests/default")
