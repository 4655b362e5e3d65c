"""Coroutine functions as handlers: a queue runs none of them, and loses nothing to them."""

from __future__ import annotations

import gc
import logging
import warnings
from collections.abc import Callable
from typing import Any

import pytest

from batchmill import BatchQueueSettings, ConfigError, ThreadPolicy
from batchmill.errors import UnawaitedError
from tests.kit.queues import (
    RECOGNIZED,
    UNRECOGNIZED,
    Recorder,
    Red,
    awaitable_of,
    coroutine_function,
    make_queue,
    reds,
)
from tests.queue.kit import messages

recognized = pytest.mark.parametrize("function", RECOGNIZED.values(), ids=RECOGNIZED.keys())
unrecognized = pytest.mark.parametrize("function", UNRECOGNIZED.values(), ids=UNRECOGNIZED.keys())


class Methods:
    """A handler with the methods that it is given."""

    def __init__(self, **methods: Callable[..., Any]) -> None:
        self.__dict__.update(methods)

    def consume(self, batch: list[Any]) -> None:
        """Take the batch."""


@recognized
def test_handler_that_would_not_run_is_refused(function: Callable[..., Any]) -> None:
    """Registering it raises, and the class is free for another handler."""
    right = Recorder()
    with make_queue() as queue:
        with pytest.raises(ConfigError, match=r"handler=.* a plain function"):
            queue.add_handler(Red, function)
        queue.add_handler(Red, right)
        queue.produce_many(reds(3))
    assert right.items == reds(3)


@recognized
def test_consume_that_would_not_run_is_refused(function: Callable[..., Any]) -> None:
    """The same for the method of an object."""
    with make_queue() as queue, pytest.raises(ConfigError, match="a plain function"):
        queue.add_handler(Red, Methods(consume=function))


@pytest.mark.parametrize("method", ["on_idle", "on_shutdown"])
def test_optional_method_that_would_not_run_is_refused(method: str) -> None:
    """What the handler has merged would be lost: the error names the method."""
    with make_queue() as queue, pytest.raises(ConfigError, match=f"{method}=.* a plain function"):
        queue.add_handler(Red, Methods(**{method: coroutine_function}))


@recognized
@pytest.mark.parametrize("field", ["consumer", "error_handler"])
def test_setting_that_would_not_run_is_refused(field: str, function: Callable[..., Any]) -> None:
    """Neither a direct consumer nor an error handler can be a coroutine function."""
    with pytest.raises(ConfigError, match=f"{field}=.* a plain function"):
        BatchQueueSettings(threads=ThreadPolicy.fixed(1), **{field: function})  # type: ignore[arg-type]


@unrecognized
def test_batch_of_a_handler_that_returns_an_awaitable_has_failed(
    function: Callable[..., Any],
) -> None:
    """It was not handled: it counts as failed, and the error handler gets it whole."""
    reports: list[tuple[list[Any], BaseException]] = []
    with make_queue(error_handler=lambda *report: reports.append(report)) as queue:
        queue.add_handler(Red, function)
        queue.produce_many(reds(3))
    stats = queue.stats()
    assert (stats.consumed, stats.failed) == (0, 3)
    [(batch, error)] = reports
    assert batch == reds(3)
    assert isinstance(error, UnawaitedError)


def test_error_names_the_handler_and_what_to_do(caplog: pytest.LogCaptureFixture) -> None:
    """Without an error handler the log has it."""
    with caplog.at_level(logging.ERROR), make_queue() as queue:
        queue.add_handler(Red, awaitable_of(coroutine_function))
        queue.produce(Red(1))
    [record] = caplog.records
    assert record.exc_info is not None
    message = str(record.exc_info[1])
    assert "awaitable_of.<locals>.<lambda> returned a coroutine" in message
    assert "asyncio.run(…)" in message


def test_coroutine_that_was_returned_is_closed() -> None:
    """The error has said it all: Python does not warn of it once more."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with make_queue(error_handler=lambda batch, error: None) as queue:
            queue.add_handler(Red, awaitable_of(coroutine_function))
            queue.produce(Red(1))
        gc.collect()
    assert [str(warning.message) for warning in caught] == []


def test_last_call_that_returns_an_awaitable_is_counted() -> None:
    """What the handler had merged is lost, and shutdown says so."""
    with make_queue(error_handler=lambda batch, error: None) as queue:
        queue.add_handler(Red, Methods(on_shutdown=awaitable_of(coroutine_function)))
    assert queue.stats().failed_last_calls == 1


def test_idle_call_that_returns_an_awaitable_is_counted() -> None:
    """The same for ``on_idle``, whose last call is one of these."""
    with make_queue(error_handler=lambda batch, error: None) as queue:
        queue.add_handler(Red, Methods(on_idle=awaitable_of(coroutine_function)))
    assert queue.stats().failed_last_calls == 1


def test_error_handler_that_returns_an_awaitable_is_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Nobody else has heard of the error."""
    with (
        caplog.at_level(logging.ERROR),
        make_queue(error_handler=awaitable_of(coroutine_function)) as queue,
    ):
        queue.add_handler(Red, lambda batch: 1 / 0)
        queue.produce(Red(1))
    assert ["the error handler failed" in message for message in messages(caplog)] == [True]


@pytest.mark.parametrize(
    "answer", [0, "text", [1], object()], ids=["number", "text", "list", "object"]
)
def test_other_answers_are_nobodys_business(answer: object) -> None:
    """A handler may return what it likes, as long as its work is done."""
    with make_queue() as queue:
        queue.add_handler(Red, lambda batch: answer)
        queue.produce(Red(1))
    assert queue.stats().consumed == 1
