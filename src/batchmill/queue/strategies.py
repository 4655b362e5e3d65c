"""Selectors choose the partition of an item; balancers choose the drain thread of a partition.

A selector is any callable ``(item, partition_count) -> index``. The queue does not call its own
three for every item:

* *type_hash*: the queue looks the item's class up in a table. A registered class got its partition
  when its handler was added; a class without a handler is placed by its hash. Either way the class
  then stays where it is, so growth never breaks its order.
* *key_hash*: keys fall into a fixed number of buckets, and a bucket is pinned to a partition when
  it is first used. Growth leaves pinned buckets alone, for the same reason.
* *round_robin*: the next partition each time; no order is promised.
"""

from __future__ import annotations

import heapq
import zlib
from collections.abc import Callable, Hashable, Sequence
from typing import Any, Protocol, TypeAlias

from batchmill.errors import ConfigError
from batchmill.wording import count_of

Selector: TypeAlias = Callable[[Any, int], int]

KEY_BUCKETS = 4096
_MIX = 0x9E3779B97F4A7C15  # 2**64 / golden ratio: spreads keys that share low bits
_MASK = (1 << 64) - 1


def type_hash_of(cls: type) -> int:
    """A hash of a class by its full name: it spreads well and is the same in every run."""
    return zlib.crc32(f"{cls.__module__}.{cls.__qualname__}".encode())


def key_bucket(key: Hashable) -> int:
    """The bucket of a key, from 0 to KEY_BUCKETS - 1; small integers spread as well as strings."""
    return ((hash(key) * _MIX) & _MASK) >> 52


class TypeHash:
    """All items of one class go to one partition."""

    def __call__(self, item: object, partition_count: int) -> int:
        return type_hash_of(type(item)) % partition_count

    def __repr__(self) -> str:
        return "PartitionSelector.type_hash()"


class RoundRobin:
    """Each item goes to the next partition."""

    def __init__(self) -> None:
        self._next = 0

    def __call__(self, item: object, partition_count: int) -> int:
        # Two threads may read the same number: one partition gets an item more, that is all. A
        # lock would cost more than the evenness is worth.
        turn = self._next
        self._next = turn + 1
        return turn % partition_count

    def __repr__(self) -> str:
        return "PartitionSelector.round_robin()"


class KeyHash:
    """All items with an equal key go to one partition."""

    def __init__(self, key: Callable[[Any], Hashable]) -> None:
        self.key = key

    def __call__(self, item: object, partition_count: int) -> int:
        return key_bucket(self.key(item)) % partition_count

    def __repr__(self) -> str:
        return f"PartitionSelector.key_hash({self.key!r})"


class PartitionSelector:
    """The selectors that come with the queue; any callable ``(item, count) -> int`` will do too."""

    @staticmethod
    def type_hash() -> Selector:
        """One class, one partition: grouping by class is free and a class keeps its order."""
        return TypeHash()

    @staticmethod
    def round_robin() -> Selector:
        """Spread items evenly, whatever they are; order across partitions is not kept."""
        return RoundRobin()

    @staticmethod
    def key_hash(key: Callable[[Any], Hashable]) -> Selector:
        """One key, one partition: items with an equal ``key(item)`` keep their order."""
        if not callable(key):
            raise ConfigError("key", key, "a callable that takes an item and returns its key")
        return KeyHash(key)


class Balancer(Protocol):
    """Decides which drain thread serves each partition."""

    def assign(self, loads: Sequence[float], owners: Sequence[int], threads: int) -> Sequence[int]:
        """The thread of each partition from now on.

        ``loads[i]`` is what partition *i* will cost its thread: the items offered to it since the
        last decision, times the time one of them takes in its handler. ``owners[i]`` is the
        thread, 0 to ``threads - 1``, that serves it now. Returning ``owners`` moves nothing. A
        result of the wrong length or with an index out of range is ignored with a warning.
        """


class DrainBalancer(Balancer, Protocol):
    """The balancers that come with the queue; any object with :meth:`assign` will do too."""

    @staticmethod
    def throughput_weighted() -> Balancer:
        """Longest processing time first, leaving alone what is balanced already."""
        return ThroughputWeighted()


class ThroughputWeighted:
    """Heaviest partition first, each to the thread with the least so far.

    Partitions without traffic stay. Nothing moves while the busiest thread has less than
    ``skip_ratio`` times the load of the least busy one, nor when the new plan would not take at
    least ``least_gain`` off the busiest: a plan that is only differently uneven is noise.
    """

    skip_ratio = 1.15
    least_gain = 0.03
    stickiness = 0.01  # of a thread's fair share: closer than this, the owner keeps it

    def assign(self, loads: Sequence[float], owners: Sequence[int], threads: int) -> Sequence[int]:
        before = load_per_thread(loads, owners, threads)
        busiest = max(before)
        if busiest <= 0 or busiest < self.skip_ratio * min(before):
            return owners
        plan = self._longest_first(loads, owners, threads)
        if max(load_per_thread(loads, plan, threads)) > busiest * (1 - self.least_gain):
            return owners
        return plan

    def _longest_first(
        self, loads: Sequence[float], owners: Sequence[int], threads: int
    ) -> list[int]:
        plan = list(owners)
        tolerance = self.stickiness * sum(loads) / threads
        assigned = [0.0] * threads
        least = [(0.0, thread) for thread in range(threads)]
        for index in sorted(range(len(loads)), key=lambda i: -loads[i]):
            if loads[index] <= 0:
                break
            while least[0][0] != assigned[least[0][1]]:  # an entry from before its thread gained
                heapq.heappop(least)
            lowest, thread = least[0]
            if assigned[owners[index]] <= lowest + tolerance:
                thread = owners[index]
            plan[index] = thread
            assigned[thread] += loads[index]
            heapq.heappush(least, (assigned[thread], thread))
        return plan


def load_per_thread(loads: Sequence[float], owners: Sequence[int], threads: int) -> list[float]:
    """The sum of the loads each thread owns."""
    totals = [0.0] * threads
    for load, owner in zip(loads, owners, strict=True):
        totals[owner] += load
    return totals


def partition_loads(
    offered: Sequence[int], drained: Sequence[int], busy_ns: Sequence[int]
) -> list[float]:
    """The load of each partition: items offered, times what one of them costs.

    What an item costs is known where some were drained in the same period; elsewhere the average
    stands in, and when no time at all was measured, items are counted as they are.
    """
    total_drained, total_busy = sum(drained), sum(busy_ns)
    average = total_busy / total_drained if total_drained and total_busy else 1.0
    return [
        count * (busy / done if done and total_busy else average)
        for count, done, busy in zip(offered, drained, busy_ns, strict=True)
    ]


def plan_error(plan: object, partitions: int, threads: int) -> str | None:
    """What is wrong with a balancer's result, or None."""
    if not isinstance(plan, Sequence) or isinstance(plan, (str, bytes)):
        return f"it is not a sequence but {plan!r}"
    if len(plan) != partitions:
        entries = count_of(len(plan), "entry", "entries")
        return f"it has {entries} for {count_of(partitions, 'partition')}"
    for index, thread in enumerate(plan):
        if isinstance(thread, bool) or not isinstance(thread, int) or not 0 <= thread < threads:
            return f"partition {index} goes to {thread!r}, not to a thread from 0 to {threads - 1}"
    return None
