"""The Spark job of a batch.

    segments ─► ReadStep ──┬─► [by trace] ─► SpanStep ─► [by entity] ─► MergeStep ─► the driver
    rows ─► ReadFrameStep ─┘

The plan is the same for every batch and takes Spark a few milliseconds: all that it knows of are
blobs. Without spans the step in the middle is left out.
"""

from __future__ import annotations

import contextlib
import functools
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from batchmill.sources import TIME_COLUMN
from batchmill.spark.batch.blobs import COLUMNS, Kind, read_blobs
from batchmill.spark.batch.statefiles import StateFile
from batchmill.spark.batch.tasks import (
    Limits,
    MergeStep,
    ReadFrameStep,
    ReadStep,
    Shipped,
    SpanStep,
    TaskPlan,
    TaskReport,
)
from batchmill.spark.input.rows import END_COLUMN, SPAN
from batchmill.spark.input.segments import local_path, source_of

SETTINGS: Mapping[str, str] = {
    # The plan is known in advance, and sizes mean nothing: blobs are few.
    "spark.sql.adaptive.enabled": "false",
    "spark.sql.execution.arrow.maxRecordsPerBatch": "100000",
    "spark.sql.execution.arrow.maxBytesPerBatch": str(64 * 2**20),
}
"""Settings of the session that jobs run in."""
_PARTS_PER_CORE = 4
_FEWEST_PARTS = 16
_FILES_PER_TASK = 64
_BYTES_PER_TASK = 16 * 2**20
"""Bytes of segments, which are some hundred thousand spans: what a task holds in memory."""
_PENDING_PER_TASK = 500_000
"""Pending spans, which take memory when they expire."""


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
    """How many pending spans are in it."""
    folder: Path
    """Where the state of this batch is written."""


@dataclass
class JobResult:
    """What a batch's job gives."""

    report: TaskReport = field(default_factory=TaskReport)
    tables: dict[tuple[Kind, str], list[pa.Table]] = field(
        default_factory=lambda: defaultdict(list)
    )
    """Tables by kind and source."""


def parts_for(spark: SparkSession) -> int:
    """Into how many parts traces and entities are divided."""
    return max(_FEWEST_PARTS, _PARTS_PER_CORE * spark.sparkContext.defaultParallelism)


class BatchJob:
    """Runs the jobs of a stream's batches."""

    def __init__(self, spark: SparkSession, plan: TaskPlan, *, dedup: bool) -> None:
        for key, value in SETTINGS.items():
            spark.conf.set(key, value)
        self._spark = spark
        self._parts = plan.parts
        self._catalog = plan.catalog
        self._shipped = Shipped(plan)
        self._dedup = dedup
        self._cores = max(1, spark.sparkContext.defaultParallelism)

    def run(self, given: Input, limits: Limits, spans: SpanWork | None) -> JobResult:
        """Run the job. Without ``spans`` there must be none in the input."""
        blobs = self._read(given, limits)
        tasks = self._tasks(given, 0 if spans is None else spans.rows)
        if spans is not None:
            step = SpanStep(
                self._shipped,
                limits,
                spans.tick,
                spans.expire_before,
                self._dedup,
                tasks,
                spans.files,
                str(spans.folder),
            )
            blobs = _by_part(blobs, tasks).mapInArrow(step, COLUMNS)
        merged = _by_part(blobs, tasks).mapInArrow(MergeStep(self._shipped), COLUMNS)
        result = JobResult()
        for blob in read_blobs(merged.toArrow().to_batches()):
            if blob.kind is Kind.REPORT:
                result.report.add(blob.report)
            else:
                result.tables[blob.kind, blob.source].append(blob.table)
        return result

    def _read(self, given: Input, limits: Limits) -> DataFrame:
        """The blobs of segments and frames."""
        slices = self._slices(given.paths)
        # One partition at least: a batch may have nothing to read, and state to work off.
        numbers = self._spark.range(0, len(slices), 1, max(1, len(slices)))
        frames = [numbers.mapInArrow(ReadStep(self._shipped, limits, slices), COLUMNS)]
        for source, frame in given.frames.items():
            own = [name for name in frame.columns if name in self._columns(source)]
            step = ReadFrameStep(self._shipped, limits, source)
            frames.append(frame.select(*map(_quoted, own)).mapInArrow(step, COLUMNS))
        return functools.reduce(DataFrame.unionAll, frames)

    def _columns(self, source: str) -> set[str]:
        """The columns of an event type, or of spans."""
        kind = SPAN if source == SPAN.name else self._catalog.source(source)
        return {TIME_COLUMN, END_COLUMN, *(field.column for field in kind.fields.values())}

    def _slices(self, paths: Sequence[str]) -> list[Sequence[str]]:
        """Segments by task; neighbours are spread, since they are of about the same size."""
        count = min(len(paths), max(self._cores, -(-len(paths) // _FILES_PER_TASK)))
        ordered = sorted(paths)
        return [tuple(ordered[place::count]) for place in range(count)]

    def _tasks(self, given: Input, pending: int) -> int:
        """How many tasks share the traces, and the entities."""
        if given.frames:  # of any size
            return self._parts
        size = 0
        for path in filter(None, map(local_path, given.paths)):
            with contextlib.suppress(OSError):
                size += Path(path).stat().st_size
        wanted = max(-(-size // _BYTES_PER_TASK), -(-pending // _PENDING_PER_TASK))
        return min(self._parts, max(self._cores, wanted))


def _by_part(blobs: DataFrame, tasks: int) -> DataFrame:
    return blobs.repartitionById(tasks, F.col("part") % tasks)


def _quoted(column: str) -> str:
    return "`" + column.replace("`", "``") + "`"
