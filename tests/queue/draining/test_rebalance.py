"""Partitions change hands between two cycles of their owner; nothing is lost or out of order."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Sequence
from typing import Any

import pytest

from batchmill import BatchQueue, DrainBalancer, PartitionPolicy
from batchmill.queue.task import DrainTask, current_task
from tests.kit.queues import (
    Recorder,
    Scripted,
    make_queue,
    new_queue,
    owners,
    rebalance_now,
    settled,
)
from tests.kit.threads import WAIT_S, Gate, spawn, until
from tests.queue.kit import A, B, lane_of, parked, parked_task, partition_of


def _classes(count: int) -> list[type]:
    return [type(f"Item{index}", (), {}) for index in range(count)]


def _move_all(queue: BatchQueue[Any], balancer: Scripted) -> list[int]:
    """Ask every partition to move to the next task; the plan."""
    threads = len(queue._core.tasks)
    balancer.plan = [(owner + 1) % threads for owner in owners(queue)]
    rebalance_now(queue)
    return list(balancer.plan)


def test_new_owner_waits_for_the_old_ones_cycle() -> None:
    """While the old owner is in the handler nobody else drains the partition."""
    balancer = Scripted()
    tasks: list[DrainTask | None] = []

    class TaskRecorder(Recorder):
        def consume(self, batch: list[Any]) -> None:
            tasks.append(current_task())
            super().consume(batch)

    with (
        make_queue(threads=2, partitions=2, balancer=balancer, max_batch=1) as queue,
        Gate() as gate,
    ):
        recorder = TaskRecorder(gate)
        other = Recorder()
        queue.add_handler(A, recorder)
        queue.add_handler(B, other)
        first, second = A(), A()
        queue.produce(first)
        gate.wait_entered()
        queue.produce(second)
        here, there = lane_of(queue, A).partition, lane_of(queue, B).partition
        old, new = here.owner, there.owner
        plan = balancer.plan = [new.index] * 2
        rebalance_now(queue)
        for count in range(1, 4):
            queue.produce(B())
            other.wait_for(count)  # the new owner has its turns meanwhile
            parked_task(new)
        assert here.owner is old
        assert lane_of(queue, A).buffer == [second]
        gate.open()
        settled(queue, plan)
        assert recorder.wait_for(2) == [first, second]
        assert recorder.overlaps == 0
        assert tasks == [old, new]


def test_moved_partitions_are_counted() -> None:
    """Stats say how often the balancer moved something, and how many partitions in all."""
    balancer = Scripted()
    with make_queue(threads=2, partitions=5, balancer=balancer) as queue:
        settled(queue, _move_all(queue, balancer))
        balancer.plan = owners(queue)
        rebalance_now(queue)
        balancer.plan = [0] * 5
        moving = sum(owners(queue))
        rebalance_now(queue)
        settled(queue, [0] * 5)
        stats = queue.stats()
        assert (stats.rebalances, stats.moved_partitions) == (2, 5 + moving)
        assert [load.partitions for load in stats.threads] == [5, 0]


def test_order_across_moves() -> None:
    """A class keeps its order while its partition goes from task to task with items in it."""
    balancer = Scripted()
    with make_queue(threads=3, partitions=3, balancer=balancer, max_batch=2) as queue:
        recorder = Recorder()
        queue.add_handler(int, recorder)
        queue.add_handler(str, Recorder())
        for start in range(0, 3000, 30):
            assert queue.produce_many(list(range(start, start + 30))) == 30
            _move_all(queue, balancer)
        assert queue.flush(WAIT_S)
        assert recorder.items == list(range(3000))
        assert recorder.overlaps == 0
        assert queue.stats().moved_partitions > 0


def test_growth_after_a_rebalance() -> None:
    """Partitions added after a rebalance, and those that were moved, all have an owner who drains.

    The seeds' design left the moved ones to nobody.
    """
    balancer = Scripted()
    classes = _classes(40)
    recorder = Recorder()
    with make_queue(threads=4, partitions=PartitionPolicy.adaptive(), balancer=balancer) as queue:
        for cls in classes[:8]:
            queue.add_handler(cls, recorder)
        settled(queue, _move_all(queue, balancer))
        for cls in classes[8:]:
            queue.add_handler(cls, recorder)
        assert len(queue._core.layout.partitions) == 40
        for cls in classes:
            assert queue.produce(cls())
        assert queue.flush(WAIT_S)
        assert sorted(type(item).__name__ for item in recorder.items) == sorted(
            cls.__name__ for cls in classes
        )


def test_growth_during_a_hand_over() -> None:
    """Partitions added while others wait to be handed over leave none without an owner."""
    balancer = Scripted()
    classes = _classes(16)
    with (
        make_queue(threads=2, partitions=PartitionPolicy.adaptive(), balancer=balancer) as queue,
        Gate() as gate,
    ):
        held, recorder = Recorder(gate), Recorder()
        queue.add_handler(A, held)
        queue.add_handler(B, held)
        queue.produce(A())
        gate.wait_entered()  # its task cannot hand anything over now
        plan = _move_all(queue, balancer)
        for cls in classes:
            queue.add_handler(cls, recorder)
        for cls in classes:
            assert queue.produce(cls())
        gate.open()
        until(lambda: owners(queue)[: len(plan)] == plan, "the hand-over is finished")
        queue.produce(B())
        assert queue.flush(WAIT_S)
        assert len(recorder.items) == 16
        assert len(held.items) == 2


def test_second_plan_replaces_the_first() -> None:
    """A plan made before the last one was carried out replaces it; nothing is stuck halfway."""
    balancer = Scripted()
    with make_queue(threads=3, partitions=3, balancer=balancer) as queue, Gate() as gate:
        recorder = Recorder(gate)
        queue.add_handler(A, recorder)
        queue.produce(A())
        gate.wait_entered()
        here = lane_of(queue, A).partition
        start = here.owner.index
        for target in ((start + 1) % 3, (start + 2) % 3, start):
            balancer.plan = owners(queue)
            balancer.plan[here.index] = target
            rebalance_now(queue)
        queue.produce(A())
        gate.open()
        recorder.wait_for(2)
        assert here.owner.index == start
        assert queue.stats().moved_partitions == 0


@pytest.mark.parametrize(
    "answer",
    [
        [0],
        [0, 0, 0],
        [0, 2],
        [-1, 0],
        [0, "1"],
        [True, False],
        "01",
        None.__class__,
        42,
    ],
    ids=repr,
)
def test_bad_answers_are_ignored(answer: Any, caplog: pytest.LogCaptureFixture) -> None:
    """An answer that is no plan moves nothing and is warned of; the queue works on."""
    balancer = Scripted(lambda loads, owners, threads: answer)
    recorder = Recorder()
    with make_queue(threads=2, partitions=2, balancer=balancer) as queue:
        queue.add_handler(A, recorder)
        before = owners(queue)
        with caplog.at_level(logging.WARNING, "batchmill.queue"):
            rebalance_now(queue)
        assert [record.levelname for record in caplog.records] == ["WARNING"]
        queue.produce(A())
        recorder.wait_for(1)
        assert owners(queue) == before
        assert queue.stats().rebalances == 0


def test_raising_balancer_is_ignored(caplog: pytest.LogCaptureFixture) -> None:
    """A balancer that raises moves nothing and is reported; the queue works on."""

    def fail(loads: Sequence[float], owners: Sequence[int], threads: int) -> Sequence[int]:
        raise ZeroDivisionError

    recorder = Recorder()
    with make_queue(
        threads=2, partitions=2, balancer=Scripted(fail), rebalance_interval_ms=0.001
    ) as queue:
        queue.add_handler(A, recorder)
        with caplog.at_level(logging.WARNING, "batchmill.queue"):
            for count in range(1, 6):
                queue.produce(A())
                recorder.wait_for(count)
                parked(queue)
        assert caplog.records
        assert all("balancer failed" in record.message for record in caplog.records)


def test_single_thread_asks_nobody() -> None:
    """With one drain thread there is nothing to balance: the balancer is never asked."""
    balancer, recorder = Scripted(), Recorder()
    with make_queue(partitions=3, balancer=balancer, rebalance_interval_ms=0.001) as queue:
        queue.add_handler(A, recorder)
        for _ in range(20):
            queue.produce(A())
            assert queue.flush(WAIT_S)
    assert balancer.calls == []


def test_the_balancer_is_called_while_there_is_traffic() -> None:
    """With several threads the balancer is asked by the drain threads themselves."""
    balancer, recorder = Scripted(), Recorder()
    with make_queue(
        threads=2, partitions=2, balancer=balancer, rebalance_interval_ms=0.001
    ) as queue:
        queue.add_handler(A, recorder)
        queue.produce(A())
        assert queue.flush(WAIT_S)
        until(lambda: balancer.calls, "the balancer is asked")


def test_throughput_weighted_parts_two_hot_partitions() -> None:
    """Two classes that keep one thread busy while another is idle end up on different threads."""
    classes = _classes(4)
    with make_queue(
        threads=2, partitions=4, balancer=DrainBalancer.throughput_weighted(), max_batch=10
    ) as queue:
        recorders = {cls: Recorder() for cls in classes}
        for cls, recorder in recorders.items():
            queue.add_handler(cls, recorder)
        hot = [cls for cls in classes if lane_of(queue, cls).partition.owner.index == 0]
        assert len(hot) == 2
        for cls in hot:
            queue.produce_many([cls() for _ in range(500)])
        assert queue.flush(WAIT_S)
        for partition in queue._core.layout.partitions:
            partition.busy_ns = partition.drained * 1000  # the same cost for every item
        rebalance_now(queue)
        until(
            lambda: len({lane_of(queue, cls).partition.owner for cls in hot}) == 2,
            "the hot classes are parted",
        )


def test_balancer_may_look_at_the_queue() -> None:
    """A balancer may read the stats of the queue it balances."""
    seen = []

    def look(loads: Sequence[float], owners: Sequence[int], threads: int) -> Sequence[int]:
        seen.append(queue.stats().accepted)
        return owners

    queue = new_queue(threads=2, partitions=2, balancer=Scripted(look))
    asking = spawn(rebalance_now, queue)
    try:
        asking.result(WAIT_S / 3)
    except TimeoutError:
        queue._core.layout.lock.release()  # it waits for a lock that it holds: help it out
        with contextlib.suppress(RuntimeError):
            asking.result()
        pytest.fail("the balancer waits for itself")
    finally:
        queue.shutdown()
    assert seen == [0]


def test_handler_registered_anew_while_it_runs() -> None:
    """A handler that is removed and added again while it runs is not entered a second time.

    Its new class lives on another task: only the handler's own lock keeps the two apart.
    """
    first, second = A, B
    with make_queue(threads=2, partitions=2) as queue, Gate() as gate:
        recorder, marker = Recorder(gate), Recorder()
        queue.add_handler(first, recorder)
        queue.add_handler(second, marker)
        assert lane_of(queue, first).partition is not lane_of(queue, second).partition
        queue.produce(first())
        gate.wait_entered()
        assert queue.remove_handler(first)
        assert queue.remove_handler(second)
        queue.add_handler(second, recorder)
        queue.produce(second())
        task = lane_of(queue, second).partition.owner
        until(
            lambda: recorder.entries > 1 or (task._submitted and task._run_lock.locked()),
            "the other task comes to the handler",
        )
        queue.produce(second())
        until(lambda: recorder.entries > 1 or task._run_lock.locked(), "it is there")
        gate.open()
        recorder.wait_for(3)
        assert recorder.overlaps == 0


def test_idle_handler_moves_with_its_partition() -> None:
    """A handler is told of idleness by whoever owns its partition, one at a time."""
    balancer = Scripted()

    class Idler(Recorder):
        idle_calls = threading.Semaphore(0)

        def on_idle(self) -> None:
            with self.check:
                self.idle_calls.release()

    handler = Idler()
    with make_queue(
        threads=2, partitions=2, balancer=balancer, min_idle_ms=1, max_idle_ms=1
    ) as queue:
        queue.add_handler(A, handler)
        for _ in range(10):
            settled(queue, _move_all(queue, balancer))
            queue.produce(A())
            assert handler.idle_calls.acquire(timeout=WAIT_S)
    assert handler.overlaps == 0
    assert len(handler.items) == 10


def test_saturated_partition_lets_others_move() -> None:
    """A partition that never runs dry does not keep its task from handing another one over."""
    balancer = Scripted()
    stop = Gate()
    with stop, make_queue(threads=2, partitions=4, balancer=balancer, max_batch=5) as queue:
        classes = _classes(4)
        recorders = {cls: Recorder() for cls in classes}
        for cls, recorder in recorders.items():
            queue.add_handler(cls, recorder)
        busy, *_ = classes
        here = lane_of(queue, busy).partition

        def saturate() -> None:
            while not stop.is_open:
                queue.produce(busy())

        producer = spawn(saturate)
        recorders[busy].wait_for(100)
        for _ in range(5):
            balancer.plan = [
                owner if index == here.index else 1 - owner
                for index, owner in enumerate(owners(queue))
            ]
            rebalance_now(queue)
            settled(queue, balancer.plan)
        stop.open()
        producer.result()
    assert queue._core.done.wait(WAIT_S), "the queue ends"
    assert partition_of(queue).out == 0


def test_hanging_handler_starves_only_itself() -> None:
    """While a handler hangs on one task, another task that has items for it serves its others."""
    with make_queue(threads=2, partitions=2) as queue, Gate() as gate:
        hanging, other = Recorder(gate), Recorder()
        queue.add_handler(A, hanging)
        queue.add_handler(B, hanging)
        assert lane_of(queue, A).partition.owner is not lane_of(queue, B).partition.owner
        queue.add_handler(int, other)
        queue.add_handler(str, Recorder())
        beside = next(
            cls
            for cls in (int, str)
            if lane_of(queue, cls).partition is lane_of(queue, B).partition
        )
        if beside is str:
            queue.remove_handler(str)
            queue.remove_handler(int)
            queue.add_handler(str, other)
        queue.produce(A())
        gate.wait_entered()
        queue.produce(B())
        for count in range(1, 31):
            queue.produce(beside())
            other.wait_for(count, WAIT_S / 3)
        assert hanging.entries == 1
