"""Where a class, a key bucket or a new partition goes: plain decisions over plain numbers."""

from __future__ import annotations

from collections.abc import Sequence


def least(values: Sequence[float]) -> int:
    """The index of the smallest value, the first one of several."""
    return min(range(len(values)), key=values.__getitem__)


def deal(partitions: int, threads: int) -> list[int]:
    """The first owner of each partition: dealt out in turn, 0, 1, 2, … and round again."""
    return [index % threads for index in range(partitions)]


def owner_for_new(owners: Sequence[int], threads: int) -> int:
    """The thread that gets a partition added later: the one with the fewest."""
    counts = [0] * threads
    for owner in owners:
        counts[owner] += 1
    return least(counts)


def fit_threads(threads: int, partitions: int) -> int:
    """How many threads are of use: a partition has one at a time."""
    return min(threads, partitions)
