"""The spans of a micro-batch: what comes of them, and which of them wait for a later batch.

Spans of one trace reach us in different batches. All spans are kept, as a few columns, in files
beside the checkpoint until :attr:`~batchmill.spark.PipelineSettings.span_wait_s` is over, or in a
backfill until its end; which files are alive is part of what the store commits, so a batch that is
run again starts from the same ones. A file that no commit names is nobody's, and is removed in
passing. So are the ids of spans that were counted, if those that are delivered twice are to count
once: see :mod:`.dedup`.
"""

from __future__ import annotations

import contextlib
import shutil
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
from pyspark import StorageLevel
from pyspark.sql import DataFrame, SparkSession

from batchmill.sources import split_entity_id
from batchmill.spark.input.reader import read_parquet
from batchmill.spark.input.segments import spark_path
from batchmill.spark.l1.fusion import Rows
from batchmill.spark.l2.entities import EntityBook
from batchmill.spark.settings import PipelineSettings
from batchmill.spark.spans import carry, dedup
from batchmill.spark.spans.columns import SPAN_SCHEMA, compact
from batchmill.spark.spans.direct import direct_sources, row_counts
from batchmill.spark.spans.links import DIGEST_SCHEMA, Links, link
from batchmill.spark.spans.relations import relation_sources
from batchmill.spark.spans.thresholds import SlowThresholds, TopNThresholds
from batchmill.spark.spans.topn import SERVICE_DATABASE, statement_stats, topn_records
from batchmill.store import Batch, Carry, StatementRow, TopNRow


@dataclass(frozen=True)
class Waiting:
    """The files of spans that wait, oldest first."""

    files: tuple[Carry, ...] = ()
    seen: tuple[Carry, ...] = ()
    """The files of ids that were counted, oldest first."""
    expire_all: bool = False
    """Whether nothing more is to be waited for."""


@dataclass
class Traced:
    """What the spans of a batch come to."""

    sources: dict[str, Rows] = field(default_factory=dict)
    rows: int = 0
    oldest_us: int = 0
    newest_us: int = 0
    late: int = 0
    """How many spans came late."""
    duplicates: int = 0
    """How many spans were left out, as they were delivered before."""
    jobs: list[Callable[[], Any]] = field(default_factory=list)
    """To be run with the sources' own; in the order that :meth:`TraceWork.add` expects."""
    add_carry: list[Carry] = field(default_factory=list)
    drop_carry: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class _Moment:
    """When a batch is made: what its spans are marked with, and which of earlier ones go."""

    tick: int
    expire_before: int | None
    number: int
    expire: bool
    late_before_us: int | None


class TraceWork:
    """Turns spans into rows of sources, links, TopN records, and files of waiting spans."""

    def __init__(
        self,
        spark: SparkSession,
        folder: Path,
        settings: PipelineSettings,
        wanted: frozenset[str],
        seen: dedup.SeenIds | None = None,
    ) -> None:
        self._spark = spark
        self.folder = folder
        self._seen = seen
        self._settings = settings
        self._wanted = wanted
        self._slow = TopNThresholds(
            database=SlowThresholds.parse(settings.slow_database_ms),
            cache=SlowThresholds.parse(settings.slow_cache_ms),
        )

    @contextlib.contextmanager
    def open(
        self,
        waiting: Waiting,
        spans: DataFrame | None,
        *,
        now: float,
        number: int,
        expire: bool = True,
        late_before_us: int | None = None,
    ) -> Iterator[Traced]:
        """The spans' part of a batch; what Spark keeps for it is let go at the end.

        ``spans`` are those that fit; None if there are none. Without ``expire`` none is let go for
        having waited long. Those that start before ``late_before_us`` are late.
        """
        earlier = (*waiting.files, *waiting.seen)
        tick = max([int(now * 1000), *(each.arrived_ms + 1 for each in earlier)])
        wait_ms = int(self._settings.span_wait_s * 1000)
        expired = [
            each
            for each in waiting.files
            if waiting.expire_all or (expire and each.arrived_ms <= tick - wait_ms)
        ]
        if spans is None and not expired:
            yield Traced()
            return
        carry.check(waiting.files)
        expire_before = max((each.arrived_ms for each in expired), default=None)
        if spans is None:
            spans = self._spark.createDataFrame([], SPAN_SCHEMA)
        kept: list[DataFrame] = []

        def keep(frame: DataFrame) -> DataFrame:
            kept.append(frame.persist(StorageLevel.MEMORY_AND_DISK))
            return frame

        try:
            new = keep(compact(spans))
            moment = _Moment(tick, expire_before, number, expire, late_before_us)
            yield self._traced(waiting, expired, new, keep, moment)
        finally:
            for frame in kept:
                frame.unpersist()

    def _traced(
        self,
        waiting: Waiting,
        expired: Sequence[Carry],
        new: DataFrame,
        keep: Callable[[DataFrame], DataFrame],
        moment: _Moment,
    ) -> Traced:
        counts, oldest_us, newest_us = row_counts(new)
        arrived = counts[""]
        over = self._over(waiting, moment)
        seen = [each for each in waiting.seen if each not in over]
        if self._seen is not None and arrived:
            small = arrived <= self._settings.small_batch_rows
            clean = self._seen.clean(new, seen, keep, small=small)
            if clean is not new:
                new = clean
                counts, _, _ = row_counts(new)
        result = Traced(rows=counts.pop(""), oldest_us=oldest_us, newest_us=newest_us)
        result.duplicates = arrived - result.rows
        late_us = moment.late_before_us
        if late_us is not None and result.rows and oldest_us < late_us:
            result.late = new.where(f"time < TIMESTAMP_MICROS({late_us}L)").count()
        result.drop_carry = [each.path for each in (*expired, *over)]
        result.sources = {
            source: rows
            for source, rows in direct_sources(new).items()
            if counts[source] and source in self._wanted
        }
        carried = None
        if waiting.files:
            paths = [each.path for each in waiting.files]
            carried = read_parquet(self._spark, DIGEST_SCHEMA, paths)
        links = link(new, carried, moment.tick, moment.expire_before)
        keep(links.paired)
        result.sources |= {
            source: rows
            for source, rows in relation_sources(links.relations).items()
            if source in self._wanted
        }
        result.jobs = [links.unresolved.toArrow]
        if result.rows:
            result.jobs.append(lambda: self._write(links, waiting, expired, moment, result))
            if self._seen is not None:
                result.jobs.append(lambda: self._write_seen(new, seen, moment, result))
        if counts["DatabaseAccess"] or counts["CacheAccess"]:
            top = topn_records(new, self._settings.top_n, self._slow)
            result.jobs += [top.toArrow, statement_stats(new).toArrow]
        return result

    def _write(
        self,
        links: Links,
        waiting: Waiting,
        expired: Sequence[Carry],
        moment: _Moment,
        result: Traced,
    ) -> None:
        """Put this batch's spans where later ones find them, together with files of its time."""
        gone = {each.path for each in expired}
        alive = [each for each in waiting.files if each.path not in gone]
        wait_ms = int(self._settings.span_wait_s * 1000)
        merged = carry.to_merge(
            alive, tick=moment.tick, rows=result.rows, wait_ms=wait_ms, expire=moment.expire
        )
        digest = links.digest
        if merged:
            paths = [each.path for each in merged]
            digest = digest.unionByName(read_parquet(self._spark, DIGEST_SCHEMA, paths))
            result.drop_carry += paths
        target = self.folder / f"{moment.number}-{uuid.uuid4().hex[:8]}"
        rows = result.rows + sum(each.rows for each in merged)
        if rows < 1_000_000:
            digest = digest.coalesce(1)
        digest.write.parquet(spark_path(target))
        carry.make_durable(target)
        result.add_carry.append(Carry(spark_path(target), moment.number, moment.tick, rows))

    def _over(self, waiting: Waiting, moment: _Moment) -> list[Carry]:
        """The files of ids that are asked for no more; a backfill asks for all until its end."""
        if self._seen is None or (waiting.expire_all and not moment.expire):
            return list(waiting.seen)
        if not moment.expire:
            return []
        return dedup.expired(waiting.seen, moment.tick, self._seen.window_ms)

    def _write_seen(
        self, new: DataFrame, seen: Sequence[Carry], moment: _Moment, result: Traced
    ) -> None:
        """Write down the ids of this batch's spans, for later ones."""
        assert self._seen is not None
        file, merged = self._seen.write(
            new, result.rows, seen, number=moment.number, tick=moment.tick, expire=moment.expire
        )
        result.add_carry.append(file)
        result.drop_carry += [each.path for each in merged]

    def add(self, traced: Traced, tables: Sequence[Any], batch: Batch, book: EntityBook) -> None:
        """Put the results of ``traced.jobs`` into the batch."""
        batch.add_carry += traced.add_carry
        batch.drop_carry += traced.drop_carry
        tables = [each for each in tables if isinstance(each, pa.Table)]
        if not tables:
            return
        for row in tables[0].to_pylist():
            key = ("unresolved", "Span", row["reason"])
            batch.counters[key] = batch.counters.get(key, 0) + row["spans"]
        if len(tables) == 3:
            _add_top(tables[1].to_pylist(), tables[2].to_pylist(), batch, book)

    def tidy(self, alive: Sequence[Carry]) -> None:
        """Remove the files that are not ``alive``: no commit names them, nobody will read them."""
        names = {each.path.rstrip("/").rsplit("/", 1)[-1] for each in alive}
        for place in (self.folder, self.folder.with_name(dedup.FOLDER)):
            for folder in place.iterdir() if place.is_dir() else ():
                if folder.name not in names:
                    shutil.rmtree(folder, ignore_errors=True)


def _add_top(
    records: Sequence[Mapping[str, Any]],
    statements: Sequence[Mapping[str, Any]],
    batch: Batch,
    book: EntityBook,
) -> None:
    for row in records:
        batch.topn.append(
            TopNRow(
                row["stream"],
                _entity(row, book),
                row["minute"],
                row["latency"],
                row["time_us"],
                row["trace_id"],
                row["span_id"],
                row["statement"],
                row["normalised"],
            )
        )
    for row in statements:
        batch.statements.append(
            StatementRow(
                row["stream"],
                _entity(row, book),
                row["minute"],
                row["normalised"],
                row["runs"],
                row["total_ms"],
            )
        )


def _entity(row: Mapping[str, Any], book: EntityBook) -> int:
    called = row["stream"] != SERVICE_DATABASE
    layers = {"VIRTUAL_CACHE" if "cache" in row["stream"] else "VIRTUAL_DATABASE"}
    id_ = row["entity"]
    names = split_entity_id("service", id_)
    return book.number("service", id_, names, layers if called else {"GENERAL"})
