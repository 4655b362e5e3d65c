"""What the tests of thresholds and of the batcher share. Nothing here sleeps.

``WAIT_S`` is how long anything may take before its test fails: a bound on failure, not a measure.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any, TypeVar

from batchmill.batcher import BatcherSettings, BatcherStats, ItemResult, MicroBatcher
from batchmill.pressure import (
    QueueDecision,
    QueueThresholdContext,
    QueueThresholdSettings,
    ThresholdLevel,
)

T = TypeVar("T")

WAIT_S = 20.0
LOGGER = "batchmill.batcher"
PRESSURE_LOGGER = "batchmill.pressure"
FOREVER_MS = 3_600_000.0
"""A linger that no test waits for."""


class Echo:
    """A backend that answers ``(item, "done")`` for each item, and keeps every batch."""

    def __init__(self) -> None:
        self.batches: list[list[Any]] = []

    def __call__(self, batch: list[Any]) -> list[Any]:
        self.batches.append(batch)
        return [(item, "done") for item in batch]

    @property
    def items(self) -> list[Any]:
        return [item for batch in self.batches for item in batch]


class Gate(Echo):
    """An echo that stays inside until it is opened, or is let go on one batch at a time."""

    def __init__(self) -> None:
        super().__init__()
        self._entered = threading.Semaphore(0)
        self._passes = threading.Semaphore(0)
        self._opened = False

    def __call__(self, batch: list[Any]) -> list[Any]:
        answer = super().__call__(batch)
        self._entered.release()
        if not self._opened and not self._passes.acquire(timeout=WAIT_S):
            raise TimeoutError("the test never opened its gate")
        return answer

    def wait_entered(self, calls: int = 1) -> None:
        for _ in range(calls):
            assert self._entered.acquire(timeout=WAIT_S), "no worker came to the gate"

    def let_pass(self, calls: int = 1) -> None:
        self._passes.release(calls)

    def open(self) -> None:
        self._opened = True
        self._passes.release(1000)


class Failing(Echo):
    """A backend that raises for a batch that holds a poison item."""

    def __init__(self, *poison: object) -> None:
        super().__init__()
        self._poison = poison

    def __call__(self, batch: list[Any]) -> list[Any]:
        answer = super().__call__(batch)
        if any(item in self._poison for item in batch):
            raise ValueError(f"cannot take {batch}")
        return answer


@contextlib.contextmanager
def batching(
    backend: Any,
    thresholds: QueueThresholdSettings | None = None,
    clock: Any = None,
    **settings: Any,
) -> Iterator[MicroBatcher[Any]]:
    """A batcher that always ends, and with it the gate that may hold it up."""
    settings.setdefault("close_timeout_s", WAIT_S)
    name = settings.pop("name", "test")
    batcher: MicroBatcher[Any] = MicroBatcher(
        backend, BatcherSettings(**settings), thresholds, name=name, clock=clock
    )
    try:
        yield batcher
    finally:
        if isinstance(backend, Gate):
            backend.open()
        batcher.close()
    assert_balanced(batcher.stats())


@contextlib.contextmanager
def held(
    thresholds: QueueThresholdSettings | None = None, waiting: int = 0, **settings: Any
) -> Iterator[tuple[MicroBatcher[Any], Gate]]:
    """A batcher whose only worker is held at the gate, with so many items waiting behind it."""
    gate = Gate()
    settings.setdefault("batch_size", 1)
    with batching(gate, thresholds, **settings) as batcher:
        batcher.submit("first")
        gate.wait_entered()
        batcher.submit_many(range(waiting))
        assert batcher.queue_depth == waiting
        yield batcher, gate


def levels(**settings: Any) -> QueueThresholdSettings:
    """Thresholds at 2, 4 and 6, and a hard capacity of 8."""
    return QueueThresholdSettings(max_queue_size=4, **settings)


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


def wait_until(condition: Callable[[], object], what: str) -> None:
    """Return as soon as ``condition`` holds; for inner states that signal nobody."""
    deadline = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline, f"it never happened: {what}"
        os.sched_yield()


def answer(future: Future[ItemResult[Any]]) -> ItemResult[Any]:
    """The result of a future, soon."""
    return future.result(WAIT_S)


def context(
    level: ThresholdLevel = ThresholdLevel.CRITICAL, attempt: int = 1, item: object = "item"
) -> QueueThresholdContext[Any]:
    """What a handler is told, at a depth of 10 past a threshold of 8."""
    return QueueThresholdContext(item, 10, 8, level, attempt, 0.0)


def assert_balanced(stats: BatcherStats) -> None:
    """Every submitted item is in exactly one place."""
    ended = stats.succeeded + stats.failed + stats.rejected + stats.dropped
    assert stats.submitted == ended + stats.expired + stats.cancelled + stats.pending


def always(decision: QueueDecision) -> Callable[[Any], QueueDecision]:
    """A handler that decides the same every time."""
    return lambda _: decision


def threads_of(name: str) -> list[threading.Thread]:
    """The threads of the batcher of that name."""
    return [t for t in threading.enumerate() if t.name.startswith(f"batchmill-{name}-")]


def in_child(work: Callable[[], Any]) -> Any:
    """What ``work`` returns in a forked child of this process."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.write(writer, json.dumps(work()).encode())
        finally:
            os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as pipe:
        text = pipe.read()
    os.waitpid(pid, 0)
    assert text, "the child failed; its traceback is above"
    return json.loads(text)


def run_script(script: str) -> subprocess.CompletedProcess[str]:
    """Run it in an interpreter of its own, with every warning an error."""
    return subprocess.run(
        [sys.executable, "-W", "error", "-c", textwrap.dedent(script)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
