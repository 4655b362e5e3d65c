"""Handlers that fail: who is told, and that the queue goes on."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from tests.kit.queues import Green, Recorder, Red, make_queue, reds
from tests.kit.threads import WAIT_S
from tests.queue.kit import messages


class Boom(Exception):
    pass


def fail(batch: list[Any]) -> None:
    """A handler that always raises."""
    raise Boom(len(batch))


class Reports:
    """An error handler that keeps what it is told."""

    def __init__(self) -> None:
        self.calls: list[tuple[list[Any], BaseException]] = []

    def __call__(self, batch: list[Any], error: BaseException) -> None:
        self.calls.append((batch, error))


def test_error_handler_gets_batch_and_error() -> None:
    """What a handler raised, and the batch it raised on, go to the error handler."""
    reports = Reports()
    with make_queue(error_handler=reports) as queue:
        queue.add_handler(Red, fail)
        queue.produce_many(reds(3))
    [(batch, error)] = reports.calls
    assert batch == reds(3)
    assert isinstance(error, Boom)


def test_error_is_logged_without_an_error_handler(caplog: pytest.LogCaptureFixture) -> None:
    """Nobody given to tell, the error is logged with its traceback and the queue's name."""
    with make_queue("failing") as queue:
        queue.add_handler(Red, fail)
        queue.produce_many(reds(3))
    [record] = [record for record in caplog.records if record.levelno == logging.ERROR]
    assert "failing" in record.getMessage()
    assert "3 items" in record.getMessage()
    assert record.exc_info is not None
    assert record.exc_info[0] is Boom


def test_error_is_not_logged_with_an_error_handler(caplog: pytest.LogCaptureFixture) -> None:
    """The error handler was told, so the log is not."""
    with make_queue(error_handler=Reports()) as queue:
        queue.add_handler(Red, fail)
        queue.produce(Red())
    assert messages(caplog) == []


def test_queue_goes_on_after_an_error() -> None:
    """The batch after a failed one is handled."""
    consumed: list[Red] = []

    def moody(batch: list[Red]) -> None:
        if Red(0) in batch:
            raise Boom
        consumed.extend(batch)

    with make_queue(error_handler=Reports()) as queue:
        queue.add_handler(Red, moody)
        queue.produce(Red(0))
        assert queue.flush(WAIT_S)
        queue.produce(Red(1))
    assert consumed == [Red(1)]


def test_error_of_one_class_does_not_touch_another() -> None:
    """Another class on the same thread is handled as if nothing had happened."""
    handler = Recorder()
    with make_queue(error_handler=Reports()) as queue:
        queue.add_handler(Red, fail)
        queue.add_handler(Green, handler)
        queue.produce(Red())
        queue.produce(Green())
    assert handler.items == [Green()]


@pytest.mark.parametrize("kind", [SystemExit, KeyboardInterrupt, GeneratorExit])
def test_base_exceptions_are_reported(kind: type[BaseException]) -> None:
    """A handler that raises what is no Exception is reported all the same."""
    reports = Reports()

    def leave(batch: list[Any]) -> None:
        raise kind

    with make_queue(error_handler=reports) as queue:
        queue.add_handler(Red, leave)
        queue.produce(Red())
    assert [type(error) for _, error in reports.calls] == [kind]


@pytest.mark.parametrize("kind", [SystemExit, KeyboardInterrupt, GeneratorExit])
def test_thread_survives_base_exceptions(kind: type[BaseException]) -> None:
    """And its drain thread goes on."""
    handler = Recorder()

    def leave(batch: list[Any]) -> None:
        raise kind

    with make_queue(error_handler=Reports()) as queue:
        queue.add_handler(Red, leave)
        queue.add_handler(Green, handler)
        queue.produce(Red())
        assert queue.flush(WAIT_S)
        queue.produce(Green())
        assert queue.flush(WAIT_S)
    assert handler.items == [Green()]


@pytest.mark.parametrize("kind", [ValueError, SystemExit])
def test_error_handler_that_raises_is_logged(
    kind: type[BaseException], caplog: pytest.LogCaptureFixture
) -> None:
    """What an error handler raises is logged, with the queue's name: it has nowhere else to go."""

    def worse(batch: list[Any], error: BaseException) -> None:
        raise kind

    with make_queue("worse", error_handler=worse) as queue:
        queue.add_handler(Red, fail)
        queue.produce(Red())
    [record] = [record for record in caplog.records if record.levelno == logging.ERROR]
    assert "worse: the error handler failed" in record.getMessage()
    assert record.exc_info is not None
    assert record.exc_info[0] is kind


@pytest.mark.parametrize("kind", [ValueError, SystemExit])
def test_thread_survives_its_error_handler(kind: type[BaseException]) -> None:
    """An error handler that raises costs the queue no thread."""
    handler = Recorder()

    def worse(batch: list[Any], error: BaseException) -> None:
        raise kind

    with make_queue(error_handler=worse) as queue:
        queue.add_handler(Red, fail)
        queue.add_handler(Green, handler)
        queue.produce(Red())
        assert queue.flush(WAIT_S)
        queue.produce(Green())
        assert queue.flush(WAIT_S)
    assert handler.items == [Green()]


def test_flush_counts_failed_items_as_done() -> None:
    """flush() does not wait for ever for items whose handler raised."""
    with make_queue(error_handler=Reports()) as queue:
        queue.add_handler(Red, fail)
        queue.produce_many(reds(3))
        assert queue.flush(WAIT_S)
