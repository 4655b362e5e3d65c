"""A custom handler that decides by item.

A handler is a function that takes a context (item, depth, threshold, level, attempt) and returns a
decision. This one always accepts alarms, rejects other readings at CRITICAL and drops them at
CRITICAL_PLUS. It is set for CRITICAL and also decides at CRITICAL_PLUS: a level without a handler
uses the handler of the next lower level.

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
# With this batch size and linger time nothing is sent before close(): the queue fills up.
settings = BatcherSettings(batch_size=10_000, linger_ms=60_000)
submitted = []

with MicroBatcher[str].with_thresholds(store, settings, thresholds) as batcher:
    for fill_up_to, filler in ((1000, "reading"), (1500, "alarm")):
        while batcher.queue_depth < fill_up_to:
            batcher.submit(filler)
        for item in ("reading", "alarm"):
            submitted.append((item, fill_up_to, batcher.submit(item)))

for item, depth, future in submitted:
    print(f"{item} at depth {depth}: {future.result().outcome.value}")
