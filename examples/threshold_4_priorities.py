"""Priorities: accept important jobs, retry others, reject or drop the rest.

While the backend hangs, jobs accumulate. Critical jobs are always accepted. High ones are accepted
too, but at CRITICAL_PLUS they are retried every 100 ms until there is room. Low ones are rejected
at CRITICAL and dropped at CRITICAL_PLUS.

Prints:

    at CRITICAL: low was rejected, high waits, critical waits
    at CRITICAL_PLUS: low was dropped, high waits for a retry, critical waits
    after the backend recovered: high success, critical success
"""

from __future__ import annotations

import enum
import threading
from dataclasses import dataclass
from typing import Any

from batchmill.batcher import BatcherSettings, MicroBatcher
from batchmill.pressure import (
    QueueDecision,
    QueueThresholdContext,
    QueueThresholdSettings,
    ThresholdLevel,
    strategies,
)


class Priority(enum.Enum):
    CRITICAL = "critical"
    HIGH = "high"
    LOW = "low"


@dataclass(frozen=True)
class Job:
    priority: Priority


def decide_high(context: QueueThresholdContext[Any]) -> QueueDecision:
    if context.level is ThresholdLevel.CRITICAL_PLUS:
        return QueueDecision.retry(delay_ms=100)
    return QueueDecision.accept()


def decide_low(context: QueueThresholdContext[Any]) -> QueueDecision:
    if context.level is ThresholdLevel.CRITICAL_PLUS:
        return QueueDecision.drop()
    return QueueDecision.reject()


thresholds = QueueThresholdSettings(
    max_queue_size=1000,
    critical_handler=strategies.by_priority(
        lambda job: job.priority,
        {Priority.CRITICAL: strategies.accept(), Priority.HIGH: decide_high},
        default=decide_low,
    ),
)

backend_called, recovered = threading.Event(), threading.Event()


def run(batch: list[Job]) -> list[str]:
    backend_called.set()
    recovered.wait(timeout=30)
    return ["done"] * len(batch)


settings = BatcherSettings(batch_size=1000, linger_ms=0)
with MicroBatcher[Job].with_thresholds(run, settings, thresholds) as batcher:
    batcher.submit(Job(Priority.LOW))
    backend_called.wait(timeout=30)

    batcher.submit_many(Job(Priority.LOW) for _ in range(1000))
    low, *others = (batcher.submit(Job(priority)) for priority in reversed(Priority))
    assert low.result().is_failure
    assert not any(future.done() for future in others)
    print("at CRITICAL: low was rejected, high waits, critical waits")

    while batcher.queue_depth < 1500:
        batcher.submit(Job(Priority.CRITICAL))
    low, high, critical = (batcher.submit(Job(priority)) for priority in reversed(Priority))
    assert low.result().is_dropped
    assert batcher.stats().parked == 1
    assert not critical.done()
    print("at CRITICAL_PLUS: low was dropped, high waits for a retry, critical waits")

    recovered.set()
    print(
        "after the backend recovered:"
        f" high {high.result().outcome.value}, critical {critical.result().outcome.value}"
    )
