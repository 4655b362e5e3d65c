"""Metrics and logs: listeners get every decision, and every level entered and left.

Listeners run on a separate thread, so a slow or failing one does not delay a submit. When close()
returns they have got every event. Here one listener counts, the other writes a log.

Prints:

    WARNING entered at depth 500
    CRITICAL entered at depth 1000
    CRITICAL reject at depth 1000
    CRITICAL reject at depth 1000
    CRITICAL left at depth 0
    WARNING left at depth 0
    decisions: WARNING accept 500, CRITICAL reject 2
    maximum depth 1000
"""

from __future__ import annotations

import logging
import sys
from collections import Counter
from typing import Any

from batchmill.batcher import BatcherSettings, MicroBatcher
from batchmill.pressure import QueueAction, QueueThresholdEvent, QueueThresholdSettings, strategies

logging.basicConfig(stream=sys.stdout, level=logging.INFO, format="%(message)s")
decisions: Counter[str] = Counter()
depths: list[int] = []


def measure(event: QueueThresholdEvent[Any]) -> None:
    depths.append(event.depth)
    if event.decision is not None:
        decisions[f"{event.level.name} {event.decision.action.value}"] += 1


def write_log(event: QueueThresholdEvent[Any]) -> None:
    if event.decision is None:
        logging.info("%s %s at depth %d", event.level.name, event.kind.value, event.depth)
    elif event.decision.action is not QueueAction.ACCEPT:
        action = event.decision.action.value
        logging.warning("%s %s at depth %d", event.level.name, action, event.depth)


def store(batch: list[int]) -> list[str]:
    return [f"stored {item}" for item in batch]


thresholds = QueueThresholdSettings(
    max_queue_size=1000,
    critical_handler=strategies.reject(),
    listeners=(measure, write_log),
)
# With this batch size and linger time nothing is sent before close(): the queue fills up.
settings = BatcherSettings(batch_size=10_000, linger_ms=60_000)

with MicroBatcher[int].with_thresholds(store, settings, thresholds) as batcher:
    batcher.submit_many(range(1002))

print("decisions: " + ", ".join(f"{what} {count}" for what, count in decisions.items()))
print(f"maximum depth {max(depths)}")
