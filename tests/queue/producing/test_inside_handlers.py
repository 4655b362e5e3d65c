"""Calls of a handler on its own queue: they work, or raise where they would hang."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest

from batchmill import (
    BatchQueue,
    BatchQueueManager,
    BatchQueueSettings,
    BufferStrategy,
    PartitionPolicy,
    ThreadPolicy,
    WouldDeadlockError,
)
from tests.kit.queues import (
    Green,
    Recorder,
    Red,
    Scripted,
    fill,
    make_queue,
    new_queue,
    owners,
    rebalance_now,
    reds,
)
from tests.kit.threads import WAIT_S, Gate, until
from tests.queue.kit import A, B, lane_of, partition_of

IF_POSSIBLE = BufferStrategy.IF_POSSIBLE


class Inside(Recorder):
    """A handler that, with its first batch, makes a call and keeps what came of it."""

    def __init__(self, call: Callable[[], object]) -> None:
        super().__init__()
        self._call: Callable[[], object] | None = call
        self._over = threading.Event()
        self.outcome: object = None

    def consume(self, batch: list[Any]) -> None:
        super().consume(batch)
        if self._call is not None:
            call, self._call = self._call, None
            try:
                self.outcome = call()
            except WouldDeadlockError as error:
                self.outcome = error
            self._over.set()

    def over(self) -> bool:
        """Whether the call returned or raised, and did not hang."""
        return self._over.wait(WAIT_S)


def test_handler_may_produce() -> None:
    """Inside a handler of the queue, produce() works where there is room."""
    handler = Inside(lambda: queue.produce(Red(1)))
    with make_queue(consumer=handler, buffer_size=1) as queue:
        queue.produce(Red(0))
        assert handler.over()
        assert handler.outcome is True
    assert handler.items == reds(2)


def test_produce_on_its_own_full_partition_would_deadlock() -> None:
    """A handler that would wait for itself gets an error instead, which names queue and call."""
    handler = Inside(lambda: [queue.produce(item) for item in reds(9)])
    with make_queue("own", consumer=handler, buffer_size=4) as queue:
        queue.produce(Red())
        assert handler.over()
    error = handler.outcome
    assert isinstance(error, WouldDeadlockError)
    assert (error.name, error.call) == ("own", "produce() on a full partition")


def test_queue_goes_on_after_a_would_be_deadlock() -> None:
    """What got in before the error is consumed."""
    handler = Inside(lambda: [queue.produce(item) for item in reds(9)])
    with make_queue(consumer=handler, buffer_size=4) as queue:
        queue.produce(Red(-1))
        assert handler.over()
        assert queue.flush(WAIT_S)
    assert handler.items == [Red(-1), *reds(4)]


@pytest.mark.parametrize("timeout", [0, 600.0])
def test_timeout_inside_a_handler_is_an_answer(timeout: float) -> None:
    """With a timeout, of any length, the answer inside the handler is False, and at once."""
    handler = Inside(lambda: [queue.produce(item, timeout) for item in reds(6)])
    with make_queue(consumer=handler, buffer_size=4) as queue:
        queue.produce(Red())
        assert handler.over()
        assert handler.outcome == [True] * 4 + [False] * 2


def test_if_possible_inside_a_handler_is_an_answer() -> None:
    """IF_POSSIBLE drops inside a handler as it does outside."""
    handler = Inside(lambda: [queue.produce(item) for item in reds(6)])
    with make_queue(consumer=handler, buffer_size=4, strategy=IF_POSSIBLE) as queue:
        queue.produce(Red())
        assert handler.over()
        assert handler.outcome == [True] * 4 + [False] * 2


def test_produce_many_inside_a_handler_puts_what_fits() -> None:
    """More items at once than there is room for: the answer is how many got in, and no wait."""
    handler = Inside(lambda: queue.produce_many(reds(9)))
    with make_queue(consumer=handler, buffer_size=4) as queue:
        queue.produce(Red(-1))
        assert handler.over(), "the handler waits for itself"
        assert handler.outcome == 4
        assert queue.flush(WAIT_S)
        assert queue.stats().dropped["full"] == 5
    assert handler.items == [Red(-1), *reds(4)]


def test_produce_many_on_its_own_full_partition_would_deadlock() -> None:
    """With no room at all it is an error, as for a single item."""
    handler = Inside(lambda: (fill(queue), queue.produce_many(reds(2))))
    with make_queue(consumer=handler, buffer_size=4) as queue:
        queue.produce(Red())
        assert handler.over(), "the handler waits for itself"
        assert isinstance(handler.outcome, WouldDeadlockError)


def test_produce_to_a_class_of_the_same_handler_would_deadlock() -> None:
    """The other class is on another thread, but that thread needs this handler to return."""
    handler = Inside(lambda: [queue.produce(Green(number)) for number in range(9)])
    with make_queue(
        threads=ThreadPolicy.fixed(2), partitions=PartitionPolicy.fixed(2), buffer_size=4
    ) as queue:
        queue.add_handler(Red, handler)
        queue.add_handler(Green, handler)
        queue.produce(Red())
        assert handler.over(), "the handler waits for itself"
        assert isinstance(handler.outcome, WouldDeadlockError)


def test_produce_to_a_queue_on_the_same_thread_would_deadlock() -> None:
    """Two queues share a pool of one thread: a handler of one cannot wait for the other."""
    manager = BatchQueueManager()
    pool = ("single", ThreadPolicy.fixed(1))
    handler = Inside(lambda: [second.produce(item) for item in reds(9)])
    config = BatchQueueSettings(shared_scheduler=pool, consumer=Recorder(), buffer_size=4)
    second = manager.create("second", config)
    first = manager.create("first", BatchQueueSettings(shared_scheduler=pool, consumer=handler))
    try:
        first.produce(Red())
        assert handler.over(), "the thread waits for itself"
        assert isinstance(handler.outcome, WouldDeadlockError)
    finally:
        manager.shutdown_all()


def test_handlers_that_wait_for_each_other_would_deadlock() -> None:
    """Two handlers on two threads, each waiting for room that the other would make: an error."""
    together = threading.Barrier(2)

    def flood(cls: type) -> list[bool]:
        together.wait(WAIT_S)
        return [queue.produce(cls(number)) for number in range(9)]

    red, green = Inside(lambda: flood(Green)), Inside(lambda: flood(Red))
    with make_queue(
        threads=ThreadPolicy.fixed(2), partitions=PartitionPolicy.fixed(2), buffer_size=4
    ) as queue:
        queue.add_handler(Red, red)
        queue.add_handler(Green, green)
        queue.produce(Red())
        queue.produce(Green())
        assert red.over()
        assert green.over()
    assert any(isinstance(side.outcome, WouldDeadlockError) for side in (red, green))


def test_produce_inside_a_handler_waits_for_another_thread() -> None:
    """A class that another thread drains is no deadlock: the handler waits and gets through."""
    recorder = Recorder()
    handler = Inside(lambda: [queue.produce(Green(number)) for number in range(200)])
    with make_queue(
        threads=ThreadPolicy.fixed(2), partitions=PartitionPolicy.fixed(2), buffer_size=4
    ) as queue:
        queue.add_handler(Red, handler)
        queue.add_handler(Green, recorder)
        queue.produce(Red())
        assert handler.over()
        assert handler.outcome == [True] * 200
    assert len(recorder.items) == 200


def test_produce_inside_a_handler_of_a_closing_queue_is_refused() -> None:
    """During the final drain the answer is False, as for all, though the partition is full."""
    gate = Gate()

    def answer() -> object:
        gate.consume([])
        return queue.produce(Red())

    handler = Inside(answer)
    with make_queue(consumer=handler, buffer_size=4) as queue:
        queue.produce(Red())
        gate.wait_entered()
        fill(queue)
        queue._core.begin_close()
        gate.open()
        assert handler.over()
        assert handler.outcome is False


def _answers(queue: BatchQueue[Any], ask: Any) -> Any:
    """What ``ask`` answers, or raises, when it is called inside a handler of ``queue``."""
    answers: list[Any] = []

    def handler(batch: list[A]) -> None:
        if not answers:
            try:
                answers.append(ask())
            except WouldDeadlockError as error:
                answers.append(error)

    queue.add_handler(A, handler)
    queue.produce(A())
    finished = queue.flush(WAIT_S / 3)
    queue.shutdown()
    assert finished, "the handler hangs"
    return answers[0]


def test_produce_many_with_a_timeout() -> None:
    """With a timeout it is told how many got in, at once."""
    queue = new_queue(buffer_size=2)
    assert _answers(queue, lambda: queue.produce_many([A() for _ in range(5)], timeout=60)) == 2


def test_last_slot_goes_to_somebody_else() -> None:
    """A handler that finds room, and loses it to another producer, does not wait for itself."""
    queue = new_queue(buffer_size=1)
    partition = partition_of(queue)

    def lose_the_slot() -> bool:
        class Stolen:
            """The lock of the partition, which another producer takes first."""

            def __init__(self, lock: Any) -> None:
                self.lock = lock

            def __enter__(self) -> None:
                partition.lock = self.lock
                assert partition.admit(lane_of(queue, A), [A()]) == 1
                self.lock.acquire()

            def __exit__(self, *_: object) -> None:
                self.lock.release()

        partition.tokens.clear()
        partition.reserve = 1
        partition.lock = Stolen(partition.lock)  # type: ignore[assignment]
        return queue.produce(A())

    assert isinstance(_answers(queue, lose_the_slot), WouldDeadlockError)


def test_flush_inside_a_handler() -> None:
    """flush() inside a handler is refused."""
    queue = new_queue()
    assert isinstance(_answers(queue, queue.flush), WouldDeadlockError)


def test_partition_moves_to_a_task_that_waits_for_it() -> None:
    """A handler that waits for room in another task's partition does not hang when it is moved.

    Moved, that is, to the very task whose handler waits.
    """
    balancer = Scripted()
    answers: list[object] = []
    queue = new_queue(threads=2, partitions=2, buffer_size=1, balancer=balancer)
    with Gate() as before, Gate() as draining:

        def handler(batch: list[A]) -> None:
            before.wait()
            try:
                answers.append(queue.produce(B()))
            except WouldDeadlockError as error:
                answers.append(error)

        queue.add_handler(A, handler)
        queue.add_handler(B, Recorder(draining))
        full = lane_of(queue, B).partition
        queue.produce(A())
        before.wait_entered()
        queue.produce(B())
        draining.wait_entered()
        queue.produce(B())
        before.open()
        until(lambda: full.waiters, "the handler waits for room")
        waiting = lane_of(queue, A).partition.owner.index
        balancer.plan = [waiting] * 2
        rebalance_now(queue)
        assert owners(queue) != balancer.plan
        draining.open()
        finished = queue.flush(WAIT_S / 3)
    queue.shutdown()
    assert finished, "the handler waits for its own task"
    assert len(answers) == 1


def test_add_and_remove_handlers_inside_a_handler() -> None:
    """A handler may change who handles what."""
    queue = new_queue()

    def change() -> bool:
        queue.add_handler(B, Recorder())
        return queue.remove_handler(B)

    assert _answers(queue, change) is True


def test_stats_inside_a_handler() -> None:
    """A handler may read the stats, and finds its own batch in them."""
    queue = new_queue()
    assert _answers(queue, lambda: queue.stats().in_handlers) == 1


@pytest.mark.parametrize("size", [1, 3])
def test_handler_feeds_itself(size: int) -> None:
    """A handler that puts one item for each it gets, in a full-size loop, ends when it stops."""
    left = 200
    queue = new_queue(buffer_size=size, max_batch=1)

    def handler(batch: list[A]) -> None:
        nonlocal left
        if left:
            left -= 1
            assert queue.produce(A())

    queue.add_handler(A, handler)
    with queue:
        queue.produce(A())
        until(lambda: left == 0, "the loop ends")
    assert queue.stats().consumed == 201
