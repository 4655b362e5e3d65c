"""Disks that are full, and a Spark that stops: a clear error, and no batch is lost."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import uuid
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

pytest.importorskip("pyspark")

from pyspark.sql import SparkSession

from batchmill.spark import PipelineError
from batchmill.spark.runtime.checkpoint import Checkpoint
from tests.kit.files import fill, small_disk
from tests.kit.jvm import java_missing, jvm_options
from tests.kit.pipelines import (
    SMALL,
    counted,
    differences,
    endpoint_events,
    expected_of,
    pipeline,
    stored,
    with_column,
    write_segment,
    write_table,
)
from tests.kit.spark import span

RELATIONS = "rel = from(ServiceRelation.*).cpm();"


@pytest.mark.system
def test_no_room_for_waiting_spans(spark: SparkSession, tmp_path: Path) -> None:
    """It says where to make room; with room there, the same batch goes in."""
    spans = [span(uuid.uuid4().hex, "CLIENT", trace_id=uuid.uuid4().hex) for _ in range(6000)]
    write_segment(tmp_path / "spool", "Span", spans)
    with small_disk(tmp_path / "checkpoint", 4096) as small:
        left = fill(small, leave=200_000)
        with pipeline(spark, tmp_path, oal=RELATIONS) as running:
            with pytest.raises(PipelineError, match=f"a disk is full: make room in {small}/state "):
                running.run_available()
            assert counted(running.store, "rows") == {}
            left.unlink()
            running.run_available()
            assert counted(running.store, "rows") == {("Span", ""): 6000}


def test_no_room_for_rows_that_do_not_fit(spark: SparkSession, tmp_path: Path) -> None:
    """The quarantine is full: nothing of the batch goes in until there is room."""
    rows = endpoint_events(20)
    times = [None, *(row["time"] for row in rows[1:])]
    kind = pa.timestamp("us", tz="UTC")
    write_table(tmp_path / "spool", "odd", with_column(rows, "time", times, kind))
    with (
        small_disk(tmp_path / "aside") as small,
        pipeline(spark, tmp_path, oal=SMALL, quarantine=small) as running,
    ):
        left = fill(small)
        with pytest.raises(PipelineError, match=f"a disk is full: make room in {small} "):
            running.run_available()
        assert stored(running.store) == {}
        left.unlink()
        running.run_available()
        assert counted(running.store, "quarantined") == {("Endpoint", "no time"): 1}
        assert differences(stored(running.store), expected_of(rows[1:])) == []


def test_no_room_for_the_checkpoint(spark: SparkSession, tmp_path: Path) -> None:
    """At the first start, and later, when a batch cannot be planned."""
    rows = endpoint_events(20)
    write_segment(tmp_path / "spool", "Endpoint", rows[:10])
    with (
        small_disk(tmp_path / "checkpoint") as small,
        pipeline(spark, tmp_path, oal=SMALL) as running,
    ):
        full = f"a disk is full: make room in {small}"
        left = fill(small)
        with pytest.raises(PipelineError, match=full):
            running.run_available()
        left.unlink()
        running.run_available()
        left = fill(small)
        write_segment(tmp_path / "spool", "Endpoint", rows[10:], "1", 1)
        with pytest.raises(PipelineError, match=full):
            running.run_available()
        left.unlink()
        running.run_available()
        assert differences(stored(running.store), expected_of(rows)) == []


# With a JVM of its own: its local folder is a small disk, and at the end its context is stopped.
_DRIVER = """
import json, sys, time
from pathlib import Path
from batchmill.spark import Pipeline, PipelineError
from tests.kit.files import resize
from tests.kit.pipelines import SMALL, endpoint_events, write_segment

folder = Path(sys.argv[1])
stop = []

def clock():
    if stop:
        running.spark.sparkContext.stop()
    return time.time()

def run():
    try:
        return [batch.number for batch in running.run_available()]
    except BaseException as error:
        return f"{type(error).__name__}: {error}"[:500]

running = Pipeline(
    oal=SMALL, spool=folder / "spool", store=f"sqlite:///{folder}/metrics.db",
    checkpoint=folder / "checkpoint", master="local[1]", clock=clock,
    spark_conf={"spark.local.dir": str(folder / "local")},
)
running.spark.sparkContext.setLogLevel("OFF")
outcomes = [run()]
resize(folder / "local", 100_000)
outcomes.append(run())
write_segment(folder / "spool", "Endpoint", endpoint_events(10), "1", 1)
stop.append(True)
outcomes.append(run())
print(json.dumps(outcomes), flush=True)
import os
os._exit(0)
"""


@pytest.mark.system
def test_no_room_to_shuffle_and_a_spark_that_stops_lose_no_batch(tmp_path: Path) -> None:
    """Neither is a segment's fault: nothing is quarantined, nothing is committed."""
    if (missing := java_missing()) is not None:
        pytest.skip(missing)
    rows = 20_000
    table: dict[str, Any] = {
        "time": pa.array([endpoint_events(1)[0]["time"]] * rows, pa.timestamp("us", "UTC")),
        "name": [uuid.uuid4().hex for _ in range(rows)],
        "serviceName": ["shop"] * rows,
        "serviceLayer": ["GENERAL"] * rows,
        "latency": pa.array([7] * rows, pa.int32()),
    }
    write_table(tmp_path / "spool", "0", pa.table(table))
    with small_disk(tmp_path / "local", 512) as small:
        done = subprocess.run(
            [sys.executable, "-c", _DRIVER, str(tmp_path)],
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
            env={**os.environ, "SPARK_SUBMIT_OPTS": jvm_options(), "SPARK_LOCAL_IP": "127.0.0.1"},
        )
    assert done.stdout, done.stderr[-3000:]
    full, went_on, stopped = json.loads(done.stdout.splitlines()[-1])
    assert full.startswith(f"PipelineError: a disk is full: make room in {small} ")
    assert went_on == [0]
    assert isinstance(stopped, str), stopped
    assert not (tmp_path / "spool-quarantine").exists()
    assert Checkpoint(tmp_path / "checkpoint").marks().done == 0
