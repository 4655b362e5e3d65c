"""Idle drain threads: who is told, when, how often, and what a queue at rest costs."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest

from batchmill import (
    BatchQueueManager,
    BatchQueueSettings,
    PartitionPolicy,
    PartitionSelector,
    ThreadPolicy,
)
from batchmill.queue.partition import FailureLog
from batchmill.queue.task import DrainTask, current_task
from tests.kit.queues import Blue, Green, OverlapCheck, Recorder, Red, make_queue, reds
from tests.kit.threads import WAIT_S, Gate
from tests.queue.kit import Idler, Parking, messages

OFTEN: dict[str, Any] = {"min_idle_ms": 1, "max_idle_ms": 1}
"""Idle handlers are told every millisecond or so."""


@pytest.fixture
def delays(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Each wait that a drain task chose, in milliseconds as text, in order."""
    chosen: list[str] = []
    back_off = DrainTask._back_off_s

    def watched(task: DrainTask) -> float:
        delay = back_off(task)
        chosen.append(f"{delay * 1000:g}")
        return delay

    monkeypatch.setattr(DrainTask, "_back_off_s", watched)
    return chosen


def test_idle_handler_is_called() -> None:
    """A handler with on_idle() is told that there is nothing to do, though nothing ever was."""
    handler = Idler()
    with make_queue() as queue:
        queue.add_handler(Red, handler)
        handler.wait_idle()
    assert handler.events[0] == "idle"


def test_idle_handler_is_called_again_and_again() -> None:
    """on_idle() is a timer: it comes again for as long as nothing does."""
    handler = Idler()
    with make_queue(**OFTEN) as queue:
        queue.add_handler(Red, handler)
        handler.wait_idle(10)


def test_idle_handler_is_called_after_data() -> None:
    """When its items are consumed, a handler is told: it can pass on what it merged."""
    passed_on = threading.Event()

    class Merger(Recorder):
        def on_idle(self) -> None:
            if self.items:
                passed_on.set()

    with make_queue(min_idle_ms=60_000, max_idle_ms=60_000) as queue:
        queue.add_handler(Red, Merger())
        queue.produce(Red())
        assert passed_on.wait(WAIT_S)  # long before a timer would be due


def test_idle_direct_consumer_is_called() -> None:
    """A direct consumer with on_idle() is told too."""
    consumer = Idler()
    with make_queue(consumer=consumer):
        consumer.wait_idle()


def test_idle_direct_consumer_is_called_on_behalf_of_all_threads() -> None:
    """Of several drain tasks that are idle one tells it: on_idle() does not run beside itself."""
    tellers: list[DrainTask | None] = []

    class Consumer(Idler):
        def on_idle(self) -> None:
            tellers.append(current_task())
            super().on_idle()

    consumer = Consumer()
    with make_queue(
        **OFTEN,
        consumer=consumer,
        threads=ThreadPolicy.fixed(4),
        partitions=PartitionPolicy.fixed(4),
        selector=PartitionSelector.round_robin(),
    ) as queue:
        for _ in range(5):
            queue.produce_many(reds(4))  # each of the four has work, and then none
            assert queue.flush(WAIT_S)
            consumer.wait_idle_from_now(2)
        assert set(tellers) == {queue._core.tasks[0]}


def test_every_idle_handler_is_called() -> None:
    """All handlers with on_idle() are told, on whichever thread their class is."""
    handlers = {cls: Idler() for cls in (Red, Green, Blue)}
    with make_queue(threads=ThreadPolicy.fixed(2), partitions=PartitionPolicy.fixed(2)) as queue:
        for cls, handler in handlers.items():
            queue.add_handler(cls, handler)
        for handler in handlers.values():
            handler.wait_idle_from_now()


def test_idle_handler_of_two_classes_is_called_once() -> None:
    """In each idle round a handler is told once, not once for each of its classes."""
    events: list[str] = []
    twice, other = Idler(events, "twice"), Idler(events, "other")
    with make_queue(**OFTEN, partitions=PartitionPolicy.fixed(3)) as queue:
        queue.add_handler(Red, twice)
        queue.add_handler(Green, twice)
        queue.add_handler(Blue, other)
        other.wait_idle_from_now(6)
        heard = list(events)
    rounds = heard[heard.index("other") + 1 :]
    rounds = rounds[: len(rounds) // 2 * 2]
    assert rounds == ["twice", "other"] * (len(rounds) // 2)
    assert len(rounds) >= 8


def test_removed_handler_is_not_called_when_idle() -> None:
    """A handler that was removed has heard its last on_idle()."""
    removed, other = Idler(), Idler()
    with make_queue(**OFTEN) as queue:
        queue.add_handler(Red, removed)
        queue.add_handler(Green, other)
        removed.wait_idle()
        queue.remove_handler(Red)
        other.wait_idle_from_now(2)  # a round that had begun before is over
        times = removed.idle_count
        other.wait_idle_from_now(5)
        assert removed.idle_count == times


def test_idle_handler_is_called_while_it_keeps_one_of_two_classes() -> None:
    """A handler of two classes that loses the first is still told."""
    handler = Idler()
    with make_queue(**OFTEN, partitions=PartitionPolicy.fixed(2)) as queue:
        queue.add_handler(Red, handler)
        queue.add_handler(Green, handler)
        queue.remove_handler(Red)
        handler.wait_idle_from_now(3)


def test_on_idle_never_runs_beside_consume() -> None:
    """While a handler is in consume() on one thread, an idle thread does not tell it."""
    overlap, gate = OverlapCheck(), Gate()

    class Handler(Idler):
        def consume(self, batch: list[Any]) -> None:
            with overlap:
                gate.consume(batch)

        def on_idle(self) -> None:
            with overlap:
                super().on_idle()

    handler, other = Handler(), Idler()
    with make_queue(
        **OFTEN, threads=ThreadPolicy.fixed(2), partitions=PartitionPolicy.fixed(3)
    ) as queue:
        queue.add_handler(Red, handler)  # on the first thread, which therefore tells it
        queue.add_handler(Green, handler)  # on the second
        queue.add_handler(Blue, other)  # on the first again
        handler.wait_idle()
        queue.produce(Green())
        gate.wait_entered()
        other.wait_idle_from_now(10)  # the first thread had ten occasions
        assert overlap.overlaps == 0
        gate.open()
        handler.wait_idle_from_now()


def test_on_idle_may_produce() -> None:
    """What a handler merged can go on to the next queue from on_idle()."""
    arrived = threading.Event()
    with make_queue("second", consumer=lambda batch: arrived.set()) as second:

        class Merger(Recorder):
            def on_idle(self) -> None:
                if self.items:
                    second.produce(len(self.items))

        with make_queue("first") as first:
            first.add_handler(Red, Merger())
            first.produce(Red())
            assert arrived.wait(WAIT_S)


def test_error_in_on_idle_is_reported() -> None:
    """What on_idle() raises goes to the error handler, with an empty batch."""
    reported: list[tuple[list[Any], BaseException]] = []
    handled = threading.Event()

    class Failing(Recorder):
        def on_idle(self) -> None:
            raise ValueError("no idea")

    def report(batch: list[Any], error: BaseException) -> None:
        reported.append((batch, error))
        handled.set()

    with make_queue(error_handler=report) as queue:
        queue.add_handler(Red, Failing())
        assert handled.wait(WAIT_S)
    batch, error = reported[0]
    assert (batch, str(error)) == ([], "no idea")


def test_error_in_on_idle_is_not_logged_each_time(caplog: pytest.LogCaptureFixture) -> None:
    """One that fails every millisecond is logged once a minute; each failure is counted."""

    class Failing(Idler):
        def on_idle(self) -> None:
            super().on_idle()
            raise ValueError("no idea")

    handler = Failing()
    with make_queue(**OFTEN) as queue:
        queue.add_handler(Red, handler)
        handler.wait_idle(20)
        assert queue.stats().failed_idle_calls >= 19
    idle, last = messages(caplog)
    assert "1 time since the last message" in idle
    assert "failed in its last call" in last


def test_failures_are_reported_once_a_minute_with_their_count() -> None:
    """The first at once, the next after a minute with all that came meanwhile."""
    failures = FailureLog()
    assert [failures.count(now) for now in (5.0, 5.1, 64.9, 65.0, 65.1, 200.0)] == [
        1, 0, 0, 3, 0, 2,
    ]  # fmt: skip


def test_each_error_in_on_idle_goes_to_the_error_handler() -> None:
    """It decides itself what to do with repeats."""
    errors: list[BaseException] = []

    class Failing(Idler):
        def on_idle(self) -> None:
            super().on_idle()
            raise ValueError("no idea")

    class Reporter:
        def on_error(self, batch: list[Any], error: BaseException) -> None:
            errors.append(error)

    handler = Failing()
    with make_queue(**OFTEN, error_handler=Reporter()) as queue:
        queue.add_handler(Red, handler)
        handler.wait_idle(5)
    assert len(errors) >= 5


def test_error_in_on_idle_does_not_keep_others_from_theirs() -> None:
    """Another handler on that thread is told, again and again."""

    class Failing(Recorder):
        def on_idle(self) -> None:
            raise SystemExit

    other = Idler()
    with make_queue(**OFTEN, error_handler=lambda batch, error: None) as queue:
        queue.add_handler(Red, Failing())
        queue.add_handler(Green, other)
        other.wait_idle_from_now(5)


@pytest.mark.parametrize("partitions", [1, 2], ids=["same partition", "another partition"])
def test_idle_handler_is_called_while_its_thread_is_busy(partitions: int) -> None:
    """A thread that another class keeps busy for ever still tells those that have nothing."""
    stop = threading.Event()

    def endless(batch: list[Any]) -> None:
        if not stop.is_set():
            queue.produce_many(batch)
        started.set()

    handler, started = Idler(), threading.Event()
    with make_queue(**OFTEN, partitions=PartitionPolicy.fixed(partitions)) as queue:
        queue.add_handler(Red, handler)
        queue.add_handler(Green, endless)
        queue.produce(Green())
        assert started.wait(WAIT_S)  # from now on the thread has always something to do
        try:
            handler.wait_idle_from_now(3)
        finally:
            stop.set()


def test_busy_handler_gets_no_on_idle() -> None:
    """A handler that always has items is never told that it is idle."""
    stop, rounds = threading.Event(), threading.Semaphore(0)
    told_while_busy: list[bool] = []
    other = Idler()

    class Endless(Recorder):
        def consume(self, batch: list[Any]) -> None:
            if not stop.is_set():
                queue.produce_many(batch)
                rounds.release()

        def on_idle(self) -> None:
            told_while_busy.append(not stop.is_set())

    with make_queue(**OFTEN, max_batch=1) as queue:
        handler, gate = Endless(), Gate()
        queue.add_handler(Green, other)
        queue.add_handler(str, gate)
        queue.produce("hold the thread until the handler has items")
        gate.wait_entered()
        queue.add_handler(Red, handler)
        queue.produce_many(reds(10))
        gate.open()
        assert rounds.acquire(timeout=WAIT_S)
        other.wait_idle_from_now(3)  # so the thread did tell those that were idle
        stop.set()
        assert queue.flush(WAIT_S)
    assert True not in told_while_busy


def test_back_off_doubles_up_to_the_maximum(delays: list[str]) -> None:
    """Idle waits start at min_idle_ms and double with each idle cycle up to max_idle_ms."""
    handler = Idler()
    with make_queue(min_idle_ms=1, max_idle_ms=6) as queue:
        queue.add_handler(Red, handler)
        handler.wait_idle(7)
    assert delays[:6] == ["1", "2", "4", "6", "6", "6"]


def test_back_off_after_data_starts_at_the_minimum(delays: list[str]) -> None:
    """The first wait after data is min_idle_ms, not twice that, however long it was before."""

    class Handler(Idler):
        def consume(self, batch: list[Any]) -> None:
            delays.append("data")

    handler = Handler()
    with make_queue(min_idle_ms=1, max_idle_ms=6) as queue:
        queue.add_handler(Red, handler)
        handler.wait_idle(5)
        queue.produce(Red())
        assert queue.flush(WAIT_S)
        handler.wait_idle_from_now(4)
    after = delays.index("data") + 1
    assert delays[after : after + 3] == ["1", "2", "4"]


def test_plain_handlers_set_no_timer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where no handler has on_idle(), a drained queue sleeps without a timer."""
    parking = Parking(monkeypatch)
    with make_queue() as queue:
        queue.add_handler(Red, Recorder())
        queue.produce(Red())
        assert queue.flush(WAIT_S)
        parking.settle(queue)
        assert queue._core.scheduler._timers == []


@pytest.fixture
def neighbours(monkeypatch: pytest.MonkeyPatch) -> Iterator[Neighbours]:
    """Two queues on one thread."""
    made = Neighbours(monkeypatch)
    yield made
    made.manager.shutdown_all()


class Neighbours:
    """A queue on one thread with another whose idle handler is told every millisecond.

    That other queue is the clock: it shows that time has passed in which the thread was awake.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.parking = Parking(monkeypatch)
        self.manager = BatchQueueManager()
        self.clock = Idler()
        config = BatchQueueSettings(**OFTEN, shared_scheduler=("pool", ThreadPolicy.fixed(1)))
        self.resting = self.manager.create("resting", config)
        self.manager.create("ticking", config).add_handler(Red, self.clock)

    def idle_cycles_within(self, ticks: int) -> int:
        """How often the first queue looks for work while the other is told so often."""
        before = self.resting.stats().idle_cycles
        self.clock.wait_idle_from_now(ticks)
        return self.resting.stats().idle_cycles - before


def test_queue_at_rest_is_not_woken(neighbours: Neighbours) -> None:
    """While its neighbour is woken 50 times, a queue without idle handlers is not once."""
    neighbours.resting.add_handler(Red, Recorder())
    neighbours.resting.produce(Red())
    assert neighbours.resting.flush(WAIT_S)
    neighbours.parking.settle(neighbours.resting)
    assert neighbours.idle_cycles_within(50) == 0


def test_queue_with_an_idle_handler_is_woken(neighbours: Neighbours) -> None:
    """The same with an idle handler: it is woken about as often as its neighbour."""
    neighbours.resting.add_handler(Red, Idler())
    assert neighbours.idle_cycles_within(50) > 5


def test_queue_rests_when_its_last_idle_handler_goes(neighbours: Neighbours) -> None:
    """When the only handler with on_idle() is removed, the wake-ups end."""
    handler = Idler()
    neighbours.resting.add_handler(Red, handler)
    handler.wait_idle()
    neighbours.resting.remove_handler(Red)
    neighbours.parking.settle(neighbours.resting)
    neighbours.clock.wait_idle_from_now(5)  # a timer that was set before has gone off by then
    assert neighbours.idle_cycles_within(50) == 0


def test_handler_with_on_idle_joins_a_queue_at_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    """A handler with on_idle() that comes to a queue at rest is told."""
    parking = Parking(monkeypatch)
    with make_queue(**OFTEN) as queue:
        queue.add_handler(Red, Recorder())
        parking.settle(queue)
        handler = Idler()
        queue.add_handler(Green, handler)
        handler.wait_idle(3)


def test_lone_item_does_not_wait_out_the_back_off() -> None:
    """An item that comes in the middle of a minute's back-off is consumed at once."""
    handler = Idler()
    with make_queue(min_idle_ms=60_000, max_idle_ms=60_000) as queue:
        queue.add_handler(Red, handler)
        handler.wait_idle()
        queue.produce(Red())
        assert queue.flush(WAIT_S)


def test_shutdown_in_on_idle_does_not_deadlock() -> None:
    """A handler may decide in on_idle() that the queue has done its work."""
    shutdown_called = threading.Event()

    class Quitter(Recorder):
        def on_idle(self) -> None:
            queue.shutdown()
            shutdown_called.set()

    with make_queue() as queue:
        queue.add_handler(Red, Quitter())
        assert shutdown_called.wait(WAIT_S)
        assert queue.shutdown()
