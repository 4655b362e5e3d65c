"""Slow statements as an Arrow table, in which they travel from a process to the pipeline.

A row is a record, one of the slowest of its place, or the runs of a normalised statement there.
"""

from __future__ import annotations

import json
from typing import Any

import pyarrow as pa

from batchmill.aggregate.deltas import METADATA, ROW_COUNT, is_deltas
from batchmill.aggregate.errors import DeltasError
from batchmill.aggregate.topn import SERVICE_DATABASE, Record, SlowestStatements, TopNThresholds

STATEMENT_SOURCE = "Statement"
"""The name of the folder, or of the event type in a message, that statements travel under."""

_FORMAT = 1
_SCHEMA = pa.schema(
    [
        ("stream", pa.string()),
        ("entity", pa.string()),
        ("minute", pa.int64()),
        ("statement", pa.string()),
        ("latency", pa.int64()),
        ("time_us", pa.int64()),
        ("trace_id", pa.string()),
        ("span_id", pa.string()),
        ("runs", pa.int64()),
        ("total_ms", pa.int64()),
        (ROW_COUNT, pa.int64()),
    ]
)
"""``latency`` and what follows up to ``span_id`` is null for runs, whose statement is normalised;
``runs`` and ``total_ms`` are null for records."""


def statements_to_arrow(slowest: SlowestStatements) -> pa.Table:
    """Statements as a table that says by which thresholds they are slow."""
    rows: list[tuple[Any, ...]] = [
        (*place, record.statement, -record.negative_latency, *record[1:4], None, None, 0)
        for place, records in slowest.records.items()
        for record in sorted(records)[: slowest.n]
    ]
    rows += [
        # A statement of a database runs for two streams, and counts once.
        (*place, text, *[None] * 4, runs, total_ms, runs if place[0] != SERVICE_DATABASE else 0)
        for (place, text), (runs, total_ms) in slowest.runs.items()
    ]
    columns = list(zip(*rows, strict=True)) or [()] * len(_SCHEMA)
    content = {"format": _FORMAT, "statements": _conditions(slowest.n, slowest.limits)}
    arrays = [pa.array(values, kind.type) for values, kind in zip(columns, _SCHEMA, strict=True)]
    metadata = {METADATA: json.dumps(content).encode()}
    return pa.table(arrays, schema=_SCHEMA.with_metadata(metadata))


def is_statements(schema: pa.Schema) -> bool:
    """Whether a table or file with this schema holds statements."""
    try:
        return is_deltas(schema) and "statements" in json.loads(schema.metadata[METADATA])
    except (ValueError, TypeError):  # somebody else's
        return False


def statements_from_arrow(table: pa.Table, n: int, limits: TopNThresholds) -> SlowestStatements:
    """The statements of a table, for the ``n`` slowest by the same thresholds.

    Raises :class:`DeltasError` if it has fewer, or was made by other thresholds.
    """
    content = json.loads(table.schema.metadata[METADATA])
    theirs, ours = content["statements"], _conditions(n, limits)
    if content["format"] != _FORMAT or not table.schema.equals(_SCHEMA):
        raise DeltasError(STATEMENT_SOURCE, "they are of another version's format")
    different = [
        f"{name}: {theirs.get(name)}, here {ours[name]}"
        for name in ours
        if theirs.get(name) != ours[name] and not (name == "top_n" and theirs[name] > n)
    ]
    if different:
        raise DeltasError(STATEMENT_SOURCE, "; ".join(different))
    slowest = SlowestStatements(n, limits)
    for row in table.to_pylist():
        place = (row["stream"], row["entity"], row["minute"])
        if row["runs"] is not None:
            slowest.runs[place, row["statement"]] = (row["runs"], row["total_ms"])
        else:
            ids = (row["time_us"], row["trace_id"], row["span_id"])
            slowest.records.setdefault(place, []).append(
                Record(-row["latency"], *ids, row["statement"])
            )
    return slowest


def _conditions(n: int, limits: TopNThresholds) -> dict[str, Any]:
    """What statements must have in common to be merged."""
    return {
        "top_n": n,
        **{
            f"slow_{name}_ms": {"default": kind.default_ms, **kind.systems}
            for name, kind in (("database", limits.database), ("cache", limits.cache))
        },
    }
