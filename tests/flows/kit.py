"""What the tests of the flow dispatcher share. Nothing here sleeps: threads say how far they got.

``WAIT_S`` is how long anything may take before its test fails: a bound on failure, not a measure.
"""

from __future__ import annotations

import contextlib
import operator
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, TypeVar

from batchmill.flows import FlowDispatcher, FlowSettings, FlowStats

T = TypeVar("T")

WAIT_S = 20.0
LOGGER = "batchmill.flows"


@dataclass(frozen=True, slots=True)
class Signal:
    flow: Any
    number: int = 0
    last: bool = False


def signals(flow: object, count: int, start: int = 0) -> list[Signal]:
    """So many signals of a flow, numbered in the order in which they should be handled."""
    return [Signal(flow, number) for number in range(start, start + count)]


def config(**settings: Any) -> FlowSettings:
    """A configuration for :class:`Signal`: one worker, one signal a call, unless said otherwise."""
    settings = {
        "worker_count": 1,
        "batch_max": 1,
        "flow_id": operator.attrgetter("flow"),
        "finished": operator.attrgetter("last"),
        **settings,
    }
    return FlowSettings(**settings)


class ManualClock:
    """Time stands still until a test moves it."""

    def __init__(self) -> None:
        self.now = 1_000.0

    def __call__(self) -> float:
        return self.now


class Recorder:
    """A handler that keeps every batch."""

    def __init__(self) -> None:
        self.batches: list[list[Any]] = []

    def __call__(self, batch: list[Any]) -> None:
        self.batches.append(batch)

    @property
    def signals(self) -> list[Any]:
        return [signal for batch in self.batches for signal in batch]


class Gate(Recorder):
    """A handler that keeps every batch and stays inside until it is opened.

    Dispatch one signal, ``wait_entered()``, and that worker takes nothing more until ``open()``.
    """

    def __init__(self) -> None:
        super().__init__()
        self._entered = threading.Semaphore(0)
        self._opened = threading.Event()

    def __call__(self, batch: list[Any]) -> None:
        super().__call__(batch)
        self._entered.release()
        if not self._opened.wait(WAIT_S):
            raise TimeoutError("the test never opened its gate")

    def wait_entered(self, calls: int = 1) -> None:
        for _ in range(calls):
            assert self._entered.acquire(timeout=WAIT_S), "no worker came to the gate"

    def open(self) -> None:
        self._opened.set()


@contextlib.contextmanager
def dispatching(handler: Callable[[list[Any]], object], **settings: Any) -> Iterator[Any]:
    """A dispatcher that always ends, and with it the gate that may hold it up."""
    names = ("error_handler", "clock", "name")
    extras = {name: settings.pop(name) for name in names if name in settings}
    dispatcher: FlowDispatcher[Any] = FlowDispatcher(handler, config(**settings), **extras)
    try:
        yield dispatcher
    finally:
        if isinstance(handler, Gate):
            handler.open()
        dispatcher.close(WAIT_S)


@contextlib.contextmanager
def in_thread(call: Callable[[], T]) -> Iterator[Future[T]]:
    """Run ``call`` in a thread of its own, which has ended when the block has."""
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(call())
        except BaseException as error:  # noqa: BLE001 - handed to the test
            future.set_exception(error)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield future
    finally:
        thread.join(WAIT_S)


def assert_balanced(stats: FlowStats) -> None:
    """Every signal that was let in is in exactly one place."""
    gone = sum(stats.evicted.values()) + stats.unprocessed
    assert stats.dispatched == stats.handled + stats.failed + gone + stats.pending
