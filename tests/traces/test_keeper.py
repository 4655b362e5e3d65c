"""Committed segments become files of kept spans: each span once, sorted, and within limits."""

from __future__ import annotations

import errno
import json
import os
import random
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from batchmill.traces import SCHEMA, KeepSettings, SpanKeeper, SpanReader, rewrite
from batchmill.traces.keeper import AHEAD, TOO_MUCH, TOO_OLD, UNREADABLE
from batchmill.traces.layout import CHANGE, INCOMING, STATS
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


@pytest.mark.parametrize("shift", [0, 40, 64, 100], ids=lambda shift: f"{128 - shift} bits")
def test_ids_of_all_kinds_are_sorted(tmp_path: Path, shift: int) -> None:
    """Random ones, those with the same first half, and spans that differ in a few bits."""
    rng = random.Random(shift)
    traces = [rng.getrandbits(128) >> shift for _ in range(300)]
    ids = [(trace, rng.getrandbits(64) >> rng.choice((0, 0, 56))) for trace in traces * 5]
    rows = [made_span(trace, span) for trace, span in ids * 2]
    rng.shuffle(rows)
    keeper = kept(tmp_path, rows)
    (file,) = _files(keeper.folder)
    table = pq.ParquetFile(file).read(["trace_id", "span_id"]).to_pylist()
    spans = [(row["trace_id"], row["span_id"]) for row in table]
    assert spans == sorted({(f"{trace:032x}", f"{span:016x}") for trace, span in ids})
    assert keeper.stats.duplicates == 3000 - len(spans)


def test_segments_of_several_writers_are_sorted_together(tmp_path: Path) -> None:
    """Of which one has other columns, and one other types."""
    keeper = SpanKeeper(tmp_path / "traces", clock=lambda: NOW)
    keeper.take(write_spans(tmp_path, "a", [made_span(1, 1, http__route="/a", user="1")]))
    keeper.take(write_spans(tmp_path, "b", [made_span(2, 1, 7, db__system__name="redis")]))
    other = write_spans(tmp_path, "c", [made_span(3, 1, http__route="/c", user="3")])
    table = pq.read_table(other)
    place = table.schema.get_field_index("http_route")
    table = table.set_column(place, "http_route", table["http_route"].cast(pa.binary()))
    pq.write_table(table, other)
    keeper.take(other)
    keeper.tend(everything=True)
    (file,) = _files(keeper.folder)
    rows = pq.ParquetFile(file).read().to_pylist()
    assert [dict(row["attributes"]) for row in rows] == [
        {"http.route": "/a", "user": "1"},
        {"db.system.name": "redis"},
        {"http.route": "/c", "user": "3"},
    ]
    assert [row["parent_span_id"] for row in rows] == [None, f"{7:016x}", None]
    assert keeper.stats.dropped == {}


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


def test_files_of_several_groups_are_merged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As all are that have more than a few seconds' spans; segments may have several, too."""
    monkeypatch.setattr(rewrite, "ROW_GROUP", 2)
    keeper = SpanKeeper(tmp_path / "traces", clock=lambda: NOW)
    for number in range(16):
        rows = [made_span(5 * number + n, 1, key=f"{number}-{n}") for n in range(5)]
        segment = write_spans(tmp_path, str(number), rows)
        pq.write_table(pq.read_table(segment), segment, row_group_size=3)
        keeper.take(segment)
        keeper.tend(everything=True)
    assert len(_files(keeper.folder)) < 8
    assert max(pq.read_metadata(path).num_row_groups for path in _files(keeper.folder)) > 10
    spans = [
        (int(row["trace_id"], 16), dict(row["attributes"])["key"])
        for path in _files(keeper.folder)
        for row in pq.ParquetFile(path).read().to_pylist()
    ]
    assert sorted(spans) == [(n, f"{n // 5}-{n % 5}") for n in range(80)]
    assert (keeper.stats.spans, keeper.stats.dropped, caplog.messages) == (80, {}, [])


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


@pytest.mark.parametrize("days", [40, -40], ids=["ahead", "behind"])
def test_a_wrong_clock_drops_no_span(
    tmp_path: Path, days: int, caplog: pytest.LogCaptureFixture
) -> None:
    """Neither one that is kept nor one that comes in; hours that are held back are reported."""
    keeper = kept(tmp_path, [made_span(1, 1)])
    wrong = SpanKeeper(keeper.folder, None, lambda: NOW + days * 86_400, lambda: NOW)
    wrong.take(write_spans(tmp_path, "late", [made_span(2, 1)]))
    for _ in range(2):
        wrong.tend(everything=True)
    assert sorted(_ids(keeper.folder)) == [("01", "01"), ("02", "01")]
    assert wrong.stats.dropped == {}
    assert wrong.stats.held_back == (days > 0)
    assert len([line for line in caplog.messages if "does not trust" in line]) == (days > 0)


def test_a_time_that_nobody_knows_drops_no_span(tmp_path: Path) -> None:
    """A pipeline that was just started has not heard of its store yet."""
    keeper = kept(tmp_path, [made_span(1, 1)])
    SpanKeeper(keeper.folder, None, lambda: NOW + 40 * 86_400, lambda: None).tend()
    assert _ids(keeper.folder) == [("01", "01")]


def test_a_time_far_ahead_makes_no_folders(tmp_path: Path) -> None:
    """A sender's clock that is wrong: a span of the next day is kept, later ones are counted."""
    rows = [made_span(day, 1, at_ms=day * 86_400_000) for day in range(50)]
    keeper = kept(tmp_path, rows)
    assert len(list(keeper.folder.glob("hour=*"))) == 2
    assert keeper.stats.dropped == {AHEAD: 48}
    unknown = SpanKeeper(keeper.folder, None, lambda: NOW - 40 * 86_400, lambda: NOW)
    unknown.take(write_spans(tmp_path, "more", [made_span(60, 1), made_span(61, 1, at_ms=9e8)]))
    unknown.tend(everything=True)
    assert (unknown.stats.spans, unknown.stats.dropped) == (3, {AHEAD: 49})


def test_hours_are_dropped_a_day_at_a_time(tmp_path: Path) -> None:
    """After a pause; the oldest first."""
    rows = [made_span(hour, 1, at_ms=hour * 3_600_000) for hour in range(30)]
    keeper = kept(tmp_path, rows, now=NOW + 20 * 3600)
    later = SpanKeeper(keeper.folder, clock=lambda: NOW + 60 * 3600)
    later.tend()
    assert [int(trace, 16) for trace, _ in _ids(keeper.folder)] == list(range(24, 30))
    later.tend()
    assert later.stats.dropped == {TOO_OLD: 30}


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
    (keeper.folder / INCOMING / ".a.parquet.part").write_bytes(b"half")
    (keeper.folder / "hour=2024-02-29T20").mkdir()
    left = keeper.folder / f".{STATS}.1f.tmp"
    left.touch()
    os.utime(left, (1000, 1000))
    SpanKeeper(keeper.folder, clock=lambda: NOW)
    names = {str(path.relative_to(keeper.folder)) for path in keeper.folder.rglob("*")}
    assert names == {INCOMING, STATS, file.parent.name, f"{file.parent.name}/{file.name}"}


def test_a_segment_may_come_from_another_file_system(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where it cannot be renamed, it is copied, and then removed."""
    keeper = SpanKeeper(tmp_path / "traces", clock=lambda: NOW)
    segment = write_spans(tmp_path, "a", [made_span(1, 1)])

    def refuse(source: Path, target: Path) -> Path:
        raise OSError(errno.EXDEV, os.strerror(errno.EXDEV), str(source))

    with monkeypatch.context() as other:
        other.setattr(Path, "rename", refuse)
        keeper.take(segment)
    assert not segment.exists()
    keeper.tend(everything=True)
    assert _ids(keeper.folder) == [("01", "01")]


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
