"""batchmill as the benchmarks set it up: two drain threads, BLOCKING, one handler a class."""

from __future__ import annotations

from collections.abc import Callable
from itertools import count
from typing import Any

from batchmill import BatchQueue, BatchQueueSettings, BufferStrategy, PartitionPolicy, ThreadPolicy
from benchmarks.queue.peers import BOUND, CONSUMERS, JOIN_TIMEOUT_S, MAX_BATCH, Handlers
from benchmarks.queue.work import Feed, Item

_numbers = count(1)


def unique_name() -> str:
    """A queue name not used before in this process."""
    return f"bench-{next(_numbers)}"


class MillPeer:
    """A BatchQueue fed by ``produce``, or by ``produce_many`` where helpings are lists.

    With ``loop``, lists are produced item by item: what ``produce_many`` is compared with.
    """

    def __init__(
        self, handlers: Handlers, config: BatchQueueSettings, feed: Feed, loop: bool = False
    ) -> None:
        self.queue: BatchQueue[Item] = BatchQueue(unique_name(), config)
        for cls, handler in handlers.items():
            self.queue.add_handler(cls, handler)
        self.put: Callable[[Any], object] = self.queue.produce
        if feed is not Feed.SINGLE:
            self.put = self._produce_each if loop else self.queue.produce_many

    def _produce_each(self, items: list[Item]) -> None:
        produce = self.queue.produce
        for item in items:
            produce(item)

    @property
    def capacity(self) -> int:
        """Items that all partitions hold together."""
        return self.queue.stats().capacity

    def finish(self) -> None:
        """Wait until the handlers have had everything."""
        if not self.queue.flush(JOIN_TIMEOUT_S):
            raise TimeoutError(f"batchmill did not flush in {JOIN_TIMEOUT_S:g} s")

    def close(self) -> None:
        """Stop the drain threads."""
        self.queue.shutdown()


def roomy_config(buffer_size: int = BOUND) -> BatchQueueSettings:
    """As batchmill's users run it: adaptive partitions, ``buffer_size`` items in each."""
    return BatchQueueSettings(
        threads=ThreadPolicy.fixed(CONSUMERS),
        partitions=PartitionPolicy.adaptive(),
        buffer_size=buffer_size,
        strategy=BufferStrategy.BLOCKING,
        max_batch=MAX_BATCH,
    )


def tight_config(total: int = BOUND) -> BatchQueueSettings:
    """With the peers' bound: one partition a drain thread, ``total`` items in all of them."""
    return BatchQueueSettings(
        threads=ThreadPolicy.fixed(CONSUMERS),
        partitions=PartitionPolicy.fixed(CONSUMERS),
        buffer_size=total // CONSUMERS,
        strategy=BufferStrategy.BLOCKING,
        max_batch=MAX_BATCH,
    )


def roomy_capacity(handlers: Handlers) -> int:
    """The total capacity that ``roomy_config`` comes to with these handlers."""
    peer = MillPeer(handlers, roomy_config(), Feed.SINGLE)
    try:
        return peer.capacity
    finally:
        peer.close()
