"""OTLP requests into columns of spans."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

from batchmill.errors import ConfigError
from batchmill.ingest.decode import (
    BadRequest,
    Limits,
    TooLarge,
    Unsupported,
    decode_traces,
    decompress,
)
from batchmill.ingest.decode.rows import ValueType, text_of
from batchmill.spool import EVENTS, SPAN_COLUMNS
from tests.ingest.kit import (
    JSON,
    LIMITS,
    PROTOBUF,
    Group,
    S,
    as_json,
    decoded,
    decoder,
    protobuf,
    row,
    texts,
)

__all__ = ["decoder"]
pytestmark = pytest.mark.usefixtures("decoder")


def test_spans_of_the_real_sdk() -> None:
    """What OpenTelemetry's SDK makes and its exporter encodes comes out as it went in."""
    exporter = InMemorySpanExporter()
    provider = TracerProvider(resource=Resource({"service.name": "cart", "shards": 3}))
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    tracer = provider.get_tracer("tests")
    with tracer.start_as_current_span("POST /cart", kind=SpanKind.SERVER) as parent:
        parent.set_attribute("http.response.status_code", 200)
        with tracer.start_as_current_span("SELECT", kind=SpanKind.CLIENT) as child:
            child.set_attributes({"db.system": "mysql", "sizes": [1, 2], "fast": True, "ms": 1.5})
            child.add_event("retry")
            child.set_status(StatusCode.ERROR)
    provider.shutdown()
    inner, outer = exporter.get_finished_spans()
    body = encode_spans([inner, outer]).SerializeToString()

    result = decode_traces(body, PROTOBUF, LIMITS)

    assert (result.rejected, result.reason, result.cuts) == (0, "", {})
    assert tuple(result.batch.unpacked().columns) == SPAN_COLUMNS
    assert outer.start_time is not None
    assert outer.end_time is not None
    context = outer.get_span_context()
    assert context is not None
    assert row(result, 1) == {
        "trace_id": f"{context.trace_id:032x}",
        "span_id": f"{context.span_id:016x}",
        "parent_span_id": None,
        "name": "POST /cart",
        "kind": "SERVER",
        "time": outer.start_time // 1000,
        "end_time": outer.end_time // 1000,
        "status": "UNSET",
        "service": "cart",
        "resource": {"service.name": "cart", "shards": "3"},
        "attributes": {"http.response.status_code": "200"},
    }
    first = row(result, 0)
    assert (first["parent_span_id"], first["kind"]) == (f"{context.span_id:016x}", "CLIENT")
    assert first["status"] == "ERROR"
    attributes = dict(first["attributes"])
    assert [event["name"] for event in json.loads(attributes.pop(EVENTS))] == ["retry"]
    assert attributes == {
        "db.system": "mysql",
        "sizes": "[1,2]",
        "fast": "true",
        "ms": "1.5",
    }


VALUES = st.recursive(
    st.none()
    | st.text(max_size=20)
    | st.booleans()
    | st.integers(-(2**63), 2**63 - 1)
    | st.floats()
    | st.binary(max_size=10),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3)
    ),
    max_leaves=8,
)
ATTRIBUTES = st.lists(st.tuples(st.text(max_size=6), VALUES), max_size=6)
MOMENTS = st.integers(0, 2**64 - 1) | st.integers(0, 3)
GOOD_SPANS = st.builds(
    S,
    name=st.text(max_size=12),
    kind=st.integers(0, 8),
    status=st.integers(0, 4),
    attributes=ATTRIBUTES,
)
ODD_SPANS = st.builds(
    S,
    trace_id=st.binary(min_size=16, max_size=16) | st.binary(max_size=17) | st.just(bytes(16)),
    span_id=st.binary(min_size=8, max_size=8) | st.binary(max_size=9) | st.just(bytes(8)),
    parent_id=st.binary(min_size=8, max_size=8) | st.binary(max_size=9) | st.just(bytes(8)),
    start=MOMENTS,
    end=MOMENTS,
)
SPANS = GOOD_SPANS | ODD_SPANS
GROUPS = st.lists(st.builds(Group, st.lists(SPANS, max_size=4), ATTRIBUTES), max_size=3)
SMALL = Limits(
    max_attributes=4,
    max_attribute_length=8,
    max_key_length=4,
    max_name_length=6,
    max_value_depth=2,
)


@settings(deadline=None)
@given(GROUPS, st.sampled_from([LIMITS, SMALL]))
def test_json_equals_protobuf(groups: list[Group], limits: Limits) -> None:
    """The same spans both ways give the same batch and the same counts; none goes missing."""
    result = decoded(*groups, limits=limits)
    assert {len(column) for column in result.batch.unpacked().columns.values()} == {
        len(result.batch)
    }
    assert len(result.batch) + result.rejected == sum(len(group.spans) for group in groups)
    for pairs in result.batch.unpacked().columns["attributes"]:
        assert len(pairs) <= limits.max_attributes
        assert all(0 < len(key) <= limits.max_key_length for key in pairs)
        assert all(len(text) <= limits.max_attribute_length for text in pairs.values())


@pytest.mark.parametrize(
    ("span", "reason"),
    [
        (S(trace_id=b""), "trace_id is not 16 bytes, or all zero"),
        (S(trace_id=bytes(16)), "trace_id is not 16 bytes, or all zero"),
        (S(span_id=b"\x01" * 7), "span_id is not 8 bytes, or all zero"),
        (S(span_id=bytes(8)), "span_id is not 8 bytes, or all zero"),
        (S(parent_id=b"\x01"), "parent_span_id is not 8 bytes"),
        (S(start=0), "no start time"),
        (S(end=0), "no end time"),
        (S(start=10**18, end=10**18 - 1), "end before start"),
    ],
)
def test_an_unusable_span_is_rejected_alone(span: S, reason: str) -> None:
    """Its neighbours are taken, and the reason is told and counted."""
    result = decoded(Group([S(name="a"), span, S(name="b")]))
    assert result.batch.unpacked().columns["name"] == ["a", "b"]
    assert (result.rejected, result.rejections) == (1, {reason: 1})
    assert result.reason == f"{reason} (1)"


def test_every_column_is_filled() -> None:
    """In the order of the span's definition."""
    span = S(b"t" * 16, b"s" * 8, start=1_000, end=2_000, status=1, attributes=[("key", "value")])
    batch = decoded(Group([span], [("service.name", "shop")])).batch.unpacked()
    batch.check()
    assert tuple(batch.columns) == SPAN_COLUMNS
    assert {name: values[0] for name, values in batch.columns.items()} == {
        "time": 1,
        "end_time": 2,
        "trace_id": (b"t" * 16).hex(),
        "span_id": (b"s" * 8).hex(),
        "parent_span_id": None,
        "name": "GET /",
        "kind": "SERVER",
        "status": "OK",
        "service": "shop",
        "resource": {"service.name": "shop"},
        "attributes": {"key": "value"},
    }


def test_kinds() -> None:
    """A kind that is unspecified or not known is INTERNAL."""
    known = ["INTERNAL", "INTERNAL", "SERVER", "CLIENT", "PRODUCER", "CONSUMER"]
    result = decoded(Group([S(kind=number) for number in range(7)]))
    assert result.batch.unpacked().columns["kind"] == [*known, "INTERNAL"]


def test_a_parent_of_zeros_is_none() -> None:
    """Some clients write the parent of a root so."""
    assert row(decoded(Group([S(parent_id=bytes(8))])))["parent_span_id"] is None


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("", ""),
        (None, ""),
        (True, "true"),
        (-12, "-12"),
        (1.5, "1.5"),
        (2.0, "2.0"),
        (float("nan"), "NaN"),
        (float("-inf"), "-Infinity"),
        (b"\xff\x00", "/wA="),
        ([], "[]"),
        ({}, "{}"),
        (["ä\n", 1, None, b"a", float("inf")], '["ä\\n",1,null,"YQ==","Infinity"]'),
        ({"a": [True, {"b": 1.5}]}, '{"a":[true,{"b":1.5}]}'),
    ],
)
def test_values_as_text(value: Any, text: str) -> None:
    """A text stays as it is, anything else is its JSON."""
    assert texts(value) == text


def test_no_service_name() -> None:
    """Spans of a resource without a name, or with an empty one, are of unknown_service."""
    result = decoded(Group([S()], ()), Group([S()], [("service.name", "")]), Group([S()]))
    assert result.batch.unpacked().columns["service"] == [
        "unknown_service",
        "unknown_service",
        "cart",
    ]


def test_what_is_cut_is_counted() -> None:
    """Each cut has its reason; the span itself is taken."""
    long = [("a", "x" * 9), ("b", ["x" * 20]), ("kkkkk", 1), ("", 1), ("c", [[[1]]]), ("a", "y")]
    limits = Limits(
        max_attributes=6,
        max_attribute_length=8,
        max_key_length=4,
        max_name_length=3,
        max_value_depth=2,
    )
    result = decoded(Group([S(name="name", attributes=[*long, ("z", 1), ("z", 1)])]), limits=limits)
    assert row(result)["name"] == "nam"
    assert row(result)["attributes"] == {"a": "y", "b": '["xxxxxx'}
    assert result.cuts == {
        "attribute key repeated": 1,
        "attribute key too long": 2,  # the resource has one, too
        "attribute nested too deep": 1,
        "attribute value too long": 2,
        "attribute without key": 1,
        "name too long": 1,
        "too many attributes": 2,
    }


def test_odd_keys_among_simple_values() -> None:
    """Under the usual limits, too, keys that are empty, long or repeated are told from others."""
    result = decoded(Group([S(attributes=[("", "a"), ("k" * 257, "b"), ("k", "c"), ("k", "d")])]))
    assert row(result)["attributes"] == {"k": "d"}
    assert result.cuts == {
        "attribute key repeated": 1,
        "attribute key too long": 1,
        "attribute without key": 1,
    }
    for key, why in (("", "attribute without key"), ("k" * 257, "attribute key too long")):
        assert decoded(Group([S(attributes=[(key, "a")])])).cuts == {why: 1}
    twice = decoded(Group([S(attributes=[("k", "c"), ("k", "d")])]))
    assert twice.cuts == {"attribute key repeated": 1}


def test_no_more_of_a_value_is_read_than_is_kept() -> None:
    """A huge array is left as soon as its text is too long."""
    opened: list[object] = []

    def opening(value: object) -> tuple[ValueType, object]:
        opened.append(value)
        return (ValueType.ARRAY, range(10**6)) if value == "all" else (ValueType.INT, value)

    text = text_of("all", opening, 20, 3)
    assert text is not None
    assert text.startswith("[0,1,2,3,4,5,6,7,8,9,")
    assert len(opened) < 20


def test_brackets_in_a_long_string_are_text() -> None:
    """The check of JSON's shape goes in steps; a string may be longer than one."""
    result = decode_traces(one_span(name="[" * 3 * 2**20), JSON, LIMITS)
    assert row(result)["name"] == "[" * LIMITS.max_name_length


def test_a_flood_of_unknown_fields() -> None:
    """Skipping costs time, so there is an end to it."""
    with pytest.raises(TooLarge, match="too many fields"):
        decode_traces(b"\x78\x00" * 2000, PROTOBUF, Limits(max_spans=1))


def test_a_large_span_is_rejected_alone() -> None:
    """One span past max_span_bytes costs the others nothing."""
    body = protobuf(Group([S(), S(attributes=[("a", "x" * 2000)])]))
    result = decode_traces(body, PROTOBUF, Limits(max_span_bytes=1000))
    assert (len(result.batch), result.rejections) == (1, {"span too large": 1})


@pytest.mark.parametrize(
    "limits",
    [
        Limits(max_spans=2),
        Limits(max_attributes_in_all=5),
        Limits(max_decompressed_bytes=100),
        Limits(max_expanded_bytes=239),  # the resource takes 80, and each of three spans has it
    ],
)
def test_a_request_past_a_limit(limits: Limits) -> None:
    """It is refused as a whole, and told that smaller ones would do."""
    group = Group([S(attributes=[("a", 1), ("b", 2)])] * 3)
    for body, content_type in ((protobuf(group), PROTOBUF), (as_json(group), JSON)):
        with pytest.raises(TooLarge, match="send fewer"):
            decode_traces(body, content_type, limits)


def test_a_resource_in_pieces_after_its_spans() -> None:
    """Protobuf may write a message in several pieces, and in any order."""

    def field(number: int, content: bytes) -> bytes:
        return bytes([number << 3 | 2, len(content)]) + content

    def attribute(key: bytes, text: bytes) -> bytes:
        return field(1, field(1, key) + field(2, field(1, text)))

    span = field(1, b"\1" * 16) + field(2, b"\2" * 8)
    span += b"\x39" + (1000).to_bytes(8, "little") + b"\x41" + (3999).to_bytes(8, "little")
    body = field(2, field(2, span))
    body += field(1, attribute(b"host.name", b"h")) + field(1, attribute(b"service.name", b"s"))
    span_row = row(decode_traces(field(1, body), PROTOBUF, LIMITS))
    assert (span_row["time"], span_row["end_time"], span_row["service"]) == (1, 3, "s")
    assert span_row["resource"] == {"host.name": "h", "service.name": "s"}


def one_span(**changes: Any) -> bytes:
    """A request of JSON with one span."""
    span: dict[str, Any] = {
        "traceId": "0AF7651916CD43DD8448EB211C80319C",
        "spanId": "b7ad6b7169203331",
        "startTimeUnixNano": "1700000000000000000",
        "endTimeUnixNano": 1.7e18,
    }
    spans = [{**span, **changes}]
    return json.dumps({"resourceSpans": [{"scopeSpans": [{"spans": spans}]}], "new": 1}).encode()


def test_the_liberties_of_json() -> None:
    """Ids in capitals, enums by name, numbers as text or not, nulls and unknown fields."""
    changes = {"kind": "SPAN_KIND_CLIENT", "status": {"code": "STATUS_CODE_ERROR"}, "name": None}
    values = [{"intValue": 7}, {"intValue": "8"}, {"doubleValue": 1}, {"doubleValue": "NaN"}]
    attributes = [{"key": str(i), "value": value, "x": []} for i, value in enumerate(values)]
    body = one_span(**changes, attributes=attributes, parentSpanId="", flags=[{"deep": [[]]}])
    span_row = row(decode_traces(body, "Application/JSON; charset=utf-8", LIMITS))
    assert span_row["trace_id"] == "0af7651916cd43dd8448eb211c80319c"
    assert (span_row["kind"], span_row["status"], span_row["name"]) == ("CLIENT", "ERROR", "")
    assert span_row["time"] == span_row["end_time"] == 1_700_000_000_000_000
    assert list(span_row["attributes"].values()) == ["7", "8", "1.0", "NaN"]


@pytest.mark.parametrize(
    "name", ["not hex at all, no sixteen bytes", "0af7651916cd43dd 8448eb211c80319c"]
)
def test_an_id_that_is_not_hex(name: str) -> None:
    """It is an id of wrong length."""
    result = decode_traces(one_span(traceId=name), JSON, LIMITS)
    assert result.rejections == {"trace_id is not 16 bytes, or all zero": 1}


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"", "not valid JSON"),
        (b"[]", "not an object"),
        (b'{"a":NaN}', "NaN is not JSON"),
        (b'{"a":"\xff"}', "UTF-8"),
        (b'{"a":"\\ud800"}', "half of a character"),
        (b'{"a":"\\ud83d\\\\\\ude00"}', "half of a character"),
        (b'{"a":' + b"9" * 5000 + b"}", "not valid JSON"),
        (b"[" * 100_000, "not valid JSON"),
        (b'{"a":' * 200 + b"1" + b"}" * 200, "nested more than 128"),
        (b'{"resourceSpans":{}}', "resourceSpans is of type dict: it must be an array"),
        (b'{"resourceSpans":[1]}', "an array of objects"),
        (one_span(kind=1.5), "kind is 1.5"),
        (one_span(kind=True), "kind is True"),
        (one_span(name=1), "name is 1: it must be a string"),
        (one_span(startTimeUnixNano="1_0"), "a whole number"),
        (one_span(startTimeUnixNano=-1), "from 0 to"),
        (one_span(endTimeUnixNano=2**64), "from 0 to"),
        (one_span(attributes=[1]), "an attribute is not an object"),
        (one_span(attributes=[{"value": {"intValue": str(2**63)}}]), "intValue"),
        (one_span(attributes=[{"value": {"boolValue": 1}}]), "true or false"),
        (one_span(attributes=[{"value": {"bytesValue": "a"}}]), "base64"),
        (one_span(attributes=[{"value": {"doubleValue": "x"}}]), "a number"),
    ],
)
def test_bad_json(body: bytes, message: str) -> None:
    """The answer says what is wrong with it."""
    with pytest.raises(BadRequest, match=message):
        decode_traces(body, JSON, LIMITS)


def test_surrogates_in_pairs() -> None:
    """A character that JSON escapes as two is one, also after a backslash."""
    body = one_span(name="😀\\")
    assert b"\\ud83d" in body
    assert row(decode_traces(body, JSON, LIMITS))["name"] == "😀\\"


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"\x0a", "has no end"),
        (b"\x0a\x05ab", "ends 3 bytes after its message"),
        (b"\xff" * 11, "has no end"),
        (b"\x02\x00", "field number 0"),
        (b"\x0b", "wire type 3"),
        (b"\x0a\x06\x12\x04\x12\x02\x0a\x05", "span 1 is not valid protobuf"),
        (b"\x0a\x04\x0a\x02\x0a\x05", "a resource is not valid protobuf"),
        (protobuf(Group([S(name="GET")])).replace(b"GET", b"\xff\xfe\xfd"), "span 1 is not valid"),
    ],
)
def test_bad_protobuf(body: bytes, message: str) -> None:
    """The answer says what is wrong with it."""
    with pytest.raises(BadRequest, match=message):
        decode_traces(body, PROTOBUF, LIMITS)


def test_other_content_types() -> None:
    """They are not supported, which is a bad request of a kind of its own."""
    with pytest.raises(Unsupported, match="text/plain"):
        decode_traces(b"", "text/plain", LIMITS)
    with pytest.raises(Unsupported, match="'br'"):
        decompress(b"", "br", LIMITS)


@pytest.mark.parametrize("value", [0, -1, 1.5, True, "9"])
def test_limits_check_themselves(value: Any) -> None:
    """A limit is a whole number of at least 1."""
    with pytest.raises(ConfigError, match="max_spans"):
        Limits(max_spans=value)
