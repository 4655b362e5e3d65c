"""Metrics and logs: listeners hear of every decision, and of every level entered and left.

Listeners run on a thread of their own, so neither a slow nor a failing one holds up a submit. After
close() they have heard everything. One keeps metrics here, the other writes a log.

Prints:

    WARNING entered at depth 500
    CRITICAL entered at depth 1000
    CRITICAL reject at depth 1000
    CRITICAL reject at depth 1000
    CRITICAL left at depth 0
    WARNING left at depth 0
    decisions: WARNING accept 500, CRITICAL reject 2
    the depth was 1000 at most
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
# So patient and so large a batcher sends nothing before it is closed: the queue fills up.
config = BatcherSettings(batch_size=10_000, linger_ms=60_000)

with MicroBatcher[int].with_thresholds(store, config, thresholds) as batcher:
    batcher.submit_many(range(1002))

print("decisions: " + ", ".join(f"{what} {count}" for what, count in decisions.items()))
print(f"the depth was {max(depths)} at most")
