"""Upkeep beside the batches, without Spark: progress."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("pyspark")

from batchmill.spark import BatchReport
from batchmill.spark.batch.report import BatchStats, Stopwatch
from batchmill.spark.input.base import Unread
from batchmill.spark.input.choice import Pace
from batchmill.spark.runtime.checkpoint import Checkpoint
from batchmill.spark.runtime.progress import Progress, Upkeep, progress_of
from batchmill.store import ClockState, CommitResult, StreamInfo
from tests.kit.queues import make_queue


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

    def clock(self) -> ClockState:
        return ClockState()


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
    return Upkeep(writer, Checkpoint(folder), store, source, Pace(10.0), lambda: 20.0)


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
