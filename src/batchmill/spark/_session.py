"""The Spark session that a pipeline runs on."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
import zipfile
from collections.abc import Mapping
from pathlib import Path

from pyspark.sql import SparkSession

import batchmill
from batchmill.spark._errors import MissingSparkError

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


def build_session(
    master: str = "local[*]", *, conf: Mapping[str, str] | None = None
) -> SparkSession:
    """A session with the settings that the pipeline needs, on ``master``.

    ``conf`` adds to the settings, or replaces them. On a cluster, batchmill itself is sent to the
    executors, so that nothing has to be installed there. A session that runs already in this
    process is used as it is, as far as its settings cannot be changed any more.
    """
    _find_java()
    # Python workers must be this very interpreter.
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    os.environ.setdefault("PYSPARK_DRIVER_PYTHON", sys.executable)
    local = master.startswith("local")
    settings = dict(SETTINGS)
    log4j = Path(__file__).with_name("log4j2.properties")
    settings["spark.driver.extraJavaOptions"] = f"-Dlog4j2.configurationFile={log4j.as_uri()}"
    if local:
        settings["spark.driver.memory"] = _local_memory()
        # A name that resolves is not to be counted on, on a laptop or in a container.
        settings["spark.driver.host"] = "127.0.0.1"
        settings["spark.driver.bindAddress"] = "127.0.0.1"
    settings |= conf or {}
    builder = SparkSession.builder.appName("batchmill").master(master)
    for key, value in settings.items():
        builder = builder.config(key, value)
    session = builder.getOrCreate()
    if not local:
        session.sparkContext.addPyFile(str(_package_zip()))
    return session


def prepare(session: SparkSession) -> SparkSession:
    """A session of the user's own, with the settings that results depend on; the rest is kept."""
    session = session.newSession()
    for key in SETTINGS:
        if key.startswith("spark.sql.") and session.conf.isModifiable(key):
            session.conf.set(key, SETTINGS[key])
    return session


def _find_java() -> None:
    """Spark's own word for a missing Java is a stack trace."""
    home = os.environ.get("JAVA_HOME")
    if home:
        if not Path(home, "bin", "java").exists():
            raise MissingSparkError(f"JAVA_HOME={home} has no bin/java")
    elif shutil.which("java") is None:
        raise MissingSparkError("Java is not on the PATH, and JAVA_HOME is not set")


def _local_memory() -> str:
    """A quarter of the machine's memory, but 1 GiB at least and 8 at most."""
    try:
        total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError):
        return "1g"
    return f"{max(1024, min(8192, total // 4 // 2**20))}m"


def _package_zip() -> Path:
    """The package as a zip archive that Python imports from."""
    root = Path(batchmill.__file__).parent
    target = Path(tempfile.mkdtemp(prefix="batchmill-")) / "batchmill.zip"
    with zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED) as archive:
        for file in sorted(root.rglob("*")):
            if file.is_file() and "__pycache__" not in file.parts:
                archive.write(file, Path("batchmill") / file.relative_to(root))
    return target
