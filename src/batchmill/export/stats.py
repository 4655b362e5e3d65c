"""What an exporter has done, counted by reason."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from batchmill.store import OutboxDepth

EXPORTED = "exported values"
RETRIES = "export retries"
VALUES_DROPPED = "export values dropped"
POINTS_REFUSED = "export points refused"
ROWS_DROPPED = "export dropped"
"""The store's counters, each with the exporter as its source and a reason."""
_DROPS = (VALUES_DROPPED, ROWS_DROPPED, POINTS_REFUSED)


@dataclass(frozen=True, slots=True)
class ExporterStats:
    """An exporter at one moment; counters are those of this process."""

    name: str
    position: int
    """The last finished file of the outbox."""
    waiting: OutboxDepth
    """Pending data after it, including what is being sent."""
    queued: int
    """Values in its queue now."""
    sent: int
    """Values that the peer has acknowledged, repeated ones included."""
    requests: int
    """Requests that were acknowledged."""
    retries: Mapping[str, int]
    """Failed requests that were retried, by reason."""
    dropped: Mapping[str, int]
    """Values that were not sent, by reason; for unreadable files: rows."""
    refused_points: int
    """Points refused in requests that the peer accepted (partial success)."""
    failing: str
    """Why the newest request failed; empty if it did not."""
    failing_s: float
    """For how long every request has failed."""


class StatsRecorder:
    """Counts what an exporter does; any thread may add. What is new goes to the store in between.

    See :meth:`take_new`.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._all: Counter[tuple[str, str]] = Counter()
        self._new: Counter[tuple[str, str]] = Counter()
        self._requests = 0
        self._failing = ""
        self._failing_since = 0.0

    def add(self, counter: str, reason: str, count: int = 1) -> None:
        """Add to one of the store's counters."""
        if count:
            with self._lock:
                self._all[counter, reason] += count
                self._new[counter, reason] += count

    def request_taken(self, values: int, refused_points: int) -> None:
        """Count a request that the peer took."""
        self.add(EXPORTED, "", values)
        self.add(POINTS_REFUSED, "by the peer", refused_points)
        with self._lock:
            self._requests += 1
            self._failing = ""

    def request_failed(self, reason: str, message: str) -> None:
        """Count a request that is tried again."""
        self.add(RETRIES, reason)
        with self._lock:
            if not self._failing:
                self._failing_since = time.monotonic()
            self._failing = message

    def take_back_drops(self) -> None:
        """Uncount what was dropped since :meth:`take_new`: it is tried once more."""
        with self._lock:
            for key in [key for key in self._new if key[0] in _DROPS]:
                self._all[key] -= self._new.pop(key)
                if not self._all[key]:
                    del self._all[key]

    def take_new(self) -> Counter[tuple[str, str]]:
        """Counters since the previous call, for the store; or :meth:`put_back`."""
        with self._lock:
            new, self._new = self._new, Counter()
            return new

    def put_back(self, taken: Counter[tuple[str, str]]) -> None:
        """Keep counters that could not be stored for the next time."""
        with self._lock:
            self._new.update(taken)

    def stats(self, name: str, position: int, waiting: OutboxDepth, queued: int) -> ExporterStats:
        """All counters at one moment."""
        with self._lock:
            return ExporterStats(
                name=name,
                position=position,
                waiting=waiting,
                queued=queued,
                sent=sum(self._by_reason(EXPORTED).values()),
                requests=self._requests,
                retries=self._by_reason(RETRIES),
                dropped={**self._by_reason(VALUES_DROPPED), **self._by_reason(ROWS_DROPPED)},
                refused_points=sum(self._by_reason(POINTS_REFUSED).values()),
                failing=self._failing,
                failing_s=time.monotonic() - self._failing_since if self._failing else 0.0,
            )

    def _by_reason(self, counter: str) -> dict[str, int]:
        return {reason: count for (name, reason), count in self._all.items() if name == counter}
