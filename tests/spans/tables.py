"""Tables of compacted spans, for the tests of duplicates and of slow statements."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import pyarrow as pa

from batchmill.spans.columns import compact
from batchmill.spool import SPAN_COLUMNS, SpanBatch, span_table


def compacted(spans: Iterable[Mapping[str, Any]]) -> pa.Table:
    """Those spans, reduced to plain columns."""
    rows = [{**row, "attributes": row["attributes"] or {}} for row in spans]
    rows = [{**row, "resource": row["resource"] or {}} for row in rows]
    columns = {name: [row[name] for row in rows] for name in SPAN_COLUMNS}
    return compact(span_table(SpanBatch(columns)))


def without_dictionaries(table: pa.Table) -> pa.Table:
    """The same with texts as strings."""
    fields = [
        field.with_type(pa.string()) if pa.types.is_dictionary(field.type) else field
        for field in table.schema
    ]
    return table.cast(pa.schema(fields))


def in_chunks(table: pa.Table, cut: int) -> pa.Table:
    """The same in two pieces, of which each has dictionaries of its own."""
    plain = without_dictionaries(table)
    return pa.concat_tables(part.cast(table.schema) for part in (plain[:cut], plain[cut:]))
