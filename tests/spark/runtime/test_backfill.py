"""Past events added by a backfill: equal to a stream, beside a stream, once."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest
from pyspark.sql import DataFrame, SparkSession

from batchmill.errors import ConfigError
from batchmill.spark import BatchReport, Pipeline, PipelineSettings
from batchmill.spark.files.paths import HadoopPath
from batchmill.spark.runtime.backfill import FORGOTTEN_DAYS
from batchmill.store import CheckpointMismatchError
from tests.kit.pipelines import (
    EVERY_FUNCTION_OF_TWO,
    NOW,
    ONE_AT_A_TIME,
    SMALL,
    START,
    TWO_SOURCES,
    contents,
    counted,
    deal,
    differences,
    endpoint_events,
    every_events,
    expected,
    expected_of,
    pipeline,
    stored,
    write_segment,
)
from tests.kit.threads import PATIENCE_S, spawn
from tests.oracle.catalog import Row
from tests.oracle.generate import random_events, random_spans
from tests.oracle.spans import spans_to_events


def frame(running: Pipeline, folder: Path) -> DataFrame:
    """The rows of one source's segments."""
    running.spark.conf.set("spark.sql.session.timeZone", "UTC")
    return running.spark.read.parquet(str(folder))


def test_stream_and_backfill_give_equal_stores(spark: SparkSession, tmp_path: Path) -> None:
    """The same segments streamed, backfilled as a folder, and as DataFrames: one store each."""
    events = every_events(21, TWO_SOURCES, 80)
    deal(events, tmp_path / "segments", 3)
    for name in "abc":
        (tmp_path / name).mkdir()
    oal = EVERY_FUNCTION_OF_TWO
    with pipeline(spark, tmp_path / "a", oal=oal, spool=tmp_path / "segments") as streamed:
        streamed.run_available()
        wanted = contents(streamed.store)
        rows = streamed.store.counters()
        counted_rows = counted(streamed.store, "rows")
    assert differences(wanted[1], expected(events, oal)) == []
    with pipeline(spark, tmp_path / "b", oal=oal) as folder:
        folder.backfill(tmp_path / "segments")
        assert contents(folder.store) == wanted
        assert folder.store.counters() == rows
    with pipeline(spark, tmp_path / "c", oal=oal) as frames:
        for source in TWO_SOURCES:
            frames.backfill(frame(frames, tmp_path / "segments" / source), source=source)
        assert contents(frames.store) == wanted
        assert counted(frames.store, "rows") == counted_rows


def test_a_folder_counts_once(spark: SparkSession, tmp_path: Path) -> None:
    """A repeated folder backfill adds nothing but what is new in the folder."""
    rows = endpoint_events(60)
    write_segment(tmp_path / "old", "Endpoint", rows[:30], "0")
    with pipeline(spark, tmp_path, oal=SMALL) as running:
        assert len(running.backfill(tmp_path / "old")) == 1
        assert running.backfill(tmp_path / "old") == []
        assert differences(stored(running.store), expected_of(rows[:30])) == []
        write_segment(tmp_path / "old", "Endpoint", rows[30:], "1")
        (report,) = running.backfill(tmp_path / "old")
        assert report.stats.rows == 30
        assert differences(stored(running.store), expected_of(rows)) == []


def test_a_named_frame_counts_once_and_an_unnamed_one_each_time(
    spark: SparkSession, tmp_path: Path
) -> None:
    """The name of a DataFrame backfill is what makes a repetition one.

    Without a name nobody can repeat it, so it leaves no checkpoint; a named one is remembered.
    """
    rows = endpoint_events(40)
    path = write_segment(tmp_path / "old", "Endpoint", rows)
    with pipeline(spark, tmp_path, oal=SMALL) as running:
        for _ in range(2):
            running.backfill(frame(running, path), source="Endpoint")
        with pytest.raises(ConfigError, match="columns of Endpoint"):
            running.backfill(
                frame(running, path).drop("time").selectExpr("*", "1 AS time"), source="Endpoint"
            )
        assert list((tmp_path / "checkpoint").iterdir()) == []
        assert differences(stored(running.store), expected_of(rows * 2)) == []
        for applied in (True, False):
            (report,) = running.backfill(frame(running, path), source="Endpoint", name="march")
            assert report.applied is applied
        assert [path.name for path in (tmp_path / "checkpoint").iterdir()] == [
            "backfill-rows-Endpoint-march"
        ]
        assert differences(stored(running.store), expected_of(rows * 3)) == []


def test_a_backfill_is_forgotten_after_a_month(
    spark: SparkSession, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """If nobody has run it again; the store still knows its name, so it never counts twice."""
    assert FORGOTTEN_DAYS == 30, "docs/operations.md has this number"
    rows = endpoint_events(40)
    path = write_segment(tmp_path / "old", "Endpoint", rows)

    checkpoint = tmp_path / "checkpoint"

    def age(name: str, at_s: float) -> None:
        folder = checkpoint / f"backfill-rows-Endpoint-{name}"
        for entry in (*folder.rglob("*"), folder):
            os.utime(entry, (at_s, at_s))

    def names() -> set[str]:
        return {path.name.rpartition("-")[2] for path in checkpoint.glob("backfill-*")}

    settings = PipelineSettings(ttl_days=FORGOTTEN_DAYS)
    with pipeline(spark, tmp_path, oal=SMALL, settings=settings) as running:
        for name in ("march", "april"):
            running.backfill(frame(running, path), source="Endpoint", name=name)
        write_segment(tmp_path / "spool", "Endpoint", rows, "new")
        (checkpoint / "backfill-rows-Endpoint-1f2e" / "rows").mkdir(parents=True)
        for name, days in (("march", 31), ("1f2e", 31), ("april", 29)):
            age(name, NOW - days * 86_400)
        running._backfills.remove_forgotten(NOW)
        assert names() == {"april"}
        age("april", 1000)
        running.run_available()
        assert names() == set()
        assert "1f2e was not run for 30 days, and is removed from the checkpoint: not all" in (
            caplog.text
        )
        with pytest.raises(CheckpointMismatchError, match="would count it twice"):
            running.backfill(frame(running, path), source="Endpoint", name="march")
        assert differences(stored(running.store), expected_of(rows * 3)) == []


def test_a_backfill_on_another_file_system_is_forgotten_as_well(
    spark: SparkSession, tmp_path: Path
) -> None:
    """By its files; they are looked at once an hour."""
    for name, days in (("march", 31), ("april", 29)):
        file = tmp_path / "checkpoint" / f"backfill-rows-Endpoint-{name}" / "books.jsonl"
        file.parent.mkdir(parents=True)
        file.touch()
        os.utime(file, (NOW - days * 86_400,) * 2)
    with pipeline(spark, tmp_path, oal=SMALL, settings=PipelineSettings()) as running:
        backfills = running._backfills
        backfills._checkpoint = HadoopPath(f"file:{tmp_path}/checkpoint", lambda: spark)
        for hours, left in ((0, {"april"}), (0.9, {"april"}), (50, set())):
            backfills.remove_forgotten(NOW + hours * 3600)
            names = {path.name for path in (tmp_path / "checkpoint").glob("backfill-*")}
            assert {name.rpartition("-")[2] for name in names} == left


def test_an_interrupted_backfill_is_resumed(spark: SparkSession, tmp_path: Path) -> None:
    """What was committed before the fault is skipped, the rest comes in, nothing counts twice."""
    rows = endpoint_events(60)
    for number in range(3):
        write_segment(tmp_path / "old", "Endpoint", rows[number::3], str(number), number)

    def fail(report: BatchReport) -> None:
        if report.number == 1:
            raise KeyError("pulled the plug")

    with pipeline(spark, tmp_path, oal=SMALL, settings=ONE_AT_A_TIME) as running:
        with pytest.raises(KeyError, match="pulled the plug"):
            running.backfill(tmp_path / "old", on_batch=fail)
        assert counted(running.store, "rows") == {("Endpoint", ""): 40}
    with pipeline(spark, tmp_path, oal=SMALL, settings=ONE_AT_A_TIME) as running:
        reports = running.backfill(tmp_path / "old")
        assert [(report.number, report.applied) for report in reports] == [(1, False), (2, True)]
        assert differences(stored(running.store), expected_of(rows)) == []


def test_a_backfill_beside_a_live_stream(spark: SparkSession, tmp_path: Path) -> None:
    """Three writers of one store at once: a stream, its own backfill, another pipeline's."""
    parts: list[list[Row]] = [endpoint_events(60, seed) for seed in (1, 2, 3)]
    live, own, others = parts
    streamed = threading.Semaphore(0)
    for number in range(2):
        write_segment(tmp_path / "own", "Endpoint", own[number::2], str(number), number)
        write_segment(tmp_path / "others", "Endpoint", others[number::2], str(number), number)
    with (
        pipeline(
            spark,
            tmp_path,
            oal=SMALL,
            settings=ONE_AT_A_TIME,
            on_batch=lambda report: streamed.release(),
        ) as running,
        pipeline(
            spark, tmp_path, oal=SMALL, settings=ONE_AT_A_TIME, checkpoint=tmp_path / "other"
        ) as other,
    ):
        running.start(0.1)
        backfills = [
            spawn(running.backfill, tmp_path / "own"),
            spawn(other.backfill, tmp_path / "others"),
        ]
        for number in range(2):
            # Written elsewhere and moved, as a spool does: a segment is whole when it is seen.
            rows = live[number::2]
            path = write_segment(tmp_path / "making", "Endpoint", rows, str(number), number)
            target = tmp_path / "spool" / "Endpoint"
            target.mkdir(parents=True, exist_ok=True)
            path.rename(target / path.name)
            assert streamed.acquire(timeout=PATIENCE_S)
        assert [len(backfill.result(PATIENCE_S)) for backfill in backfills] == [2, 2]
        assert differences(stored(running.store), expected_of(live + own + others)) == []
        assert {stream.name for stream in running.store.streams()} >= {"main"}
        assert len(running.store.streams()) == 3


def test_a_backfill_retires_no_metric(spark: SparkSession, tmp_path: Path) -> None:
    """A backfill of one metric by another pipeline leaves the stream's metrics as they are."""
    rows = endpoint_events(30)
    write_segment(tmp_path / "spool", "Endpoint", rows)
    with pipeline(spark, tmp_path, oal=SMALL) as running:
        running.run_available()
    oal = "more = from(Endpoint.latency).max();"
    with pipeline(spark, tmp_path, oal=oal, checkpoint=tmp_path / "other") as other:
        other.backfill(tmp_path / "spool")
        names = {metric.name for metric in other.store.metrics()}
        assert differences(stored(other.store), expected_of(rows, SMALL + oal)) == []
    assert names == {"ep_cpm", "ep_avg", "ep_p10", "ep_types", "more"}


def test_spans_can_be_backfilled(spark: SparkSession, tmp_path: Path) -> None:
    """A folder of spans: relations across its segments are found, nothing waits in the end."""
    spans = random_spans(5, 100, start=START, days=1)
    deal({"Span": spans}, tmp_path / "old", 2)
    oal = "rel = from(ServiceRelation.latency).percentile2(10); c = from(Service.*).count();"
    with pipeline(spark, tmp_path, oal=oal, settings=ONE_AT_A_TIME) as running:
        running.backfill(tmp_path / "old")
        actual = stored(running.store)
    assert differences(actual, expected(spans_to_events(spans).events, oal)) == []


def test_rows_of_a_frame_that_do_not_fit_are_set_aside(spark: SparkSession, tmp_path: Path) -> None:
    """A DataFrame's row without a time, or without a required number, is counted, not summed."""
    rows = endpoint_events(20)
    path = write_segment(tmp_path / "old", "Endpoint", rows)
    with pipeline(spark, tmp_path, oal=SMALL) as running:
        good = frame(running, path)
        columns = [column for column in good.columns if column not in ("time", "latency")]
        timeless = good.limit(2).selectExpr("CAST(NULL AS TIMESTAMP) AS time", "latency", *columns)
        empty = good.limit(3).selectExpr("time", "CAST(NULL AS INT) AS latency", *columns)
        every = good.unionByName(timeless).unionByName(empty)
        running.backfill(every, source="Endpoint")
        assert differences(stored(running.store), expected_of(rows)) == []
        assert counted(running.store, "quarantined") == {
            ("Endpoint", "no time"): 2,
            ("Endpoint", "no latency"): 3,
        }


def test_a_frame_that_no_metric_reads_is_refused(spark: SparkSession, tmp_path: Path) -> None:
    """Unlike a segment that happens to lie in a folder, it was asked for: an error says so."""
    rows = random_events(1, ["Service"], 5)["Service"]
    path = write_segment(tmp_path / "old", "Service", rows)
    with (
        pipeline(spark, tmp_path, oal=SMALL) as running,
        pytest.raises(ConfigError, match="an event type that a metric reads"),
    ):
        running.backfill(frame(running, path), source="Service")


def test_names_of_backfills_do_not_collide(spark: SparkSession, tmp_path: Path) -> None:
    """One name for two sources and a folder: each is its own backfill, and nothing is skipped."""
    events = random_events(3, ["Endpoint", "Service"], 20, start=START)
    oal = "c = from(Endpoint.*).count(); d = from(Service.*).count();"
    more = endpoint_events(30, seed=9)
    write_segment(tmp_path / "folder", "Endpoint", more)
    with pipeline(spark, tmp_path, oal=oal) as running:
        for source, rows in events.items():
            path = write_segment(tmp_path / "old", source, rows)
            (report,) = running.backfill(frame(running, path), source=source, name="march")
            assert report.applied
        (report,) = running.backfill(tmp_path / "folder", name="march")
        assert report.applied
        every = {**events, "Endpoint": [*events["Endpoint"], *more]}
        assert differences(stored(running.store), expected(every, oal)) == []


def test_a_frame_of_spans(spark: SparkSession, tmp_path: Path) -> None:
    """Spans in a DataFrame are traced as those of a folder; what does not fit is set aside."""
    spans = random_spans(5, 100, start=START, days=1)
    write_segment(tmp_path / "old", "Span", spans)
    oal = "rel = from(ServiceRelation.latency).percentile2(10); c = from(Service.*).count();"
    with pipeline(spark, tmp_path, oal=oal) as running:
        good = running.spark.read.parquet(str(tmp_path / "old" / "Span"))
        columns = [column for column in good.columns if column != "span_id"]
        odd = good.limit(2).selectExpr("CAST(NULL AS STRING) AS span_id", *columns)
        for _ in range(2):
            running.backfill(good.unionByName(odd), source="Span", name="march")
        actual = stored(running.store)
        assert counted(running.store, "quarantined") == {("Span", "no span_id"): 2}
        assert counted(running.store, "rows")["Span", ""] == len(spans)
    assert differences(actual, expected(spans_to_events(spans).events, oal)) == []


def test_a_backfill_says_what_is_wrong_with_its_arguments(
    spark: SparkSession, tmp_path: Path
) -> None:
    """A folder that is not there, a DataFrame without its source, an unknown source."""
    path = write_segment(tmp_path / "old", "Endpoint", endpoint_events(3))
    with pipeline(spark, tmp_path, oal=SMALL) as running:
        with pytest.raises(ConfigError, match="a folder that exists"):
            running.backfill(tmp_path / "nowhere")
        with pytest.raises(ConfigError, match="event type"):
            running.backfill(frame(running, path))
        with pytest.raises(LookupError, match="Endpoint"):
            running.backfill(frame(running, path), source="Endpiont")
