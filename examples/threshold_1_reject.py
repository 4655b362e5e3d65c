"""Reject items when too many wait: the simplest thresholds.

Up to 1000 items may wait. Further ones are rejected with a QueueFullError, which has the depth and
the time after which to retry. Nothing is raised: the error is in the result of the item.

Prints:

    1000 stored, 2 rejected
    queue full at CRITICAL: depth 1000, limit 1000; try again in 0.5 s
"""

from __future__ import annotations

from batchmill.batcher import BatcherSettings, MicroBatcher
from batchmill.pressure import QueueFullError, QueueThresholdSettings, strategies


def store(batch: list[int]) -> list[str]:
    """The backend: returns one result per item, in order."""
    return [f"stored {item}" for item in batch]


thresholds = QueueThresholdSettings(
    max_queue_size=1000,
    critical_threshold=1000,
    critical_handler=strategies.reject(retry_after_s=0.5),
)
# With this batch size and linger time nothing is sent before close(): the queue fills up.
settings = BatcherSettings(batch_size=10_000, linger_ms=60_000)

with MicroBatcher[int].with_thresholds(store, settings, thresholds) as batcher:
    futures = batcher.submit_many(range(1002))

results = [future.result() for future in futures]
rejected = [result for result in results if result.is_failure]
print(f"{sum(result.is_success for result in results)} stored, {len(rejected)} rejected")
assert isinstance(rejected[0].error, QueueFullError)
print(rejected[0].error)
