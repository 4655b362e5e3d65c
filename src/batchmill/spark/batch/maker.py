"""Makes a batch of the store from what the job of a micro-batch gives.

A stream, a backfill and a test use the same code: where the segments come from makes no difference.
Nothing is written but the quarantine and the state, whose files go into the batch.
"""

from __future__ import annotations

import logging
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from pathlib import Path
from typing import TypeAlias

import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession

from batchmill.aggregate import (
    STATEMENT_SOURCE,
    Aggregator,
    EntityBudget,
    EntityLimiter,
    UnknownEntities,
)
from batchmill.oal import MapKey
from batchmill.outbox import Outbox
from batchmill.sources import Catalog, bucket_end, bucket_start
from batchmill.spans import MOST_HOSTS, SERVED, TAGS
from batchmill.spark.batch.job import BatchJob, JobResult, SpanWork, parts_for
from batchmill.spark.batch.merge import PartCommit
from batchmill.spark.batch.plan import Limits, TaskPlan
from batchmill.spark.batch.report import (
    DELTAS,
    HOOK,
    READ,
    SPARK,
    BatchStats,
    Stopwatch,
    TaskReport,
)
from batchmill.spark.batch.span_step import DUPLICATE
from batchmill.spark.errors import PipelineError
from batchmill.spark.failures import explain_full_disk, explain_task_error, spark_local_folders
from batchmill.spark.files import state
from batchmill.spark.files.paths import AnyPath, local_only
from batchmill.spark.files.quarantine import Quarantine
from batchmill.spark.files.state import StateFiles
from batchmill.spark.files.statefiles import write_hosts
from batchmill.spark.input.deltas import AHEAD
from batchmill.spark.input.rows import SPAN
from batchmill.spark.input.segments import source_of
from batchmill.spark.settings import PipelineSettings
from batchmill.store import Batch, Layout, OpenParts, StreamFile, TaskAddress, moment_of
from batchmill.wording import count_of

log = logging.getLogger("batchmill.spark")

OnRows: TypeAlias = Callable[[str, DataFrame], None]
"""Gets the valid rows of a batch, for each event type that has some."""


@dataclass
class Work:
    """The input of a batch, and the state it starts from."""

    stream: str
    number: int
    epoch: int
    now: float
    """Seconds since 1970."""
    newest: int | None
    """The newest minute of earlier batches."""
    parts: int
    """Into how many parts traces and entities are divided."""
    paths: Sequence[str] = ()
    files: StateFiles = field(default_factory=StateFiles)
    open_parts: OpenParts | None = None
    """The batch's parts in the store, if its tasks commit them."""
    budget: EntityBudget | None = None
    """How many new entities it may bring; None: all."""
    expire: bool = True
    """Whether spans expire once they waited long enough; a backfill keeps all until its end."""
    latest: float | None = None
    """Rows may be of that time; see :class:`batchmill.spark.input.books.Plan`."""
    settled: float | None = None
    """Older input waits, from this time on; see :class:`batchmill.spark.input.books.Plan`."""
    step: float = 0.0
    """The clock was set by so many seconds; see :class:`batchmill.spark.input.books.Plan`."""
    watch: Stopwatch = field(default_factory=Stopwatch)


@dataclass(frozen=True)
class _StatePlan:
    """What becomes of the state of earlier batches."""

    tick: int
    """What the spans of this batch are marked with."""
    expired: Sequence[StreamFile]
    """Files of spans that wait no longer after this batch."""
    expired_ids: Sequence[StreamFile]
    """Files of the dedup index that are needed no longer."""
    ids: Sequence[StreamFile]
    """The other files of the dedup index."""
    merged: Sequence[StreamFile]
    """Files whose content goes into the files of this batch."""
    restamped: Sequence[StreamFile]
    """Files that get another time."""
    in_time: bool
    """Whether only those spans are given up that have waited long enough."""


class BatchMaker:
    """Makes batches, one at a time."""

    def __init__(
        self,
        spark: SparkSession,
        catalog: Catalog,
        aggregators: Mapping[str, Aggregator],
        layout: Layout,
        settings: PipelineSettings,
        quarantine: Quarantine,
        folder: AnyPath,
        dedup_s: float | None = None,
        store: TaskAddress | None = None,
        outbox: Outbox | None = None,
        on_rows: OnRows | None = None,
        unknown_entities: UnknownEntities | None = None,
    ) -> None:
        """``folder`` is that of the state; ``dedup_s`` the window in which spans count once.

        ``unknown_entities`` looks up entities for the limit of new ones. ``store`` and ``outbox``
        are where the tasks of batches with open parts write to.
        """
        self._on_rows = on_rows
        self._unknown_entities = unknown_entities
        self._aggregators = aggregators
        self._settings = settings
        self._quarantine = quarantine
        self._window_ms = None if dedup_s is None else int(dedup_s * 1000)
        self._plan = TaskPlan(
            *(catalog, aggregators, _attribute_keys(aggregators), settings, parts_for(spark)),
            layout,
            normalise_names=settings.normalise_names,
        )
        self._folder = folder
        self._store = store
        self._outbox = outbox
        self._spark = spark
        self._job = self._job_of(self._plan.parts)
        self._folders = local_only(folder, quarantine.folder, *spark_local_folders(spark))

    def divide(self) -> int:
        """Into how many parts a new batch is divided.

        More once more executors have come. Never fewer: then state of other parts is to be read.
        """
        parts = parts_for(self._spark)
        if parts > self._plan.parts:
            self._plan = replace(self._plan, parts=parts)
            self._job = self._job_of(parts)
        return self._plan.parts

    def make(self, work: Work) -> tuple[Batch, BatchStats]:
        """Make the batch. A segment that turns out to be broken is quarantined and left out."""
        plan = self._plan_state(work)
        spans = None
        has_spans = any(source_of(path) == SPAN.name for path in work.paths)
        if has_spans or plan.expired or plan.restamped:
            files = (*work.files.pending, *plan.ids)
            copied = {file.path for file in (*plan.expired, *plan.merged)}
            state.check_files((*files, *work.files.hosts), self._spark)
            spans = SpanWork(
                plan.tick,
                max((file.arrived_ms for file in plan.expired), default=None),
                state.to_read(files, plan.merged),
                sum(file.rows for file in work.files.pending if file.path in copied),
                self._folder / state.new_name(work.number, work.parts),
                # In a backfill nobody waits for an edge to appear, and all spans are there.
                work.files.known_hosts(self._folder) if work.expire else None,
            )
        self._quarantine.clear_staging(work.stream, work.number)
        work.watch.lap(READ)
        # A batch that is run again may have been planned in another session.
        job = self._job if work.parts == self._plan.parts else self._job_of(work.parts)
        with explain_full_disk(*self._folders), explain_task_error():
            limits = self._limits(work)
            if self._on_rows is not None:
                with job.rows(work.paths, limits, spans) as frames:
                    for source, rows in frames.items():
                        self._on_rows(source, rows)
                work.watch.lap(HOOK)
            result = job.run(work.paths, limits, spans, self._part_commit(work))
            try:
                for failure in result.report.failures:
                    raise failure
                work.watch.lap(SPARK)
                batch, stats = self._batch(work, result)
                if spans is not None:
                    self._add_hosts(batch, work, plan, result, spans)
                    self._add_state(batch, plan, result, spans)
            finally:
                result.release()
        work.watch.lap(DELTAS)
        return batch, stats

    def _job_of(self, parts: int) -> BatchJob:
        plan = replace(self._plan, parts=parts)
        return BatchJob(self._spark, plan, dedup=self._window_ms is not None)

    def _plan_state(self, work: Work) -> _StatePlan:
        """What becomes of the files of earlier batches.

        Files from the future would wait for it. So spans that wait are given up if such a file is
        among theirs. Ids go with the clock where that was set, but not into the future.
        """
        files = replace(work.files, ids=state.shifted(work.files.ids, work.step))
        now_ms = int(work.now * 1000)
        if work.expire and state.are_ahead(files.ids, work.now):
            in_time = [replace(file, arrived_ms=min(file.arrived_ms, now_ms)) for file in files.ids]
            files = replace(files, ids=tuple(in_time))
        waiting = files.pending
        if work.expire and state.are_ahead(waiting, work.now):
            files, waiting = replace(files, expire_all=True), ()
        tick = max([now_ms, *(file.arrived_ms + 1 for file in (*waiting, *files.ids))])
        wait_ms = int(self._settings.span_wait_s * 1000)
        expired_ms = state.expired_ms(tick, work.settled, self._settings)
        expired = [
            file
            for file in files.pending
            if files.expire_all or (work.expire and file.arrived_ms <= expired_ms)
        ]
        expired_ids = self._expired_ids(work, files, int(expired_ms) + wait_ms)
        ids = [file for file in files.ids if file not in expired_ids]
        alive = [file for file in files.pending if file not in expired]
        merged = state.pending_to_merge(alive, tick=tick, wait_ms=wait_ms, expire=work.expire)
        if self._window_ms is not None:
            # Where ids with other parts are, every task would write all of them.
            fitting = [file for file in ids if state.parts_of(file) in (0, work.parts)]
            merged += state.ids_to_merge(
                fitting, tick=tick, window_ms=self._window_ms, expire=work.expire
            )
        restamped = [file for file in ids if file not in (*work.files.ids, *merged)]
        return _StatePlan(tick, expired, expired_ids, ids, merged, restamped, not files.expire_all)

    def _add_hosts(
        self, batch: Batch, work: Work, plan: _StatePlan, result: JobResult, spans: SpanWork
    ) -> None:
        """Keep what is known about hosts, if this batch has changed it."""
        known, report = spans.hosts, result.report
        if known is None:
            return
        hosts = known.after(report.answered, report.given_up if plan.in_time else ())
        if hosts == known:
            return
        assert isinstance(spans.folder, Path)
        if len(hosts.answering) > MOST_HOSTS:
            log.warning(
                "more than %s that were thought to send no spans have answered: all calls wait "
                "from now on",
                count_of(MOST_HOSTS, "host"),
            )
        if hosts.answering or hosts.unanswered:
            report.kept.append(write_hosts(hosts, spans.folder))
        batch.drop_files += [file.path for file in work.files.hosts]

    def _add_state(
        self, batch: Batch, plan: _StatePlan, result: JobResult, spans: SpanWork
    ) -> None:
        """Put the files of this batch into it, and take out those that are used no more."""
        batch.add_files += state.publish(
            result.report.kept, spans.folder, batch.number, plan.tick, result.blobs
        )
        batch.add_files += plan.restamped
        gone = (*plan.expired, *plan.expired_ids, *plan.merged)
        batch.drop_files += [file.path for file in gone]

    def _part_commit(self, work: Work) -> PartCommit | None:
        parts = work.open_parts
        if parts is None or self._store is None:
            return None
        return PartCommit(
            self._store,
            work.stream,
            work.epoch,
            work.number,
            parts,
            self._outbox,
            work.budget,
        )

    def _limits(self, work: Work) -> Limits:
        staging = self._quarantine.staging(work.stream, work.number)
        return Limits(
            self._latest_us(work),
            self._late_before_us(work.newest),
            str(staging) if isinstance(staging, Path) else None,
        )

    def _expired_ids(self, work: Work, files: StateFiles, tick: int) -> list[StreamFile]:
        """The files of the dedup index that are no longer needed; a backfill needs all of them."""
        if self._window_ms is None or (files.expire_all and not work.expire):
            return list(files.ids)
        if not work.expire:
            return []
        return state.expired_ids(files.ids, tick, self._window_ms)

    def _batch(self, work: Work, result: JobResult) -> tuple[Batch, BatchStats]:
        report = result.report
        _check_complete("segments", len(work.paths), report.segments + len(report.bad))
        batch = Batch(work.stream, work.epoch, work.number)
        stats = BatchStats(segments=report.segments)
        self._quarantine_all(work, result)
        spans = ("rows", SPAN.name, ""), ("duplicates", SPAN.name, DUPLICATE)
        _check_complete("spans", report.spans, sum(report.counters[key] for key in spans))
        read: Counter[str] = Counter()
        for (source, _), rows in (report.events + report.derived).items():
            read[source] += rows
        if work.open_parts is None:
            limiter = None
            if work.budget is not None and self._unknown_entities is not None:
                limiter = EntityLimiter(work.budget, self._unknown_entities)
            merged = result.merged.fill(batch, limiter)
            if limiter is not None:
                report.overflow.add(limiter.overflow)
                report.counters.update(limiter.overflow.counters())
            for source in read | merged:
                _check_complete(f"rows of {source}", read[source], merged[source])
            report.newest = result.merged.newest
        else:
            # The store checks that the parts have as many, and has their counters.
            batch.parts, batch.expected_rows = work.parts, read
        batch.outgoing = report.outgoing
        self._count(work, batch, report, stats)
        return batch, stats

    def _count(self, work: Work, batch: Batch, report: TaskReport, stats: BatchStats) -> None:
        """Fill in the counters. A late span was counted when it arrived, not its rows."""
        late_before_us = self._late_before_us(work.newest)
        batch.newest_minute = report.newest or None
        stats.overflow = report.overflow
        counters: dict[tuple[str, str, str], int] = defaultdict(int, report.counters)
        for counts, of_spans in ((report.events, False), (report.derived, True)):
            for (source, minute), rows in counts.items():
                stats.rows += rows
                counters["rows", source, ""] += rows
                day = minute // 10_000
                batch.rows[source, day] = batch.rows.get((source, day), 0) + rows
                batch.newest_minute = max(batch.newest_minute or 0, minute)
                last_us = int(bucket_end(minute).timestamp()) * 1_000_000 - 1
                if late_before_us is not None and not of_spans and last_us < late_before_us:
                    counters["late", source, ""] += rows
        for bad in report.bad:
            counters["quarantined segment", bad.source, bad.reason] += 1
            counters["quarantined", bad.source, bad.reason] += bad.rows
        stats.rows += counters["rows", STATEMENT_SOURCE, ""]
        for (what, _, _), count in counters.items():
            if what == "late":
                stats.late += count
            elif what == "duplicates":
                stats.duplicates += count
            elif what == "quarantined":
                stats.quarantined_rows += count
        stats.quarantined_segments = len(report.bad)
        for key, count in counters.items():
            if count:
                batch.counters[key] = batch.counters.get(key, 0) + count

    def _quarantine_all(self, work: Work, result: JobResult) -> None:
        for bad in result.report.bad:
            self._quarantine.add_segment(bad)
        for source, tables in result.ahead.items():
            table = pa.concat_tables(tables, promote_options="permissive")
            self._quarantine.add_deltas(source, work.stream, work.number, table, AHEAD)
        for (what, source, reason), count in result.report.counters.items():
            if what == "quarantined":
                clock = f" of the clock, {moment_of(work.now)}" if reason == AHEAD else ""
                log.warning(
                    "%s: %s quarantined: %s%s", source, count_of(count, "row"), reason, clock
                )
        self._quarantine.add_rows(work.stream, work.number, result.report.invalid)
        schemas = defaultdict(list)
        for source, schema in result.report.invalid_schemas:
            schemas[source].append(schema)
        for source, own in schemas.items():
            assert result.blobs is not None
            self._quarantine.add_blobs(source, work.stream, work.number, result.blobs, own)

    def _latest_us(self, work: Work) -> int:
        """The latest valid start, in microseconds since 1970."""
        latest_s = work.now + self._settings.max_ahead_s
        return int(max(latest_s, work.latest or 0.0) * 1_000_000)

    def _late_before_us(self, newest: int | None) -> int | None:
        """The first start that is not late, in microseconds since 1970."""
        if newest is None:
            return None
        first = bucket_start(newest) - timedelta(minutes=self._settings.late_after_minutes)
        return int(first.timestamp()) * 1_000_000


def _check_complete(what: str, sent: int, received: int) -> None:
    """Raise if a step did not get what the one before it has sent: nothing may be lost silently."""
    if sent != received:
        raise PipelineError(
            f"of {what}, {sent:,} were sent to a step of the batch and {received:,} arrived: a "
            "file changed while the batch ran, or a worker was lost. The batch was not committed: "
            "start again, and it is repeated"
        )


def _attribute_keys(aggregators: Mapping[str, Aggregator]) -> frozenset[str] | None:
    """The keys of attributes that metrics look up; None: some metric reads all attributes."""
    keys = set()
    served = [aggregators[source] for source in SERVED if source in aggregators]
    for path in (path for aggregator in served for path in aggregator.plan.paths):
        if path.parts[0] in TAGS:
            key = path.parts[-1]
            if not isinstance(key, MapKey):
                return None
            keys.add(key.key)
    return frozenset(keys)
