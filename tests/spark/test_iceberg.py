"""Deltas in an Iceberg table, in a real catalog in a folder: each commit once."""

from __future__ import annotations

import shutil
from collections import Counter, defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import DataFrameWriterV2, SparkSession

from batchmill.errors import ConfigError
from batchmill.sources import bucket_start
from batchmill.spark import (
    IcebergExport,
    Pipeline,
    PipelineError,
    SpanExport,
    export_spans,
    iceberg_conf,
)
from batchmill.store import Cell, Store, open_store
from tests.kit.jvm import jars, jars_missing
from tests.kit.pipelines import (
    ONE_AT_A_TIME,
    SMALL,
    endpoint_events,
    pipeline,
    set_order,
    sqlite,
    write_segment,
)
from tests.kit.stores import Backend
from tests.kit.traces.segments import NOW, kept, made_span

TABLE = "lake.shop.deltas"
SPANS = "lake.shop.spans"

needs_iceberg = pytest.mark.oldest  # Iceberg has no runtime for a newer PySpark


@pytest.fixture
def lake(spark: SparkSession, tmp_path: Path) -> SparkSession:
    """A session with an empty catalog."""
    if (missing := jars_missing("iceberg")) is not None:
        pytest.skip(missing)
    session = spark.newSession()
    session.conf.set("spark.sql.catalog.lake", "org.apache.iceberg.spark.SparkCatalog")
    session.conf.set("spark.sql.catalog.lake.type", "hadoop")
    session.conf.set("spark.sql.catalog.lake.warehouse", str(tmp_path / "lake"))
    return session


def running(spark: SparkSession, folder: Path, store: str | None = None) -> Pipeline:
    """A pipeline with an outbox; each segment is a batch."""
    store = store or sqlite(folder)
    return pipeline(spark, folder, oal=SMALL, settings=ONE_AT_A_TIME, outbox=True, store=store)


def export(lake: SparkSession, store: Store, folder: Path) -> IcebergExport:
    """The export of that pipeline."""
    return IcebergExport(lake, store=store, checkpoint=folder / "checkpoint", table=TABLE)


def merged(lake: SparkSession, store: Store) -> dict[tuple[Any, ...], Any]:
    """The values that the deltas in the table add up to, by minute."""
    plans = {metric.name: metric.plan for metric in store.metrics()}
    states: dict[tuple[Any, ...], list[list[Any]]] = defaultdict(list)
    for row in lake.table(TABLE).toArrow().to_pylist():
        numbers = [
            cell["value"]
            if cell["value"] is None or Cell(cell["merge"]) in (Cell.NUMBERS, Cell.LABELS)
            else int(cell["value"])
            for cell in row["state"]
        ]
        states[row["metric"], row["time"], row["entity_id"]].append(numbers)
    return {
        key: plans[key[0]].final_value(plans[key[0]].merge(zip(*several, strict=True)), 1)
        for key, several in states.items()
    }


def stored(store: Store) -> dict[tuple[Any, ...], Any]:
    """The values of the store, likewise."""
    return {
        (metric.name, bucket_start(value.bucket), value.entity_id): value.value
        for metric in store.metrics()
        for value in store.values(metric)
    }


@needs_iceberg
def test_each_commit_is_one_snapshot(lake: SparkSession, tmp_path: Path, backend: Backend) -> None:
    """What the table has adds up to the store; a second run appends only what came since.

    A batch is one commit with SQLite, and one for each of its parts with PostgreSQL.
    """
    events = endpoint_events(60)
    for number in range(3):
        path = write_segment(tmp_path / "spool", "Endpoint", events[number::4], str(number), number)
        set_order(path, number)
    with running(lake, tmp_path, backend.url) as pipe:
        pipe.run_available()
    store = backend.open()
    first = export(lake, store, tmp_path).run()
    assert merged(lake, store) == stored(store)
    assert export(lake, store, tmp_path).run() == 0
    write_segment(tmp_path / "spool", "Endpoint", events[3::4], "3", 3)
    with running(lake, tmp_path, backend.url) as pipe:
        pipe.run_available()
    second = export(lake, store, tmp_path).run()
    assert merged(lake, store) == stored(store)
    rows = lake.table(f"{TABLE}.snapshots").select("summary").toArrow().to_pylist()
    named = Counter(dict(row["summary"])["batchmill.batch"] for row in rows)
    assert (named.total(), named["3"]) == (first + second, second)
    assert set(named) == {"0", "1", "2", "3"}
    assert (max(named.values()) > 1) is backend.url.startswith("postgresql")
    assert {dict(row["summary"])["batchmill.stream"] for row in rows} == {"main"}


@needs_iceberg
def test_a_run_that_died_before_its_mark_repeats_nothing(
    lake: SparkSession, tmp_path: Path, backend: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The snapshot of the first commit is there, the mark in the store is not."""
    write_segment(tmp_path / "spool", "Endpoint", endpoint_events(40))
    with running(lake, tmp_path, backend.url) as pipe:
        pipe.run_available()
    store = backend.open()

    def die(*_: object) -> list[str]:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(store, "pass_outbox", die)
        with pytest.raises(KeyboardInterrupt):
            export(lake, store, tmp_path).run()
    (exporter,) = store.exporters()
    commits = store.outbox_depth(exporter.place).files
    assert export(lake, store, tmp_path).run() == commits - 1
    assert merged(lake, store) == stored(store)
    assert store.outbox_depth(exporter.place).files == 0


@needs_iceberg
def test_a_file_that_is_gone_is_an_error(lake: SparkSession, tmp_path: Path) -> None:
    """It says which one."""
    write_segment(tmp_path / "spool", "Endpoint", endpoint_events(20))
    with running(lake, tmp_path) as pipe:
        pipe.run_available()
    (file,) = (tmp_path / "checkpoint" / "outbox").glob("*/*.arrow")
    file.unlink()
    with (
        open_store(sqlite(tmp_path)) as store,
        pytest.raises(PipelineError, match=f"{file.name} is missing"),
    ):
        export(lake, store, tmp_path).run()


def ids_in(lake: SparkSession) -> list[tuple[str, str]]:
    """The last digits of the ids of all spans in the table."""
    rows = lake.table(SPANS).select("trace_id", "span_id").collect()
    return sorted((row[0][-1], row[1][-1]) for row in rows)


def snapshots(lake: SparkSession) -> int:
    """How often the table of spans was written to."""
    return lake.table(f"{SPANS}.snapshots").count()


@needs_iceberg
def test_kept_spans_are_a_table(lake: SparkSession, tmp_path: Path) -> None:
    """An hour that gets more spans is written again, each span once; what is dropped stays."""
    first, second = made_span(1, 1, http__route="/cart"), made_span(2, 1, at_ms=3_600_000)
    folder = kept(tmp_path, [first, second], now=NOW + 3600).folder
    assert export_spans(lake, folder, table=SPANS) == SpanExport(spans=2, hours=2)
    assert ids_in(lake) == [("1", "1"), ("2", "1")]
    assert export_spans(lake, folder, table=SPANS) == SpanExport(skipped=2)
    kept(tmp_path, [first, made_span(1, 2, 1)], now=NOW + 3600)
    assert export_spans(lake, folder, table=SPANS) == SpanExport(spans=1, hours=1, skipped=1)
    assert ids_in(lake) == [("1", "1"), ("1", "2"), ("2", "1")]
    (row,) = lake.table(SPANS).where("attributes['http.route'] = '/cart'").collect()
    assert (row["service"], row["duration_us"]) == ("shop", 10_000)
    for file in folder.glob("hour=*T12/*.parquet"):
        file.unlink()
    assert export_spans(lake, folder, table=SPANS) == SpanExport(skipped=1)
    assert len(ids_in(lake)) == 3
    # Fewer than the table has of the hour, since the folder dropped those.
    kept(tmp_path, [made_span(3, 1)], now=NOW + 3600)
    assert export_spans(lake, folder, table=SPANS) == SpanExport(spans=1, hours=1, skipped=1)
    assert ids_in(lake) == [("1", "1"), ("1", "2"), ("2", "1"), ("3", "1")]


@needs_iceberg
def test_a_span_that_is_kept_twice_is_written_and_counted_once(
    lake: SparkSession, tmp_path: Path
) -> None:
    """Files of an hour may have it twice until they are merged; later calls write nothing."""
    folder = kept(tmp_path, [made_span(1, 1), made_span(1, 2)]).folder
    (file,) = folder.glob("hour=*/*.parquet")
    shutil.copyfile(file, file.with_name("2-copy.parquet"))
    assert export_spans(lake, folder, table=SPANS) == SpanExport(spans=2, hours=1)
    assert export_spans(lake, folder, table=SPANS) == SpanExport(skipped=1)
    assert ids_in(lake) == [("1", "1"), ("1", "2")]
    assert snapshots(lake) == 1


def after_overwrite(monkeypatch: pytest.MonkeyPatch, then: Callable[[], object]) -> None:
    """Call a function each time when an hour was written, before the export knows it."""
    overwrite = DataFrameWriterV2.overwritePartitions

    def overwritten(writer: DataFrameWriterV2) -> None:
        overwrite(writer)
        then()

    monkeypatch.setattr(DataFrameWriterV2, "overwritePartitions", overwritten)


@needs_iceberg
def test_as_many_new_spans_as_were_dropped_are_exported(lake: SparkSession, tmp_path: Path) -> None:
    """Their number alone does not show that the folder has others than the table."""
    folder = kept(tmp_path, [made_span(1, 1), made_span(2, 1)]).folder
    assert export_spans(lake, folder, table=SPANS) == SpanExport(spans=2, hours=1)
    for file in folder.glob("hour=*/*.parquet"):
        file.unlink()
    kept(tmp_path, [made_span(3, 1), made_span(4, 1)])
    assert export_spans(lake, folder, table=SPANS) == SpanExport(spans=2, hours=1)
    assert ids_in(lake) == [("1", "1"), ("2", "1"), ("3", "1"), ("4", "1")]


@needs_iceberg
def test_an_export_of_spans_that_died_repeats_nothing_and_loses_nothing(
    lake: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The hour that was written is left as it is, the next one is written by the next call."""

    def die() -> None:
        raise KeyboardInterrupt

    rows = [made_span(1, 1), made_span(2, 1, at_ms=3_600_000)]
    folder = kept(tmp_path, rows, now=NOW + 3600).folder
    with monkeypatch.context() as patched:
        after_overwrite(patched, die)
        with pytest.raises(KeyboardInterrupt):
            export_spans(lake, folder, table=SPANS)
    assert ids_in(lake) == [("1", "1")]
    assert export_spans(lake, folder, table=SPANS) == SpanExport(spans=1, hours=1, skipped=1)
    assert ids_in(lake) == [("1", "1"), ("2", "1")]
    assert snapshots(lake) == 2


@needs_iceberg
def test_a_second_export_of_a_folder_is_refused(
    lake: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While the first one runs: each would put its own hour in the place of the other's."""
    folder = kept(tmp_path, [made_span(1, 1)]).folder
    refused = []

    def export_again() -> None:
        with pytest.raises(PipelineError, match="repeat this one when that has ended") as raised:
            export_spans(lake, folder, table=SPANS)
        refused.append(str(folder) in str(raised.value))

    with monkeypatch.context() as patched:
        after_overwrite(patched, export_again)
        assert export_spans(lake, folder, table=SPANS) == SpanExport(spans=1, hours=1)
    assert refused == [True]
    assert export_spans(lake, folder, table=SPANS) == SpanExport(skipped=1)


@needs_iceberg
def test_an_hour_whose_files_were_merged_is_looked_at_once(
    lake: SparkSession, tmp_path: Path
) -> None:
    """It has nothing new: that becomes a snapshot without rows, and the next call skips it."""
    folder = kept(tmp_path, [made_span(1, 1)]).folder
    export_spans(lake, folder, table=SPANS)
    (file,) = folder.glob("hour=*/*.parquet")
    file.rename(file.with_name("1-merged.parquet"))
    for _ in range(2):
        assert export_spans(lake, folder, table=SPANS) == SpanExport(skipped=1)
        assert snapshots(lake) == 2
    assert ids_in(lake) == [("1", "1")]


@needs_iceberg
def test_what_a_rollback_took_from_the_table_is_exported_again(
    lake: SparkSession, tmp_path: Path
) -> None:
    """The snapshot that has it is listed still, but the table is not made of it any more."""
    kept(tmp_path, [made_span(1, 1)])
    folder = tmp_path / "traces"
    export_spans(lake, folder, table=SPANS)
    before = lake.table(f"{SPANS}.snapshots").collect()[0]["snapshot_id"]
    kept(tmp_path, [made_span(2, 1), made_span(3, 1)])
    export_spans(lake, folder, table=SPANS)
    lake.sql(f"CALL lake.system.rollback_to_snapshot('{SPANS.partition('.')[2]}', {before})")
    assert export_spans(lake, folder, table=SPANS) == SpanExport(spans=2, hours=1)
    assert ids_in(lake) == [("1", "1"), ("2", "1"), ("3", "1")]


def test_a_folder_without_kept_spans_is_refused(spark: SparkSession, tmp_path: Path) -> None:
    """Before a table is created."""
    with pytest.raises(ConfigError, match="keep_spans"):
        export_spans(spark, tmp_path / "other", table=SPANS)


def test_the_runtime_is_that_of_the_spark() -> None:
    """The one that is tested; where there is none, the error says what to install."""
    (runtime,) = iceberg_conf("4.1.1").values()
    tested = [jar.stem for jar in jars("iceberg")]
    assert tested in ([], ["-".join(runtime.split(":")[1:])])
    with pytest.raises(ConfigError, match=r"batchmill\[spark,iceberg\]"):
        iceberg_conf("4.3.0")
