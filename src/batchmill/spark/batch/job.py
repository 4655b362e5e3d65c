"""The Spark job of a batch.

    segments ─► ReadStep ────┐                          ┌─► the state for later batches
    rows ─► ReadFrameStep ───┼─► by trace ─► SpanStep ──┤
    state of earlier batches ┘                          └─► by entity ─► MergeStep ─► the driver

The plan is the same for every batch and takes Spark a few milliseconds: all that it knows of are
blobs.
"""

from __future__ import annotations

import contextlib
import functools
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pyarrow as pa
from pyspark import StorageLevel
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from batchmill.files import sync
from batchmill.spark.batch import blobs as blob_format
from batchmill.spark.batch import state
from batchmill.spark.batch.blobs import STATE, Blob, Kind, read_blobs
from batchmill.spark.batch.report import L1, SPANS, Stopwatch
from batchmill.spark.batch.state import StateFiles
from batchmill.spark.batch.tasks import (
    Limits,
    MergeStep,
    OldState,
    ReadFrameStep,
    ReadStep,
    RepartStep,
    Shipped,
    SpanStep,
    TaskPlan,
    TaskReport,
)
from batchmill.spark.input.rows import SPAN
from batchmill.spark.input.segments import (
    local_path,
    source_of,
    spark_path,
    sync_folder,
)
from batchmill.store import Carry

SETTINGS: Mapping[str, str] = {
    # The plan is known in advance, and its sizes mean nothing: blobs are few.
    "spark.sql.adaptive.enabled": "false",
    # A writer for each kind of state is open at the same time; Spark would sort blobs otherwise.
    "spark.sql.maxConcurrentOutputFileWriters": "8",
    "spark.sql.execution.arrow.maxRecordsPerBatch": "100000",
    "spark.sql.execution.arrow.maxBytesPerBatch": str(64 * 2**20),
}
"""Settings of the session that jobs run in."""
_PARTS_PER_CORE = 4
_FILES_PER_TASK = 64
_BYTES_PER_TASK = 16 * 2**20
"""Bytes of segments, which are some hundred thousand spans: what a task holds in memory."""


@dataclass(frozen=True)
class Input:
    """What a batch is to be made of."""

    paths: Sequence[str] = ()
    frames: Mapping[str, DataFrame] = field(default_factory=dict)
    """Rows of a backfill that lie in no segment, by source."""
    files: StateFiles = field(default_factory=StateFiles)

    @property
    def has_spans(self) -> bool:
        """Whether spans may be among them."""
        return SPAN.name in self.frames or any(source_of(path) == SPAN.name for path in self.paths)


@dataclass(frozen=True)
class Moment:
    """When a batch is made, and what of the state it uses."""

    number: int
    limits: Limits
    tick: int
    """What its spans are marked with: later batches have larger ones."""
    expired: tuple[Carry, ...] = ()
    """Files of spans that wait no longer after this batch."""
    ids: tuple[Carry, ...] = ()
    """Files of the dedup index in use."""
    dropped: tuple[Carry, ...] = ()
    """Files that no later batch needs."""
    merged: tuple[Carry, ...] = ()
    """Files whose content goes into the files of this batch, if it has spans."""


@dataclass
class JobResult:
    """What a batch's job gives."""

    report: TaskReport = field(default_factory=TaskReport)
    tables: dict[tuple[Kind, str], list[pa.Table]] = field(
        default_factory=lambda: defaultdict(list)
    )
    """Tables by kind and source."""
    kept: list[Carry] = field(default_factory=list)
    """Files of state that the batch has written."""
    merged: tuple[Carry, ...] = ()
    """Files of earlier batches whose content is in those."""
    invalid: Callable[[], Iterable[tuple[str, pa.Table]]] = tuple
    """The rows for the quarantine, by source, a few at a time; while Spark has them."""


class BatchJob:
    """Runs the jobs of a stream's batches."""

    def __init__(self, spark: SparkSession, plan: TaskPlan, folder: Path, *, dedup: bool) -> None:
        """``folder`` is that of the state."""
        for key, value in SETTINGS.items():
            spark.conf.set(key, value)
        self._spark = spark
        self._plan = plan
        self._shipped = Shipped(plan)
        self._folder = folder
        self._dedup = dedup
        self._cores = max(1, spark.sparkContext.defaultParallelism)

    @staticmethod
    def parts(spark: SparkSession) -> int:
        """Into how many shares traces and entities are divided."""
        return max(8, _PARTS_PER_CORE * spark.sparkContext.defaultParallelism)

    @contextlib.contextmanager
    def run(self, given: Input, moment: Moment, watch: Stopwatch) -> Iterator[JobResult]:
        """Run the job; what Spark has persisted of it is freed at the end of the context."""
        blobs = self._read(given, moment)
        tasks = self._tasks(given.paths)
        uses_spans = given.has_spans or bool(moment.expired)
        name = state.new_name(moment.number, self._plan.parts)
        if uses_spans:
            step = SpanStep(
                self._shipped,
                moment.limits,
                moment.tick,
                max((file.arrived_ms for file in moment.expired), default=None),
                self._dedup,
                name if given.has_spans else None,
                frozenset((state.kind_of(file), state.name_of(file)) for file in moment.merged),
            )
            files = (*given.files.pending, *moment.ids)
            earlier = self._state(files)
            every = functools.reduce(
                DataFrame.unionAll, [frame for frame in (blobs, earlier) if frame]
            )
            blobs = _by_part(every, tasks).mapInArrow(step, blob_format.COLUMNS)
        if blobs is None:
            yield JobResult()
            return
        blobs.persist(StorageLevel.MEMORY_AND_DISK)
        try:
            result = JobResult()
            if given.has_spans:
                result.merged = moment.merged
                self._write_state(blobs, name)
                watch.lap(SPANS)
            self._collect(blobs, tasks, result)
            watch.lap(L1)
            result.kept = self._kept(name, moment, result.report)
            if any(what == "quarantined" for what, _, _ in result.report.counters):
                result.invalid = functools.partial(_invalid, blobs)
            yield result
        finally:
            blobs.unpersist()

    def _read(self, given: Input, moment: Moment) -> DataFrame | None:
        """The blobs of segments and frames."""
        frames = [
            frame.mapInArrow(
                ReadFrameStep(self._shipped, moment.limits, source), blob_format.COLUMNS
            )
            for source, frame in given.frames.items()
        ]
        old = [
            OldState(state.kind_of(file), state.name_of(file), path)
            for file in (*given.files.pending, *moment.ids)
            if state.is_old(file) and (path := local_path(file.path)) is not None
        ]
        if given.paths or old:
            slices = self._slices(given.paths)
            step = ReadStep(self._shipped, moment.limits, slices, old)
            numbers = self._spark.range(0, len(slices), 1, len(slices))
            frames.append(numbers.mapInArrow(step, blob_format.COLUMNS))
        return functools.reduce(DataFrame.unionAll, frames) if frames else None

    def _state(self, files: Sequence[Carry]) -> DataFrame | None:
        """The blobs that earlier batches have kept."""
        frames = []
        for kind in STATE:
            for fits in (True, False):
                paths = [
                    file.path
                    for file in files
                    if state.kind_of(file) is kind
                    and not state.is_old(file)
                    and (state.parts_of(file) == self._plan.parts) is fits
                ]
                if not paths:
                    continue
                read = self._stored(paths)
                frame = read.select(F.lit(kind.value).alias("kind"), *_STORED_COLUMNS)
                if not fits:
                    frame = frame.mapInArrow(RepartStep(self._shipped), blob_format.COLUMNS)
                frames.append(frame)
        return functools.reduce(DataFrame.unionAll, frames) if frames else None

    def _stored(self, paths: Sequence[str]) -> DataFrame:
        """The rows of files by their exact names, whatever characters are in them.

        A name with characters of a pattern is read by itself: among others, Spark reads it twice.
        """
        reader = self._spark.read.schema(_STORED).option(_NO_PATTERNS, "false")
        odd = [path for path in paths if not _PATTERN.isdisjoint(path)]
        groups = [[path] for path in odd]
        if plain := [path for path in paths if path not in odd]:
            groups.append(plain)
        return functools.reduce(DataFrame.unionAll, (reader.parquet(*group) for group in groups))

    def _write_state(self, blobs: DataFrame, name: str) -> None:
        """Write what later batches need, so that it survives a power cut."""
        target = self._folder / name
        kept = blobs.where(F.col("kind").isin(*STATE))
        kept.write.partitionBy("kind").option("parquet.enable.dictionary", "false").parquet(
            spark_path(target)
        )
        for folder in target.glob("kind=*"):
            sync_folder(folder)
        sync(self._folder.parent)

    def _kept(self, name: str, moment: Moment, report: TaskReport) -> list[Carry]:
        return [
            Carry(
                spark_path(self._folder / name / f"kind={kind}"), moment.number, moment.tick, rows
            )
            for kind in STATE
            if (rows := report.kept[kind])
        ]

    def _collect(self, blobs: DataFrame, tasks: int, result: JobResult) -> None:
        wanted = blobs.where(~F.col("kind").isin(*STATE, Kind.INVALID))
        merged = _by_part(wanted, tasks).mapInArrow(MergeStep(self._shipped), blob_format.COLUMNS)
        for blob in read_blobs(merged.toArrow().to_batches()):
            if blob.kind is Kind.REPORT:
                result.report.add(blob.report)
            else:
                result.tables[blob.kind, blob.source].append(blob.table)

    def _slices(self, paths: Sequence[str]) -> list[Sequence[str]]:
        """Segments by task; neighbours are spread, since they are of about the same size."""
        count = min(len(paths), max(self._cores, -(-len(paths) // _FILES_PER_TASK))) or 1
        return [tuple(paths[place::count]) for place in range(count)]

    def _tasks(self, paths: Sequence[str]) -> int:
        """How many tasks share the traces, and the entities."""
        size = 0
        for path in paths:
            with contextlib.suppress(OSError):
                size += Path(local_path(path) or "").stat().st_size
        return min(self._plan.parts, max(self._cores, -(-size // _BYTES_PER_TASK)))


_STORED = "source string, part int, rows bigint, data binary"
_NO_PATTERNS = "__globPaths__"
"""Spark's own option for names that are no patterns."""
_PATTERN = frozenset("*?[]{}\\#")
_STORED_COLUMNS = ("source", "part", "rows", "data")


def _by_part(blobs: DataFrame, tasks: int) -> DataFrame:
    return blobs.repartitionById(tasks, F.col("part") % tasks)


def _invalid(blobs: DataFrame) -> Iterator[tuple[str, pa.Table]]:
    for row in blobs.where(F.col("kind") == Kind.INVALID.value).toLocalIterator():
        blob = Blob(Kind.INVALID, row["source"], row["part"], row["rows"], bytes(row["data"]))
        yield blob.source, blob.table
