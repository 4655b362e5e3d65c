"""Fork, interpreter exit, garbage, Ctrl-C."""

from __future__ import annotations

import asyncio
import gc
import multiprocessing
import os
import signal
import threading
import weakref
from collections.abc import Iterator
from typing import Any

import pytest

from batchmill.batcher import BatcherSettings, BreakerPolicy, MicroBatcher, intake
from batchmill.pressure import QueueDecision
from batchmill.waiters import ThreadWaiter
from tests.kit.batchers import (
    FOREVER_MS,
    Echo,
    Gate,
    answer,
    assert_balanced,
    batching,
    held,
    levels,
    threads_of,
)
from tests.kit.processes import in_child, run_script
from tests.kit.threads import WAIT_S, until

needs_fork = pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork")


@needs_fork
def test_a_forked_child_starts_anew_and_empty() -> None:
    """What waits is the parent's; the child's own items are answered by its own workers."""
    with held(waiting=3) as (batcher, gate):

        def work() -> list[Any]:
            stats = batcher.stats()
            gate.batches.clear()
            gate.open()
            answer(batcher.submit("child"))
            return [stats.submitted, stats.pending, batcher.close(WAIT_S), gate.items]

        assert in_child(work) == [0, 0, True, ["child"]]
        assert batcher.queue_depth == 3
        gate.open()
        assert batcher.flush(WAIT_S)
    assert gate.items == ["first", 0, 1, 2]


@needs_fork
def test_a_child_forked_while_the_lock_is_held_does_not_hang() -> None:
    """Its locks are its own: the threads that held them were not copied."""
    with batching(Echo(), levels()) as batcher:
        answer(batcher.submit(1))
        engine = batcher._engine
        with engine._lock, engine._timer._lock, engine.caller._lock:
            child = in_child(lambda: answer(batcher.submit(2, deadline_s=WAIT_S)).is_success)
    assert child is True


@needs_fork
def test_a_closed_batcher_is_closed_in_the_child() -> None:
    """Items are rejected there too, and closing again returns at once."""
    with batching(Echo()) as batcher:
        batcher.close()
        assert in_child(lambda: [answer(batcher.submit(1)).is_failure, batcher.close()]) == [
            True,
            True,
        ]


@needs_fork
def test_parked_items_are_the_parents() -> None:
    """No timer of the child's offers them again."""
    config = levels(critical_handler=lambda _: QueueDecision.retry(3_600_000))
    with held(config, waiting=4) as (batcher, _):
        batcher.submit("parked")
        assert in_child(lambda: [batcher.stats().parked, batcher.close(WAIT_S)]) == [0, True]
        assert batcher.stats().parked == 1


@needs_fork
def test_the_circuit_breaker_starts_anew_in_the_child() -> None:
    """A trial that was under way in the parent does not block the child for ever."""
    entered, go_on = threading.Event(), threading.Event()
    trial = [False]

    def backend(batch: list[Any]) -> list[Any]:
        if batch == ["bad"]:
            raise OSError
        if trial[0] and threading.current_thread() is not threading.main_thread():
            entered.set()
            go_on.wait(WAIT_S)
        return batch

    breaker = BreakerPolicy(failures=1, reset_after_s=1e-9)
    with batching(backend, linger_ms=0, breaker=breaker) as batcher:
        answer(batcher.submit("bad"))
        trial[0] = True
        future = batcher.submit("trial")
        assert entered.wait(WAIT_S)

        def work() -> bool:
            trial[0] = False
            return answer(batcher.submit("good")).is_success

        try:
            assert in_child(work) is True
        finally:
            go_on.set()
        assert answer(future).is_success


@needs_fork
def test_a_backend_may_fork() -> None:
    """In the child it is nobody's worker: it may flush; when it returns, the process ends."""
    reader, writer = os.pipe()
    parent = os.getpid()

    def backend(batch: list[Any]) -> list[Any]:
        if batch == ["fork"]:
            pid = os.fork()
            if pid == 0:
                batcher.submit("child")
                os.write(writer, str(batcher.flush(WAIT_S)).encode())
                return batch
            os.waitpid(pid, 0)
        elif os.getpid() != parent:
            os.write(writer, b"sent ")
        return batch

    with batching(backend, linger_ms=0) as batcher:
        assert answer(batcher.submit("fork")).is_success
    os.close(writer)
    with os.fdopen(reader) as pipe:
        assert pipe.read() == "sent True"


def _in_multiprocessing_child(batcher: MicroBatcher[Any]) -> None:
    batcher.submit("child")


@needs_fork
def test_a_multiprocessing_child_drains_before_it_ends() -> None:
    """Though it leaves without Python's exit hooks."""
    reader, writer = os.pipe()

    def backend(batch: list[Any]) -> list[Any]:
        os.write(writer, b"sent")
        return batch

    with batching(backend, linger_ms=FOREVER_MS) as batcher:
        child = multiprocessing.get_context("fork").Process(
            target=_in_multiprocessing_child, args=(batcher,)
        )
        child.start()
        child.join(WAIT_S)
        os.close(writer)
        with os.fdopen(reader) as pipe:
            assert pipe.read() == "sent"
        assert child.exitcode == 0
        child.close()


@pytest.mark.parametrize("backend", ["def", "async def"])
def test_a_batcher_that_was_never_closed_drains_at_exit(backend: str) -> None:
    """Everything accepted is sent before the interpreter goes, and nothing is said."""
    result = run_script(
        f"""
        from batchmill.batcher import BatcherSettings, MicroBatcher
        count = 0
        {backend} send(batch):
            global count
            count += len(batch)
            if count == 1050:
                print("sent", count, flush=True)
            return batch
        keep = MicroBatcher(send, BatcherSettings(linger_ms=3_600_000))
        keep.submit_many(range(1050))
        """,
        options=("-W", "error"),
    )
    assert (result.returncode, result.stdout, result.stderr) == (0, "sent 1050\n", "")


def test_a_backend_that_hangs_does_not_keep_the_interpreter() -> None:
    """After close_timeout_s it goes; what was not sent has been rejected."""
    result = run_script(
        """
        import threading
        from batchmill.batcher import BatcherSettings, MicroBatcher
        began, never = threading.Event(), threading.Event()
        def send(batch):
            began.set()
            never.wait()
        keep = MicroBatcher(send, BatcherSettings(batch_size=1, close_timeout_s=0.05))
        keep.submit(1)
        began.wait()
        keep.submit(2).add_done_callback(lambda f: print(f.result().error, flush=True))
        """,
        options=("-W", "error"),
    )
    assert result.returncode == 0
    assert "ran out of time" in result.stdout
    assert result.stderr == ""


def _threads_end(name: str) -> None:
    for thread in threads_of(name):
        thread.join(WAIT_S)
    assert threads_of(name) == []


def test_a_batcher_that_nobody_references_ends() -> None:
    """What it had accepted is sent first."""
    echo = Echo()
    batcher: Any = MicroBatcher(echo, BatcherSettings(linger_ms=FOREVER_MS), name="lost")
    futures = batcher.submit_many(range(3))
    del batcher
    gc.collect()
    for future in futures:
        assert answer(future).is_success
    _threads_end("lost")


def test_a_batcher_in_a_cycle_with_its_backend_ends() -> None:
    """An object that hands out one of its own methods is the usual case."""

    class Service:
        def __init__(self) -> None:
            self.batcher: MicroBatcher[Any] = MicroBatcher(self.send, name="cyclic")

        def send(self, batch: list[Any]) -> list[Any]:
            return batch

    service: Any = Service()
    answer(service.batcher.submit(1))
    engine = weakref.ref(service.batcher._engine)
    batcher = weakref.ref(service.batcher)
    del service
    # Its worker may hold on to it a little longer, until it waits.
    until(lambda: gc.collect() >= 0 and batcher() is None, "it is collected")
    _threads_end("cyclic")
    gc.collect()
    assert (batcher(), engine()) == (None, None)


def test_a_lost_batcher_takes_its_loop_its_timer_and_its_listeners_along() -> None:
    """Every thread it had, not only its workers."""
    heard: list[object] = []

    async def backend(batch: list[Any]) -> list[Any]:
        await asyncio.sleep(0)
        return batch

    thresholds = levels(listeners=(heard.append,))
    batcher: Any = MicroBatcher(
        backend, BatcherSettings(linger_ms=FOREVER_MS), thresholds, name="all"
    )
    future = batcher.submit(1, deadline_s=3600)
    batcher.submit_many(range(4))
    del batcher
    gc.collect()
    assert answer(future).is_success
    _threads_end("all")
    assert not any(t.name == "batchmill-batcher-loop" and t.is_alive() for t in _loops())


def _loops() -> list[threading.Thread]:
    loops = [t for t in threading.enumerate() if t.name == "batchmill-batcher-loop"]
    for thread in loops:
        thread.join(WAIT_S)
    return loops


@pytest.fixture
def interrupted_in_wait(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Somebody presses Ctrl-C as soon as the main thread waits for room."""
    threads: list[threading.Thread] = []
    main = threading.main_thread().ident
    assert main is not None

    class Pressing(ThreadWaiter):
        def wait(self, timeout_s: float | None) -> bool:
            press = threading.Thread(target=signal.pthread_kill, args=(main, signal.SIGINT))
            threads.append(press)
            press.start()
            return super().wait(timeout_s)

    monkeypatch.setattr(intake, "ThreadWaiter", Pressing)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)
    for thread in threads:
        thread.join(WAIT_S)


@pytest.mark.usefixtures("interrupted_in_wait")
@pytest.mark.skipif(not hasattr(signal, "pthread_kill"), reason="needs pthread_kill")
def test_ctrl_c_gets_through_a_submit_that_waits() -> None:
    """The item is not taken, nothing is left in line, and the counts balance."""
    with held(levels(), waiting=4) as (batcher, gate):
        with pytest.raises(KeyboardInterrupt):
            batcher.submit("patient", timeout=WAIT_S)
        stats = batcher.stats()
        assert (stats.cancelled, stats.deciding, stats.queue_depth) == (1, 0, 4)
        assert len(batcher._engine.intake._room_waiters) == 0
        assert_balanced(stats)
        gate.open()
        assert batcher.flush(WAIT_S)
    assert "patient" not in gate.items


@pytest.mark.usefixtures("interrupted_in_wait")
@pytest.mark.skipif(not hasattr(signal, "pthread_kill"), reason="needs pthread_kill")
def test_ctrl_c_leaves_the_place_to_an_equal_item() -> None:
    """One that had joined it is decided about in its stead."""
    joined: list[Any] = []

    def join(context: object) -> QueueDecision:
        return QueueDecision.drop()

    gate = Gate()
    config = levels(critical_handler=join)
    with batching(gate, config, batch_size=1, key=lambda item: item) as batcher:
        batcher.submit("first")
        gate.wait_entered()
        batcher.submit_many(range(4))
        wait_for_room = batcher._engine.intake.wait_for_room

        def join_and_wait(until: float | None) -> bool:
            joined.append(batcher.submit("same"))
            return wait_for_room(until)

        batcher._engine.intake.wait_for_room = join_and_wait  # type: ignore[method-assign]
        with pytest.raises(KeyboardInterrupt):
            batcher.submit("same", timeout=WAIT_S)
        assert answer(joined[0]).is_dropped
        assert batcher.stats().cancelled == 1
