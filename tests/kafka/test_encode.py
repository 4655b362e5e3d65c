"""Spans as protobuf messages and back: no broker here."""

from __future__ import annotations

import tracemalloc
from typing import Any

import pytest

pytest.importorskip("google.protobuf")

from hypothesis import given
from hypothesis import strategies as st

from batchmill.kafka import (
    MessageTooLargeError,
    Spans,
    decode,
    encode,
)
from batchmill.spool import BadRowsError, SpanBatch
from tests.kafka.kit import Row, batch_of, noise, row, rows_of

TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
PAIRS = st.dictionaries(TEXT, TEXT, max_size=4)
TIME = st.integers(-(2**63), 2**63 - 1)
ROWS = st.fixed_dictionaries(
    {
        "trace_id": st.integers(1, 3).map("{:032x}".format),
        "span_id": st.binary(min_size=8, max_size=8).map(bytes.hex),
        "parent_span_id": st.none() | st.binary(min_size=8, max_size=8).map(bytes.hex),
        "name": TEXT,
        "kind": st.sampled_from(["SERVER", "CLIENT", ""]),
        "time": TIME,
        "end_time": TIME,
        "status": st.sampled_from(["UNSET", "OK", "ERROR"]),
        "service": TEXT,
        "resource": PAIRS,
        "attributes": PAIRS,
    }
)


@given(st.lists(ROWS, max_size=12))
def test_what_is_encoded_is_what_is_decoded(rows: list[Row]) -> None:
    """Every column of every span, in order within a trace; a message is of one trace."""
    back: dict[str, list[Row]] = {}
    for message in encode(batch_of(rows)):
        decoded = rows_of(decode(message.value))
        assert len(decoded) == message.spans
        assert {span["trace_id"] for span in decoded} == {message.key.hex()}
        back.setdefault(message.key.hex(), []).extend(decoded)
    expected: dict[str, list[Row]] = {}
    for span in rows:
        expected.setdefault(span["trace_id"], []).append(span)
    assert back == expected


def test_a_trace_is_one_message() -> None:
    """However its spans lie in the request."""
    rows = [row(1, 1), row(2, 2), row(3, 1), row(4, 2)]
    messages = encode(batch_of(rows))
    assert [(message.key, message.spans) for message in messages] == [
        (bytes.fromhex(f"{1:032x}"), 2),
        (bytes.fromhex(f"{2:032x}"), 2),
    ]


def test_a_long_trace_is_several_messages_in_order() -> None:
    """None of them larger than allowed, and none with fewer spans than would fit."""
    rows = [row(number, attributes={"text": noise(100, number)}) for number in range(200)]
    messages = encode(batch_of(rows), max_bytes=5_000)
    assert [span for message in messages for span in rows_of(decode(message.value))] == rows
    assert max(len(message.value) for message in messages) <= 5_000
    assert min(len(message.value) for message in messages[:-1]) > 4_500


def test_messages_are_in_memory_once() -> None:
    """Not the spans of all of them as well, which have as many bytes."""
    resource = {"text": noise(100_000)}
    batch = batch_of([row(number, number, resource=resource) for number in range(1, 101)])
    tracemalloc.start()
    try:
        size = sum(len(message.value) for message in encode(batch))
        assert size < tracemalloc.get_traced_memory()[1] < 1.2 * size
    finally:
        tracemalloc.stop()


def test_a_span_that_no_message_can_hold_is_reported() -> None:
    """With its size, the limit and the topic."""
    rows = [row(1), row(2, attributes={"text": noise(3_000)})]
    with pytest.raises(MessageTooLargeError) as caught:
        encode(batch_of(rows), max_bytes=2_000, topic="spans")
    assert caught.value.bytes > 3_000
    assert (caught.value.limit, caught.value.topic) == (2_000, "spans")


@pytest.mark.parametrize(
    "changes",
    [
        {"name": "\ud800"},
        {"attributes": {"key": "\udfff"}},
        {"trace_id": "no number"},
        {"time": 2**63},
        {"name": 5},
    ],
)
def test_a_value_that_does_not_fit_is_bad_rows(changes: dict[str, Any]) -> None:
    """As in a spool: the sender hears that the request is malformed."""
    with pytest.raises(BadRowsError):
        encode(batch_of([row(1) | changes]))


def test_no_spans_are_no_messages() -> None:
    """Of an empty request."""
    assert encode(SpanBatch()) == []


def test_bytes_that_are_no_message_are_reported() -> None:
    """Somebody else may write to the topic."""
    with pytest.raises(ValueError, match="not a message of spans"):
        decode(b"\x0a\xff")


def test_what_is_absent_stays_absent() -> None:
    """An empty name is a name, 1970 is a time, and a root has no parent."""
    (message,) = encode(batch_of([row(3, name="", time=0)]))
    (span,) = Spans.FromString(message.value).spans
    assert span.HasField("name")
    assert span.HasField("time")
    assert not span.HasField("parent_span_id")
    assert dict(span.attributes) == {"http.request.method": "GET", "number": "3"}
