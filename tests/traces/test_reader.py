"""Traces are found by what their spans are, and read by their ids."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from batchmill.traces import SpanKeeper, SpanReader, TraceQuery
from tests.kit.traces.segments import HOUR, NOW, kept, made_span, write_spans

ROWS = [
    made_span(1, 1, at_ms=1000, took_ms=100, name="GET /cart", http__route="/cart"),
    made_span(1, 2, 1, at_ms=1010, took_ms=50, service="db", kind="CLIENT", name="SELECT"),
    made_span(2, 1, at_ms=2000, took_ms=900, name="POST /order", status="ERROR"),
    made_span(3, 1, at_ms=3000, took_ms=5, service="cart", name="GET /cart", user__id="7 8"),
]


def _trace_ids(reader: SpanReader, **given: Any) -> list[int]:
    """The traces of a query, the newest first."""
    query = TraceQuery(**({"start_us": HOUR * 1_000_000, "end_us": NOW * 1_000_000} | given))
    return [int(trace.trace_id, 16) for trace in reader.search(query).traces]


@pytest.fixture(params=["sorted", "many keys", "waiting"])
def reader(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> SpanReader:
    """The spans in a sorted file, in one whose keys are not listed, and in a segment that waits."""
    if request.param == "many keys":
        monkeypatch.setattr("batchmill.traces.rewrite._MOST_KEYS", 1)
    if request.param != "waiting":
        return SpanReader(kept(tmp_path, ROWS).folder)
    keeper = SpanKeeper(tmp_path / "traces", clock=lambda: NOW)
    keeper.take(write_spans(tmp_path, "new", ROWS))
    return SpanReader(keeper.folder)


def test_hours_have_their_files(tmp_path: Path) -> None:
    """Those that are sorted, by the start of the hour; the number of spans is in their names."""
    rows = [*ROWS, made_span(9, 1, at_ms=3_600_000)]
    hours = SpanReader(kept(tmp_path, rows, now=NOW + 3600).folder).hours()
    spans = {
        hour.timestamp(): [name.partition("-")[0] for name in names]
        for hour, names in hours.items()
    }
    assert spans == {HOUR: ["4"], HOUR + 3600: ["1"]}


@pytest.mark.parametrize(
    ("given", "traces"),
    [
        ({}, [3, 2, 1]),
        ({"limit": 2}, [3, 2]),
        ({"service": "shop"}, [2, 1]),
        ({"service": "db"}, [1]),
        ({"service": "nobody"}, []),
        ({"name": "GET /cart"}, [3, 1]),
        ({"service": "cart", "name": "GET /cart"}, [3]),
        ({"kind": "CLIENT"}, [1]),
        ({"error": True}, [2]),
        ({"error": False}, [3, 1]),
        ({"min_us": 100_000}, [2, 1]),
        ({"max_us": 5_000}, [3]),
        ({"min_us": 10_000, "max_us": 60_000}, [1]),
        ({"attributes": {"http.route": "/cart"}}, [1]),
        ({"attributes": {"user.id": "7 8"}}, [3]),
        ({"attributes": {"service.instance.id": "cart-1"}}, [3]),
        ({"attributes": {"http.route": "7 8"}}, []),
        ({"attributes": {"nothing": "7 8"}}, []),
        ({"attributes": {"service.instance.id": "cart-1", "user.id": "7 8"}}, [3]),
        ({"service": "shop", "attributes": {"user.id": "7 8"}}, []),
        ({"start_us": HOUR * 1_000_000 + 2_000_000}, [3, 2]),
        ({"end_us": HOUR * 1_000_000 + 1_999_999}, [1]),
    ],
)
def test_traces_are_found_by_their_spans(
    reader: SpanReader, given: dict[str, Any], traces: list[int]
) -> None:
    """All parts of a query apply to one span; the newest trace comes first."""
    assert _trace_ids(reader, **given) == traces


def test_examples_are_the_newest_calls_served(tmp_path: Path) -> None:
    """One of each service and range of durations, which ends with its upper bound."""
    rows = [
        *ROWS,
        made_span(4, 1, at_ms=4000, took_ms=900, name="later"),
        made_span(5, 1, at_ms=5000, took_ms=901, kind="CONSUMER"),
        made_span(6, 1, at_ms=9000, took_ms=900, name="too late"),
    ]
    reader = SpanReader(kept(tmp_path, rows).folder)
    start_us = HOUR * 1_000_000
    examples = reader.examples(start_us, start_us + 8_000_000, [100_000, 900_000])
    assert {place: int(example.trace_id, 16) for place, example in examples.items()} == {
        ("shop", 0): 1,
        ("shop", 1): 4,
        ("shop", 2): 5,
        ("cart", 0): 3,
    }
    newest = examples["shop", 1]
    assert (newest.start_us, newest.duration_us) == (start_us + 4_000_000, 900_000)


def test_a_span_belongs_to_the_call_that_its_service_served(reader: SpanReader) -> None:
    """The next served span above it in its service; none across services, or without a trace."""
    assert _calls(reader, (1, 1), (2, 1), (9, 1)) == {(1, 1): "GET /cart", (2, 1): "POST /order"}
    assert _calls(reader, (1, 2)) == {}, "the database's own span was served by another service"


def test_the_call_of_a_span_may_be_far_above_it(tmp_path: Path) -> None:
    """Past internal spans, up to one that is not kept; a circle of parents has no call."""
    rows = [
        made_span(1, 1, name="GET /cart"),
        made_span(1, 2, 1, kind="INTERNAL", name="load"),
        made_span(1, 3, 2, kind="CLIENT", name="SELECT"),
        made_span(1, 4, 5, kind="CLIENT", name="of a span that is not kept"),
        made_span(2, 1, 2, kind="INTERNAL"),
        made_span(2, 2, 1, kind="INTERNAL"),
    ]
    reader = SpanReader(kept(tmp_path, rows).folder)
    ids = [(1, 3), (1, 4), (2, 1)]
    assert _calls(reader, *ids) == {(1, 3): "GET /cart"}
    for file in reader.folder.glob("hour=*/*.parquet"):
        file.unlink()
    assert _calls(reader, *ids) == {(1, 3): "GET /cart"}, "what was found is not read again"


def _calls(reader: SpanReader, *spans: tuple[int, int]) -> dict[tuple[int, int], str]:
    ids = [(f"{trace:032x}", f"{span:016x}") for trace, span in spans]
    calls = reader.served_calls(ids, HOUR * 1_000_000, NOW * 1_000_000)
    return {(int(trace, 16), int(span, 16)): name for (trace, span), name in calls.items()}


def test_a_found_trace_is_summed_up(reader: SpanReader) -> None:
    """With all of its spans, not only those that match."""
    query = TraceQuery(start_us=HOUR * 1_000_000, end_us=NOW * 1_000_000, service="db")
    (trace,) = reader.search(query).traces
    assert (trace.service, trace.name, trace.spans, trace.errors) == ("shop", "GET /cart", 2, 0)
    assert (trace.duration_us, trace.matched_us) == (100_000, 50_000)
    assert trace.services == {"db": 1, "shop": 1}


def _over_two_hours(folder: Path) -> SpanReader:
    """Traces whose spans lie in the files of two hours, minutes apart."""
    minute = 60_000
    rows = [
        # A root of half an hour, with its children at both ends.
        made_span(1, 1, at_ms=40 * minute, took_ms=30 * minute, name="GET /report"),
        made_span(1, 2, 1, at_ms=41 * minute, service="cart", status="ERROR"),
        made_span(1, 3, 1, at_ms=69 * minute, service="db", kind="CLIENT", name="SELECT"),
        # One whose root is not kept.
        made_span(2, 1, 9, at_ms=69 * minute, service="db", kind="CLIENT", name="SELECT"),
    ]
    others = [made_span(100 + number, 1, at_ms=2 * number * minute) for number in range(60)]
    return SpanReader(kept(folder, [*rows, *others], now=NOW + 7200).folder)


@pytest.mark.parametrize("service", ["db", "cart", "shop"])
def test_a_summary_is_of_the_whole_trace(tmp_path: Path, service: str) -> None:
    """Also if it is longer than the time that is searched, and in the files of two hours."""
    reader = _over_two_hours(tmp_path)
    hours = {"db": 1, "cart": 0, "shop": 0}
    start_us = (HOUR + 3600 * hours[service]) * 1_000_000
    query = TraceQuery(
        start_us=start_us, end_us=start_us + 3_600_000_000, service=service, limit=100
    )
    summaries = {int(trace.trace_id, 16): trace for trace in reader.search(query).traces}
    trace = reader.trace("1")
    assert trace is not None
    summary = summaries[1]
    assert (summary.spans, summary.errors) == (len(trace.spans), 1)
    assert (summary.start_us, summary.duration_us) == (trace.start_us, trace.duration_us)
    assert (summary.service, summary.name) == ("shop", "GET /report")
    assert service != "db" or summaries[2].spans == 1


def test_the_call_of_a_span_may_have_begun_long_before_it(tmp_path: Path) -> None:
    """In a file of an earlier hour."""
    reader = _over_two_hours(tmp_path)
    start_us = (HOUR + 3600) * 1_000_000
    ids = [(f"{trace:032x}", f"{span:016x}") for trace, span in ((1, 3), (2, 1))]
    own = made_span(3, 1, at_ms=30 * 60_000, took_ms=40 * 60_000, name="GET /long")
    sql = made_span(3, 2, 1, at_ms=69 * 60_000, kind="CLIENT", name="SELECT")
    keeper = SpanKeeper(reader.folder, clock=lambda: NOW + 7200)
    keeper.take(write_spans(tmp_path, "long", [own, sql]))
    keeper.tend(everything=True)
    ids.append((f"{3:032x}", f"{2:016x}"))
    calls = reader.served_calls(ids, start_us, start_us + 600_000_000)
    assert calls == {ids[2]: "GET /long"}


def test_a_trace_is_read_by_its_id(reader: SpanReader) -> None:
    """Also without leading zeros, and in capitals."""
    for given in (f"{1:032x}", "1", f"{1:016X}"):
        trace = reader.trace(given)
        assert trace is not None
        assert [(span.service, span.name) for span in trace.spans] == [
            ("shop", "GET /cart"), ("db", "SELECT"),
        ]  # fmt: skip
    assert reader.trace("4") is None
    assert reader.trace("") is None


def test_services_have_the_names_of_their_spans(reader: SpanReader) -> None:
    """With their kinds."""
    assert reader.services() == {
        "shop": {("GET /cart", "SERVER"), ("POST /order", "SERVER")},
        "db": {("SELECT", "CLIENT")},
        "cart": {("GET /cart", "SERVER")},
    }


def test_a_trace_is_put_together_from_several_files(tmp_path: Path) -> None:
    """Its spans arrive in several batches, and over the turn of an hour."""
    keeper = kept(tmp_path, [made_span(1, 1, at_ms=3_599_990, took_ms=50)], now=NOW + 3600)
    keeper.take(write_spans(tmp_path, "b", [made_span(1, 2, 1, at_ms=3_600_001), made_span(1, 1)]))
    reader = SpanReader(keeper.folder)
    for _ in range(2):
        trace = reader.trace("1")
        assert trace is not None
        assert [span.span_id[-1] for span in trace.spans] == ["1", "2"]
        keeper.tend(everything=True)


def test_more_says_whether_the_limit_was_reached(reader: SpanReader) -> None:
    """So that a page can say so."""
    for limit, more in ((2, True), (3, False)):
        query = TraceQuery(start_us=HOUR * 1_000_000, end_us=NOW * 1_000_000, limit=limit)
        assert reader.search(query).more is more


def test_the_newest_of_many_are_found(tmp_path: Path) -> None:
    """Whatever files they are in."""
    keeper = SpanKeeper(tmp_path / "traces", clock=lambda: NOW)
    rows = [made_span(7919 * number % 3000, 1, at_ms=number) for number in range(3000)]
    for part in range(3):
        keeper.take(write_spans(tmp_path, str(part), rows[part::3]))
        keeper.tend(everything=True)
    newest = [7919 * number % 3000 for number in range(2999, 2969, -1)]
    assert _trace_ids(SpanReader(keeper.folder), limit=30) == newest


def test_a_large_trace_does_not_hide_the_others(tmp_path: Path) -> None:
    """Though most of the newest spans are its own."""
    rows = [made_span(1, number, at_ms=1000 + number) for number in range(1, 900)]
    folder = kept(tmp_path, [*rows, made_span(2, 1), made_span(3, 1, at_ms=1)]).folder
    assert _trace_ids(SpanReader(folder), limit=3) == [1, 3, 2]
