"""Committed segments become files of kept spans: each span once, sorted, and within limits."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from batchmill.traces import SCHEMA, KeepSettings, SpanKeeper, SpanReader
from batchmill.traces.keeper import TOO_MUCH, TOO_OLD, UNREADABLE
from batchmill.traces.layout import CHANGE, STATS
from tests.kit.traces.segments import HOUR, NOW, kept, made_span, write_spans


def _files(folder: Path) -> list[Path]:
    return sorted(folder.glob("hour=*/[!.]*.parquet"))


def _ids(folder: Path) -> list[tuple[str, str]]:
    """The ids of all spans in sorted files, in their order."""
    return [
        (row["trace_id"][-2:], row["span_id"][-2:])
        for path in _files(folder)
        for row in pq.ParquetFile(path).read(["trace_id", "span_id"]).to_pylist()
    ]


def test_spans_are_sorted_by_trace_into_the_file_of_their_hour(tmp_path: Path) -> None:
    """A segment of two hours becomes a file in each; both have the documented columns."""
    rows = [made_span(3, 1), made_span(1, 2), made_span(2, 3), made_span(1, 1)]
    late = made_span(9, 1, at_ms=3_600_000)
    keeper = kept(tmp_path, [*rows, late], now=NOW + 3600)
    names = [path.parent.name for path in _files(keeper.folder)]
    assert names == ["hour=2024-02-29T12", "hour=2024-02-29T13"]
    assert _ids(keeper.folder) == [
        ("01", "01"), ("01", "02"), ("02", "03"), ("03", "01"), ("09", "01"),
    ]  # fmt: skip
    schema = pq.read_schema(_files(keeper.folder)[0])
    assert [(field.name, field.type) for field in schema] == [
        (field.name, field.type) for field in SCHEMA
    ]
    assert (keeper.stats.spans, keeper.stats.files, keeper.stats.dropped) == (5, 2, {})


def test_all_of_a_span_is_kept(tmp_path: Path) -> None:
    """Attributes with a column of their own and others are one map; message and events stay."""
    event = {"time": HOUR * 1_000_000, "name": "exception", "attributes": {"exception.type": "E"}}
    row = made_span(
        1, 1, status="ERROR", message="no money", events=[event],
        http__route="/orders", http__response__status_code="500", user__id="7",
    )  # fmt: skip
    keeper = kept(tmp_path, [row, made_span(2, 1)])
    first, second = pq.ParquetFile(_files(keeper.folder)[0]).read().to_pylist()
    assert dict(first["attributes"]) == {
        "http.route": "/orders", "http.response.status_code": "500", "user.id": "7",
    }  # fmt: skip
    assert dict(first["resource"]) == {"service.name": "shop", "service.instance.id": "shop-1"}
    assert (first["status_message"], json.loads(first["events"])) == ("no money", [event])
    assert (first["instance"], first["duration_us"]) == ("shop-1", 10_000)
    assert (second["attributes"], second["events"], second["parent_span_id"]) == ([], None, None)


def test_a_span_that_was_delivered_twice_is_kept_once(tmp_path: Path) -> None:
    """Be it in one segment or in two."""
    keeper = SpanKeeper(tmp_path / "traces", clock=lambda: NOW)
    for name in ("a", "b"):
        keeper.take(
            write_spans(tmp_path, name, [made_span(1, 1), made_span(1, 1), made_span(2, 1)])
        )
    keeper.tend(everything=True)
    assert _ids(keeper.folder) == [("01", "01"), ("02", "01")]
    assert keeper.stats.duplicates == 4


def test_small_files_of_an_hour_are_merged(tmp_path: Path) -> None:
    """Many small batches leave few files, and all their spans."""
    keeper = SpanKeeper(tmp_path / "traces", clock=lambda: NOW)
    for number in range(20):
        keeper.take(write_spans(tmp_path, str(number), [made_span(number, 1)]))
        keeper.tend(everything=True)
    assert len(_files(keeper.folder)) < 8
    assert len(_ids(keeper.folder)) == 20
    assert keeper.stats.spans == 20


def test_what_is_too_old_is_dropped_and_counted(tmp_path: Path) -> None:
    """The whole hour at once, when its last span is older than the limit; later arrivals, too."""
    keeper = kept(tmp_path, [made_span(1, 1), made_span(2, 1)])
    now = HOUR + 3600 + 24 * 3600 - 1
    later = SpanKeeper(keeper.folder, clock=lambda: now)
    later.tend()
    assert len(_ids(keeper.folder)) == 2
    last = SpanKeeper(keeper.folder, clock=lambda: now + 1)
    last.tend()
    assert _ids(keeper.folder) == []
    assert not list(keeper.folder.glob("hour=*"))
    last.take(write_spans(tmp_path, "late", [made_span(3, 1)]))
    last.tend(everything=True)
    assert _ids(keeper.folder) == []
    assert SpanReader(keeper.folder).stats().dropped == {TOO_OLD: 3}


def test_the_oldest_is_dropped_beyond_the_size(tmp_path: Path) -> None:
    """And counted; the newest stays."""
    keeper = SpanKeeper(tmp_path / "traces", clock=lambda: NOW + 7200)
    for hour in range(3):
        row = made_span(hour, 1, at_ms=hour * 3_600_000)
        keeper.take(write_spans(tmp_path, str(hour), [row]))
    keeper.tend(everything=True)
    size = max(path.stat().st_size for path in _files(keeper.folder))
    small = SpanKeeper(
        keeper.folder, KeepSettings(max_bytes=size + size // 2), clock=lambda: NOW + 7200
    )
    small.tend()
    assert _ids(keeper.folder) == [("02", "01")]
    assert small.stats.dropped == {TOO_MUCH: 2}


@pytest.mark.parametrize("done", ["nothing", "renamed", "all but the last step"])
def test_a_change_that_was_cut_short_is_finished(
    tmp_path: Path, done: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A crash after the change was written down loses no span, and keeps none twice."""
    keeper = SpanKeeper(tmp_path / "traces", clock=lambda: NOW)
    keeper.take(write_spans(tmp_path, "a", [made_span(1, 1), made_span(2, 1)]))

    def crash(change: dict[str, Any]) -> None:
        for hidden, final in change["new"]:
            if done != "nothing":
                (keeper.folder / hidden).rename(keeper.folder / final)
        if done == "all but the last step":
            for name in change["old"]:
                (keeper.folder / name).unlink()
        raise KeyboardInterrupt

    monkeypatch.setattr(keeper, "_finish", crash)
    with pytest.raises(KeyboardInterrupt):
        keeper.tend(everything=True)
    again = SpanKeeper(keeper.folder, clock=lambda: NOW)
    again.tend(everything=True)
    assert _ids(keeper.folder) == [("01", "01"), ("02", "01")]
    assert not (keeper.folder / CHANGE).exists()
    assert not list(keeper.folder.rglob("*.part"))
    assert (again.stats.spans, again.stats.duplicates) == (2, 0)


def test_files_that_no_change_names_are_removed(tmp_path: Path) -> None:
    """What a crash has left half written."""
    keeper = kept(tmp_path, [made_span(1, 1)])
    (file,) = _files(keeper.folder)
    (file.parent / ".5-half.parquet.part").write_bytes(b"half")
    SpanKeeper(keeper.folder, clock=lambda: NOW)
    assert [path.name for path in file.parent.iterdir()] == [file.name]


def test_a_segment_that_cannot_be_read_is_counted(tmp_path: Path) -> None:
    """The others are kept."""
    keeper = SpanKeeper(tmp_path / "traces", clock=lambda: NOW)
    bad = tmp_path / "bad.parquet"
    bad.write_bytes(b"no parquet")
    keeper.take(bad)
    keeper.take(write_spans(tmp_path, "good", [made_span(1, 1)]))
    keeper.tend(everything=True)
    assert _ids(keeper.folder) == [("01", "01")]
    assert keeper.stats.dropped == {UNREADABLE: 1}


def test_ids_of_any_form_are_kept(tmp_path: Path) -> None:
    """Spans of other writers may have ids that are no hex digits."""
    rows = [made_span(1, 1) | {"trace_id": "trace b"}, made_span(1, 1) | {"trace_id": "a"}]
    keeper = kept(tmp_path, [*rows, rows[0]])
    assert [row[0] for row in _ids(keeper.folder)] == ["a", " b"]
    trace = SpanReader(keeper.folder).trace("trace b")
    assert trace is not None
    assert len(trace.spans) == 1


def test_stats_are_read_from_the_folder(tmp_path: Path) -> None:
    """An empty or missing folder has empty ones."""
    assert SpanReader(tmp_path / "none").stats().spans == 0
    keeper = kept(tmp_path, [made_span(1, 1)])
    assert json.loads((keeper.folder / STATS).read_text())["spans"] == 1
    assert SpanReader(keeper.folder).stats() == keeper.stats
    assert keeper.stats.oldest_us == HOUR * 1_000_000
