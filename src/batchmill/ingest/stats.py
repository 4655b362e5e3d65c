"""What a receiver counts, and its status: for the status file and for Prometheus."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from batchmill.telemetry.exposition import render

if TYPE_CHECKING:
    from batchmill.spool import Measure, Pressure, SinkStats

_MAX_REASONS = 100
"""Reasons past this number are counted as "other", so that senders cannot fill the memory."""

_QUEUE_ROWS = "queue rows"
"""The name of a sink's measure of spans that wait in memory."""
_SPOOL_QUEUE = "spool-"
"""How the names of a spool's micro-batchers begin."""


class ReceiverStats:
    """Counters of a receiver; any thread may add to them.

    ``received = acknowledged + unacknowledged + in progress``.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.requests: Counter[tuple[str, str]] = Counter()
        """By protocol and outcome: ``ok``, or the reason of the refusal."""
        self.discarded: Counter[str] = Counter()
        """Requests answered ``ok`` and discarded, by signal."""
        self.received_spans = 0
        """Decoded and valid."""
        self.acknowledged_spans = 0
        """Durable: their senders got a success, unless they had disconnected."""
        self.unacknowledged_spans = 0
        """Decoded, but not stored: their senders were asked to send them again."""
        self.rejected: Counter[str] = Counter()
        """Invalid spans, by reason."""
        self.cuts: Counter[str] = Counter()
        """Texts cut and attributes dropped in accepted spans, by reason."""

    def answered(self, protocol: str, outcome: str) -> None:
        """Count a request that was answered."""
        with self._lock:
            self.requests[protocol, outcome] += 1

    def discard(self, signal: str) -> None:
        """Count a request whose content is not kept."""
        with self._lock:
            self.discarded[signal] += 1

    def received(self, spans: int, rejected: Mapping[str, int], cuts: Mapping[str, int]) -> None:
        """Count the spans of a decoded request."""
        with self._lock:
            self.received_spans += spans
            _add(self.rejected, rejected)
            _add(self.cuts, cuts)

    def settled(self, spans: int, stored: bool) -> None:
        """Count the spans of a request as stored, or not."""
        with self._lock:
            if stored:
                self.acknowledged_spans += spans
            else:
                self.unacknowledged_spans += spans

    def snapshot(self) -> dict[str, Any]:
        """All counters, consistent with each other."""
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
                "discarded_requests": dict(self.discarded),
                "requests": {
                    f"{protocol} {outcome}": count
                    for (protocol, outcome), count in self.requests.items()
                },
            }


def _add(counter: Counter[str], counts: Mapping[str, int]) -> None:
    for reason, count in counts.items():
        known = reason in counter or len(counter) < _MAX_REASONS
        counter[reason if known else "other"] += count


def thresholds(pressure: Pressure, measures: Sequence[Measure], stats: SinkStats) -> dict[str, Any]:
    """The sink's pressure level and the measures that decide it, for the status."""
    status: dict[str, Any] = {"level": pressure.level.name, "why": pressure.why}
    if stats.free_bytes is not None:
        status["free_bytes"] = stats.free_bytes
    return status | {"measures": [asdict(measure) for measure in measures]}


def with_sink(
    report: dict[str, Any], measures: Sequence[Measure], stats: SinkStats
) -> dict[str, Any]:
    """The components of this process for the status, first the queue of spans for the sink.

    That one is counted in spans, as its limit is. It replaces the spool's own micro-batchers, which
    count requests, but has the load of their threads; a topic has no queue of ours. The sink's
    thresholds are left out: they are its measures, which the status has anyway.
    """
    known = {measure.name for measure in measures}
    levels = [level for level in report["levels"] if level["name"] not in known]
    queues = report["queues"]
    rows = next((measure for measure in measures if measure.name == _QUEUE_ROWS), None)
    if rows is None:
        return {"queues": queues, "levels": levels}
    own = [queue for queue in queues if queue["name"].startswith(_SPOOL_QUEUE)]
    refused = {"pressure": stats.refused_rows, "not stored": stats.failed_rows}
    sink = {
        # Before the first request, a spool has no micro-batcher.
        "name": stats.kind,
        "kind": "batcher",
        "unit": "spans",
        "depth": rows.value,
        "capacity": rows.critical,
        "partitions": [{"depth": rows.value, "capacity": rows.critical}],
        "threads": [thread for queue in own for thread in queue["threads"]],
        "moves": 0,
        "last_moves": [],
        "accepted": stats.submitted_rows,
        "rejected": {reason: count for reason, count in refused.items() if count},
    }
    return {"queues": [sink, *(queue for queue in queues if queue not in own)], "levels": levels}


_COUNTERS = {
    "received_spans": "Valid spans decoded.",
    "acknowledged_spans": "Spans stored durably and acknowledged.",
    "unacknowledged_spans": "Spans decoded and not stored; their senders were asked to retry.",
}
_GAUGES = {
    "queue_rows": "Spans waiting for the next segment.",
    "unread_bytes": "Bytes of segments that the pipeline has not committed yet.",
    "unread_segments": "Segments that the pipeline has not committed yet.",
    "requests_under_way": "Requests in progress.",
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
    yield _by_reason("rejected_spans", "Invalid spans, by reason.", status["rejected"])
    yield _by_reason(
        "cuts", "Texts cut and attributes dropped in accepted spans, by reason.", status["cuts"]
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
    discarded = CounterMetricFamily(
        f"{_PREFIX}discarded_requests",
        "Requests answered with success whose content is not kept, by signal.",
        labels=["signal"],
    )
    for signal, count in sorted(status["discarded_requests"].items()):
        discarded.add_metric([signal], count)
    yield discarded
    for protocol, field in (("HTTP", "connections"), ("gRPC", "grpc_connections")):
        name = f"{_PREFIX}{protocol.lower()}_connections"
        text = f"{protocol} connections {{}}."
        yield GaugeMetricFamily(name, text.format("open now"), value=status[field]["open"])
        for what in ("accepted", "refused"):
            yield CounterMetricFamily(
                f"{name}_{what}", text.format(what), value=status[field][what]
            )
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
