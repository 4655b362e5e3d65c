"""Settings of the alerting process, and what it has counted."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from batchmill.errors import check_ints, check_numbers, check_positive
from batchmill.telemetry import ComponentKind, counter, gauge, up_down
from batchmill.waiters import back_off_ms

FULL = "too many waiting"
GONE = "receiver removed"


@dataclass(frozen=True, kw_only=True, slots=True)
class AlertSettings:
    """When a minute is closed, how often the store is read, and how notifications are sent."""

    poll_s: float = 1.0
    """How often the store is asked for new minutes."""
    grace_s: float = 15.0
    """A minute is closed once it is over for so long and a later one is committed."""
    idle_s: float = 180.0
    """Without a later minute, a minute is closed for rules with ``no_data = "firing"`` once it is
    over for so long."""
    catch_up_minutes: int = 60
    """After a pause, minutes that lie further back than this are skipped, and counted."""
    max_waiting: int = 10_000
    """Notifications that may wait for a receiver; beyond it the oldest are dropped, and counted."""
    max_batch: int = 64
    """Alerts in one request."""
    timeout_s: float = 10.0
    """For a connection, and for each answer."""
    initial_ms: float = 500.0
    """How long to wait before the second try of a request; then twice as long each time."""
    max_ms: float = 30_000.0
    resend_s: float = 60.0
    """How often an Alertmanager is sent what fires: it would take it for resolved otherwise."""
    active_s: float = 300.0
    """For how long an Alertmanager takes an alert for firing that it is not sent again."""
    keep_days: int = 30
    """How long alerts that were resolved are listed."""
    close_timeout_s: float = 5.0
    """How long close() goes on sending what waits."""

    def __post_init__(self) -> None:
        check_ints(self, 1, "catch_up_minutes", "max_waiting", "max_batch", "keep_days")
        check_positive(self, "poll_s", "timeout_s", "initial_ms", "max_ms", "resend_s", "active_s")
        check_numbers(self, 0, "grace_s", "idle_s", "close_timeout_s")

    def pause_s(self, attempt: int, retry_after_s: float | None, chance: float) -> float:
        """How long to wait after the ``attempt``-th try; ``chance``, 0 to 1, spreads it."""
        own_s = back_off_ms(self.initial_ms, self.max_ms, 2, attempt) / 1000 * (1 - 0.2 * chance)
        return max(own_s, min(retry_after_s or 0.0, 300.0))


@dataclass(frozen=True, slots=True)
class AlertStats:
    """The alerting process at one moment; counters are those of this process."""

    rules: int
    """How many rules there are; those of an SLO one for each window."""
    minute: int | None
    """The last minute that was evaluated."""
    minutes: int
    """Minutes that this process evaluated."""
    minutes_skipped: int
    """Minutes skipped after a pause, too far back."""
    future_positions: int
    """Rules that went back from a minute still to come, after a wrong clock."""
    firing: int
    """Alerts that fire."""
    pending: int
    """Alerts that are pending."""
    faults: Mapping[str, str]
    """Rules that could not be evaluated, and why."""
    rules_fault: str
    """Why the rules file, as it is now, is not used, and the rules before it are; empty: it is."""
    reloads: Mapping[str, int]
    """How often the rules file had changed, by what came of it: ``loaded`` or ``refused``."""
    queued: int
    """Notifications to send, one for each receiver; those that an earlier process left included.
    ``queued == sent + dropped + waiting``."""
    sent: Mapping[str, int]
    """Notifications that were accepted, by receiver."""
    dropped: Mapping[str, int]
    """Notifications that nobody got, by reason."""
    waiting: Mapping[str, int]
    """Notifications that are still to be sent, by receiver."""
    requests: Mapping[str, int]
    """Requests by response: ``HTTP 200``, ``unreachable`` and the like; retries included."""
    retries: int
    """Requests that failed and were tried again."""
    failing: Mapping[str, str]
    """Receivers whose newest request failed, and why."""
    failing_s: float
    """For how long the receiver has failed that fails for longest."""
    store_faults: int
    """How often the store could not be read or written; it is tried again."""
    lag_s: float
    """How long after its end the last minute was evaluated."""


class StatsRecorder:
    """Counts what the alerting process does; any thread may add."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()
        self._queued: Counter[str] = Counter()
        self._sent: Counter[str] = Counter()
        self._dropped: Counter[tuple[str, str]] = Counter()
        self._requests: Counter[str] = Counter()
        self._reloads = Counter({"loaded": 0, "refused": 0})
        self._failing: dict[str, tuple[float, str]] = {}

    def add(self, name: str, count: int = 1) -> int:
        """Add to a counter; what it is then."""
        with self._lock:
            self._counts[name] += count
            return self._counts[name]

    def reload(self, result: str) -> None:
        """Count a changed rules file."""
        with self._lock:
            self._reloads[result] += 1

    def queue(self, receiver: str, count: int) -> None:
        """Count notifications that a receiver is to be sent."""
        with self._lock:
            self._queued[receiver] += count

    def drop(self, receiver: str, reason: str, count: int) -> None:
        """Count notifications that a receiver did not get."""
        if count:
            with self._lock:
                self._dropped[receiver, reason] += count

    def request(self, receiver: str, answer: str, taken: int, *, failed: str = "") -> None:
        """Count a request; with ``failed``, one that is tried again, and why."""
        with self._lock:
            self._requests[answer] += 1
            if taken:
                self._sent[receiver] += taken
            if failed:
                self._counts["retries"] += 1
                since = self._failing.get(receiver, (time.monotonic(), ""))[0]
                self._failing[receiver] = (since, failed)
            else:
                self._failing.pop(receiver, None)

    def fields(self) -> dict[str, Any]:
        """All that is counted here, as fields of :class:`AlertStats`."""
        with self._lock:
            dropped: Counter[str] = Counter()
            waiting = self._queued - self._sent
            for (receiver, reason), count in self._dropped.items():
                dropped[reason] += count
                waiting[receiver] -= count
            oldest = min((since for since, _ in self._failing.values()), default=None)
            names = ("minutes", "minutes_skipped", "future_positions", "retries", "store_faults")
            return {
                **{name: self._counts[name] for name in names},
                "reloads": dict(self._reloads),
                "queued": self._queued.total(),
                "sent": dict(self._sent),
                "dropped": dict(dropped),
                "waiting": {receiver: count for receiver, count in waiting.items() if count > 0},
                "requests": dict(self._requests),
                "failing": {receiver: why for receiver, (_, why) in self._failing.items()},
                "failing_s": 0.0 if oldest is None else time.monotonic() - oldest,
            }


ALERTS: ComponentKind[AlertStats] = ComponentKind(
    "alerts",
    (
        gauge("rules", "{rule}", "Alert rules.", lambda stats: stats.rules),
        gauge(
            "faulty_rules",
            "{rule}",
            "Alert rules that cannot be evaluated.",
            lambda stats: len(stats.faults),
        ),
        counter(
            "rule_reloads",
            "{reload}",
            "Changed rules files; one that is refused changes nothing.",
            lambda stats: stats.reloads,
            "result",
        ),
        counter("evaluated_minutes", "{minute}", "Minutes evaluated.", lambda stats: stats.minutes),
        counter(
            "skipped_minutes",
            "{minute}",
            "Minutes skipped after a pause.",
            lambda stats: stats.minutes_skipped,
        ),
        counter(
            "future_positions",
            "{rule}",
            "Rules that went back from a minute still to come.",
            lambda stats: stats.future_positions,
        ),
        up_down("firing", "{alert}", "Alerts that fire.", lambda stats: stats.firing),
        up_down("pending", "{alert}", "Alerts that are pending.", lambda stats: stats.pending),
        counter(
            "queued_notifications",
            "{notification}",
            "Notifications to send, one for each receiver.",
            lambda stats: stats.queued,
        ),
        counter(
            "sent_notifications",
            "{notification}",
            "Notifications that were accepted.",
            lambda stats: stats.sent,
            "receiver",
        ),
        counter(
            "dropped_notifications",
            "{notification}",
            "Notifications that nobody got.",
            lambda stats: stats.dropped,
            "reason",
        ),
        up_down(
            "waiting_notifications",
            "{notification}",
            "Notifications that are still to be sent.",
            lambda stats: stats.waiting,
            "receiver",
        ),
        counter(
            "requests",
            "{request}",
            "Requests to receivers.",
            lambda stats: stats.requests,
            "response",
        ),
        counter(
            "store_faults",
            "{fault}",
            "Failed reads and writes of the store.",
            lambda stats: stats.store_faults,
        ),
        gauge(
            "lag",
            "s",
            "How long after its end the last minute was evaluated.",
            lambda stats: stats.lag_s,
        ),
    ),
)
"""What is measured of the alerting process."""
