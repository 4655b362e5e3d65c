"""Batches of spans for the tests of the topic, and what came back."""

from __future__ import annotations

import base64
import random
from collections.abc import Iterable
from typing import Any

from batchmill.kafka import decode
from batchmill.spool import SPAN_COLUMNS, SpanBatch
from tests.kit.servers.kafka import Record

Row = dict[str, Any]


def row(number: int, trace: int = 1, **changes: Any) -> Row:
    """A span, other than any with another number."""
    made: Row = {
        "trace_id": f"{trace:032x}",
        "span_id": f"{number:016x}",
        "parent_span_id": None if number % 3 == 0 else f"{number - 1:016x}",
        "name": f"GET /orders/{number}",
        "kind": "SERVER",
        "time": 1_772_366_400_000_000 + number,
        "end_time": 1_772_366_400_250_000 + number,
        "status": "UNSET",
        "service": "shop",
        "resource": {"service.name": "shop", "host": "a"},
        "attributes": {"http.request.method": "GET", "number": str(number)},
    }
    assert changes.keys() <= made.keys()
    return made | changes


def batch_of(rows: Iterable[Row]) -> SpanBatch:
    """Rows as a receiver hands them over."""
    batch = SpanBatch()
    for span in rows:
        for name in SPAN_COLUMNS:
            batch.columns[name].append(span[name])
    return batch


def rows_of(batch: SpanBatch) -> list[Row]:
    """And back."""
    columns = [batch.columns[name] for name in SPAN_COLUMNS]
    return [dict(zip(SPAN_COLUMNS, values, strict=True)) for values in zip(*columns, strict=True)]


def rows_in(records: Iterable[Record]) -> list[Row]:
    """The spans of messages, in order."""
    return [span for record in records for span in rows_of(decode(record.value))]


def noise(n: int, seed: int = 1) -> str:
    """Text that cannot be compressed much."""
    return base64.b64encode(random.Random(seed).randbytes(n)).decode()[:n]
