"""A parked queue costs nothing, and the next item wakes it, whatever the interleaving."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any

import pytest

from batchmill import BatchQueue
from tests.kit.queues import Recorder, Scripted, make_queue, owners, rebalance_now, settled
from tests.kit.threads import WAIT_S, Gate, spawn
from tests.queue.kit import A, B, HeldSlot, lane_of, parked, partition_of


async def _aproduce(queue: BatchQueue[Any], item: object) -> int:
    return await queue.aproduce(item)


async def _aproduce_many(queue: BatchQueue[Any], item: object) -> int:
    return await queue.aproduce_many([item])


WAYS: dict[str, Callable[[BatchQueue[Any], object], int]] = {
    "produce": lambda queue, item: queue.produce(item),
    "produce_many": lambda queue, item: queue.produce_many([item]),
    "aproduce": lambda queue, item: asyncio.run(_aproduce(queue, item)),
    "aproduce_many": lambda queue, item: asyncio.run(_aproduce_many(queue, item)),
}
every_way = pytest.mark.parametrize("way", WAYS.values(), ids=WAYS.keys())


@every_way
def test_first_item_wakes_a_parked_queue(way: Callable[[BatchQueue[Any], object], int]) -> None:
    """A lone item on a parked queue is consumed, by whichever method it comes."""
    recorder = Recorder()
    with make_queue() as queue:
        queue.add_handler(A, recorder)
        parked(queue)
        assert way(queue, A()) == 1
        recorder.wait_for(1)


@every_way
def test_every_lone_item_wakes(way: Callable[[BatchQueue[Any], object], int]) -> None:
    """Parking and waking can be repeated: each lone item is consumed before the next is put."""
    recorder = Recorder()
    with make_queue(threads=2, partitions=4) as queue:
        queue.add_handler(A, recorder)
        for count in range(1, 31):
            parked(queue)
            assert way(queue, A()) == 1
            recorder.wait_for(count)


def test_item_of_an_unknown_class_wakes_a_parked_queue() -> None:
    """The first item of a class that has no lane yet is drained too (dropped, and counted)."""
    with make_queue() as queue:
        parked(queue)
        assert queue.produce(B())
        assert queue.flush(20)
        assert queue.stats().dropped["unregistered"] == 1


def test_slot_taken_before_arming() -> None:
    """An item whose slot was taken before the thread tried to park, and put after, is consumed.

    Its producer holds an ordinary slot, so it wakes nobody: the thread has to notice the slot.
    """
    recorder = Recorder()
    with make_queue(buffer_size=64) as queue:
        queue.add_handler(A, recorder)
        queue.produce_many([A(), A()])  # leaves ordinary slots at hand
        recorder.wait_for(2)
        parked(queue)
        partition_of(queue).tokens.pop()  # the wake token goes to somebody who is not heard from
        partition_of(queue).reserve += 1  # and gives its slot back
        with HeldSlot(queue, A) as held:
            producer = spawn(queue.produce, A())
            held.wait_taken()
            assert held.token is None, "this test is about an ordinary slot"
            before = queue.stats().idle_cycles
            for _ in range(3):  # the thread looks, and tries to park
                queue._core.tasks[0]._unarmed.add(partition_of(queue))
                queue._core.wake_tasks()
            while queue.stats().idle_cycles < before + 3:
                queue._core.wake_tasks()
            held.let_go()
            assert producer.result()
        recorder.wait_for(3)


def test_late_wake_of_an_earlier_token() -> None:
    """A producer that wakes long after its item was drained takes no later item's wake away.

    It took the wake token and put its item; the thread, woken by somebody else, drains the item
    and parks again; only then the producer wakes.
    """
    recorder = Recorder()
    with make_queue(buffer_size=64) as queue:
        queue.add_handler(A, recorder)
        partition = partition_of(queue)
        parked(queue)
        token = partition.tokens.pop()
        assert token is partition
        lane_of(queue, A).buffer.append(A())
        queue._core.wake_tasks()
        recorder.wait_for(1)
        parked(queue)
        partition.wake_owner()
        parked(queue)
        assert queue.produce_many([A(), A()]) == 2
        recorder.wait_for(3)


def test_parked_queue_does_not_poll() -> None:
    """A parked queue has no timer, and its idle cycles stand still."""
    with make_queue(threads=2, partitions=4, min_idle_ms=1, max_idle_ms=1) as queue:
        recorder = Recorder()
        queue.add_handler(A, recorder)
        queue.produce(A())
        recorder.wait_for(1)
        parked(queue)
        cycles = queue.stats().idle_cycles
        assert queue._core.scheduler._fire_timers(0) is None
        assert queue._core.scheduler._timers == []
        parked(queue)
        assert queue.stats().idle_cycles == cycles


@every_way
def test_armed_partition_changes_hands(way: Callable[[BatchQueue[Any], object], int]) -> None:
    """A partition that was armed by one task and handed to another wakes the new owner."""
    balancer = Scripted()
    recorder = Recorder()
    with make_queue(threads=2, partitions=2, balancer=balancer) as queue:
        queue.add_handler(A, recorder)
        for count in range(1, 11):
            parked(queue)
            balancer.plan = [1 - owner for owner in owners(queue)]
            rebalance_now(queue)
            settled(queue, balancer.plan)
            assert way(queue, A()) == 1
            recorder.wait_for(count)


def test_wake_meets_hand_over() -> None:
    """A producer that took the wake token under the old owner and puts under the new is heard."""
    balancer = Scripted()
    recorder = Recorder()
    with make_queue(threads=2, partitions=2, balancer=balancer) as queue:
        queue.add_handler(A, recorder)
        parked(queue)
        with HeldSlot(queue, A) as held:
            lane_of(queue, A).partition.arm()
            producer = spawn(queue.produce, A())
            held.wait_taken()
            assert held.token is not None
            balancer.plan = [1 - owner for owner in owners(queue)]
            rebalance_now(queue)
            settled(queue, balancer.plan)
            held.let_go()
            assert producer.result()
        recorder.wait_for(1)


@pytest.mark.parametrize("attempt", range(8))
def test_timer_is_kept_while_the_other_thread_is_busy(attempt: int) -> None:
    """An idle handler goes on being told so while another class keeps the other thread busy.

    Which of the two threads gets the other class is chance, hence the attempts.
    """
    idle_calls = threading.Semaphore(0)

    class Idler:
        def consume(self, batch: list[Any]) -> None: ...

        def on_idle(self) -> None:
            idle_calls.release()

    with make_queue(threads=2, partitions=2, min_idle_ms=1, max_idle_ms=1) as queue, Gate() as gate:
        queue.add_handler(A, Idler())
        queue.add_handler(B, Recorder(gate))
        for _ in range(3):
            assert idle_calls.acquire(timeout=WAIT_S)
        queue.produce(B())
        gate.wait_entered()
        while idle_calls.acquire(blocking=False):
            pass
        for _ in range(3):
            assert idle_calls.acquire(timeout=WAIT_S / 5), "the idle handler is not told any more"
