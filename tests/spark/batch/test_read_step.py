"""The step that reads the segments of a batch, as the plain function it is; without Spark."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

pytest.importorskip("pyspark")

from batchmill import Client
from batchmill.aggregate import (
    ROW_COUNT,
    Aggregator,
    Deltas,
    Statement,
    from_arrow,
    statements_from_arrow,
    to_arrow,
)
from batchmill.oal import load
from batchmill.spark import PipelineError, PipelineSettings
from batchmill.spark.batch import read_step
from batchmill.spark.batch.plan import Limits, PickledPlan, TaskPlan
from batchmill.spark.batch.read_step import ReadStep
from batchmill.spark.batch.report import TaskReport
from batchmill.spark.batch.writer import aggregators_for
from batchmill.spark.shuffle import Blob, Kind, read_blobs
from tests.kit.events import SpanTable, encode, joined_spans, segments, spans
from tests.kit.files import ROOT, no_more_files
from tests.kit.pipelines import (
    NOW,
    SMALL,
    START,
    endpoint_events,
    with_column,
    write_deltas,
    write_segment,
    write_table,
)
from tests.oracle.generate import random_spans, to_table

TOO_LATE = datetime.fromtimestamp(NOW, UTC) + timedelta(hours=2)
SETTINGS = PipelineSettings()


def shipped(oal: str) -> PickledPlan:
    """What the tasks of a pipeline with this script get; traces and entities are in four parts."""
    metrics = load(oal)
    plan = TaskPlan(
        metrics.catalog, aggregators_for(metrics, SETTINGS), frozenset(), SETTINGS, parts=4
    )
    return PickledPlan(plan)


def aggregator(oal: str = SMALL, source: str = "Endpoint") -> Aggregator:
    """The one of a source."""
    return shipped(oal).plan.aggregators[source]


@dataclass(frozen=True)
class Answer:
    """What a task has returned."""

    blobs: list[Blob]

    @property
    def report(self) -> TaskReport:
        """The only one; it is the last."""
        assert [blob.kind is Kind.REPORT for blob in self.blobs].index(True) == len(self.blobs) - 1
        report = self.blobs[-1].report
        assert isinstance(report, TaskReport)
        return report

    def of(self, kind: Kind, source: str = "") -> list[Blob]:
        """The blobs of a kind."""
        return [blob for blob in self.blobs if (blob.kind, blob.source) == (kind, source)]

    def deltas(self, oal: str = SMALL) -> list[str]:
        """All deltas of Endpoint, merged."""
        own = aggregator(oal)
        tables = [blob.table for blob in self.of(Kind.DELTAS, "Endpoint")]
        return listed(own.merge([from_arrow(table, own.plan) for table in tables]), own)

    @property
    def reasons(self) -> dict[str, str]:
        """Why segments are bad, by name."""
        return {Path(bad.path).stem: bad.reason for bad in self.report.bad}


def listed(deltas: Deltas, own: Aggregator) -> list[str]:
    """Deltas in a form that can be compared, whatever their order."""
    return sorted(map(repr, to_arrow(deltas, own.plan).to_pylist()))


def made_of(rows: Sequence[dict[str, Any]]) -> list[str]:
    """The deltas that rows of Endpoint give."""
    own = aggregator()
    return listed(own.make(to_table("Endpoint", rows)).deltas, own)


def slice_numbers(*numbers: int) -> Iterable[pa.RecordBatch]:
    """What Spark gives to a task."""
    return [pa.record_batch({"id": pa.array(numbers, pa.int64())})]


def limits(staging: Path | None = None) -> Limits:
    """An hour ahead of the clock is not too far."""
    return Limits(int((NOW + 3600) * 1_000_000), None, str(staging or "nowhere"))


def read(paths: Iterable[Path], oal: str = SMALL, staging: Path | None = None) -> Answer:
    """What a task makes of segments; ``staging`` is for invalid rows."""
    step = ReadStep(shipped(oal), limits(staging), [[f"file:{path}" for path in paths]])
    return Answer(list(read_blobs(step(slice_numbers(0)))))


def test_events_become_deltas(tmp_path: Path) -> None:
    """Those of all segments, which are counted by minute; an entity is in one part only."""
    rows = endpoint_events(200)
    for number in range(4):
        write_segment(tmp_path, "Endpoint", rows[number::4], str(number))
    answer = read(segments(tmp_path))
    assert answer.deltas() == made_of(rows)
    assert (answer.report.segments, answer.report.bad) == (4, [])
    minutes = Counter(int(row["time"].strftime("%Y%m%d%H%M")) for row in rows)
    assert answer.report.events == {("Endpoint", minute): n for minute, n in minutes.items()}
    places: dict[tuple[Any, ...], set[int]] = {}
    for blob in answer.of(Kind.DELTAS, "Endpoint"):
        roles = from_arrow(blob.table, aggregator().plan).roles
        for entity in zip(*(role.to_pylist() for role in roles), strict=True):
            places.setdefault(entity, set()).add(blob.part)
    assert {len(parts) for parts in places.values()} == {1}
    assert set.union(*places.values()) == set(range(4))


@pytest.mark.parametrize("count", [1, 3])
def test_the_parts_of_a_task_are_one_blob(tmp_path: Path, count: int) -> None:
    """Each goes to the task that has the part: small blobs cost more than their rows."""
    path = write_segment(tmp_path, "Endpoint", endpoint_events(200))
    by_part = read([path])
    step = ReadStep(shipped(SMALL), replace(limits(), tasks=count), [[str(path)]])
    by_task = Answer(list(read_blobs(step(slice_numbers(0)))))
    assert by_task.deltas() == by_part.deltas()

    def rows(answer: Answer, task: int) -> Counter[str]:
        blobs = [blob for blob in answer.of(Kind.DELTAS, "Endpoint") if blob.part % count == task]
        return Counter(repr(row) for blob in blobs for row in blob.table.to_pylist())

    for task in range(count):
        assert rows(by_task, task) == rows(by_part, task)
    assert [blob.part for blob in by_task.of(Kind.DELTAS, "Endpoint")] == list(range(count))


def test_a_task_reads_its_own_slice(tmp_path: Path) -> None:
    """Or several: whatever Spark gives it."""
    rows = endpoint_events(30)
    paths = [
        write_segment(tmp_path, "Endpoint", rows[number::3], str(number)) for number in range(3)
    ]
    step = ReadStep(shipped(SMALL), limits(), [[str(path)] for path in paths])
    answers = [Answer(list(read_blobs(step(slice_numbers(number))))) for number in range(3)]
    assert [answer.deltas() for answer in answers] == [
        made_of(rows[number::3]) for number in range(3)
    ]
    both = list(read_blobs(step(slice_numbers(0, 2))))
    reports = [blob.report.segments for blob in both if blob.kind is Kind.REPORT]
    assert reports == [1, 1]


def test_a_task_that_runs_again_returns_the_same(tmp_path: Path) -> None:
    """To the last byte."""
    write_segment(tmp_path, "Endpoint", endpoint_events(50))
    write_segment(tmp_path, "Span", random_spans(3, 50, start=START, days=1))
    oal = SMALL + "c = from(Service.*).count();"
    assert read(segments(tmp_path), oal) == read(segments(tmp_path), oal)


def test_rows_are_aggregated_a_few_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So memory does not grow with the number of segments; the result is the same."""
    rows = endpoint_events(60)
    for number in range(6):
        write_segment(tmp_path, "Endpoint", rows[number::6], str(number))
    at_once = read(segments(tmp_path))
    monkeypatch.setattr(read_step, "_ROWS_AT_ONCE", 15)
    monkeypatch.setattr(read_step, "_DELTA_BYTES_AT_ONCE", 1)
    in_portions = read(segments(tmp_path))
    assert len(in_portions.blobs) > len(at_once.blobs)
    assert in_portions.deltas() == at_once.deltas() == made_of(rows)
    assert in_portions.report == at_once.report


def test_spans_are_divided_by_trace(tmp_path: Path) -> None:
    """All spans of a trace are in one part; nothing is counted before duplicates are dropped."""
    spans = random_spans(3, 60, start=START, days=1)
    for number in range(2):
        write_segment(tmp_path, "Span", spans[number::2], str(number))
    answer = read(segments(tmp_path), "c = from(Service.*).count();")
    parts: dict[str, set[int]] = {}
    ids = []
    for blob in answer.of(Kind.SPANS):
        for span in blob.table.to_pylist():
            parts.setdefault(span["trace_id"], set()).add(blob.part)
            ids.append(span["span_id"])
    assert sorted(ids) == sorted(span["span_id"] for span in spans)
    assert {len(own) for own in parts.values()} == {1}
    assert len(set.union(*parts.values())) > 1
    assert answer.report == TaskReport(segments=2, spans=60)


READING = """
import sys
from pathlib import Path
from tests.spark.batch.test_read_step import SPANS_OAL, read
for name in sys.argv[1:]:
    folder = Path(name)
    answer = read([folder / "Span" / "0.parquet"], SPANS_OAL, folder / "staging")
    status = Path("/proc/self/status").read_text()
    peak = next(line.split()[1] for line in status.splitlines() if line.startswith("VmHWM"))
    print(answer.report.spans, sum(answer.report.counters.values()), int(peak) // 1024)
    del answer
"""
SPANS_OAL = "c = from(Service.*).count(); e = from(Endpoint.latency).longAvg();"


def test_a_large_resource_is_not_copied_for_each_of_its_spans(tmp_path: Path) -> None:
    """Also not for invalid ones: a segment of 2,000 spans that has a gigabyte with the copies."""
    count = 2000
    usual = {"service.name": "shop", **{f"key {n}": f"{n}" for n in range(20)}}
    large = {f"key {n}": f"{n}".ljust(4096, "x") for n in range(127)}
    folders: list[Path] = []
    for resource, ids in itertools.product((usual, large), ({}, {"span_id": [None] * count})):
        batch = spans(range(count), resource=[resource] * count, **ids)
        folders.append(tmp_path / str(len(folders)))
        path = folders[-1] / "Span" / "0.parquet"
        path.parent.mkdir(parents=True)
        path.write_bytes(encode(joined_spans([SpanTable(batch)])))
    # In a process of its own, whose peak is that of these segments.
    done = subprocess.run(
        [sys.executable, "-c", READING, *map(str, folders)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    figures = [[int(number) for number in line.split()] for line in done.stdout.splitlines()]
    assert [tuple(counts) for *counts, _ in figures] == [(count, 0), (0, count)] * 2
    _, usual_mib, _, large_mib = (mib for *_, mib in figures)
    assert large_mib - usual_mib < 150


def test_bad_segments_are_reported(tmp_path: Path) -> None:
    """With the reason, and with their rows where the footer still tells; the others are read."""
    rows = endpoint_events(30)
    write_segment(tmp_path, "Endpoint", rows, "good")
    folder = tmp_path / "Endpoint"
    (folder / "garbage.parquet").write_bytes(os.urandom(500))
    page = write_table(tmp_path, "page", to_table("Endpoint", rows), compression="zstd")
    chunk = pq.read_metadata(page).row_group(0).column(1)
    start = chunk.dictionary_page_offset or chunk.data_page_offset
    content = bytearray(page.read_bytes())
    content[start : start + chunk.total_compressed_size] = b"\xa5" * chunk.total_compressed_size
    page.write_bytes(content)
    write_table(tmp_path, "text", with_column(rows[:7], "latency", ["12"] * 7, pa.string()))
    write_table(tmp_path, "number", with_column(rows[:5], "time", [1] * 5, pa.int64()))
    write_segment(tmp_path, "Endpoint", rows[:9], "misplaced")
    (tmp_path / "Endpiont").mkdir()
    (folder / "misplaced.parquet").rename(tmp_path / "Endpiont" / "misplaced.parquet")
    answer = read([*segments(tmp_path), folder / "gone.parquet"])
    assert answer.reasons == {
        "garbage": "corrupt",
        "page": "corrupt",
        "text": "wrong type",
        "number": "wrong type",
        "misplaced": "unknown source",
        "gone": "missing",
    }
    assert {(bad.source, bad.rows) for bad in answer.report.bad if bad.rows} == {
        ("Endpoint", 7),
        ("Endpoint", 5),
        ("Endpiont", 9),
    }
    assert answer.report.segments == 1
    assert answer.deltas() == made_of(rows)


def test_too_many_open_files_are_a_fault_and_nothing_is_bad(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The task fails with an error that says what to do, which the driver takes from Spark's."""
    path = write_segment(tmp_path, "Endpoint", endpoint_events(10))
    assert read([path]).report.segments == 1
    monkeypatch.setattr("batchmill.spark.input.segments.time.sleep", lambda seconds: None)
    with (
        no_more_files(),
        pytest.raises(PipelineError, match=r"0.parquet cannot be read now .*ulimit -n"),
    ):
        read([path])


def test_reports_add_up() -> None:
    """What the tasks of a batch have counted is counted together."""
    report = TaskReport(segments=1, events=Counter({("Endpoint", 1): 2}))
    report.add(TaskReport(segments=2, spans=4, events=Counter({("Endpoint", 1): 3})))
    assert report == TaskReport(segments=3, spans=4, events=Counter({("Endpoint", 1): 5}))


def test_a_fault_that_passes_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The segment is counted once, and so are its invalid rows."""
    rows = endpoint_events(10)
    path = write_table(tmp_path, "0", with_column(rows, "latency", [None, *range(9)], pa.int32()))
    staging = tmp_path / "staging"
    assert read([path], staging=staging).report.segments == 1
    with no_more_files() as close:
        monkeypatch.setattr("batchmill.spark.input.segments.time.sleep", lambda seconds: close())
        report = read([path], staging=staging).report
    assert report.segments == 1
    assert report.counters == {("quarantined", "Endpoint", "no latency"): 1}
    assert sum(report.events.values()) == 9


def test_invalid_rows_are_written_with_their_reason(tmp_path: Path) -> None:
    """Whole, counted by reason; under a name that nobody reads before the driver has seen it."""
    rows = endpoint_events(10)
    times = [None, TOO_LATE, *(row["time"] for row in rows[2:])]
    write_table(tmp_path, "0", with_column(rows, "time", times, pa.timestamp("us", tz="UTC")))
    answer = read(segments(tmp_path), staging=tmp_path / "staging")
    ((source, file),) = answer.report.invalid
    assert (source, Path(file).parent) == ("Endpoint", tmp_path / "staging" / "Endpoint")
    assert Path(file).name.startswith(".")
    table = pq.ParquetFile(file).read()
    assert [(row["_reason"], row["serviceName"]) for row in table.to_pylist()] == [
        ("no time", rows[0]["serviceName"]),
        ("time too far ahead", rows[1]["serviceName"]),
    ]
    assert answer.report.counters == {
        ("quarantined", "Endpoint", "no time"): 1,
        ("quarantined", "Endpoint", "time too far ahead"): 1,
    }
    assert answer.deltas() == made_of(rows[2:])


def test_invalid_spans_are_written_with_plain_texts(tmp_path: Path) -> None:
    """Though tasks have texts that repeat, also those in maps, once."""
    table = to_table("Span", random_spans(3, 40, start=START, days=1))
    (tmp_path / "Span").mkdir()
    table = table.set_column(
        table.column_names.index("span_id"), "span_id", pa.nulls(len(table), pa.string())
    )
    pq.write_table(table, tmp_path / "Span" / "0.parquet", row_group_size=30)
    answer = read(segments(tmp_path), staging=tmp_path / "staging")
    ((_, file),) = answer.report.invalid
    written = pq.ParquetFile(file).read()
    plain = pa.map_(pa.string(), pa.string())
    types = {"name": pa.string(), "resource": plain, "attributes": plain}
    assert {name: written.schema.field(name).type for name in types} == types
    assert written.select(types).to_pylist() == table.select(types).to_pylist()


def test_a_quarantine_that_cannot_be_written_is_a_fault(tmp_path: Path) -> None:
    """Of neither the segment nor the task, which would run again."""
    rows = endpoint_events(10)
    table = with_column(rows, "latency", [None, *range(9)], pa.int32())
    write_table(tmp_path, "0", table)
    staging = tmp_path / "quarantine" / ".main-0"
    staging.parent.write_text("in the way")
    why = f"rows of Endpoint must be written, but {staging.parent} cannot be"
    with pytest.raises(PipelineError, match=why):
        read(segments(tmp_path), staging=staging)


def test_an_event_type_that_no_metric_reads_is_counted(tmp_path: Path) -> None:
    """As unused; a segment of it is good, whatever its columns are."""
    write_segment(tmp_path, "Endpoint", endpoint_events(10))
    answer = read(segments(tmp_path), "c = from(Service.*).count();")
    assert answer.report == TaskReport(
        segments=1, counters=Counter({("unused", "Endpoint", "no metric reads it"): 10})
    )


def test_deltas_of_a_process_are_those_of_its_events(tmp_path: Path) -> None:
    """Beside segments of rows; minutes that are too far ahead are set aside."""
    rows = endpoint_events(40)
    ahead = [{**row, "time": TOO_LATE} for row in rows[:3]]
    write_deltas(tmp_path, "Endpoint", [*rows[:20], *ahead], SMALL, "deltas")
    write_segment(tmp_path, "Endpoint", rows[20:], "rows")
    answer = read(segments(tmp_path))
    assert answer.deltas() == made_of(rows)
    assert sum(answer.report.events.values()) == 40
    assert answer.report.counters == {("quarantined", "Endpoint", "time too far ahead"): 3}
    (blob,) = answer.of(Kind.AHEAD, "Endpoint")
    assert sum(blob.table[ROW_COUNT].to_pylist()) == 3


def test_deltas_that_cannot_be_used_are_reported(tmp_path: Path) -> None:
    """Of other metrics, of a type that no metric reads or nobody knows: as many as their events."""
    rows = [{**row, "time": START} for row in endpoint_events(1) * 20]
    other = "more = from(Endpoint.*).count();"
    write_deltas(tmp_path, "Endpoint", rows, other, "other")
    write_deltas(tmp_path, "Endpoint", rows, SMALL, "unknown")
    (tmp_path / "Nobody").mkdir()
    (tmp_path / "Endpoint" / "unknown.parquet").rename(tmp_path / "Nobody" / "unknown.parquet")
    answer = read(segments(tmp_path))
    assert answer.reasons == {"other": "other metrics", "unknown": "unknown source"}
    assert [bad.rows for bad in answer.report.bad] == [20, 20]
    unread = read([tmp_path / "Endpoint" / "other.parquet"], "c = from(Service.*).count();")
    (bad,) = unread.report.bad
    assert (bad.reason, bad.rows) == ("other metrics", 20)
    assert "more: from(Endpoint.*).count(), here not defined" in bad.detail


def test_slow_statements_of_processes_are_merged(tmp_path: Path) -> None:
    """Those of a task's segments; what is too far ahead is bad."""
    with Client(tmp_path, aggregate=SMALL) as client:
        for latency in (900, 1200):
            client.emit(Statement(START, "shop", "orders", latency, "SELECT 1"))
    good = segments(tmp_path)
    with Client(tmp_path, aggregate=SMALL) as client:
        client.emit(Statement(TOO_LATE, "shop", "orders", 900, "SELECT 1"))
    answer = read(segments(tmp_path))
    tables = [blob.table for blob in answer.of(Kind.SLOWEST)]
    assert tables == [blob.table for blob in read(good).of(Kind.SLOWEST)]
    for table in tables:
        assert statements_from_arrow(table, SETTINGS.top_n, SETTINGS.thresholds()).runs
    assert answer.report.counters == {("rows", "Statement", ""): 2}
    assert [(bad.reason, bad.rows) for bad in answer.report.bad] == [("time too far ahead", 1)]


@pytest.mark.parametrize("content", [b"{", b"7", b"{}"])
def test_a_description_that_is_not_ours_is_no_reason_to_fail(
    tmp_path: Path, content: bytes
) -> None:
    """Of a file that says it has deltas: neither statements nor of an event type."""
    path = tmp_path / "Statement" / "0.parquet"
    path.parent.mkdir()
    pq.write_table(
        pa.table({"a": [1]}).replace_schema_metadata({b"batchmill.deltas": content}), path
    )
    assert read([path]).reasons == {"0": "unknown source"}
