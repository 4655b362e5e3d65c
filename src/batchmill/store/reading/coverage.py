"""Which minutes a store has data of, and which of them are complete.

A rate divides by the minutes that data covers: not by those before the first data, nor by those
after the newest. A gap in between counts as minutes without events: a store cannot tell a run that
was down from one that nobody called, and what came late or from a backfill may fill it yet. And the
minute that is still filling has too little.
"""

from __future__ import annotations

from dataclasses import dataclass

from batchmill.sources import Grain, bucket_start

MINUTE_S = 60
SETTLE_S = 10
"""Spans of a minute arrive up to so long after its end: clients send them every few seconds."""
SILENT_S = 60
"""The newest minute with data may still grow until so long after its end."""


@dataclass(frozen=True, slots=True)
class CoveredTime:
    """From the first data of an event type to the newest data of the store."""

    start_s: int
    """The start of the oldest minute with data, in seconds since 1970; 0 without data."""
    newest: int | None
    """The newest minute with data."""
    end_s: int | None
    """The end of that minute."""

    @classmethod
    def of_minutes(cls, oldest: int | None, newest: int | None) -> CoveredTime:
        """From the oldest minute of the event type to the newest of all."""
        end_s = None if newest is None else _start_s(newest) + MINUTE_S
        return cls(0 if oldest is None else _start_s(oldest), newest, end_s)

    def minutes(self, start_s: int, end_s: int) -> int:
        """How many minutes between two times have data; at least 1."""
        if self.end_s is not None:
            end_s = min(end_s, self.end_s)
        return max(1, (end_s - max(start_s, self.start_s)) // MINUTE_S)

    def minutes_of(self, bucket: int) -> int:
        """How many minutes of a bucket have data; at least 1."""
        start_s = _start_s(bucket)
        return self.minutes(start_s, start_s + Grain.of(bucket).minutes * MINUTE_S)

    def complete_s(self, now_s: float) -> int:
        """The end of the last complete minute, in seconds since 1970.

        A minute is complete if a later one has data or if nothing new came for a while, and in any
        case not before the spans of its last seconds can have arrived.
        """
        until_s = int(now_s - SETTLE_S) // MINUTE_S * MINUTE_S
        if self.end_s is not None and self.end_s + SILENT_S > now_s:
            until_s = min(until_s, self.end_s - MINUTE_S)
        return until_s


def per_minute(count: float, minutes: int) -> float:
    """Events per minute, with three decimals."""
    return round(count / minutes, 3)


def _start_s(bucket: int) -> int:
    return int(bucket_start(bucket).timestamp())
