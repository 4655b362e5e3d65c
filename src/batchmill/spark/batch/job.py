"""The Spark job of a batch.

    segments ─► ReadStep ─► [by trace] ─► SpanStep ─► [by entity] ─┬─► MergeStep ─► the driver
                                                                   └─► CommitStep ─► the store

The plan is the same for every batch and takes Spark a few milliseconds: all that it knows of are
blobs. Without spans the step in the middle is left out.

A task of the last two steps has some parts of the traces, then of the entities, and takes memory
for those. A batch of which the store has parts after a run that broke off gets as many tasks as
parts: that is the least that a task can have, and what is recorded is left out.
"""

from __future__ import annotations

import contextlib
import functools
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from batchmill.spans import KnownHosts
from batchmill.spark.batch.merge import BlobMerger, CommitStep, MergeStep, PartCommit
from batchmill.spark.batch.plan import Limits, PickledPlan, TaskPlan
from batchmill.spark.batch.read_step import ReadContentStep, ReadStep
from batchmill.spark.batch.report import TaskReport
from batchmill.spark.batch.span_step import SpanStep
from batchmill.spark.files import remote
from batchmill.spark.files.paths import AnyPath, is_uri
from batchmill.spark.files.remote import Contents
from batchmill.spark.files.statefiles import StateFile
from batchmill.spark.input.segments import local_path
from batchmill.spark.shuffle import COLUMNS, Kind, read_blobs

SETTINGS: Mapping[str, str] = {
    # The plan is known in advance, and sizes mean nothing: blobs are few.
    "spark.sql.adaptive.enabled": "false",
    "spark.sql.execution.arrow.maxRecordsPerBatch": "100000",
    "spark.sql.execution.arrow.maxBytesPerBatch": str(64 * 2**20),
    # Spark describes every plan for its UI, which nobody opens.
    "spark.sql.ui.explainMode": "simple",
    # Blobs in files are large.
    "spark.sql.parquet.columnarReaderBatchSize": "16",
    # A task that runs again returns the same rows, in blobs with other bytes: the names of files
    # are new. Spark would take it for another result, and give up a job that is half done.
    "spark.sql.shuffle.orderIndependentChecksum.enabled": "false",
    "spark.sql.shuffle.orderIndependentChecksum.enableFullRetryOnMismatch": "false",
    # The files of a shuffle are removed as soon as its job is over, not when the JVM finds garbage.
    "spark.sql.classic.shuffleDependency.fileCleanup.enabled": "true",
}
"""Settings of the session that jobs run in."""
_PARTS_PER_CORE = 4
_FEWEST_PARTS = 16
_FILES_PER_TASK = 64
_BYTES_PER_TASK = 16 * 2**20
"""Bytes of segments, which are some hundred thousand spans: what a task holds in memory."""
_PENDING_PER_TASK = 500_000
"""Pending spans that expire or are merged: the others stay in their files, and take no memory."""


@dataclass(frozen=True)
class SpanWork:
    """What is to be done with spans."""

    tick: int
    """What this batch's spans are marked with: later batches have larger ones."""
    expire_before: int | None
    """Pending spans that are marked with this or less wait no longer."""
    files: Sequence[StateFile]
    """The state of earlier batches."""
    rows: int
    """How many of its pending spans expire, or are merged with those of this batch."""
    folder: AnyPath
    """Where the state of this batch is written."""
    hosts: KnownHosts | None = None
    """What earlier batches have learned about hosts; None: not known."""

    @property
    def local_folder(self) -> str | None:
        """The folder, if tasks can write there."""
        return str(self.folder) if isinstance(self.folder, Path) else None

    @property
    def remote_files(self) -> list[StateFile]:
        """Those of the files that Spark reads for the tasks."""
        return [file for file in self.files if is_uri(file.folder)]


@dataclass
class JobResult:
    """What a batch's job gives."""

    merged: BlobMerger
    """What the driver is to commit; empty if the tasks have committed it."""
    report: TaskReport = field(default_factory=TaskReport)
    ahead: dict[str, list[pa.Table]] = field(default_factory=lambda: defaultdict(list))
    """Deltas for the quarantine, by source."""
    blobs: DataFrame | None = None
    """The blobs of all tasks, if some of them are to be written by Spark: until :meth:`release`."""

    def release(self) -> None:
        """Free what was kept of the job."""
        if self.blobs is not None:
            self.blobs.unpersist()


def parts_for(spark: SparkSession) -> int:
    """Into how many parts traces and entities are divided."""
    return max(_FEWEST_PARTS, _PARTS_PER_CORE * spark.sparkContext.defaultParallelism)


class BatchJob:
    """Runs the jobs of a stream's batches."""

    def __init__(self, spark: SparkSession, plan: TaskPlan, *, dedup: bool) -> None:
        for key, value in SETTINGS.items():
            spark.conf.set(key, value)
        self._spark = spark
        self._plan = plan
        self._parts = plan.parts
        self._shipped = PickledPlan(plan)
        self._dedup = dedup

    @property
    def _cores(self) -> int:
        """How many tasks run at once; executors may come and go."""
        return max(1, self._spark.sparkContext.defaultParallelism)

    def run(
        self,
        paths: Sequence[str],
        limits: Limits,
        spans: SpanWork | None = None,
        commit: PartCommit | None = None,
    ) -> JobResult:
        """Run the job. Without ``spans`` there must be none in the input.

        With ``commit`` the tasks commit what they have merged.
        """
        contents = self._contents(paths)
        tasks = self._tasks(paths, contents, 0 if spans is None else spans.rows)
        readers = self._cores
        if commit is not None and commit.opened.recorded:
            # Part by part: blobs tell which are recorded, and tasks take the least memory, in case
            # that was too little. The batch cannot be divided any more.
            tasks = readers = self._parts
        limits = replace(limits, tasks=tasks)
        blobs = self._processed(paths, limits, spans, contents, tasks, readers)
        result = JobResult(BlobMerger(self._plan))
        if contents is not None:
            result.report.bad += contents.bad
        if limits.quarantine is None or (spans is not None and spans.local_folder is None):
            result.blobs = blobs.persist()
            blobs = blobs.where(~F.col("kind").isin([kind.value for kind in remote.WRITTEN]))
        last: MergeStep | CommitStep = MergeStep(self._shipped)
        if commit is not None:
            last = CommitStep(self._shipped, commit, tasks)
        blobs = _by_part(blobs, tasks).mapInArrow(last, COLUMNS)
        try:
            for blob in read_blobs(blobs.toArrow().to_batches()):
                if blob.kind is Kind.REPORT:
                    result.report.add(blob.report)
                elif blob.kind is Kind.AHEAD:
                    result.ahead[blob.source].append(blob.table)
                else:
                    result.merged.add(blob)
        except BaseException:
            result.release()
            raise
        return result

    @contextlib.contextmanager
    def rows(
        self, paths: Sequence[str], limits: Limits, spans: SpanWork | None
    ) -> Iterator[dict[str, DataFrame]]:
        """The rows that :meth:`run` counts, by event type; to be used within the context.

        A job of its own, which writes nothing.
        """
        contents = self._contents(paths)
        tasks = self._tasks(paths, contents, 0 if spans is None else spans.rows)
        blobs = self._processed(paths, limits, spans, contents, tasks, self._cores, rows_only=True)
        blobs = blobs.where(F.col("kind") == Kind.ROWS.value).persist()
        try:
            sources = sorted(row["source"] for row in blobs.select("source").distinct().collect())
            schemas = {name: self._plan.catalog.source(name).arrow_schema() for name in sources}
            yield {
                name: remote.unpacked(blobs.where(F.col("source") == name), schema)
                for name, schema in schemas.items()
            }
        finally:
            blobs.unpersist()

    def _contents(self, paths: Sequence[str]) -> Contents | None:
        """The segments that are not on this machine."""
        uris = [path for path in paths if is_uri(path)]
        return remote.contents_of(self._spark, uris) if uris else None

    def _processed(
        self,
        paths: Sequence[str],
        limits: Limits,
        spans: SpanWork | None,
        contents: Contents | None,
        tasks: int,
        readers: int,
        *,
        rows_only: bool = False,
    ) -> DataFrame:
        """What the steps before the last one give."""
        blobs = self._read(paths, limits, contents, readers, rows_only=rows_only)
        if spans is None:
            return blobs
        state = remote.state_frame(self._spark, spans.remote_files, self._parts, tasks)
        if state is not None:
            blobs = blobs.unionAll(state)
        step = SpanStep(
            self._shipped,
            limits,
            spans.tick,
            spans.expire_before,
            self._dedup,
            tasks,
            [file for file in spans.files if not is_uri(file.folder)],
            spans.local_folder,
            rows_only,
            spans.hosts,
        )
        return _by_part(blobs, tasks).mapInArrow(step, COLUMNS)

    def _read(
        self,
        paths: Sequence[str],
        limits: Limits,
        contents: Contents | None,
        readers: int,
        *,
        rows_only: bool,
    ) -> DataFrame:
        """The blobs of segments."""
        slices = self._slices([path for path in paths if not is_uri(path)], readers)
        # One partition at least: a batch may have nothing to read, and state to work off.
        numbers = self._spark.range(0, len(slices), 1, max(1, len(slices)))
        frames = [numbers.mapInArrow(ReadStep(self._shipped, limits, slices, rows_only), COLUMNS)]
        if contents is not None:
            read = ReadContentStep(self._shipped, limits, rows_only)
            frames.append(contents.frame.mapInArrow(read, COLUMNS))
        return functools.reduce(DataFrame.unionAll, frames)

    def _slices(self, paths: Sequence[str], readers: int) -> list[Sequence[str]]:
        """Segments by task; neighbours are spread, since they are of about the same size."""
        count = min(len(paths), max(readers, -(-len(paths) // _FILES_PER_TASK)))
        ordered = sorted(paths)
        return [tuple(ordered[place::count]) for place in range(count)]

    def _tasks(self, paths: Sequence[str], contents: Contents | None, pending: int) -> int:
        """How many tasks share the traces, and the entities."""
        size = 0 if contents is None else contents.bytes
        for path in filter(None, map(local_path, paths)):
            with contextlib.suppress(OSError):
                size += Path(path).stat().st_size
        wanted = max(-(-size // _BYTES_PER_TASK), -(-pending // _PENDING_PER_TASK))
        return min(self._parts, max(self._cores, wanted))


def _by_part(blobs: DataFrame, tasks: int) -> DataFrame:
    return blobs.repartitionById(tasks, F.col("part") % tasks)
