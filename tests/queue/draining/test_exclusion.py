"""Who runs beside whom: calls to one handler never overlap."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest

from batchmill import (
    BatchQueue,
    PartitionPolicy,
    PartitionSelector,
    ThreadPolicy,
)
from tests.kit.queues import Blue, Green, OverlapCheck, Recorder, Red, make_queue, reds
from tests.kit.threads import WAIT_S, Gate
from tests.queue.kit import WatchedLock, make_classes

TWO_THREADS: dict[str, Any] = {
    "threads": ThreadPolicy.fixed(2),
    "partitions": PartitionPolicy.fixed(2),
}
"""The first class registered is on one thread, the second on the other."""


def watch_lock(queue: BatchQueue[Any]) -> WatchedLock:
    """Put a lock that tells in the place of the one that keeps the only handler's calls apart."""
    [receiver] = queue._core.layout.receivers()
    lock = WatchedLock()
    receiver.lock = lock  # type: ignore[assignment]
    return lock


def test_different_handlers_run_side_by_side() -> None:
    """Two threads are in two handlers at once."""
    together = threading.Barrier(2)
    with make_queue(**TWO_THREADS) as queue:
        queue.add_handler(Red, lambda batch: together.wait(WAIT_S))
        queue.add_handler(Green, lambda batch: together.wait(WAIT_S))
        queue.produce(Red())
        queue.produce(Green())
        assert queue.flush(WAIT_S)
        assert queue.stats().failed == 0


@pytest.mark.parametrize(
    "read", [lambda gate: gate, lambda gate: gate.consume], ids=["object", "bound method"]
)
def test_one_handler_for_two_classes_is_never_in_two_threads(read: Callable[[Gate], Any]) -> None:
    """While one thread is in the handler with one class, another waits with the other class."""
    gate = Gate()
    with make_queue(**TWO_THREADS) as queue:
        queue.add_handler(Red, read(gate))
        queue.add_handler(Green, read(gate))
        lock = watch_lock(queue)
        queue.produce(Red())
        gate.wait_entered()
        queue.produce(Green())
        lock.wait_contended()
        assert gate.items == [Red()]
        gate.open()
        assert queue.flush(WAIT_S)
    assert gate.items == [Red(), Green()]


def test_bound_method_of_a_built_in_is_one_handler() -> None:
    """`items.extend` is a new object each time it is read, and yet one handler, as in Python."""
    items: list[Any] = []
    with make_queue() as queue:
        queue.add_handler(Red, items.extend)
        queue.add_handler(Green, items.extend)
        assert len(queue._core.layout.receivers()) == 1


def test_one_handler_for_one_class_in_many_partitions_is_never_in_two_threads() -> None:
    """Nor where a selector spreads the class over the partitions of two threads."""
    gate = Gate()
    with make_queue(**TWO_THREADS, selector=PartitionSelector.round_robin()) as queue:
        queue.add_handler(Red, gate)
        lock = watch_lock(queue)
        queue.produce(Red(0))
        gate.wait_entered()
        queue.produce(Red(1))
        lock.wait_contended()
        assert gate.items == [Red(0)]
        gate.open()
        assert queue.flush(WAIT_S)


def test_thread_that_waits_for_a_handler_serves_its_others() -> None:
    """A class whose handler is busy on another thread does not hold up those beside it."""
    busy, served = Gate(), threading.Event()
    with make_queue(**TWO_THREADS) as queue:
        queue.add_handler(Red, busy)  # on one thread
        queue.add_handler(Green, busy)  # on the other
        lock = watch_lock(queue)
        queue.add_handler(make_classes(1)[0], Recorder(), weight=9.0)  # keeps the first one full,
        queue.add_handler(Blue, lambda batch: served.set())  # so this is with Green
        assert [Blue in p.classes for p in queue.stats().partitions] == [False, True]
        queue.produce(Red())
        busy.wait_entered()
        queue.produce(Green())
        lock.wait_contended()
        queue.produce(Blue())
        assert served.wait(WAIT_S)
        assert busy.items == [Red()]


def test_handler_that_moves_to_another_class_is_never_in_two_threads() -> None:
    """Removed from one class while in it, and added to another: its calls still do not overlap."""
    overlap, hold, release = OverlapCheck(), Gate(), Gate()
    served = threading.Event()

    def handler(batch: list[Any]) -> None:
        with overlap:
            if type(batch[0]) is Red:
                release.consume(batch)

    with make_queue(**TWO_THREADS) as queue:
        queue.add_handler(Red, handler)  # on the first thread
        queue.add_handler(Blue, hold)  # on the second
        queue.produce(Red())
        release.wait_entered()
        queue.produce(Blue())
        hold.wait_entered()
        queue.remove_handler(Red)
        queue.add_handler(make_classes(1)[0], Recorder(), weight=9.0)  # takes Red's place
        queue.add_handler(Green, handler)  # so this is on the second thread,
        queue.add_handler(str, lambda batch: served.set())  # and this comes after it
        assert [p.classes[1:] for p in queue.stats().partitions][1] == (Green, str)
        queue.produce(Green())
        queue.produce("the second thread has been past Green when this is served")
        hold.open()
        assert served.wait(WAIT_S)
        assert overlap.overlaps == 0


def test_direct_consumer_is_called_by_all_threads() -> None:
    """A direct consumer on several threads runs on them side by side, as documented."""
    together = threading.Barrier(2)
    with make_queue(
        **TWO_THREADS,
        consumer=lambda batch: together.wait(WAIT_S),
        selector=PartitionSelector.round_robin(),
    ) as queue:
        queue.produce_many(reds(2))
        assert queue.flush(WAIT_S)
        assert queue.stats().failed == 0


def test_serialized_consumer_is_called_by_one_thread_at_a_time() -> None:
    """With serialize=True the second thread waits until the first has left the consumer."""
    gate = Gate()
    with make_queue(
        **TWO_THREADS, consumer=gate, serialize=True, selector=PartitionSelector.round_robin()
    ) as queue:
        lock = watch_lock(queue)
        queue.produce(Red(0))
        gate.wait_entered()
        queue.produce(Red(1))
        lock.wait_contended()
        assert gate.items == [Red(0)]
        gate.open()
        assert queue.flush(WAIT_S)
    assert gate.items == reds(2)
