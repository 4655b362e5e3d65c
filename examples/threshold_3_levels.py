"""A handler for each level: accept and note at WARNING, reject at CRITICAL, drop above.

A batcher whose CRITICAL handler refuses everybody never holds more than that, so CRITICAL_PLUS is
the net below it. The same thresholds can watch any other depth, and there the net is needed: the
second half asks about a spool on a disk, which others fill as well.

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


def note(context: QueueThresholdContext[Any]) -> QueueDecision:
    warnings.append(context.depth)
    return QueueDecision.accept()


def refuse(context: QueueThresholdContext[Any]) -> QueueDecision:
    return QueueDecision.reject("it is at its critical threshold")


def let_go(context: QueueThresholdContext[Any]) -> QueueDecision:
    return QueueDecision.drop()


def store(batch: list[int]) -> list[str]:
    return [f"stored {item}" for item in batch]


thresholds = QueueThresholdSettings(
    max_queue_size=1000,
    warning_threshold=500,
    critical_threshold=1000,
    critical_plus_threshold=1500,
    warning_handler=note,
    critical_handler=refuse,
    critical_plus_handler=let_go,
)
# So patient and so large a batcher sends nothing before it is closed: the queue fills up.
config = BatcherSettings(batch_size=10_000, linger_ms=60_000)

with MicroBatcher[int].with_thresholds(store, config, thresholds) as batcher:
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
    answer = "no threshold reached" if decision is None else decision.action.value
    if decision is not None and decision.reason is not None:
        answer += f", because {decision.reason}"
    print(f"spool at {files_in_spool}: {answer}")
manager.close()
