"""What the receivers have counted, for the status file and for Prometheus."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from batchmill.telemetry.exposition import render

_MANY_REASONS = 100
"""Beyond this many, new ones are counted as "other": senders must not fill the memory."""


class Figures:
    """Counters; any thread may add to them.

    ``received = acknowledged + unacknowledged + under way``: nothing goes missing in between.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.requests: Counter[tuple[str, str]] = Counter()
        """By protocol and outcome: ``ok``, or the reason of the refusal."""
        self.received_spans = 0
        """Decoded, and fit to be stored."""
        self.acknowledged_spans = 0
        """Durable. Their senders are told so, unless they have left meanwhile."""
        self.unacknowledged_spans = 0
        """Decoded, then not stored: the sender is told to send them again."""
        self.rejected: Counter[str] = Counter()
        """Spans that were unusable, by reason."""
        self.cuts: Counter[str] = Counter()
        """Texts cut and attributes left out of spans that were taken, by reason."""
        self.connections: dict[str, int] = {"open": 0, "accepted": 0, "refused": 0}

    def answered(self, protocol: str, outcome: str) -> None:
        """A request has its answer."""
        with self._lock:
            self.requests[protocol, outcome] += 1

    def received(self, spans: int, rejected: Mapping[str, int], cuts: Mapping[str, int]) -> None:
        """A request was decoded."""
        with self._lock:
            self.received_spans += spans
            _add(self.rejected, rejected)
            _add(self.cuts, cuts)

    def settled(self, spans: int, stored: bool) -> None:
        """What became of the spans of a request."""
        with self._lock:
            if stored:
                self.acknowledged_spans += spans
            else:
                self.unacknowledged_spans += spans

    def snapshot(self) -> dict[str, Any]:
        """All of it at one moment."""
        with self._lock:
            refused: Counter[str] = Counter()
            for (_, outcome), count in self.requests.items():
                if outcome != "ok":
                    refused[outcome] += count
            return {
                "received_spans": self.received_spans,
                "acknowledged_spans": self.acknowledged_spans,
                "unacknowledged_spans": self.unacknowledged_spans,
                "rejected": dict(self.rejected),
                "cuts": dict(self.cuts),
                "refused_requests": dict(refused),
                "requests": {f"{way} {how}": n for (way, how), n in self.requests.items()},
                "connections": dict(self.connections),
            }


def _add(counter: Counter[str], counts: Mapping[str, int]) -> None:
    for reason, count in counts.items():
        known = reason in counter or len(counter) < _MANY_REASONS
        counter[reason if known else "other"] += count


_COUNTERS = {
    "received_spans": "Spans decoded and fit to be stored.",
    "acknowledged_spans": "Spans durable in a segment, and acknowledged.",
    "unacknowledged_spans": "Spans decoded and not stored: sent again later.",
}
_GAUGES = {
    "queue_rows": "Spans waiting for the next segment.",
    "unread_bytes": "Bytes of segments that the pipeline has not committed yet.",
    "unread_segments": "Segments that the pipeline has not committed yet.",
    "requests_under_way": "Requests that have no answer yet.",
    "bytes_under_way": "Bytes of bodies in memory.",
}
_LEVELS = ("NORMAL", "WARNING", "CRITICAL", "CRITICAL_PLUS")
_PREFIX = "batchmill_ingest_"


def prometheus(status: Mapping[str, Any]) -> bytes:
    """A receiver's status as a page for Prometheus, in its text format."""
    return render(list(_metrics(status)))


def _metrics(status: Mapping[str, Any]) -> Iterator[Metric]:
    for name, text in _COUNTERS.items():
        yield CounterMetricFamily(f"{_PREFIX}{name}", text, value=status[name])
    for name, text in _GAUGES.items():
        if name in status:
            yield GaugeMetricFamily(f"{_PREFIX}{name}", text, value=status[name])
    yield _by_reason("rejected_spans", "Spans that were unusable, by reason.", status["rejected"])
    yield _by_reason(
        "cuts", "Texts cut and attributes left out of spans that were taken.", status["cuts"]
    )
    requests = CounterMetricFamily(
        f"{_PREFIX}requests",
        "Requests answered, by protocol and outcome.",
        labels=["protocol", "outcome"],
    )
    for key, count in sorted(status["requests"].items()):
        protocol, _, outcome = key.partition(" ")
        requests.add_metric([protocol, outcome], count)
    yield requests
    connections = status["connections"]
    name = f"{_PREFIX}http_connections"
    yield GaugeMetricFamily(name, "HTTP connections open now.", value=connections["open"])
    for what in ("accepted", "refused"):
        text = f"HTTP connections {what}."
        yield CounterMetricFamily(f"{name}_{what}", text, value=connections[what])
    yield GaugeMetricFamily(
        f"{_PREFIX}level",
        "Pressure: 0 normal, 1 warning, 2 critical, 3 critical plus.",
        value=_LEVELS.index(status["level"]),
    )


def _by_reason(name: str, text: str, counts: Mapping[str, int]) -> Metric:
    metric = CounterMetricFamily(f"{_PREFIX}{name}", text, labels=["reason"])
    for reason, count in sorted(counts.items()):
        metric.add_metric([reason], count)
    return metric
