"""Buckets: the day that a bucket lies in, ranges of buckets, and the days that the TTL keeps.

Days are counted by event time, back from the newest minute, as far as the clock confirms it: see
:mod:`batchmill.store.sql.retention`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import TypeAlias

from batchmill.errors import ConfigError
from batchmill.sources import Grain, bucket_start

Moment: TypeAlias = int | datetime
"""A bucket of any grain, or a moment."""


def to_grain(grain: Grain | str) -> Grain:
    """A grain, also by its word.

    >>> to_grain("hour")
    <Grain.HOUR: 'hour'>
    """
    try:
        return Grain(grain)
    except ValueError:
        words = " or ".join(repr(known.value) for known in Grain)
        raise ConfigError("grain", grain, f"a Grain, or {words}") from None


_PER_DAY = {Grain.MINUTE: 10_000, Grain.HOUR: 100, Grain.DAY: 1}


@dataclass(frozen=True, slots=True)
class Buckets:
    """All buckets of a grain from the first to the last."""

    grain: Grain
    first: int
    last: int

    @property
    def bounds(self) -> tuple[int, int] | None:
        """First and last, where all buckets between them are meant."""
        return self.first, self.last

    def __iter__(self) -> Iterator[int]:
        """One after the other.

        >>> list(Buckets(Grain.HOUR, 2024022923, 2024030100))
        [2024022923, 2024030100]
        """
        moment, end = bucket_start(self.first), bucket_start(self.last)
        step = timedelta(minutes=self.grain.minutes)
        while moment <= end:
            yield self.grain.bucket(moment)
            moment += step

    def __len__(self) -> int:
        length = bucket_start(self.last) - bucket_start(self.first)
        return max(0, length // timedelta(minutes=self.grain.minutes) + 1)


@dataclass(frozen=True, slots=True)
class BucketList:
    """Some buckets of a grain, one by one."""

    grain: Grain
    buckets: Sequence[int]

    @property
    def bounds(self) -> tuple[int, int] | None:
        """None: not all buckets between the first and the last are meant."""
        return None

    def __iter__(self) -> Iterator[int]:
        return iter(self.buckets)

    def __len__(self) -> int:
        return len(self.buckets)


def cutoff_day(newest_minute: int | None, ttl_days: int) -> int:
    """The oldest day that is kept; 0, and so every day, while the store is empty.

    >>> cutoff_day(202403021200, 7)
    20240224
    """
    if newest_minute is None:
        return 0
    try:
        return Grain.DAY.bucket(bucket_start(newest_minute) - timedelta(days=ttl_days))
    except OverflowError:  # before the year 1
        return 0


def newer(one: int | None, other: int | None) -> int | None:
    """The newer of two minutes, either of which may be missing."""
    return max((minute for minute in (one, other) if minute is not None), default=None)


def day_of(grain: Grain, bucket: int) -> int:
    """The day that a bucket lies in."""
    return bucket // _PER_DAY[grain]


def day_start(grain: Grain, day: int) -> int:
    """The lower bound of a day's buckets: all buckets of earlier days are smaller."""
    return day * _PER_DAY[grain]


def bucket_of(grain: Grain, minute: int) -> int:
    """The bucket that a minute lies in."""
    if grain is Grain.MINUTE:
        return minute
    return minute // 100 if grain is Grain.HOUR else minute // 10_000


def first_bucket(grain: Grain, start: Moment) -> int:
    """The bucket of that grain that a moment, or a bucket of any grain, begins in."""
    return grain.bucket(bucket_start(start) if isinstance(start, int) else start)


def last_bucket(grain: Grain, end: Moment) -> int:
    """The bucket of that grain that a moment lies in, or that a bucket of any grain ends with.

    >>> last_bucket(Grain.MINUTE, 20240229)
    202402292359
    """
    if isinstance(end, int):
        # Its length less a moment: the calendar has nothing behind its last day.
        length = timedelta(minutes=Grain.of(end).minutes) - timedelta(microseconds=1)
        end = bucket_start(end) + length
    return grain.bucket(end)
