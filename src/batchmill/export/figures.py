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

NOT_TOLD = ""
"""The reason of what needs none."""


@dataclass(frozen=True, slots=True)
class ExporterStats:
    """An exporter at one moment; counters are those of this process."""

    name: str
    position: int
    """The last file of the outbox that it is through with."""
    waiting: OutboxDepth
    """What lies behind that, what is being sent included."""
    queued: int
    """Values in its queue now."""
    sent: int
    """Values that the peer has acknowledged, each time counted."""
    requests: int
    """Requests that were acknowledged."""
    retries: Mapping[str, int]
    """Requests that failed and were tried again, by reason."""
    dropped: Mapping[str, int]
    """Values that are not sent, by reason; in files that cannot be read: rows."""
    refused_points: int
    """Data points that the peer refused of requests that it took (partial success)."""
    failing: str
    """Why the newest request failed; empty: it did not."""
    failing_s: float
    """For how long every request has failed."""


class Figures:
    """Counters; any thread may add to them. What is new since :meth:`take` goes to the store."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._all: Counter[tuple[str, str]] = Counter()
        self._new: Counter[tuple[str, str]] = Counter()
        self.requests = 0
        self.failing = ""
        self._failing_since = 0.0

    def add(self, what: str, reason: str, n: int = 1) -> None:
        """Count something."""
        if n:
            with self._lock:
                self._all[what, reason] += n
                self._new[what, reason] += n

    def sent(self, values: int, refused: int) -> None:
        """A request was taken."""
        self.add(EXPORTED, NOT_TOLD, values)
        self.add(POINTS_REFUSED, "by the peer", refused)
        with self._lock:
            self.requests += 1
            self.failing = ""

    def failed(self, reason: str, said: str) -> None:
        """A request was not taken, and is tried again."""
        self.add(RETRIES, reason)
        with self._lock:
            if not self.failing:
                self._failing_since = time.monotonic()
            self.failing = said

    def failing_s(self) -> float:
        """For how long every request has failed."""
        with self._lock:
            return time.monotonic() - self._failing_since if self.failing else 0.0

    def of(self, what: str) -> dict[str, int]:
        """What was counted, by reason."""
        with self._lock:
            return {reason: n for (kind, reason), n in self._all.items() if kind == what}

    def take_back_drops(self) -> None:
        """What was dropped since :meth:`take` is tried once more, and counted then."""
        with self._lock:
            for key in [key for key in self._new if key[0] in _DROPS]:
                self._all[key] -= self._new.pop(key)
                if not self._all[key]:
                    del self._all[key]

    def take(self) -> Counter[tuple[str, str]]:
        """What is new; it is the caller's to store, or to :meth:`put_back`."""
        with self._lock:
            new, self._new = self._new, Counter()
            return new

    def put_back(self, taken: Counter[tuple[str, str]]) -> None:
        """It could not be stored."""
        with self._lock:
            self._new.update(taken)
