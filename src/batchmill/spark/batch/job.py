"""The Spark job of a batch.

    segments ─► ReadStep ──┬─► [by trace] ─► SpanStep ─► [by entity] ─┬─► MergeStep ─► the driver
    rows ─► ReadFrameStep ─┘                                         └─► CommitStep ─► the store

The plan is the same for every batch and takes Spark a few milliseconds: all that it knows of are
blobs. Without spans the step in the middle is left out.
"""

from __future__ import annotations

import contextlib
import functools
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from batchmill.sources import TIME_COLUMN
from batchmill.spark.batch.merge import CommitStep, Merged, MergeStep, PartCommit
from batchmill.spark.batch.plan import Limits, Shipped, TaskPlan
from batchmill.spark.batch.read_step import ReadContentStep, ReadFrameStep, ReadStep
from batchmill.spark.batch.report import TaskReport
from batchmill.spark.batch.span_step import SpanStep
from batchmill.spark.files import remote
from batchmill.spark.files.paths import AnyPath, is_uri
from batchmill.spark.files.remote import Contents, RowsStep
from batchmill.spark.files.statefiles import StateFile
from batchmill.spark.input.rows import END_COLUMN, SPAN
from batchmill.spark.input.segments import local_path, source_of
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
class Input:
    """What a batch is to be made of."""

    paths: Sequence[str] = ()
    frames: Mapping[str, DataFrame] = field(default_factory=dict)
    """Rows of a backfill that lie in no segment, by source."""

    @property
    def has_spans(self) -> bool:
        """Whether spans may be among them."""
        return SPAN.name in self.frames or any(source_of(path) == SPAN.name for path in self.paths)


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
    answering: frozenset[str] | None = None
    """The hosts outside that have answered; None: not known."""

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

    merged: Merged
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
        self._shipped = Shipped(plan)
        self._dedup = dedup
        self._cores = max(1, spark.sparkContext.defaultParallelism)

    def run(
        self,
        given: Input,
        limits: Limits,
        spans: SpanWork | None = None,
        commit: PartCommit | None = None,
    ) -> JobResult:
        """Run the job. Without ``spans`` there must be none in the input.

        With ``commit`` the tasks commit what they have merged.
        """
        contents = self._contents(given)
        tasks = self._tasks(given, contents, 0 if spans is None else spans.rows)
        if commit is None or not commit.opened.recorded:
            limits = replace(limits, tasks=tasks)
        blobs = self._processed(given, limits, spans, contents, tasks)
        result = JobResult(Merged(self._plan))
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
        self, given: Input, limits: Limits, spans: SpanWork | None
    ) -> Iterator[dict[str, DataFrame]]:
        """The rows that :meth:`run` counts, by event type; to be used within the context.

        A job of its own, which writes nothing.
        """
        contents = self._contents(given)
        tasks = self._tasks(given, contents, 0 if spans is None else spans.rows)
        blobs = self._processed(given, limits, spans, contents, tasks, rows_only=True)
        blobs = blobs.where(F.col("kind") == Kind.ROWS.value).persist()
        try:
            sources = sorted(row["source"] for row in blobs.select("source").distinct().collect())
            yield {source: self._unpacked(blobs, source) for source in sources}
        finally:
            blobs.unpersist()

    def _unpacked(self, blobs: DataFrame, source: str) -> DataFrame:
        schema = self._plan.catalog.source(source).arrow_schema()
        columns = self._spark.createDataFrame(schema.empty_table()).schema
        own = blobs.where(F.col("source") == source)
        return own.mapInArrow(RowsStep(schema), columns)

    def _contents(self, given: Input) -> Contents | None:
        """The segments that are not on this machine."""
        uris = [path for path in given.paths if is_uri(path)]
        return remote.contents_of(self._spark, uris) if uris else None

    def _processed(
        self,
        given: Input,
        limits: Limits,
        spans: SpanWork | None,
        contents: Contents | None,
        tasks: int,
        *,
        rows_only: bool = False,
    ) -> DataFrame:
        """What the steps before the last one give."""
        blobs = self._read(given, limits, contents, rows_only=rows_only)
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
            spans.answering,
        )
        return _by_part(blobs, tasks).mapInArrow(step, COLUMNS)

    def _read(
        self, given: Input, limits: Limits, contents: Contents | None, *, rows_only: bool
    ) -> DataFrame:
        """The blobs of segments and frames."""
        slices = self._slices([path for path in given.paths if not is_uri(path)])
        # One partition at least: a batch may have nothing to read, and state to work off.
        numbers = self._spark.range(0, len(slices), 1, max(1, len(slices)))
        frames = [numbers.mapInArrow(ReadStep(self._shipped, limits, slices, rows_only), COLUMNS)]
        if contents is not None:
            read = ReadContentStep(self._shipped, limits, rows_only)
            frames.append(contents.frame.mapInArrow(read, COLUMNS))
        for source, frame in given.frames.items():
            rows = _only(frame, self._columns(source))
            step = ReadFrameStep(self._shipped, limits, source, rows_only)
            frames.append(rows.mapInArrow(step, COLUMNS))
        # The first is of this session: the job has its settings, not those of a frame's own.
        return functools.reduce(DataFrame.unionAll, frames)

    def _columns(self, source: str) -> set[str]:
        """The columns of an event type, or of spans."""
        kind = SPAN if source == SPAN.name else self._plan.catalog.source(source)
        return {TIME_COLUMN, END_COLUMN, *(field.column for field in kind.fields.values())}

    def _slices(self, paths: Sequence[str]) -> list[Sequence[str]]:
        """Segments by task; neighbours are spread, since they are of about the same size."""
        count = min(len(paths), max(self._cores, -(-len(paths) // _FILES_PER_TASK)))
        ordered = sorted(paths)
        return [tuple(ordered[place::count]) for place in range(count)]

    def _tasks(self, given: Input, contents: Contents | None, pending: int) -> int:
        """How many tasks share the traces, and the entities."""
        if given.frames:  # of any size
            return self._parts
        size = 0 if contents is None else contents.bytes
        for path in filter(None, map(local_path, given.paths)):
            with contextlib.suppress(OSError):
                size += Path(path).stat().st_size
        wanted = max(-(-size // _BYTES_PER_TASK), -(-pending // _PENDING_PER_TASK))
        return min(self._parts, max(self._cores, wanted))


def _by_part(blobs: DataFrame, tasks: int) -> DataFrame:
    return blobs.repartitionById(tasks, F.col("part") % tasks)


def _only(frame: DataFrame, wanted: Collection[str]) -> DataFrame:
    """Some columns, by their place: the frame's session may take ``a`` and ``A`` for one name."""
    numbered = frame.toDF(*(f"c{place}" for place in range(len(frame.columns))))
    return numbered.select(
        *(
            F.col(f"c{place}").alias(name)
            for place, name in enumerate(frame.columns)
            if name in wanted
        )
    )
