"""Batches of a stream, made and committed one at a time."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from pyspark.sql import DataFrame, SparkSession

from batchmill.oal import MetricSet
from batchmill.spark._batch import BatchMaker, BatchStats, Work
from batchmill.spark._checkpoint import Checkpoint
from batchmill.spark._plan import SourcePlan, plan_source
from batchmill.spark._quarantine import Quarantine
from batchmill.spark._settings import PipelineSettings
from batchmill.spark._trace import TraceWork, Waiting
from batchmill.store import Carry, Claim, CommitResult, Layout, Store

log = logging.getLogger("batchmill.spark")


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


def plans_for(
    metrics: MetricSet, layout: Layout, settings: PipelineSettings
) -> dict[str, SourcePlan]:
    """A plan for each source that a metric reads."""
    return {
        source: plan_source(metrics.catalog.source(source), found, layout, settings.apdex_ms)
        for source, found in metrics.by_source().items()
    }


class StreamWriter:
    """Commits the batches of one claimed stream, one at a time."""

    def __init__(
        self,
        *,
        spark: SparkSession,
        metrics: MetricSet,
        plans: dict[str, SourcePlan],
        store: Store,
        stream: str,
        claim: Claim,
        checkpoint: Checkpoint,
        quarantine: Quarantine,
        settings: PipelineSettings,
        clock: Callable[[], float],
    ) -> None:
        self.stream = stream
        self.last = claim.last_batch
        self._store = store
        self._epoch = claim.epoch
        self._carry: tuple[Carry, ...] = claim.carry
        self._settings = settings
        self._clock = clock
        self._turn = threading.Lock()
        self._trace = TraceWork(spark, checkpoint.carry, settings, frozenset(plans))
        self._trace.tidy(self._carry)
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
            if self.last is not None and number <= self.last:
                log.info("batch %d of %s is in the store already", number, self.stream)
                nothing = CommitResult(applied=False)
                return BatchReport(self.stream, number, False, BatchStats(), nothing, 0.0, 0.0)
            return self._write(replace(self._work(number), paths=paths(), frames=frames or {}))

    def settle(self, *, everything: bool = False) -> BatchReport | None:
        """Let go of spans that have waited long enough, or of all; None if there are none.

        For when no new batch comes that would do so in passing.
        """
        with self._turn:
            oldest = min((each.arrived_ms for each in self._carry), default=None)
            waited_ms = (self._clock() - self._settings.span_wait_s) * 1000
            if oldest is None or not (everything or oldest <= waited_ms):
                return None
            work = self._work(0 if self.last is None else self.last)
            waiting = Waiting(self._carry, expire_all=everything)
            return self._write(replace(work, settle=True, waiting=waiting))

    def _work(self, number: int) -> Work:
        """An empty work order, good for this turn: which files wait may change with the next."""
        return Work(
            stream=self.stream,
            number=number,
            epoch=self._epoch,
            now=self._clock(),
            newest=self._store.newest_minute(),
            waiting=Waiting(self._carry),
        )

    def _write(self, work: Work) -> BatchReport:
        started = time.perf_counter()
        batch, stats = self._maker.make(work)
        made = time.perf_counter()
        result = self._store.commit(batch)
        done = time.perf_counter()
        if not work.settle:
            self.last = work.number
        gone = set(batch.drop_carry)
        self._carry = (
            *(each for each in self._carry if each.path not in gone),
            *batch.add_carry,
        )
        if gone:
            self._trace.tidy(self._carry)
        return BatchReport(
            self.stream, work.number, result.applied, stats, result, made - started, done - made
        )
