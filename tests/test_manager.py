"""BatchQueueManager: queues by name, schedulers shared, counted and gone with their last queue."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest

import batchmill
from batchmill import (
    BatchQueueConfig,
    BatchQueueManager,
    BufferStrategy,
    PartitionPolicy,
    QueueClosedError,
    QueueConflictError,
    QueueExistsError,
    ThreadPolicy,
)
from tests.helpers import (
    WAIT_S,
    Gate,
    Recorder,
    Red,
    Waiters,
    fill,
    messages,
    reds,
    spawn,
)

POOL = ("pool", ThreadPolicy.fixed(2))


def config(**settings: Any) -> BatchQueueConfig:
    """Settings of a queue with a thread of its own, unless told otherwise."""
    settings.setdefault("shutdown_timeout_ms", WAIT_S * 1000)
    if "shared_scheduler" not in settings:
        settings.setdefault("threads", ThreadPolicy.fixed(1))
    return BatchQueueConfig(**settings)


def pooled(**settings: Any) -> BatchQueueConfig:
    """Settings of a queue on the shared scheduler."""
    return config(**({"shared_scheduler": POOL} | settings))


def drain_threads(of: str) -> set[str]:
    """The names of the live threads of a queue or scheduler."""
    names = {thread.name for thread in threading.enumerate()}
    return {name for name in names if name.startswith(f"batchmill-{of}-")}


@pytest.fixture
def manager() -> Iterator[BatchQueueManager]:
    """A manager of the test's own, whose queues end with it."""
    made = BatchQueueManager()
    yield made
    Gate.open_all()
    made.shutdown_all()


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the threads started from now on."""
    names: list[str] = []
    start = threading.Thread.start

    def watched_start(thread: threading.Thread) -> None:
        names.append(thread.name)
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", watched_start)
    return names


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

    asked = [spawn(ask) for _ in range(8)]
    assert len({id(future.result(WAIT_S)) for future in asked}) == 1
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


def test_shared_scheduler_is_made_on_first_use(
    manager: BatchQueueManager, started: list[str]
) -> None:
    """The first queue that names a scheduler starts its threads; the second starts none."""
    manager.create("one", pooled())
    manager.create("two", pooled())
    assert started == ["batchmill-pool-0", "batchmill-pool-1"]


def test_shared_scheduler_serves_all_its_queues(manager: BatchQueueManager) -> None:
    """Items of every queue on the pool are consumed."""
    consumers = [Recorder() for _ in range(5)]
    for index, consumer in enumerate(consumers):
        queue = manager.create(f"queue{index}", pooled(consumer=consumer))
        queue.produce_many(reds(10))
        assert queue.flush(WAIT_S)
    assert [consumer.items for consumer in consumers] == [reds(10)] * 5


def test_shared_scheduler_outlives_all_but_the_last(manager: BatchQueueManager) -> None:
    """While one queue is left, the pool goes on and serves it."""
    consumer = Recorder()
    manager.create("one", pooled())
    left = manager.create("two", pooled(consumer=consumer))
    manager.shutdown("one")
    left.produce(Red())
    assert left.flush(WAIT_S)
    assert consumer.items == [Red()]


def test_shared_scheduler_goes_with_its_last_queue(manager: BatchQueueManager) -> None:
    """When the last queue on it ends, the pool's threads end."""
    manager.create("one", pooled())
    manager.create("two", pooled())
    manager.shutdown("one")
    manager.shutdown("two")
    assert drain_threads("pool") == set()


def test_shared_scheduler_comes_back(manager: BatchQueueManager) -> None:
    """A name whose scheduler has gone gets a new one, of the size then asked for."""
    manager.create("one", pooled())
    manager.shutdown("one")
    manager.create("two", pooled(shared_scheduler=("pool", ThreadPolicy.fixed(3))))
    assert len(drain_threads("pool")) == 3


def test_shared_scheduler_keeps_its_first_size(manager: BatchQueueManager) -> None:
    """A later queue's differing policy changes nothing: the first wins."""
    manager.create("one", pooled())
    manager.create("two", pooled(shared_scheduler=("pool", ThreadPolicy.fixed(3))))
    assert len(drain_threads("pool")) == 2


def test_shared_scheduler_of_another_size_warns(
    manager: BatchQueueManager, caplog: pytest.LogCaptureFixture
) -> None:
    """That a differing policy is ignored is said, with both policies."""
    manager.create("one", pooled())
    manager.create("two", pooled(shared_scheduler=("pool", ThreadPolicy.fixed(3))))
    [said] = messages(caplog)
    assert "pool: it runs with fixed(2); the later fixed(3) is ignored" in said


def test_shared_scheduler_of_the_same_size_does_not_warn(
    manager: BatchQueueManager, caplog: pytest.LogCaptureFixture
) -> None:
    """Queues that agree on the pool's size hear nothing."""
    manager.create("one", pooled())
    manager.create("two", pooled(shared_scheduler=("pool", ThreadPolicy.fixed(2))))
    assert messages(caplog) == []


def test_managers_do_not_share(manager: BatchQueueManager, started: list[str]) -> None:
    """Two managers have nothing in common: neither queues nor schedulers, whatever the names."""
    other = BatchQueueManager()
    mine = manager.create("same", pooled())
    theirs = other.create("same", pooled())
    assert other.shutdown_all()
    assert mine is not theirs
    assert mine.running
    assert len(started) == 4


def test_busy_queue_leaves_the_pool_to_others(manager: BatchQueueManager) -> None:
    """A queue whose handler hangs holds one thread of the pool, and the others are served."""
    gate = Gate()
    manager.create("stuck", pooled(consumer=gate)).produce(Red())
    gate.wait_entered()
    consumer = Recorder()
    free = manager.create("free", pooled(consumer=consumer))
    free.produce(Red())
    assert free.flush(WAIT_S)
    assert consumer.items == [Red()]


def test_queues_take_turns_on_one_thread(manager: BatchQueueManager) -> None:
    """On a pool of one thread, a queue that always has more to do does not keep the others out."""
    served = threading.Event()

    def endless(batch: list[Any]) -> None:
        if not served.is_set():
            busy.produce(Red())

    pool = ("single", ThreadPolicy.fixed(1))
    busy = manager.create("busy", pooled(shared_scheduler=pool, consumer=endless))
    busy.produce(Red())
    other = manager.create("other", pooled(shared_scheduler=pool, consumer=lambda _: served.set()))
    other.produce(Red())
    was_served = served.wait(WAIT_S)
    served.set()
    assert was_served


def test_shutdown_all_drains_all(manager: BatchQueueManager) -> None:
    """All that every queue accepted is consumed, own threads or shared."""
    consumers = [Recorder() for _ in range(4)]
    for index, consumer in enumerate(consumers):
        make = pooled if index % 2 else config
        manager.create(f"queue{index}", make(consumer=consumer)).produce_many(reds(50))
    assert manager.shutdown_all()
    assert [consumer.items for consumer in consumers] == [reds(50)] * 4


def test_shutdown_all_ends_all_threads(manager: BatchQueueManager) -> None:
    """No thread is left, neither a queue's own nor a pool's."""
    manager.create("own", config())
    manager.create("shared", pooled())
    manager.shutdown_all()
    assert drain_threads("own") | drain_threads("pool") == set()


def test_shutdown_all_forgets_all(manager: BatchQueueManager) -> None:
    """Nothing is registered any more."""
    manager.create("own", config())
    manager.create("shared", pooled())
    manager.shutdown_all()
    assert manager.names() == ()


def test_shutdown_all_stops_all_before_it_drains_any(
    manager: BatchQueueManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While the first queue still drains, the gate of the last is closed already."""
    waiters = Waiters(monkeypatch)
    first_gate, last_gate = Gate(), Gate()
    first = manager.create("first", config(consumer=first_gate))
    last = manager.create("last", config(consumer=last_gate, buffer_size=1))
    first.produce(Red())
    last.produce(Red())
    first_gate.wait_entered()
    last_gate.wait_entered()
    fill(last)
    blocked = spawn(last.produce, Red())
    waiters.wait_for_one()
    over = spawn(manager.shutdown_all)
    # Only the closing of its gate can send this producer away: both handlers are held.
    assert blocked.result(WAIT_S) is False
    assert not over.done()
    Gate.open_all()
    assert over.result(WAIT_S)


def test_shutdown_all_refuses_new_queues(manager: BatchQueueManager) -> None:
    """A queue that somebody wants to create meanwhile is refused: it would be left behind."""
    refused: list[Exception] = []

    class Restarter(Recorder):
        def on_shutdown(self) -> None:
            for make in (manager.create, manager.get_or_create):
                try:
                    make("late", config())
                except QueueClosedError as error:
                    refused.append(error)

    manager.create("restarting", config(consumer=Restarter()))
    manager.shutdown_all()
    assert len(refused) == 2


def test_manager_can_be_used_after_shutdown_all(manager: BatchQueueManager) -> None:
    """Once all is shut down, new queues can be made."""
    manager.create("one", config())
    manager.shutdown_all()
    assert manager.create("one", config()).running


def test_shutdown_all_tells_of_a_queue_that_hangs(
    manager: BatchQueueManager, caplog: pytest.LogCaptureFixture
) -> None:
    """Where a queue is not drained in time, the answer is False and a warning names the queue."""
    gate = Gate()
    manager.create("hanging", config(consumer=gate, shutdown_timeout_ms=1)).produce(Red())
    gate.wait_entered()
    assert not manager.shutdown_all()
    assert "hanging: not drained" in "".join(messages(caplog))


def test_shutdown_all_of_nothing_is_true(manager: BatchQueueManager) -> None:
    """Without queues there is nothing that could be late."""
    assert manager.shutdown_all()


def test_two_shutdown_alls_are_one(manager: BatchQueueManager) -> None:
    """Two threads may shut all down at once: both wait for the same end, and both say True."""
    gate = Gate()
    queue = manager.create("one", config(consumer=gate))
    queue.produce_many(reds(3))
    gate.wait_entered()
    together = threading.Barrier(3)

    def shut_down() -> bool:
        together.wait(WAIT_S)
        return manager.shutdown_all()

    both = [spawn(shut_down), spawn(shut_down)]
    together.wait(WAIT_S)
    gate.open()
    assert [future.result(WAIT_S) for future in both] == [True, True]
    assert gate.items == reds(3)


def test_default_manager_is_a_manager() -> None:
    """batchmill.default_manager makes queues like any other manager."""
    queue = batchmill.default_manager.create("tests/default", config())
    try:
        assert batchmill.default_manager.get("tests/default") is queue
    finally:
        assert batchmill.default_manager.shutdown("tests/default")
