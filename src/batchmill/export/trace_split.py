"""Splits an OTLP trace request into one request for each trace, so that each can have its own key.

The bytes of an ``ExportTraceServiceRequest`` are cut and put together again; only the frames of
fields are read. So fields that are not known here are kept, and a small body cannot take much
memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

_RESOURCE_SPANS = _TRACE_ID = 1
_SCOPE_SPANS = _SPANS = 2
_VARINT, _LENGTH_DELIMITED = 0, 2
_FIXED_SIZES = {1: 8, 5: 4}
"""In bytes, by wire type."""


class _Envelope(NamedTuple):
    """A resource or a scope without its children."""

    position: int
    fields: bytes


class TraceRequest:
    """The spans of one trace."""

    def __init__(self, trace_id: bytes | None, whole: bytes | None = None) -> None:
        self.trace_id = trace_id
        """None: the spans have none."""
        self.spans = 0
        self.whole = whole
        """The request as it came, if that has no other spans."""
        self._spans: dict[_Envelope, dict[_Envelope, list[bytes]]] = {}
        """By resource, then by scope."""

    def add(self, resource: _Envelope, scope: _Envelope, span: bytes) -> None:
        self.spans += 1
        self._spans.setdefault(resource, {}).setdefault(scope, []).append(span)

    def body(self) -> bytes:
        """The request, made anew at each call: there may be many, each with what all share."""
        if self.whole is not None:
            return self.whole
        parts = []
        for resource, scopes in self._spans.items():
            content = [resource.fields]
            for scope, spans in scopes.items():
                content.append(_encode(_SCOPE_SPANS, b"".join([scope.fields, *spans])))
            parts.append(_encode(_RESOURCE_SPANS, b"".join(content)))
        return b"".join(parts)


def split_by_trace(body: bytes) -> list[TraceRequest]:
    """A request for each trace, in the order of their first spans; ValueError if it is none."""
    requests: dict[bytes, TraceRequest] = {}
    for number, resource in enumerate(_children(body, 0, len(body), _RESOURCE_SPANS)):
        resource_envelope = _Envelope(number, _other_fields(body, resource, _SCOPE_SPANS))
        scopes = _children(body, resource.start, resource.end, _SCOPE_SPANS)
        for position, scope in enumerate(scopes):
            scope_envelope = _Envelope(position, _other_fields(body, scope, _SPANS))
            for span in _children(body, scope.start, scope.end, _SPANS):
                trace_id = _trace_id(body, span)
                if trace_id not in requests:
                    requests[trace_id] = TraceRequest(trace_id or None)
                encoded = _encode(_SPANS, body[span.start : span.end])
                requests[trace_id].add(resource_envelope, scope_envelope, encoded)
    if not requests:
        return [TraceRequest(None, body)]
    if len(requests) == 1:
        next(iter(requests.values())).whole = body
    return list(requests.values())


class _Field(NamedTuple):
    """Where a field of a protobuf message is."""

    number: int
    wire_type: int
    tag: int
    """Where the field begins."""
    start: int
    """Where its content begins."""
    end: int


def _trace_id(body: bytes, span: _Field) -> bytes:
    for content in _children(body, span.start, span.end, _TRACE_ID):
        return body[content.start : content.end]
    return b""


def _children(body: bytes, start: int, end: int, number: int) -> Iterator[_Field]:
    """The fields with that number that hold a message, a text or bytes."""
    for field in _fields(body, start, end):
        if field.number == number and field.wire_type == _LENGTH_DELIMITED:
            yield field


def _other_fields(body: bytes, message: _Field, number: int) -> bytes:
    """All fields of a message but those with that number, as they are."""
    fields = _fields(body, message.start, message.end)
    return b"".join(body[field.tag : field.end] for field in fields if field.number != number)


def _fields(body: bytes, start: int, end: int) -> Iterator[_Field]:
    position = start
    while position < end:
        tag_at = position
        tag, position = _varint(body, position, end)
        number, wire_type = tag >> 3, tag & 7
        content = position
        if wire_type == _VARINT:
            _, position = _varint(body, position, end)
        elif wire_type == _LENGTH_DELIMITED:
            length, content = _varint(body, position, end)
            position = content + length
        elif wire_type in _FIXED_SIZES:
            position += _FIXED_SIZES[wire_type]
        else:
            raise ValueError(f"byte {tag_at}: unknown wire type {wire_type}")
        if position > end:
            raise ValueError(f"byte {tag_at}: the field does not end within its message")
        yield _Field(number, wire_type, tag_at, content, position)


def _varint(body: bytes, position: int, end: int) -> tuple[int, int]:
    """A number, and where it ends."""
    value = shift = 0
    while position < end and shift < 70:
        byte = body[position]
        position += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, position
        shift += 7
    raise ValueError(f"byte {position}: the number does not end")


def _encode(number: int, content: bytes) -> bytes:
    """A length-delimited field."""
    head = bytearray([number << 3 | _LENGTH_DELIMITED])
    length = len(content)
    while length > 0x7F:
        head.append(length & 0x7F | 0x80)
        length >>= 7
    head.append(length)
    return bytes(head) + content
