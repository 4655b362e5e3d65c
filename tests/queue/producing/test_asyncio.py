"""asyncio: a full queue makes the task wait, never the loop."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

from batchmill import BatchQueue
from tests.kit.queues import Recorder, make_queue, new_queue
from tests.kit.threads import WAIT_S, Gate, spawn, until
from tests.queue.kit import A, B, lane_of, parked, partition_of


def _fill(queue: BatchQueue[Any], gate: Gate) -> None:
    assert queue.produce(A())
    gate.wait_entered()
    for _ in range(partition_of(queue).capacity):
        assert queue.produce(A(), timeout=0)


def _waiters(queue: BatchQueue[Any]) -> int:
    return len(partition_of(queue).waiters)


async def _until_waiting(queue: BatchQueue[Any], count: int) -> None:
    async with asyncio.timeout(WAIT_S):
        while _waiters(queue) != count:  # noqa: ASYNC110 - the queue's insides signal nobody
            await asyncio.sleep(0)


def test_full_queue_does_not_block_the_loop() -> None:
    """While aproduce waits the loop runs on: here it is the loop that makes the room."""

    async def main() -> bool:
        waiting = asyncio.create_task(queue.aproduce(A()))
        await _until_waiting(queue, 1)
        assert not waiting.done()
        gate.open()
        async with asyncio.timeout(WAIT_S):
            return await waiting

    with make_queue(buffer_size=2) as queue, Gate() as gate:
        recorder = Recorder(gate)
        queue.add_handler(A, recorder)
        _fill(queue, gate)
        assert asyncio.run(main())
        recorder.wait_for(4)


def test_aproduce_many_does_not_block_the_loop() -> None:
    """aproduce_many of more than fits waits for room piece by piece, in order."""

    async def main() -> int:
        waiting = asyncio.create_task(queue.aproduce_many(items))
        await _until_waiting(queue, 1)
        gate.open()
        async with asyncio.timeout(WAIT_S):
            return await waiting

    with make_queue(buffer_size=3, max_batch=2) as queue, Gate() as gate:
        recorder = Recorder(gate)
        queue.add_handler(A, recorder)
        _fill(queue, gate)
        items = [A() for _ in range(100)]
        assert asyncio.run(main()) == 100
        assert recorder.wait_for(104)[4:] == items


def test_many_tasks() -> None:
    """Many tasks on a tiny queue all get their items in, each in its own order."""

    async def produce(task: int) -> None:
        for sequence in range(50):
            if sequence % 3:
                assert await queue.aproduce((task, sequence))
            else:
                assert await queue.aproduce_many([(task, sequence)]) == 1

    async def main() -> None:
        async with asyncio.timeout(WAIT_S * 3), asyncio.TaskGroup() as group:
            for task in range(40):
                group.create_task(produce(task))

    recorder = Recorder()
    with make_queue(buffer_size=2) as queue:
        queue.add_handler(tuple, recorder)
        asyncio.run(main())
        assert queue.flush(WAIT_S)
    for task in range(40):
        assert [seq for who, seq in recorder.items if who == task] == list(range(50))


def test_timeout() -> None:
    """aproduce with a timeout answers False when no room came; the item is not queued."""

    async def main() -> list[Any]:
        return [
            await queue.aproduce(A(), timeout=0),
            await queue.aproduce(A(), timeout=0.01),
            await queue.aproduce_many([A(), A()], timeout=0.01),
        ]

    with make_queue(buffer_size=1) as queue, Gate() as gate:
        recorder = Recorder(gate)
        queue.add_handler(A, recorder)
        _fill(queue, gate)
        assert asyncio.run(main()) == [False, False, 0]
        assert _waiters(queue) == 0
        gate.open()
        assert queue.flush(WAIT_S)
        assert len(recorder.items) == 2
        assert queue.stats().dropped["full"] == 4


def test_cancelled_task_leaves_no_waiter() -> None:
    """A task cancelled while it waits is forgotten by the queue, and its item is not queued."""

    async def main() -> None:
        waiting = asyncio.create_task(queue.aproduce(A()))
        await _until_waiting(queue, 1)
        waiting.cancel()
        await asyncio.wait([waiting])
        assert waiting.cancelled()
        assert _waiters(queue) == 0

    with make_queue(buffer_size=1) as queue, Gate() as gate:
        recorder = Recorder(gate)
        queue.add_handler(A, recorder)
        _fill(queue, gate)
        asyncio.run(main())
        gate.open()
        assert queue.flush(WAIT_S)
        assert len(recorder.items) == 2


def test_cancelled_after_the_wake() -> None:
    """A task that was woken and is cancelled before it runs passes its wake on."""

    async def main() -> None:
        first = asyncio.create_task(queue.aproduce(A()))
        await _until_waiting(queue, 1)
        second = asyncio.create_task(queue.aproduce(A()))
        await _until_waiting(queue, 2)
        # Here the loop stands still: the one place that is free wakes the first task, which is
        # then cancelled before it had a turn.
        partition = partition_of(queue)
        assert len(partition.take(lane_of(queue, A), 1)) == 1
        first.cancel()
        async with asyncio.timeout(WAIT_S):
            assert await second
        assert first.cancelled()

    with make_queue(buffer_size=1) as queue, Gate() as gate:
        queue.add_handler(A, Recorder(gate))
        _fill(queue, gate)
        asyncio.run(main())


def test_cancellation_storm() -> None:
    """However many waiting tasks are cancelled, one that stays gets its room."""

    async def main() -> None:
        async with asyncio.timeout(WAIT_S * 2):
            for _ in range(100):
                tasks = [asyncio.create_task(queue.aproduce(A())) for _ in range(6)]
                await asyncio.sleep(0)
                for task in tasks[:-1]:
                    task.cancel()
                assert await tasks[-1]
                await asyncio.wait(tasks)

    with make_queue(buffer_size=1, max_batch=1) as queue:
        queue.add_handler(A, Recorder())
        asyncio.run(main())
        assert queue.flush(WAIT_S)
        assert _waiters(queue) == 0
        stats = queue.stats()
        assert stats.accepted == stats.consumed >= 100


def test_loop_ends_while_a_task_waits() -> None:
    """asyncio.run that ends with a task still waiting cancels it; nothing stays behind."""

    async def main() -> asyncio.Task[bool]:
        waiting = asyncio.create_task(queue.aproduce(A()))
        await _until_waiting(queue, 1)
        return waiting

    with make_queue(buffer_size=1) as queue, Gate() as gate:
        queue.add_handler(A, Recorder(gate))
        _fill(queue, gate)
        assert asyncio.run(main()).cancelled()
        assert _waiters(queue) == 0


def test_closed_loop_takes_no_wake_from_others() -> None:
    """A task whose loop was closed under it does not swallow the wake of a producer behind it."""
    loop = asyncio.new_event_loop()
    queue = new_queue(buffer_size=1)
    with Gate() as gate:
        queue.add_handler(A, Recorder(gate))
        _fill(queue, gate)
        task = loop.create_task(queue.aproduce(A()))
        loop.run_until_complete(_until_waiting(queue, 1))
        loop.close()
        producer = spawn(queue.produce, A())
        until(lambda: _waiters(queue) == 2, "a thread waits behind the dead task")
        gate.open()
        try:
            assert producer.result(WAIT_S / 3)
        finally:
            queue.shutdown()
            task._log_destroy_pending = False  # type: ignore[attr-defined]


def test_interrupted_in_the_middle_of_aproduce() -> None:
    """An exception that hits aproduce between slot and put costs no slot for good."""

    class Interrupting(list[Any]):
        def extend(self, items: Any) -> None:
            lane.buffer = plain
            raise KeyboardInterrupt

    async def main() -> None:
        await queue.aproduce_many([A(), A()])

    queue = new_queue(buffer_size=4, shutdown_timeout_ms=WAIT_S / 2 * 1000)
    queue.add_handler(A, Recorder())
    parked(queue)
    lane = lane_of(queue, A)
    plain = lane.buffer
    lane.buffer = Interrupting()
    caught = False
    try:
        asyncio.run(main())
    except KeyboardInterrupt:
        caught = True
    finished = queue.shutdown()
    out = partition_of(queue).out
    _mend(queue)
    assert (caught, finished, out) == (True, True, 0)


def _mend(queue: BatchQueue[Any]) -> None:
    """Let a queue end that would otherwise wait for a slot for ever."""
    for partition in queue._core.layout.partitions:
        partition.replace_lost()
    queue._core.wake_tasks()
    queue.shutdown()


def test_two_loops() -> None:
    """Tasks of two loops in two threads wait for one queue; each wake finds its own loop."""

    async def produce() -> None:
        async with asyncio.timeout(WAIT_S * 2):
            for _ in range(200):
                assert await queue.aproduce(A())

    with make_queue(buffer_size=1) as queue:
        recorder = Recorder()
        queue.add_handler(A, recorder)
        barrier = threading.Barrier(2)

        def run() -> None:
            barrier.wait(WAIT_S)
            asyncio.run(produce())

        calls = [spawn(run), spawn(run)]
        for call in calls:
            call.result(WAIT_S * 2)
        recorder.wait_for(400)


def test_unhandled_class() -> None:
    """aproduce of a class without a handler is accepted, dropped and counted, like produce."""
    with make_queue() as queue:
        assert asyncio.run(queue.aproduce(B()))
        assert queue.flush(WAIT_S)
        assert queue.stats().dropped["unregistered"] == 1
