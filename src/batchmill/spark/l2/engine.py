"""Batches of a stream, made and committed one at a time."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from pyspark.sql import DataFrame, SparkSession

from batchmill.oal import MetricSet
from batchmill.outbox import Outbox
from batchmill.spark.input.quarantine import Quarantine
from batchmill.spark.l1.plan import SourcePlan, plan_source
from batchmill.spark.l2.batch import BatchMaker, BatchStats, Work
from batchmill.spark.runtime.checkpoint import Checkpoint
from batchmill.spark.runtime.faults import telling_full_disks
from batchmill.spark.runtime.phases import COMMIT, OUTBOX, READ, UPKEEP
from batchmill.spark.runtime.session import copy_of, rebind
from batchmill.spark.settings import PipelineSettings
from batchmill.spark.spans.dedup import SeenIds, is_seen
from batchmill.spark.spans.trace import TraceWork, Waiting
from batchmill.store import (
    Batch,
    Carry,
    Claim,
    CommitResult,
    FencedError,
    Layout,
    Store,
)

log = logging.getLogger("batchmill.spark")

_ALL = 2**31
"""More files than an outbox can hold."""


@dataclass(frozen=True)
class BatchReport:
    """What a batch brought, and where its time went."""

    stream: str
    number: int
    applied: bool
    """False: it was in the store already."""
    stats: BatchStats
    result: CommitResult
    spark_s: float
    """From the first look at its segments until its deltas were in the driver's memory."""
    store_s: float
    """The commit."""
    outbox_s: float = 0.0
    """Putting its changes down for exporters, before the commit."""
    given: int = 0
    """How many segments it was made of, those that were set aside included."""
    phases: Mapping[str, float] = field(default_factory=dict)
    """Seconds by phase, in their order; they add up to what the batch took as a whole."""


def with_upkeep(report: BatchReport, seconds: float) -> BatchReport:
    """The same with what was tidied up before it began; a batch that was not made has no phases."""
    if not report.phases:
        return report
    upkeep = report.phases.get(UPKEEP, 0.0) + seconds
    return replace(report, phases={**report.phases, UPKEEP: upkeep})


def plans_for(
    metrics: MetricSet, layout: Layout, settings: PipelineSettings
) -> dict[str, SourcePlan]:
    """A plan for each source that a metric reads."""
    return {
        source: plan_source(metrics.catalog.source(source), found, layout, settings.apdex_ms)
        for source, found in metrics.by_source().items()
    }


class StreamWriter:
    """Commits the batches of one claimed stream, one at a time.

    ``claimed`` is the right to do so, ``claim`` gets it anew: what it knows of the stream is the
    store's word, never a guess about a commit that failed.
    """

    def __init__(
        self,
        *,
        spark: SparkSession,
        metrics: MetricSet,
        plans: dict[str, SourcePlan],
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
        layout: Layout | None = None,
    ) -> None:
        """``layout`` says whose columns those of the ``outbox``'s files are."""
        self.stream = stream
        self._outbox = outbox
        self._layout = layout or Layout({})
        self._store = store
        self._claim = claim
        self._stale = False
        self._fenced: FencedError | None = None
        self._settings = settings
        self._clock = clock
        self._expire = expire
        self._turn = threading.Lock()
        # A batch sets what fits its size: not for the batch of another writer beside it.
        self._spark = spark = copy_of(spark)
        seen = None if dedup_s is None else SeenIds(spark, checkpoint.seen, dedup_s)
        self._trace = TraceWork(spark, checkpoint.carry, settings, frozenset(plans), seen)
        self._enter(claimed)
        self._maker = BatchMaker(spark, metrics.catalog, plans, settings, quarantine, self._trace)

    def write(
        self,
        number: int,
        *,
        paths: Callable[[], Sequence[str]] = tuple,
        frames: Mapping[str, DataFrame] | None = None,
    ) -> BatchReport:
        """Make and commit a batch; one that the store has already is not even made."""
        with self._turn:
            self._refresh()
            if self.last is not None and number <= self.last:
                log.info("batch %d of %s is in the store already", number, self.stream)
                nothing = CommitResult(applied=False)
                return BatchReport(self.stream, number, False, BatchStats(), nothing, 0.0, 0.0)
            work = self._work(number)
            own = {source: rebind(each, self._spark) for source, each in (frames or {}).items()}
            return self._write(replace(work, paths=paths(), frames=own))

    def settle(self, *, everything: bool = False) -> BatchReport | None:
        """Let go of spans that have waited long enough, or of all; None if there are none.

        For when no new batch comes that would do so in passing.
        """
        with self._turn:
            self._refresh()
            waiting = self._waiting(everything)
            oldest = min((each.arrived_ms for each in waiting.files), default=None)
            waited_ms = (self._clock() - self._settings.span_wait_s) * 1000
            if oldest is None or not (everything or oldest <= waited_ms):
                return None
            work = self._work(0 if self.last is None else self.last)
            return self._write(replace(work, settle=True, waiting=waiting))

    def _enter(self, claim: Claim) -> None:
        """Take what the store has for what is true."""
        self.last = claim.last_batch
        self._epoch = claim.epoch
        self._carry: tuple[Carry, ...] = claim.carry
        self._trace.tidy(self._carry)
        if self._outbox is not None:
            files = self._store.outbox(self._outbox.place, limit=_ALL)
            self._outbox.tidy(self.stream, {each.path for each in files})

    def _waiting(self, expire_all: bool = False) -> Waiting:
        files = tuple(each for each in self._carry if not is_seen(each))
        return Waiting(files, tuple(each for each in self._carry if is_seen(each)), expire_all)

    def _refresh(self) -> None:
        """After a commit that failed: it may have got in all the same, so the store is asked."""
        if self._fenced is not None:
            raise self._fenced
        if self._stale:
            self._enter(self._claim())
            self._stale = False

    def _commit(self, batch: Batch) -> CommitResult:
        try:
            return self._store.commit(batch)
        except FencedError as error:
            # The stream is another writer's now; a claim would take it back.
            self._fenced = error
            raise
        except BaseException:
            self._stale = True
            raise

    def _work(self, number: int) -> Work:
        """An empty work order, good for this turn: which files wait may change with the next."""
        return Work(
            stream=self.stream,
            number=number,
            epoch=self._epoch,
            now=self._clock(),
            newest=self._store.newest_minute(),
            waiting=self._waiting(),
            expire=self._expire,
        )

    def _write(self, work: Work) -> BatchReport:
        watch = work.watch
        watch.lap(READ)
        started = time.perf_counter()
        batch, stats = self._maker.make(work)
        made = time.perf_counter()
        if self._outbox is not None:
            with telling_full_disks(self._outbox.folder):
                batch.outgoing = self._outbox.write(batch, self._layout)
            watch.lap(OUTBOX)
        put = time.perf_counter()
        result = self._commit(batch)
        done = time.perf_counter()
        watch.lap(COMMIT)
        if self._outbox is not None:
            self._outbox.remove(result.outbox_dropped)
        if not work.settle:
            self.last = work.number
        gone = set(batch.drop_carry)
        self._carry = (
            *(each for each in self._carry if each.path not in gone),
            *batch.add_carry,
        )
        if gone:
            self._trace.tidy(self._carry)
        watch.lap(UPKEEP)
        return BatchReport(
            self.stream,
            work.number,
            result.applied,
            stats,
            result,
            made - started,
            done - put,
            put - made,
            len(work.paths),
            watch.phases,
        )
