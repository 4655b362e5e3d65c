"""Which minutes are complete: those in front of the newest one that anything has come in for."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta

from batchmill.sources import bucket_end, bucket_start, minute_bucket

_MINUTE = timedelta(minutes=1)


def complete_minute(newest: int | None, now_s: float) -> int | None:
    """The newest complete minute: the one before the newest minute of a store.

    A minute is over, by the time of the events themselves, when its successor has begun. A store's
    newest minute that lies ahead of the clock counts as the present one: a sender whose clock is
    wrong must not hide what the others send. None: the store is empty.

    >>> complete_minute(202402291345, now_s=2e9)
    202402291344
    """
    if newest is None:
        return None
    present = minute_bucket(datetime.fromtimestamp(now_s, UTC))
    return minutes_before(min(newest, present), 1)


def minutes_before(minute: int, count: int) -> int:
    """The minute that is ``count`` minutes before another; after it, if that is negative.

    >>> minutes_before(202403010000, 1)
    202402292359
    """
    return minute_bucket(bucket_start(minute) - count * _MINUTE)


def minutes_after(minute: int, last: int) -> Iterator[int]:
    """Every minute behind ``minute``, up to ``last``."""
    while minute < last:
        minute = minutes_before(minute, -1)
        yield minute


def end_s(minute: int) -> float:
    """When a minute was over, in seconds since 1970."""
    return bucket_end(minute).timestamp()
