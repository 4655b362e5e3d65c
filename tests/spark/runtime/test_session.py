"""The Spark session of a pipeline: who stops it, and which settings apply."""

from __future__ import annotations

import getpass
import logging
import os
import signal
import subprocess
import sys
import tempfile
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from py4j.protocol import Py4JJavaError
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession
from pyspark.sql.functions import udf

from batchmill.spark import Pipeline
from batchmill.spark.failures import is_out_of_memory
from batchmill.spark.runtime import session as sessions
from batchmill.spark.runtime.session import (
    Lease,
    _collector,
    _memory,
    _temporary_option,
    copy_of,
    jvm_has_ended,
    prepare,
    rows_for,
)
from tests.kit.files import ROOT
from tests.kit.jvm import jvm_options
from tests.kit.pipelines import SMALL, counted, endpoint_events, pipeline, write_segment

TWO_PIPELINES = """
import sys
from pathlib import Path
from batchmill.spark import Pipeline
from batchmill.spark.runtime.session import _collector
from pyspark import SparkContext
from pyspark.sql import SparkSession

folder = Path(sys.argv[1])
first, second = (
    Pipeline(
        oal="c = from(Endpoint.*).count();",
        spool=folder / "spool",
        store=f"sqlite:///{folder}/{name}.db",
        checkpoint=folder / name,
        master="local[1]",
    )
    for name in ("first", "second")
)
first.stop()
first.stop()
print(sum(batch.stats.rows for batch in second.run_available()))
print(second.spark.sparkContext._jsc.hadoopConfiguration().get("fs.s3a.buffer.dir"))
second.stop()
print(SparkContext._active_spark_context is None)
theirs = SparkSession.builder.master("local[1]").getOrCreate()
theirs.conf.set("spark.sql.caseSensitive", "false")
with Pipeline(
    oal="c = from(Endpoint.*).count();",
    spool=folder / "spool",
    store=f"sqlite:///{folder}/third.db",
    checkpoint=folder / "third",
    master="local[1]",
) as third:
    print(sum(batch.stats.rows for batch in third.run_available()))
print(theirs.range(3).count(), theirs.conf.get("spark.sql.caseSensitive"))
theirs.stop()
"""


@pytest.mark.system
def test_pipelines_of_one_process_share_a_session(tmp_path: Path, spark: SparkSession) -> None:
    """One stops, the other continues; the last one ends the session, unless others started it."""
    rows = endpoint_events(20, start=datetime(2020, 1, 1, tzinfo=UTC))
    write_segment(tmp_path / "spool", "Endpoint", rows)
    temporary = tmp_path / "its files"
    temporary.mkdir()
    done = subprocess.run(
        [sys.executable, "-c", TWO_PIPELINES, str(tmp_path)],
        cwd=ROOT,
        env={
            **os.environ,
            "SPARK_SUBMIT_OPTS": jvm_options(),
            "SPARK_LOCAL_IP": "127.0.0.1",
            "TMPDIR": str(temporary),
        },
        capture_output=True,
        text=True,
        timeout=250,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    buffers = f"{temporary}/hadoop-{getpass.getuser()}/s3a"
    assert done.stdout.split("\n") == ["20", buffers, "True", "20", "3 false", ""]


def test_a_session_that_runs_already_is_nobody_elses_to_change(
    spark: SparkSession, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Found, not passed: the pipeline uses a copy, says so if it is elsewhere, and leaves it."""
    before = spark.conf.get("spark.sql.caseSensitive")
    with caplog.at_level(logging.WARNING, "batchmill.spark"):
        running = Pipeline(
            oal=SMALL,
            spool=tmp_path / "spool",
            store=f"sqlite:///{tmp_path}/metrics.db",
            checkpoint=tmp_path / "checkpoint",
            master="local[7]",
            spark_conf={"spark.driver.memory": "7g", "spark.sql.shuffle.partitions": "3"},
        )
    log = caplog.text
    assert running.spark.conf.get("spark.sql.caseSensitive") == "true"
    assert running.spark.conf.get("spark.sql.shuffle.partitions") == "3"
    running.stop()
    assert "not on local[7]" in log
    assert "spark.driver.memory cannot be changed" in log
    assert spark.conf.get("spark.sql.caseSensitive") == before
    assert spark.range(3).count() == 3


class EndingSession:
    """A session whose JVM answers a few times, then not any more; a stop fails."""

    def __init__(self, answers: int) -> None:
        self._answers = answers
        self.sparkContext = self

    @property
    def defaultParallelism(self) -> int:  # noqa: N802 - Spark's name
        """As a context has it."""
        self._answers -= 1
        if self._answers < 0:
            raise ConnectionRefusedError
        return 1

    def stop(self) -> Any:
        """What Spark's own does without a JVM."""
        raise ConnectionRefusedError


@pytest.mark.parametrize(("answers", "raises"), [(0, False), (1, False), (2, True)])
def test_a_jvm_that_ends_before_its_session_is_no_error(
    monkeypatch: pytest.MonkeyPatch, answers: int, raises: bool
) -> None:
    """It may have answered a moment before; what stopped the pipeline is what is reported."""
    monkeypatch.setattr(sessions, "_users", {"ours": 1})
    lease = Lease(cast("SparkSession", EndingSession(answers)), "ours")
    if raises:
        with pytest.raises(ConnectionRefusedError):
            lease.release()
    else:
        lease.release()
    lease.release()
    assert sessions._users == {}


class StoppedContext:
    """A context that was stopped in its JVM, whose process may be about to end."""

    def __init__(self, process: subprocess.Popen[bytes] | None) -> None:
        self._gateway = SimpleNamespace(proc=process)

    @property
    def defaultParallelism(self) -> int:  # noqa: N802 - Spark's name
        """As a context has it."""
        raise PySparkException("Cannot call methods on a stopped SparkContext")


def test_a_jvm_that_is_ending_still_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its context is stopped by then; that of an application that has stopped it itself, too."""

    def has_ended(process: subprocess.Popen[bytes] | None) -> bool:
        context = StoppedContext(process)
        return jvm_has_ended(cast("SparkSession", SimpleNamespace(sparkContext=context)))

    with subprocess.Popen(["cat"], stdin=subprocess.PIPE) as goes_on:
        monkeypatch.setattr(sessions, "_END_S", 0.01)
        assert not has_ended(goes_on)
    monkeypatch.undo()
    with subprocess.Popen(["cat"], stdin=subprocess.DEVNULL) as ends:
        assert has_ended(ends)
    assert not has_ended(None)


def test_rows_of_a_frame_are_counted_by_our_settings(spark: SparkSession, tmp_path: Path) -> None:
    """A session in another time zone, strict about numbers: buckets stay, bad rows are quarantined.

    What the frame itself does keeps its own session's meaning.
    """
    theirs = spark.newSession()
    theirs.conf.set("spark.sql.session.timeZone", "America/New_York")
    theirs.conf.set("spark.sql.ansi.enabled", "true")
    rows = theirs.sql(
        "SELECT TIMESTAMP_NTZ'2026-03-01 10:00:30' AS time, 'shop' AS serviceName, "
        "'GENERAL' AS serviceLayer, '/a' AS name, id * 5000000000 AS latency, true AS status, "
        "DATE_FORMAT(TIMESTAMP_SECONDS(0), 'HH') AS rpcStatusCode FROM RANGE(2)"
    )
    oal = SMALL + "hours = from(Endpoint.*).labelCount(rpcStatusCode);"
    with pipeline(spark, tmp_path, oal=oal) as running:
        (report,) = running.backfill(rows, source="Endpoint")
        assert (report.stats.rows, report.stats.quarantined_rows) == (1, 1)
        ((key, n),) = counted(running.store, "quarantined").items()
        assert (key, n) == (("Endpoint", "latency: too large for an int"), 1)
        (value,) = running.store.values("ep_cpm")
        assert value.bucket == 202603011000
        (value,) = running.store.values("hours")
        assert value.value == {"{n=19}": 1}
    assert theirs.conf.get("spark.sql.ansi.enabled") == "true"


def test_a_copy_has_the_settings_of_its_session(spark: SparkSession) -> None:
    """Those set since it was made, and those that it was started with; then each has its own."""
    name = "spark.sql.shuffle.partitions"
    session = prepare(spark)
    session.conf.set(name, "7")
    copy = copy_of(session)
    assert copy.conf.get(name) == "7"
    assert copy.conf.get("spark.driver.memory") == spark.conf.get("spark.driver.memory")
    copy.conf.set(name, "9")
    assert (session.conf.get(name), spark.conf.get(name)) == ("7", "2")


def test_the_rows_of_a_batch_follow_the_heap(spark: SparkSession) -> None:
    """That of the JVM that shuffles them: one row for each 512 bytes of it."""
    jvm = spark.sparkContext._jvm
    assert jvm is not None
    heap = int(jvm.java.lang.Runtime.getRuntime().maxMemory())
    assert rows_for(spark) == heap // 512 > 100_000


def test_a_worker_that_was_killed_may_have_had_too_little_memory(spark: SparkSession) -> None:
    """The system kills the largest process without a word; a wrong column is another error."""

    def die(number):  # type: ignore[no-untyped-def]  # with types Spark takes it for another kind
        os.kill(os.getpid(), signal.SIGKILL)
        return number

    with pytest.raises((PySparkException, Py4JJavaError)) as killed:
        spark.range(1).select(udf(die, "long")("id")).collect()
    assert is_out_of_memory(killed.value)
    with pytest.raises(PySparkException) as wrong:
        spark.range(1).select("nothing").collect()
    assert not is_out_of_memory(wrong.value)


@pytest.mark.parametrize("variable", ["JAVA_TOOL_OPTIONS", "JDK_JAVA_OPTIONS", "SPARK_SUBMIT_OPTS"])
def test_a_garbage_collector_that_somebody_chose_stays(variable: str) -> None:
    """A JVM with two collectors refuses to start."""
    assert "-XX:+UseParallelGC" in _collector({})
    assert "-XX:+UseParallelGC" in _collector({variable: "-Xss4m -XX:+UseStringDeduplication"})
    assert _collector({variable: "-Xss4m -XX:+UseZGC"}) == []


def test_temporary_files_of_the_jvm_are_where_those_of_python_are(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whatever the folder's name is: Spark divides options at spaces that are not in quotes."""
    monkeypatch.setattr(tempfile, "tempdir", r'/a "b\ c')
    assert _temporary_option() == r'"-Djava.io.tmpdir=/a \"b\\ c"'


def test_a_container_has_less_memory_than_its_machine(tmp_path: Path) -> None:
    """Its own limit counts where there is one; "max" and a file that is not there are none."""
    limits = [tmp_path / name for name in ("limit", "none", "missing")]
    limits[1].write_text("max\n")
    whole = _memory(limits)
    limits[0].write_text(f"{2**30}\n")
    assert (_memory(limits), whole > 2**30) == (2**30, True)
