"""Lets Spark read and write for the tasks, on file systems that their Python cannot open.

Python on an executor has no JVM, and so no Hadoop file system. There Spark's own sources and
writers do it, with the settings and jars of the session:

- segments come as rows with a path and a content (``binaryFile``);
- the state of earlier batches lies in Parquet files of blobs, which go to the tasks of their parts
  with the shuffle by trace;
- new state and invalid rows leave the tasks as blobs. They are kept until the job is over, then
  written by their kind.

None of this passes through the driver.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from batchmill.spark.errors import PipelineError
from batchmill.spark.files.paths import AnyPath, HadoopPath
from batchmill.spark.files.statefiles import StateFile, StateKind
from batchmill.spark.input.segments import BadSegment, source_of, spark_path
from batchmill.spark.shuffle import (
    COLUMNS,
    Blob,
    Kind,
    by_part,
    columns_of,
    read_blobs,
    trace_parts,
    write_blobs,
)

WRITTEN = (Kind.INVALID, Kind.PENDING, Kind.IDS)
"""The kinds of blobs that Spark writes."""
_MOST_ROWS, _INVALID_ROWS = 100_000, 200
"""So many become rows of Spark at a time: of invalid ones, texts that repeat may be large."""
_MERGED = "merged"
"""The source of blobs of state that go into this batch's state."""


@dataclass(frozen=True)
class Contents:
    """The segments of a batch, read by Spark."""

    frame: DataFrame
    """A row for each, with ``path`` and ``content``."""
    bytes: int
    bad: Sequence[BadSegment]
    """Those that have no row: they are gone, or empty."""


def contents_of(spark: SparkSession, paths: Sequence[str]) -> Contents:
    """Read segments by their names."""
    files = [HadoopPath(path, lambda: spark) for path in paths]
    folders: list[HadoopPath] = []
    for folder in sorted({file.parent for file in files}, key=str):
        if folder.is_dir() and not any(above in folders for above in folder.parents):
            folders.append(folder)
    if not folders:
        nothing = spark.createDataFrame([], "path string, content binary")
        return Contents(nothing, 0, [_unlisted(file) for file in files])
    # A folder is listed at once; of its files only those are opened that the condition names.
    frame = (
        spark.read.format("binaryFile")
        .option("recursiveFileLookup", "true")
        .load([spark_path(folder, glob=True) for folder in folders])
        .where(F.col("_metadata.file_path").isin([file.as_uri() for file in files]))
    )
    table = frame.select("path", "length").toArrow()
    listed = set(table["path"].to_pylist())
    bad = [_unlisted(file) for file in files if str(file) not in listed]
    return Contents(frame.select("path", "content"), sum(table["length"].to_pylist()), bad)


def _unlisted(file: HadoopPath) -> BadSegment:
    """What is wrong with a segment that Spark does not list."""
    name = str(file)
    try:
        size = file.size()
    except FileNotFoundError:
        return BadSegment(name, source_of(name), "missing", "it is not there any more")
    if size:
        raise PipelineError(
            f"Spark does not list the segment {name}, though it has {size:,} bytes: start again; "
            "nothing of the batch was committed, and it will be tried again"
        )
    return BadSegment(name, source_of(name), "corrupt", "it is empty")


def state_frame(
    spark: SparkSession, files: Iterable[StateFile], parts: int, tasks: int
) -> DataFrame | None:
    """The state of earlier batches as blobs; None if there is none."""
    groups: dict[tuple[bool, bool], list[AnyPath]] = {}
    for file in files:
        group = groups.setdefault((file.merged, file.parts == parts), [])
        group.append(HadoopPath(file.folder, lambda: spark))
    frames = []
    for (merged, fits), folders in groups.items():
        frame = _blobs_in(spark, folders).withColumn("source", F.lit(_MERGED if merged else ""))
        frames.append(frame if fits else frame.mapInArrow(DivideStep(parts, tasks), COLUMNS))
    return functools.reduce(DataFrame.unionAll, frames) if frames else None


def state_rows(spark: SparkSession, folders: Sequence[AnyPath]) -> int:
    """How many rows of state are in folders; their content is not read."""
    frame = _blobs_in(spark, folders).agg(F.sum(F.col("source").cast("long")))
    return int(frame.toArrow().column(0)[0].as_py() or 0)


def _blobs_in(spark: SparkSession, folders: Iterable[AnyPath]) -> DataFrame:
    names = [spark_path(folder, glob=True) for folder in folders]
    return spark.read.schema(COLUMNS).parquet(*names)


@dataclass(frozen=True)
class DivideStep:
    """Divides state into other parts than it was written in.

    Ids do not tell their trace: every task gets all of them.
    """

    parts: int
    tasks: int

    def __call__(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """The same state in blobs of the new parts."""
        for blob in read_blobs(batches):
            if blob.kind is Kind.IDS:
                copies = (Blob(blob.kind, blob.source, at, blob.data) for at in range(self.tasks))
                yield from write_blobs(copies)
                continue
            table = blob.table
            for part, rows in by_part(table, trace_parts(table, self.parts)):
                yield from write_blobs(Blob.of(blob.kind, rows, source=blob.source, part=part))


def write_state(blobs: DataFrame, kind: StateKind, folder: AnyPath) -> None:
    """Write the state of one kind that is among blobs."""
    blobs.where(F.col("kind") == kind.value).write.parquet(spark_path(folder))


def write_invalid(blobs: DataFrame, source: str, schemas: Sequence[bytes], folder: AnyPath) -> None:
    """Write the invalid rows of an event type that are among blobs, in place of earlier ones."""
    several = [pa.ipc.read_schema(pa.py_buffer(schema)) for schema in schemas]
    plain = [
        pa.schema([(field.name, _plain(field.type)) for field in schema]) for schema in several
    ]
    schema = pa.unify_schemas(plain, promote_options="permissive")
    own = blobs.where((F.col("kind") == Kind.INVALID.value) & (F.col("source") == source))
    unpacked(own, schema, _INVALID_ROWS).write.mode("overwrite").parquet(spark_path(folder))


def unpacked(blobs: DataFrame, schema: pa.Schema, at_once: int = _MOST_ROWS) -> DataFrame:
    """The rows of blobs, with all columns of a schema."""
    return blobs.mapInArrow(_RowsStep(schema, at_once), columns_of(blobs.sparkSession, schema))


@dataclass(frozen=True)
class _RowsStep:
    """Turns blobs back into rows."""

    schema: pa.Schema
    at_once: int

    def __call__(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """The rows of all blobs, with all columns."""
        for blob in read_blobs(batches):
            for part in blob.table.to_batches(max_chunksize=self.at_once):
                # A copy: of a part of a map, all entries of the whole would be converted.
                batch = part.take(pa.array(range(part.num_rows)))
                columns = [
                    batch[field.name].cast(field.type)
                    if field.name in batch.schema.names
                    else pa.nulls(batch.num_rows, field.type)
                    for field in self.schema
                ]
                yield pa.record_batch(columns, schema=self.schema)


def _plain(kind: pa.DataType) -> pa.DataType:
    """A type without dictionaries."""
    if pa.types.is_map(kind):
        return pa.map_(_plain(kind.key_type), _plain(kind.item_type))
    return kind.value_type if pa.types.is_dictionary(kind) else kind
