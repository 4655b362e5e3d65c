"""The last minutes of a run, as ``batchmill top`` has seen them."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Mapping
from typing import Any, NamedTuple, TypeAlias

Told: TypeAlias = Mapping[str, Any]
"""What ``batchmill status --json`` prints."""


class Moment(NamedTuple):
    """What changes from look to look."""

    at: float
    ingest: int
    """Which life of ingest it is."""
    came: int
    counted: int
    queue: int
    spool_bytes: int
    lag_s: float


class History:
    """The looks of the last minutes, and what they say of how fast things go."""

    def __init__(self, rate_s: float = 10.0, looks: int = 240) -> None:
        self._rate_s = rate_s
        self.moments: deque[Moment] = deque(maxlen=looks)
        self.has_spool = True
        """Whether segments wait between ingest and pipeline; else they are messages of a topic."""

    def add(self, told: Told) -> None:
        """Note a look."""
        self.has_spool = "topic" not in told
        ingest, pipeline = told.get("ingest", {}), told.get("pipeline", {})
        pid = ingest.get("pid", 0)
        if self.moments and self.moments[-1].ingest != pid:  # another life counts from 0
            self.moments.clear()
        self.moments.append(
            Moment(
                float(told.get("at", 0.0)),
                pid,
                ingest.get("received_spans", 0),
                pipeline.get("spans", 0),
                told.get("queue_rows", 0),
                told.get("spool", {}).get("bytes", 0),
                float(told.get("lag_s", 0.0)),
            )
        )

    def came_per_s(self) -> float | None:
        """Spans that came in, in the last seconds; None as long as nothing is known."""
        first, last = self._ends()
        return None if first is None else _rate(first.came, last.came, last.at - first.at)

    def counted_per_s(self) -> float | None:
        """Spans that the pipeline committed, likewise."""
        first, last = self._ends()
        return None if first is None else _rate(first.counted, last.counted, last.at - first.at)

    def came(self) -> list[float]:
        """Spans that came in from look to look, per second."""
        pairs = itertools.pairwise(self.moments)
        return [_rate(old.came, new.came, new.at - old.at) for old, new in pairs]

    def _ends(self) -> tuple[Moment | None, Moment]:
        if len(self.moments) < 2:
            return None, Moment(0, 0, 0, 0, 0, 0, 0)
        last = self.moments[-1]
        recent = [each for each in self.moments if each.at >= last.at - self._rate_s]
        return (recent[0] if len(recent) > 1 else self.moments[-2]), last


def _rate(first: int, last: int, seconds_passed: float) -> float:
    return max(0.0, (last - first) / seconds_passed) if seconds_passed > 0 else 0.0
