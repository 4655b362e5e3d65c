"""A batch reads each of its segments once and is one Spark job, whatever is made of it."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path

import pytest

pytest.importorskip("pyspark")

from pyspark.sql import SparkSession

from batchmill.spark.input.spool import SpoolInput
from tests.kit.pipelines import (
    OF_SPANS,
    SMALL,
    START,
    counted,
    endpoint_events,
    pipeline,
    write_segment,
)
from tests.kit.threads import WAIT_S
from tests.oracle.catalog import Row
from tests.oracle.generate import random_spans
from tests.spark.kit import JobLog, OpenLog

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != "linux", reason="inotify counts the reads"),
]

SPANS = random_spans(5, 240, start=START, days=1)
OAL = f"{OF_SPANS} store = from(DatabaseAccess.latency).max(); {SMALL}"


@pytest.mark.parametrize("dedup_s", [None, 600.0], ids=["plain", "dedup"])
def test_a_batch_reads_each_segment_once(
    spark: SparkSession, tmp_path: Path, dedup_s: float | None
) -> None:
    """With several sources, TopN and files of earlier batches; with duplicates and without."""
    spool = tmp_path / "spool"
    again = 40
    batches: list[list[Row]] = [SPANS[:100], [*SPANS[100:], *SPANS[:again]]]
    (spool / "Span").mkdir(parents=True)
    with (
        OpenLog(spool / "Span") as log,
        pipeline(spark, tmp_path, oal=OAL, dedup_s=dedup_s) as running,
    ):
        for number, spans in enumerate(batches):
            names = [f"{number}-{part}" for part in range(3)]
            for part, name in enumerate(names):
                write_segment(spool, "Span", spans[part::3], name, number)
            write_segment(spool, "Endpoint", endpoint_events(20), f"{number}", number)
            jobs = JobLog(spark)
            log.opened()  # those of the writer
            (report,) = running.run_available()
            assert report.stats.segments == 4
            assert log.opened() == {f"{name}.parquet": 1 for name in names}
            assert jobs.count() == 1
        dropped = again if dedup_s else 0
        assert counted(running.store, "rows")["Span", ""] == len(SPANS) + again - dropped


def test_a_batch_of_events_reads_each_segment_once(spark: SparkSession, tmp_path: Path) -> None:
    """Without spans it has a step less."""
    folder = tmp_path / "spool" / "Endpoint"
    folder.mkdir(parents=True)
    with OpenLog(folder) as log, pipeline(spark, tmp_path, oal=SMALL) as running:
        for number in range(3):
            write_segment(tmp_path / "spool", "Endpoint", endpoint_events(20), f"{number}")
        jobs = JobLog(spark)
        log.opened()
        running.run_available()
        assert log.opened() == {f"{number}.parquet": 1 for number in range(3)}
        assert jobs.count() == 1


def test_a_look_that_sees_nothing_to_do_is_no_job(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Though spans wait for a partner, and ids of counted ones are kept."""
    looks = threading.Semaphore(0)
    look = SpoolInput.look

    def noted(source: SpoolInput, *, patient: bool) -> None:
        look(source, patient=patient)
        looks.release()

    monkeypatch.setattr(SpoolInput, "look", noted)
    write_segment(tmp_path / "spool", "Span", SPANS[:100])
    with pipeline(spark, tmp_path, oal=OAL, dedup_s=600.0) as running:
        running.run_available()
        assert looks.acquire(timeout=WAIT_S)
        assert list((tmp_path / "checkpoint" / "state").iterdir())
        jobs = JobLog(spark)
        running.start(0.01)
        for _ in range(3):  # what follows a look has ended when the next one begins
            assert looks.acquire(timeout=WAIT_S)
        assert jobs.count() == 0


def test_a_second_read_would_be_noticed(tmp_path: Path) -> None:
    """By other processes, too, and one right after the other."""
    path = write_segment(tmp_path, "Span", SPANS[:2])
    with OpenLog(path.parent) as log:
        for _ in range(2):
            subprocess.run(["cat", path], check=True, capture_output=True)
        assert log.opened() == {path.name: 2}
        path.read_bytes()
        assert log.opened() == {path.name: 1}
