"""Java in tests: whether it is there, how to start it quickly, and the jars for Kafka and Hadoop.

``python -m tests.kit.jvm archive FILE`` makes the class archive that ``jvm_options`` names;
``python -m tests.kit.jvm jars`` gets the jars with Maven and keeps them outside the repository, or
says why it cannot (with ``--there`` it only looks). See the Makefile.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import tempfile
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
        output = subprocess.run(
            [java, "-version"], capture_output=True, text=True, timeout=60, check=True
        ).stderr
    except (OSError, subprocess.SubprocessError) as error:
        return f"{advice}: {error}"
    version = re.search(r'version "(\d+)', output)
    if version is None or int(version[1]) < OLDEST_JAVA:
        return f"{advice}: {java} is {output.splitlines()[0] if output else 'silent'}"
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


PROFILES = {"broker": "kafka", "iceberg": "kafka", "hdfs": "hadoop", "s3": "hadoop"}
"""The sets of jars, each with the name of its pom."""
RESOLVE_S = 900
_HINT = "scripts/system-packages.sh maven says how to get it"


def jar_folder(profile: str) -> Path:
    """Where the jars of a profile are, or will be: another folder for every version of the pom."""
    content = _pom(profile).read_bytes() + "".join(_versions(profile)).encode()
    version = hashlib.sha256(content).hexdigest()[:16]
    return cache_folder() / "jars" / version / profile


def cache_folder() -> Path:
    """Where what tests download is kept, outside the repository."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "batchmill"


def _pom(profile: str) -> Path:
    return Path(__file__).resolve().with_name(f"{PROFILES[profile]}-pom.xml")


def _versions(profile: str) -> list[str]:
    """Options for Maven: what Spark loads of Hadoop is of the version that PySpark has."""
    if profile != "s3":
        return []
    import pyspark

    client_jars = Path(pyspark.__file__).parent.glob("jars/hadoop-client-api-*.jar")
    return [f"-Dhadoop.version={jar.stem.rsplit('-', 1)[-1]}" for jar in client_jars]


def jars(profile: str) -> list[Path]:
    """The jars of a profile; only after :func:`jars_missing` said that they are there."""
    return sorted(jar_folder(profile).glob("*.jar"))


def iceberg_jars() -> str:
    """Iceberg, as ``spark.jars`` takes it; empty if it is not there, or for another PySpark."""
    is_for = importlib.metadata.version("pyspark").startswith("4.1.")
    return ",".join(str(jar) for jar in jars("iceberg")) if is_for else ""


@functools.cache
def jars_missing(profile: str) -> str | None:
    """Why there are no jars, after an attempt to get them: a reason to skip. None: there are."""
    try:
        resolve_jars(profile)
    except RuntimeError as error:
        return str(error)
    return None


def resolve_jars(profile: str) -> Path:
    """Have the jars in their folder; raises RuntimeError with what to do if that is impossible."""
    place = jar_folder(profile)
    if place.is_dir():
        return place
    maven = shutil.which("mvn")
    if maven is None:
        raise RuntimeError(
            f"the jars for the tests with {PROFILES[profile]} ({profile}) are not in {place}, "
            f"and Maven is not here to get them: {_HINT}"
        )
    place.parent.mkdir(parents=True, exist_ok=True)
    fresh = Path(tempfile.mkdtemp(dir=place.parent, prefix=".fresh-"))
    try:
        _copy(maven, profile, fresh)
        try:
            fresh.rename(place)
        except OSError:  # somebody else was quicker: theirs are the same
            if not place.is_dir():
                raise
    finally:
        shutil.rmtree(fresh, ignore_errors=True)
    return place


def _copy(maven: str, profile: str, into: Path) -> None:
    command = [
        *(maven, "--quiet", "--batch-mode", "--file", str(_pom(profile)), *_versions(profile)),
        f"--activate-profiles={profile}",
        *("dependency:copy-dependencies", "-DincludeScope=runtime", f"-DoutputDirectory={into}"),
    ]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=RESOLVE_S, check=False
        )
    except subprocess.TimeoutExpired:
        raise RuntimeError(
            f"Maven Central did not give the jars ({profile}) within {RESOLVE_S} s: try again later"
        ) from None
    if done.returncode or not any(into.glob("*.jar")):
        said = (done.stdout + done.stderr).strip().splitlines()
        raise RuntimeError(
            f"the jars ({profile}) could not be had from Maven Central: can this machine "
            f"reach it? Maven said: {' '.join(said[:3])[:600] or 'nothing'}"
        )


def main(arguments: list[str]) -> int:
    """The command: ``archive FILE``, or ``jars [--there]``."""
    if arguments[0] == "archive":
        make_archive(Path(arguments[1]))
        return 0
    if "--there" in arguments:
        return 0 if all(jar_folder(profile).is_dir() for profile in PROFILES) else 1
    missing = [why for profile in PROFILES if (why := jars_missing(profile)) is not None]
    sys.stderr.writelines(f"{why}\n" for why in missing)
    return 1 if missing else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
