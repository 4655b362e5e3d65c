"""Decodes requests in OTLP's JSON: traces to rows, traces and logs to protobuf.

Ids are hex, names are camelCase, 64-bit numbers are strings or numbers, enums are numbers or
names, ``null`` is a missing field. Unknown fields are ignored.
"""

from __future__ import annotations

import base64
import binascii
import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, NoReturn

from google.protobuf.json_format import ParseDict, ParseError
from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import ExportLogsServiceRequest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from batchmill.ingest.decode.body import BadRequest, Limits, TooLarge
from batchmill.ingest.decode.rows import Content, Pairs, Rows, ValueType, text_of

_SQUARE_BRACKETS = bytes.maketrans(b"{}", b"[]")
_NO_STRUCTURE = bytes(set(range(256)) - set(b"[]{},"))
_STEP = 2**20
"""Bytes that are scanned for strings at a time."""

_WHOLE = re.compile(r"-?[0-9]{1,20}", re.ASCII)
_LONE_SURROGATE = re.compile(
    rb"\\u[dD][89abAB][0-9a-fA-F]{2}(?!\\u[dD][c-fC-F])"
    rb"|(?<!\\u[dD][89abAB][0-9a-fA-F]{2})\\u[dD][c-fC-F]"
)

_KINDS = {
    "SPAN_KIND_UNSPECIFIED": 0,
    "SPAN_KIND_INTERNAL": 1,
    "SPAN_KIND_SERVER": 2,
    "SPAN_KIND_CLIENT": 3,
    "SPAN_KIND_PRODUCER": 4,
    "SPAN_KIND_CONSUMER": 5,
}
_STATUSES = {"STATUS_CODE_UNSET": 0, "STATUS_CODE_OK": 1, "STATUS_CODE_ERROR": 2}

_Object = dict[str, Any]


def read_json(body: bytes, rows: Rows) -> None:
    """Add the spans of ``body`` to ``rows``."""
    request = load_json(body, rows.limits)
    if not isinstance(request, dict):
        raise BadRequest("the body is JSON, but not an object with resourceSpans")
    for group in _objects(request, "resourceSpans"):
        rows.group()
        for scope in _objects(group, "scopeSpans"):
            rows.group()
            for span in _objects(scope, "spans"):
                rows.span()
                _read_span(span, rows)
        rows.resource(_pairs(_object(group, "resource"), rows))


def read_spans(body: bytes, spans: Iterable[tuple[int, int, int]], rows: Rows) -> None:
    """Add spans to ``rows``: each is any number, its start and its end in ``body``.

    The body is known to be JSON within the limits.
    """
    for _, start, end in spans:
        rows.span()
        for span in _objects({"spans": [json.loads(body[start:end])]}, "spans"):
            _read_span(span, rows)


def read_resource(resource: bytes, rows: Rows) -> Pairs:
    """The attributes of a resource, which is known to be JSON within the limits, or nothing."""
    content = json.loads(resource) if resource else None
    return _pairs(_object({"resource": content}, "resource"), rows)


def _read_span(span: _Object, rows: Rows) -> None:
    if rows.add(
        _id(span, "traceId"),
        _id(span, "spanId"),
        _id(span, "parentSpanId"),
        _text(span, "name"),
        _enum(span, "kind", _KINDS),
        _whole(span, "startTimeUnixNano", 0, 2**64),
        _whole(span, "endTimeUnixNano", 0, 2**64),
        _enum(_object(span, "status"), "code", _STATUSES),
    ):
        pairs = _pairs(span, rows)
        message, events = _text(_object(span, "status"), "message"), _objects(span, "events")
        if message or span.get("events"):
            rows.put_extras(
                pairs,
                message,
                (
                    (
                        _whole(event, "timeUnixNano", 0, 2**64),
                        _text(event, "name"),
                        _pairs(event, rows),
                    )
                    for event in events
                ),
            )
        rows.attributes.append(pairs)


def _pairs(parent: _Object, rows: Rows) -> Pairs:
    limits = rows.limits
    attributes = _list(parent, "attributes")
    if len(attributes) > limits.max_attributes:
        attributes = list(rows.first_attributes(attributes))
    rows.attribute_count(len(attributes))
    longest, deepest = limits.max_attribute_length, limits.max_value_depth
    pairs: Pairs = {}
    for attribute in attributes:
        if not isinstance(attribute, dict):
            raise BadRequest("an attribute is not an object with key and value")
        key, value = _text(attribute, "key"), _object(attribute, "value")
        text = value.get("stringValue") if len(value) == 1 else None
        if not isinstance(text, str):
            text = text_of(value, _content, longest, deepest)
        if text is None or len(text) > longest or key not in rows.keys or key in pairs:
            rows.put(pairs, key, text)
        else:
            pairs[key] = text
    rows.learn_keys(pairs)
    return pairs


def load_json(body: bytes, limits: Limits) -> Any:
    """Parse a JSON body within the limits; raises `BadRequest` or `TooLarge`."""
    try:
        text = body.decode()
    except UnicodeDecodeError as error:
        raise BadRequest(
            f"the body is not JSON in UTF-8: {error.reason}, byte {error.start}"
        ) from None
    # Without escaped backslashes, each backslash that is left begins an escape.
    plain = body.replace(b"\\\\", b"__")
    _check_shape(plain.replace(b'\\"', b""), limits)
    if (b"\\ud" in plain or b"\\uD" in plain) and _LONE_SURROGATE.search(plain):
        raise BadRequest("the body has half of a character: a lone \\ud800 to \\udfff")
    try:
        return json.loads(text, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise BadRequest(f"the body is not valid JSON: {error}") from None


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f'{name} is not JSON, write "{name}"')


def _check_shape(body: bytes, limits: Limits) -> None:
    """Refuse JSON that is nested too deep, or has too many values, before it is parsed.

    Every quote in ``body`` must begin or end a string. Each round removes the innermost pairs of
    brackets outside strings.
    """
    structure = _structure(body)
    if structure.count(b"[") + structure.count(b",") > limits.max_json_values:
        raise TooLarge(
            f"the body has more than {limits.max_json_values} values of JSON: "
            "send fewer spans in a request"
        )
    brackets = structure.replace(b",", b"")
    for _ in range(limits.max_json_depth):
        left = brackets.replace(b"[]", b"")
        if len(left) == len(brackets):
            return  # none left, or unbalanced: then the parser says where
        brackets = left
    if b"[]" in brackets:
        raise BadRequest(f"the body is nested more than {limits.max_json_depth} deep")


def _structure(body: bytes) -> bytes:
    """The brackets outside strings, all as square ones, and the commas."""
    kept: list[bytes] = []
    inside = 0
    for at in range(0, len(body), _STEP):
        pieces = body[at : at + _STEP].split(b'"')
        kept.append(b"".join(pieces[inside::2]).translate(_SQUARE_BRACKETS, _NO_STRUCTURE))
        inside ^= len(pieces) + 1 & 1
    return b"".join(kept)


def _content(value: _Object) -> Content:
    """The type and content of an AnyValue; the last one if it has several."""
    answer: Content = (ValueType.EMPTY, None)
    for name, content in value.items():
        if content is None:
            continue
        if name == "stringValue":
            answer = ValueType.TEXT, _text(value, name)
        elif name == "intValue":
            answer = ValueType.INT, _whole(value, name, -(2**63), 2**63)
        elif name == "boolValue":
            if not isinstance(content, bool):
                raise _wrong(name, content, "true or false")
            answer = ValueType.BOOL, content
        elif name == "doubleValue":
            answer = ValueType.DOUBLE, _double(content)
        elif name == "bytesValue":
            answer = ValueType.BYTES, _bytes(content)
        elif name == "arrayValue":
            answer = ValueType.ARRAY, _objects(_object(value, name), "values")
        elif name == "kvlistValue":
            answer = ValueType.MAP, _entries(_object(value, name))
    return answer


def _entries(parent: _Object) -> Iterator[tuple[str, _Object]]:
    for entry in _objects(parent, "values"):
        yield _text(entry, "key"), _object(entry, "value")


def _double(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise _wrong("doubleValue", value, "a number")
    try:
        return float(value)
    except (ValueError, OverflowError):
        raise _wrong("doubleValue", value, "a number") from None


def _bytes(value: Any) -> bytes:
    text = value if isinstance(value, str) else "?"
    try:
        return base64.b64decode(
            text.translate({45: "+", 95: "/"}).rstrip("=") + "=" * (-len(text.rstrip("=")) % 4),
            validate=True,
        )
    except (binascii.Error, ValueError):
        raise _wrong("bytesValue", value, "base64") from None


def _object(parent: _Object, name: str) -> _Object:
    value = parent.get(name)
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise _wrong(name, value, "an object")
    return value


def _list(parent: _Object, name: str) -> list[Any]:
    value = parent.get(name)
    if value is None:
        return []
    if not isinstance(value, list):
        raise _wrong(name, value, "an array")
    return value


def _objects(parent: _Object, name: str) -> Iterator[_Object]:
    for item in _list(parent, name):
        if not isinstance(item, dict):
            raise _wrong(name, item, "an array of objects")
        yield item


def _text(parent: _Object, name: str) -> str:
    value = parent.get(name)
    if value is None:
        return ""
    if not isinstance(value, str):
        raise _wrong(name, value, "a string")
    return value


def _id(parent: _Object, name: str) -> bytes:
    """The bytes of a hex id; ``b"?"``, which no id can be, for anything else."""
    value = _text(parent, name)
    try:
        decoded = bytes.fromhex(value)
    except ValueError:
        return b"?"
    return decoded if 2 * len(decoded) == len(value) else b"?"  # fromhex skips spaces


def _whole(parent: _Object, name: str, least: int, past: int) -> int:
    value = parent.get(name)
    if value is None:
        return 0
    if isinstance(value, str) and _WHOLE.fullmatch(value):
        number = int(value)
    elif isinstance(value, int) and not isinstance(value, bool):
        number = value
    elif isinstance(value, float) and value.is_integer():
        number = int(value)
    else:
        raise _wrong(name, value, "a whole number")
    if not least <= number < past:
        raise _wrong(name, value, f"from {least} to {past - 1}")
    return number


def _enum(parent: _Object, name: str, names: dict[str, int]) -> int:
    """0, which is unspecified, for an unknown value: newer clients may have more."""
    value = parent.get(name)
    if value is None:
        return 0
    if isinstance(value, str):
        return names.get(value, 0)
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    raise _wrong(name, value, "a number or a name")


def _wrong(name: str, value: Any, allowed: str) -> BadRequest:
    shown = (
        repr(value) if isinstance(value, str | int | float) else f"of type {type(value).__name__}"
    )
    return BadRequest(f"{name} is {shown[:60]}: it must be {allowed}")


_ID_FIELDS = ("traceId", "spanId", "parentSpanId")
_SNAKE_CASE_IDS = ("trace_id", "span_id", "parent_span_id")
"""protobuf's parser accepts these names too; in OTLP they are unknown fields."""


@dataclass(frozen=True, slots=True)
class _Signal:
    """The protobuf message of a signal, and the JSON names on the way to its items."""

    message: Any
    resources: str
    scopes: str
    items: str


_SIGNALS = {
    "traces": _Signal(ExportTraceServiceRequest, "resourceSpans", "scopeSpans", "spans"),
    "logs": _Signal(ExportLogsServiceRequest, "resourceLogs", "scopeLogs", "logRecords"),
}


def otlp_from_json(body: bytes, signal: str = "traces", limits: Limits | None = None) -> bytes:
    """Convert an ExportTraceServiceRequest in JSON, or one of ``logs``, to protobuf.

    A span or a log record with invalid ids is dropped. Raises `BadRequest` or `TooLarge`.
    """
    request = load_json(body, limits or Limits())
    names = _SIGNALS[signal]
    if not isinstance(request, dict):
        raise BadRequest(f"the body is JSON, but not an object with {names.resources}")
    # OTLP's JSON is that of protobuf but for ids, which are hex in OTLP and base64 in protobuf.
    for resource in _children(request, names.resources):
        for scope in _children(resource, names.scopes):
            items = scope.get(names.items)
            if isinstance(items, list):
                scope[names.items] = [item for item in items if _convert_ids(item)]
    try:
        message = ParseDict(request, names.message(), ignore_unknown_fields=True)
    except (ParseError, RecursionError) as error:
        raise BadRequest(f"the body is JSON, but not OTLP: {error}") from None
    return bytes(message.SerializeToString())


def _children(parent: _Object, name: str) -> Iterator[_Object]:
    children = parent.get(name)
    for child in children if isinstance(children, list) else ():
        if isinstance(child, dict):
            yield child


def _convert_ids(item: Any) -> bool:
    """Convert the ids of an item and its links from hex to base64; False if they are invalid."""
    if not isinstance(item, dict):
        return False
    for name in _SNAKE_CASE_IDS:
        item.pop(name, None)
    for name in _ID_FIELDS:
        value = item.get(name)
        if value is None:
            continue
        try:
            item[name] = base64.b64encode(bytes.fromhex(value)).decode()
        except (ValueError, TypeError):
            return False
    links = item.get("links")
    if isinstance(links, list):
        item["links"] = [link for link in links if _convert_ids(link)]
    return True
