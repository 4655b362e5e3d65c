"""What the receivers have counted, for the status file and for Prometheus."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

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


_KINDS = {
    "received_spans": ("counter", "Spans decoded and fit to be stored."),
    "acknowledged_spans": ("counter", "Spans durable in a segment, and acknowledged."),
    "unacknowledged_spans": ("counter", "Spans decoded and not stored: sent again later."),
    "queue_rows": ("gauge", "Spans waiting for the next segment."),
    "unread_bytes": ("gauge", "Bytes of segments that the pipeline has not committed yet."),
    "unread_segments": ("gauge", "Segments that the pipeline has not committed yet."),
    "requests_under_way": ("gauge", "Requests that have no answer yet."),
    "bytes_under_way": ("gauge", "Bytes of bodies in memory."),
}
_LEVELS = ("NORMAL", "WARNING", "CRITICAL", "CRITICAL_PLUS")


def prometheus(status: Mapping[str, Any]) -> str:
    """The figures of a status in the text format of Prometheus."""
    return "".join(f"{line}\n" for line in _lines(status))


def _lines(status: Mapping[str, Any]) -> Iterator[str]:
    for name, (kind, text) in _KINDS.items():
        if name in status:
            full = f"batchmill_ingest_{name}{'_total' if kind == 'counter' else ''}"
            yield from _head(full, kind, text)
            yield f"{full} {status[name]}"
    for key, name, text in (
        ("rejected", "rejected_spans", "Spans that were unusable, by reason."),
        ("cuts", "cuts", "Texts cut and attributes left out of spans that were taken."),
    ):
        full = f"batchmill_ingest_{name}_total"
        yield from _head(full, "counter", text)
        for reason, count in sorted(status[key].items()):
            yield f'{full}{{reason="{_escaped(reason)}"}} {count}'
    name = "batchmill_ingest_requests_total"
    yield from _head(name, "counter", "Requests answered, by protocol and outcome.")
    for key, count in sorted(status["requests"].items()):
        way, _, outcome = key.partition(" ")
        yield f'{name}{{protocol="{way}",outcome="{_escaped(outcome)}"}} {count}'
    name = "batchmill_ingest_http_connections"
    yield from _head(name, "gauge", "HTTP connections open now.")
    yield f"{name} {status['connections']['open']}"
    for what in ("accepted", "refused"):
        name = f"batchmill_ingest_http_connections_{what}_total"
        yield from _head(name, "counter", f"HTTP connections {what}.")
        yield f"{name} {status['connections'][what]}"
    name = "batchmill_ingest_level"
    yield from _head(name, "gauge", "Pressure: 0 normal, 1 warning, 2 critical, 3 critical plus.")
    yield f"{name} {_LEVELS.index(status['level'])}"


def _head(name: str, kind: str, text: str) -> Iterator[str]:
    yield f"# HELP {name} {text}"
    yield f"# TYPE {name} {kind}"


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
