"""Batchers and thresholds for tests: backends, a batcher that always ends, levels."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any

from batchmill.batcher import BatcherSettings, BatcherStats, ItemResult, MicroBatcher
from batchmill.pressure import (
    QueueDecision,
    QueueThresholdContext,
    QueueThresholdSettings,
    ThresholdLevel,
)
from tests.kit import threads
from tests.kit.threads import WAIT_S

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
        self._gate = threads.Gate()
        self.wait_entered = self._gate.wait_entered
        self.let_pass = self._gate.let_pass
        self.open = self._gate.open

    def __call__(self, batch: list[Any]) -> list[Any]:
        answer = super().__call__(batch)
        self._gate.wait()
        return answer


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
