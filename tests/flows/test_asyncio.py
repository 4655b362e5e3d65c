"""Dispatching from asyncio: the loop never waits, and cancellation leaves nothing behind."""

from __future__ import annotations

import asyncio
import gc
import threading
from collections.abc import Coroutine
from typing import Any, TypeVar

import pytest

from batchmill.flows import FlowDispatcher, WouldDeadlockError
from batchmill.waiters import TaskWaiter
from tests.flows.kit import Recorder, Signal, assert_balanced, config, dispatching, signals
from tests.kit.threads import WAIT_S, Gate, spawn

T = TypeVar("T")


def run(main: Coroutine[Any, Any, T]) -> T:
    """Run it in a loop of its own, and not for ever."""
    return asyncio.run(asyncio.wait_for(main, WAIT_S))


async def turns(count: int = 3) -> None:
    """Let every other task that can go on do so."""
    for _ in range(count):
        await asyncio.sleep(0)


async def full(gate: Gate, dispatcher: Any) -> None:
    """One signal in the handler, one in the queue, which holds one."""
    assert await dispatcher.adispatch(Signal("a", 0))
    gate.wait_entered()
    assert await dispatcher.adispatch(Signal("a", 1))


def test_adispatch_accepts_like_dispatch() -> None:
    """Where there is room it does not even give up the loop."""
    recorder = Recorder()

    async def main() -> None:
        async with FlowDispatcher(recorder, config()) as dispatcher:
            for signal in signals("a", 50):
                assert await dispatcher.adispatch(signal)

    run(main())
    assert recorder.items == signals("a", 50)


def test_the_loop_goes_on_while_a_task_waits() -> None:
    """Only the task that found no room waits."""
    gate = Gate()

    async def main() -> None:
        with dispatching(gate, worker_queue_capacity=1) as dispatcher:
            await full(gate, dispatcher)
            task = asyncio.create_task(dispatcher.adispatch(Signal("a", 2)))
            await turns()
            assert dispatcher.stats().blocked == 1
            assert not task.done()
            gate.open()
            assert await task

    run(main())
    assert [signal.number for signal in gate.items] == [0, 1, 2]


def test_tasks_that_wait_with_one_flow_get_in_in_order() -> None:
    """gather() over a flow's signals keeps their order, however small the queue."""
    recorder = Recorder()
    count = 300

    async def main() -> list[bool]:
        async with FlowDispatcher(
            recorder, config(worker_queue_capacity=2, batch_max=2)
        ) as dispatcher:
            timeouts = [None, WAIT_S]
            return await asyncio.gather(
                *(
                    dispatcher.adispatch(signal, timeouts[signal.number % 2])
                    for signal in signals("a", count)
                )
            )

    assert all(run(main()))
    assert recorder.items == signals("a", count)


def test_a_cancelled_task_has_dispatched_nothing() -> None:
    """Its place in line, its promise and its fresh flow are gone, and the next in line goes on."""
    gate = Gate()

    async def main() -> None:
        with dispatching(gate, worker_queue_capacity=1) as dispatcher:
            await full(gate, dispatcher)
            cancelled = asyncio.create_task(dispatcher.adispatch(Signal("b", 2)))
            await turns()
            next_one = asyncio.create_task(dispatcher.adispatch(Signal("a", 3)))
            await turns()
            cancelled.cancel()
            with pytest.raises(asyncio.CancelledError):
                await cancelled
            stats = dispatcher.stats()
            assert (stats.blocked, stats.active_flows) == (1, 1)
            assert stats.refused["cancelled"] == 1
            gate.open()
            assert await next_one
            await dispatcher.aclose(WAIT_S)
            assert_balanced(dispatcher.stats())

    run(main())
    assert [signal.number for signal in gate.items] == [0, 1, 3]


def test_a_task_cancelled_when_it_was_just_promised_room_passes_it_on() -> None:
    """The promise and the cancellation cross: nothing is in, and the room is the next one's."""
    gate = Gate()

    async def main() -> None:
        with dispatching(gate, worker_queue_capacity=1) as dispatcher:
            await full(gate, dispatcher)
            first = asyncio.create_task(dispatcher.adispatch(Signal("a", 2)))
            second = asyncio.create_task(dispatcher.adispatch(Signal("a", 3)))
            await turns()
            gate.open()
            gate.wait_entered()  # the worker has taken a signal, and so promised its room
            first.cancel()  # the loop has not had a turn since
            with pytest.raises(asyncio.CancelledError):
                await first
            assert await second

    run(main())
    assert [signal.number for signal in gate.items] == [0, 1, 3]


def test_adispatch_gives_up_after_its_timeout() -> None:
    """False, counted, and nothing left in line."""
    gate = Gate()

    async def main() -> None:
        with dispatching(gate, worker_queue_capacity=1) as dispatcher:
            await full(gate, dispatcher)
            assert not await dispatcher.adispatch(Signal("a", 2), timeout=0.001)
            assert not await dispatcher.adispatch(Signal("a", 3), timeout=0)
            stats = dispatcher.stats()
            assert (stats.blocked, stats.refused["queue_full"]) == (0, 2)

    run(main())


def test_closing_answers_tasks_that_wait_with_false() -> None:
    """aclose() wakes them, and does not block the loop either."""
    gate = Gate()

    async def main() -> None:
        dispatcher: FlowDispatcher[Any] = FlowDispatcher(gate, config(worker_queue_capacity=1))
        await full(gate, dispatcher)
        producer = asyncio.create_task(dispatcher.adispatch(Signal("a", 2)))
        await turns()
        closer = asyncio.create_task(dispatcher.aclose(WAIT_S))
        assert not await producer
        assert not closer.done()
        gate.open()
        assert await closer == []

    run(main())
    assert [signal.number for signal in gate.items] == [0, 1]


def test_aclose_returns_what_was_not_processed() -> None:
    """When its time is up, like close()."""
    gate = Gate()

    async def main() -> None:
        dispatcher: FlowDispatcher[Any] = FlowDispatcher(gate, config(worker_queue_capacity=1))
        await full(gate, dispatcher)
        assert await dispatcher.aclose(0) == [Signal("a", 1)]
        gate.open()
        assert await dispatcher.aclose() == []
        assert await dispatcher.aclose() == []

    run(main())


def test_a_cancelled_aclose_leaves_the_drain_going() -> None:
    """The gate is closed, the workers finish, and nobody is told who is not there."""
    gate = Gate()

    async def main() -> None:
        dispatcher: FlowDispatcher[Any] = FlowDispatcher(gate, config(worker_queue_capacity=1))
        await full(gate, dispatcher)
        closer = asyncio.create_task(dispatcher.aclose(WAIT_S))
        await turns()
        closer.cancel()
        with pytest.raises(asyncio.CancelledError):
            await closer
        gate.open()
        assert await dispatcher.aclose(WAIT_S) == []

    run(main())
    assert len(gate.items) == 2


def test_a_task_destroyed_while_it_waits_leaves_nothing_behind() -> None:
    """A coroutine that is closed, as the collector does it, gives its place in line back."""
    gate = Gate()

    async def main() -> None:
        with dispatching(gate, worker_queue_capacity=1) as dispatcher:
            await full(gate, dispatcher)
            coroutine = dispatcher.adispatch(Signal("b", 2))
            coroutine.send(None)  # it waits now
            assert dispatcher.stats().blocked == 1
            coroutine.close()
            del coroutine
            gc.collect()
            next_one = asyncio.create_task(dispatcher.adispatch(Signal("a", 3)))
            await turns()
            stats = dispatcher.stats()
            assert (stats.blocked, stats.refused["cancelled"]) == (1, 1)
            gate.open()
            assert await next_one

    run(main())
    assert [signal.number for signal in gate.items] == [0, 1, 3]


def test_a_loop_that_ended_does_not_hold_up_threads() -> None:
    """Tasks cancelled by the end of their loop leave their room to a thread that waits."""
    gate = Gate()
    with dispatching(gate, worker_queue_capacity=1) as dispatcher:

        async def main() -> None:
            await full(gate, dispatcher)
            task = asyncio.create_task(dispatcher.adispatch(Signal("a", 2)))
            await turns()
            assert not task.done()  # asyncio.run() cancels it

        run(main())
        assert dispatcher.stats().blocked == 0
        gate.open()
        assert dispatcher.dispatch(Signal("a", 3))
    assert [signal.number for signal in gate.items] == [0, 1, 3]


def test_a_handler_that_runs_a_loop_gets_the_error_too() -> None:
    """adispatch() inside a handler, to its own full queue, is the same deadlock."""
    outcome: list[str] = []
    tried = threading.Event()

    async def fill(dispatcher: Any) -> None:
        await dispatcher.adispatch(Signal("a", 1))
        try:
            await dispatcher.adispatch(Signal("a", 2))
        except WouldDeadlockError:
            outcome.append("told")

    def handle(batch: list[Signal]) -> None:
        if batch[0].number == 0:
            run(fill(dispatcher))
            tried.set()

    with dispatching(handle, worker_queue_capacity=1) as dispatcher:
        dispatcher.dispatch(Signal("a", 0))
        assert tried.wait(WAIT_S)
    assert outcome == ["told"]


def test_waking_a_task_whose_loop_is_closed_says_so() -> None:
    """Room is then given to somebody else."""

    async def main() -> TaskWaiter:
        return TaskWaiter()

    waiter = run(main())
    assert not waiter.wake()


def test_a_coroutine_left_in_a_closed_loop_does_not_hold_up_its_flow() -> None:
    """Nobody will ever resume it; a thread with the same flow gets the room."""
    gate = Gate()
    with dispatching(gate, worker_queue_capacity=1) as dispatcher:

        async def begin() -> Any:
            await full(gate, dispatcher)
            coroutine = dispatcher.adispatch(Signal("a", 2))
            coroutine.send(None)  # it waits now, and is no task that the loop would cancel
            return coroutine

        left_behind = run(begin())
        with spawn(lambda: dispatcher.dispatch(Signal("a", 3))) as producer:
            gate.open()
            assert producer.result(WAIT_S)
        left_behind.close()
    assert [signal.number for signal in gate.items] == [0, 1, 3]
    assert dispatcher.stats().blocked == 0


def test_many_tasks_of_a_closed_loop_cost_no_worker() -> None:
    """Their waits are given up one after the other, however many there are; the worker goes on."""
    waiting = 600
    gate = Gate()
    dispatcher: Any = FlowDispatcher(
        gate, config(worker_count=1, worker_queue_capacity=1, batch_max=1)
    )
    loop = asyncio.new_event_loop()

    async def block() -> list[asyncio.Future[bool]]:
        coming = [dispatcher.adispatch(Signal(flow)) for flow in range(waiting)]
        tasks = [asyncio.ensure_future(coroutine) for coroutine in coming]
        await asyncio.sleep(0)  # every task gets as far as it can
        assert dispatcher.stats().blocked == waiting
        return tasks

    dispatcher.dispatch(Signal("a"))
    gate.wait_entered()
    dispatcher.dispatch(Signal("a"))
    tasks = loop.run_until_complete(block())
    loop.close()
    gate.open()
    assert dispatcher.dispatch(Signal("b"), timeout=WAIT_S)
    assert dispatcher.close(WAIT_S) == []
    assert [signal.flow for signal in gate.items] == ["a", "a", "b"]
    for task in tasks:
        task._log_destroy_pending = False  # type: ignore[attr-defined]
