"""The Java that Spark tests run on: whether it is there, and how to start it quickly.

``python -m tests.kit.jvm FILE`` makes the class archive that ``jvm_options`` names; see Makefile.
"""

from __future__ import annotations

import functools
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

OLDEST_JAVA = 17
ARCHIVE = "BATCHMILL_SPARK_ARCHIVE"

# A test's Spark is young and small: one thread that collects, and no compiler for the long run.
QUICK = ("-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1", "-XX:ReservedCodeCacheSize=240m")


def jvm_options() -> str:
    """Options for the JVM of a driver that is to start quickly.

    They belong into the environment variable ``SPARK_SUBMIT_OPTS``, before a session starts: there
    they add to the options that the session sets itself, and no JVM but the driver's gets them.
    """
    archive = Path(os.environ.get(ARCHIVE) or Path(sys.prefix) / "spark.jsa")
    if not archive.is_file():
        return " ".join(QUICK)
    # A JVM that cannot use the archive (another Java made it) goes on without.
    return " ".join((*QUICK, f"-XX:SharedArchiveFile={archive.resolve()}", "-Xshare:auto", *_HUSH))


@functools.cache
def java_missing() -> str | None:
    """Why Spark cannot start here: a reason to skip a test. None: it can."""
    advice = f"Spark needs Java {OLDEST_JAVA} or newer (scripts/system-packages.sh java says more)"
    home = os.environ.get("JAVA_HOME")
    java = str(Path(home, "bin", "java")) if home else shutil.which("java")
    if java is None:
        return f"{advice}: there is none"
    try:
        told = subprocess.run(
            [java, "-version"], capture_output=True, text=True, timeout=60, check=True
        ).stderr
    except (OSError, subprocess.SubprocessError) as error:
        return f"{advice}: {error}"
    version = re.search(r'version "(\d+)', told)
    if version is None or int(version[1]) < OLDEST_JAVA:
        return f"{advice}: {java} is {told.splitlines()[0] if told else 'silent'}"
    return None


_HUSH = ("-Xlog:disable", "-Xlog:all=error:stderr")

# What a test's session does first, so that the classes for it are in the archive.
_WARM_UP = """
import sys, tempfile
from pyspark.sql import SparkSession, functions as F

session = (
    SparkSession.builder.master("local[2]")
    .config("spark.ui.enabled", "false")
    .config("spark.sql.shuffle.partitions", "1")
    .getOrCreate()
)
session.sparkContext.setLogLevel("ERROR")
numbers = session.range(100).withColumn("k", F.col("id") % 7)
with tempfile.TemporaryDirectory() as folder:
    numbers.write.parquet(f"{folder}/numbers")
    session.read.parquet(f"{folder}/numbers").createOrReplaceTempView("numbers")
    session.sql(
        "select k, count(*), sum(id), max_by(id, k), map_from_entries(collect_list(struct(id, k)))"
        " from numbers where id > 3 group by k order by k"
    ).toArrow()
    query = (
        session.readStream.schema("id long, k long")
        .parquet(f"{folder}/numbers")
        .writeStream.foreachBatch(lambda batch, _: batch.groupBy("k").count().toArrow())
        .option("checkpointLocation", f"{folder}/checkpoint")
        .trigger(availableNow=True)
        .start()
    )
    query.awaitTermination()
session.stop()
"""


def make_archive(archive: Path) -> None:
    """Run Spark once, and keep the classes it loaded in a file that later JVMs map."""
    fresh = archive.with_suffix(".new")
    fresh.unlink(missing_ok=True)
    options = " ".join((*QUICK, f"-XX:ArchiveClassesAtExit={fresh.resolve()}", *_HUSH))
    environment = {
        **os.environ,
        "PYSPARK_PYTHON": sys.executable,
        "SPARK_LOCAL_IP": "127.0.0.1",
        "SPARK_SUBMIT_OPTS": options,
    }
    # The JVM writes the file as it ends, which is after Python has: this waits for the end of the
    # output, which both of them hold.
    subprocess.run(
        [sys.executable, "-c", _WARM_UP],
        env=environment,
        capture_output=True,
        timeout=300,
        check=True,
    )
    fresh.replace(archive)


if __name__ == "__main__":
    make_archive(Path(sys.argv[1]))
