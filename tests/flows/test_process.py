"""Fork, interpreter exit, garbage, Ctrl-C."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import multiprocessing
import os
import signal
import threading
import warnings
import weakref
from collections.abc import Iterator
from typing import Any

import pytest

from batchmill.flows import FlowDispatcher
from batchmill.flows import dispatcher as dispatcher_module
from batchmill.flows.flow_map import Entry
from batchmill.flows.queues import WorkerQueue
from batchmill.waiters import ThreadWaiter
from tests.flows.kit import Recorder, Signal, assert_balanced, config, dispatching, signals
from tests.kit.processes import in_child, run_script
from tests.kit.threads import WAIT_S, Gate

needs_fork = pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork")


@needs_fork
def test_a_forked_child_starts_anew_and_empty() -> None:
    """What was queued is the parent's; the child's own signals are handled by its own workers."""
    gate = Gate()
    with dispatching(gate) as dispatcher:
        dispatcher.dispatch(Signal("parent"))
        gate.wait_entered()
        dispatcher.dispatch(Signal("parent", 1))

        def work() -> list[Any]:
            stats = dispatcher.stats()
            before = [stats.dispatched, stats.pending, stats.active_flows]
            gate.batches.clear()
            gate.open()
            accepted = dispatcher.dispatch(Signal("child", 7))
            left = dispatcher.close(WAIT_S)
            return [before, accepted, left, [signal.number for signal in gate.items]]

        assert in_child(work) == [[0, 0, 0], True, [], [7]]
    assert [signal.number for signal in gate.items] == [0, 1]


@needs_fork
def test_a_child_forked_while_the_lock_is_held_does_not_hang() -> None:
    """The child has a lock of its own: the thread that held it was not copied."""
    with dispatching(Recorder()) as dispatcher, dispatcher._core.lock:
        answer = in_child(lambda: [dispatcher.dispatch(Signal("a")), dispatcher.close(WAIT_S)])
    assert answer == [True, []]


@needs_fork
def test_a_closed_dispatcher_is_closed_in_the_child() -> None:
    """And closing it there again returns at once."""
    with dispatching(Recorder()) as dispatcher:
        dispatcher.close(WAIT_S)
        answer = in_child(lambda: [dispatcher.dispatch(Signal("a")), dispatcher.close(WAIT_S)])
    assert answer == [False, []]


@needs_fork
def test_a_handler_may_fork() -> None:
    """In the child the handler's thread is nobody's worker any more."""
    answers: list[Any] = []
    answered = threading.Event()

    def handle(batch: list[Signal]) -> None:
        if batch[0].number == 0:
            answers.append(
                in_child(lambda: [dispatcher.dispatch(Signal("a", 1)), dispatcher.close(WAIT_S)])
            )
            answered.set()

    with dispatching(handle, worker_queue_capacity=1) as dispatcher:
        dispatcher.dispatch(Signal("a", 0))
        assert answered.wait(WAIT_S)
    assert answers == [[True, []]]


def _in_multiprocessing_child(dispatcher: FlowDispatcher[Any]) -> None:
    dispatcher.dispatch(Signal("child"))


@needs_fork
def test_a_multiprocessing_child_drains_before_it_ends() -> None:
    """Though it leaves without Python's exit hooks."""
    reader, writer = os.pipe()
    parent = os.getpid()

    def handle(batch: list[Signal]) -> None:
        if os.getpid() != parent:
            os.write(writer, b"handled")

    with dispatching(handle) as dispatcher:
        context = multiprocessing.get_context("fork")
        child = context.Process(target=_in_multiprocessing_child, args=(dispatcher,))
        child.start()
        child.join(WAIT_S)
        os.close(writer)
        with os.fdopen(reader) as pipe:
            assert pipe.read() == "handled"
        assert child.exitcode == 0
        child.close()


def test_a_dispatcher_that_was_never_closed_drains_at_exit() -> None:
    """Everything accepted is handled before the interpreter goes, and nothing is said."""
    result = run_script(
        """
        import threading
        from batchmill.flows import FlowSettings, FlowDispatcher
        count = 0
        began = threading.Event()
        def handle(batch):
            global count
            began.wait()
            count += len(batch)
            if count == 1000:
                print("handled", count, flush=True)
        keep = FlowDispatcher(handle, FlowSettings(worker_count=1, flow_id=lambda s: s % 7))
        for number in range(1000):
            keep.dispatch(number)
        began.set()
        """,
        options=("-W", "error"),
    )
    assert (result.returncode, result.stdout, result.stderr) == (0, "handled 1000\n", "")


def test_a_handler_that_hangs_does_not_keep_the_interpreter() -> None:
    """After close_timeout it goes, and says how much was not processed."""
    result = run_script(
        """
        import threading
        from batchmill.flows import FlowSettings, FlowDispatcher
        began, never = threading.Event(), threading.Event()
        def handle(batch):
            began.set()
            never.wait()
        keep = FlowDispatcher(
            handle,
            FlowSettings(worker_count=1, flow_id=lambda s: s, batch_max=1, close_timeout=0.05),
        )
        keep.dispatch(1)
        began.wait()
        keep.dispatch(2)
        keep.dispatch(3)
        """,
        options=("-W", "error"),
    )
    assert result.returncode == 0
    assert "the interpreter ended before 2 signals could be processed" in result.stderr


def worker_threads(name: str) -> list[threading.Thread]:
    """The threads of the dispatcher of that name."""
    return [t for t in threading.enumerate() if t.name.startswith(f"batchmill-{name}-")]


@contextlib.contextmanager
def a_resource_warning() -> Iterator[None]:
    """The block ends a dispatcher that nobody closed, and it says so."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield
        gc.collect()
    assert ["never closed" in str(warning.message) for warning in caught] == [True]
    assert caught[0].category is ResourceWarning


def test_a_dispatcher_that_nobody_references_is_collected() -> None:
    """Its sleeping threads do not keep it; they end."""
    with a_resource_warning():
        dispatcher: Any = FlowDispatcher(Recorder(), config(worker_count=2), name="lost")
        core = weakref.ref(dispatcher._core)
        threads = worker_threads("lost")
        del dispatcher
    for thread in threads:
        thread.join(WAIT_S)
    gc.collect()
    assert core() is None
    assert worker_threads("lost") == []


def test_a_dispatcher_whose_handler_refers_back_to_it_is_collected() -> None:
    """An object that hands out one of its own methods is the usual case."""

    class Service:
        def __init__(self) -> None:
            self.handled = threading.Event()
            self.dispatcher: FlowDispatcher[Any] = FlowDispatcher(
                self.handle, config(worker_count=2), name="own"
            )

        def handle(self, batch: list[Any]) -> None:
            self.handled.set()

    with a_resource_warning():
        service: Any = Service()
        service.dispatcher.dispatch(Signal("a"))
        assert service.handled.wait(WAIT_S)
        gone = weakref.ref(service)
        threads = worker_threads("own")
        core = service.dispatcher._core
        while not all(queue.asleep for queue in core.router.queues):
            core.lock.acquire()  # let the workers get to sleep: they need the lock for it
            core.lock.release()
        del service, core
        gc.collect()
        for thread in threads:
            thread.join(WAIT_S)
    assert gone() is None
    assert worker_threads("own") == []


def test_what_an_abandoned_dispatcher_had_accepted_is_handled() -> None:
    """It drains, and then it ends."""
    gate = Gate()
    with a_resource_warning():
        dispatcher: Any = FlowDispatcher(gate, config(), name="abandoned")
        for item in signals("a", 5):
            dispatcher.dispatch(item)
        gate.wait_entered()
        threads = worker_threads("abandoned")
        del dispatcher
    gate.open()
    for thread in threads:
        thread.join(WAIT_S)
        assert not thread.is_alive()
    assert gate.items == signals("a", 5)


def test_an_abandoned_dispatcher_ends_though_something_still_holds_its_insides() -> None:
    """As the traceback of an error that a handler raised, and somebody kept, does."""
    with a_resource_warning():
        dispatcher: Any = FlowDispatcher(Recorder(), config(worker_count=2), name="kept")
        core = dispatcher._core
        threads = worker_threads("kept")
        del dispatcher
    for thread in threads:
        thread.join(WAIT_S)
        assert not thread.is_alive()
    assert core.router.closed


@pytest.fixture
def interrupted_in_wait(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Somebody presses Ctrl-C as soon as the main thread waits, until the event is set."""
    threads: list[threading.Thread] = []
    enough = threading.Event()
    main = threading.main_thread().ident
    assert main is not None

    class Pressing(ThreadWaiter):
        def wait(self, timeout_s: float | None) -> bool:
            if not enough.is_set():
                press = threading.Thread(target=signal.pthread_kill, args=(main, signal.SIGINT))
                threads.append(press)
                press.start()
            return super().wait(timeout_s)

    monkeypatch.setattr(dispatcher_module, "ThreadWaiter", Pressing)
    yield enough
    for thread in threads:
        thread.join(WAIT_S)


@pytest.mark.skipif(not hasattr(signal, "pthread_kill"), reason="needs pthread_kill")
def test_ctrl_c_gets_through_a_dispatch_that_waits(interrupted_in_wait: threading.Event) -> None:
    """The signal is not in, nothing is left in line, and the counts balance."""
    gate = Gate()
    with dispatching(gate, worker_queue_capacity=1) as dispatcher:
        try:
            dispatcher.dispatch(Signal("a", 0))
            gate.wait_entered()
            dispatcher.dispatch(Signal("a", 1))
            with pytest.raises(KeyboardInterrupt):
                dispatcher.dispatch(Signal("b", 2))
            stats = dispatcher.stats()
            assert (stats.blocked, stats.active_flows, stats.refused["cancelled"]) == (0, 1, 1)
            assert_balanced(stats)
            with pytest.raises(KeyboardInterrupt):
                dispatcher.close(WAIT_S)
        finally:
            interrupted_in_wait.set()
    assert [item.number for item in gate.items] == [0, 1]


@pytest.mark.parametrize("when", ["before", "after"])
def test_ctrl_c_in_the_middle_of_a_dispatch_leaves_the_counts_right(
    monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    """Forced right before or after the signal is queued: it is in or not, and all adds up."""
    put = WorkerQueue.put

    def interrupted_put(queue: WorkerQueue, entry: Entry) -> None:
        if when == "after":
            queue._queue.append(entry)
        raise KeyboardInterrupt

    gate = Gate()
    with dispatching(gate, worker_queue_capacity=3) as dispatcher:
        dispatcher.dispatch(Signal("a", 0))
        gate.wait_entered()
        monkeypatch.setattr(WorkerQueue, "put", interrupted_put)
        with pytest.raises(KeyboardInterrupt):
            dispatcher.dispatch(Signal("b", 1, last=True))
        monkeypatch.setattr(WorkerQueue, "put", put)
        stats = dispatcher.stats()
        assert_balanced(stats)
        queued = int(when == "after")
        assert (stats.queued, stats.active_flows) == (queued, 1 + queued)
        for number in range(2, 5 - queued):
            assert dispatcher.dispatch(Signal("c", number, last=True), timeout=0)
        assert not dispatcher.dispatch(Signal("c", 9), timeout=0)
        dispatcher.complete("a")
    assert dispatcher.stats().active_flows == 0
    assert len(gate.items) == 4


def test_ctrl_c_in_a_loop_leaves_nothing_behind() -> None:
    """A task that gets KeyboardInterrupt thrown in gives up its place like a cancelled one."""
    gate = Gate()

    async def main() -> None:
        with dispatching(gate, worker_queue_capacity=1) as dispatcher:
            dispatcher.dispatch(Signal("a", 0))
            gate.wait_entered()
            dispatcher.dispatch(Signal("a", 1))
            coroutine = dispatcher.adispatch(Signal("b", 2))
            coroutine.send(None)
            with pytest.raises(KeyboardInterrupt):
                coroutine.throw(KeyboardInterrupt())
            stats = dispatcher.stats()
            assert (stats.blocked, stats.active_flows) == (0, 1)

    asyncio.run(main())


def test_what_was_accepted_just_before_it_was_abandoned_is_handled() -> None:
    """The worker may not have looked yet when the dispatcher goes: accepted is accepted."""
    for item in signals("a", 15):
        recorder = Recorder()
        with a_resource_warning():
            dispatcher: Any = FlowDispatcher(recorder, config(worker_count=1), name="brief")
            threads = worker_threads("brief")
            assert dispatcher.dispatch(item)
            del dispatcher
        for thread in threads:
            thread.join(WAIT_S)
        assert recorder.items == [item]
