"""Writes what each commit changed, and kept spans, to Iceberg tables.

A commit becomes one snapshot of the table, whose summary names it. A process that is killed between
the append and the mark in the store finds the snapshot when it comes back, and does not repeat it.
Spans are written by hours: an hour that has more spans than the table is written as a whole, in the
place of what the table had of it.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyspark
from pyspark.sql import SparkSession
from pyspark.sql import functions as F

from batchmill.errors import ConfigError
from batchmill.files import FileLock
from batchmill.outbox import Changes, Outbox
from batchmill.sources import Grain, bucket_start
from batchmill.spark.errors import PipelineError
from batchmill.spark.failures import explain_task_error
from batchmill.spark.frames import KEPT_SPAN_COLUMNS, spans
from batchmill.store import OutboxFile, Store, StoredMetric
from batchmill.traces import SpanReader

log = logging.getLogger("batchmill.spark")

ICEBERG_VERSION = "1.12.0"
"""The version of Iceberg that is tested."""
_SPARKS = ("4.0", "4.1")
"""The versions of Spark for which Iceberg has a runtime."""
_ROWS_PER_TASK = 20_000
_PLACE, _SEQ = "batchmill.outbox", "batchmill.seq"
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
_COLUMNS = (
    "stream string, batch bigint, time timestamp, source string, metric string, version int, "
    "entity_kind string, entity_id string, entity_name string, layers array<string>, "
    "values map<string, double>, state array<struct<merge: string, value: string>>"
)
"""The same as Spark writes it."""


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
            f"CREATE TABLE IF NOT EXISTS {self._table} ({_COLUMNS}) "
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
        rows = self._spark.range(0, tasks, 1, tasks).mapInArrow(step, _COLUMNS)
        named = {
            _PLACE: self._outbox.place,
            _SEQ: file.seq,
            "batchmill.stream": file.stream,
            "batchmill.batch": batch,
        }
        writer = rows.writeTo(self._table)
        for key, value in named.items():
            writer = writer.option(f"snapshot-property.{key}", str(value))
        with explain_task_error():
            writer.append()

    def _missing(self, file: OutboxFile) -> int:
        """How many of a file's rows count as passed: none of one that had to make room."""
        listed = self._store.outbox(self._outbox.place, after=file.seq - 1, limit=1)
        if not listed or listed[0].seq != file.seq:
            log.warning(
                "%s had to make room in the outbox: its %d rows are not in %s",
                file.path,
                file.rows,
                self._table,
            )
            return 0
        raise PipelineError(
            f"{self._outbox.folder / file.path} is missing: somebody removed it. Its {file.rows:,} "
            "rows are in the store, but cannot be appended; put the file back"
        )


def export_spans(spark: SparkSession, folder: str | Path, *, table: str) -> int:
    """Write the kept spans of a folder to a table; how many hours of them were written.

    ``folder`` is that of ``keep_spans``, ``table`` a name in a catalog of the session's, which is
    created if there is none, with a partition for each hour. Only hours of which the folder has
    more spans than the table are written, each as a whole, with every span once: so a call that
    died is repeated. Spans that the folder drops stay in the table; of such an hour, spans that
    come later are written once there are more of them than the table has.
    """
    spark.sql(
        f"CREATE TABLE IF NOT EXISTS {table} ({KEPT_SPAN_COLUMNS}) "
        "USING iceberg PARTITIONED BY (hours(time))"
    )
    rows = spark.table(f"{table}.partitions").select("partition.time_hour", "record_count")
    exported = {datetime.fromtimestamp(row[0] * 3600, UTC): row[1] for row in rows.collect()}
    kept = SpanReader(Path(folder)).hours()
    hours = [hour for hour, count in sorted(kept.items()) if count > exported.get(hour, 0)]
    for hour in hours:
        _export_hour(spark, Path(folder), hour, table)
    return len(hours)


def _export_hour(spark: SparkSession, folder: Path, start: datetime, table: str) -> None:
    end = start + timedelta(hours=1, microseconds=-1)
    while True:
        files = list(folder.glob("hour=*/*.parquet"))
        frame = spans(spark, folder, start=start, end=end).drop("hour")
        # With what the table has: the folder may have dropped some of it.
        old = spark.table(table).where(F.col("time").between(F.lit(start), F.lit(end)))
        frame = frame.unionByName(old).dropDuplicates(["trace_id", "span_id"])
        try:
            frame.writeTo(table).overwritePartitions()
        except Exception:
            if all(path.exists() for path in files):
                raise
            log.info("files of %s were merged meanwhile: reading them again", start)
        else:
            return


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
