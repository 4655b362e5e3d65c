"""Spans as messages: those of one trace that came together in one. No threads, no network.

What spans of one resource share is encoded once for all of them, and not by protobuf again for
each: in its format, two halves of a message one after the other are the message.
"""

from __future__ import annotations

from typing import NamedTuple

from batchmill.kafka.errors import MessageTooLargeError
from batchmill.kafka.schema import Span, Spans
from batchmill.spool import SPAN_COLUMNS, SPAN_SOURCE, BadRowsError, SpanBatch

_SPANS_TAG = b"\x0a"
"""Field 1 of Spans, of a length that follows."""
_FRAME_BYTES = 6
"""What a span takes beside its bytes, at most: the tag, and its length."""
_MISFIT = (ValueError, TypeError, OverflowError)
"""What protobuf raises about values that do not fit a field."""


class Message(NamedTuple):
    """What a producer is handed."""

    key: bytes
    """The bytes of the trace id: the spans of a trace are in one partition, in order."""
    value: bytes
    spans: int
    """How many are in it."""


def encode(batch: SpanBatch, max_bytes: int = 2**20, topic: str = "") -> list[Message]:
    """The messages of a batch: one for each trace, more where they would pass ``max_bytes``.

    Spans of a trace keep their order. Raises BadRowsError if a value does not fit, and
    MessageTooLargeError if a span alone is larger; ``topic`` is only for that one's text.
    """
    try:
        spans = _encoded(batch)
        keys = {trace: bytes.fromhex(trace) for trace in set(batch.columns["trace_id"])}
    except _MISFIT as error:
        detail = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise BadRowsError(SPAN_SOURCE, detail) from None
    traces: dict[str, list[bytes]] = {}
    for trace, span in zip(batch.columns["trace_id"], spans, strict=True):
        if len(span) + _FRAME_BYTES > max_bytes:
            raise MessageTooLargeError(len(span), max_bytes, topic)
        known = traces.get(trace)
        if known is None:
            traces[trace] = [span]
        else:
            known.append(span)
    messages: list[Message] = []
    for trace, parts in traces.items():
        for some in _portions(parts, max_bytes):
            messages.append(Message(keys[trace], _framed(some), len(some)))
    return messages


def decode(value: bytes) -> SpanBatch:
    """The spans of a message; raises ValueError if it is none."""
    from google.protobuf.message import DecodeError

    try:
        found = Spans.FromString(value)
    except DecodeError as error:
        raise ValueError(f"these bytes are no message of spans: {error}") from None
    batch = SpanBatch(approx_bytes=len(value))
    columns = [batch.columns[name] for name in SPAN_COLUMNS]
    for span in found.spans:
        row = {
            "trace_id": span.trace_id.hex(),
            "span_id": span.span_id.hex(),
            "parent_span_id": span.parent_span_id.hex() or None,
            "resource": dict(span.resource),
            "attributes": dict(span.attributes),
        }
        for name, values in zip(SPAN_COLUMNS, columns, strict=True):
            values.append(row[name] if name in row else getattr(span, name))
    return batch


def _encoded(batch: SpanBatch) -> list[bytes]:
    """The bytes of each span."""
    of = batch.columns
    # By identity: the batch holds them all, so that no two can have one.
    shared: dict[tuple[int, int], bytes] = {}
    spans = []
    from_hex = bytes.fromhex
    for trace, own, parent, name, kind, time, end, status, service, resource, attributes in zip(
        *(of[name] for name in SPAN_COLUMNS), strict=True
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
    """Spans of a trace, in as many messages as it takes."""
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
