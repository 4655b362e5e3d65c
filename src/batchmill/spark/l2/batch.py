"""Makes one micro-batch: from the names of its segments to what the store commits.

    inspect segments ─► rows of each source ─► L1 ─► deltas of three grains ─┐
             ├─► deltas of processes that have made them themselves ─► …     │
             └─► spans ─► rows of sources, links, TopN ─► L1 ─► …            ├─► Batch
                           └─► pending spans ────────────────────────────────┘

A stream, a backfill and a test use the same code: where the names come from makes no difference.
Nothing is written but the quarantine and the files of pending spans, whose names go into the batch.
"""

from __future__ import annotations

import concurrent.futures
import logging
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta

import pyarrow as pa
from py4j.protocol import Py4JError, Py4JJavaError
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession

from batchmill.aggregate import (
    STATEMENT_SOURCE,
    Aggregator,
    Deltas,
    EntityBook,
    contribution,
    rows_by_minute,
)
from batchmill.errors import ConfigError
from batchmill.sources import Catalog, SourceType, bucket_end, bucket_start
from batchmill.spark.failures import (
    error_text,
    explain_full_disk,
    is_content_error,
    spark_local_folders,
)
from batchmill.spark.input.deltas import AHEAD, DeltaReader, read_statements
from batchmill.spark.input.quarantine import Quarantine
from batchmill.spark.input.reader import (
    FITS,
    REASON,
    SPAN,
    ColumnTypeError,
    check_frame,
    group_by_schema,
    read_invalid,
    read_rows,
)
from batchmill.spark.input.segments import BadSegment, Segment, cut, find_corrupt, inspect
from batchmill.spark.l1.fusion import Fusion, Part, Result, Rows, Views, fuse
from batchmill.spark.l1.plan import SourcePlan
from batchmill.spark.l2.report import DELTAS, L1, READ, SPANS, BatchStats, Stopwatch
from batchmill.spark.settings import PipelineSettings
from batchmill.spark.spans.dedup import REASON as DUPLICATE
from batchmill.spark.spans.pending import PendingFiles
from batchmill.spark.spans.processor import SpanProcessor, SpanResults
from batchmill.store import Batch, Layout
from batchmill.wording import count_of

log = logging.getLogger("batchmill.spark")

_JOBS_AT_ONCE = 4
"""How many sources are aggregated at the same time: planning one overlaps with running another."""
_ROWS_PER_PARTITION = 1_000_000
_LISTED_PER_PARTITION = 4_000_000
"""How many entries of tallies one partition holds at a time, as objects of the JVM."""
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
    """Rows of a backfill that lie in no segment, by source."""
    pending: PendingFiles = field(default_factory=PendingFiles)
    settle: bool = False
    expire: bool = True
    """Whether spans expire once they waited long enough; a backfill keeps all until its end."""
    watch: Stopwatch = field(default_factory=Stopwatch)


@dataclass
class _Draft:
    """A batch that is being made."""

    work: Work
    batch: Batch
    stats: BatchStats
    latest_us: int
    """The latest valid start, in microseconds since 1970."""
    newest_us: int = 0
    """The latest start that may be among the rows."""
    small: bool = False
    counters: dict[tuple[str, str, str], int] = field(default_factory=lambda: defaultdict(int))
    book: EntityBook = field(default_factory=EntityBook)
    invalid: dict[str, DataFrame] = field(default_factory=dict)
    """Invalid rows of sources that lie in no segment."""
    segments: dict[str, list[Segment]] = field(default_factory=lambda: defaultdict(list))
    """Segments of rows, by source."""
    made: dict[str, list[Segment]] = field(default_factory=lambda: defaultdict(list))
    """Segments of deltas, by source."""
    statements: list[Segment] = field(default_factory=list)
    """Segments of slow statements."""
    deltas: dict[str, list[Deltas]] = field(default_factory=lambda: defaultdict(list))
    """What the rows of a source, those of spans and the processes' deltas have given."""

    @property
    def arrived(self) -> int:
        """How many rows there are to aggregate."""
        return sum(segment.rows for few in self.segments.values() for segment in few)


class BatchMaker:
    """Makes batches, one at a time."""

    def __init__(
        self,
        spark: SparkSession,
        catalog: Catalog,
        plans: Mapping[str, SourcePlan],
        layout: Layout,
        settings: PipelineSettings,
        quarantine: Quarantine,
        spans: SpanProcessor,
    ) -> None:
        self._spark = spark
        self._catalog = catalog
        self._plans = plans
        self._readers = {source: DeltaReader(plan.aggregator) for source, plan in plans.items()}
        self._layout = layout
        self._settings = settings
        self._quarantine = quarantine
        self._spans = spans
        self._folders = [spans.folder, quarantine.folder, *spark_local_folders(spark)]
        self._cores = max(1, spark.sparkContext.defaultParallelism)

    def make(self, work: Work) -> tuple[Batch, BatchStats]:
        """Make the batch. A segment that turns out to be broken is quarantined and left out."""
        segments, bad = inspect(work.paths)
        segments, unknown = self._split_unknown(segments)
        bad += unknown
        latest_us = self._latest_us(work)
        # A number that changes from batch to batch would make Spark compile every plan again. So
        # the limit is first rounded up, to one that stays the same for an hour.
        limit_us = -(-latest_us // _HOUR_US) * _HOUR_US
        while True:
            try:
                with explain_full_disk(*self._folders):
                    draft = self._make(work, segments, bad, limit_us)
                if draft.newest_us > latest_us and limit_us > latest_us:
                    limit_us = latest_us
                    continue
                return draft.batch, draft.stats
            except (PySparkException, Py4JJavaError, pa.ArrowException) as error:
                broken = find_corrupt(segments) or self._unreadable(segments, limit_us)
                if not broken:
                    raise
                log.warning("batch %s: %s", work.number, _first_line(error))
                bad += broken
                gone = {segment.path for segment in broken}
                segments = [segment for segment in segments if segment.path not in gone]

    def _make(
        self, work: Work, segments: Sequence[Segment], bad: Sequence[BadSegment], latest_us: int
    ) -> _Draft:
        draft = _Draft(
            work,
            Batch(work.stream, work.epoch, work.number, settle=work.settle),
            BatchStats(segments=len(segments)),
            latest_us=latest_us,
        )
        for segment in segments:
            if segment.has_statements:
                draft.statements.append(segment)
            else:
                kind = draft.made if segment.has_deltas else draft.segments
                kind[segment.source].append(segment)
        for bad_segment in bad:
            self._quarantine_segment(draft, bad_segment)
        arrived = draft.arrived
        draft.small = arrived <= self._settings.small_batch_rows and not work.frames
        self._tune(draft, arrived, bool(work.frames))
        sources = {
            source: self._read_frame(draft, source, rows)
            for source, rows in work.frames.items()
            if source != SPAN.name
        }
        for source in [name for name in draft.segments if name != SPAN.name]:
            rows = self._read(draft, source)
            if rows is not None:
                sources[source] = rows
        spans = self._read_spans(draft)
        work.watch.lap(READ)
        with (
            Views(self._spark) as views,
            self._spans.process(
                work.pending,
                spans,
                now=work.now,
                number=work.number,
                expire=work.expire,
                late_before_us=self._late_before_us(work.newest),
            ) as results,
        ):
            work.watch.lap(SPANS)
            self._aggregate(draft, sources, results, views)
        self._count_spans(draft, results)
        draft.batch.entities = draft.book.rows()
        for key, count in draft.counters.items():
            if count:
                draft.batch.counters[key] = draft.batch.counters.get(key, 0) + count
        work.watch.lap(DELTAS)
        return draft

    def _aggregate(
        self,
        draft: _Draft,
        sources: Mapping[str, DataFrame],
        results: SpanResults,
        views: Views,
    ) -> None:
        """Aggregate all sources, several at a time, and put the results into the batch."""
        parts = [
            Part(
                self._plans[source],
                Rows(
                    frame,
                    slices=self._slices(draft, self._plans[source]),
                    most_rows=sum(segment.rows for segment in draft.segments.get(source, ()))
                    or None,
                ),
            )
            for source, frame in sources.items()
        ]
        parts += [
            Part(self._plans[source], rows, of_spans=True)
            for source, rows in results.sources.items()
        ]
        fusions = fuse(parts, together=draft.small)
        l1_results = _run(fusions, results.jobs, views)
        draft.work.watch.lap(L1)
        for fusion, own in zip(fusions, l1_results, strict=True):
            for part, result in zip(fusion.parts, own, strict=True):
                self._add(draft, part.plan.source.name, result.deltas, of_spans=part.of_spans)
                if result.invalid:
                    self._quarantine_rows(draft, part.plan.source)
        for source, segments in draft.made.items():
            self._add_made(draft, source, segments)
        for source, deltas in draft.deltas.items():
            aggregator = self._plans[source].aggregator
            # All in one: exporters tell the changes of a commit apart by minute and entity.
            merged = aggregator.merge(deltas)
            made = contribution(merged, aggregator, self._layout, draft.book)
            draft.batch.deltas += made.deltas
        self._add_statements(draft)
        self._spans.add_to(draft.batch, results, draft.book)

    def _unreadable(self, segments: Sequence[Segment], latest_us: int) -> list[BadSegment]:
        """The segments that Spark cannot read though pyarrow can.

        None if any failure may have another reason than the content of the file, or if all of
        several fail: then it is not their fault, and they must not be lost.
        """
        unreadable = []
        segments = [segment for segment in segments if not segment.has_deltas]
        for segment in segments:
            source = SPAN if segment.source == SPAN.name else self._catalog.source(segment.source)
            plan = self._plans.get(segment.source)
            try:
                groups, _ = group_by_schema(
                    source, plan.needed if plan else source.fields, [segment]
                )
                if groups:
                    rows = read_rows(self._spark, groups, latest_us)
                    rows.write.format("noop").mode("overwrite").save()
            except (PySparkException, Py4JError) as error:
                if not is_content_error(error_text(error)) or not self._spark_works():
                    return []
                detail = f"Spark cannot read it: {_first_line(error)}"
                unreadable.append(
                    BadSegment(segment.path, segment.source, "unreadable", detail, segment.rows)
                )
        return unreadable if len(unreadable) < len(segments) or len(segments) == 1 else []

    def _spark_works(self) -> bool:
        """Whether a job that reads no file succeeds."""
        try:
            self._spark.range(1).write.format("noop").mode("overwrite").save()
        except (PySparkException, Py4JError, AttributeError) as error:
            # A session whose context is stopped lacks an attribute that it uses.
            log.warning("Spark cannot run any job now: %s", _first_line(error))
            return False
        return True

    def _split_unknown(self, segments: Iterable[Segment]) -> tuple[list[Segment], list[BadSegment]]:
        known, unknown = [], []
        for segment in segments:
            source = segment.source
            is_span = source == SPAN.name and not segment.has_deltas
            if is_span or segment.has_statements or source in self._catalog.sources:
                known.append(segment)
            else:
                detail = f"there is no event type named {source!r}"
                unknown.append(
                    BadSegment(segment.path, source, "unknown source", detail, segment.rows)
                )
        return known, unknown

    def _read(self, draft: _Draft, source: str) -> DataFrame | None:
        """The rows of a source; None if no metric reads them, or no segment is left."""
        plan = self._plans.get(source)
        if plan is None:
            unused = sum(segment.rows for segment in draft.segments[source])
            draft.counters["unused", source, "no metric reads it"] += unused
            return None
        return self._rows(draft, plan.source, plan.needed)

    def _read_frame(self, draft: _Draft, source: str, rows: DataFrame) -> DataFrame:
        kind, needed = SPAN, frozenset(SPAN.fields)
        if source != SPAN.name:
            kind, needed = self._plans[source].source, self._plans[source].needed
        try:
            checked = check_frame(kind, needed, rows, draft.latest_us)
        except ColumnTypeError as error:
            raise ConfigError("rows", error, f"a DataFrame with the columns of {source}") from error
        draft.invalid[source] = checked.invalid
        return checked.rows

    def _read_spans(self, draft: _Draft) -> DataFrame | None:
        """The valid spans."""
        if (frame := draft.work.frames.get(SPAN.name)) is not None:
            return self._read_frame(draft, SPAN.name, frame).where(FITS)
        if SPAN.name not in draft.segments:
            return None
        rows = self._rows(draft, SPAN, SPAN.fields)
        return None if rows is None else rows.where(FITS)

    def _rows(self, draft: _Draft, source: SourceType, needed: Iterable[str]) -> DataFrame | None:
        segments = draft.segments[source.name]
        groups, bad = group_by_schema(source, needed, segments)
        for bad_segment in bad:
            self._quarantine_segment(draft, bad_segment)
        gone = {bad_segment.path for bad_segment in bad}
        draft.segments[source.name] = [segment for segment in segments if segment.path not in gone]
        return read_rows(self._spark, groups, draft.latest_us) if groups else None

    def _slices(self, draft: _Draft, plan: SourcePlan) -> tuple[DataFrame, ...]:
        """The rows of a source in several frames, each for one task; see ``l1.fusion``."""
        segments = draft.segments.get(plan.source.name)
        if draft.small or not segments or not plan.recipe.tallies:
            return ()
        frames = []
        for members in cut(segments, self._cores):
            groups, _ = group_by_schema(plan.source, plan.needed, members)
            frames.append(read_rows(self._spark, groups, draft.latest_us))
        return tuple(frames)

    def _tune(self, draft: _Draft, rows: int, unknown: bool) -> None:
        """Set Spark's shuffle partitions by the size of the batch: each one has a cost.

        Tallies are lists while they are aggregated; the more of them, the smaller a partition.
        """
        partitions = self._cores if unknown else min(self._cores, 1 + rows // _ROWS_PER_PARTITION)
        listed = sum(
            sum(segment.rows for segment in segments) * len(self._plans[source].recipe.listings)
            for source, segments in draft.segments.items()
            if source in self._plans
        )
        partitions = max(partitions, listed // _LISTED_PER_PARTITION)
        self._spark.conf.set("spark.sql.shuffle.partitions", str(partitions))
        adaptive = "false" if draft.small else "true"
        self._spark.conf.set("spark.sql.adaptive.enabled", adaptive)

    def _add_made(self, draft: _Draft, source: str, segments: Sequence[Segment]) -> None:
        """Put deltas into the batch that processes have made themselves."""
        work = draft.work
        latest_us = self._latest_us(work)
        # Without any metric of the source, the reader says which ones are missing here.
        reader = self._readers.get(source) or DeltaReader(
            Aggregator(self._catalog.source(source), ())
        )
        merged = reader.read(segments, latest_us)
        for bad_segment in merged.bad:
            self._quarantine_segment(draft, bad_segment)
        if merged.ahead is not None:
            self._quarantine.add_deltas(source, work.stream, work.number, merged.ahead, AHEAD)
            draft.counters["quarantined", source, AHEAD] += merged.ahead_rows
            draft.stats.quarantined_rows += merged.ahead_rows
            events = count_of(merged.ahead_rows, "event")
            log.warning("%s: deltas of %s quarantined: %s", source, events, AHEAD)
        if source in self._readers:
            self._add(draft, source, merged.deltas)

    def _add_statements(self, draft: _Draft) -> None:
        """Put the slow statements into the batch that processes have counted themselves."""
        if not draft.statements:
            return
        merged = read_statements(
            draft.statements,
            self._settings.top_n,
            self._settings.thresholds(),
            self._latest_us(draft.work),
        )
        for bad_segment in merged.bad:
            self._quarantine_segment(draft, bad_segment)
        batch = draft.batch
        batch.topn += merged.statements.topn_rows(draft.book)
        batch.statements += (rows := merged.statements.statement_rows(draft.book))
        newest = max((row.minute for row in rows), default=0)
        batch.newest_minute = max(batch.newest_minute or 0, newest) or None
        draft.counters["rows", STATEMENT_SOURCE, ""] += merged.count
        draft.stats.rows += merged.count

    def _latest_us(self, work: Work) -> int:
        """The latest valid start, in microseconds since 1970."""
        return int((work.now + self._settings.max_ahead_s) * 1_000_000)

    def _add(self, draft: _Draft, source: str, deltas: Deltas, *, of_spans: bool = False) -> None:
        """Count a source's deltas, and keep them for the batch.

        Rows of spans are not counted as late here: the spans are, when they arrive, and some of
        them arrived long ago.
        """
        late_before_us = None if of_spans else self._late_before_us(draft.work.newest)
        batch = draft.batch
        draft.deltas[source].append(deltas)
        for minute, rows in rows_by_minute(deltas).items():
            draft.stats.rows += rows
            draft.counters["rows", source, ""] += rows
            day = minute // 10_000
            batch.rows[source, day] = batch.rows.get((source, day), 0) + rows
            batch.newest_minute = max(batch.newest_minute or 0, minute)
            # The minute's last moment: only Spark knows whether a row of it is beyond the limit.
            last_us = int(bucket_end(minute).timestamp()) * 1_000_000 - 1
            draft.newest_us = max(draft.newest_us, last_us)
            if late_before_us is not None and last_us < late_before_us:
                draft.counters["late", source, ""] += rows
                draft.stats.late += rows

    def _count_spans(self, draft: _Draft, results: SpanResults) -> None:
        arrived = sum(segment.rows for segment in draft.segments.get(SPAN.name, ()))
        draft.counters["rows", SPAN.name, ""] += results.rows
        draft.counters["late", SPAN.name, ""] += results.late
        draft.counters["duplicates", SPAN.name, DUPLICATE] += results.duplicates
        draft.stats.duplicates += results.duplicates
        draft.stats.late += results.late
        draft.newest_us = max(draft.newest_us, results.newest_us)
        invalid = draft.invalid.get(SPAN.name)
        if arrived > results.rows + results.duplicates or (
            invalid is not None and not invalid.isEmpty()
        ):
            self._quarantine_rows(draft, SPAN)

    def _quarantine_rows(self, draft: _Draft, source: SourceType) -> None:
        work = draft.work
        invalid = draft.invalid.get(source.name)
        if invalid is None:
            needed = SPAN.fields if source is SPAN else self._plans[source.name].needed
            segments = draft.segments[source.name]
            invalid = read_invalid(self._spark, source, needed, segments, draft.latest_us)
        rows = invalid.persist()
        try:
            self._quarantine.add_rows(source.name, work.stream, work.number, rows)
            for reason, count in rows.groupBy(REASON).count().collect():
                draft.counters["quarantined", source.name, reason] += count
                draft.stats.quarantined_rows += count
                log.warning("%s: %s quarantined: %s", source.name, count_of(count, "row"), reason)
        finally:
            rows.unpersist()

    def _quarantine_segment(self, draft: _Draft, bad: BadSegment) -> None:
        self._quarantine.add_segment(bad)
        draft.counters["quarantined segment", bad.source, bad.reason] += 1
        if bad.rows:
            draft.counters["quarantined", bad.source, bad.reason] += bad.rows
            draft.stats.quarantined_rows += bad.rows
        draft.stats.quarantined_segments += 1

    def _late_before_us(self, newest: int | None) -> int | None:
        """The first start that is not late, in microseconds since 1970."""
        if newest is None:
            return None
        first = bucket_start(newest) - timedelta(minutes=self._settings.late_after_minutes)
        return int(first.timestamp()) * 1_000_000


def _first_line(error: Exception) -> str:
    """The first line with information: Py4J's own only says which call failed."""
    lines = [line for line in str(error).splitlines() if line.strip()]
    useful = [line for line in lines if not line.startswith("An error occurred while calling")]
    return (useful or lines or [type(error).__name__])[0].lstrip(": ")


def _run(
    fusions: Sequence[Fusion], jobs: Sequence[Callable[[], None]], views: Views
) -> list[list[Result]]:
    """Run all fusions and jobs, several at a time; the results of each fusion, in their order.

    After a failure none is left running.
    """
    if len(fusions) + len(jobs) <= 1:
        for job in jobs:
            job()
        return [fusion.run(views) for fusion in fusions]
    with concurrent.futures.ThreadPoolExecutor(_JOBS_AT_ONCE, "batchmill-l1") as pool:
        runs = [pool.submit(fusion.run, views) for fusion in fusions]
        others = [pool.submit(job) for job in jobs]
        try:
            results = [future.result() for future in runs]
            for future in others:
                future.result()
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
        return results
