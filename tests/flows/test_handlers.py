"""Handlers, and functions of the flow, that raise, and handlers that would never run."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest

from batchmill import ConfigError
from batchmill.errors import UnawaitedError
from batchmill.flows import FlowDispatcher, RoundRobin
from tests.flows.kit import LOGGER, Recorder, Signal, assert_balanced, dispatching, hold, signals
from tests.kit.queues import RECOGNIZED, UNRECOGNIZED, awaitable_of, coroutine_function
from tests.kit.threads import Gate

recognized = pytest.mark.parametrize("function", RECOGNIZED.values(), ids=RECOGNIZED.keys())
unrecognized = pytest.mark.parametrize("function", UNRECOGNIZED.values(), ids=UNRECOGNIZED.keys())


@pytest.mark.parametrize("error", [ValueError("no"), SystemExit(3), KeyboardInterrupt()])
def test_a_handler_that_raises_is_counted_and_reported(error: BaseException) -> None:
    """Whatever it raises: the batch has failed, the error handler hears, the worker lives."""
    heard: list[tuple[list[Any], BaseException]] = []

    def handle(batch: list[Signal]) -> None:
        if batch[0].number == 1:
            batch.clear()  # the list is the handler's own
            raise error

    with dispatching(
        handle, error_handler=lambda batch, error: heard.append((batch, error))
    ) as dispatcher:
        for signal in signals("a", 3):
            dispatcher.dispatch(signal)
    stats = dispatcher.stats()
    assert heard == [([Signal("a", 1)], error)]
    assert (stats.handled, stats.failed) == (2, 1)
    assert stats.handler_latency.count == 3
    assert_balanced(stats)


def test_without_an_error_handler_the_log_hears(caplog: pytest.LogCaptureFixture) -> None:
    """At level ERROR, with the traceback and how many signals it hit."""

    def handle(batch: list[Signal]) -> None:
        raise ValueError("no")

    with caplog.at_level(logging.ERROR, LOGGER), dispatching(handle) as dispatcher:
        dispatcher.dispatch(Signal("a"))
    [record] = caplog.records
    assert "failed on 1 signal" in record.getMessage()
    assert record.exc_info is not None


def test_an_error_handler_that_raises_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    """And the worker lives through that too."""
    recorder = Recorder()

    def handle(batch: list[Signal]) -> None:
        recorder(batch)
        raise ValueError("no")

    def complain(batch: list[Signal], error: BaseException) -> None:
        raise RuntimeError("worse")

    with (
        caplog.at_level(logging.ERROR, LOGGER),
        dispatching(handle, error_handler=complain) as dispatcher,
    ):
        for signal in signals("a", 2):
            dispatcher.dispatch(signal)
    assert len(recorder.items) == 2
    assert ["error handler failed" in record.getMessage() for record in caplog.records] == [
        True,
        True,
    ]


def test_a_failed_finish_ends_its_flow() -> None:
    """A handler that raises on the finish signal does not leave the flow mapped."""

    def handle(batch: list[Signal]) -> None:
        raise ValueError("no")

    with dispatching(handle, error_handler=lambda batch, error: None) as dispatcher:
        dispatcher.dispatch(Signal("a", 0))
        dispatcher.dispatch(Signal("a", 1, last=True))
    stats = dispatcher.stats()
    assert (stats.failed, stats.active_flows) == (2, 0)


@pytest.mark.parametrize("setting", ["flow_id", "finished"])
def test_what_flow_id_or_finished_raises_is_the_producers(setting: str) -> None:
    """The signal is not in, and the dispatcher goes on."""

    def refuse(signal: Signal) -> Any:
        if signal.number == 0:
            raise LookupError("no such thing")
        return None

    recorder = Recorder()
    with dispatching(recorder, **{setting: refuse}) as dispatcher:
        with pytest.raises(LookupError):
            dispatcher.dispatch(Signal("a", 0))
        assert dispatcher.dispatch(Signal("a", 1))
    assert recorder.items == [Signal("a", 1)]


def test_an_unhashable_flow_id_is_a_type_error() -> None:
    """The signal is not in, the counts still balance, and the dispatcher goes on."""
    gate = Gate()
    with dispatching(gate, worker_count=2) as dispatcher:
        hold(dispatcher, gate)
        dispatcher.dispatch(Signal("held", 1))
        with pytest.raises(TypeError, match="unhashable"):
            dispatcher.dispatch(Signal(["a"]))
        stats = dispatcher.stats()
        assert (stats.dispatched, stats.pending) == (2, 2)
        assert_balanced(stats)
    assert [signal.number for signal in gate.items] == [0, 1]


def test_handler_and_error_handler_may_be_objects() -> None:
    """With the methods consume and on_error; being callable as well changes nothing."""

    class Orders:
        def __init__(self) -> None:
            self.batches: list[list[Signal]] = []
            self.errors: list[tuple[list[Signal], BaseException]] = []

        def __call__(self, *_: object) -> None:
            raise AssertionError("the method is called, not the object")

        def consume(self, batch: list[Signal]) -> None:
            self.batches.append(batch)
            raise ValueError("no")

        def on_error(self, batch: list[Signal], error: BaseException) -> None:
            self.errors.append((batch, error))

    orders = Orders()
    with dispatching(orders, error_handler=orders) as dispatcher:
        dispatcher.dispatch(Signal("a"))
    assert orders.batches == [[Signal("a")]]
    assert [(batch, str(error)) for batch, error in orders.errors] == [([Signal("a")], "no")]


def test_an_assignment_rule_that_fails_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    """The first time with its traceback; all failures are counted."""

    class Broken(RoundRobin):
        def pick(self, workers: Any, /) -> int:
            raise LookupError("no idea")

    recorder = Recorder()
    with (
        caplog.at_level(logging.WARNING, LOGGER),
        dispatching(recorder, worker_count=2, assignment=Broken()) as dispatcher,
    ):
        for flow in "abcd":
            assert dispatcher.dispatch(Signal(flow))
    assert sorted(signal.flow for signal in recorder.items) == ["a", "b", "c", "d"]
    assert dispatcher.stats().assignment_failures == 4
    [record] = caplog.records
    assert "least loaded worker was taken" in record.getMessage()
    assert record.exc_info is not None
    assert isinstance(record.exc_info[1], LookupError)


@recognized
def test_handler_that_would_not_run_is_refused(function: Callable[..., Any]) -> None:
    """Making the dispatcher raises, and starts no thread."""
    with pytest.raises(ConfigError, match=r"handler=.* a plain function"):
        FlowDispatcher(function)


@recognized
def test_error_handler_that_would_not_run_is_refused(function: Callable[..., Any]) -> None:
    """Nobody would hear of the errors."""
    with pytest.raises(ConfigError, match=r"error_handler=.* a plain function"):
        FlowDispatcher(print, error_handler=function)


@unrecognized
def test_batch_of_a_handler_that_returns_an_awaitable_has_failed(
    function: Callable[..., Any],
) -> None:
    """It was not handled: it counts as failed, and the error handler gets it."""
    reports: list[tuple[list[Any], BaseException]] = []
    with dispatching(function, error_handler=lambda *report: reports.append(report)) as dispatcher:
        dispatcher.dispatch(Signal("a"))
    stats = dispatcher.stats()
    assert (stats.handled, stats.failed) == (0, 1)
    assert_balanced(stats)
    [(batch, error)] = reports
    assert batch == [Signal("a")]
    assert isinstance(error, UnawaitedError)


def test_error_handler_that_returns_an_awaitable_is_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Nobody else has heard of the error."""
    error_handler = awaitable_of(coroutine_function)
    with dispatching(lambda batch: 1 / 0, error_handler=error_handler) as dispatcher:
        dispatcher.dispatch(Signal("a"))
    [record] = caplog.records
    assert "the error handler failed" in record.getMessage()
