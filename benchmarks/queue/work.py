"""The work of every contender: 100 item classes with skewed rates, built before the timed run.

An item knows its producer and its place among that producer's items of its class, so that after a
run any loss, duplicate or change of order shows (see ``benchmarks.queue.check``). A run repeats the
same feed for as many rounds as the contender's speed asks for: building items is never measured.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, TypeAlias

CLASS_COUNT = 100
PRODUCER_COUNTS = (1, 4, 16)
BASE_ITEMS = 48_000
"""Items in one round, over all producers: three chunks each for 16 of them."""
CHUNK = 1_000
SEED = 2024


class Item:
    """What travels: who made it, and which of that producer's items of its class it is."""

    __slots__ = ("number", "producer")

    def __init__(self, producer: int, number: int) -> None:
        self.producer = producer
        self.number = number


class StampedItem(Item):
    """An item that also carries the moment it was produced."""

    __slots__ = ("sent",)

    def __init__(self, producer: int, number: int) -> None:
        super().__init__(producer, number)
        self.sent = 0.0


def make_classes(base: type[Item], count: int = CLASS_COUNT) -> tuple[type[Item], ...]:
    """``count`` classes of their own below ``base``, the most frequent one first."""
    return tuple(
        type(f"{base.__name__}{rank}", (base,), {"__slots__": ()}) for rank in range(count)
    )


ITEM_CLASSES = make_classes(Item)
STAMPED_CLASSES = make_classes(StampedItem)


def skewed_weights(count: int = CLASS_COUNT) -> list[float]:
    """Zipf's law: the class of rank n comes 1/n as often as the first."""
    return [1 / (rank + 1) for rank in range(count)]


class Feed(Enum):
    """In what helpings a producer hands its items over."""

    SINGLE = "one item a call"
    CHUNKS_OF_ONE_CLASS = f"{CHUNK:,} items of one class a call"
    MIXED_CHUNKS = f"{CHUNK:,} mixed items a call"


Expected: TypeAlias = dict[type[Item], list[list[Item]]]
"""For each class and producer, that producer's items in the order it hands them over."""


@dataclass(frozen=True, kw_only=True)
class Work:
    """What each producer hands over in one round, and what has to arrive for it."""

    feed: Feed
    helpings: Sequence[Sequence[Any]]
    """One sequence a producer: items, or lists of items."""
    expected: Expected
    items: int

    @property
    def producers(self) -> int:
        """How many threads produce."""
        return len(self.helpings)


def build_work(feed: Feed, producers: int, items: int = BASE_ITEMS, seed: int = SEED) -> Work:
    """The same work for the same arguments: classes are drawn by their weights, from ``seed``."""
    rng = random.Random(seed + producers)
    per_producer = items // producers
    expected: Expected = {cls: [[] for _ in range(producers)] for cls in ITEM_CLASSES}
    helpings: list[Sequence[Any]] = []
    for producer in range(producers):
        drawn = _draw(feed, rng, per_producer)
        made: list[Item] = []
        numbers: defaultdict[type[Item], int] = defaultdict(int)
        for cls in drawn:
            item = cls(producer, numbers[cls])
            numbers[cls] += 1
            expected[cls][producer].append(item)
            made.append(item)
        helpings.append(made if feed is Feed.SINGLE else _chunks(made))
    total = sum(len(mine) for per_class in expected.values() for mine in per_class)
    return Work(feed=feed, helpings=helpings, expected=expected, items=total)


def _draw(feed: Feed, rng: random.Random, count: int) -> list[type[Item]]:
    if feed is Feed.CHUNKS_OF_ONE_CLASS:
        drawn = rng.choices(ITEM_CLASSES, skewed_weights(), k=count // CHUNK)
        return [cls for cls in drawn for _ in range(CHUNK)]
    return rng.choices(ITEM_CLASSES, skewed_weights(), k=count)


def _chunks(items: list[Item]) -> list[list[Item]]:
    return [items[start : start + CHUNK] for start in range(0, len(items), CHUNK)]
