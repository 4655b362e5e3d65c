"""Durations in a fixed number of buckets: exact counts, percentiles within 2 %. Pure.

Bucket bounds grow by 4 % from 100 ns to about three hours, so the geometric middle of a bucket is
at most 2 % away from any value in it, and a histogram takes the same few kilobytes however much
it has seen. Shorter durations count as 0, longer ones as the last bound.

One thread records; another may read at the same time and sees some recent moment.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterable, Sequence

SHORTEST_S = 1e-7
LONGEST_S = 1e4
GROWTH = 1.04

_STEPS = math.ceil(math.log(LONGEST_S / SHORTEST_S) / math.log(GROWTH))
BOUNDS = tuple(SHORTEST_S * GROWTH**step for step in range(_STEPS + 1))
"""Bucket ``n`` holds what is above ``BOUNDS[n - 1]`` and at most ``BOUNDS[n]``."""


class Histogram:
    """Counts durations, given in seconds."""

    __slots__ = ("_counts",)

    def __init__(self) -> None:
        self._counts = [0] * (len(BOUNDS) + 1)

    def record(self, seconds: float) -> None:
        """Count one duration; a negative one counts as 0."""
        self._counts[bisect_left(BOUNDS, seconds)] += 1

    def record_many(self, durations_s: Iterable[float]) -> None:
        """Count several durations; quickest where each is close to the one before."""
        counts = self._counts
        bucket, above, up_to = 0, -math.inf, SHORTEST_S
        for seconds in durations_s:
            if not above < seconds <= up_to:
                bucket = bisect_left(BOUNDS, seconds)
                above = BOUNDS[bucket - 1] if bucket else -math.inf
                up_to = BOUNDS[bucket] if bucket < len(BOUNDS) else math.inf
            counts[bucket] += 1

    @property
    def count(self) -> int:
        """How many durations were counted."""
        return sum(self._counts)

    def quantile(self, share: float) -> float:
        """The duration that ``share`` (0 to 1) of all do not exceed; 0.0 with none counted."""
        return self.quantiles((share,))[0]

    def quantiles(self, shares: Sequence[float]) -> list[float]:
        """Several quantiles of one moment."""
        counts = list(self._counts)  # a copy: recording goes on
        total = sum(counts)
        return [_value_at(counts, max(1, math.ceil(share * total))) for share in shares]


def merged(histograms: Iterable[Histogram]) -> Histogram:
    """All of them in one; the parts stay as they are."""
    result = Histogram()
    for histogram in histograms:
        result._counts = [sum(pair) for pair in zip(result._counts, histogram._counts, strict=True)]
    return result


def _value_at(counts: Sequence[int], rank: int) -> float:
    """The value of the ``rank``-th smallest, from 1."""
    seen = 0
    for bucket, count in enumerate(counts):
        seen += count
        if seen >= rank:
            return _middle(bucket)
    return 0.0


def _middle(bucket: int) -> float:
    if bucket == 0:
        return 0.0
    if bucket == len(BOUNDS):
        return BOUNDS[-1]
    return math.sqrt(BOUNDS[bucket - 1] * BOUNDS[bucket])
