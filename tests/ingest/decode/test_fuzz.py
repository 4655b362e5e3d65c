"""Hostile requests: the decoder answers with spans, BadRequest or TooLarge, within its memory."""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
import zlib

import pyarrow as pa
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from batchmill.ingest.decode import (
    ENCODINGS,
    BadRequest,
    Limits,
    TooLarge,
    decode_traces,
    decompress,
)
from tests.ingest.hostile import field, spans, varint
from tests.ingest.kit import JSON, PROTOBUF, Group, S, as_json, decoder, protobuf
from tests.kit.files import ROOT

__all__ = ["decoder"]
pytestmark = [pytest.mark.usefixtures("decoder"), pytest.mark.system]

SMALL = Limits(
    max_body_bytes=4000,
    max_decompressed_bytes=20_000,
    max_spans=5,
    max_span_bytes=600,
    max_attributes=4,
    max_attributes_in_all=12,
    max_attribute_length=16,
    max_key_length=8,
    max_name_length=8,
    max_value_depth=3,
    max_json_depth=24,
    max_json_values=200,
)
VALUES = ["text", "", 7, True, 1.5, b"\xff", [1, ["a", {"k": None}]], {"m": [2.5, {"x": "y"}]}]
GROUP = Group([S(attributes=[(f"k{i}", value) for i, value in enumerate(VALUES)])] * 3)
GOOD = {PROTOBUF: protobuf(GROUP), JSON: as_json(GROUP)}
FORMS = st.sampled_from([PROTOBUF, JSON])
LIMITS = st.sampled_from([Limits(), SMALL])


def never_another_error(body: bytes, content_type: str, limits: Limits, encoding: str = "") -> None:
    """Decode: only what the contract allows may come out, and it has to add up."""
    try:
        result = decode_traces(decompress(body, encoding, limits), content_type, limits)
    except (BadRequest, TooLarge) as error:
        message = str(error)
        message.encode()  # it goes into an answer
        result = None
    if result is None:
        assert message
        return
    columns = result.batch.unpacked().columns
    assert {len(column) for column in columns.values()} == {len(result.batch)}
    for row in zip(*(columns[name] for name in ("name", "service")), strict=True):
        "".join(row).encode()
    for pairs in columns["attributes"] + columns["resource"]:
        "".join(key + text for key, text in pairs.items()).encode()
    assert all(
        0 < time <= end < 2**63
        for time, end in zip(columns["time"], columns["end_time"], strict=True)
    )


@settings(deadline=None)
@given(st.binary(max_size=300), FORMS, LIMITS, st.sampled_from(["", *ENCODINGS]))
def test_any_bytes(body: bytes, content_type: str, limits: Limits, encoding: str) -> None:
    """Bytes that mean nothing."""
    never_another_error(body, content_type, limits, encoding)


@settings(deadline=None)
@given(st.text(max_size=40), st.text(max_size=40))
def test_any_headers(content_type: str, encoding: str) -> None:
    """Headers that mean nothing."""
    never_another_error(GOOD[PROTOBUF], content_type, Limits(), encoding)


EDITS = st.lists(
    st.tuples(st.integers(0, 2000), st.integers(0, 12), st.binary(max_size=12)),
    min_size=1,
    max_size=6,
)


def edited(body: bytes, edits: list[tuple[int, int, bytes]]) -> bytes:
    """``body`` with pieces of it replaced by others."""
    for at, gone, new in edits:
        at %= len(body) + 1
        body = body[:at] + new + body[at + gone :]
    return body


@settings(deadline=None)
@given(FORMS, EDITS, LIMITS)
@example(PROTOBUF, [(0, 1, b"\x0b")], Limits())
def test_mutated_messages(
    content_type: str, edits: list[tuple[int, int, bytes]], limits: Limits
) -> None:
    """Bytes of a good request taken out, put in and changed."""
    never_another_error(edited(GOOD[content_type], edits), content_type, limits)


@settings(deadline=None)
@given(FORMS, st.integers(0, 10_000))
def test_truncated_messages(content_type: str, size: int) -> None:
    """A good request cut off anywhere."""
    never_another_error(
        GOOD[content_type][: size % len(GOOD[content_type])], content_type, Limits()
    )


@settings(deadline=None)
@given(st.sampled_from([GOOD[PROTOBUF], GOOD[JSON]]), EDITS, FORMS, LIMITS)
def test_mutated_compression(
    body: bytes, edits: list[tuple[int, int, bytes]], content_type: str, limits: Limits
) -> None:
    """Compressed bytes changed: flipped lengths, members glued on, ends cut off."""
    packed = edited(gzip.compress(body, mtime=0) + gzip.compress(b"", mtime=0), edits)
    never_another_error(packed, content_type, limits, "gzip")
    never_another_error(edited(zlib.compress(body), edits), content_type, limits, "deflate")
    for codec in ("zstd", "lz4", "snappy"):
        packed = edited(pa.compress(body, codec, asbytes=True), edits)
        never_another_error(packed, content_type, limits, codec)


NAMES = (
    *("resourceSpans", "scopeSpans", "spans", "resource", "attributes", "key", "value", "status"),
    *("code", "kind", "name", "traceId", "spanId", "parentSpanId", "startTimeUnixNano"),
    *("endTimeUnixNano", "stringValue", "intValue", "doubleValue", "boolValue", "bytesValue"),
    *("arrayValue", "kvlistValue", "values"),
)
JSONS = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=8)
    | st.sampled_from(["\ud800", "1e400", "-", "AA=", "NaN", "0" * 32, "SPAN_KIND_SERVER"]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(NAMES),
            inner,
            max_size=4,
        )
    ),
    max_leaves=12,
)
SPAN = json.loads(GOOD[JSON])["resourceSpans"][0]["scopeSpans"][0]["spans"][0]


@settings(deadline=None)
@given(JSONS, st.sampled_from([*SPAN, "status", "resource", "scope", "value"]), LIMITS)
def test_json_of_the_wrong_shape(held: object, name: str, limits: Limits) -> None:
    """Any JSON where the protocol has something else."""
    span = {**SPAN, name: held, "attributes": [{"key": "k", "value": held}]}
    if name in ("attributes", "value"):
        span = {**SPAN, "attributes": held}
    request = {"resourceSpans": [{"scopeSpans": [{"spans": [SPAN, span]}], "resource": held}]}
    never_another_error(json.dumps(held).encode(), JSON, limits)
    never_another_error(json.dumps(request).encode(), JSON, limits)
    request["resourceSpans"][0].pop("resource")
    never_another_error(json.dumps(request).encode(), JSON, limits)


def nested(depth: int, *, arrays: bool) -> bytes:
    """A value of protobuf within arrays or maps; the library itself does not write such depths."""
    value = field(1, b"x")
    for _ in range(depth):
        inner = value if arrays else field(1, b"k") + field(2, value)
        value = field(5 if arrays else 6, field(1, inner))
    return value


def nested_json(depth: int, *, arrays: bool) -> dict[str, object]:
    """The same in JSON."""
    value: dict[str, object] = {"stringValue": "x"}
    for _ in range(depth):
        inner = value if arrays else {"key": "k", "value": value}
        value = {"arrayValue" if arrays else "kvlistValue": {"values": [inner]}}
    return value


@pytest.mark.parametrize("arrays", [True, False])
def test_deep_values(arrays: bool) -> None:
    """Arrays and maps far within one another: left out past the limit, then refused."""
    answers: dict[str, list[str]] = {PROTOBUF: [], JSON: []}
    for depth in range(1, 100):
        attribute = field(9, field(1, b"k") + field(2, nested(depth, arrays=arrays)))
        span = {**SPAN, "attributes": [{"key": "k", "value": nested_json(depth, arrays=arrays)}]}
        request = {"resourceSpans": [{"scopeSpans": [{"spans": [span]}]}]}
        for form, body in (
            (PROTOBUF, spans(attribute, 1)),
            (JSON, json.dumps(request).encode()),
        ):
            try:
                result = decode_traces(body, form, Limits())
                answers[form].append("deep" if result.cuts else "taken")
            except BadRequest:
                answers[form].append("refused")
    for answer in answers.values():
        assert answer[:16] == ["taken"] * 16
        assert set(answer[16:24]) == {"deep"}
        assert answer == sorted(answer, key=["taken", "deep", "refused"].index)
        assert answer[-1] == "refused"


@pytest.mark.parametrize("start", [b"[", b'{"a":', b'{"resourceSpans":[', b'[{"a":['])
@pytest.mark.parametrize("depth", [100, 130, 990, 5000, 200_000])
@pytest.mark.parametrize("closed", [True, False])
def test_deep_json(start: bytes, depth: int, closed: bool) -> None:
    """Nesting that would exhaust the stack of a parser."""
    ends = start.translate(bytes.maketrans(b"[{", b"]}"), b'":aresoucSpn')[::-1]
    never_another_error(start * depth + b"1" + ends * depth * closed, JSON, Limits())


@settings(deadline=None)
@given(st.integers(1, 16), st.lists(st.integers(0, 2**70), max_size=8), st.integers(0, 7))
def test_huge_varints(number: int, values: list[int], wire: int) -> None:
    """Lengths and numbers of up to ten bytes and more, at every level of the message."""
    body = b"".join(varint(number << 3 | wire) + varint(value) for value in values)
    for _ in range(4):
        never_another_error(body, PROTOBUF, Limits())
        body = varint(1 << 3 | 2) + varint(len(body)) + body
        never_another_error(body.replace(b"\n", b"\x12", 1), PROTOBUF, Limits())


@pytest.mark.skipif(sys.platform != "linux", reason="limits the address space")
@pytest.mark.parametrize(
    ("case", "answer"),
    [
        ("bomb", "TooLarge"),
        ("groups", "TooLarge"),
        ("spans", "TooLarge"),
        ("attributes", "taken 29"),
        ("array", "taken 29"),
        ("objects", "TooLarge"),
        ("numbers", "TooLarge"),
        ("quotes", "BadRequest"),
    ],
)
def test_memory_is_bounded(case: str, answer: str) -> None:
    """Sixty megabytes that are made to grow are dealt with in 400 MiB more."""
    ran = subprocess.run(
        [sys.executable, "-m", "tests.ingest.hostile", case],
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
    )
    assert ran.stdout.startswith(answer), ran.stdout + ran.stderr[-2000:]
