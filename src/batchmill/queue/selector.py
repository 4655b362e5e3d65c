"""Which partition an item goes to.

A selector is any callable ``(item, partition_count) -> index``. The three made here are known to
the queue, which does better than calling them for every item:

* *type_hash*: the queue looks the item's class up in a table. A registered class has a partition
  chosen for it when its handler was added; a class nobody registered is placed by its hash. Either
  way the class then stays where it is, so growth never breaks its order.
* *key_hash*: keys fall into a fixed number of buckets, and a bucket is pinned to a partition when
  it is first used. Growth leaves pinned buckets alone, for the same reason.
* *round_robin*: the next partition each time; no order is promised.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Hashable
from typing import Any, TypeAlias

from batchmill.errors import ConfigError

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

    __slots__ = ()

    def __call__(self, item: object, partition_count: int) -> int:
        return type_hash_of(type(item)) % partition_count

    def __repr__(self) -> str:
        return "PartitionSelector.type_hash()"


class RoundRobin:
    """Each item goes to the next partition."""

    __slots__ = ("_next",)

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

    __slots__ = ("key",)

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
