"""Kept spans for tests: segments of spans whose traces are known."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from batchmill.spool import EVENTS, STATUS_MESSAGE, SpanBatch
from batchmill.spool.rows import encode, span_table
from batchmill.traces import SpanKeeper

HOUR = 1_709_208_000
"""2024-02-29T12:00:00Z."""
NOW = HOUR + 1800


def made_span(
    trace: int,
    span: int,
    parent: int | None = None,
    *,
    at_ms: float = 0,
    took_ms: float = 10,
    service: str = "shop",
    name: str = "GET /",
    kind: str = "SERVER",
    status: str = "UNSET",
    message: str = "",
    events: Sequence[Mapping[str, Any]] = (),
    **attributes: str,
) -> dict[str, Any]:
    """A span that began ``at_ms`` after the hour; in ``attributes``, __ stands for a point."""
    start = HOUR * 1_000_000 + int(at_ms * 1000)
    pairs = {key.replace("__", "."): text for key, text in attributes.items()}
    if message:
        pairs[STATUS_MESSAGE] = message
    if events:
        pairs[EVENTS] = json.dumps(list(events))
    return {
        "time": start,
        "end_time": start + int(took_ms * 1000),
        "trace_id": f"{trace:032x}",
        "span_id": f"{span:016x}",
        "parent_span_id": None if parent is None else f"{parent:016x}",
        "name": name,
        "kind": kind,
        "status": status,
        "service": service,
        "resource": {"service.name": service, "service.instance.id": f"{service}-1"},
        "attributes": pairs,
    }


def write_spans(folder: Path, name: str, rows: Sequence[Mapping[str, Any]]) -> Path:
    """A segment of spans."""
    batch = SpanBatch()
    for row in rows:
        for column, values in batch.columns.items():
            values.append(row[column])
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.parquet"
    path.write_bytes(encode(span_table(batch)))
    return path


def kept(folder: Path, rows: Sequence[Mapping[str, Any]], *, now: float = NOW) -> SpanKeeper:
    """A keeper with some spans, in sorted files."""
    keeper = SpanKeeper(folder / "traces", clock=lambda: now)
    keeper.take(write_spans(folder / "spool", f"made-{len(rows)}", rows))
    keeper.tend(everything=True)
    return keeper
