"""The compiled decoder: whatever is sent, it gives what the reference in Python gives."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from batchmill.errors import ConfigError
from batchmill.ingest.decode import Limits, decode_traces
from batchmill.ingest.decode import compiled as compiled_decoder
from batchmill.ingest.decode.compiled import CompiledSpans, decode_compiled
from batchmill.ingest.decode.protobuf import read_proto
from batchmill.ingest.decode.rows import Rows
from batchmill.spool import ATTRIBUTE_COLUMNS, EVENTS, STATUS_MESSAGE, Spool, span_table
from tests.ingest.decode.test_fuzz import EDITS, SMALL, edited
from tests.ingest.hostile import field
from tests.ingest.kit import (
    JSON,
    LIMITS,
    PROTOBUF,
    Group,
    S,
    as_json,
    check_equal,
    decoding_in,
    protobuf,
)


@pytest.fixture(autouse=True, scope="module")
def _compiled() -> Iterator[None]:
    with decoding_in("compiled"):
        yield


TEXTS = st.text(max_size=20)
KEYS = st.one_of(st.sampled_from([*ATTRIBUTE_COLUMNS, "k", "url.path", ""]), TEXTS)
VALUES = st.recursive(
    st.one_of(
        TEXTS,
        st.sampled_from(["GET", "x" * 17, "ä" * 9, "😀" * 16]),
        st.integers(-(2**63), 2**63 - 1),
        st.booleans(),
        st.floats(),
        st.none(),
        st.binary(max_size=6),
    ),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=2),
    max_leaves=4,
)
ATTRIBUTES = st.lists(st.tuples(KEYS, VALUES), max_size=6)
SPANS = st.builds(
    S,
    trace_id=st.one_of(st.binary(min_size=16, max_size=16), st.binary(max_size=18)),
    span_id=st.one_of(st.binary(min_size=8, max_size=8), st.binary(max_size=9)),
    parent_id=st.sampled_from([b"", bytes(8), b"p" * 8, b"short"]),
    name=st.one_of(TEXTS, st.just("n" * 30)),
    kind=st.integers(0, 7),
    start=st.one_of(st.just(1_700_000_000_000_000_000), st.integers(0, 2**64 - 1)),
    end=st.one_of(st.just(1_700_000_000_005_000_000), st.integers(0, 2**64 - 1)),
    status=st.integers(0, 3),
    attributes=ATTRIBUTES,
)
REQUESTS = st.lists(st.builds(Group, st.lists(SPANS, max_size=4), ATTRIBUTES), max_size=3)
LIMITS_OF_TESTS = st.sampled_from([LIMITS, SMALL])


STYLES = st.sampled_from(
    [{}, {"separators": (",", ":"), "ensure_ascii": False}, {"indent": "\t", "sort_keys": True}]
)
"""Of JSON."""


@given(REQUESTS, STYLES, EDITS, LIMITS_OF_TESTS)
def test_any_request(
    groups: list[Group],
    style: dict[str, Any],
    edits: list[tuple[int, int, bytes]],
    limits: Limits,
) -> None:
    """In both forms: values of all types, repeated keys, invalid ids and times, texts over the
    limits; and with other bytes in it, the same error for the same byte."""
    for body, form in ((protobuf(*groups), PROTOBUF), (as_json(*groups, **style), JSON)):
        check_equal(body, form, limits)
        check_equal(edited(body, edits), form, limits)


@given(st.lists(st.builds(field, st.integers(1, 17), st.binary(max_size=12)), max_size=6))
@example([field(9, field(1, b"k") + field(2, field(1, b"\xff")))])  # not UTF-8
@example([field(9, field(1, b"k") + field(1, b"j") + field(2, field(1, b"v")))])  # two keys
@example([field(9, field(2, field(1, b"v")) + field(1, b"k"))])  # the value first
@example([field(9, field(1, b"k") + field(2, field(1, b"v") + b"\x18\x07"))])  # two values
@example([field(9, field(1, b"k") + field(2, b"\x10\x02"))])  # a bool of 2
@example([field(9, field(1, b"k") + field(2, b"\x18\x87\x00"))])  # a number in a longer form
@example([field(9, field(1, b"k") + b"\x10\x00")])  # a value that is a number
@example([field(11, field(2, b"\xff"))])  # an event's name that is not UTF-8
@example([field(11, field(3, field(1, b"k") + field(2, field(1, b"\xff"))))])
@example([field(13, field(3, b"\xff"))])
@example([field(15, field(2, b"\xff"))])
@example([field(15, b"\x18\x01"), field(15, field(2, b"again"))])  # a status in two parts
@example([b"\x30\x02", b"\x30\x03"])  # the kind twice
@example([b"\x30\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01"])  # a kind of -1
@example([b"\x0b\x0c"])  # a group, which is older protobuf
@example([b"\x82\x01\x00"])  # an unknown field
@example([b"\x08\x01"])  # a trace_id that is a number
@example([field(3, b"\xff")])  # a trace_state that is not UTF-8
def test_any_fields_of_a_span(fields: list[bytes]) -> None:
    """Fields that a span may have, or not, with any content."""
    ids = field(1, b"a" * 16) + field(2, b"a" * 8)
    times = b"\x39" + b"a" * 8 + b"\x41" + b"b" * 8
    span = field(2, ids + times + b"".join(fields))
    check_equal(field(1, field(2, span * 2)), PROTOBUF, LIMITS)


@given(st.one_of(st.floats(), st.floats(width=32), st.integers(-1074, 1023).map(lambda n: 2.0**n)))
@example(5e-324)
@example(1.7976931348623157e308)
@example(1e16)
@example(9999999999999998.0)
@example(0.0001)
@example(1e-05)
@example(-0.0)
@example(123456789012345680.0)
def test_any_double(value: float) -> None:
    """A number is the same text, digit by digit."""
    check_equal(protobuf(Group([S(attributes=[("k", value), ("-k", -value)])])), PROTOBUF, LIMITS)


def test_usual_spans_are_not_left_to_the_reference() -> None:
    """Otherwise all other tests would compare the reference with itself."""
    attributes = [("http.route", "/"), ("k", "v"), ("n", 7), ("ok", True), ("ratio", 0.25)]
    body = protobuf(Group([S(attributes=attributes)] * 3))
    decoded = decode_compiled(body, compiled_decoder.PROTOBUF, LIMITS)
    assert decoded is not None
    assert isinstance(decoded.batch, CompiledSpans)
    assert decoded.batch.odd_spans == 0


def test_what_waits_weighs_its_resource() -> None:
    """A resource is kept as it was sent, and counts towards the bytes that wait."""
    body = protobuf(Group([S()], [("k", "v" * 1000)] * 100))
    decoded = decode_compiled(body, compiled_decoder.PROTOBUF, Limits())
    assert decoded is not None
    assert decoded.batch.weight > len(body) > 100_000


def test_a_resource_in_many_parts() -> None:
    """They are joined at once: a copy for each part would take as many seconds as a minute has."""
    part = field(1, field(1, field(1, b"k") + field(2, field(1, b"v" * 20))))
    check_equal(field(1, part * 40_000 + field(2, b"")), PROTOBUF, Limits())


def test_an_odd_span_keeps_its_place() -> None:
    """Those with arrays go through the reference; the others do not, and the order stays."""
    spans = [S(name=str(n), attributes=[("list", [n])] if n % 3 == 0 else []) for n in range(9)]
    decoded = decode_compiled(protobuf(Group(spans)), compiled_decoder.PROTOBUF, LIMITS)
    assert decoded is not None
    columns = decoded.batch.unpacked().columns
    assert columns["name"] == [str(n) for n in range(9)]
    assert [pairs.get("list") for pairs in columns["attributes"]] == [
        f"[{n}]" if n % 3 == 0 else None for n in range(9)
    ]


def test_both_forms_in_one_segment(tmp_path: Path) -> None:
    """Spans that an application submits as lists share a segment with decoded ones."""
    body = protobuf(Group([S(name="a", attributes=[("http.route", "/"), ("k", "v")])] * 2))
    rows = Rows(LIMITS)
    read_proto(body, rows)
    with Spool(tmp_path, linger_s=60) as spool:
        decoded = decode_traces(body, PROTOBUF, LIMITS)
        answers = [spool.submit("Span", batch) for batch in (decoded.batch, rows.batch)]
        assert spool.flush()
        paths = {answer.result() for answer in answers}
    (path,) = paths
    table = pq.read_table(path)
    assert table.num_rows == 4
    assert len({str(row) for row in table.to_pylist()}) == 1
    assert table.schema.equals(span_table(rows.batch).schema)


def test_a_decoder_that_is_wanted_and_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who asks for it is told; who does not gets the reference."""
    monkeypatch.setattr(compiled_decoder, "LIBRARY", Path("/nowhere/wire.lib"))
    with decoding_in("compiled"), pytest.raises(ConfigError, match="BATCHMILL_DECODER='compiled'"):
        compiled_decoder.library()
    with decoding_in(""):
        assert compiled_decoder.library() is None
    with decoding_in("fast"), pytest.raises(ValueError, match="python or compiled"):
        compiled_decoder.library()


def test_real_protobuf_agrees() -> None:
    """The bytes of these tests are requests that protobuf itself reads."""
    body = protobuf(Group([S()]))
    assert ExportTraceServiceRequest.FromString(body).resource_spans


EVENTS_SENT = st.lists(
    st.tuples(st.integers(0, 2**64 - 1), st.text(max_size=8), ATTRIBUTES), max_size=3
)


def _with_events(message: str, events: list[tuple[int, str, list[tuple[str, object]]]]) -> bytes:
    """A request with one span that has events and a status message, and three plain ones."""
    request = ExportTraceServiceRequest.FromString(protobuf(Group([S(), S(), S(), S()])))
    span = request.resource_spans[0].scope_spans[0].spans[0]
    span.status.message = message
    for at, name, attributes in events:
        holder = ExportTraceServiceRequest.FromString(protobuf(Group([S(attributes=attributes)])))
        own = holder.resource_spans[0].scope_spans[0].spans[0].attributes
        span.events.add(time_unix_nano=at, name=name, attributes=own)
    return bytes(request.SerializeToString())


@given(st.text(max_size=20), EVENTS_SENT, LIMITS_OF_TESTS)
@example("", [(1999, '"\\\n\x01\x7fä', [("k", "\b\f\r\t\x1f"), ("n", -7), ("d", 0.5)])], LIMITS)
@example("x" * 17, [(0, "", [("k", "a"), ("k", "b")])], SMALL)
@example("", [(0, "x" * 200, [])] * 9, SMALL)
def test_events_and_status_messages(
    message: str, events: list[tuple[int, str, list[tuple[str, object]]]], limits: Limits
) -> None:
    """Both decoders make the same JSON of events, and cut it in the same place."""
    check_equal(_with_events(message, events), PROTOBUF, limits)


def test_events_are_decoded_in_c() -> None:
    """Those of plain attributes; their JSON can be read."""
    body = _with_events("no", [(1999, 'a "b"', [("k", "ä\n"), ("n", 7), ("b", True)])])
    decoded = decode_compiled(body, compiled_decoder.PROTOBUF, LIMITS)
    assert decoded is not None
    assert isinstance(decoded.batch, CompiledSpans)
    assert decoded.batch.odd_spans == 0
    attributes = decoded.batch.unpacked().columns["attributes"]
    assert attributes[1:] == [{}, {}, {}]
    assert attributes[0][STATUS_MESSAGE] == "no"
    assert json.loads(attributes[0][EVENTS]) == [
        {"time": 1, "name": 'a "b"', "attributes": {"k": "ä\n", "n": "7", "b": "true"}}
    ]
