"""Pending spans: their files are merged, durable and checked; no clock decides what is paired."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

pytest.importorskip("pyspark")

from batchmill.spark.input.reader import sync_folder
from batchmill.spark.spans.pending import check_files, to_merge
from pyspark.sql import SparkSession

from batchmill.spark import PipelineError
from batchmill.store import Carry, Store
from tests.kit.pipelines import (
    NOW,
    ONE_AT_A_TIME,
    START,
    counted,
    deal,
    differences,
    expected,
    pipeline,
    stored,
    write_segment,
)
from tests.kit.spark import span
from tests.oracle.generate import random_spans
from tests.oracle.spans import spans_to_events

RELATIONS = """
rel = from(ServiceRelation.*).cpm();
rel_time = from(ServiceRelation.latency).longAvg();
"""
MINUTE_US = 60_000_000


def grown(batches: int, *, expire: bool, every_ms: int = 1000) -> tuple[list[Carry], int]:
    """The files after so many batches of 10 rows, and how many rows were written for them."""
    alive: list[Carry] = []
    written = 0
    for number in range(batches):
        tick = number * every_ms
        merged = to_merge(alive, tick=tick, rows=10, wait_ms=80_000, expire=expire)
        rows = 10 + sum(file.rows for file in merged)
        alive = [file for file in alive if file not in merged]
        alive.append(Carry(f"file:/{number}", number, tick, rows))
        written += rows
    assert sum(file.rows for file in alive) == 10 * batches
    return alive, written


def test_files_of_one_time_are_merged() -> None:
    """An eighth of the wait is one time: nothing is kept for longer than that beyond its wait."""
    alive, _ = grown(20, expire=True)
    # 10,000 ms are one time; the ninth file of it takes the eight before it along.
    assert [file.rows for file in alive] == [90, 10, 90, 10]
    slow, _ = grown(20, expire=True, every_ms=10_000)
    assert len(slow) == 20


@pytest.mark.parametrize("every_ms", [1, 1000, 1_000_000])
def test_a_backfill_has_few_files_however_long_it_takes(every_ms: int) -> None:
    """Nothing expires in it, so the clock has no say; and rows are not written over and over."""
    alive, written = grown(2000, expire=False, every_ms=every_ms)
    assert len(alive) <= 8 + 8
    assert written <= 2000 * 10 * 11


def pending_file(folder: Path, rows: int = 3) -> Carry:
    """A folder of waiting spans."""
    target = folder / "carry" / "1-abc"
    target.mkdir(parents=True)
    pq.write_table(pa.table({"trace_id": ["t"] * rows}), target / "part-0.parquet")
    (target / "_SUCCESS").touch()
    (target / ".part-0.parquet.crc").write_bytes(b"crc")
    return Carry(f"file:{target}", 1, 0, rows)


def test_all_of_a_folder_is_made_durable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its files, Hadoop's checksums among them, and the entries of the folders above."""
    target = Path(pending_file(tmp_path).path.removeprefix("file:"))
    synced = []
    sync = os.fsync

    def note(handle: int) -> None:
        synced.append(Path(f"/proc/self/fd/{handle}").readlink())
        sync(handle)

    monkeypatch.setattr(os, "fsync", note)
    sync_folder(target)
    files = {target / name for name in ("part-0.parquet", "_SUCCESS", ".part-0.parquet.crc")}
    assert set(synced[:3]) == files
    assert synced[3:] == [target, target.parent, tmp_path]


def test_whole_files_pass(tmp_path: Path) -> None:
    """Also those that lie where this machine cannot look."""
    check_files([pending_file(tmp_path), Carry("s3://bucket/carry/1", 1, 0, 5)])


@pytest.mark.parametrize(
    ("spoil", "why"),
    [
        (lambda folder: folder.rename(folder.with_name("x")), "but it is gone"),
        (lambda folder: (folder / "part-0.parquet").unlink(), "but it holds 0"),
        (lambda folder: (folder / "part-0.parquet").write_bytes(b""), "but it cannot be read"),
        (lambda folder: os.truncate(folder / "part-0.parquet", 20), "but it cannot be read"),
    ],
)
def test_spans_that_are_lost_are_reported(tmp_path: Path, spoil: object, why: str) -> None:
    """The error says what happened and what to do; no batch continues without them."""
    assert callable(spoil)
    carry = pending_file(tmp_path)
    spoil(Path(carry.path.removeprefix("file:")))
    with pytest.raises(PipelineError, match=f"3 spans that wait .*{why}.*from a copy"):
        check_files([carry])


def test_how_long_a_backfill_takes_decides_nothing(spark: SparkSession, tmp_path: Path) -> None:
    """An hour between two batches: spans pair all the same, as the folder is whole."""
    spans = random_spans(5, 60, start=START, days=1)
    deal({"Span": spans}, tmp_path / "old", 3)
    now = [NOW]

    def clock() -> float:
        now[0] += 3600
        return now[0]

    with pipeline(spark, tmp_path, oal=RELATIONS, settings=ONE_AT_A_TIME, clock=clock) as running:
        reports = running.backfill(tmp_path / "old")
        assert len(reports) == 4
        wanted = expected(spans_to_events(spans).events, RELATIONS)
        assert differences(stored(running.store), wanted) == []
        assert list((tmp_path / "checkpoint").glob("backfill-*/carry/*")) == []


def test_lateness_is_that_of_spans_as_they_come(spark: SparkSession, tmp_path: Path) -> None:
    """A relation given up after its wait is not late; a span that comes late is, once."""
    now = [NOW]
    spool = tmp_path / "spool"
    call = span("1", "CLIENT", attributes={"peer.service": "far"})
    later = span("2", trace_id="t2", at=30 * MINUTE_US)
    behind = span("3", trace_id="t3", at=24 * MINUTE_US)
    given: dict[str, Any] = {"oal": RELATIONS + "svc = from(Service.*).cpm();"}
    with pipeline(spark, tmp_path, **given, clock=lambda: now[0]) as running:
        write_segment(spool, "Span", [call], "0")
        running.run_available()
        write_segment(spool, "Span", [later], "1", 1)
        running.run_available()
        assert counted(running.store, "late") == {}
        now[0] += 400
        write_segment(spool, "Span", [{**later, "trace_id": "t4"}, behind], "2", 2)
        (report,) = running.run_available()
        # The call of batch 0 went where it said, 30 minutes behind; that came in time.
        assert sum(key[0] == "rel" and "ZmFy" in key[3] for key in stored(running.store)) == 3
        assert report.stats.late == 1
        assert counted(running.store, "late") == {("Span", ""): 1}


def test_waiting_spans_are_on_the_disk_before_the_commit_that_names_them(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a power failure the store has the commit; so the files must be there, too."""
    happened: list[str] = []
    sync, commit = os.fsync, Store.commit

    def note_sync(handle: int) -> None:
        happened.append(str(Path(f"/proc/self/fd/{handle}").readlink()))
        sync(handle)

    def note_commit(store: Store, batch: Any) -> Any:
        happened.append("commit")
        return commit(store, batch)

    monkeypatch.setattr(os, "fsync", note_sync)
    monkeypatch.setattr(Store, "commit", note_commit)
    write_segment(tmp_path / "spool", "Span", [span("1", "CLIENT")])
    with pipeline(spark, tmp_path, oal=RELATIONS) as running:
        running.run_available()
    before = happened[: happened.index("commit")]
    (folder,) = (tmp_path / "checkpoint" / "carry").iterdir()
    assert {str(path) for path in (*folder.iterdir(), folder, folder.parent)} <= set(before)


def test_waiting_spans_that_are_gone_are_reported(spark: SparkSession, tmp_path: Path) -> None:
    """The batch is not made without them; with them back, the pipeline goes on."""
    spool = tmp_path / "spool"
    served = span("2", parent_span_id="1", service="stock")
    write_segment(spool, "Span", [span("1", "CLIENT")], "0")
    with pipeline(spark, tmp_path, oal=RELATIONS) as running:
        running.run_available()
        (folder,) = (tmp_path / "checkpoint" / "carry").iterdir()
        folder.rename(tmp_path / "lost")
        write_segment(spool, "Span", [served], "1", 1)
        with pytest.raises(PipelineError, match=f"1 span that .* {folder}, but it is gone"):
            running.run_available()
        assert counted(running.store, "rows") == {("Span", ""): 1}
        folder.parent.mkdir(exist_ok=True)
        (tmp_path / "lost").rename(folder)
        running.run_available()
        assert counted(running.store, "rows")["Span", ""] == 2
        assert len([key for key in stored(running.store) if key[0] == "rel"]) == 3
