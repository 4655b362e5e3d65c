"""Spans as the table of a segment, what is made of it, and rows to compare."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from datetime import UTC, datetime, timedelta
from typing import Any

import pyarrow as pa

from batchmill.spans.columns import compact
from batchmill.spool import SpanBatch, span_table
from tests.kit.spark import in_order


def segment(spans: Iterable[Mapping[str, Any]]) -> pa.Table:
    """Those spans as the table of a segment."""
    batch = SpanBatch()
    for span in spans:
        for name, values in batch.columns.items():
            value = span[name]
            values.append(_micros(value) if isinstance(value, datetime) else value)
    return span_table(batch)


def encoded(table: pa.Table, chunks: int = 1) -> pa.Table:
    """The same with texts as dictionaries, in several chunks that have different ones."""
    size = max(1, -(-table.num_rows // chunks))
    parts = [table.slice(start, size) for start in range(0, table.num_rows, size)]
    return pa.concat_tables(_encoded(part) for part in parts)


def _encoded(table: pa.Table) -> pa.Table:
    for place, field in enumerate(table.schema):
        if pa.types.is_string(field.type) and not field.name.endswith("_id"):
            table = table.set_column(place, field.name, table[field.name].dictionary_encode())
    return table


def compacted(
    spans: Iterable[Mapping[str, Any]], *, keys: Collection[str] | None = None
) -> pa.Table:
    """Those spans, compacted."""
    return compact(segment(spans), keys=keys)


def rows_of(table: pa.Table) -> list[dict[str, Any]]:
    """The rows of a table, with maps as dicts."""
    maps = [field.name for field in table.schema if pa.types.is_map(field.type)]
    return [
        row | {name: None if row[name] is None else dict(row[name]) for name in maps}
        for row in table.to_pylist()
    ]


def sorted_rows(table: pa.Table) -> list[dict[str, Any]]:
    """The rows of a table in an order that depends on nothing but what is in them."""
    return in_order(rows_of(table))


def _micros(time: datetime) -> int:
    return (time - datetime(1970, 1, 1, tzinfo=UTC)) // timedelta(microseconds=1)
