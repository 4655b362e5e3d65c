"""Items that wait for others, so that a handler gets fuller batches at low rates."""

from __future__ import annotations

import threading

import pytest

from batchmill import BatchQueueSettings, ConfigError, PartitionPolicy, ThreadPolicy
from tests.kit.queues import Green, Recorder, Red, make_queue, reds
from tests.kit.threads import WAIT_S, spawn
from tests.queue.kit import Idler, parked, parked_task

FOREVER_MS = 3_600_000.0
SHORT_MS = 20.0


def sizes(recorder: Recorder) -> list[int]:
    """The sizes of its batches."""
    return [len(batch) for batch in recorder.batches]


def test_items_of_one_linger_are_one_batch() -> None:
    """Put one by one, the first seen by the drain thread long before the last: one full batch."""
    recorder = Recorder()
    with make_queue(linger_ms=FOREVER_MS, max_batch=50) as queue:
        queue.add_handler(Red, recorder)
        parked(queue)
        for red in reds(50):
            queue.produce(red)
            parked_task(queue._core.tasks[0])  # it has seen the item, or sleeps on
        recorder.wait_for(50)
        assert sizes(recorder) == [50]
    assert recorder.items == reds(50)


def test_items_wait_no_longer_than_the_linger() -> None:
    """Less than a batch comes when the time is over, without another item."""
    recorder = Recorder()
    with make_queue(linger_ms=SHORT_MS) as queue:
        queue.add_handler(Red, recorder)
        queue.produce_many(reds(3))
        recorder.wait_for(3)
        assert sizes(recorder) == [3]


def test_full_batch_does_not_wait() -> None:
    """The producer that fills it wakes the drain thread, with an hour of linger left."""
    recorder = Recorder()
    with make_queue(linger_ms=FOREVER_MS, max_batch=10) as queue:
        queue.add_handler(Red, recorder)
        for red in reds(30):
            queue.produce(red)
        recorder.wait_for(30)
        assert sizes(recorder) == [10, 10, 10]


def test_full_batch_of_produce_many_does_not_wait() -> None:
    """The same where items are put together."""
    recorder = Recorder()
    with make_queue(linger_ms=FOREVER_MS, max_batch=10) as queue:
        queue.add_handler(Red, recorder)
        queue.produce_many(reds(7))
        queue.produce_many(reds(7, start=7))
        recorder.wait_for(10)
        assert sizes(recorder)[0] == 10
    assert recorder.items == reds(14)


def test_full_partition_does_not_wait() -> None:
    """A producer that waits for room gets it, though no batch is full."""
    recorder = Recorder()
    with make_queue(linger_ms=FOREVER_MS, buffer_size=5, max_batch=100) as queue:
        queue.add_handler(Red, recorder)
        for red in reds(11):
            assert queue.produce(red, timeout=WAIT_S)
        recorder.wait_for(10)
    assert recorder.items == reds(11)


def test_flush_does_not_wait_for_the_linger() -> None:
    """What was accepted before it is handled at once."""
    recorder = Recorder()
    with make_queue(linger_ms=FOREVER_MS) as queue:
        queue.add_handler(Red, recorder)
        queue.produce_many(reds(3))
        assert queue.flush(timeout=WAIT_S)
        assert recorder.items == reds(3)
        queue.produce(Red(3))
        assert queue.flush(timeout=WAIT_S)
        assert sizes(recorder) == [3, 1]


def test_shutdown_does_not_wait_for_the_linger() -> None:
    """The final drain takes everything as it is."""
    recorder = Recorder()
    with make_queue(linger_ms=FOREVER_MS) as queue:
        queue.add_handler(Red, recorder)
        queue.produce_many(reds(3))
        assert queue.shutdown(timeout=WAIT_S)
    assert recorder.items == reds(3)


def test_items_without_a_handler_do_not_wait() -> None:
    """They are dropped and counted at once."""
    with make_queue(linger_ms=FOREVER_MS) as queue:
        queue.produce(Green())
        assert queue.flush(timeout=WAIT_S)
        assert queue.stats().dropped["unregistered"] == 1


def test_lingering_class_does_not_hold_up_a_full_one() -> None:
    """Lanes of one partition are looked at one by one."""
    red, green = Recorder(), Recorder()
    with make_queue(linger_ms=FOREVER_MS, max_batch=10) as queue:
        queue.add_handler(Red, red)
        queue.add_handler(Green, green)
        queue.produce(Green(1))
        for item in reds(10):
            queue.produce(item)
        red.wait_for(10)
        assert green.batches == []
    assert green.items == [Green(1)]


def test_nothing_is_lost_between_many_producers() -> None:
    """Every item comes once, in order of its producer, whatever wakes the drain threads."""
    recorder, producers, per_producer = Recorder(), 4, 2_000
    with make_queue(
        linger_ms=1.0,
        max_batch=64,
        buffer_size=100,
        threads=ThreadPolicy.fixed(2),
        partitions=PartitionPolicy.fixed(2),
    ) as queue:
        queue.add_handler(Red, recorder)
        barrier = threading.Barrier(producers)

        def put(number: int) -> None:
            barrier.wait()
            for red in reds(per_producer, start=number * per_producer):
                queue.produce(red)

        for call in [spawn(put, number) for number in range(producers)]:
            call.result(WAIT_S)
    numbers = [red.number for red in recorder.items]
    assert sorted(numbers) == list(range(producers * per_producer))
    for start in range(0, producers * per_producer, per_producer):
        own = [number for number in numbers if start <= number < start + per_producer]
        assert own == sorted(own)


def test_on_idle_is_called_while_others_linger() -> None:
    """A handler that merges still passes on, next to one whose items wait."""
    idler = Idler()
    with make_queue(linger_ms=FOREVER_MS) as queue:
        queue.add_handler(Green, idler)
        queue.add_handler(Red, Recorder())
        queue.produce(Red(1))
        idler.wait_idle_from_now(2)


@pytest.mark.parametrize("linger_ms", [-1, float("nan"), "5"])
def test_linger_that_is_no_time_is_refused(linger_ms: float) -> None:
    """The message names the field."""
    with pytest.raises(ConfigError, match="linger_ms"):
        BatchQueueSettings(threads=ThreadPolicy.fixed(1), linger_ms=linger_ms)
