"""The last minutes of a run, as ``batchmill top`` has seen them."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Mapping
from typing import Any, NamedTuple, TypeAlias

StatusJson: TypeAlias = Mapping[str, Any]
"""What ``batchmill status --json`` prints, or a part of it."""


class Sample(NamedTuple):
    """The numbers that change from second to second."""

    at: float
    ingest_pid: int
    received: int
    counted: int
    queue: int
    spool_bytes: int
    lag_s: float


class History:
    """The samples of the last minutes, and the rates between them."""

    def __init__(self, rate_s: float = 10.0, size: int = 240) -> None:
        self._rate_s = rate_s
        self.samples: deque[Sample] = deque(maxlen=size)
        self.has_spool = True
        """Whether the pipeline reads a spool; else it reads a topic."""

    def add(self, status: StatusJson) -> None:
        """Add a sample."""
        self.has_spool = "topic" not in status
        ingest, pipeline = status.get("ingest", {}), status.get("pipeline", {})
        pid = ingest.get("pid", 0)
        if self.samples and self.samples[-1].ingest_pid != pid:  # restarted: it counts from 0
            self.samples.clear()
        self.samples.append(
            Sample(
                float(status.get("at", 0.0)),
                pid,
                ingest.get("received_spans", 0),
                pipeline.get("spans", 0),
                status.get("queue_rows", 0),
                status.get("spool", {}).get("bytes", 0),
                float(status.get("lag_s", 0.0)),
            )
        )

    def received_per_s(self) -> float | None:
        """Spans received per second, over the last seconds; None before the second sample."""
        return self._recent_rate("received")

    def counted_per_s(self) -> float | None:
        """Spans committed per second, likewise."""
        return self._recent_rate("counted")

    def received_rates(self) -> list[float]:
        """Spans received per second, from sample to sample."""
        return [_rate(old, new, "received") for old, new in itertools.pairwise(self.samples)]

    def _recent_rate(self, counter: str) -> float | None:
        if len(self.samples) < 2:
            return None
        last = self.samples[-1]
        recent = [sample for sample in self.samples if sample.at >= last.at - self._rate_s]
        return _rate(recent[0] if len(recent) > 1 else self.samples[-2], last, counter)


def _rate(first: Sample, last: Sample, counter: str) -> float:
    passed_s = last.at - first.at
    change = getattr(last, counter) - getattr(first, counter)
    return max(0.0, change / passed_s) if passed_s > 0 else 0.0
