"""Shutdown: what was accepted is consumed, who waits is told, a hung handler is left alone."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

from batchmill import (
    BatchQueue,
    BatchQueueManager,
    BatchQueueSettings,
    QueueClosedError,
    ThreadPolicy,
)
from tests.kit.queues import Recorder, Scripted, make_queue, new_queue, owners, rebalance_now
from tests.kit.threads import WAIT_S, Gate, spawn, until
from tests.queue.kit import A, B, HeldSlot, lane_of, parked, partition_of


def _fill(queue: BatchQueue[Any], gate: Gate) -> None:
    """One item in the handler, which is held at the gate, and the partition full behind it."""
    assert queue.produce(A())
    gate.wait_entered()
    for _ in range(partition_of(queue).capacity):
        assert queue.produce(A(), timeout=0)


def test_blocked_producers_get_false() -> None:
    """Producers that wait for room at shutdown wake at once, are told False, and put nothing."""
    with make_queue(buffer_size=2) as queue, Gate() as gate:
        recorder = Recorder(gate)
        queue.add_handler(A, recorder)
        _fill(queue, gate)
        producers = [spawn(queue.produce, A()) for _ in range(5)]
        many = spawn(queue.produce_many, [A(), A()])
        until(lambda: len(partition_of(queue).waiters) == 6, "all producers wait")
        closing = spawn(queue.shutdown)
        assert [producer.result() for producer in producers] == [False] * 5
        assert many.result() == 0
        gate.open()
        assert closing.result()
        assert len(recorder.items) == 3
        assert queue.stats().dropped["stopped"] == 7


def test_blocked_produce_many_returns_how_many() -> None:
    """A produce_many cut short by shutdown says how many got in, and those are consumed."""
    with make_queue(buffer_size=3) as queue, Gate() as gate:
        recorder = Recorder(gate)
        queue.add_handler(A, recorder)
        assert queue.produce(A())
        gate.wait_entered()
        items = [A() for _ in range(10)]
        many = spawn(queue.produce_many, items)
        until(lambda: partition_of(queue).waiters, "the producer waits")
        closing = spawn(queue.shutdown)
        assert many.result() == 3
        gate.open()
        assert closing.result()
        assert recorder.items[1:] == items[:3]


def test_blocked_aproduce_gets_false() -> None:
    """A task that waits for room at shutdown is told False too."""
    with make_queue(buffer_size=1) as queue, Gate() as gate:
        recorder = Recorder(gate)
        queue.add_handler(A, recorder)
        _fill(queue, gate)

        async def put() -> bool:
            return await queue.aproduce(A())

        producer = spawn(asyncio.run, put())
        until(lambda: partition_of(queue).waiters, "the task waits")
        queue._core.begin_close()
        assert producer.result() is False
        gate.open()
        assert queue.shutdown()
        assert len(recorder.items) == 2


def test_two_shutdowns_are_one() -> None:
    """Shutdowns that run side by side both answer True, and the handler hears of one."""

    class Handler(Recorder):
        goodbyes = 0

        def on_shutdown(self) -> None:
            self.goodbyes += 1

    with make_queue(threads=2, partitions=2) as queue, Gate() as gate:
        handler = Handler(gate)
        queue.add_handler(A, handler)
        queue.produce(A())
        gate.wait_entered()
        barrier = threading.Barrier(4)

        def close() -> bool:
            barrier.wait(WAIT_S)
            return queue.shutdown()

        calls = [spawn(close) for _ in range(4)]
        until(lambda: not queue.running, "the gate closes")
        gate.open()
        assert [call.result() for call in calls] == [True] * 4
        assert handler.goodbyes == 1
        assert queue.shutdown()


def test_shutdown_inside_a_handler() -> None:
    """shutdown() inside a handler answers False at once and is done when the handler returns."""
    answers: list[bool] = []
    seen: list[A] = []

    def handler(batch: list[A]) -> None:
        if not seen:
            assert queue.produce_many([A(), A()]) == 2
            answers.append(queue.shutdown())
        seen.extend(batch)

    with make_queue(max_batch=1) as queue:
        queue.add_handler(A, handler)
        queue.produce(A())
        assert queue._core.done.wait(WAIT_S), "the shutdown finishes"
        assert answers == [False]
        assert len(seen) == 3


def test_shutdown_inside_a_handler_of_a_neighbour() -> None:
    """A handler may shut down another queue of its own one-thread scheduler; nothing hangs."""
    manager = BatchQueueManager()
    config = BatchQueueSettings(
        shared_scheduler=("one", ThreadPolicy.fixed(1)), shutdown_timeout_ms=WAIT_S * 1000
    )
    first, second = manager.create("first", config), manager.create("second", config)
    recorder, answers = Recorder(), []
    second.add_handler(B, recorder)

    def handler(batch: list[A]) -> None:
        second.produce(B())
        answers.append(second.shutdown())

    first.add_handler(A, handler)
    first.produce(A())
    assert second._core.done.wait(WAIT_S), "the neighbour's shutdown finishes"
    assert answers == [False]
    assert len(recorder.items) == 1
    assert manager.shutdown_all()


def test_hanging_handler() -> None:
    """Past its timeout shutdown answers False, and nobody enters the handler that hangs."""
    with (
        make_queue(threads=2, partitions=2, shutdown_timeout_ms=20, max_batch=1) as queue,
        Gate() as gate,
    ):
        recorder = Recorder(gate)
        queue.add_handler(A, recorder)
        queue.add_handler(B, recorder)
        queue.produce(A())
        gate.wait_entered()
        queue.produce_many([A(), A()])
        queue.produce_many([B(), B()])
        assert queue.shutdown() is False
        assert queue.shutdown() is False
        assert recorder.entries == 1
        assert queue.stats().pending == 5
        gate.open()
        assert queue._core.done.wait(WAIT_S), "the drain goes on when the handler returns"
        assert len(recorder.items) == 5
        assert recorder.overlaps == 0
        assert queue.shutdown()


@pytest.mark.parametrize("wake_token", [False, True], ids=["ordinary slot", "wake token"])
def test_straggler(wake_token: bool) -> None:
    """A producer that took its slot before the queue closed, and puts after, is waited for."""
    recorder = Recorder()
    with make_queue(buffer_size=64, max_idle_ms=1) as queue:
        queue.add_handler(A, recorder)
        queue.produce_many([A(), A()])
        recorder.wait_for(2)
        parked(queue)
        if not wake_token:
            assert partition_of(queue).tokens.pop() is not None
            partition_of(queue).reserve += 1
        with HeldSlot(queue, A) as held:
            producer = spawn(queue.produce, A())
            held.wait_taken()
            assert (held.token is not None) == wake_token
            closing = spawn(queue.shutdown)
            task = queue._core.tasks[0]
            until(lambda: task._idle_streak > 5, "the task looks for stragglers")
            assert not queue._core.done.is_set()
            held.let_go()
            assert producer.result()
        assert closing.result()
        assert len(recorder.items) == 3
        assert partition_of(queue).out == 0


def test_straggler_past_the_timeout() -> None:
    """A straggler that comes after shutdown gave up is told True and is consumed all the same."""
    recorder = Recorder()
    with make_queue(buffer_size=64, max_idle_ms=1, shutdown_timeout_ms=10) as queue:
        queue.add_handler(A, recorder)
        queue.produce(A())
        recorder.wait_for(1)
        parked(queue)
        with HeldSlot(queue, A) as held:
            producer = spawn(queue.produce, A())
            held.wait_taken()
            assert queue.shutdown() is False
            held.let_go()
            assert producer.result()
        assert queue._core.done.wait(WAIT_S), "the drain ends"
        assert len(recorder.items) == 2


def test_gate_closes_while_the_thread_is_about_to_park() -> None:
    """A thread that was about to park when the queue closed leaves no wake token.

    It would arm its partitions after they were closed: a token there is a slot for anybody.
    """

    class Idler(Recorder):
        def on_idle(self) -> None:  # the last thing that happens before a thread parks
            gate.wait()

    with make_queue(buffer_size=8) as queue, Gate() as gate:
        handler = Idler()
        queue.add_handler(A, handler)
        gate.wait_entered()
        queue._lane(A())  # the fast path of the class is open
        queue._core.begin_close()
        gate.open()
        assert queue.shutdown()
        accepted = queue.produce(A())
        assert (accepted, partition_of(queue).used) == (False, 0)


def test_produce_after_shutdown() -> None:
    """After shutdown every way in answers no, and each item is counted as stopped."""
    queue = new_queue()
    queue.add_handler(A, Recorder())
    assert queue.produce(A())
    assert queue.shutdown()
    assert queue.produce(A()) is False
    assert queue.produce(A(), timeout=5) is False
    assert queue.produce_many([A(), A()]) == 0
    assert asyncio.run(queue.aproduce(A())) is False
    assert asyncio.run(queue.aproduce_many([A(), A(), B()])) == 0
    assert queue.produce(B()) is False
    assert queue.stats().dropped["stopped"] == 9
    assert queue.stats().accepted == 1


def test_last_on_idle_comes_after_the_last_batch() -> None:
    """A handler gets its last on_idle after all its items, on_idle never beside consume."""
    log: list[str] = []

    class Merger:
        def consume(self, batch: list[Any]) -> None:
            log.extend("item" for _ in batch)

        def on_idle(self) -> None:
            log.append("idle")

    with make_queue(threads=2, partitions=2, max_batch=3) as queue:
        merger = Merger()
        queue.add_handler(A, merger)
        queue.add_handler(B, merger)
        queue.produce_many([A() for _ in range(100)] + [B() for _ in range(100)])
    assert log.count("item") == 200
    assert log[-1] == "idle"


def test_threads_are_gone() -> None:
    """After a shutdown that answered True the queue's threads have ended."""
    queue = new_queue(threads=3, partitions=3)
    assert queue.shutdown()
    assert [thread.is_alive() for thread in queue._core.scheduler.threads] == [False] * 3


def test_context_manager_drains() -> None:
    """Leaving the with block, also by an exception, drains and ends the queue."""
    recorder = Recorder()
    queue = new_queue(max_batch=7)

    def work() -> None:
        with queue:
            queue.add_handler(A, recorder)
            queue.produce_many([A() for _ in range(100)])
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        work()
    assert len(recorder.items) == 100
    assert not queue.running


def test_stopped_before_anything_began() -> None:
    """A queue may be shut down at once, and a flush afterwards has nothing to wait for."""
    queue = new_queue(threads=2, partitions=5)
    assert queue.shutdown()
    assert queue.flush(WAIT_S)


def _config(**settings: Any) -> BatchQueueSettings:
    settings.setdefault("threads", ThreadPolicy.fixed(1))
    return BatchQueueSettings(shutdown_timeout_ms=WAIT_S * 1000, **settings)


def test_shutdown_all_closes_every_gate_first() -> None:
    """shutdown_all closes all queues before it waits for any of them."""
    manager = BatchQueueManager()
    with Gate() as gate:
        recorders = {name: Recorder(gate) for name in ("a", "b", "c")}
        queues = [manager.create(name, _config()) for name in recorders]
        for queue, recorder in zip(queues, recorders.values(), strict=True):
            queue.add_handler(A, recorder)
            queue.produce(A())
            queue.produce(A())
        gate.wait_entered()
        closing = spawn(manager.shutdown_all)
        until(lambda: not any(queue.running for queue in queues), "all gates close")
        assert not any(queue._core.done.is_set() for queue in queues)
        gate.open()
        assert closing.result()
    assert [len(recorder.items) for recorder in recorders.values()] == [2, 2, 2]
    assert manager.names() == ()


def test_no_creation_during_shutdown_all() -> None:
    """While shutdown_all runs a new queue is refused; afterwards it is welcome again."""
    manager = BatchQueueManager()
    with Gate() as gate:
        queue = manager.create("old", _config())
        queue.add_handler(A, Recorder(gate))
        queue.produce(A())
        gate.wait_entered()
        closing = spawn(manager.shutdown_all)
        until(lambda: not queue.running, "the gate closes")
        with pytest.raises(QueueClosedError):
            manager.create("new", _config())
        with pytest.raises(QueueClosedError):
            manager.get_or_create("new", _config(shared_scheduler=None))
        gate.open()
        assert closing.result()
    manager.create("new", _config())
    assert manager.shutdown_all()


def test_shared_scheduler_goes_with_its_last_queue() -> None:
    """The threads of a shared scheduler end with the last queue, however that is shut down."""
    manager = BatchQueueManager()
    config = _config(threads=None, shared_scheduler=("pool", ThreadPolicy.fixed(2)))
    first, second = manager.create("first", config), manager.create("second", config)
    threads = list(first._core.scheduler.threads)
    assert first._core.scheduler is second._core.scheduler
    assert first.shutdown()
    assert all(thread.is_alive() for thread in threads)
    assert manager.shutdown("second")
    assert not any(thread.is_alive() for thread in threads)


def test_shutdown_in_the_middle_of_a_hand_over() -> None:
    """Partitions on their way to another task at shutdown are drained by somebody, once."""
    balancer = Scripted()
    with (
        make_queue(
            threads=2,
            partitions=4,
            balancer=balancer,
            max_batch=2,
            selector=lambda item, n: item.at,
        ) as queue,
        Gate() as gate,
    ):
        recorder = Recorder(gate)
        queue.add_handler(A, recorder)
        items = [A() for _ in range(40)]
        for index, item in enumerate(items):
            item.at = index % 4  # type: ignore[attr-defined]
        assert queue.produce(items[0])
        gate.wait_entered()
        assert queue.produce_many(items[1:]) == 39
        balancer.plan = [1 - owner for owner in owners(queue)]
        rebalance_now(queue)
        queue._core.begin_close()
        gate.open()
        assert queue.shutdown()
        assert sorted(map(id, recorder.items)) == sorted(map(id, items))
        assert recorder.overlaps == 0


def test_adding_a_handler_to_a_closed_queue_is_refused() -> None:
    """A queue that is shut down takes no handlers."""
    queue = new_queue(partitions=1)
    queue.shutdown()
    with pytest.raises(QueueClosedError):
        queue.add_handler(A, Recorder())
    assert lane_of(queue, A).receiver is None
