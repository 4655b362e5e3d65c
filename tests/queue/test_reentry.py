"""What a handler may ask of its own queue: it is answered or refused, and never hangs."""

from __future__ import annotations

from typing import Any

import pytest

from batchmill import (
    BatchQueue,
    BatchQueueManager,
    BatchQueueSettings,
    ThreadPolicy,
    WouldDeadlockError,
)
from tests.kit.queues import Recorder, Scripted, new_queue, owners, rebalance_now
from tests.kit.threads import WAIT_S, Gate, until
from tests.queue.kit import A, B, lane_of, partition_of


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


def test_produce_where_there_is_room() -> None:
    """A handler may produce to its own partition while there is room."""
    queue = new_queue(buffer_size=2)
    assert _answers(queue, lambda: queue.produce(A())) is True


def test_produce_to_its_own_full_partition() -> None:
    """A handler that would wait for itself gets an error instead."""
    queue = new_queue(buffer_size=2)
    answer = _answers(queue, lambda: [queue.produce(A()) for _ in range(3)])
    assert isinstance(answer, WouldDeadlockError)


def test_produce_many_beyond_what_its_own_partition_holds() -> None:
    """A handler that puts more at once than there is room for does not wait for itself."""
    queue = new_queue(buffer_size=2)
    answer = _answers(queue, lambda: queue.produce_many([A() for _ in range(5)]))
    assert answer == 2 or isinstance(answer, WouldDeadlockError)


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


def test_produce_to_a_full_neighbour_on_the_same_thread() -> None:
    """A handler that puts to a full queue of its own one-thread scheduler is refused, not hung.

    One queue feeding the next on a shared scheduler is the everyday case.
    """
    manager = BatchQueueManager()
    config = BatchQueueSettings(
        shared_scheduler=("one", ThreadPolicy.fixed(1)),
        buffer_size=1,
        shutdown_timeout_ms=WAIT_S * 1000,
    )
    first, second = manager.create("first", config), manager.create("second", config)
    answers: list[object] = []

    def handler(batch: list[A]) -> None:
        try:
            answers.append([second.produce(B()), second.produce(B())])
        except WouldDeadlockError as error:
            answers.append(error)

    second.add_handler(B, Recorder())
    first.add_handler(A, handler)
    first.produce(A())
    finished = first.flush(WAIT_S / 3)
    second._core.begin_close()
    assert manager.shutdown_all()
    assert finished, "the handler waits for its own thread"
    assert isinstance(answers[0], WouldDeadlockError)
