"""Writes what each commit changed, and kept spans, to Iceberg tables.

A commit becomes one snapshot of the table, whose summary names it. A process that is killed between
the append and the mark in the store finds the snapshot when it comes back, and does not repeat it.
Spans are written by hours: an hour whose files have changed is written as a whole, with what the
table had of it, in its place. That snapshot's summary names the hour, and a digest of its files.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from hashlib import sha256
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyspark
from pyspark.sql import DataFrame, DataFrameWriterV2, SparkSession
from pyspark.sql import functions as F

from batchmill.errors import ConfigError
from batchmill.files import FileLock
from batchmill.outbox import Changes, Outbox
from batchmill.sources import Grain, bucket_start
from batchmill.spark.errors import PipelineError
from batchmill.spark.failures import explain_task_error
from batchmill.spark.frames import kept_folder, spans
from batchmill.spark.shuffle import columns_of
from batchmill.store import OutboxFile, Store, StoredMetric
from batchmill.traces import SCHEMA, SpanReader
from batchmill.wording import count_of

log = logging.getLogger("batchmill.spark")

ICEBERG_VERSION = "1.12.0"
"""The version of Iceberg that is tested."""
_SPARKS = ("4.0", "4.1")
"""The versions of Spark for which Iceberg has a runtime."""
_ROWS_PER_TASK = 20_000
_SPAN_IDS = ["trace_id", "span_id"]
_PLACE, _SEQ = "batchmill.outbox", "batchmill.seq"
_HOUR, _FILES = "batchmill.hour", "batchmill.files"
_SCHEMA = pa.schema(
    [
        ("stream", pa.string()),
        ("batch", pa.int64()),
        ("time", pa.timestamp("us", "UTC")),
        ("source", pa.string()),
        ("metric", pa.string()),
        ("version", pa.int32()),
        ("entity_kind", pa.string()),
        ("entity_id", pa.string()),
        ("entity_name", pa.string()),
        ("layers", pa.list_(pa.string())),
        ("values", pa.map_(pa.string(), pa.float64())),
        ("state", pa.list_(pa.struct([("merge", pa.string()), ("value", pa.string())]))),
    ]
)


def iceberg_conf(version: str | None = None) -> dict[str, str]:
    """The setting with which a new session fetches Iceberg's runtime from Maven Central.

    Raises ConfigError if there is none for that version of Spark, by default the installed one.
    """
    spark = ".".join((version or pyspark.__version__).split(".")[:2])
    if spark not in _SPARKS:
        allowed = (
            f"{' or '.join(_SPARKS)} for Iceberg, which has no runtime for others on Maven "
            "Central: pip install 'batchmill[spark,iceberg]' installs that one"
        )
        raise ConfigError("pyspark", spark, allowed)
    runtime = f"org.apache.iceberg:iceberg-spark-runtime-{spark}_2.13:{ICEBERG_VERSION}"
    return {"spark.jars.packages": runtime}


class IcebergExport:
    """Appends what the commits of a pipeline change to a table.

    ``checkpoint`` is that of the pipeline, which has an outbox (``Pipeline(outbox=True)``).
    ``table`` is a name in a catalog of the session's: ``catalog.namespace.table``; it is created if
    there is none. ``name`` is that of the exporter in the store: several have one each.
    """

    def __init__(
        self,
        spark: SparkSession,
        *,
        store: Store,
        checkpoint: str | Path,
        table: str,
        name: str = "iceberg",
    ) -> None:
        self._spark = spark
        self._store = store
        self._outbox = Outbox.of(Path(checkpoint).resolve())
        self._table = table
        self._name = name
        self._columns = columns_of(spark, _SCHEMA)

    def run(self) -> int:
        """Append all commits that are not in the table yet, oldest first; how many there were.

        Raises :class:`PipelineError` if another process does the same.
        """
        lock = FileLock.take(self._outbox.folder / f"exporter-{self._name}.lock")
        if lock is None:
            raise PipelineError(
                f"another process appends to Iceberg as {self._name!r}: stop that one first, or "
                "give this one a name of its own"
            )
        with lock:
            return self._append_all()

    def _append_all(self) -> int:
        place = self._outbox.place
        position = self._store.join_outbox(self._name, place)
        self._spark.sql(
            f"CREATE TABLE IF NOT EXISTS {self._table} ({self._columns.toDDL()}) "
            "USING iceberg PARTITIONED BY (days(time))"
        )
        last = self._last()
        appended = 0
        while files := self._store.outbox(place, after=position):
            metrics = {
                (metric.name, metric.version): metric
                for metric in self._store.metrics(include_retired=True)
            }
            for file in files:
                rows = file.rows
                if file.seq <= last:
                    log.info("commit %d is in %s already", file.seq, self._table)
                elif (self._outbox.folder / file.path).exists():
                    self._append(file, metrics)
                    appended += 1
                else:
                    rows = self._missing(file)
                self._outbox.remove(self._store.pass_outbox(self._name, place, [(file.seq, rows)]))
                position = file.seq
        return appended

    def _last(self) -> int:
        """The newest commit of this outbox that the table has; 0: none."""
        summary = F.col("summary")
        newest = (
            self._spark.table(f"{self._table}.snapshots")
            .where(summary[_PLACE] == self._outbox.place)
            .agg(F.max(summary[_SEQ].cast("bigint")))
            .first()
        )
        return 0 if newest is None else newest[0] or 0

    def _append(self, file: OutboxFile, metrics: Mapping[tuple[str, int], StoredMetric]) -> None:
        cores = self._spark.sparkContext.defaultParallelism
        tasks = max(1, min(cores, -(-file.rows // _ROWS_PER_TASK)))
        batch = int(Path(file.path).name.partition("-")[0])
        step = _ReadChanges(self._outbox, file, batch, metrics, tasks)
        rows = self._spark.range(0, tasks, 1, tasks).mapInArrow(step, self._columns)
        named = {
            _PLACE: self._outbox.place,
            _SEQ: file.seq,
            "batchmill.stream": file.stream,
            "batchmill.batch": batch,
        }
        with explain_task_error():
            _writer(rows, self._table, named).append()

    def _missing(self, file: OutboxFile) -> int:
        """How many of a file's rows count as passed: none of one that had to make room."""
        listed = self._store.outbox(self._outbox.place, after=file.seq - 1, limit=1)
        if not listed or listed[0].seq != file.seq:
            log.warning(
                "%s had to make room in the outbox: %s missing from %s",
                file.path,
                count_of(file.rows, "row") + (" is" if file.rows == 1 else " are"),
                self._table,
            )
            return 0
        raise PipelineError(
            f"{self._outbox.folder / file.path} is missing, with {count_of(file.rows, 'row')} that "
            "the store has and this table lacks: put the file back"
        )


@dataclass(frozen=True)
class SpanExport:
    """What a call of :func:`export_spans` has written."""

    spans: int = 0
    """Spans that the table did not have."""
    hours: int = 0
    """Hours of which it had not all spans; each was written as a whole."""
    skipped: int = 0
    """Hours of which it had all spans that the folder has."""


def export_spans(spark: SparkSession, folder: str | Path, *, table: str) -> SpanExport:
    """Write the kept spans of a folder to a table; see :class:`SpanExport` for what it returns.

    ``folder`` is that of ``keep_spans``, ``table`` a name in a catalog of the session's, which is
    created if there is none, with a partition for each hour. Only hours of which the folder has
    spans that the table lacks are written, each as a whole, with every span once: so a call that
    died is repeated. Spans that the folder drops stay in the table.

    Raises :class:`PipelineError` if another call exports the folder at this moment. It has to write
    a file for that, ``.export.lock``, into the folder.
    """
    folder = kept_folder(folder)
    lock = FileLock.take(folder / ".export.lock")
    if lock is None:
        raise PipelineError(
            f"the kept spans of {folder} are being exported by another call of export_spans: "
            "repeat this one when that has ended"
        )
    with lock:
        spark.sql(
            f"CREATE TABLE IF NOT EXISTS {table} ({columns_of(spark, SCHEMA).toDDL()}) "
            "USING iceberg PARTITIONED BY (hours(time))"
        )
        exported = _exported(spark, table)
        reader = SpanReader(folder)
        written = [
            0 if _mark(hour, names) in exported else _export_hour(spark, reader, hour, table)
            for hour, names in sorted(reader.hours().items())
        ]
    return SpanExport(sum(written), len(written) - written.count(0), written.count(0))


def _export_hour(spark: SparkSession, reader: SpanReader, start: datetime, table: str) -> int:
    """Write an hour if the folder has spans of it that the table lacks; how many these are."""
    end = start + timedelta(hours=1, microseconds=-1)
    while True:
        # Listed before Spark lists them: what comes in between has a digest of its own next time.
        names = reader.hours().get(start, [])
        mark = dict(zip((_HOUR, _FILES), _mark(start, names), strict=True))
        frame = spans(spark, reader.folder, start=start, end=end)
        frame = frame.drop("hour").dropDuplicates(_SPAN_IDS)
        # With what the table has: the folder may have dropped some of it.
        old = spark.table(table).where(F.col("time").between(F.lit(start), F.lit(end)))
        new = frame.join(old.select(*_SPAN_IDS), _SPAN_IDS, "left_anti").select(*old.columns)
        try:
            if count := new.count():
                _writer(old.union(new), table, mark).overwritePartitions()
            else:  # files were merged or dropped: the next call need not look at them again
                nothing = spark.createDataFrame(SCHEMA.empty_table())
                _writer(nothing, table, mark).append()
        except Exception:
            if names == reader.hours().get(start, []):
                raise
            log.info("files of %s were merged meanwhile: reading them again", start)
        else:
            return count


def _mark(hour: datetime, names: Sequence[str]) -> tuple[str, str]:
    """An hour, and a digest of the names of its files: a file does not change under its name."""
    return f"{hour:%Y-%m-%dT%H}", sha256("\n".join(sorted(names)).encode()).hexdigest()


def _exported(spark: SparkSession, table: str) -> set[tuple[str, str]]:
    """The marks in the summaries of the snapshots that made the table what it is."""
    summary = F.col("summary")
    valid = spark.table(f"{table}.history").where("is_current_ancestor")
    marks = (
        spark.table(f"{table}.snapshots")
        .join(valid, "snapshot_id", "left_semi")
        .where(summary[_FILES].isNotNull())
        .select(summary[_HOUR], summary[_FILES])
    )
    return {(hour, files) for hour, files in marks.collect()}


def _writer(rows: DataFrame, table: str, summary: Mapping[str, object]) -> DataFrameWriterV2:
    """Writes rows to a table; the snapshot's summary gets these properties."""
    writer = rows.writeTo(table)
    for key, value in summary.items():
        writer = writer.option(f"snapshot-property.{key}", str(value))
    return writer


@dataclass(frozen=True)
class _ReadChanges:
    """Reads a file of the outbox; several tasks share its pieces."""

    outbox: Outbox
    file: OutboxFile
    batch: int
    metrics: Mapping[tuple[str, int], StoredMetric]
    tasks: int

    def __call__(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """The rows of the tasks with these numbers."""
        for batch in batches:
            for task in batch[0].to_pylist():
                for number, changes in enumerate(self.outbox.read(self.file.path)):
                    if number % self.tasks == task:
                        rows = list(self._rows(changes))
                        yield pa.RecordBatch.from_pylist(rows, _SCHEMA)

    def _rows(self, changes: Changes) -> Iterator[dict[str, Any]]:
        for entry in changes.metrics:
            metric = self.metrics.get((entry.name, entry.version))
            columns = [changes.cells[name] for name in entry.columns]
            # What a metric means that the store does not keep any more is not known.
            merges = [cell.value for cell in metric.plan.cells] if metric else [None] * len(columns)
            for bucket, entity, *cells in zip(
                changes.buckets, changes.entities, *columns, strict=True
            ):
                values: dict[str, int | float] | None = None
                if metric is not None:
                    value = metric.plan.final_value(cells, Grain.MINUTE.minutes)
                    if value is None:  # nothing of it passed the metric's filters
                        continue
                    values = dict(value) if isinstance(value, dict) else {"": value}
                yield {
                    "stream": self.file.stream,
                    "batch": self.batch,
                    "time": bucket_start(bucket),
                    "source": changes.source,
                    "metric": entry.name,
                    "version": entry.version,
                    "entity_kind": entity.kind,
                    "entity_id": entity.id,
                    "entity_name": entity.name,
                    "layers": sorted(entity.layers),
                    "values": None if values is None else list(values.items()),
                    "state": [
                        {"merge": merge, "value": None if cell is None else str(cell)}
                        for merge, cell in zip(merges, cells, strict=True)
                    ],
                }
