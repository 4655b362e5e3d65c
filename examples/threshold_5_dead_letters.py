"""Dead letters: items that cannot be accepted go to a sink, or are rejected if the sink fails.

At CRITICAL items are still accepted. At CRITICAL_PLUS each item goes to a sink of your choice (a
file, a topic, here a list of at most three items) and counts as dropped. If the sink fails, the
item is rejected, so its sender gets an error: no item is lost silently.

Prints:

    1500 stored, 3 dropped, 1 rejected
    dead letters: [1500, 1501, 1502]
    item 1503: the dead-letter sink failed: OSError('no space left')
"""

from __future__ import annotations

from batchmill.batcher import BatcherSettings, MicroBatcher
from batchmill.pressure import QueueThresholdSettings, strategies

dead_letters: list[int] = []


def add_dead_letter(item: int) -> None:
    if len(dead_letters) == 3:
        raise OSError("no space left")
    dead_letters.append(item)


def store(batch: list[int]) -> list[str]:
    return [f"stored {item}" for item in batch]


thresholds = QueueThresholdSettings(
    max_queue_size=1000,
    critical_plus_threshold=1500,
    critical_handler=strategies.dead_letter(add_dead_letter, otherwise=strategies.accept()),
)
# With this batch size and linger time nothing is sent before close(): the queue fills up.
settings = BatcherSettings(batch_size=10_000, linger_ms=60_000)

with MicroBatcher[int].with_thresholds(store, settings, thresholds) as batcher:
    futures = batcher.submit_many(range(1504))

stats = batcher.stats()
print(f"{stats.succeeded} stored, {stats.dropped} dropped, {stats.rejected} rejected")
print(f"dead letters: {dead_letters}")
last = futures[-1].result()
assert last.error is not None
print(f"item {last.item}: the dead-letter sink failed: {last.error.__cause__!r}")
