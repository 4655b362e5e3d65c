"""Spans of real clients: 22 traces of OpenTelemetry's agents and SDKs, in OTLP's JSON.

Services in Java, Python, JavaScript and Go call each other, one PostgreSQL, a Redis and a Kafka,
all on one machine, with attributes of old and of new conventions.
"""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from functools import cache
from typing import Any

from batchmill.ingest import Limits, decode_traces
from tests.kit.files import ROOT

TRACES = ROOT / "tests" / "kit" / "real-clients.jsonl"


@cache
def real_spans() -> tuple[dict[str, Any], ...]:
    """The spans of all traces, as the receiver decodes them."""
    spans = []
    for line in TRACES.read_bytes().splitlines():
        batch = decode_traces(line, "application/json", Limits()).batch.unpacked()
        for values in zip(*batch.columns.values(), strict=True):
            row = dict(zip(batch.columns, values, strict=True))
            times = {name: _at(row[name]) for name in ("time", "end_time")}
            spans.append(row | times)
    return tuple(spans)


def _at(micros: int) -> datetime:
    return datetime(1970, 1, 1, tzinfo=UTC) + timedelta(microseconds=micros)
