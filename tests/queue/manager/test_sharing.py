"""Schedulers that queues share: counted, and gone with their last queue."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from batchmill import BatchQueueManager, ThreadPolicy
from tests.kit.queues import Recorder, Red, reds
from tests.kit.threads import WAIT_S, Gate
from tests.queue.kit import messages
from tests.queue.manager.kit import drain_threads, pooled


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
