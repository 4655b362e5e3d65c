"""Upkeep beside the batches, without Spark: removal, progress, files of the dedup index."""

from __future__ import annotations

import json
import logging
import os
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest

pytest.importorskip("pyspark")

from batchmill.spark.l2.report import BatchStats, Stopwatch
from batchmill.spark.spans.dedup import expired, is_index_file, to_merge

from batchmill.spark import BatchReport
from batchmill.spark.input.base import Unread
from batchmill.spark.input.spool import SegmentRemover, SpoolLag
from batchmill.spark.runtime.checkpoint import Checkpoint
from batchmill.spark.runtime.progress import Progress, Upkeep, progress_of
from batchmill.store import Carry, CommitResult, StreamInfo
from tests.kit.queues import make_queue


class SparkLog:
    """A checkpoint as Spark writes it, with a spool and a quarantine."""

    def __init__(self, folder: Path) -> None:
        self.spool = folder / "spool"
        self.quarantine = folder / "spool-quarantine"
        self.checkpoint = Checkpoint(folder / "checkpoint")
        self.log = self.checkpoint.spark / "sources" / "0"
        for name in ("offsets", "commits"):
            (self.checkpoint.spark / name).mkdir(parents=True)
        self.log.mkdir(parents=True)

    def segment(self, name: str, size: int = 10, mtime: float = 1000.0) -> Path:
        """A file of the spool."""
        path = self.spool / "Span" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"x" * size)
        os.utime(path, (mtime, mtime))
        return path

    def plan(self, number: int, *paths: Path) -> None:
        """Spark has written down what a batch is made of."""
        lines = [
            json.dumps({"path": f"file://{quote(str(path))}", "timestamp": 1, "batchId": number})
            for path in paths
        ]
        (self.log / str(number)).write_text("\n".join(["v1", *lines]))
        offset = json.dumps({"logOffset": number})
        (self.checkpoint.spark / "offsets" / str(number)).write_text(f"v1\n{{}}\n{offset}")

    def commit(self, number: int) -> None:
        """Spark has marked a batch as done."""
        (self.checkpoint.spark / "commits" / str(number)).write_text("v1\n{}")

    def remover(self) -> SegmentRemover:
        """As after a start."""
        return SegmentRemover(self.spool, self.checkpoint, self.quarantine)

    def left(self) -> set[str]:
        """What the spool holds."""
        return {path.name for path in self.spool.rglob("*") if path.is_file()}


@pytest.fixture
def log(tmp_path: Path) -> SparkLog:
    """Three batches of one segment each, and one segment that Spark has not seen."""
    made = SparkLog(tmp_path / "a b%20c")
    for number in range(3):
        made.plan(number, made.segment(f"{number} é%.parquet"))
    made.segment("new.parquet")
    return made


@pytest.mark.parametrize(
    ("committed", "last", "removed"),
    [(None, None, 0), (None, 0, 0), (0, None, 0), (0, 1, 1), (1, 0, 1), (1, 1, 2), (2, 2, 3)],
)
def test_only_what_both_have_is_removed(
    log: SparkLog, committed: int | None, last: int | None, removed: int
) -> None:
    """In the store and in Spark's log; segments that Spark has not listed stay in any case."""
    for number in range(0 if committed is None else committed + 1):
        log.commit(number)
    assert log.remover().remove(last) == removed
    left = {f"{number} é%.parquet" for number in range(removed, 3)}
    assert log.left() == left | {"new.parquet"}


def test_what_a_crash_leaves_over_is_removed_after_the_restart(log: SparkLog) -> None:
    """Some were removed, nothing was noted; afterwards nothing is looked at twice."""
    for number in range(2):
        log.commit(number)
    (log.spool / "Span" / "0 é%.parquet").unlink()
    assert log.remover().remove(1) == 1
    again = log.remover()
    back = log.segment("1 é%.parquet")
    assert again.remove(1) == 0
    log.commit(2)
    assert again.remove(2) == 1
    assert log.left() == {back.name, "new.parquet"}


def test_an_old_log_is_compacted(log: SparkLog) -> None:
    """Spark drops single files of its log; what was not removed by then is found all the same."""
    log.commit(2)
    lines = [(log.log / str(number)).read_text().splitlines()[1] for number in range(3)]
    for number in range(3):
        (log.log / str(number)).unlink()
    (log.log / "2.compact").write_text("\n".join(["v1", *lines]))
    assert log.remover().remove(2) == 3


def test_a_log_that_cannot_be_read_removes_nothing(log: SparkLog) -> None:
    """It is read again later."""
    log.commit(2)
    whole = (log.log / "1").read_text()
    (log.log / "1").write_text("v1\n{half")
    remover = log.remover()
    assert remover.remove(2) == 0
    (log.log / "1").write_text(whole)
    assert remover.remove(2) == 3


def test_nothing_outside_the_spool_is_removed(log: SparkLog, tmp_path: Path) -> None:
    """The log may be that of another spool."""
    outside = tmp_path / "outside.parquet"
    outside.touch()
    sneaky = log.spool / "Span" / ".." / ".." / ".." / "outside.parquet"
    log.plan(3, outside, sneaky)
    log.commit(3)
    assert log.remover().remove(3) == 3
    assert outside.exists()


def test_a_segment_stays_if_the_quarantine_has_no_copy(
    log: SparkLog, caplog: pytest.LogCaptureFixture
) -> None:
    """Its content would be lost; with a copy it goes."""
    aside = log.quarantine / "Span"
    aside.mkdir(parents=True)
    for number in range(2):
        (aside / f"{number} é%.parquet.reason").write_text("corrupt: x")
    (aside / "1 é%.parquet").write_bytes(b"copy")
    log.commit(2)
    with caplog.at_level(logging.WARNING, "batchmill.spark"):
        assert log.remover().remove(2) == 2
    assert log.left() == {"0 é%.parquet", "new.parquet"}
    assert "the quarantine has no copy of it" in caplog.text


def test_what_cannot_be_removed_is_tried_again(
    log: SparkLog, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """One warning only."""
    unlink = Path.unlink

    def refuse(path: Path, missing_ok: bool = False) -> None:
        if path.name.startswith("1"):
            raise PermissionError(13, "Permission denied")
        unlink(path, missing_ok)

    log.commit(2)
    remover = log.remover()
    monkeypatch.setattr(Path, "unlink", refuse)
    with caplog.at_level(logging.WARNING, "batchmill.spark"):
        assert remover.remove(2) == 2
        assert remover.remove(2) == 0
    assert len(caplog.records) == 1
    monkeypatch.undo()
    assert remover.remove(2) == 1
    assert remover.remove(2) == 0


def test_the_lag_is_the_age_of_the_oldest_segment_that_is_not_in(log: SparkLog) -> None:
    """By the store's last batch; hidden files and others are no segments."""
    log.segment(".tmp.parquet")
    log.segment("_tmp.parquet")
    log.segment("notes.txt")
    log.segment("newer.parquet", size=5, mtime=1060.0)
    lag = SpoolLag(log.spool, log.checkpoint)
    assert lag.unread(None, 1100.0) == Unread(5, 45, 100.0)
    assert lag.unread(1, 1100.0) == Unread(3, 25, 100.0)
    assert lag.unread(2, 1100.0) == Unread(2, 15, 100.0)
    (log.spool / "Span" / "new.parquet").unlink()
    assert lag.unread(2, 1100.0) == Unread(1, 5, 40.0)
    (log.spool / "Span" / "newer.parquet").unlink()
    assert lag.unread(2, 1100.0) == Unread()
    # A clock that is behind makes no negative age; and a new look knows what was read.
    log.segment("last.parquet", mtime=2000.0)
    assert SpoolLag(log.spool, log.checkpoint).unread(2, 1100.0) == Unread(1, 10, 0.0)
    assert SpoolLag(log.spool / "none", log.checkpoint).unread(None, 1.0) == Unread()


def test_progress_is_put_together(tmp_path: Path) -> None:
    """From the stream's own record and the counters."""
    counters = {
        ("rows", "Span", ""): 10,
        ("rows", "Service", ""): 4,
        ("rows", "Endpoint", ""): 5,
        ("late", "Span", ""): 2,
        ("duplicates", "Span", "same trace and span id"): 3,
        ("quarantined", "Span", "no time"): 1,
        ("quarantined", "Endpoint", "no time"): 1,
    }
    streams = [StreamInfo("x", "c", 1, 9, 1), StreamInfo("main", "c", 1, 7, 1_500)]
    progress = progress_of("main", streams, counters, Unread(2, 30, 4.0), 20.0)
    assert progress == Progress(
        stream="main",
        last_batch=7,
        committed_at=1.5,
        rows=9,
        spans=10,
        duplicates=3,
        late=2,
        left_out={"duplicates": {"same trace and span id": 3}, "quarantined": {"no time": 2}},
        unread_segments=2,
        unread_bytes=30,
        lag_s=4.0,
        written_at=20.0,
    )
    progress.write(tmp_path)
    assert json.loads((tmp_path / "progress.json").read_text())["last_batch"] == 7
    assert [path.name for path in tmp_path.iterdir()] == ["progress.json"]
    nothing = progress_of("main", [], {}, Unread(), 20.0)
    assert (nothing.last_batch, nothing.committed_at, nothing.rows) == (None, None, 0)


def test_laps_add_up_to_the_whole() -> None:
    """What is done again is added to its phase; nothing in between is left out."""
    now = iter([10.0, 11.0, 13.0, 16.0])
    watch = Stopwatch(lambda: next(now))
    for phase in ("read", "l1", "read"):
        watch.lap(phase)
    assert watch.phases == {"read": 4.0, "l1": 2.0}


class NoStore:
    """A store that has nothing."""

    def streams(self) -> list[StreamInfo]:
        return []

    def counters(self) -> dict[tuple[str, str, str], int]:
        return {}


class NoSource:
    """A source in which nothing waits."""

    name = "nowhere"

    def unread(self, last: int | None, now: float) -> Unread:
        return Unread()


class NoWriter:
    """The writer of a stream."""

    stream = "main"
    last = None


def report(number: int, *, applied: bool = True) -> BatchReport:
    """A batch of 5 rows that took 3 seconds."""
    stats, result = BatchStats(rows=5), CommitResult(applied=applied)
    times = {"read": 1.0, "commit": 2.0}
    return BatchReport("main", number, applied, stats, result, 1.0, 2.0, given=4, phases=times)


def upkeep(folder: Path) -> Upkeep:
    """Of a stream that runs."""
    writer: Any = NoWriter()
    store: Any = NoStore()
    source: Any = NoSource()
    return Upkeep(writer, Checkpoint(folder), store, source, lambda: 20.0)


def test_the_newest_batches_are_listed(tmp_path: Path) -> None:
    """Sixty, the newest last; one that was in the store already took no time."""
    keeper = upkeep(tmp_path)
    for number in range(70):
        keeper.note(report(number))
    keeper.note(report(70, applied=False))
    content = json.loads((tmp_path / "progress.json").read_text())
    assert [batch["batch"] for batch in content["batches"]] == list(range(10, 70))
    assert content["batches"][0] == {
        "batch": 10,
        "at": 20.0,
        "rows": 5,
        "segments": 4,
        "seconds": 3.0,
        "phases": {"read": 1.0, "commit": 2.0},
    }
    assert (tmp_path / "progress.json").stat().st_size < 30_000


def test_the_queues_of_the_pipeline_are_listed(tmp_path: Path) -> None:
    """Those of a store's writers, say."""
    keeper = upkeep(tmp_path)
    with make_queue("jdbc", consumer=lambda batch: None):
        keeper.write_progress(committed=True)
    (queue,) = json.loads((tmp_path / "progress.json").read_text())["queues"]
    assert queue["name"] == "jdbc"


def grown(batches: int, *, expire: bool, every_ms: int, rows: int = 10) -> tuple[int, int]:
    """The most files of ids that there were at a time, and how often an id was written."""
    window_ms = 600_000
    alive: list[Carry] = []
    most = written = 0
    for number in range(batches):
        tick = number * every_ms
        if expire:
            gone = expired(alive, tick, window_ms)
            assert all(file.arrived_ms <= tick - window_ms for file in gone)
            alive = [file for file in alive if file not in gone]
        merged = to_merge(alive, tick=tick, rows=rows, window_ms=window_ms, expire=expire)
        total = rows + sum(file.rows for file in merged)
        alive = [file for file in alive if file not in merged]
        alive.append(Carry(f"file:/seen/{number}", number, tick, total))
        written += total
        most = max(most, len(alive))
    if not expire:
        assert sum(file.rows for file in alive) == rows * batches
    return most, written // (rows * batches)


@pytest.mark.parametrize("every_ms", [200, 1000, 5000])
def test_files_of_ids_stay_few(every_ms: int) -> None:
    """However often batches come; and an id is written a few times only."""
    most, times = grown(2000, expire=True, every_ms=every_ms)
    assert most <= 30
    assert times <= 10


def test_files_of_ids_of_a_backfill_stay_few() -> None:
    """Nothing expires in it."""
    most, times = grown(2000, expire=False, every_ms=60_000)
    assert most <= 12
    assert times <= 12


def test_no_id_is_kept_much_longer_than_its_window() -> None:
    """Files are merged within a quarter of the window only."""
    old = Carry("file:/seen/0", 0, 149_999, 10)
    new = Carry("file:/seen/1", 1, 150_000, 10)
    assert to_merge([old, new], tick=150_001, rows=10, window_ms=600_000, expire=True) == [new]


def test_ids_and_waiting_spans_are_distinguished() -> None:
    """By their folder, whatever the checkpoint is called."""
    assert is_index_file(Carry("file:/x/seen/3-abc", 3, 0, 1))
    assert not is_index_file(Carry("file:/x/seen/carry/3-abc", 3, 0, 1))
    assert not is_index_file(Carry("odd", 3, 0, 1))
