"""Which days are kept, and the buckets that lie between two moments.

Days are counted by event time: the newest minute the store ever saw is its now. So what is left
does not depend on when, or in which order, rows came in.
"""

from __future__ import annotations

from datetime import datetime, timedelta

from batchmill.sources import Grain, bucket_start

_PER_DAY = {Grain.MINUTE: 10_000, Grain.HOUR: 100, Grain.DAY: 1}


def cutoff_day(newest_minute: int | None, ttl_days: int) -> int:
    """The oldest day that is kept; 0, and so every day, where nothing has come yet.

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
    if one is None or other is None:
        return one if other is None else other
    return max(one, other)


def day_of(grain: Grain, bucket: int) -> int:
    """The day that a bucket lies in."""
    return bucket // _PER_DAY[grain]


def first_of(grain: Grain, day: int) -> int:
    """A number that every bucket of earlier days lies below, and no bucket of that day or later."""
    return day * _PER_DAY[grain]


def roll(grain: Grain, minute: int) -> int:
    """The bucket that a minute lies in."""
    if grain is Grain.MINUTE:
        return minute
    return minute // 100 if grain is Grain.HOUR else minute // 10_000


def first_bucket(grain: Grain, start: int | datetime) -> int:
    """The bucket of that grain that a moment, or a bucket of any grain, begins in."""
    return grain.bucket(bucket_start(start) if isinstance(start, int) else start)


def last_bucket(grain: Grain, end: int | datetime) -> int:
    """The bucket of that grain that a moment lies in, or that a bucket of any grain ends with.

    >>> last_bucket(Grain.MINUTE, 20240229)
    202402292359
    """
    if isinstance(end, int):
        # Its length less a moment first: behind the calendar's last day there is nothing.
        length = timedelta(minutes=Grain.of(end).minutes) - timedelta(microseconds=1)
        end = bucket_start(end) + length
    return grain.bucket(end)
