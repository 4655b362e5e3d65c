"""Decide for yourself: a handler that looks at the item.

A handler is a plain function from what is known (item, depth, threshold, level, attempt) to a
decision. This one always lets alarms in, rejects other readings at CRITICAL and lets them go at
CRITICAL_PLUS. It is given for CRITICAL, and decides at CRITICAL_PLUS too: a level without a handler
uses the next lower one's.

Prints:

    reading at depth 1000: failure
    alarm at depth 1000: success
    reading at depth 1500: dropped
    alarm at depth 1500: success
"""

from __future__ import annotations

from typing import Any

from batchmill.batcher import BatcherSettings, MicroBatcher
from batchmill.pressure import (
    QueueDecision,
    QueueThresholdContext,
    QueueThresholdSettings,
    ThresholdLevel,
)


def store(batch: list[str]) -> list[str]:
    return [f"stored {item}" for item in batch]


def decide(context: QueueThresholdContext[Any]) -> QueueDecision:
    if context.item == "alarm":
        return QueueDecision.accept()
    if context.level is ThresholdLevel.CRITICAL_PLUS:
        return QueueDecision.drop()
    return QueueDecision.reject()


thresholds = QueueThresholdSettings(max_queue_size=1000, critical_handler=decide)
# So patient and so large a batcher sends nothing before it is closed: the queue fills up.
config = BatcherSettings(batch_size=10_000, linger_ms=60_000)
asked = []

with MicroBatcher[str].with_thresholds(store, config, thresholds) as batcher:
    for fill_up_to, filler in ((1000, "reading"), (1500, "alarm")):
        while batcher.queue_depth < fill_up_to:
            batcher.submit(filler)
        for item in ("reading", "alarm"):
            asked.append((item, fill_up_to, batcher.submit(item)))

for item, depth, future in asked:
    print(f"{item} at depth {depth}: {future.result().outcome.value}")
