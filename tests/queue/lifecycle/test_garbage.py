"""A queue that nobody refers to any more drains what it accepted, and its threads end."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable
from typing import Any

import pytest

from batchmill import BatchQueue
from tests.kit.queues import Recorder, new_queue
from tests.kit.threads import WAIT_S, Gate, spawn, until
from tests.queue.kit import A, parked, partition_of


class Merger(Recorder):
    """A handler with on_idle: its queue has timers."""

    idles = 0
    goodbyes = 0

    def on_idle(self) -> None:
        self.idles += 1

    def on_shutdown(self) -> None:
        self.goodbyes += 1


class Remains:
    """What one may still know of a queue without keeping it."""

    def __init__(self, queue: BatchQueue[Any]) -> None:
        self.queue = weakref.ref(queue)
        self.done = queue._core.done
        self.threads = list(queue._core.scheduler.threads)

    def are_gone(self) -> None:
        assert self.done.wait(WAIT_S), "the queue drains itself"
        for thread in self.threads:
            thread.join(WAIT_S)
        assert not any(thread.is_alive() for thread in self.threads)


def _drop(held: list[BatchQueue[Any]], said: pytest.WarningsRecorder, count: int = 1) -> None:
    """Drop the last references, and collect until ``count`` queues say that they go.

    A thread that is running a task may hold on to its queue meanwhile. The record of a warning
    refers to the queue, so a weak reference would not tell.
    """
    held.clear()
    until(lambda: gc.collect() is None or len(said.list) >= count, "the queue is collected")


Maker = Callable[[Recorder], BatchQueue[Any]]


def _plain(recorder: Recorder) -> BatchQueue[Any]:
    queue = new_queue(threads=2, partitions=2, max_batch=3)
    queue.add_handler(A, recorder)
    return queue


def _cyclic(recorder: Recorder) -> BatchQueue[Any]:
    queue = new_queue(threads=2, partitions=2, max_batch=3)

    def handler(batch: list[A]) -> None:
        assert queue is not None
        recorder.consume(batch)

    queue.add_handler(A, handler)
    return queue


def _direct(recorder: Recorder) -> BatchQueue[Any]:
    return new_queue(threads=2, partitions=2, consumer=recorder)


every_kind = pytest.mark.parametrize("make", [_plain, _cyclic, _direct])


@every_kind
def test_unused_queue_goes(make: Maker) -> None:
    """A queue that is dropped while it is parked says so, and its threads end."""
    queue = make(Recorder())
    parked(queue)
    remains, held = Remains(queue), [queue]
    del queue
    with pytest.warns(ResourceWarning, match="never shut down") as said:
        _drop(held, said)
    remains.are_gone()


@every_kind
def test_dropped_queue_drains_first(make: Maker) -> None:
    """What a dropped queue had accepted is consumed before its threads end."""
    with Gate() as gate:
        recorder = Recorder(gate)
        queue = make(recorder)
        queue.produce(A())
        gate.wait_entered()
        queue.produce_many([A() for _ in range(20)])
        remains, held = Remains(queue), [queue]
        del queue
        if make is _cyclic:  # the handler that runs refers to it: first it has to return
            gate.open()
        with pytest.warns(ResourceWarning, match="never shut down") as said:
            _drop(held, said)
        gate.open()
        remains.are_gone()
        assert len(recorder.items) == 21


def test_queue_with_timers_goes() -> None:
    """Handlers with on_idle do not keep a dropped queue alive; they hear of the end once."""
    merger = Merger()
    queue = new_queue(min_idle_ms=1, max_idle_ms=1)
    queue.add_handler(A, merger)
    queue.produce(A())
    merger.wait_for(1)
    remains, held = Remains(queue), [queue]
    del queue
    with pytest.warns(ResourceWarning, match="never shut down") as said:
        _drop(held, said)
    remains.are_gone()
    assert merger.goodbyes == 1


def test_queue_with_timers_in_a_cycle_goes() -> None:
    """The same when the handler with on_idle refers to its queue."""

    class Cyclic(Merger):
        queue: BatchQueue[Any] | None = None

    merger = Cyclic()
    goodbyes = threading.Event()
    merger.on_shutdown = goodbyes.set  # type: ignore[method-assign]
    queue = merger.queue = new_queue(min_idle_ms=1, max_idle_ms=1)
    queue.add_handler(A, merger)
    queue.produce(A())
    merger.wait_for(1)
    remains, held = Remains(queue), [queue]
    del queue, merger
    with pytest.warns(ResourceWarning, match="never shut down") as said:
        _drop(held, said)
    remains.are_gone()
    assert goodbyes.is_set()


def test_queue_that_was_shut_down_goes_in_silence() -> None:
    """A queue that was shut down is collected without a word."""
    queue = _plain(Recorder())
    queue.shutdown()
    remains = Remains(queue)
    del queue
    gc.collect()
    assert remains.queue() is None
    remains.are_gone()


def test_nothing_of_a_queue_remains() -> None:
    """After the drain the inside of a dropped queue is collected too."""
    queue = _plain(Recorder())
    parked(queue)
    remains, core, held = Remains(queue), weakref.ref(queue._core), [queue]
    del queue
    with pytest.warns(ResourceWarning, match="never shut down") as said:
        _drop(held, said)
    said.list.clear()
    remains.are_gone()
    until(lambda: gc.collect() is None or core() is None, "its inside is collected")


def test_many_dropped_queues() -> None:
    """Queues dropped by the hundred leave no thread behind."""
    everything, held = [], []
    for index in range(100):
        recorder = Recorder()
        queue = (_plain, _cyclic)[index % 2](recorder)
        queue.produce_many([A() for _ in range(10)])
        everything.append((Remains(queue), recorder))
        held.append(queue)
        del queue
    with pytest.warns(ResourceWarning, match="never shut down") as said:
        _drop(held, said, count=100)
    for remains, recorder in everything:
        remains.are_gone()
        assert len(recorder.items) == 10


def test_waiting_producer_keeps_the_queue() -> None:
    """A producer that waits is somebody who refers to the queue: it gets its item in."""
    with Gate() as gate:
        recorder = Recorder(gate)
        queue = new_queue(buffer_size=1)
        queue.add_handler(A, recorder)
        queue.produce(A())
        gate.wait_entered()
        queue.produce(A())
        producer = spawn(queue.produce, A())
        partition = partition_of(queue)
        until(lambda: partition.waiters, "the producer waits")
        remains = Remains(queue)
        del queue
        gc.collect()
        assert remains.queue() is not None

        def let_go(said: pytest.WarningsRecorder) -> None:
            gate.open()
            assert producer.result()
            _drop([], said)

        with pytest.warns(ResourceWarning, match="never shut down") as said:
            let_go(said)
        remains.are_gone()
        assert len(recorder.items) == 3
