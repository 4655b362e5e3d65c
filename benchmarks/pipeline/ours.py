"""The pipeline as a contender: one timed call, from a spool to an empty SQLite store."""

from __future__ import annotations

import contextlib
import itertools
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter, process_time
from typing import Any

from pyspark.sql import SparkSession

from batchmill.spark import BatchReport, Pipeline, PipelineSettings
from batchmill.spark.runtime.session import lease
from benchmarks.kit.machine import cpu_s, tree_cpu_s
from benchmarks.pipeline.check import Results, stored_by_ours
from benchmarks.pipeline.data import SIX

ALL_FILES = 1_000_000
"""More segments than there are: one batch takes all of them."""


def start_spark() -> SparkSession:
    """A session with the pipeline's own settings, on all cores; yours to stop."""
    return lease("local[*]").session


@contextlib.contextmanager
def scratch() -> Iterator[Path]:
    """A folder that is gone afterwards."""
    folder = Path(tempfile.mkdtemp(prefix="batchmill-bench-"))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def cpu_seconds(spark: SparkSession) -> float:
    """The processor time so far of this process, of its JVM and of the Python tasks below that:
    what others do is not in it."""
    try:
        jvm = jvm_process(spark)
        return process_time() + cpu_s(jvm) + tree_cpu_s(jvm)
    except FileNotFoundError:  # not Linux
        return process_time()


def jvm_process(spark: SparkSession) -> int:
    """The id of the JVM's process."""
    jvm: Any = spark.sparkContext._jvm
    return int(jvm.java.lang.ProcessHandle.current().pid())


@dataclass(frozen=True)
class Run:
    """One run of the pipeline over a spool."""

    seconds: float
    """From the call to its return."""
    reports: list[BatchReport] = field(repr=False)

    @property
    def spark_s(self) -> float:
        """Until the deltas were in the driver's memory."""
        return sum(report.spark_s for report in self.reports)

    @property
    def store_s(self) -> float:
        """The commits."""
        return sum(report.store_s for report in self.reports)

    @property
    def merged(self) -> int:
        """Rows of (entity, bucket), all grains."""
        return sum(report.result.merged for report in self.reports)


def run_ours(
    spark: SparkSession,
    spool: Path,
    work: Path,
    *,
    oal: str | Path = SIX,
    files: int = ALL_FILES,
    on_batch: Callable[[BatchReport], None] | None = None,
) -> Run:
    """Everything that the spool holds, into a new store; ``files`` segments a batch at most."""
    with Pipeline(
        oal=oal,
        spool=spool,
        store=f"sqlite:///{work / 'store.db'}",
        checkpoint=work / "checkpoint",
        quarantine=work / "quarantine",
        spark=spark,
        settings=PipelineSettings(max_batch_files=files, max_new_entities=0, max_entities=0),
        on_batch=on_batch,
    ) as pipeline:
        started = perf_counter()
        reports = pipeline.run_available()
        return Run(perf_counter() - started, reports)


@dataclass
class Ours:
    """The six metrics, by the pipeline."""

    spark: SparkSession
    files: int = ALL_FILES
    name: str = "batchmill"
    runs: list[Run] = field(default_factory=list)

    def run(self, spool: Path, work: Path) -> float:
        """The seconds it took."""
        made = run_ours(self.spark, spool, work, files=self.files)
        self.runs.append(made)
        return made.seconds

    def results(self, work: Path) -> Results:
        """What came of the run in that folder."""
        return stored_by_ours(work / "store.db")


def alternating(runs: Mapping[str, Callable[[Path], float]], rounds: int) -> dict[str, list[float]]:
    """The seconds of each, taking turns; every round starts with another one."""
    names = list(runs)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for turn in range(rounds):
        start = turn % len(names)
        for name in itertools.islice(itertools.cycle(names), start, start + len(names)):
            with scratch() as work:
                seconds[name].append(runs[name](work))
    return seconds
