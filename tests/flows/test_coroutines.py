"""Coroutine functions as handlers: a dispatcher runs none of them, and loses nothing to them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from batchmill import ConfigError
from batchmill.errors import UnawaitedError
from batchmill.flows import FlowDispatcher
from tests.flows.kit import Signal, assert_balanced, dispatching
from tests.kit.coroutines import RECOGNIZED, UNRECOGNIZED, awaitable_of, coroutine_function

recognized = pytest.mark.parametrize("function", RECOGNIZED.values(), ids=RECOGNIZED.keys())
unrecognized = pytest.mark.parametrize("function", UNRECOGNIZED.values(), ids=UNRECOGNIZED.keys())


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
