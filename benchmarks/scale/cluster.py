"""A Spark cluster of one-core executors and PostgreSQL servers, and the processor time of each."""

from __future__ import annotations

import contextlib
import gc
import os
import shutil
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pyspark.sql import SparkSession

from batchmill.spark.runtime.session import lease
from benchmarks.kit.machine import compiler_cpu_s, cpu_s, processes_below, tree_cpu_s
from benchmarks.pipeline.ours import jvm_process

if TYPE_CHECKING:
    from tests.kit.servers.postgres import Postgres
    from tests.system.cluster.spark_cluster import Cluster

DRIVER_PYTHON, DRIVER_JVM = "driver, Python", "driver, JVM"
EXECUTORS, POSTGRES = "executors", "PostgreSQL"
DRIVER_COMPILER, EXECUTOR_COMPILERS = "driver, JVM's compiler", "executors, JVM's compiler"
"""Apart: a JVM compiles what it runs often, less and less of it, and has done so after a while."""
WORK = (DRIVER_PYTHON, DRIVER_JVM, EXECUTORS, POSTGRES)
_IDLE_S = 10.0
_COMPILER = "-XX:-UseDynamicNumberOfCompilerThreads"
CONF = {
    "spark.driver.host": "127.0.0.1",
    "spark.driver.bindAddress": "127.0.0.1",
    "spark.executor.memory": "1g",
    "spark.executor.cores": "1",
    # Every executor has one core, and its JVM takes no more threads than that for its garbage.
    "spark.executor.extraJavaOptions": "-XX:+UseSerialGC -XX:ActiveProcessorCount=1 " + _COMPILER,
    "spark.task.maxFailures": "1",
    # For the steps that are defined here.
    "spark.executorEnv.PYTHONPATH": str(Path(__file__).parents[2]),
}


@dataclass(frozen=True)
class Memory:
    """The driver's memory in a batch, in MiB."""

    python: float
    """The most that its Python had, resident."""
    heap: float
    """The most that its JVM's heap had, unused objects included."""
    live: float
    """What the heap had after the batch, after a collection."""


class Session:
    """A Spark session on the cluster, whose processes are measured."""

    def __init__(self, spark: SparkSession, cluster: Cluster, servers: Sequence[Postgres]) -> None:
        self.spark = spark
        self._jvm_pid = jvm_process(spark)
        self._cluster = cluster
        self._servers = [_postmaster(server) for server in servers]
        self._jvm: Any = spark.sparkContext._jvm
        self._looking = 0.0
        """The processor seconds of this process that such looks have taken themselves."""
        self.idle = dict.fromkeys(self.cpu(), 0.0)
        """Processor seconds of a second in which nothing is to be done, by role."""

    def cpu(self) -> dict[str, float]:
        """The processor seconds so far, by role."""
        began = time.process_time()
        workers = [worker.pid for worker in self._cluster.workers]
        below = [pid for worker in workers for pid in processes_below(worker)]
        compilers = sum(map(compiler_cpu_s, below))
        compiler = compiler_cpu_s(self._jvm_pid)
        cost = {
            DRIVER_JVM: cpu_s(self._jvm_pid) - compiler,
            DRIVER_COMPILER: compiler,
            EXECUTORS: sum(map(tree_cpu_s, workers)) - compilers,
            EXECUTOR_COMPILERS: compilers,
            POSTGRES: sum(cpu_s(pid) + tree_cpu_s(pid) for pid in self._servers),
        }
        self._looking += time.process_time() - began
        return {DRIVER_PYTHON: time.process_time() - self._looking, **cost}

    def measure_idle(self) -> None:
        """Find out what is spent while nothing is to be done: on timers, heartbeats, checks.

        It grows with the time by the clock, and so with what else the machine does.
        """
        before, began = self.cpu(), time.perf_counter()
        time.sleep(_IDLE_S)
        seconds = time.perf_counter() - began
        cost = spent(before, self.cpu())
        self.idle = {role: value / seconds for role, value in cost.items()}

    def reset_memory(self) -> None:
        """Forget the peaks so far."""
        gc.collect()
        Path("/proc/self/clear_refs").write_text("5")
        self._jvm.System.gc()
        for pool in self._heap_pools():
            pool.resetPeakUsage()

    def memory(self) -> Memory:
        """The peaks since then."""
        status = Path("/proc/self/status").read_text()
        (peak,) = (line for line in status.splitlines() if line.startswith("VmHWM:"))
        heap = sum(pool.getPeakUsage().getUsed() for pool in self._heap_pools())
        self._jvm.System.gc()
        live = sum(pool.getUsage().getUsed() for pool in self._heap_pools())
        return Memory(int(peak.split()[1]) / 1024, heap / 2**20, live / 2**20)

    def _heap_pools(self) -> list[Any]:
        factory = self._jvm.java.lang.management.ManagementFactory
        pools = factory.getMemoryPoolMXBeans()
        return [pool for pool in pools if pool.getType().name() == "HEAP"]


def spent(before: Mapping[str, float], after: Mapping[str, float]) -> dict[str, float]:
    """The processor seconds between two looks."""
    return {role: after[role] - before[role] for role in after}


@contextlib.contextmanager
def session(
    executors: int, servers: Sequence[Postgres], conf: Mapping[str, str] | None = None
) -> Iterator[Session]:
    """A cluster with so many executors, and a session on it; ``conf`` adds to its settings."""
    from tests.system.cluster.spark_cluster import Cluster

    folder = Path(tempfile.mkdtemp(prefix="batchmill-scale-"))
    os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
    os.environ.setdefault("SPARK_SUBMIT_OPTS", _COMPILER)
    try:
        with Cluster(folder, workers=executors) as cluster:
            leased = lease(cluster.url, conf={**CONF, **(conf or {})})
            try:
                yield Session(leased.session, cluster, servers)
            finally:
                leased.release()
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def servers(count: int) -> Iterator[list[Postgres]]:
    """PostgreSQL servers of our own, without fsync."""
    from tests.kit.servers.postgres import MISSING, make_postgres

    made: list[Postgres] = []
    try:
        for _ in range(count):
            server = make_postgres()
            if server is None:
                raise SystemExit(MISSING)
            made.append(server)
        yield made
    finally:
        for server in made:
            server.drop_all()


def _postmaster(server: Postgres) -> int:
    return int((server.data / "postmaster.pid").read_text().split()[0])
