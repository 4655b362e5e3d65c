"""Messages as spans again: the way back of :mod:`.messages`. No threads, no network.

Runs where Spark does, in its Python workers, a batch of messages at a time.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pyarrow as pa
from google.protobuf.message import DecodeError

from batchmill.kafka.columns import FOREIGN
from batchmill.kafka.schema import Spans
from batchmill.spool import SpanBatch, span_table


def span_rows(values: Iterable[bytes | None]) -> pa.Table:
    """The spans of messages, in order, as a segment has them; and what is no message of spans."""
    batch = SpanBatch()
    foreign: list[bytes | None] = []
    add = _adder(batch)
    for value in values:
        spans = _spans(value)
        if spans is None:
            for column in batch.columns.values():
                column.append(None)
            batch.columns["resource"][-1] = batch.columns["attributes"][-1] = {}
            foreign.append(value or b"")
            continue
        for span in spans:
            add(span)
        foreign += [None] * len(spans)
    return span_table(batch).append_column(FOREIGN, pa.array(foreign, pa.binary()))


def _spans(value: bytes | None) -> Any:
    """None if it is no message of spans. One that has other fields as well is none."""
    if not value:
        return None
    try:
        message = Spans.FromString(value)
    except DecodeError:
        return None
    # Any bytes that could be fields of some message are accepted by protobuf.
    known = len(message.spans) and all(
        len(each.trace_id) == 16 and len(each.span_id) == 8 for each in message.spans
    )
    return message.spans if known else None


def _adder(batch: SpanBatch) -> Any:
    columns = batch.columns
    names = ("time", "end_time", "name", "kind", "status", "service")
    plain = [(name, columns[name].append) for name in names]
    trace_ids, span_ids = columns["trace_id"].append, columns["span_id"].append
    parents = columns["parent_span_id"].append
    resources, attributes = columns["resource"].append, columns["attributes"].append

    def add(span: Any) -> None:
        trace_ids(span.trace_id.hex())
        span_ids(span.span_id.hex())
        parents(span.parent_span_id.hex() or None)
        for name, put in plain:
            put(getattr(span, name))
        resources(dict(span.resource))
        attributes(dict(span.attributes))

    return add
