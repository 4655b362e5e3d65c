"""The columns of a span are defined once, and everything that stores or reads spans follows."""

from __future__ import annotations

import pytest

pytest.importorskip("google.protobuf")

import pyarrow as pa
from google.protobuf.descriptor import FieldDescriptor

from batchmill.kafka import Spans, encode, span_rows
from batchmill.spool import (
    ATTRIBUTE_COLUMNS,
    FOREIGN,
    KEPT_COLUMNS,
    RESOURCE_COLUMNS,
    SEGMENT_COLUMNS,
    SPAN_COLUMNS,
    SPAN_SCHEMA,
    SpanBatch,
    span_table,
)

PINNED = [
    (1, "time", "time"),
    (2, "end_time", "time"),
    (3, "trace_id", "id"),
    (4, "span_id", "id"),
    (5, "parent_span_id", "id"),
    (6, "name", "text"),
    (7, "kind", "text"),
    (8, "status", "text"),
    (9, "service", "text"),
    (10, "resource", "map"),
    (11, "attributes", "map"),
]
"""Never to be changed: segments and topics of older versions hold these."""
ARROW = {
    "time": pa.timestamp("us", tz="UTC"),
    "id": pa.string(),
    "text": pa.string(),
    "map": pa.map_(pa.string(), pa.string()),
}
PROTOBUF = {
    "time": FieldDescriptor.TYPE_INT64,
    "id": FieldDescriptor.TYPE_BYTES,
    "text": FieldDescriptor.TYPE_STRING,
    "map": FieldDescriptor.TYPE_MESSAGE,
}


def test_the_definition_is_pinned() -> None:
    """Numbers, names and kinds, and which columns a row must have."""
    assert [(column.number, column.name, column.kind) for column in SPAN_SCHEMA] == PINNED
    required = [column.name for column in SPAN_SCHEMA if column.required]
    assert required == ["time", "end_time", "trace_id", "span_id"]
    assert tuple(name for _, name, _ in PINNED) == SPAN_COLUMNS


def test_a_batch_has_these_columns() -> None:
    """In this order."""
    assert tuple(SpanBatch().columns) == SPAN_COLUMNS


def test_a_segment_has_these_columns() -> None:
    """Of these Parquet types; one made from a topic also the messages that hold no spans."""
    expected = pa.schema(
        [
            *((name, ARROW[kind]) for _, name, kind in PINNED),
            *((name, pa.string()) for name in RESOURCE_COLUMNS.values()),
            *((name, pa.string()) for name in SEGMENT_COLUMNS.values()),
        ]
    )
    assert span_table(SpanBatch()).schema.equals(expected)
    assert span_rows([]).schema.equals(expected.append(pa.field(FOREIGN, pa.binary())))
    assert FOREIGN == "_value"


def test_well_known_attributes_have_a_column() -> None:
    """Named after the attribute; a column of another meaning would be read from old segments."""
    assert RESOURCE_COLUMNS == {
        "service.instance.id": "service_instance_id",
        "host.name": "host_name",
    }
    assert KEPT_COLUMNS == {
        "otel.status_description": "status_message",
        "batchmill.events": "events",
    }
    for key, name in ATTRIBUTE_COLUMNS.items():
        assert name == key.replace(".", "_")
    names = [*SPAN_COLUMNS, *RESOURCE_COLUMNS.values(), *SEGMENT_COLUMNS.values()]
    assert len(set(names)) == len(names)


def test_a_message_has_these_fields() -> None:
    """With these numbers and types."""
    assert Spans.DESCRIPTOR.full_name == "batchmill.Spans"
    spans, deltas = Spans.DESCRIPTOR.fields
    assert [
        (descriptor.name, descriptor.number, descriptor.message_type.full_name)
        for descriptor in (spans, deltas)
    ] == [
        ("spans", 1, "batchmill.Span"),
        ("deltas", 2, "batchmill.Deltas"),
    ]
    assert [
        (descriptor.number, descriptor.name, descriptor.type)
        for descriptor in deltas.message_type.fields
    ] == [
        (1, "source", FieldDescriptor.TYPE_STRING),
        (2, "parquet", FieldDescriptor.TYPE_BYTES),
    ]
    fields = spans.message_type.fields
    assert [(field.number, field.name, field.type) for field in fields] == [
        (number, name, PROTOBUF[kind]) for number, name, kind in PINNED
    ]
    for field in fields:
        if field.type == FieldDescriptor.TYPE_MESSAGE:
            entry = field.message_type
            assert entry.name == f"{field.name.capitalize()}Entry"
            assert entry.GetOptions().map_entry
            assert [(field.number, field.name, field.type) for field in entry.fields] == [
                (1, "key", FieldDescriptor.TYPE_STRING),
                (2, "value", FieldDescriptor.TYPE_STRING),
            ]


def test_the_bytes_of_a_message_are_pinned() -> None:
    """An older version's messages are read, and it reads ours."""
    batch = SpanBatch()
    for name, value in {
        "time": 1,
        "end_time": 2,
        "trace_id": "0a" * 16,
        "span_id": "0b" * 8,
        "parent_span_id": "0c" * 8,
        "name": "n",
        "kind": "SERVER",
        "status": "OK",
        "service": "s",
        "resource": {"r": "1"},
        "attributes": {"a": "2"},
    }.items():
        batch.columns[name].append(value)
    (message,) = encode(batch)
    assert (
        message.value.hex()
        == (
            "0a4c"  # Spans.spans, 76 bytes
            "0801" + "1002"
            "1a10" + "0a" * 16 + "2208" + "0b" * 8 + "2a08" + "0c" * 8 + "32016e"
            "3a06534552564552" + "42024f4b" + "5a060a0161120132"  # kind, status, attributes
            "4a0173" + "52060a0172120131"  # service, resource: encoded once for all spans
        )
    )
    assert span_rows([message.value]).drop_columns([FOREIGN]).equals(span_table(batch))
