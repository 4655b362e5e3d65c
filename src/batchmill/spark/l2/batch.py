"""One micro-batch: from the names of its segments to what the store commits.

    look at the segments ─► rows of each source ─► L1 ─► deltas of three grains ─┐
              └─► spans ─► rows of sources, links, TopN ──────────► L1 ─► …      ├─► Batch
                            └─► spans that wait for a partner ───────────────────┘

The same for a stream, a backfill and a test: nothing here knows where the names came from, and
nothing is changed but the quarantine and the files of waiting spans, whose names go into the batch.
"""

from __future__ import annotations

import concurrent.futures
import logging
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import pyarrow as pa
from py4j.protocol import Py4JError, Py4JJavaError
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession

from batchmill.errors import ConfigError
from batchmill.sources import Catalog, SourceType, bucket_end, bucket_start
from batchmill.spark.input.quarantine import Quarantine
from batchmill.spark.input.reader import FITS, REASON, frame_rows, misfits, read_rows, understood
from batchmill.spark.input.schema import SPAN, NotUnderstood
from batchmill.spark.input.segments import BadSegment, Segment, look_at, read_through
from batchmill.spark.input.slices import cut
from batchmill.spark.l1.fusion import Rows, fuse
from batchmill.spark.l1.plan import SourcePlan
from batchmill.spark.l2.deltas import SourceDeltas, to_deltas
from batchmill.spark.l2.entities import EntityBook
from batchmill.spark.runtime.faults import blames_the_file, spark_folders, telling_full_disks, told
from batchmill.spark.runtime.phases import DELTAS, L1, READ, SPANS, Stopwatch
from batchmill.spark.settings import PipelineSettings
from batchmill.spark.spans.dedup import REASON as DELIVERED_AGAIN
from batchmill.spark.spans.trace import Traced, TraceWork, Waiting
from batchmill.store import Batch

log = logging.getLogger("batchmill.spark")

_AT_ONCE = 4
"""How many sources are aggregated at the same time: planning one overlaps running another."""
_ROWS_PER_PARTITION = 1_000_000
_LISTED_PER_PARTITION = 4_000_000
"""How many entries of tallies one partition holds at a time, as objects of the JVM's."""
_HOUR_US = 3_600_000_000


@dataclass
class Work:
    """What a batch is to be made of."""

    stream: str
    number: int
    epoch: int
    now: float
    """Seconds since 1970."""
    newest: int | None
    """The newest minute of earlier batches."""
    paths: Sequence[str] = ()
    frames: Mapping[str, DataFrame] = field(default_factory=dict)
    """Rows that lie in no segment, by source: a backfill's."""
    waiting: Waiting = field(default_factory=Waiting)
    settle: bool = False
    expire: bool = True
    """Whether spans that waited long enough are let go; a backfill keeps all until its end."""
    watch: Stopwatch = field(default_factory=Stopwatch)


@dataclass
class BatchStats:
    """What went into a batch."""

    segments: int = 0
    rows: int = 0
    quarantined_segments: int = 0
    quarantined_rows: int = 0
    late: int = 0
    duplicates: int = 0
    """Spans that were delivered before."""


class BatchMaker:
    """Makes batches, one at a time."""

    def __init__(
        self,
        spark: SparkSession,
        catalog: Catalog,
        plans: Mapping[str, SourcePlan],
        settings: PipelineSettings,
        quarantine: Quarantine,
        trace: TraceWork,
    ) -> None:
        self._spark = spark
        self._catalog = catalog
        self._plans = plans
        self._settings = settings
        self._quarantine = quarantine
        self._trace = trace
        self._folders = [trace.folder, quarantine.folder, *spark_folders(spark)]
        self._cores = max(1, spark.sparkContext.defaultParallelism)

    def make(self, work: Work) -> tuple[Batch, BatchStats]:
        """The batch. A segment that turns out broken on the way is set aside, and left out."""
        segments, bad = look_at(work.paths)
        segments, unknown = self._known(segments)
        bad += unknown
        latest_us = int((work.now + self._settings.max_ahead_s) * 1_000_000)
        # A number that changes from batch to batch would have Spark compile every plan anew. So the
        # limit is first rounded up, to one that stays for an hour.
        limit_us = -(-latest_us // _HOUR_US) * _HOUR_US
        while True:
            try:
                with telling_full_disks(*self._folders):
                    making = self._make(work, segments, bad, limit_us)
                if making.newest_us > latest_us and limit_us > latest_us:
                    limit_us = latest_us
                    continue
                return making.batch, making.stats
            except (PySparkException, Py4JJavaError, pa.ArrowException) as error:
                broken = read_through(segments) or self._refused(segments, limit_us)
                if not broken:
                    raise
                log.warning("batch %s: %s", work.number, _in_one_line(error))
                bad += broken
                gone = {each.path for each in broken}
                segments = [each for each in segments if each.path not in gone]

    def _make(
        self, work: Work, segments: Sequence[Segment], bad: Sequence[BadSegment], latest_us: int
    ) -> _Making:
        making = _Making(
            work,
            Batch(work.stream, work.epoch, work.number, settle=work.settle),
            BatchStats(segments=len(segments)),
            latest_us=latest_us,
        )
        for segment in segments:
            making.segments[segment.source].append(segment)
        for each in bad:
            self._set_aside(making, each)
        arrived = sum(each.rows for each in segments)
        making.small = arrived <= self._settings.small_batch_rows and not work.frames
        self._spread(making, arrived, bool(work.frames))
        sources = {
            source: self._read_frame(making, source, rows)
            for source, rows in work.frames.items()
            if source != SPAN.name
        }
        for source in [each for each in making.segments if each != SPAN.name]:
            rows = self._read(making, source)
            if rows is not None:
                sources[source] = rows
        spans = self._read_spans(making)
        work.watch.lap(READ)
        with self._trace.open(
            work.waiting,
            spans,
            now=work.now,
            number=work.number,
            expire=work.expire,
            late_before_us=self._late_before_us(work.newest),
        ) as traced:
            work.watch.lap(SPANS)
            self._run(making, sources, traced)
        self._count_spans(making, traced)
        making.batch.entities = making.book.rows()
        for key, n in making.counters.items():
            if n:
                making.batch.counters[key] = making.batch.counters.get(key, 0) + n
        work.watch.lap(DELTAS)
        return making

    def _run(self, making: _Making, sources: Mapping[str, DataFrame], traced: Traced) -> None:
        """Aggregate all sources, several at a time, and put what comes out into the batch."""
        asked = [
            (self._plans[source], Rows(frame, slices=self._slices(making, self._plans[source])))
            for source, frame in sources.items()
        ]
        asked += [(self._plans[source], rows) for source, rows in traced.sources.items()]
        spans = {id(rows) for rows in traced.sources.values()}
        arrived = sum(each.rows for few in making.segments.values() for each in few)
        fusions = fuse(asked, together=making.small, most=arrived)
        results = _all([each.tables for each in fusions] + traced.jobs)
        making.work.watch.lap(L1)
        for fusion, tables in zip(fusions, results, strict=False):
            for (plan, rows), own in zip(fusion.parts, tables, strict=True):
                found = to_deltas(own, plan, making.book)
                self._add(making, plan, found, of_spans=id(rows) in spans)
        self._trace.add(traced, results[len(fusions) :], making.batch, making.book)

    def _refused(self, segments: Sequence[Segment], latest_us: int) -> list[BadSegment]:
        """The segments that Spark cannot read though they can be read.

        None if any failure may have another reason than what is in the file, or if all of several
        fail: then it is not their fault, and they must not be lost.
        """
        refused = []
        for each in segments:
            source = SPAN if each.source == SPAN.name else self._catalog.source(each.source)
            plan = self._plans.get(each.source)
            try:
                ways, _ = understood(source, plan.needed if plan else source.fields, [each])
                if ways:
                    rows = read_rows(self._spark, ways, latest_us)
                    rows.write.format("noop").mode("overwrite").save()
            except (PySparkException, Py4JError) as error:
                if not blames_the_file(told(error)) or not self._spark_works():
                    return []
                detail = f"Spark cannot read it: {_in_one_line(error)}"
                refused.append(BadSegment(each.path, each.source, "unreadable", detail, each.rows))
        return refused if len(refused) < len(segments) or len(segments) == 1 else []

    def _spark_works(self) -> bool:
        """Whether a job that reads no file succeeds."""
        try:
            self._spark.range(1).write.format("noop").mode("overwrite").save()
        except (PySparkException, Py4JError, AttributeError) as error:
            # A session whose context is stopped has lost an attribute that it takes.
            log.warning("Spark runs no job at all now: %s", _in_one_line(error))
            return False
        return True

    def _known(self, segments: Iterable[Segment]) -> tuple[list[Segment], list[BadSegment]]:
        known, unknown = [], []
        for each in segments:
            if each.source == SPAN.name or each.source in self._catalog.sources:
                known.append(each)
            else:
                detail = f"there is no event type named {each.source!r}"
                unknown.append(
                    BadSegment(each.path, each.source, "unknown source", detail, each.rows)
                )
        return known, unknown

    def _read(self, making: _Making, source: str) -> DataFrame | None:
        """The rows of a source; None if no metric wants them, or no segment is left."""
        plan = self._plans.get(source)
        segments = making.segments[source]
        if plan is None:
            unused = sum(each.rows for each in segments)
            making.counters["unused", source, "no metric reads it"] += unused
            return None
        return self._rows(making, plan.source, plan.needed)

    def _read_frame(self, making: _Making, source: str, rows: DataFrame) -> DataFrame:
        kind, needed = SPAN, frozenset(SPAN.fields)
        if source != SPAN.name:
            kind, needed = self._plans[source].source, frozenset(self._plans[source].needed)
        try:
            fitting, odd = frame_rows(kind, needed, rows, making.latest_us)
        except NotUnderstood as error:
            raise ConfigError("rows", error, f"a DataFrame with the columns of {source}") from error
        making.odd[source] = odd
        return fitting

    def _read_spans(self, making: _Making) -> DataFrame | None:
        """The spans that fit."""
        if (frame := making.work.frames.get(SPAN.name)) is not None:
            return self._read_frame(making, SPAN.name, frame).where(FITS)
        if SPAN.name not in making.segments:
            return None
        rows = self._rows(making, SPAN, SPAN.fields)
        return None if rows is None else rows.where(FITS)

    def _rows(self, making: _Making, source: SourceType, needed: Iterable[str]) -> DataFrame | None:
        ways, bad = understood(source, needed, making.segments[source.name])
        for each in bad:
            self._set_aside(making, each)
        gone = {each.path for each in bad}
        making.segments[source.name] = [
            each for each in making.segments[source.name] if each.path not in gone
        ]
        return read_rows(self._spark, ways, making.latest_us) if ways else None

    def _slices(self, making: _Making, plan: SourcePlan) -> tuple[DataFrame, ...]:
        """The rows of a source in several frames, each for one task; see :mod:`._l1`."""
        segments = making.segments.get(plan.source.name)
        if making.small or not segments or not plan.recipe.tallies:
            return ()
        frames = []
        for few in cut(segments, self._cores):
            ways, _ = understood(plan.source, plan.needed, few)
            frames.append(read_rows(self._spark, ways, making.latest_us))
        return tuple(frames)

    def _spread(self, making: _Making, rows: int, unknown: bool) -> None:
        """Shuffle partitions by the size of the batch: each one costs, and small ones more.

        Tallies are lists while they are aggregated; the more of them, the smaller a partition.
        """
        wanted = self._cores if unknown else min(self._cores, 1 + rows // _ROWS_PER_PARTITION)
        listed = sum(
            sum(each.rows for each in segments) * len(self._plans[source].recipe.listings)
            for source, segments in making.segments.items()
            if source in self._plans
        )
        wanted = max(wanted, listed // _LISTED_PER_PARTITION)
        self._spark.conf.set("spark.sql.shuffle.partitions", str(wanted))
        adaptive = "false" if making.small else "true"
        self._spark.conf.set("spark.sql.adaptive.enabled", adaptive)

    def _add(
        self, making: _Making, plan: SourcePlan, found: SourceDeltas, *, of_spans: bool
    ) -> None:
        """Put a source's deltas into the batch. Rows made of spans are late if the spans are, some
        of which came long ago: those are counted as they come."""
        late_before_us = None if of_spans else self._late_before_us(making.work.newest)
        batch, source = making.batch, plan.source.name
        batch.deltas += found.deltas
        making.stats.rows += found.rows
        making.counters["rows", source, ""] += found.rows
        for minute, rows in found.rows_by_minute.items():
            day = minute // 10_000
            batch.rows[source, day] = batch.rows.get((source, day), 0) + rows
            batch.newest_minute = max(batch.newest_minute or 0, minute)
            # Its last moment: whether a row of it lies beyond the limit is for Spark to tell.
            last_us = int(bucket_end(minute).timestamp()) * 1_000_000 - 1
            making.newest_us = max(making.newest_us, last_us)
            if late_before_us is not None and last_us < late_before_us:
                making.counters["late", source, ""] += rows
                making.stats.late += rows
        if found.misfits:
            self._set_rows_aside(making, plan.source)

    def _count_spans(self, making: _Making, traced: Traced) -> None:
        arrived = sum(each.rows for each in making.segments.get(SPAN.name, ()))
        making.counters["rows", SPAN.name, ""] += traced.rows
        making.counters["late", SPAN.name, ""] += traced.late
        making.counters["duplicates", SPAN.name, DELIVERED_AGAIN] += traced.duplicates
        making.stats.duplicates += traced.duplicates
        making.stats.late += traced.late
        making.newest_us = max(making.newest_us, traced.newest_us)
        odd = making.odd.get(SPAN.name)
        if arrived > traced.rows + traced.duplicates or (odd is not None and not odd.isEmpty()):
            self._set_rows_aside(making, SPAN)

    def _set_rows_aside(self, making: _Making, source: SourceType) -> None:
        work = making.work
        odd = making.odd.get(source.name)
        if odd is None:
            needed = SPAN.fields if source is SPAN else self._plans[source.name].needed
            segments = making.segments[source.name]
            odd = misfits(self._spark, source, needed, segments, making.latest_us)
        rows = odd.persist()
        try:
            self._quarantine.rows(source.name, work.stream, work.number, rows)
            for reason, count in rows.groupBy(REASON).count().collect():
                making.counters["quarantined", source.name, reason] += count
                making.stats.quarantined_rows += count
                log.warning("%s: %d rows set aside: %s", source.name, count, reason)
        finally:
            rows.unpersist()

    def _set_aside(self, making: _Making, bad: BadSegment) -> None:
        self._quarantine.segment(bad)
        making.counters["quarantined segment", bad.source, bad.reason] += 1
        if bad.rows:
            making.counters["quarantined", bad.source, bad.reason] += bad.rows
            making.stats.quarantined_rows += bad.rows
        making.stats.quarantined_segments += 1

    def _late_before_us(self, newest: int | None) -> int | None:
        """The first start that is not late, in microseconds since 1970."""
        if newest is None:
            return None
        first = bucket_start(newest) - timedelta(minutes=self._settings.late_after_minutes)
        return int(first.timestamp()) * 1_000_000


@dataclass
class _Making:
    """A batch on its way."""

    work: Work
    batch: Batch
    stats: BatchStats
    latest_us: int
    """The latest start that fits, in microseconds since 1970."""
    newest_us: int = 0
    """The latest start that there may be among the rows."""
    small: bool = False
    counters: dict[tuple[str, str, str], int] = field(default_factory=lambda: defaultdict(int))
    book: EntityBook = field(default_factory=EntityBook)
    odd: dict[str, DataFrame] = field(default_factory=dict)
    """Rows that do not fit, of sources that lie in no segment."""
    segments: dict[str, list[Segment]] = field(default_factory=lambda: defaultdict(list))


def _in_one_line(error: Exception) -> str:
    """The first line that says something: Py4J's own says no more than which call failed."""
    lines = [each for each in str(error).splitlines() if each.strip()]
    said = [each for each in lines if not each.startswith("An error occurred while calling")]
    return (said or lines or [type(error).__name__])[0].lstrip(": ")


def _all(jobs: Sequence[Callable[[], Any]]) -> list[Any]:
    """What the jobs answer, in their order. After a failure none is left running."""
    if len(jobs) <= 1:
        return [each() for each in jobs]
    with concurrent.futures.ThreadPoolExecutor(_AT_ONCE, "batchmill-l1") as pool:
        running = [pool.submit(each) for each in jobs]
        try:
            return [each.result() for each in running]
        except BaseException:
            for each in running:
                each.cancel()
            raise
