"""Which minutes of a range the store has data of, and which of them are complete.

Totals leave out the minute that is still filling, which would make each too small, unless there is
nothing else.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from batchmill.store import CoveredTime, Snapshot, StoredMetric
from batchmill.web.api.parameters import MINUTE_S, TimeRange


@dataclass(frozen=True, slots=True)
class Coverage:
    """What the store has of a range."""

    range: TimeRange
    covered: CoveredTime

    @classmethod
    def read(
        cls,
        snapshot: Snapshot,
        time_range: TimeRange,
        metrics: Iterable[StoredMetric],
        source: str = "Service",
    ) -> Coverage:
        """The coverage of a range, as :meth:`Snapshot.covered` has it."""
        return cls(time_range, snapshot.covered(metrics, source))

    @property
    def newest(self) -> int | None:
        """The newest minute with data."""
        return self.covered.newest

    @property
    def totals(self) -> TimeRange:
        """The part of the range that totals are computed over: its complete minutes, if any."""
        end_s = min(self.range.end_s, self._complete_s)
        if end_s <= max(self.range.start_s, self.covered.start_s):
            return self.range
        return replace(self.range, end_s=end_s)

    @property
    def minutes(self) -> int:
        """How many minutes of :attr:`totals` have data; at least 1."""
        return self.covered.minutes(self.totals.start_s, self.totals.end_s)

    @property
    def minutes_by_bucket(self) -> list[int]:
        """How many minutes of each point of the range have data; at least 1."""
        size_s = self.range.step_minutes * MINUTE_S
        return [self.covered.minutes(start_s, start_s + size_s) for start_s in self.range.starts]

    @property
    def incomplete_s(self) -> int | None:
        """The start of the first point that may still grow; None if none does."""
        size_s = self.range.step_minutes * MINUTE_S
        starts, complete_s = self.range.starts, self._complete_s
        return next((start_s for start_s in starts if start_s + size_s > complete_s), None)

    @property
    def _complete_s(self) -> int:
        return self.covered.complete_s(self.range.now_s)
