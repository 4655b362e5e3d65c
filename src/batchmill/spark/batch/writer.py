"""Makes and commits the batches of a stream, one at a time."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from py4j.protocol import Py4JError
from pyspark.sql import DataFrame, SparkSession

from batchmill.aggregate import Aggregator, EntityAccount
from batchmill.oal import MetricSet
from batchmill.outbox import Outbox
from batchmill.spark.batch.maker import BatchMaker, OnRows, Work
from batchmill.spark.batch.report import COMMIT, OUTBOX, READ, UPKEEP, BatchReport, BatchStats
from batchmill.spark.failures import explain_full_disk
from batchmill.spark.files import state
from batchmill.spark.files.state import StateFiles
from batchmill.spark.input.quarantine import Quarantine
from batchmill.spark.runtime.checkpoint import Checkpoint
from batchmill.spark.runtime.session import copy_of
from batchmill.spark.settings import PipelineSettings
from batchmill.store import (
    Batch,
    Carry,
    Claim,
    ClockReading,
    CommitResult,
    FencedError,
    Layout,
    OpenParts,
    Store,
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
        self._fenced: FencedError | None = None
        self._settled: float | None = None
        self._settings = settings
        self._clock = clock
        self._expire = expire
        self._turn = threading.Lock()
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
        self._new_entities = EntityAccount(settings.max_new_entities)

    @property
    def parts(self) -> int:
        """Into how many parts new batches are divided."""
        return self._maker.parts

    @property
    def can_go_on(self) -> bool:
        """Whether Spark still runs, after a batch that failed."""
        try:
            return not self._spark.sparkContext._jsc.sc().isStopped()
        except Exception:  # noqa: BLE001 - whatever py4j raises if the JVM is gone
            return False

    @property
    def jvm_is_gone(self) -> bool:
        """Whether the JVM of Spark has ended, without being told to."""
        context = self._spark.sparkContext._jsc
        if context is None:  # the session was stopped
            return False
        try:
            context.sc().isStopped()
        except (Py4JError, OSError):
            return True
        return False

    def may_be_recut(self, number: int) -> bool:
        """Whether the store has nothing of a batch, so that it may get another input."""
        with self._turn:
            self._refresh()
            if self.last is not None and number <= self.last:
                return False
            by_part = self._store.commits_by_part
            return not by_part or self._store.may_be_recut(
                self.stream, self._epoch, number, wall_s=self._clock()
            )

    def write(
        self,
        number: int,
        *,
        paths: Callable[[], Sequence[str]] = tuple,
        frames: Mapping[str, DataFrame] | None = None,
        now: float | None = None,
        parts: int | None = None,
        settled: float | None = None,
    ) -> BatchReport:
        """Make and commit a batch; one that is in the store already is not made again.

        ``now``, ``parts`` and ``settled`` are those of its plan, if it has one.
        """
        with self._turn:
            self._refresh()
            if self.last is not None and number <= self.last:
                return self._made_before(number)
            self._settled = settled
            work = self._work(number, now, parts)
            # What has no plan may be another input next time: it is committed as a whole.
            if parts is not None and self._store.commits_by_part:
                work.open_parts = self._begin_parts(number)
                if work.open_parts.committed:
                    return self._made_before(number)
            return self._write(replace(work, paths=paths(), frames=frames or {}))

    def settle(self, *, everything: bool = False) -> BatchReport | None:
        """Give up on spans that have waited long enough, or on all; None if there are none.

        For a stream to which no new batch comes: a batch does the same.
        """
        with self._turn:
            self._refresh()
            files = StateFiles.of(self._files, expire_all=everything)
            oldest = min((file.arrived_ms for file in files.pending), default=None)
            work = self._work(0 if self.last is None else self.last)
            expired_ms = state.expired_ms(work.now * 1000, self._settled, self._settings)
            stranded = state.are_ahead(files.pending, work.now) and self._expire
            if oldest is None or not (everything or stranded or oldest <= expired_ms):
                return None
            return self._write(replace(work, settle=True, files=files))

    def _made_before(self, number: int) -> BatchReport:
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
        self._files: tuple[Carry, ...] = claim.carry
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

    def _work(self, number: int, now: float | None = None, parts: int | None = None) -> Work:
        """A batch without input. Valid for this turn only: the pending files may change."""
        now_s = self._clock() if now is None else now
        return Work(
            stream=self.stream,
            number=number,
            epoch=self._epoch,
            now=now_s,
            budget=self._new_entities.budget(now_s, number),
            parts=parts or self._maker.parts,
            newest=self._store.newest_minute(until_s=now_s),
            files=StateFiles.of(self._files),
            expire=self._expire,
            settled=self._settled,
        )

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
        self._new_entities.add(stats.overflow.admitted)
        if not work.settle:
            self.last = work.number
        gone = set(batch.drop_carry)
        replaced = gone | {file.path for file in batch.add_carry}
        self._files = (
            *(file for file in self._files if file.path not in replaced),
            *batch.add_carry,
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
