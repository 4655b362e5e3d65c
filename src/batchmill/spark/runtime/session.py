"""Starts, shares and stops the Spark session that pipelines run on."""

from __future__ import annotations

import atexit
import contextlib
import functools
import logging
import os
import py_compile
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import zipfile
from collections.abc import Iterable, Mapping
from pathlib import Path

from py4j.protocol import Py4JError, Py4JJavaError
from pyspark import SparkContext
from pyspark.errors import PySparkException, PySparkRuntimeError
from pyspark.sql import SparkSession

import batchmill
from batchmill.spark.runtime.java import find_java

log = logging.getLogger("batchmill.spark")

_lock = threading.Lock()
_users: dict[str, int] = {}
"""How many pipelines use a session that a pipeline started, by its application's id."""

_JAVA_OPTIONS = ("JAVA_TOOL_OPTIONS", "JDK_JAVA_OPTIONS", "_JAVA_OPTIONS", "SPARK_SUBMIT_OPTS")
"""The environment variables with options for the JVM that Spark starts."""
_LIMITS = (
    Path("/sys/fs/cgroup/memory.max"),
    Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"),
)
"""The files with a container's memory limit, in both versions of cgroups."""
_HEAP_PER_ROW = 512
"""Bytes of heap that a row of a batch is given."""
_FEWEST_ROWS = 100_000
_END_S = 5.0
"""How long a JVM may take to end."""

SETTINGS: Mapping[str, str] = {
    # Buckets, and times in files that have no zone, are UTC.
    "spark.sql.session.timeZone": "UTC",
    # Whole numbers overflow as in Java, a bad cast is null: one odd row must not stop the stream.
    "spark.sql.ansi.enabled": "false",
    # A file may have the columns `latency` and `LATENCY`.
    "spark.sql.caseSensitive": "true",
    # The staged messages of a topic have timestamps that all readers understand.
    "spark.sql.parquet.outputTimestampType": "TIMESTAMP_MICROS",
    "spark.driver.maxResultSize": "4g",
    # What batches do not remove themselves goes when the JVM collects its garbage: by default, that
    # may take half an hour.
    "spark.cleaner.periodicGC.interval": "2min",
    # Bounds what the driver keeps of finished jobs and batches.
    "spark.sql.ui.retainedExecutions": "20",
    "spark.ui.retainedJobs": "50",
    "spark.ui.retainedStages": "50",
    "spark.ui.retainedTasks": "500",
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
}


class Lease:
    """A pipeline's right to use a session, until :meth:`release`.

    A session that a pipeline started is stopped with the last pipeline that uses it; one that was
    started by others is not.
    """

    def __init__(self, session: SparkSession, application: str | None = None) -> None:
        self.session = session
        self._application = application
        """The id of an application that a pipeline started."""

    def release(self) -> None:
        """Give the session up; may be called twice."""
        with _lock:
            application, self._application = self._application, None
            if application is None:
                return
            _users[application] -= 1
            if not _users[application]:
                del _users[application]
                if _is_alive(self.session.sparkContext):  # not stopped by others
                    try:
                        self.session.stop()
                    except (Py4JError, OSError):  # a JVM that was ending has answered a moment ago
                        if not jvm_has_ended(self.session):
                            raise


def lease(
    master: str, *, spark: SparkSession | None = None, conf: Mapping[str, str] | None = None
) -> Lease:
    """Get a session for a pipeline: a copy of ``spark``, or of the running one, or a new one.

    ``conf`` adds to the settings, or replaces them, as far as they can still be changed. On a
    cluster, a new session sends batchmill itself to the executors: nothing has to be installed
    there.
    """
    if spark is not None:
        return Lease(prepare(spark, conf))
    with _lock:
        running = _running()
        if running is None:
            session = _start(master, conf)
            application = session.sparkContext.applicationId
            _users[application] = 1
            return Lease(session, application)
        context = running.sparkContext
        if context.master != master:
            log.warning(
                "this process has a Spark session on %s already, so the pipeline runs there and "
                "not on %s: if you do not want that, stop that session first",
                context.master,
                master,
            )
        session = prepare(running, conf)
        application = context.applicationId
        if application not in _users:
            return Lease(session)
        _users[application] += 1
        return Lease(session, application)


def prepare(session: SparkSession, conf: Mapping[str, str] | None = None) -> SparkSession:
    """A copy of a session with the settings that results depend on; the others stay."""
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
    """A session on the same context with a copy of the settings."""
    copy = session.newSession()
    for key, value in session.conf.getAll.items():
        if copy.conf.isModifiable(key):
            copy.conf.set(key, value)
    return copy


def rows_for(session: SparkSession) -> int:
    """How many rows a batch may have, so that the JVM that shuffles them has enough memory."""
    context = session.sparkContext
    assert context._jvm is not None
    if str(context.master).startswith("local"):
        heap = int(context._jvm.java.lang.Runtime.getRuntime().maxMemory())
    else:
        size = context.getConf().get("spark.executor.memory", "1g")
        executors = max(1, int(context._jsc.sc().getExecutorMemoryStatus().size()) - 1)
        heap = executors * int(
            context._jvm.org.apache.spark.network.util.JavaUtils.byteStringAsBytes(size)
        )
    return max(_FEWEST_ROWS, heap // _HEAP_PER_ROW)


def _running() -> SparkSession | None:
    """The session of this process, whoever started it."""
    # All public ways to get the context start one if there is none.
    context = SparkContext._active_spark_context
    if context is None or not _is_alive(context):
        return None
    with contextlib.suppress(PySparkRuntimeError):  # there is none
        session = SparkSession.active()
        if session.sparkContext is context:
            return session
    return SparkSession(context)


def _is_alive(context: SparkContext) -> bool:
    try:
        return context.defaultParallelism > 0
    except (AttributeError, Py4JError, OSError):  # it was stopped, here or in the JVM
        return False


def jvm_has_ended(session: SparkSession) -> bool:
    """Whether the JVM of Spark has ended without being told to.

    One that runs out of memory answers while it is ending, with a stopped context, so it gets a
    moment. The JVM of a context that an application has stopped goes on.
    """
    context = session.sparkContext
    try:
        return context.defaultParallelism < 0
    except AttributeError:  # stopped in this process
        return False
    except (Py4JJavaError, PySparkException):  # stopped in the JVM
        process = getattr(context._gateway, "proc", None)  # None: others have started the JVM
        if process is None:
            return False
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_END_S)
        return process.poll() is not None
    except (Py4JError, OSError):
        return True


def _start(master: str, conf: Mapping[str, str] | None) -> SparkSession:
    find_java()
    # Python workers must be this very interpreter.
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    os.environ.setdefault("PYSPARK_DRIVER_PYTHON", sys.executable)
    local = master.startswith("local")
    settings = dict(SETTINGS)
    log4j = Path(__file__).parents[1] / "log4j2.properties"
    options = [f"-Dlog4j2.configurationFile={log4j.as_uri()}", _temporary_option()]
    if local:
        settings["spark.driver.memory"] = _local_memory()
        options += _collector(os.environ)
        # The host's name may not resolve, on a laptop or in a container.
        settings["spark.driver.host"] = "127.0.0.1"
        settings["spark.driver.bindAddress"] = "127.0.0.1"
        if "TMPDIR" in os.environ:
            # What S3A and others have on the disk until they send it.
            settings["spark.hadoop.hadoop.tmp.dir"] = "${java.io.tmpdir}/hadoop-${user.name}"
            settings["spark.hadoop.fs.s3a.buffer.dir"] = "${hadoop.tmp.dir}/s3a"
    settings["spark.driver.extraJavaOptions"] = " ".join(options)
    settings |= conf or {}
    builder = SparkSession.builder.appName("batchmill").master(master)
    for key, value in settings.items():
        builder = builder.config(key, value)
    session = builder.getOrCreate()
    if not local:
        session.sparkContext.addPyFile(str(_package_zip()))
    return session


def _temporary_option() -> str:
    """The JVM's option for temporary files where Python has its own: it does not read TMPDIR.

    Without ``spark.local.dir``, Spark has its local files there, too.
    """
    folder = tempfile.gettempdir().replace("\\", r"\\").replace('"', r"\"")
    return f'"-Djava.io.tmpdir={folder}"'


def _collector(environ: Mapping[str, str]) -> list[str]:
    """Options for the throughput garbage collector, with half of the memory for young objects:
    large batches take a tenth less time. None if one is set already: the JVM refuses two."""
    chosen = " ".join(environ.get(name, "") for name in _JAVA_OPTIONS)
    if re.search(r"-XX:\+Use\w+GC", chosen):
        return []
    return ["-XX:+UseParallelGC", "-XX:NewRatio=1"]


def _local_memory() -> str:
    """A quarter of the memory, but at least 1 GiB and at most 8 GiB."""
    return f"{max(1024, min(8192, _memory(_LIMITS) // 4 // 2**20))}m"


def _memory(limits: Iterable[Path]) -> int:
    """The bytes of memory of the machine, or of the container if that is less; 0: not known."""
    try:
        sizes = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    except (ValueError, OSError):
        sizes = []
    for file in limits:
        with contextlib.suppress(OSError, ValueError):  # not a container; or "max": no limit
            sizes.append(int(file.read_text()))
    return min(sizes, default=0)


@functools.cache
def _package_zip() -> Path:
    """The package as a zip archive that Python can import from, compiled.

    Python keeps no compiled modules beside an archive: every worker process would compile them
    again. Executors have the driver's minor version of Python. They may fetch the archive until
    this process ends; then it is removed.
    """
    root = Path(batchmill.__file__).parent
    folder = tempfile.mkdtemp(prefix="batchmill-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    target = Path(folder) / "batchmill.zip"
    with zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED) as archive:
        for file in sorted(root.rglob("*")):
            if not file.is_file() or {"__pycache__", "static"} & set(file.parts):
                continue
            name = Path("batchmill") / file.relative_to(root)
            if file.suffix == ".py":
                code = Path(folder) / "module.pyc"
                py_compile.compile(str(file), str(code), str(name), doraise=True)
                archive.write(code, name.with_suffix(".pyc"))
            else:
                archive.write(file, name)
    return target
