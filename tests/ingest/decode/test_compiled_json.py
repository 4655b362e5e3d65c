"""The compiled decoder of JSON: whatever is sent, it gives what the reference in Python gives."""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from batchmill.ingest.decode import Limits, compiled, otlp_from_json
from batchmill.ingest.decode.compiled import CompiledSpans, decode_compiled
from batchmill.spool import span_table
from tests.ingest.decode.test_compiled import REQUESTS
from tests.ingest.decode.test_fuzz import JSONS
from tests.ingest.kit import (
    JSON,
    LIMITS,
    PROTOBUF,
    Group,
    S,
    as_json,
    by_reference,
    check_equal,
    decoding_in,
    protobuf,
)
from tests.kit.otlp import REAL_CLIENTS


@pytest.fixture(autouse=True, scope="module")
def _compiled() -> Iterator[None]:
    with decoding_in("compiled"):
        yield


HERE = "<here>"
ATTRIBUTES = [
    {"key": "http.route", "value": {"stringValue": "/ä"}},
    {"key": "n", "value": {"intValue": "7"}},
    {"value": {"boolValue": True}, "key": "b"},
    {"key": "d", "value": {"doubleValue": 0.25}},
]
SPAN = {
    "traceId": "0af7651916cd43dd8448eb211c80319c",
    "spanId": "B7AD6B7169203331",
    "parentSpanId": "",
    "traceState": "a=b",
    "flags": 257,
    "name": 'GET \\ "/" \u2028\n',
    "kind": "SPAN_KIND_CLIENT",
    "startTimeUnixNano": "1700000000000000000",
    "endTimeUnixNano": 1700000000005000000,
    "attributes": ATTRIBUTES,
    "droppedAttributesCount": 0,
    "events": [],
    "links": [],
    "status": {"message": "", "code": 2},
}
GROUP = {
    "resource": {"attributes": [{"key": "service.name", "value": {"stringValue": "cart"}}]},
    "scopeSpans": [{"scope": {"name": "tests", "version": "1"}, "spans": [SPAN, SPAN]}],
    "schemaUrl": "https://example.com/1",
}
REQUEST = {"resourceSpans": [GROUP]}

PLACES = [
    (),
    ("resourceSpans",),
    ("resourceSpans", 0),
    ("resourceSpans", 0, "resource"),
    ("resourceSpans", 0, "resource", "attributes"),
    ("resourceSpans", 0, "resource", "attributes", 0, "value", "stringValue"),
    ("resourceSpans", 0, "schemaUrl"),
    *(
        ("resourceSpans", 0, "scopeSpans", *rest)
        for rest in (
            (),
            (0,),
            (0, "scope"),
            (0, "spans"),
            (0, "spans", 1),
            *((0, "spans", 1, name) for name in (*SPAN, "unknown")),
            (0, "spans", 1, "status", "code"),
            (0, "spans", 1, "status", "message"),
            *((0, "spans", 1, "attributes", index) for index in range(4)),
            (0, "spans", 1, "attributes", 0, "key"),
            (0, "spans", 1, "attributes", 0, "unknown"),
            *((0, "spans", 1, "attributes", index, "value") for index in range(4)),
            (0, "spans", 1, "attributes", 0, "value", "stringValue"),
            (0, "spans", 1, "attributes", 1, "value", "intValue"),
            (0, "spans", 1, "attributes", 2, "value", "boolValue"),
            (0, "spans", 1, "attributes", 3, "value", "doubleValue"),
            (0, "spans", 1, "attributes", 0, "value", "unknown"),
        )
    ),
]
"""Where the tests put something else: at every field of a request, known or not."""

NUMBERS = [
    "0", "-0", "1", "-1", "5", "6", "7", "01", "-01", "-", "+", "+1", "1.", ".5", "1.0", "-0.0",
    "0.1", "1e3", "1E+3", "1e-3", "1e", "1e+", "1.e5", "1e400", "-1e400", "1e-400", "5e-324",
    "2.2250738585072014e-308", "0x1", "1_0", "1a", "9223372036854775807", "9223372036854775808",
    "-9223372036854775808", "-9223372036854775809", "18446744073709551615",
    "18446744073709551616", "99999999999999999999", "100000000000000000000",
    "1700000000000000000", "1.7e18", "123456789012345678", "1234567890123456789",
    "0.30000000000000004", "9007199254740993", "9007199254740993.0", "NaN", "Infinity",
    "-Infinity", "nan", "inf", "true", "false", "null", "True", "nul", "nulll", "truefalse",
]  # fmt: skip
LITERALS = [
    *NUMBERS,
    *(f'"{number}"' for number in NUMBERS),
    "9" * 300,
    "9" * 5000,
    "0." + "3" * 5000,
    "-1" + "0" * 310,
    "1" + "0" * 310 + ".0",
    *('""', '" "', '"a"', '" 1"', '"1 "', '"\u0663"', '"\\u0031"', '"0"', '"00"'),
    *(f'"{text}"' for text in ("0" * 16, "0" * 32, "1" * 16, "g" * 16, "1" * 32, "é" * 16)),
    '"' + "aB" * 8 + '"',
    *('"SPAN_KIND_SERVER"', '"SPAN_KIND_\\u0053ERVER"', '"SPAN_KIND_NEW"', '"STATUS_CODE_OK"'),
    *(rf'"{text}"' for text in (r"\n\t\r\b\f\/\\\"", r"\u0000", r"\u00e4\u20AC", r"\ud83d\ude00")),
    *(rf'"{text}"' for text in (r"\ud83d", r"\ude00", r"\ud83d\ud83d\ude00", r"\ude00\ud83d")),
    *(rf'"{text}"' for text in (r"\ud83dx", r"\ud83d\\ude00", r"\\ud83d", r"\uD83D\uDE00\uDE00")),
    *(rf'"{text}"' for text in (r"\x", r"\u12", r"\u12g4", r"\U00e4", "\\", r"\ud83d\u12")),
    *(r'"\ude00\ude00"', r'"\ud83d\u0041"', r'"\ud83d\ud83d"', r'"\u+123"', "'a'"),
    *('"\n"', '"\x00"', '"\x1f"', '"\x7f"', '"\ufeff"', "\ufeff1", '"' + "ä" * 3000 + '"'),
    *('"' + "k" * 257 + '"', '"' + "n" * 1025 + '"', '"' + "v" * 4097 + '"'),
    *("[]", "{}", "[", "{", "]", "}", "", ",", ":", "[1,]", '{"a":1,}', "[,1]", "[1 2]", "[1,,2]"),
    *('{"a" 1}', '{"a":}', "{1:2}", '{"a":1 "b":2}', '{"a":1,"a":2}', "[[[]]]", "[null]", "[{}]"),
    *("1,2", '1,"x":2', '"a","a":"b"', "1//", "/**/1", "1 ", "\t1\n\r", "\v1", "\u00a01", "\x001"),
    '{"stringValue":"a","stringValue":"b"}',
    '{"stringValue":"a","intValue":1}',
    '{"intValue":null,"stringValue":"a"}',
    '{"stringValue":null}',
    '{"string\\u0056alue":"a"}',
    '{"new":[1],"stringValue":"a","newer":{}}',
    '{"bytesValue":"YQ==","stringValue":"a"}',
    '{"arrayValue":1,"stringValue":"a"}',
    '{"stringValue":"a","arrayValue":{"values":[{"stringValue":"x"},{}]}}',
    '{"kvlistValue":{"values":[{"key":"k","value":{"doubleValue":1}}]}}',
    '{"bytesValue":"?"}',
    '{"attributes":[{"key":"a","value":{"stringValue":"b"}},{"key":"a"}]}',
    '[{"key":"a","value":{"stringValue":"b"}},{"key":"a","value":{"stringValue":"c"}}]',
    '[{"key":"http.route","value":{"stringValue":"b"}},{"key":"http.route","value":{"intValue":1}}]',
    '[{"key":"","value":{"stringValue":"b"}}]',
    '[{"key":"a\\n","value":{"stringValue":"b"}}]',
    '[{"key":"a","key":"b","value":{"stringValue":"c"}}]',
    '[{"value":{"stringValue":"c"}}]',
    '{"code":1,"code":2}',
    '{"c\\u006fde":2}',
    '{"code":"STATUS_CODE_ERROR"}',
]  # fmt: skip


def placed(place: tuple[str | int, ...], literal: str) -> bytes:
    """The request with ``literal`` at a place."""
    before, after = _around(place)
    return before + literal.encode() + after


@functools.cache
def _around(place: tuple[str | int, ...]) -> tuple[bytes, bytes]:
    """The request before and after a place."""
    if not place:
        return b"", b""
    request = json.loads(json.dumps(REQUEST))
    inside: Any = request
    for step in place[:-1]:
        inside = inside[step]
    inside[place[-1]] = HERE
    before, after = json.dumps(request).encode().split(f'"{HERE}"'.encode())
    return before, after


@pytest.mark.parametrize("place", PLACES, ids=lambda place: ".".join(map(str, place[3:] or place)))
def test_any_literal_at_any_field(place: tuple[str | int, ...]) -> None:
    """Wrong types, numbers of every form, escapes, members twice, and what is not JSON."""
    for literal in LITERALS:
        check_equal(placed(place, literal), JSON, LIMITS)


@pytest.mark.parametrize("again", ["null", "[]", "{}", '"a"', "1", None])
def test_every_member_twice(again: str | None) -> None:
    """The last one counts; None is the same once more."""
    for place in PLACES:
        value: Any = REQUEST
        for step in place[:-1]:
            value = value[step]
        name = place[-1] if place else 0
        if isinstance(name, str) and name in value:
            first = json.dumps(value[name])
            for one, other in ((first, again or first), (again or first, first)):
                check_equal(placed(place, f'{one},"{name}":{other}'), JSON, LIMITS)


@given(st.sampled_from(PLACES), JSONS)
def test_any_value_at_any_field(place: tuple[str | int, ...], value: object) -> None:
    """Any JSON where the protocol has something else."""
    check_equal(placed(place, json.dumps(value)), JSON, LIMITS)


@given(
    st.lists(
        st.sampled_from([*'abc "\\/ä😀\x00\x1f\x7f', r"\n", r"\"", r"\\", r"\u", "00e4", r"\ud83d"])
        | st.sampled_from([r"\ude00", r"\u0022", "12345678", "é1234567", r"\b", "\x80", "\ufeff"]),
        max_size=12,
    ),
    st.sampled_from(["name", "traceState", "unknown"]),
)
def test_any_string(pieces: list[str], name: str) -> None:
    """Escapes at any distance from one another, and halves of them."""
    place = ("resourceSpans", 0, "scopeSpans", 0, "spans", 1, name)
    check_equal(placed(place, '"' + "".join(pieces) + '"'), JSON, LIMITS)


DIGITS = st.text("0123456789", max_size=22)


@given(
    st.sampled_from(["", "-", "+"]),
    DIGITS,
    st.none() | DIGITS,
    st.none() | st.integers(-330, 330),
    st.booleans(),
)
@example("", "1", "7976931348623158", 308, False)
@example("-", "0", None, None, False)
def test_any_number(
    sign: str, whole: str, fraction: str | None, exponent: int | None, quoted: bool
) -> None:
    """As value, time and enum."""
    number = sign + whole
    number += "" if fraction is None else f".{fraction}"
    number += "" if exponent is None else f"e{exponent}"
    for place in PLACES:
        if place and place[-1] in ("intValue", "doubleValue", "endTimeUnixNano", "kind", "flags"):
            check_equal(placed(place, f'"{number}"' if quoted else number), JSON, LIMITS)


BODY = json.dumps(REQUEST, separators=(",", ":"), ensure_ascii=False).encode()
SHORT = BODY.replace(
    b"," + json.dumps(SPAN, separators=(",", ":"), ensure_ascii=False).encode(), b""
)
"""With one span."""


def test_every_truncation() -> None:
    """A good request cut off anywhere."""
    for size in range(len(SHORT)):
        check_equal(SHORT[:size], JSON, LIMITS)
        check_equal(SHORT[:size] + b"]}" * 3, JSON, LIMITS)


@pytest.mark.system
@pytest.mark.parametrize("byte", [*b'{}[]",:\\ 0-n\x00\x0b\x80\xff'])
def test_every_byte_replaced(byte: int) -> None:
    """A good request with one byte changed, anywhere."""
    for at in range(len(SHORT)):
        check_equal(SHORT[:at] + bytes([byte]) + SHORT[at + 1 :], JSON, LIMITS)


@pytest.mark.parametrize(
    ("limit", "past"),
    [
        ("max_json_depth", 16),
        ("max_json_values", 130),
        ("max_spans", 4),
        ("max_attributes", 6),
        ("max_attributes_in_all", 12),
        ("max_expanded_bytes", 400),
        ("max_attribute_length", 8),
        ("max_key_length", 14),
        ("max_name_length", 16),
    ],
)
def test_every_limit_at_its_edge(limit: str, past: int) -> None:
    """The same request is taken, cut or refused at the same value of a limit."""
    outcomes = set()
    for value in range(1, past):
        limits = Limits(**{limit: value})
        check_equal(BODY, JSON, limits)
        decoded = decode_compiled(BODY, compiled.JSON, limits)
        outcomes.add(decoded is not None and not decoded.batch.odd_spans)  # type: ignore[union-attr]
    assert outcomes == {True, False}


@pytest.mark.parametrize("group", ["{}", '{"scopeSpans":[{},{}]}', '{"scopeSpans":[{"spans":[]}]}'])
def test_groups_without_spans(group: str) -> None:
    """They count towards the limit of groups."""
    body = f'{{"resourceSpans":[{group},{group}]}}'.encode()
    for most in range(1, 8):
        check_equal(body, JSON, Limits(max_spans=most))


@pytest.mark.parametrize("depth", [1, 30, 60, 64, 65, 120, 127, 128, 129, 600, 5_000])
def test_every_depth(depth: int) -> None:
    """In a field that nobody reads, and in a value."""
    for place in PLACES:
        if place and place[-1] in ("unknown", "schemaUrl", "name", "stringValue", "resource"):
            check_equal(placed(place, "[" * depth + "]" * depth), JSON, LIMITS)
            check_equal(placed(place, '{"a":' * depth + "1" + "}" * depth), JSON, LIMITS)
            check_equal(placed(place, "[" * depth), JSON, LIMITS)


def test_usual_spans_are_not_left_to_the_reference() -> None:
    """Otherwise all other tests would compare the reference with itself."""
    for body in (BODY, json.dumps(REQUEST, indent=2).encode()):
        decoded = decode_compiled(body, compiled.JSON, LIMITS)
        assert decoded is not None
        assert isinstance(decoded.batch, CompiledSpans)
        assert (len(decoded.batch), decoded.batch.odd_spans) == (2, 0)


def test_an_odd_span_keeps_its_place() -> None:
    """Those with arrays go through the reference; the others do not, and the order stays."""
    spans = [S(name=str(n), attributes=[("list", [n])] if n % 3 == 0 else []) for n in range(9)]
    spans[5] = S(trace_id=b"short")
    decoded = decode_compiled(as_json(Group(spans)), compiled.JSON, LIMITS)
    assert decoded is not None
    columns = decoded.batch.unpacked().columns
    assert columns["name"] == [str(n) for n in range(9) if n != 5]
    assert [pairs.get("list") for pairs in columns["attributes"]] == [
        f"[{n}]" if n % 3 == 0 else None for n in range(9) if n != 5
    ]
    assert decoded.rejections == {"trace_id is not 16 bytes, or all zero": 1}


@pytest.mark.parametrize(("odd", "here"), [(0, True), (2, True), (3, False), (8, False)])
def test_many_odd_spans_are_left_to_the_reference(
    odd: int, here: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that a sender of such requests does not make the receiver decode them twice."""
    monkeypatch.setattr(compiled, "MOST_ODD", 0.25)
    spans = [S(attributes=[("list", [n])] if n < odd else []) for n in range(8)]
    for body, form in ((protobuf(Group(spans)), PROTOBUF), (as_json(Group(spans)), JSON)):
        ours = compiled.JSON if form == JSON else compiled.PROTOBUF
        assert (decode_compiled(body, ours, LIMITS) is not None) == here
        check_equal(body, form, LIMITS)


@given(st.lists(st.tuples(REQUESTS, st.booleans()), max_size=3))
def test_both_forms_joined_to_a_table(requests: list[tuple[list[Group], bool]]) -> None:
    """The table is that of the reference, whichever form each request had: columns and order."""
    parts: list[CompiledSpans] = []
    expected: list[dict[str, Any]] = []
    for groups, is_json in requests:
        body = as_json(*groups) if is_json else protobuf(*groups)
        form = compiled.JSON if is_json else compiled.PROTOBUF
        decoded = decode_compiled(body, form, LIMITS)
        if decoded is not None and len(decoded.batch):
            assert isinstance(decoded.batch, CompiledSpans)
            parts.append(decoded.batch)
            rows = by_reference(body, JSON if is_json else PROTOBUF, LIMITS).batch
            expected += span_table(rows.unpacked()).to_pylist()
    if not parts:
        return
    table = CompiledSpans.join(parts)
    table.validate(full=True)
    actual = table.to_pylist()
    for row in (*expected, *actual):
        row["attributes"] = sorted(row["attributes"])
    assert actual == expected


@pytest.mark.parametrize("line", REAL_CLIENTS.read_bytes().splitlines())
def test_requests_of_real_clients(line: bytes) -> None:
    """Neither form needs the reference for most of their spans."""
    for body, form, content in (
        (line, compiled.JSON, JSON),
        (otlp_from_json(line), compiled.PROTOBUF, PROTOBUF),
    ):
        check_equal(body, content, Limits())
        decoded = decode_compiled(body, form, Limits())
        assert decoded is not None
        assert isinstance(decoded.batch, CompiledSpans)
        if form is compiled.JSON and b'"events"' in line:
            continue  # events in JSON are read by the reference
        assert 4 * decoded.batch.odd_spans <= len(decoded.batch)


EVENT = {"timeUnixNano": "1700000000000001999", "name": 'a "b"\n', "attributes": ATTRIBUTES}


@pytest.mark.parametrize(
    "extra",
    [
        {"events": [EVENT]},
        {"events": [EVENT, {}, EVENT]},
        {"events": None},
        {"events": 7},
        {"events": [7]},
        {"events": [EVENT | {"name": 7}]},
        {"status": {"message": "no", "code": 2}},
        {"status": {"message": 7}},
    ],
)
def test_events_and_status_messages(extra: dict[str, Any]) -> None:
    """The reference decodes spans that have some: few do that are sent as JSON."""
    group = GROUP | {"scopeSpans": [{"spans": [SPAN, SPAN, SPAN, SPAN | extra]}]}
    check_equal(json.dumps({"resourceSpans": [group]}).encode(), JSON, LIMITS)
