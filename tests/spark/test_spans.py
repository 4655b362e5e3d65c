"""Kept spans as a table of Spark, and of DuckDB."""

from __future__ import annotations

import json
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path

import pyarrow.dataset as ds
import pytest

pytest.importorskip("pyspark")

from pyspark.sql import SparkSession

from batchmill.errors import ConfigError
from batchmill.spark import spans
from batchmill.traces import SCHEMA
from tests.kit.traces.segments import HOUR, NOW, kept, made_span

ROWS = [
    made_span(1, 1, http__route="/cart", user__id="7"),
    made_span(1, 2, 1, service="db"),
    made_span(2, 1, at_ms=3_600_000),
]


def test_spans_are_a_frame(spark: SparkSession, tmp_path: Path) -> None:
    """With the documented columns; attributes are looked up by their keys."""
    folder = kept(tmp_path, ROWS, now=NOW + 3600).folder
    frame = spans(spark, folder)
    assert frame.columns == [*SCHEMA.names, "hour"]
    counts = {row["hour"]: row["count"] for row in frame.groupBy("hour").count().collect()}
    assert counts == {"2024-02-29T12": 2, "2024-02-29T13": 1}
    (row,) = frame.where("attributes['http.route'] = '/cart'").collect()
    assert (row["service"], row["attributes"]["user.id"], row["duration_us"]) == (
        "shop",
        "7",
        10_000,
    )
    assert row["resource"]["service.instance.id"] == "shop-1"


def test_only_some_hours_are_read(spark: SparkSession, tmp_path: Path) -> None:
    """From the start to the end."""
    folder = kept(tmp_path, ROWS, now=NOW + 3600).folder
    start = datetime.fromtimestamp(HOUR + 1, UTC)
    frame = spans(spark, folder, start=start)
    assert [row["trace_id"][-1] for row in frame.collect()] == ["2"]
    assert spans(spark, folder, end=start).count() == 2
    assert spans(spark, folder, start=datetime(2030, 1, 1, tzinfo=UTC)).count() == 0


def test_a_missing_folder_is_an_error(spark: SparkSession, tmp_path: Path) -> None:
    """That says which folder is meant."""
    with pytest.raises(ConfigError, match="keep_spans"):
        spans(spark, tmp_path / "none")


def test_other_tools_read_the_files(tmp_path: Path) -> None:
    """DuckDB and pandas, with the hour as a partition."""
    folder = kept(tmp_path, ROWS, now=NOW + 3600).folder
    query = (
        "select hour, service, attributes['http.route'] from "
        f"read_parquet('{folder}/hour=*/*.parquet', hive_partitioning = true) "
        "where trace_id like '%1' order by span_id"
    )
    # In a process of its own: at its end DuckDB prints what it has not freed.
    source = "import duckdb, json, sys; print(json.dumps(duckdb.execute(sys.argv[1]).fetchall()))"
    command = [sys.executable, "-c", source, query]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    rows = json.loads(done.stdout)
    assert rows == [["2024-02-29T12", "shop", "/cart"], ["2024-02-29T12", "db", None]]
    table = ds.dataset(folder, partitioning="hive", exclude_invalid_files=False).to_table()
    assert len(table.to_pandas()) == 3
