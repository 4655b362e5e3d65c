"""Time buckets: the minute, hour or day in UTC that an event belongs to, by its start."""

from __future__ import annotations

import enum
from datetime import UTC, datetime, timedelta

from batchmill.errors import ConfigError


class Grain(enum.Enum):
    """How long a bucket is.

    >>> Grain.HOUR.bucket(datetime(2024, 2, 29, 13, 45, tzinfo=UTC))
    2024022913
    """

    MINUTE = "minute"
    """Buckets ``yyyyMMddHHmm``."""
    HOUR = "hour"
    """Buckets ``yyyyMMddHH``."""
    DAY = "day"
    """Buckets ``yyyyMMdd``."""

    @property
    def minutes(self) -> int:
        """Minutes in such a bucket: 1, 60 or 1440."""
        return _MINUTES[self]

    def bucket(self, moment: datetime) -> int:
        """The bucket of a moment; one without a time zone is taken as UTC."""
        if moment.tzinfo is not None:
            moment = moment.astimezone(UTC)
        day = moment.year * 10_000 + moment.month * 100 + moment.day
        if self is Grain.DAY:
            return day
        hour = day * 100 + moment.hour
        return hour if self is Grain.HOUR else hour * 100 + moment.minute

    @classmethod
    def of(cls, bucket: int) -> Grain:
        """The grain of a bucket, by its number of digits."""
        grain = _BY_DIGITS.get(len(str(bucket)))
        if grain is None or bucket < 0:
            raise ConfigError("bucket", bucket, "yyyyMMddHHmm, yyyyMMddHH or yyyyMMdd")
        return grain


_MINUTES = {Grain.MINUTE: 1, Grain.HOUR: 60, Grain.DAY: 1440}
_BY_DIGITS = {12: Grain.MINUTE, 10: Grain.HOUR, 8: Grain.DAY}


def minute_bucket(moment: datetime) -> int:
    """The minute of a moment, as ``yyyyMMddHHmm``."""
    return Grain.MINUTE.bucket(moment)


def hour_bucket(moment: datetime) -> int:
    """The hour of a moment, as ``yyyyMMddHH``."""
    return Grain.HOUR.bucket(moment)


def day_bucket(moment: datetime) -> int:
    """The day of a moment, as ``yyyyMMdd``."""
    return Grain.DAY.bucket(moment)


def bucket_start(bucket: int) -> datetime:
    """The moment, in UTC, at which a bucket begins.

    >>> bucket_start(202402291345).isoformat()
    '2024-02-29T13:45:00+00:00'
    """
    grain = Grain.of(bucket)
    rest, minute = divmod(bucket, 100) if grain is Grain.MINUTE else (bucket, 0)
    rest, hour = divmod(rest, 100) if grain is not Grain.DAY else (rest, 0)
    rest, day = divmod(rest, 100)
    year, month = divmod(rest, 100)
    try:
        return datetime(year, month, day, hour, minute, tzinfo=UTC)
    except ValueError:
        raise ConfigError("bucket", bucket, "a moment that exists in the calendar") from None


def bucket_end(bucket: int) -> datetime:
    """The moment, in UTC, at which the next bucket begins."""
    return bucket_start(bucket) + timedelta(minutes=Grain.of(bucket).minutes)
