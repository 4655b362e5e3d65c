"""The Spark session that a pipeline runs on."""

from __future__ import annotations

import atexit
import contextlib
import functools
import logging
import os
import re
import shutil
import sys
import tempfile
import threading
import zipfile
from collections.abc import Iterable, Mapping
from pathlib import Path

from pyspark import SparkContext
from pyspark.sql import DataFrame, SparkSession

import batchmill
from batchmill.spark.runtime.java import find_java

log = logging.getLogger("batchmill.spark")

_lock = threading.Lock()
_tenants: dict[str, int] = {}
"""How many pipelines use a session that pipelines made, by its application's id."""

_JAVA_OPTIONS = ("JAVA_TOOL_OPTIONS", "JDK_JAVA_OPTIONS", "_JAVA_OPTIONS", "SPARK_SUBMIT_OPTS")
"""Where options of a JVM that Spark starts can come from."""
_LIMITS = (
    Path("/sys/fs/cgroup/memory.max"),
    Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"),
)
"""Where a container's own limit of memory stands, in both versions of cgroups."""

SETTINGS: Mapping[str, str] = {
    # Buckets, and what is read from files without a zone, are UTC.
    "spark.sql.session.timeZone": "UTC",
    # Whole numbers wrap as Java's do, a bad cast is null: one odd row must not stop the stream.
    "spark.sql.ansi.enabled": "false",
    # A file may have the columns `latency` and `LATENCY`.
    "spark.sql.caseSensitive": "true",
    # pandas writes nanoseconds, which Spark reads as plain numbers only.
    "spark.sql.legacy.parquet.nanosAsLong": "true",
    # The quarantine writes timestamps that everybody can read.
    "spark.sql.parquet.outputTimestampType": "TIMESTAMP_MICROS",
    # Tallies are collected as lists. Past 128 groups Spark would go over to sorting every row.
    "spark.sql.objectHashAggregate.sortBased.fallbackThreshold": "10000000",
    # A hundred metrics of one source are more columns than Spark compiles by default.
    "spark.sql.codegen.maxFields": "2000",
    # A batch of spans takes more than the hundred compiled classes that Spark keeps by default: all
    # would be compiled again, by Spark and by the JVM, in every batch.
    "spark.sql.codegen.cache.maxEntries": "10000",
    # The JVM leaves methods beyond 8,000 bytes of code uncompiled; Spark is to split them before.
    "spark.sql.codegen.hugeMethodLimit": "8000",
    "spark.sql.execution.arrow.maxRecordsPerBatch": "100000",
    "spark.driver.maxResultSize": "4g",
    # What the driver remembers of jobs and batches that are over is bounded, and small.
    "spark.sql.streaming.numRecentProgressUpdates": "20",
    "spark.sql.ui.retainedExecutions": "20",
    "spark.ui.retainedJobs": "50",
    "spark.ui.retainedStages": "50",
    "spark.ui.retainedTasks": "500",
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
}


class Lease:
    """A pipeline's session, until the pipeline is through with it.

    A session that pipelines made themselves ends with the last of them. Somebody else's goes on.
    """

    def __init__(self, session: SparkSession, application: str | None = None) -> None:
        self.session = session
        self._application = application
        """The id of an application that pipelines made."""

    def release(self) -> None:
        """Be through with it; may be called twice."""
        with _lock:
            application, self._application = self._application, None
            if application is None:
                return
            _tenants[application] -= 1
            if not _tenants[application]:
                del _tenants[application]
                if self.session.sparkContext._jsc is not None:  # nobody else has stopped it
                    self.session.stop()


def lease(
    master: str, *, spark: SparkSession | None = None, conf: Mapping[str, str] | None = None
) -> Lease:
    """A session for a pipeline: a copy of ``spark``, or of the one that runs, or a new one."""
    if spark is not None:
        return Lease(prepare(spark, conf))
    with _lock:
        running = _running()
        if running is None:
            session = _start(master, conf)
            application = session.sparkContext.applicationId
            _tenants[application] = 1
            return Lease(session, application)
        context = running.sparkContext
        if context.master != master:
            log.warning(
                "this process has a Spark session on %s already, so the pipeline runs there and "
                "not on %s: stop that session first if this is not meant",
                context.master,
                master,
            )
        session = prepare(running, conf)
        application = context.applicationId
        if application not in _tenants:
            return Lease(session)
        _tenants[application] += 1
        return Lease(session, application)


def build_session(
    master: str = "local[*]", *, conf: Mapping[str, str] | None = None
) -> SparkSession:
    """A session with the settings that the pipeline needs, on ``master``; yours to stop.

    ``conf`` adds to the settings, or replaces them. On a cluster, batchmill itself is sent to the
    executors, so that nothing has to be installed there. Where a session runs already in this
    process, the answer is a copy of it with these settings, as far as they can still be changed;
    stopping the copy stops both.
    """
    running = _running()
    return _start(master, conf) if running is None else prepare(running, conf)


def prepare(session: SparkSession, conf: Mapping[str, str] | None = None) -> SparkSession:
    """A session of the user's own, with the settings that results depend on; the rest is kept."""
    session = session.newSession()
    for key, value in SETTINGS.items():
        if key.startswith("spark.sql.") and session.conf.isModifiable(key):
            session.conf.set(key, value)
    for key, value in (conf or {}).items():
        if session.conf.isModifiable(key):
            session.conf.set(key, value)
        elif session.conf.get(key, None) != value:
            log.warning("%s cannot be changed: the Spark session runs already", key)
    return session


def copy_of(session: SparkSession) -> SparkSession:
    """The same session with settings of its own, at first the same."""
    return SparkSession(session.sparkContext, session._jsparkSession.cloneSession())


def rebind(frame: DataFrame, session: SparkSession) -> DataFrame:
    """The same rows for use in ``session``, by whose settings all that is added to it goes.

    What the frame itself does was resolved with its own session's settings, and stays so.
    """
    if frame.sparkSession is session:
        return frame
    jvm = session.sparkContext._jvm
    assert jvm is not None
    plan = frame._jdf.queryExecution().analyzed()
    rows = jvm.org.apache.spark.sql.classic.Dataset.ofRows(session._jsparkSession, plan)
    return DataFrame(rows, session)


def _running() -> SparkSession | None:
    """The session that there is in this process, whoever made it."""
    context = SparkContext._active_spark_context
    if context is None or context._jsc is None or context._jsc.sc().isStopped():
        return None
    session = SparkSession._instantiatedSession
    if session is None or session.sparkContext is not context:
        session = SparkSession(context)
    return session


def _start(master: str, conf: Mapping[str, str] | None) -> SparkSession:
    find_java()
    # Python workers must be this very interpreter.
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    os.environ.setdefault("PYSPARK_DRIVER_PYTHON", sys.executable)
    local = master.startswith("local")
    settings = dict(SETTINGS)
    log4j = Path(__file__).parents[1] / "log4j2.properties"
    options = [f"-Dlog4j2.configurationFile={log4j.as_uri()}"]
    if local:
        settings["spark.driver.memory"] = _local_memory()
        options += _collector(os.environ)
        # A name that resolves is not to be counted on, on a laptop or in a container.
        settings["spark.driver.host"] = "127.0.0.1"
        settings["spark.driver.bindAddress"] = "127.0.0.1"
    settings["spark.driver.extraJavaOptions"] = " ".join(options)
    settings |= conf or {}
    builder = SparkSession.builder.appName("batchmill").master(master)
    for key, value in settings.items():
        builder = builder.config(key, value)
    session = builder.getOrCreate()
    if not local:
        session.sparkContext.addPyFile(str(_package_zip()))
    return session


def _collector(environ: Mapping[str, str]) -> list[str]:
    """The garbage collector made for throughput, with half of the memory for what is young: a tenth
    of a large batch's time less. Nothing if somebody chose one: the JVM refuses two."""
    chosen = " ".join(environ.get(each, "") for each in _JAVA_OPTIONS)
    if re.search(r"-XX:\+Use\w+GC", chosen):
        return []
    return ["-XX:+UseParallelGC", "-XX:NewRatio=1"]


def _local_memory() -> str:
    """A quarter of the memory that there is, but 1 GiB at least and 8 at most."""
    return f"{max(1024, min(8192, _memory(_LIMITS) // 4 // 2**20))}m"


def _memory(limits: Iterable[Path]) -> int:
    """The machine's memory, or what a container has of it; 0: nobody knows."""
    try:
        found = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    except (ValueError, OSError):
        found = []
    for each in limits:
        with contextlib.suppress(OSError, ValueError):  # not a container; or "max": no limit
            found.append(int(each.read_text()))
    return min(found, default=0)


@functools.cache
def _package_zip() -> Path:
    """The package as a zip archive that Python imports from; executors may ask for it until the
    end of this process, and then it is removed."""
    root = Path(batchmill.__file__).parent
    folder = tempfile.mkdtemp(prefix="batchmill-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    target = Path(folder) / "batchmill.zip"
    with zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED) as archive:
        for file in sorted(root.rglob("*")):
            if file.is_file() and "__pycache__" not in file.parts:
                archive.write(file, Path("batchmill") / file.relative_to(root))
    return target
