"""The end of a dispatcher: drained, given back, waited for, from inside, twice."""

from __future__ import annotations

import logging
import threading
from typing import Any

import pytest

from batchmill.flows import Backpressure, FlowDispatcher
from tests.flows.kit import LOGGER, Recorder, Signal, assert_balanced, config, dispatching, signals
from tests.kit.threads import WAIT_S, Gate, spawn


def held(gate: Gate, **settings: Any) -> FlowDispatcher[Any]:
    """A dispatcher with one worker, which is in the handler."""
    dispatcher: FlowDispatcher[Any] = FlowDispatcher(gate, config(**settings))
    assert dispatcher.dispatch(Signal("held"))
    gate.wait_entered()
    return dispatcher


def test_close_drains_what_was_accepted() -> None:
    """And returns nothing, because nothing is left."""
    recorder = Recorder()
    dispatcher: FlowDispatcher[Any] = FlowDispatcher(recorder, config(worker_count=3))
    sent = [Signal(number % 10, number) for number in range(300)]
    assert all(dispatcher.dispatch(signal) for signal in sent)
    assert dispatcher.close(WAIT_S) == []
    assert sorted(recorder.items, key=lambda signal: signal.number) == sent


def test_close_returns_what_was_not_processed_in_the_order_it_was_dispatched() -> None:
    """Over all workers; what is in a handler at that moment is not part of it."""
    gate = Gate()
    dispatcher: FlowDispatcher[Any] = FlowDispatcher(gate, config(worker_count=2))
    for flow in "ab":
        dispatcher.dispatch(Signal(flow))
        gate.wait_entered()
    sent = [Signal(flow, number) for number in range(1, 4) for flow in "ab"]
    for signal in sent:
        dispatcher.dispatch(signal)
    assert dispatcher.close(0) == sent
    stats = dispatcher.stats()
    assert (stats.unprocessed, stats.in_handlers, stats.queued) == (6, 2, 0)
    assert_balanced(stats)
    gate.open()
    assert dispatcher.close(WAIT_S) == []
    assert len(gate.items) == 2


def test_a_finish_that_was_not_processed_leaves_no_flow_behind() -> None:
    """Given back, it is out of the dispatcher like any other."""
    gate = Gate()
    dispatcher = held(gate)
    dispatcher.dispatch(Signal("a", last=True))
    assert dispatcher.close(0) == [Signal("a", last=True)]
    assert dispatcher.stats().active_flows == 1
    gate.open()
    dispatcher.close(WAIT_S)


def test_a_closed_dispatcher_refuses() -> None:
    """Every policy answers False, counted under closed."""
    for policy in Backpressure:
        dispatcher: FlowDispatcher[Any] = FlowDispatcher(Recorder(), config(backpressure=policy))
        assert dispatcher.dispatch(Signal("a"))
        dispatcher.close(WAIT_S)
        assert not dispatcher.running
        for signal in (Signal("a"), Signal("b"), Signal(None)):
            assert not dispatcher.dispatch(signal)
        assert dispatcher.stats().dropped[policy.value, "closed"] == 3


@pytest.mark.parametrize(
    ("bounds", "queued"),
    [
        ({"worker_queue_capacity": 1}, 1),
        ({"worker_queue_capacity": 1, "ingress_capacity": 1}, 2),
        ({"max_flows": 1}, 0),
    ],
)
def test_close_wakes_blocked_producers_with_false(
    about_to_wait: threading.Semaphore, bounds: dict[str, int], queued: int
) -> None:
    """Whatever they wait for; their signals are not in, and no flow of theirs is left."""
    gate = Gate()
    dispatcher = held(gate, **bounds)
    for signal in signals("held", queued, start=1):
        dispatcher.dispatch(signal)
    with (
        spawn(lambda: dispatcher.dispatch(Signal("new", 8))) as first,
        spawn(lambda: dispatcher.dispatch(Signal("new", 9))) as second,
    ):
        for _ in range(2):
            assert about_to_wait.acquire(timeout=WAIT_S)
        with spawn(lambda: dispatcher.close(WAIT_S)) as closer:
            assert not first.result(WAIT_S)
            assert not second.result(WAIT_S)
            gate.open()
            assert closer.result(WAIT_S) == []
    stats = dispatcher.stats()
    assert (stats.refused["closed"], stats.blocked, stats.active_flows) == (2, 0, 1)
    assert [signal.number for signal in gate.items] == list(range(1 + queued))


def test_close_waits_for_the_handler(about_to_wait: threading.Semaphore) -> None:
    """It returns when the last signal is handled, not before."""
    gate = Gate()
    dispatcher = held(gate)
    with spawn(lambda: dispatcher.close(WAIT_S)) as closer:
        assert about_to_wait.acquire(timeout=WAIT_S)
        assert not closer.done()
        gate.open()
        assert closer.result(WAIT_S) == []
    assert dispatcher.stats().handled == 1


def test_close_inside_a_handler_does_not_wait_for_itself() -> None:
    """It returns at once; the drain goes on, and ends, when the handler has returned."""
    recorder = Recorder()
    answers: list[list[Any]] = []
    queued = threading.Event()

    def handle(batch: list[Signal]) -> None:
        recorder(batch)
        if batch[0].number == 0:
            assert queued.wait(WAIT_S)
            answers.append(dispatcher.close())

    dispatcher: FlowDispatcher[Any] = FlowDispatcher(handle, config())
    for signal in signals("a", 3):
        dispatcher.dispatch(signal)
    queued.set()
    assert dispatcher.close(WAIT_S) == []
    assert answers == [[]]
    assert recorder.items == signals("a", 3)


def test_close_inside_a_handler_without_time_returns_what_is_queued() -> None:
    """timeout=0 means now, also there."""
    answers: list[list[Any]] = []
    queued = threading.Event()

    def handle(batch: list[Signal]) -> None:
        assert queued.wait(WAIT_S)
        answers.append(dispatcher.close(0))

    dispatcher: FlowDispatcher[Any] = FlowDispatcher(handle, config())
    for signal in signals("a", 3):
        dispatcher.dispatch(signal)
    queued.set()
    assert dispatcher.close(WAIT_S) == []
    assert answers == [signals("a", 2, start=1)]


def test_any_number_of_threads_may_close(about_to_wait: threading.Semaphore) -> None:
    """There is one end, and everybody sees it."""
    gate = Gate()
    dispatcher = held(gate)
    with (
        spawn(lambda: dispatcher.close(WAIT_S)) as first,
        spawn(lambda: dispatcher.close(WAIT_S)) as second,
    ):
        for _ in range(2):
            assert about_to_wait.acquire(timeout=WAIT_S)
        gate.open()
        assert first.result(WAIT_S) == second.result(WAIT_S) == []
    assert dispatcher.close() == []


def test_a_handler_that_raises_in_the_final_drain_is_reported_too() -> None:
    """Close goes on to the end, and everything is counted."""
    heard: list[BaseException] = []
    queued = threading.Event()

    def handle(batch: list[Signal]) -> None:
        assert queued.wait(WAIT_S)
        raise ValueError(batch[0].number)

    dispatcher: FlowDispatcher[Any] = FlowDispatcher(
        handle, config(), error_handler=lambda batch, error: heard.append(error)
    )
    for signal in signals("a", 3):
        dispatcher.dispatch(signal)
    queued.set()
    assert dispatcher.close(WAIT_S) == []
    assert [error.args for error in heard] == [(0,), (1,), (2,)]
    stats = dispatcher.stats()
    assert (stats.failed, stats.pending) == (3, 0)


def test_a_handler_that_dispatches_while_closing_is_refused() -> None:
    """The gate is closed for it like for everybody, and it is not left waiting."""
    answers: list[bool] = []
    inside, closing = threading.Event(), threading.Event()

    def handle(batch: list[Signal]) -> None:
        inside.set()
        assert closing.wait(WAIT_S)
        answers.append(dispatcher.dispatch(Signal("a", 1)))

    dispatcher: FlowDispatcher[Any] = FlowDispatcher(handle, config())
    dispatcher.dispatch(Signal("a", 0))
    assert inside.wait(WAIT_S)
    dispatcher.close(0)
    closing.set()
    dispatcher.close(WAIT_S)
    assert answers == [False]


def test_leaving_the_block_says_what_was_left(caplog: pytest.LogCaptureFixture) -> None:
    """A with block has nobody to give the signals to, so the log hears how many they were."""
    gate = Gate()
    with caplog.at_level(logging.WARNING, LOGGER):
        with held(gate, close_timeout=0.001) as dispatcher:
            dispatcher.dispatch(Signal("a", 1))
        assert "dropped 1 signal." in caplog.text
    gate.open()
    dispatcher.close(WAIT_S)
    assert dispatcher.stats().unprocessed == 1


def test_the_workers_have_ended_when_close_returns() -> None:
    """Nothing of the dispatcher runs on behind the caller's back."""
    with dispatching(Recorder(), worker_count=3, name="ended") as dispatcher:
        pass
    assert not [t for t in threading.enumerate() if t.name.startswith("batchmill-ended")]
    assert not dispatcher.running


def test_a_thread_that_cannot_be_started_stops_those_that_were(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The constructor raises what the system said, and leaves no thread behind."""
    start = threading.Thread.start
    started: list[threading.Thread] = []

    def start_two(thread: threading.Thread) -> None:
        if len(started) == 2:
            raise RuntimeError("can't start new thread")
        started.append(thread)
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", start_two)
    with pytest.raises(RuntimeError, match="can't start"):
        FlowDispatcher(Recorder(), config(worker_count=3))
    for thread in started:
        thread.join(WAIT_S)
        assert not thread.is_alive()
