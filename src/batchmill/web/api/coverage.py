"""Which minutes of a range the store has data of, and which of them are complete.

A rate divides by the minutes that data covers: not by those before the first data, nor by those
after the newest. And the minute that is still filling would make every total too small, so totals
leave it out, unless there is nothing else.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from batchmill.store import Snapshot, StoredMetric
from batchmill.web.api.parameters import MINUTE_S, TimeRange, minute_end_s

SOURCES = ("Service", "ServiceRelation", "DatabaseAccess", "CacheAccess")
"""The event types whose first row is the first data."""
SETTLE_S = 10
"""Spans of a minute arrive up to so long after its end: clients send them every few seconds."""
SILENT_S = 60
"""The newest minute with data may still grow until so long after its end."""


@dataclass(frozen=True, slots=True)
class Coverage:
    """What the store has of a range."""

    range: TimeRange
    newest: int | None
    """The newest minute with data."""
    first_s: int
    """The start of the first minute with data."""
    complete_s: int
    """Data before this time is complete."""

    @classmethod
    def read(
        cls, snapshot: Snapshot, time_range: TimeRange, metrics: Iterable[StoredMetric]
    ) -> Coverage:
        """The coverage of a range by a store with those metrics."""
        newest = snapshot.newest_minute()
        sources = {metric.source for metric in metrics}.intersection(SOURCES)
        oldest = [minute for minute in map(snapshot.oldest_minute, sources) if minute is not None]
        first_s = minute_end_s(min(oldest)) - MINUTE_S if oldest else 0
        return cls(time_range, newest, first_s, _complete_until(time_range.now_s, newest))

    @property
    def totals(self) -> TimeRange:
        """The part of the range that totals are computed over: its complete minutes, if any."""
        end_s = min(self.range.end_s, self.complete_s)
        if end_s <= max(self.range.start_s, self.first_s):
            return self.range
        return replace(self.range, end_s=end_s)

    @property
    def minutes(self) -> int:
        """How many minutes of :attr:`totals` have data; at least 1."""
        return self._minutes(self.totals.start_s, self.totals.end_s)

    @property
    def minutes_by_bucket(self) -> list[int]:
        """How many minutes of each point of the range have data; at least 1."""
        size_s = self.range.step_minutes * MINUTE_S
        return [self._minutes(start_s, start_s + size_s) for start_s in self.range.starts]

    @property
    def incomplete_s(self) -> int | None:
        """The start of the first point that may still grow; None if none does."""
        size_s = self.range.step_minutes * MINUTE_S
        starts = self.range.starts
        return next((start_s for start_s in starts if start_s + size_s > self.complete_s), None)

    def _minutes(self, start_s: int, end_s: int) -> int:
        if self.newest is not None:
            end_s = min(end_s, minute_end_s(self.newest))
        return max(1, (end_s - max(start_s, self.first_s)) // MINUTE_S)


def _complete_until(now_s: float, newest: int | None) -> int:
    """The end of the last complete minute, in seconds since 1970.

    A minute is complete if a later one has data or if nothing new came for a while, and in any
    case not before the spans of its last seconds can have arrived.
    """
    until_s = int(now_s - SETTLE_S) // MINUTE_S * MINUTE_S
    if newest is not None and minute_end_s(newest) + SILENT_S > now_s:
        until_s = min(until_s, minute_end_s(newest) - MINUTE_S)
    return until_s
