"""Spans and deltas as protobuf messages, and back.

A message has the spans of a trace that came together; or deltas of one event type, as the bytes of
a segment. The schema of a span is derived from :data:`batchmill.spool.SPAN_SCHEMA`; docs/kafka.md
shows it as a .proto file. It is proto2, since proto3 cannot tell an empty name from no name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from operator import attrgetter
from typing import Any, NamedTuple

import pyarrow as pa
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.message import DecodeError

from batchmill.kafka.errors import MessageTooLargeError
from batchmill.spool import (
    FOREIGN,
    SPAN_SCHEMA,
    SPAN_SOURCE,
    BadRowsError,
    SpanBatch,
    SpanColumn,
    delta_file,
    span_table,
)

_PACKAGE = "batchmill"
_Field = descriptor_pb2.FieldDescriptorProto
_TYPES = {"time": _Field.TYPE_INT64, "id": _Field.TYPE_BYTES, "text": _Field.TYPE_STRING}
_SPANS_TAG = b"\x0a"
"""Field 1 of Spans, followed by its length."""
_DELTAS_TAG = b"\x12"
"""Field 2 of Spans: deltas."""
_FRAME_BYTES = 6
"""What a span takes beside its bytes, at most: the tag, and its length."""
_MISFIT = (ValueError, TypeError, OverflowError)
"""What protobuf raises about values that do not fit a field."""


def _schema() -> descriptor_pb2.FileDescriptorProto:
    file = descriptor_pb2.FileDescriptorProto(
        name="batchmill/spans.proto", package=_PACKAGE, syntax="proto2"
    )
    span = file.message_type.add(name="Span")
    for column in SPAN_SCHEMA:
        field = span.field.add(name=column.name, number=column.number)
        if column.kind == "map":
            entry = span.nested_type.add(name=f"{column.name.capitalize()}Entry")
            entry.options.map_entry = True
            for number, name in enumerate(("key", "value"), 1):
                entry.field.add(
                    name=name, number=number, type=_Field.TYPE_STRING, label=_Field.LABEL_OPTIONAL
                )
            field.type, field.label = _Field.TYPE_MESSAGE, _Field.LABEL_REPEATED
            field.type_name = f".{_PACKAGE}.Span.{entry.name}"
        else:
            field.type, field.label = _TYPES[column.kind], _Field.LABEL_OPTIONAL
    deltas = file.message_type.add(name="Deltas")
    for number, (name, kind) in enumerate(
        (("source", _Field.TYPE_STRING), ("parquet", _Field.TYPE_BYTES)), 1
    ):
        deltas.field.add(name=name, number=number, type=kind, label=_Field.LABEL_OPTIONAL)
    message = file.message_type.add(name="Spans")
    message.field.add(
        name="spans",
        number=1,
        type=_Field.TYPE_MESSAGE,
        type_name=f".{_PACKAGE}.Span",
        label=_Field.LABEL_REPEATED,
    )
    message.field.add(
        name="deltas",
        number=2,
        type=_Field.TYPE_MESSAGE,
        type_name=f".{_PACKAGE}.Deltas",
        label=_Field.LABEL_OPTIONAL,
    )
    return file


# A pool of our own: protobuf's default pool belongs to the process and takes a name only once.
_POOL = descriptor_pool.DescriptorPool()
_POOL.Add(_schema())

Span: Any = message_factory.GetMessageClass(_POOL.FindMessageTypeByName(f"{_PACKAGE}.Span"))
Spans: Any = message_factory.GetMessageClass(_POOL.FindMessageTypeByName(f"{_PACKAGE}.Spans"))


class Message(NamedTuple):
    """A message to produce."""

    key: bytes
    """The bytes of the trace id: the spans of a trace are in one partition, in order. Empty for
    deltas, which may be in any."""
    value: bytes
    spans: int
    """How many spans, or deltas, are in it."""


class DeltaFile(NamedTuple):
    """Deltas of one event type, as the bytes of a segment."""

    source: str
    parquet: bytes


def encode(batch: SpanBatch, max_bytes: int = 2**20, topic: str = "") -> list[Message]:
    """The messages of a batch: one for each trace, more where one would exceed ``max_bytes``.

    Spans of a trace keep their order. Raises BadRowsError if a value does not fit, and
    MessageTooLargeError, which names ``topic``, if a single span exceeds ``max_bytes``.
    """
    try:
        spans = _encoded(batch)
        keys = {trace: bytes.fromhex(trace) for trace in set(batch.columns["trace_id"])}
    except _MISFIT as error:
        detail = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise BadRowsError(SPAN_SOURCE, detail) from None
    traces: dict[str, list[bytes]] = {}
    # Spans are let go of one by one, so that all of them are in memory once.
    spans.reverse()
    for trace in batch.columns["trace_id"]:
        span = spans.pop()
        if len(span) + _FRAME_BYTES > max_bytes:
            raise MessageTooLargeError(len(span), max_bytes, topic)
        known = traces.get(trace)
        if known is None:
            traces[trace] = [span]
        else:
            known.append(span)
    messages: list[Message] = []
    for trace in list(traces):
        for some in _portions(traces.pop(trace), max_bytes):
            messages.append(Message(keys[trace], _framed(some), len(some)))
    return messages


def encode_deltas(
    source: str, deltas: pa.Table, max_bytes: int = 2**20, topic: str = ""
) -> list[Message]:
    """The messages of deltas of one event type: one, or more where it would exceed ``max_bytes``.

    Raises MessageTooLargeError, which names ``topic``, if a single delta exceeds ``max_bytes``.
    """
    value = Spans(deltas={"source": source, "parquet": bytes(delta_file(deltas))})
    data = value.SerializeToString()
    rows = deltas.num_rows
    if len(data) <= max_bytes:
        return [Message(b"", data, rows)]
    if rows <= 1:
        raise MessageTooLargeError(len(data), max_bytes, topic)
    halves = deltas.slice(0, rows // 2), deltas.slice(rows // 2)
    return [part for half in halves for part in encode_deltas(source, half, max_bytes, topic)]


def deltas_in(value: bytes | None) -> DeltaFile | None:
    """The deltas of a message, as the bytes of a segment; None if it holds none."""
    if not value or value[:1] != _DELTAS_TAG:
        return None
    try:
        message = Spans.FromString(value)
    except DecodeError:
        return None
    deltas = message.deltas
    # The name becomes that of a folder.
    if message.spans or not deltas.source.isidentifier() or not deltas.parquet:
        return None
    return DeltaFile(deltas.source, deltas.parquet)


def decode(value: bytes) -> SpanBatch:
    """The spans of a message; raises ValueError if it is not one."""
    try:
        message = Spans.FromString(value)
    except DecodeError as error:
        raise ValueError(f"these bytes are not a message of spans: {error}") from None
    batch = SpanBatch(approx_bytes=len(value))
    _append(batch, message.spans)
    return batch


def span_rows(values: Iterable[bytes | None]) -> pa.Table:
    """The spans of messages, in order, with the columns of a segment.

    A message that holds no spans becomes a row with its bytes in the column ``FOREIGN``. Runs in
    Spark's Python workers.
    """
    batch = SpanBatch()
    foreign: list[bytes | None] = []
    for value in values:
        spans = _spans_in(value)
        if spans is None:
            for column in SPAN_SCHEMA:
                batch.columns[column.name].append({} if column.kind == "map" else None)
            foreign.append(value or b"")
            continue
        _append(batch, spans)
        foreign += [None] * len(spans)
    return span_table(batch).append_column(FOREIGN, pa.array(foreign, pa.binary()))


def _encoded(batch: SpanBatch) -> list[bytes]:
    """The bytes of each span.

    What spans of one resource share is encoded once: in protobuf's format, two halves of a message
    one after the other are the message.
    """
    of = batch.columns
    # By identity: the batch keeps the objects alive, so no two can have the same one.
    shared: dict[tuple[int, int], bytes] = {}
    spans = []
    from_hex = bytes.fromhex
    for trace, own, parent, time, end, name, kind, status, service, resource, attributes in zip(
        *(of["trace_id"], of["span_id"], of["parent_span_id"], of["time"], of["end_time"]),
        *(of["name"], of["kind"], of["status"], of["service"], of["resource"], of["attributes"]),
        strict=True,
    ):
        common = shared.get((id(service), id(resource)))
        if common is None:
            common = Span(service=service, resource=resource).SerializeToString()
            shared[id(service), id(resource)] = common
        spans.append(
            Span(
                time=time,
                end_time=end,
                trace_id=from_hex(trace),
                span_id=from_hex(own),
                parent_span_id=None if parent is None else from_hex(parent),
                name=name,
                kind=kind,
                status=status,
                attributes=attributes,
            ).SerializeToString()
            + common
        )
    return spans


def _portions(parts: list[bytes], max_bytes: int) -> list[list[bytes]]:
    """Spans of a trace, in as many messages as needed."""
    if sum(map(len, parts)) + _FRAME_BYTES * len(parts) <= max_bytes:
        return [parts]
    portions: list[list[bytes]] = []
    room = 0
    for part in parts:
        room -= len(part) + _FRAME_BYTES
        if room < 0:
            portions.append([])
            room = max_bytes - len(part) - _FRAME_BYTES
        portions[-1].append(part)
    return portions


def _framed(parts: list[bytes]) -> bytes:
    out = bytearray()
    for part in parts:
        out += _SPANS_TAG
        length = len(part)
        while length > 0x7F:
            out.append(length & 0x7F | 0x80)
            length >>= 7
        out.append(length)
        out += part
    return bytes(out)


def _spans_in(value: bytes | None) -> list[Any] | None:
    """The spans of a message; None if it holds none, or other fields as well."""
    if not value:
        return None
    try:
        spans = list(Spans.FromString(value).spans)
    except DecodeError:
        return None
    # protobuf accepts any bytes that could be fields of some message.
    is_ours = spans and all(len(span.trace_id) == 16 and len(span.span_id) == 8 for span in spans)
    return spans if is_ours else None


def _reader(column: SpanColumn) -> Callable[[Sequence[Any]], list[Any]]:
    """A function that reads the values of a column from decoded spans."""
    get = attrgetter(column.name)
    if column.kind == "id" and column.required:
        return lambda spans: [get(span).hex() for span in spans]
    if column.kind == "id":
        return lambda spans: [get(span).hex() or None for span in spans]
    if column.kind == "map":
        return lambda spans: [dict(get(span)) for span in spans]
    return lambda spans: list(map(get, spans))


_READERS = {column.name: _reader(column) for column in SPAN_SCHEMA}


def _append(batch: SpanBatch, spans: Sequence[Any]) -> None:
    """Append decoded spans to the columns of a batch."""
    for name, read in _READERS.items():
        batch.columns[name] += read(spans)
