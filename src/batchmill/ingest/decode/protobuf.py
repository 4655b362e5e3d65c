"""Decodes an ExportTraceServiceRequest in protobuf to rows.

The request is not parsed as a whole: two bytes can be a span, which takes a hundred times as much
memory. The outer messages (resources, scopes) are scanned here, and spans parsed one by one, so
that the memory in use is bounded by the size of one span.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from typing import Any

from google.protobuf.message import DecodeError
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.resource.v1.resource_pb2 import Resource
from opentelemetry.proto.trace.v1.trace_pb2 import ResourceSpans, ScopeSpans, Span

from batchmill.ingest.decode.body import BadRequest, TooLarge
from batchmill.ingest.decode.rows import Content, Pairs, Rows, ValueType, plain_text, text_of
from batchmill.wording import count_of


def _number(message: Any, field: str) -> int:
    return int(message.DESCRIPTOR.fields_by_name[field].number)


_RESOURCE_SPANS = _number(ExportTraceServiceRequest, "resource_spans")
_RESOURCE = _number(ResourceSpans, "resource")
_SCOPE_SPANS = _number(ResourceSpans, "scope_spans")
_SPANS = _number(ScopeSpans, "spans")

SPARE_FIELDS = 1000
"""Unknown fields allowed in the outer messages, beside a few for each span allowed."""


def read_proto(body: bytes, rows: Rows) -> None:
    """Add the spans of ``body`` to ``rows``."""
    scanner = _Scanner(body, 4 * rows.limits.max_spans + SPARE_FIELDS)
    for _, start, end in scanner.fields(0, len(body), (_RESOURCE_SPANS,)):
        rows.group()
        _read_group(scanner, start, end, rows)


def _read_group(scanner: _Scanner, start: int, end: int, rows: Rows) -> None:
    body, limits = scanner.body, rows.limits
    resource: list[bytes] = []
    size = 0
    for number, first, last in scanner.fields(start, end, (_RESOURCE, _SCOPE_SPANS)):
        rows.group()
        if number == _RESOURCE:
            # A field that occurs several times is one message: its parts are concatenated.
            resource.append(body[first:last])
            size += last - first
            if size > limits.max_span_bytes:
                raise TooLarge(
                    f"a resource has more than {limits.max_span_bytes} bytes: "
                    "give it fewer attributes"
                )
            continue
        read_spans(body, scanner.fields(first, last, (_SPANS,)), rows)
    rows.resource(read_resource(b"".join(resource), rows))


def read_resource(resource: bytes, rows: Rows) -> Pairs:
    """The attributes of a resource."""
    try:
        about = Resource.FromString(resource)
    except DecodeError as error:
        raise BadRequest(f"a resource is not valid protobuf: {error}") from error
    return _pairs(about.attributes, len(resource), rows)


def read_spans(body: bytes, spans: Iterable[tuple[int, int, int]], rows: Rows) -> None:
    """Add spans to ``rows``: each is a field's number, its start and its end in ``body``."""
    parse, add, count = Span.FromString, rows.add, rows.span
    most, put = rows.limits.max_span_bytes, rows.attributes.append
    for _, start, end in spans:
        count()
        if end - start > most:
            rows.reject("span too large")
            continue
        try:
            span = parse(body[start:end])
        except DecodeError as error:
            raise BadRequest(f"span {rows.spans} is not valid protobuf: {error}") from error
        if add(
            span.trace_id,
            span.span_id,
            span.parent_span_id,
            span.name,
            span.kind,
            span.start_time_unix_nano,
            span.end_time_unix_nano,
            span.status.code,
        ):
            pairs = _pairs(span.attributes, end - start, rows)
            if span.events or span.status.message:
                events = (
                    (
                        event.time_unix_nano,
                        event.name,
                        _pairs(event.attributes, end - start, rows),
                    )
                    for event in span.events
                )
                rows.put_extras(pairs, span.status.message, events)
            put(pairs)


def _pairs(attributes: Any, size: int, rows: Rows) -> Pairs:
    """Attributes of a message of ``size`` bytes."""
    limits = rows.limits
    if len(attributes) > limits.max_attributes:
        attributes = rows.first_attributes(attributes)
    rows.attribute_count(len(attributes))
    if _LONGEST_NUMBER <= size <= limits.max_attribute_length:
        # The usual case, in which no text can be too long.
        try:
            pairs = {
                item.key: item.value.string_value or _simple(item.value) for item in attributes
            }
        except _NotSimple:
            return _limited_pairs(attributes, rows)
        if len(pairs) == len(attributes) and (pairs.keys() <= rows.keys or rows.learn_keys(pairs)):
            return pairs
    return _limited_pairs(attributes, rows)


def _limited_pairs(attributes: Any, rows: Rows) -> Pairs:
    limits = rows.limits
    longest, deepest = limits.max_attribute_length, limits.max_value_depth
    pairs: Pairs = {}
    for item in attributes:
        rows.put(pairs, item.key, text_of(item.value, _content, longest, deepest))
    return pairs


_LONGEST_NUMBER = 32
"""More characters than any number has as text."""


class _NotSimple(Exception):
    """A value is neither a text, a number nor a bool."""


def _simple(value: Any) -> str:
    name = value.WhichOneof("value")
    if name == "int_value":
        return str(value.int_value)
    if name == "bool_value":
        return "true" if value.bool_value else "false"
    if name == "double_value":
        return plain_text(ValueType.DOUBLE, value.double_value)
    if name == "string_value":
        return ""
    raise _NotSimple


_VALUE_TYPES = {
    "string_value": ValueType.TEXT,
    "bool_value": ValueType.BOOL,
    "int_value": ValueType.INT,
    "double_value": ValueType.DOUBLE,
    "bytes_value": ValueType.BYTES,
}


def _content(value: Any) -> Content:
    """The type and content of an AnyValue."""
    name = value.WhichOneof("value")
    kind = _VALUE_TYPES.get(name)
    if kind is not None:
        return kind, getattr(value, name)
    if name == "array_value":
        return ValueType.ARRAY, value.array_value.values
    if name == "kvlist_value":
        return ValueType.MAP, ((item.key, item.value) for item in value.kvlist_value.values)
    return ValueType.EMPTY, None


class _Scanner:
    """Finds fields in protobuf's bytes without parsing the messages in them."""

    def __init__(self, body: bytes, unknown: int) -> None:
        self.body = body
        self._unknown = unknown
        """Unknown fields that may still be skipped: each takes time, however small it is."""

    def fields(self, at: int, end: int, wanted: Collection[int]) -> Iterator[tuple[int, int, int]]:
        """Number, start and end of each wanted field of the message in ``body[at:end]``."""
        body = self.body
        while at < end:
            tag = body[at]
            at += 1
            if tag > 127:
                tag, at = self._varint(at - 1, end)
            wire = tag & 7
            if wire == 2:
                size = body[at] if at < end else 128
                at += 1
                if size > 127:
                    size, at = self._varint(at - 1, end)
                stop = at + size
            elif wire == 0:
                _, stop = self._varint(at, end)
            elif wire == 1:
                stop = at + 8
            elif wire == 5:
                stop = at + 4
            else:
                raise BadRequest(
                    f"the body is not a trace request in protobuf: wire type {wire} at byte {at}"
                )
            if stop > end:
                raise BadRequest(
                    f"the body is not valid protobuf: a field at byte {at} ends "
                    f"{count_of(stop - end, 'byte')} after its message"
                )
            number = tag >> 3
            if wire == 2 and number in wanted:
                yield number, at, stop
            elif number == 0:
                raise BadRequest(f"the body is not valid protobuf: field number 0 at byte {at}")
            else:
                self._unknown -= 1
                if self._unknown < 0:
                    raise TooLarge("the request has too many fields that OTLP does not have")
            at = stop

    def _varint(self, at: int, end: int) -> tuple[int, int]:
        value = 0
        for index, byte in enumerate(self.body[at : min(at + 10, end)]):
            value |= (byte & 127) << 7 * index
            if byte < 128:
                return value, at + index + 1
        raise BadRequest(f"the body is not valid protobuf: the number at byte {at} has no end")
