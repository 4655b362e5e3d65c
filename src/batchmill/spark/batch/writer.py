"""Makes and commits the batches of a stream, one at a time."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from pyspark.sql import SparkSession

from batchmill.aggregate import Aggregator, EntityAccount
from batchmill.oal import MetricSet
from batchmill.outbox import Outbox
from batchmill.spark.batch.maker import BatchMaker, OnRows, Work
from batchmill.spark.batch.report import COMMIT, OUTBOX, READ, UPKEEP, BatchReport, BatchStats
from batchmill.spark.failures import explain_full_disk
from batchmill.spark.files import state
from batchmill.spark.files.quarantine import Quarantine
from batchmill.spark.files.state import StateFiles
from batchmill.spark.input.books import Plan
from batchmill.spark.runtime.checkpoint import Checkpoint
from batchmill.spark.runtime.session import copy_of, jvm_has_ended
from batchmill.spark.settings import PipelineSettings
from batchmill.store import (
    Batch,
    Claim,
    ClockReading,
    CommitResult,
    FencedError,
    Layout,
    OpenParts,
    Store,
    StreamFile,
    moment_of,
)
from batchmill.wording import count_of

log = logging.getLogger("batchmill.spark")

_ALL = 2**31
"""More files than an outbox can hold."""


def aggregators_for(metrics: MetricSet, settings: PipelineSettings) -> dict[str, Aggregator]:
    """An aggregator for each source that a metric reads."""
    return {
        source: Aggregator(metrics.catalog.source(source), own, apdex_ms=settings.apdex_ms)
        for source, own in metrics.by_source().items()
    }


class StreamWriter:
    """Commits the batches of one claimed stream, one at a time.

    ``claimed`` is the right to do so; ``claim`` asks the store for it again. After a commit that
    failed, the state of the stream is read from the store, never guessed.
    """

    def __init__(
        self,
        *,
        spark: SparkSession,
        metrics: MetricSet,
        aggregators: Mapping[str, Aggregator],
        layout: Layout,
        store: Store,
        stream: str,
        claimed: Claim,
        claim: Callable[[], Claim],
        checkpoint: Checkpoint,
        quarantine: Quarantine,
        settings: PipelineSettings,
        clock: Callable[[], float],
        expire: bool = True,
        dedup_s: float | None = None,
        outbox: Outbox | None = None,
        on_rows: OnRows | None = None,
    ) -> None:
        self.stream = stream
        self._outbox = outbox
        self._layout = layout
        self._store = store
        self._claim = claim
        self._stale = False
        self._is_behind = False
        self._fenced: FencedError | None = None
        self.settled: float | None = None
        """``settled`` of the last plan."""
        self._settings = settings
        self._clock = clock
        self._expire = expire
        self._dedup_s = dedup_s
        self._planned_at: ClockReading | None = None
        """What the clocks said at the last plan."""
        # Jobs have settings of their own, which must not affect what else the session does.
        self._spark = copy_of(spark)
        self._folder = checkpoint.folder
        self._enter(claimed)
        self._maker = BatchMaker(
            self._spark,
            metrics.catalog,
            aggregators,
            self._layout,
            settings,
            quarantine,
            checkpoint.state,
            dedup_s,
            store.task_address() if store.commits_by_part else None,
            outbox,
            on_rows,
            store.unknown_entities,
        )
        self._new_entities = EntityAccount(
            settings.max_new_entities, settings.max_entities, store.count_entities
        )

    def divide(self) -> int:
        """Into how many parts a new batch is divided."""
        return self._maker.divide()

    @property
    def can_go_on(self) -> bool:
        """Whether Spark still runs, after a batch that failed."""
        try:
            return self._spark.sparkContext.defaultParallelism > 0
        except Exception:  # noqa: BLE001 - it was stopped, or the JVM is gone
            return False

    @property
    def jvm_is_gone(self) -> bool:
        """Whether the JVM of Spark has ended, without being told to."""
        return jvm_has_ended(self._spark)

    def may_be_recut(self, number: int) -> bool:
        """Whether the store has nothing of a batch, so that it may get another input."""
        self._refresh()
        if self.last is not None and number <= self.last:
            return False
        by_part = self._store.commits_by_part
        return not by_part or self._store.may_be_recut(
            self.stream, self._epoch, number, wall_s=self._clock()
        )

    def latest(self, now: float) -> float | None:
        """Up to when rows are taken, if the clock is behind what the store trusted."""
        ahead_s = self._settings.max_ahead_s
        latest = self._store.clock().latest_s(now, ahead_s)
        is_behind = latest > now + ahead_s
        if is_behind and not self._is_behind:
            log.warning(
                "the clock, %s, is behind what the store trusted before: rows up to %s are taken. "
                "Correct the clock; if it was ahead before, see `batchmill store repair`",
                moment_of(now),
                moment_of(latest),
            )
        self._is_behind = is_behind
        return latest if is_behind else None

    def clock_step(self, now: float) -> float:
        """By how much the clock was set since the last plan, as far as the dedup index minds.

        To be asked for each new plan, at its time.
        """
        last, reading = self._planned_at, ClockReading.now(now)
        self._planned_at = reading
        if self._dedup_s is None or not self._expire:
            return 0.0
        if last is not None:
            passed_s = reading.steady_s - last.steady_s
            return state.clock_step(now - last.wall_s, passed_s, self._dedup_s)
        arrived_ms = [file.arrived_ms for file in StateFiles.of(self._files).ids]
        if not arrived_ms:
            return 0.0
        return state.clock_step(now - max(arrived_ms) / 1000, None, self._dedup_s)

    def write(self, plan: Plan, paths: Callable[[], Sequence[str]] = tuple) -> BatchReport:
        """Make and commit a batch; one that is in the store already is not made again.

        ``paths`` names the segments of the plan, as Spark does.
        """
        self._refresh()
        if self.last is not None and plan.batch <= self.last:
            return self.made_before(plan.batch)
        self.settled = plan.settled
        opened = None
        if self._store.commits_by_part:
            opened = self._begin_parts(plan.batch)
            if opened.committed:
                return self.made_before(plan.batch)
        work = Work(
            stream=self.stream,
            number=plan.batch,
            epoch=self._epoch,
            now=plan.now,
            budget=self._new_entities.budget(plan.now, plan.batch),
            parts=plan.parts,
            newest=self._store.newest_minute(until_s=plan.now),
            files=StateFiles.of(self._files, expire_all=plan.expire_all),
            open_parts=opened,
            expire=self._expire,
            settled=plan.settled,
            latest=plan.latest,
            step=plan.step,
        )
        return self._write(replace(work, paths=paths()))

    def must_settle(self, now: float, *, everything: bool = False) -> bool:
        """Whether spans have waited long enough; with ``everything``, whether any wait.

        For a stream to which no new input comes: any batch gives up on such spans.
        """
        self._refresh()
        pending = StateFiles.of(self._files).pending
        oldest = min((file.arrived_ms for file in pending), default=None)
        if oldest is None or everything:
            return oldest is not None
        expired_ms = state.expired_ms(now * 1000, self.settled, self._settings)
        return oldest <= expired_ms or (state.are_ahead(pending, now) and self._expire)

    def made_before(self, number: int) -> BatchReport:
        """The report of a batch that is in the store already."""
        log.info("batch %d of %s is in the store already", number, self.stream)
        nothing = CommitResult(applied=False)
        return BatchReport(self.stream, number, False, BatchStats(), nothing, 0.0, 0.0)

    def _begin_parts(self, number: int) -> OpenParts:
        opened = self._store.begin_parts(self.stream, self._epoch, number, wall_s=self._clock())
        if opened.recorded:
            log.info(
                "batch %d of %s: %s committed before",
                number,
                self.stream,
                count_of(len(opened.recorded), "part"),
            )
        return opened

    def _enter(self, claim: Claim) -> None:
        """Take over the state of the stream from the store."""
        self.last = claim.last_batch
        self._epoch = claim.epoch
        self._files: tuple[StreamFile, ...] = claim.state_files
        state.remove_unused(self._folder, self._files)
        if self._outbox is not None:
            files = self._store.outbox(self._outbox.place, limit=_ALL)
            self._outbox.tidy(self.stream, {file.path for file in files})

    def _refresh(self) -> None:
        """After a commit that failed, read the state from the store: it may have been applied."""
        if self._fenced is not None:
            raise self._fenced
        if self._stale:
            self._enter(self._claim())
            self._stale = False

    def _make(self, work: Work) -> tuple[Batch, BatchStats]:
        try:
            return self._maker.make(work)
        except FencedError as error:
            self._fenced = error
            raise

    def _commit(self, batch: Batch) -> CommitResult:
        # Not that of the plan: the batch may be repeated, and expiry follows the time of today.
        batch.clock = ClockReading.now(self._clock())
        try:
            return self._store.commit(batch)
        except FencedError as error:
            # The stream belongs to another writer now; a claim would take it back.
            self._fenced = error
            raise
        except BaseException:
            self._stale = True
            raise

    def _write(self, work: Work) -> BatchReport:
        watch = work.watch
        watch.lap(READ)
        started = time.perf_counter()
        batch, stats = self._make(work)
        made = time.perf_counter()
        if self._outbox is not None and work.open_parts is None:
            with explain_full_disk(self._outbox.folder):
                batch.outgoing = self._outbox.write(batch, self._layout)
            watch.lap(OUTBOX)
        written = time.perf_counter()
        result = self._commit(batch)
        committed = time.perf_counter()
        watch.lap(COMMIT)
        if self._outbox is not None:
            self._outbox.remove(result.outbox_dropped)
        self._new_entities.add(stats.overflow)
        self.last = work.number
        gone = set(batch.drop_files)
        replaced = gone | {file.path for file in batch.add_files}
        self._files = (
            *(file for file in self._files if file.path not in replaced),
            *batch.add_files,
        )
        if gone:
            state.remove_unused(self._folder, self._files)
        watch.lap(UPKEEP)
        return BatchReport(
            self.stream,
            work.number,
            result.applied,
            stats,
            result,
            spark_s=made - started,
            store_s=committed - written,
            outbox_s=written - made,
            given=len(work.paths),
            phases=watch.phases,
        )
