"""BatchQueueManager.shutdown_all(): everything ends, and nothing is lost."""

from __future__ import annotations

import threading

import pytest

from batchmill import BatchQueueManager, QueueClosedError
from tests.kit.queues import Recorder, Red, fill, reds
from tests.kit.threads import WAIT_S, Gate, spawn
from tests.queue.kit import Waiters, messages
from tests.queue.manager.kit import config, drain_threads, pooled


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
