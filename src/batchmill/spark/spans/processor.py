"""Processes the spans of a micro-batch, and keeps those that wait for a later batch.

Spans of one trace arrive in different batches. A summary of each span is kept in files beside the
checkpoint until :attr:`~batchmill.spark.PipelineSettings.span_wait_s` is over, or in a backfill
until its end. A file that no commit names is unused, and is removed. The same holds for the files
of the dedup index.
"""

from __future__ import annotations

import contextlib
import shutil
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
from pyspark import StorageLevel
from pyspark.sql import DataFrame, SparkSession

from batchmill.aggregate import entity_number
from batchmill.oal import MapKey
from batchmill.spark.input.reader import SPAN_SCHEMA, read_parquet, write_parquet
from batchmill.spark.input.segments import spark_path
from batchmill.spark.l1.fusion import Rows
from batchmill.spark.l1.plan import SourcePlan
from batchmill.spark.settings import PipelineSettings
from batchmill.spark.spans import dedup, pending
from batchmill.spark.spans.columns import compact
from batchmill.spark.spans.links import SUMMARY_SCHEMA, Links, link
from batchmill.spark.spans.pending import PendingFiles
from batchmill.spark.spans.sources import (
    SERVED,
    TAGS,
    broker_sources,
    count_spans,
    direct_sources,
    relation_sources,
)
from batchmill.spark.spans.topn import statement_stats, topn_records
from batchmill.store import Batch, Carry, StatementRow, TopNRow

if TYPE_CHECKING:
    from batchmill.aggregate import EntityBook

_LARGE = 1_000_000
"""From this many rows on, several files are written."""


@dataclass
class SpanResults:
    """What the spans of a batch give. Some of it is filled in by ``jobs``."""

    sources: dict[str, Rows] = field(default_factory=dict)
    rows: int = 0
    newest_us: int = 0
    late: int = 0
    """How many spans came late."""
    duplicates: int = 0
    """How many spans were dropped, since they were delivered before."""
    jobs: list[Callable[[], None]] = field(default_factory=list)
    """To be run beside the aggregation of the sources, in any order."""
    add_files: list[Carry] = field(default_factory=list)
    drop_files: list[str] = field(default_factory=list)
    unresolved: pa.Table | None = None
    top: pa.Table | None = None
    statements: pa.Table | None = None

    def collect_unresolved(self, frame: DataFrame) -> None:
        """Fetch how many spans have no partner."""
        self.unresolved = frame.toArrow()

    def collect_top(self, frame: DataFrame) -> None:
        """Fetch the slowest statements."""
        self.top = frame.toArrow()

    def collect_statements(self, frame: DataFrame) -> None:
        """Fetch how often each statement ran."""
        self.statements = frame.toArrow()


@dataclass(frozen=True)
class _Moment:
    """When a batch is made: what its spans are marked with, and which earlier ones expire."""

    tick: int
    expire_before: int | None
    number: int
    expire: bool
    late_before_us: int | None


class SpanProcessor:
    """Turns spans into rows of event types, links, TopN records, and files of pending spans."""

    def __init__(
        self,
        spark: SparkSession,
        folder: Path,
        settings: PipelineSettings,
        plans: Mapping[str, SourcePlan],
        index: dedup.DedupIndex | None = None,
    ) -> None:
        """``plans`` are those of the event types that a metric reads."""
        self._spark = spark
        self.folder = folder
        self._index = index
        self._settings = settings
        self._wanted = frozenset(plans)
        self._keys = _attribute_keys(plans)
        self._slow = settings.thresholds()

    @contextlib.contextmanager
    def process(
        self,
        files: PendingFiles,
        spans: DataFrame | None,
        *,
        now: float,
        number: int,
        expire: bool = True,
        late_before_us: int | None = None,
    ) -> Iterator[SpanResults]:
        """Process the valid ``spans`` of a batch; what Spark persists for it is freed at the end.

        Without ``expire`` no span is given up for having waited long. Spans that start before
        ``late_before_us`` are late.
        """
        earlier = (*files.spans, *files.dedup)
        tick = max([int(now * 1000), *(file.arrived_ms + 1 for file in earlier)])
        wait_ms = int(self._settings.span_wait_s * 1000)
        expired = [
            file
            for file in files.spans
            if files.expire_all or (expire and file.arrived_ms <= tick - wait_ms)
        ]
        if spans is None and not expired:
            yield SpanResults()
            return
        pending.check_files(files.spans)
        expire_before = max((file.arrived_ms for file in expired), default=None)
        if spans is None:
            spans = self._spark.createDataFrame([], SPAN_SCHEMA)
        persisted: list[DataFrame] = []

        def persist(frame: DataFrame) -> DataFrame:
            persisted.append(frame.persist(StorageLevel.MEMORY_AND_DISK))
            return frame

        try:
            new = persist(compact(spans, keys=self._keys))
            moment = _Moment(tick, expire_before, number, expire, late_before_us)
            yield self._process(files, expired, new, persist, moment)
        finally:
            # Newest first: for each frame that others are derived from, Spark plans those again.
            for frame in reversed(persisted):
                frame.unpersist()

    def _process(
        self,
        files: PendingFiles,
        expired: Sequence[Carry],
        new: DataFrame,
        persist: Callable[[DataFrame], DataFrame],
        moment: _Moment,
    ) -> SpanResults:
        counts = arrived = count_spans(new)
        expired_index = self._expired_index(files, moment)
        index_files = [file for file in files.dedup if file not in expired_index]
        if self._index is not None and arrived.spans:
            small = arrived.spans <= self._settings.small_batch_rows
            unique = self._index.drop_duplicates(new, index_files, persist, small=small)
            if unique is not new:
                new = unique
                counts = count_spans(new)
        results = SpanResults(
            rows=counts.spans,
            newest_us=arrived.newest_us,
            duplicates=arrived.spans - counts.spans,
        )
        late_us = moment.late_before_us
        if late_us is not None and results.rows and arrived.oldest_us < late_us:
            results.late = new.where(f"time < TIMESTAMP_MICROS({late_us}L)").count()
        results.drop_files = [file.path for file in (*expired, *expired_index)]
        results.sources = {
            source: rows
            for source, rows in direct_sources(new, counts).items()
            if counts.rows[source] and source in self._wanted
        }
        earlier = None
        if files.spans:
            earlier = read_parquet(self._spark, SUMMARY_SCHEMA, [file.path for file in files.spans])
        links = link(new, earlier, moment.tick, moment.expire_before)
        persist(links.paired)
        most_paired = counts.spans + sum(file.rows for file in files.spans)
        linked = relation_sources(links.relations, most_paired)
        if counts.messages or files.spans:
            linked |= broker_sources(links.paired, most_paired)
        results.sources |= {
            source: rows for source, rows in linked.items() if source in self._wanted
        }
        results.jobs = [lambda: results.collect_unresolved(links.unresolved)]
        if results.rows:
            results.jobs.append(lambda: self._write_pending(links, files, expired, moment, results))
            if self._index is not None:
                results.jobs.append(lambda: self._write_index(new, index_files, moment, results))
        if counts.rows["DatabaseAccess"] or counts.rows["CacheAccess"]:
            top = topn_records(new, self._settings.top_n, self._slow)
            statements = statement_stats(new)
            results.jobs += [
                lambda: results.collect_top(top),
                lambda: results.collect_statements(statements),
            ]
        return results

    def _write_pending(
        self,
        links: Links,
        files: PendingFiles,
        expired: Sequence[Carry],
        moment: _Moment,
        results: SpanResults,
    ) -> None:
        """Keep this batch's spans for later ones, merged with files of the same time."""
        gone = {file.path for file in expired}
        alive = [file for file in files.spans if file.path not in gone]
        wait_ms = int(self._settings.span_wait_s * 1000)
        merged = pending.to_merge(
            alive, tick=moment.tick, rows=results.rows, wait_ms=wait_ms, expire=moment.expire
        )
        summary = links.summary
        if merged:
            paths = [file.path for file in merged]
            summary = summary.unionByName(read_parquet(self._spark, SUMMARY_SCHEMA, paths))
            results.drop_files += paths
        rows = results.rows + sum(file.rows for file in merged)
        if rows < _LARGE:
            summary = summary.coalesce(1)
        target = self.folder / f"{moment.number}-{uuid.uuid4().hex[:8]}"
        write_parquet(summary, target)
        results.add_files.append(Carry(spark_path(target), moment.number, moment.tick, rows))

    def _expired_index(self, files: PendingFiles, moment: _Moment) -> list[Carry]:
        """The files of the dedup index that are no longer needed; a backfill needs all of them."""
        if self._index is None or (files.expire_all and not moment.expire):
            return list(files.dedup)
        if not moment.expire:
            return []
        return dedup.expired(files.dedup, moment.tick, self._index.window_ms)

    def _write_index(
        self, new: DataFrame, files: Sequence[Carry], moment: _Moment, results: SpanResults
    ) -> None:
        """Add the ids of this batch's spans to the dedup index."""
        assert self._index is not None
        file, merged = self._index.write(
            new, results.rows, files, number=moment.number, tick=moment.tick, expire=moment.expire
        )
        results.add_files.append(file)
        results.drop_files += [old.path for old in merged]

    def add_to(self, batch: Batch, results: SpanResults, book: EntityBook) -> None:
        """Add the results to a batch, once all ``jobs`` are done."""
        batch.add_carry += results.add_files
        batch.drop_carry += results.drop_files
        for row in _rows(results.unresolved):
            key = ("unresolved", "Span", row["reason"])
            batch.counters[key] = batch.counters.get(key, 0) + row["spans"]
        # The columns of both tables are named after the fields.
        for row in _rows(results.top):
            batch.topn.append(TopNRow(**row | _numbered(row, book)))
        for row in _rows(results.statements):
            batch.statements.append(StatementRow(**row | _numbered(row, book)))

    def remove_unused(self, used: Sequence[Carry]) -> None:
        """Remove the files that are not ``used``: no commit names them, nobody will read them."""
        names = {file.path.rstrip("/").rsplit("/", 1)[-1] for file in used}
        for place in (self.folder, self.folder.with_name(dedup.FOLDER)):
            for folder in place.iterdir() if place.is_dir() else ():
                if folder.name not in names:
                    shutil.rmtree(folder, ignore_errors=True)


def _attribute_keys(plans: Mapping[str, SourcePlan]) -> frozenset[str] | None:
    """The keys of attributes that metrics look up; None: some metric reads all attributes."""
    keys = set()
    for path in (path for source in SERVED if source in plans for path in plans[source].paths):
        if path.parts[0] in TAGS:
            key = path.parts[-1]
            if not isinstance(key, MapKey):
                return None
            keys.add(key.key)
    return frozenset(keys)


def _rows(table: pa.Table | None) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = [] if table is None else table.to_pylist()
    return rows


def _numbered(row: dict[str, Any], book: EntityBook) -> dict[str, Any]:
    return {"entity": entity_number(row["stream"], row["entity"], book)}
