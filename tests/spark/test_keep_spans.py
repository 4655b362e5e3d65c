"""The spans of committed segments are kept, each once, whatever happens in between."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("pyspark")

from pyspark.sql import SparkSession

from batchmill.errors import ConfigError
from batchmill.spark import PipelineSettings
from batchmill.traces import SpanReader
from tests.kit.files import fill, small_disk
from tests.kit.pipelines import SMALL, counted, pipeline, write_segment
from tests.kit.processes import wait_for_json
from tests.kit.threads import until
from tests.kit.traces.segments import NOW, made_span, write_spans
from tests.spark.kit import forget_commit

KEEPING: dict[str, Any] = {
    "oal": SMALL,
    "remove_read": True,
    "clock": lambda: NOW,
    "settings": PipelineSettings(ttl_days=365, max_batch_files=1),
}


def _write(folder: Path, name: str, traces: Sequence[int]) -> None:
    write_spans(folder / "spool" / "Span", name, [made_span(trace, 1) for trace in traces])


def _kept(folder: Path) -> list[int]:
    """The traces that are kept."""
    reader = SpanReader(folder / "traces")
    return [trace for trace in range(10) if reader.trace(f"{trace:x}") is not None]


def test_spans_stay_after_their_commit(spark: SparkSession, tmp_path: Path) -> None:
    """In sorted files; the spool is empty, and progress.json says what is kept.

    A wrong clock drops none of them: the store does not trust it.
    """
    now_s = NOW
    _write(tmp_path, "a", [1, 2])
    _write(tmp_path, "b", [2, 3])
    given = {**KEEPING, "keep_spans": tmp_path / "traces", "clock": lambda: now_s}
    with pipeline(spark, tmp_path, **given) as running:
        running.run_available()
        assert _kept(tmp_path) == [1, 2, 3]
        assert not list((tmp_path / "spool").rglob("*.parquet"))
        assert not list((tmp_path / "traces" / ".incoming").iterdir())
        progress = wait_for_json(tmp_path / "checkpoint" / "progress.json")
        assert (progress["kept"]["spans"], progress["kept"]["duplicates"]) == (3, 1)
        for days in (40, -40):
            now_s = NOW + days * 86_400
            assert running.run_available() == []
            progress = wait_for_json(tmp_path / "checkpoint" / "progress.json")
            assert (progress["kept"]["dropped"], progress["kept"]["held_back"]) == ({}, days > 0)
        assert _kept(tmp_path) == [1, 2, 3]


def test_a_repeated_commit_keeps_nothing_twice(spark: SparkSession, tmp_path: Path) -> None:
    """A crash after the commit: the batch comes again, and its segments are kept once."""
    _write(tmp_path, "a", [1])
    given = {**KEEPING, "keep_spans": tmp_path / "traces"}
    with pipeline(spark, tmp_path, **{**given, "remove_read": False, "keep_spans": None}) as first:
        first.run_available()
    forget_commit(tmp_path / "checkpoint")
    with pipeline(spark, tmp_path, **given) as again:
        (report,) = again.run_available()
        assert not report.applied
    stats = SpanReader(tmp_path / "traces").stats()
    assert (stats.spans, stats.duplicates, _kept(tmp_path)) == (1, 0, [1])


def test_a_running_stream_shows_spans_after_each_commit(
    spark: SparkSession, tmp_path: Path
) -> None:
    """Without waiting for the next batch."""
    with pipeline(spark, tmp_path, **KEEPING, keep_spans=tmp_path / "traces") as running:
        running.start(0.1)
        _write(tmp_path, "a", [4])
        until(lambda: _kept(tmp_path) == [4])
    with pipeline(spark, tmp_path, **KEEPING, keep_spans=tmp_path / "traces") as running:
        assert running.run_available() == []
        assert SpanReader(tmp_path / "traces").stats().spans == 1


def test_events_and_quarantined_segments_are_not_kept(spark: SparkSession, tmp_path: Path) -> None:
    """Only segments of spans that could be read; and of the others no more than is wanted."""
    _write(tmp_path, "a", [5])
    bad = tmp_path / "spool" / "Span" / "bad.parquet"
    bad.write_bytes(b"no parquet")
    write_segment(tmp_path / "spool", "Endpoint", [], "events", 1)
    few = replace(KEEPING["settings"], max_quarantine_bytes=0)
    given = {**KEEPING, "keep_spans": tmp_path / "traces", "settings": few}
    with pipeline(spark, tmp_path, **given) as running:
        running.run_available()
        assert sum(counted(running.store, "quarantined segment").values()) == 1
        assert [path for path in Path(str(running.quarantine)).rglob("*") if path.is_file()] == []
    assert SpanReader(tmp_path / "traces").stats().dropped == {}
    assert _kept(tmp_path) == [5]
    assert not list((tmp_path / "spool").rglob("*.parquet"))


def test_a_full_disk_of_kept_spans_stops_no_batch(spark: SparkSession, tmp_path: Path) -> None:
    """Spans that cannot be kept leave the spool all the same, and are counted."""
    with small_disk(tmp_path / "disk") as disk:
        given = {**KEEPING, "keep_spans": disk / "traces"}
        with pipeline(spark, tmp_path, **given) as running:
            running.start(0.1)
            filler = fill(disk)
            _write(tmp_path, "a", range(600))
            until(lambda: not list((tmp_path / "spool").rglob("*.parquet")), "the spool is empty")
            filler.unlink()
            reader = SpanReader(disk / "traces")
            until(
                lambda: reader.stats().dropped == {"the folder cannot be written": 600},
                "they are counted",
            )


def test_without_the_setting_nothing_is_kept(spark: SparkSession, tmp_path: Path) -> None:
    """Segments are removed as ever."""
    _write(tmp_path, "a", [6])
    with pipeline(spark, tmp_path, **KEEPING) as running:
        running.run_available()
        assert running.progress().kept is None
    assert not list((tmp_path / "spool").rglob("*.parquet"))
    assert not (tmp_path / "traces").exists()


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({"remove_read": False}, "used with remove_read"),
        ({"spool": "hdfs://host/spool"}, r"not on this machine \(hdfs://host/spool\)"),
        (
            {
                "spool": None,
                "source": "kafka://host:9092/spans",
                "checkpoint": "s3a://bucket/folder",
            },
            r"not on this machine \(s3a://bucket/folder\)",
        ),
        ({"keep_spans": "s3a://bucket/traces"}, "a local folder"),
    ],
)
def test_spans_are_kept_on_this_machine_only(
    spark: SparkSession, tmp_path: Path, given: dict[str, Any], why: str
) -> None:
    """The error says what is missing, before anything runs."""
    with pytest.raises(ConfigError, match=why):
        pipeline(spark, tmp_path, **{**KEEPING, "keep_spans": tmp_path / "traces", **given})
