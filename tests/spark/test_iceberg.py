"""Deltas in an Iceberg table, in a real catalog in a folder: each commit once."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

from batchmill.errors import ConfigError
from batchmill.sources import bucket_start
from batchmill.spark import (
    IcebergExport,
    Pipeline,
    PipelineError,
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


def running(spark: SparkSession, folder: Path) -> Pipeline:
    """A pipeline with an outbox; each segment is a batch."""
    return pipeline(spark, folder, oal=SMALL, settings=ONE_AT_A_TIME, outbox=True)


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
def test_each_commit_is_one_snapshot(lake: SparkSession, tmp_path: Path) -> None:
    """What the table has adds up to the store; a second run appends only what came since."""
    events = endpoint_events(60)
    for number in range(3):
        path = write_segment(tmp_path / "spool", "Endpoint", events[number::4], str(number), number)
        set_order(path, number)
    with running(lake, tmp_path) as pipe:
        pipe.run_available()
    with open_store(sqlite(tmp_path)) as store:
        assert export(lake, store, tmp_path).run() == 3
        assert merged(lake, store) == stored(store)
        assert export(lake, store, tmp_path).run() == 0
        write_segment(tmp_path / "spool", "Endpoint", events[3::4], "3", 3)
        with running(lake, tmp_path) as pipe:
            pipe.run_available()
        assert export(lake, store, tmp_path).run() == 1
        assert merged(lake, store) == stored(store)
        rows = lake.table(f"{TABLE}.snapshots").select("summary").toArrow().to_pylist()
        named = [dict(row["summary"])["batchmill.batch"] for row in rows]
        assert sorted(named) == ["0", "1", "2", "3"]
        assert {dict(row["summary"])["batchmill.stream"] for row in rows} == {"main"}


@needs_iceberg
def test_a_run_that_died_before_its_mark_repeats_nothing(
    lake: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The snapshot is there, the mark in the store is not."""
    write_segment(tmp_path / "spool", "Endpoint", endpoint_events(40))
    with running(lake, tmp_path) as pipe:
        pipe.run_available()
    with open_store(sqlite(tmp_path)) as store:

        def die(*_: object) -> list[str]:
            raise KeyboardInterrupt

        with monkeypatch.context() as patched:
            patched.setattr(store, "pass_outbox", die)
            with pytest.raises(KeyboardInterrupt):
                export(lake, store, tmp_path).run()
        assert export(lake, store, tmp_path).run() == 0
        assert merged(lake, store) == stored(store)
        assert store.outbox_depth(store.exporters()[0].place, after=1).files == 0


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


@needs_iceberg
def test_kept_spans_are_a_table(lake: SparkSession, tmp_path: Path) -> None:
    """An hour that gets more spans is written again, each span once; what is dropped stays."""
    first, second = made_span(1, 1, http__route="/cart"), made_span(2, 1, at_ms=3_600_000)
    folder = kept(tmp_path, [first, second], now=NOW + 3600).folder

    def exported() -> list[tuple[str, str]]:
        rows = lake.table(SPANS).select("trace_id", "span_id").collect()
        return sorted((row[0][-1], row[1][-1]) for row in rows)

    assert export_spans(lake, folder, table=SPANS) == 2
    assert exported() == [("1", "1"), ("2", "1")]
    assert export_spans(lake, folder, table=SPANS) == 0
    kept(tmp_path, [first, made_span(1, 2, 1)], now=NOW + 3600)
    assert export_spans(lake, folder, table=SPANS) == 1
    assert exported() == [("1", "1"), ("1", "2"), ("2", "1")]
    (row,) = lake.table(SPANS).where("attributes['http.route'] = '/cart'").collect()
    assert (row["service"], row["duration_us"]) == ("shop", 10_000)
    for file in folder.glob("hour=*T12/*.parquet"):
        file.unlink()
    assert export_spans(lake, folder, table=SPANS) == 0
    assert len(exported()) == 3
    kept(tmp_path, [made_span(3, number) for number in (1, 2, 3)], now=NOW + 3600)
    assert export_spans(lake, folder, table=SPANS) == 1
    assert exported() == [("1", "1"), ("1", "2"), ("2", "1"), ("3", "1"), ("3", "2"), ("3", "3")]


def test_the_runtime_is_that_of_the_spark() -> None:
    """The one that is tested; where there is none, the error says what to install."""
    (runtime,) = iceberg_conf("4.1.1").values()
    tested = [jar.stem for jar in jars("iceberg")]
    assert tested in ([], ["-".join(runtime.split(":")[1:])])
    with pytest.raises(ConfigError, match=r"batchmill\[spark,iceberg\]"):
        iceberg_conf("4.3.0")
