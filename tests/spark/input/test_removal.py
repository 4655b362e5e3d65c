"""Segments that were read are removed, never too early; progress.json says how far it is."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("pyspark")

from pyspark.sql import SparkSession

from batchmill.spark import BatchReport, PipelineSettings
from tests.kit.pipelines import (
    MTIME,
    NOW,
    ONE_AT_A_TIME,
    SMALL,
    counted,
    differences,
    endpoint_events,
    expected_of,
    pipeline,
    sqlite,
    stored,
    write_segment,
)
from tests.kit.processes import wait_for_json
from tests.kit.threads import until
from tests.spark.kit import forget_commit

ROWS = endpoint_events(60)
REMOVING: dict[str, Any] = {"oal": SMALL, "settings": ONE_AT_A_TIME, "remove_read": True}


def segments(folder: Path, *numbers: int) -> None:
    """Segments of the spool, a batch each."""
    for number in numbers:
        write_segment(folder / "spool", "Endpoint", ROWS[number::3], str(number), number)


def left(folder: Path) -> list[str]:
    """What the spool holds."""
    return sorted(path.stem for path in (folder / "spool").rglob("*.parquet"))


def progress(folder: Path) -> dict[str, Any]:
    """What progress.json says."""
    content: dict[str, Any] = wait_for_json(folder / "checkpoint" / "progress.json")
    return content


def test_a_segment_goes_when_the_batch_after_it_begins(spark: SparkSession, tmp_path: Path) -> None:
    """Not before Spark has logged its batch; the last goes at the end. Progress is written.

    A restart reads nothing again, and new segments count.
    """
    seen: list[tuple[list[str], int, int, float]] = []

    def look(report: BatchReport) -> None:
        content = progress(tmp_path)
        batch, unread, lag = (
            content[field] for field in ("last_batch", "unread_segments", "lag_s")
        )
        seen.append((left(tmp_path), batch, unread, lag))

    segments(tmp_path, 0, 1)
    with pipeline(spark, tmp_path, **REMOVING, on_batch=look) as running:
        running.run_available()
        assert seen == [(["0", "1"], 0, 1, NOW - MTIME - 1), (["1"], 1, 0, 0.0)]
        assert left(tmp_path) == []
        assert running.run_available() == []
        segments(tmp_path, 2)
        (report,) = running.run_available()
        assert report.number == 2
        assert differences(stored(running.store), expected_of(ROWS)) == []
        content = progress(tmp_path)
        assert (content["rows"], content["spans"], content["unread_segments"]) == (60, 0, 0)
        assert content["committed_at"] == running.progress().committed_at
        (times,) = content["batches"]  # of this stream's life
        assert (times["batch"], times["rows"], times["segments"]) == (2, 20, 1)
        assert list(times["phases"]) == ["read", "spark", "deltas", "commit", "upkeep"]
        assert all(time >= 0 for time in times["phases"].values())
        whole = sum(times["phases"].values())
        assert whole > 0
        assert times["seconds"] == pytest.approx(whole)
        assert report.spark_s + report.store_s <= sum(report.phases.values())
    assert left(tmp_path) == []


def test_a_batch_that_spark_has_not_logged_keeps_its_segments(
    spark: SparkSession, tmp_path: Path
) -> None:
    """It failed after its commit: they go after the restart, when it has come again."""

    def fail(report: BatchReport) -> None:
        raise KeyError("pulled the plug")

    segments(tmp_path, 0, 1)
    with pipeline(spark, tmp_path, **REMOVING, on_batch=fail) as running:
        with pytest.raises(KeyError, match="pulled the plug"):
            running.run_available()
        assert left(tmp_path) == ["0", "1"]
    with pipeline(spark, tmp_path, **REMOVING) as running:
        assert [report.applied for report in running.run_available()] == [False, True]
    assert left(tmp_path) == []
    assert differences(stored(sqlite(tmp_path)), expected_of([*ROWS[0::3], *ROWS[1::3]])) == []


def test_a_batch_is_repeated_though_its_segments_are_gone(
    spark: SparkSession, tmp_path: Path
) -> None:
    """Spark has lost its note of it, as after a power cut: the store has it, nothing fails."""
    segments(tmp_path, 0, 1)
    with pipeline(spark, tmp_path, **REMOVING) as running:
        running.run_available()
    assert left(tmp_path) == []
    forget_commit(tmp_path / "checkpoint")
    segments(tmp_path, 2)
    with pipeline(spark, tmp_path, **REMOVING) as running:
        assert [report.applied for report in running.run_available()] == [False, True]
        assert differences(stored(running.store), expected_of(ROWS)) == []
        assert counted(running.store, "quarantined segment") == {}
    assert left(tmp_path) == []


def test_segments_read_without_it_and_broken_ones_go_too(
    spark: SparkSession, tmp_path: Path
) -> None:
    """Once it is asked for; of a broken one there is a copy. A backfill's folder is left alone."""
    segments(tmp_path, 0)
    with pipeline(spark, tmp_path, oal=SMALL) as running:
        running.run_available()
        write_segment(tmp_path / "old", "Endpoint", ROWS[2::3])
    assert left(tmp_path) == ["0"]
    segments(tmp_path, 1)
    (tmp_path / "spool" / "Endpoint" / "broken.parquet").write_bytes(b"no Parquet")
    with pipeline(spark, tmp_path, **REMOVING) as running:
        running.run_available()
        running.backfill(tmp_path / "old")
        assert differences(stored(running.store), expected_of(ROWS)) == []
    assert left(tmp_path) == []
    aside = tmp_path / "spool-quarantine" / "Endpoint" / "broken.parquet"
    assert aside.read_bytes() == b"no Parquet"
    assert len(list((tmp_path / "old").rglob("*.parquet"))) == 1


def test_an_idle_stream_removes_too(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No batch comes after the last one; the progress is still written."""
    monkeypatch.setattr("batchmill.spark.runtime.progress._EVERY_S", 0.1)
    segments(tmp_path, 0, 1, 2)
    ticks = itertools.count(int(NOW))
    given = {
        **REMOVING,
        "settings": PipelineSettings(ttl_days=365, span_wait_s=0.4),
        "clock": lambda: float(next(ticks)),
    }
    with pipeline(spark, tmp_path, **given) as running:
        running.start(0.1)
        until(lambda: left(tmp_path) == [], "segments are removed")
        first = progress(tmp_path)["written_at"]
        until(lambda: progress(tmp_path)["written_at"] > first, "progress is written")
        assert progress(tmp_path)["last_batch"] == 0
        assert differences(stored(running.store), expected_of(ROWS)) == []
