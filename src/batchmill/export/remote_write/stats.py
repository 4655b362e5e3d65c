"""Settings of remote write, and what it has counted."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from batchmill.errors import check_ints, check_numbers, check_positive
from batchmill.export.prometheus.series import SeriesLimits
from batchmill.waiters import back_off_ms


@dataclass(frozen=True, kw_only=True, slots=True)
class RemoteWriteSettings:
    """How often remote write reads the store, how much it sends, and how it tries again."""

    limits: SeriesLimits = field(default_factory=SeriesLimits)
    poll_s: float = 1.0
    """How often the store is asked for a new minute."""
    catch_up_minutes: int = 60
    """After a pause, minutes that lie further back than this are skipped, and counted. Prometheus
    itself takes nothing older than an hour."""
    late_minutes: int = 3
    """So many minutes before the newest that was sent are looked at again, and what late rows have
    changed is sent; until a receiver refuses it. 0: none."""
    late_every_s: float = 15.0
    """How often that is done at most."""
    max_samples: int = 2_000
    """In one request."""
    buffer_samples: int = 20_000
    """That wait to be sent at most; then no further minute is read."""
    timeout_s: float = 30.0
    """For a connection, and for each answer."""
    initial_ms: float = 100.0
    """How long to wait before the second try of a request; then twice as long each time."""
    max_ms: float = 5_000.0
    max_retry_after_s: float = 300.0
    """A receiver that asks for a longer pause is asked again after this."""
    close_timeout_s: float = 5.0
    """How long close() goes on sending what waits."""

    def __post_init__(self) -> None:
        check_ints(self, 1, "catch_up_minutes", "max_samples", "buffer_samples")
        check_ints(self, 0, "late_minutes")
        check_positive(self, "poll_s", "timeout_s", "initial_ms", "max_ms")
        check_numbers(self, 0, "late_every_s", "max_retry_after_s", "close_timeout_s")

    def pause_s(self, attempt: int, retry_after_s: float | None, chance: float) -> float:
        """How long to wait after the ``attempt``-th try; ``chance``, 0 to 1, spreads it."""
        own_s = back_off_ms(self.initial_ms, self.max_ms, 2, attempt) / 1000 * (1 - 0.2 * chance)
        return max(own_s, min(retry_after_s or 0.0, self.max_retry_after_s))


@dataclass(frozen=True, slots=True)
class RemoteWriteStats:
    """Samples by outcome so far: ``taken == sent + refused + unsent + waiting``."""

    minute: int | None
    """The last minute that was sent completely; a restart continues after it."""
    minutes: int
    """Minutes that this process sent completely."""
    minutes_skipped: int
    """Minutes skipped after a pause, too far back."""
    taken: int
    """Samples to send: read from the store, or stale markers of series that ended."""
    sent: int
    refused: int
    """Samples that the receiver refused; they are not sent again."""
    refused_for: Mapping[str, int]
    """Refused samples by reason: ``out of order``, ``too old``, ``another value is there``; or by
    response, such as ``HTTP 400``, if it has no reason."""
    unsent: int
    """Samples not sent before this process ended. The next process sends their minute again, with
    its values then; changes by late rows to a minute that was already sent stay unsent."""
    late: int
    """Of ``taken``: sent again because late rows changed them."""
    ended: int
    """Of ``taken``: stale markers of series that ended."""
    late_refused: bool
    """Whether the receiver refuses late samples: then no more are sent."""
    dropped: int
    """Series omitted over the limit, counted once per minute."""
    requests: Mapping[str, int]
    """Requests by response: ``HTTP 204``, ``unreachable`` and the like; retries included."""
    retries: int
    bytes_sent: int
    faults: Mapping[str, int]
    """Local faults by kind: the store was not read, the position was not written."""
    failing: str
    """Why the newest request failed; empty if it did not."""
    failing_s: float
    """For how long every request has failed."""

    @property
    def waiting(self) -> int:
        """Samples that are still to be sent."""
        return self.taken - self.sent - self.refused - self.unsent


class StatsRecorder:
    """Counts what remote write does; any thread may add."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()
        self._requests: Counter[str] = Counter()
        self._refused: Counter[str] = Counter()
        self._faults: Counter[str] = Counter()
        self._failing = ""
        self._failing_since = 0.0
        self.late_refused = False

    def add(self, **counts: int) -> None:
        """Add to counters by name."""
        with self._lock:
            self._counts.update(counts)

    def request(self, answer: str, *, failed: bool) -> None:
        """Count a request by its answer; one that failed is tried again."""
        with self._lock:
            self._requests[answer] += 1
            self._counts["retries"] += failed
            if failed and not self._failing:
                self._failing_since = time.monotonic()
            self._failing = answer if failed else ""

    def refuse(self, reason: str, samples: int) -> None:
        """Count samples that the receiver does not want."""
        with self._lock:
            self._refused[reason] += samples

    def fault(self, what: str) -> int:
        """Count something that went wrong here; how often that was so by now."""
        with self._lock:
            self._faults[what] += 1
            return self._faults[what]

    def stats(self, minute: int | None) -> RemoteWriteStats:
        """All counters at one moment."""
        with self._lock:
            counts = self._counts
            return RemoteWriteStats(
                minutes=counts["minutes"],
                minutes_skipped=counts["minutes_skipped"],
                taken=counts["taken"],
                sent=counts["sent"],
                unsent=counts["unsent"],
                late=counts["late"],
                ended=counts["ended"],
                dropped=counts["dropped"],
                retries=counts["retries"],
                bytes_sent=counts["bytes_sent"],
                minute=minute,
                refused=self._refused.total(),
                refused_for=dict(self._refused),
                late_refused=self.late_refused,
                requests=dict(self._requests),
                faults=dict(self._faults),
                failing=self._failing,
                failing_s=time.monotonic() - self._failing_since if self._failing else 0.0,
            )
