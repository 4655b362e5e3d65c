"""An ExportTraceServiceRequest in OTLP's JSON -> rows.

Ids are hex, names are camelCase, 64-bit numbers are texts or numbers, enums numbers or names,
``null`` is a field left out. Unknown fields are ignored.
"""

from __future__ import annotations

import base64
import binascii
import json
import re
from collections.abc import Iterator
from typing import Any, NoReturn

from batchmill.ingest.decode.limits import BadRequest, Limits, TooLarge
from batchmill.ingest.decode.rows import Pairs, Rows
from batchmill.ingest.decode.values import Kind, Opened, text_of

_ONE_KIND = bytes.maketrans(b"{}", b"[]")
_NO_STRUCTURE = bytes(set(range(256)) - set(b"[]{},"))
_STEP = 2**20
"""Bytes whose strings are split off at a time."""

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
    """Fill ``rows`` with the spans of ``body``."""
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
        rows.attributes.append(_pairs(span, rows))


def _pairs(of: _Object, rows: Rows) -> Pairs:
    limits = rows.limits
    found = _list(of, "attributes")
    if len(found) > limits.max_attributes:
        found = list(rows.fitted(found))
    rows.attribute_count(len(found))
    longest, deepest = limits.max_attribute_length, limits.max_value_depth
    pairs: dict[str, str] = {}
    for each in found:
        if not isinstance(each, dict):
            raise BadRequest("an attribute is not an object with key and value")
        key, value = _text(each, "key"), _object(each, "value")
        text = value.get("stringValue") if len(value) == 1 else None
        if not isinstance(text, str):
            text = text_of(value, _opened, longest, deepest)
        if text is None or len(text) > longest or key not in rows.keys or key in pairs:
            rows.fit(pairs, key, text)
        else:
            pairs[key] = text
    rows.keys_fit(pairs)
    return pairs


def load_json(body: bytes, limits: Limits) -> Any:
    """What a body of JSON says, within the limits; raises `BadRequest` or `TooLarge`."""
    try:
        text = body.decode()
    except UnicodeDecodeError as error:
        raise BadRequest(
            f"the body is not JSON in UTF-8: {error.reason}, byte {error.start}"
        ) from None
    # From here on each backslash in it begins an escape.
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
    """Refuse what is nested too deep, or has too many values, before it is built.

    Every quote in ``body`` begins or ends a string. Of the brackets outside strings, each round
    takes away the innermost pairs.
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
            return  # none left, or they do not match: the parser says where
        brackets = left
    if b"[]" in brackets:
        raise BadRequest(f"the body is nested more than {limits.max_json_depth} deep")


def _structure(body: bytes) -> bytes:
    """The brackets, all as square ones, and the commas outside strings."""
    kept: list[bytes] = []
    inside = 0
    for at in range(0, len(body), _STEP):
        pieces = body[at : at + _STEP].split(b'"')
        kept.append(b"".join(pieces[inside::2]).translate(_ONE_KIND, _NO_STRUCTURE))
        inside ^= len(pieces) + 1 & 1
    return b"".join(kept)


def _opened(value: _Object) -> Opened:
    """What an AnyValue holds; the last one where it says several things."""
    answer: Opened = (Kind.EMPTY, None)
    for name, held in value.items():
        if held is None:
            continue
        if name == "stringValue":
            answer = Kind.TEXT, _text(value, name)
        elif name == "intValue":
            answer = Kind.INT, _whole(value, name, -(2**63), 2**63)
        elif name == "boolValue":
            if not isinstance(held, bool):
                raise _wrong(name, held, "true or false")
            answer = Kind.BOOL, held
        elif name == "doubleValue":
            answer = Kind.DOUBLE, _double(held)
        elif name == "bytesValue":
            answer = Kind.BYTES, _bytes(held)
        elif name == "arrayValue":
            answer = Kind.ARRAY, _objects(_object(value, name), "values")
        elif name == "kvlistValue":
            answer = Kind.MAP, _entries(_object(value, name))
    return answer


def _entries(of: _Object) -> Iterator[tuple[str, _Object]]:
    for each in _objects(of, "values"):
        yield _text(each, "key"), _object(each, "value")


def _double(held: Any) -> float:
    if isinstance(held, bool) or not isinstance(held, int | float | str):
        raise _wrong("doubleValue", held, "a number")
    try:
        return float(held)
    except (ValueError, OverflowError):
        raise _wrong("doubleValue", held, "a number") from None


def _bytes(held: Any) -> bytes:
    text = held if isinstance(held, str) else "?"
    try:
        return base64.b64decode(
            text.translate({45: "+", 95: "/"}).rstrip("=") + "=" * (-len(text.rstrip("=")) % 4),
            validate=True,
        )
    except (binascii.Error, ValueError):
        raise _wrong("bytesValue", held, "base64") from None


def _object(of: _Object, name: str) -> _Object:
    held = of.get(name)
    if held is None:
        return {}
    if not isinstance(held, dict):
        raise _wrong(name, held, "an object")
    return held


def _list(of: _Object, name: str) -> list[Any]:
    held = of.get(name)
    if held is None:
        return []
    if not isinstance(held, list):
        raise _wrong(name, held, "an array")
    return held


def _objects(of: _Object, name: str) -> Iterator[_Object]:
    for each in _list(of, name):
        if not isinstance(each, dict):
            raise _wrong(name, each, "an array of objects")
        yield each


def _text(of: _Object, name: str) -> str:
    held = of.get(name)
    if held is None:
        return ""
    if not isinstance(held, str):
        raise _wrong(name, held, "a text")
    return held


def _id(of: _Object, name: str) -> bytes:
    """The bytes of a hex id; one odd byte, which no id has, for what is not hex."""
    held = _text(of, name)
    try:
        found = bytes.fromhex(held)
    except ValueError:
        return b"?"
    return found if 2 * len(found) == len(held) else b"?"  # fromhex passes over spaces


def _whole(of: _Object, name: str, least: int, past: int) -> int:
    held = of.get(name)
    if held is None:
        return 0
    if isinstance(held, str) and _WHOLE.fullmatch(held):
        number = int(held)
    elif isinstance(held, int) and not isinstance(held, bool):
        number = held
    elif isinstance(held, float) and held.is_integer():
        number = int(held)
    else:
        raise _wrong(name, held, "a whole number")
    if not least <= number < past:
        raise _wrong(name, held, f"from {least} to {past - 1}")
    return number


def _enum(of: _Object, name: str, names: dict[str, int]) -> int:
    """0, which is unspecified, for what is not known: newer clients may have more."""
    held = of.get(name)
    if held is None:
        return 0
    if isinstance(held, str):
        return names.get(held, 0)
    if isinstance(held, int) and not isinstance(held, bool):
        return held
    raise _wrong(name, held, "a number or a name")


def _wrong(name: str, held: Any, allowed: str) -> BadRequest:
    shown = repr(held) if isinstance(held, str | int | float) else f"of type {type(held).__name__}"
    return BadRequest(f"{name} is {shown[:60]}: it must be {allowed}")
