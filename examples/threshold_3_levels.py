"""A handler per level: accept and record at WARNING, reject at CRITICAL, drop at CRITICAL_PLUS.

A batcher whose CRITICAL handler rejects every item never reaches CRITICAL_PLUS. Other depths can:
the second half applies the same thresholds to the number of files in a spool, which other programs
fill too.

Prints:

    batcher: 1000 stored, 2 rejected, 500 warnings, the first at depth 500
    spool at 499: no threshold reached
    spool at 500: accept
    spool at 1000: reject, because it is at its critical threshold
    spool at 1500: drop
"""

from __future__ import annotations

from typing import Any

from batchmill.batcher import BatcherSettings, MicroBatcher
from batchmill.pressure import (
    QueueDecision,
    QueueThresholdContext,
    QueueThresholdManager,
    QueueThresholdSettings,
)

warnings: list[int] = []


def record(context: QueueThresholdContext[Any]) -> QueueDecision:
    warnings.append(context.depth)
    return QueueDecision.accept()


def reject(context: QueueThresholdContext[Any]) -> QueueDecision:
    return QueueDecision.reject("it is at its critical threshold")


def drop(context: QueueThresholdContext[Any]) -> QueueDecision:
    return QueueDecision.drop()


def store(batch: list[int]) -> list[str]:
    return [f"stored {item}" for item in batch]


thresholds = QueueThresholdSettings(
    max_queue_size=1000,
    warning_threshold=500,
    critical_threshold=1000,
    critical_plus_threshold=1500,
    warning_handler=record,
    critical_handler=reject,
    critical_plus_handler=drop,
)
# With this batch size and linger time nothing is sent before close(): the queue fills up.
settings = BatcherSettings(batch_size=10_000, linger_ms=60_000)

with MicroBatcher[int].with_thresholds(store, settings, thresholds) as batcher:
    batcher.submit_many(range(1002))
stats = batcher.stats()
print(
    f"batcher: {stats.succeeded} stored, {stats.rejected} rejected,"
    f" {len(warnings)} warnings, the first at depth {warnings[0]}"
)

files_in_spool = 0
manager = QueueThresholdManager(thresholds, depth=lambda: files_in_spool)
for files_in_spool in (499, 500, 1000, 1500):
    decision = manager.check("a file")
    outcome = "no threshold reached" if decision is None else decision.action.value
    if decision is not None and decision.reason is not None:
        outcome += f", because {decision.reason}"
    print(f"spool at {files_in_spool}: {outcome}")
manager.close()
