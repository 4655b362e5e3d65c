"""Metrics in the process itself: events go through L1 and L2 into a store, without Spark."""

from __future__ import annotations

import asyncio
import logging
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future
from itertools import groupby
from pathlib import Path
from typing import Any, Self, TypeVar

from batchmill import lifecycle, presets
from batchmill.aggregate import Aggregator, Statement
from batchmill.errors import ConfigError
from batchmill.oal import MetricSet, load
from batchmill.queue import BatchQueue, BatchQueueManager, BufferStrategy
from batchmill.sources import source_classes, source_of
from batchmill.store import RetryPolicy, Store, open_store
from batchmill.telemetry import register
from batchmill.workers.l1 import L1Worker
from batchmill.workers.l2 import Committer, L2Worker
from batchmill.workers.settings import WorkerSettings
from batchmill.workers.stats import WORKERS, EmbeddedStats
from batchmill.workers.topn import TopNWorker

log = logging.getLogger("batchmill.workers")

T = TypeVar("T")

_RETRY = RetryPolicy(initial_ms=20, max_ms=500, give_up_after_s=2)
"""Short: a commit that fails is tried again by the workers, which take events meanwhile."""
_TERMINATED = 128 + signal.SIGTERM
_L2_BUFFER = 16
"""An item of L2's queue is all that L1 merged in a period, so a few are plenty."""
_TOPN_BUFFER = 10_000
_PAUSE_S = 5.0
"""How long a fork waits for the workers to pause, and then for a commit to end."""


class Embedded:
    """Aggregates events in this process and commits the metrics to a store.

    ``oal`` is a script, as text or as the path of a file or folder, or several of those, or a
    :class:`~batchmill.oal.MetricSet`. ``store`` is its address: ``sqlite:///metrics.db`` or
    ``postgresql://…``. Several processes may write to one store, also processes that were forked
    from this one. ``name`` is that of the application, which its processes share: with a name, its
    metrics stay registered while none of them runs, and those that are not in the script any more
    are retired. Other keywords are :class:`WorkerSettings`.

    * What was accepted is committed when it is closed, at interpreter exit, and on SIGTERM. It has
      to be closed, or it stays open until then.
    * A process that is killed loses what came in the last ``l1_period_s + l2_period_s``: use
      :class:`batchmill.Client` where that is too much.
    * Each event counts once: also if a commit gets no answer, and is tried again.
    * After a fork, parent and child go on, each with what it accepts itself.

    >>> with Embedded(oal=script, store="sqlite:///metrics.db") as mill:  # doctest: +SKIP
    ...     mill.emit(Checkout(datetime.now(UTC), "shop", 250))
    """

    kind = WORKERS
    fork_order = 6  # at exit it is closed before the queues, and before what the store has

    def __init__(
        self,
        *,
        oal: str | Path | Iterable[str | Path] | MetricSet,
        store: str,
        name: str | None = None,
        handle_sigterm: bool = True,
        **settings: Any,
    ) -> None:
        self.name = name or "embedded"
        """Its name in telemetry."""
        self.settings = WorkerSettings(**settings)
        self._metrics = oal if isinstance(oal, MetricSet) else load(oal)
        self._store_url = store
        self._closed = False
        self._closing = threading.Lock()
        self._counting = threading.Lock()
        self._unused = 0
        self._forking = threading.Lock()
        self._paused: list[threading.Lock] = []
        self._paused_by: int | None = None
        catalog = self._metrics.catalog
        self._aggregators = {
            source: Aggregator(catalog.source(source), own, apdex_ms=self.settings.apdex_ms)
            for source, own in self._metrics.by_source().items()
        }
        if not self._aggregators:
            raise ConfigError("oal", oal, "a script with at least one metric")
        self._committer = Committer(
            self._open, self._metrics, self._aggregators, self.settings, name=name
        )
        self._manager = BatchQueueManager()
        try:
            self._committer.connect()
            self._start()
        except BaseException:
            self._manager.shutdown_all()
            self._committer.close()
            raise
        lifecycle.track(self)
        lifecycle.keep(self)  # until it is closed: its queues must not drain into nothing
        lifecycle.pause_at_fork(self)
        self._registration = register(self)
        if handle_sigterm:
            exit_on_sigterm()

    def _open(self) -> Store:
        return open_store(
            self._store_url,
            retry=_RETRY,
            ttl_days=self.settings.ttl_days,
            top_n=self.settings.top_n,
        )

    def _start(self) -> None:
        """Make the queues, downstream first."""
        settings, manager = self.settings, self._manager
        l2_settings = {"buffer_size": _L2_BUFFER, **settings.l2_queue}
        l2 = manager.create(presets.METRICS_L2_PERSISTENCE, presets.l2_persistence(**l2_settings))
        topn_settings: dict[str, Any] = {  # like L1's: emit() does not wait
            "strategy": BufferStrategy.IF_POSSIBLE,
            "buffer_size": _TOPN_BUFFER,
            **settings.topn_queue,
        }
        topn = manager.create(presets.TOPN_PERSISTENCE, presets.topn_persistence(**topn_settings))
        l1 = manager.create(
            presets.METRICS_L1_AGGREGATION,
            presets.l1_aggregation(**settings.l1_queue),
            downstream=[l2],
        )
        self._l1: BatchQueue[Any] = l1
        self._l2: BatchQueue[Any] = l2
        self._topn_queue: BatchQueue[Any] = topn
        self._topn = TopNWorker(self._committer.add_statements, settings)
        topn.add_handler(Statement, self._topn)
        classes = {kind.name: cls for cls, kind in source_classes().items()}
        self._workers: dict[str, L1Worker] = {}
        self._direct: set[type] = set()
        """The classes whose instances go into L1's queue as they are."""
        for source, aggregator in self._aggregators.items():
            worker = L1Worker(aggregator, l2.produce, settings)
            self._workers[source] = worker
            l2.add_handler(worker.states_class, L2Worker(self._committer))
            l1.add_handler(worker.reader.row_class, worker)
            cls = classes.get(source)
            if cls is not None and worker.reader.takes(cls):
                l1.add_handler(cls, worker)
                self._direct.add(cls)
        self._produce = l1.produce

    def emit(self, event: object, source: str | None = None) -> bool:
        """Count one event; False when it was dropped, and counted as such.

        ``event`` is an instance of a class with ``@source``; or, with the name of an event type as
        ``source``, a mapping from columns to values; or a :class:`~batchmill.workers.Statement`.
        Without a ``time`` it happened now. It never waits for the store: if events come faster than
        they can be aggregated, they are dropped. What is no event raises; an event with a value
        that does not fit may be accepted, and is counted as invalid then.
        """
        if type(event) in self._direct and source is None:
            return self._produce(event)
        return self._emit_many([self._item(event, source)], None) == 1

    def emit_many(
        self, events: Iterable[object], source: str | None = None, *, timeout: float | None = None
    ) -> int:
        """Count several events, in order; how many went in before the first that was dropped.

        Much quicker than one by one. With ``timeout``, it waits up to so many seconds for room. If
        one of them is no event, it raises, and none is counted.
        """
        items = events if isinstance(events, list) else list(events)
        if source is None and self._direct.issuperset(map(type, items)):
            return self._l1.produce_many(items, timeout)
        return self._emit_many([self._item(event, source) for event in items], timeout)

    async def aemit(self, event: object, source: str | None = None) -> bool:
        """Like :meth:`emit`, without blocking the event loop, whatever a full queue does."""
        item = self._item(event, source)
        if item is None:
            self._count_unused(1)
            return True
        return await self._queue_of(item).aproduce(item)

    def flush(self, timeout: float | None = None) -> bool:
        """Commit what was accepted before this call; True when all of it is in the store.

        False when ``timeout`` seconds are over first, or if something was lost meanwhile.
        """
        deadline_s = time.monotonic() + (threading.TIMEOUT_MAX if timeout is None else timeout)
        return _uninterrupted(lambda: self._flush(deadline_s))

    async def aflush(self, timeout: float | None = None) -> bool:
        """Like :meth:`flush`, without blocking the event loop."""
        return await asyncio.to_thread(self.flush, timeout)

    def stats(self) -> EmbeddedStats:
        """What became of the events so far."""
        # Downstream first: what moves on meanwhile is counted as waiting, never twice.
        closed = self._closed
        counts = self._committer.counts
        failed = sum(worker.failed for worker in self._workers.values()) + counts.failed
        failed_statements = self._topn.failed + counts.failed_statements
        topn, l1 = self._topn_queue.stats(), self._l1.stats()
        failed, failed_statements = failed + l1.failed, failed_statements + topn.failed
        if closed:  # what has not arrived by now never will
            failed = l1.accepted - counts.committed - counts.expired - sum(counts.invalid.values())
            done = counts.statements + counts.invalid_statements
            failed_statements = topn.accepted - done
        return EmbeddedStats(
            accepted=l1.accepted,
            committed=counts.committed,
            expired=counts.expired,
            invalid=dict(counts.invalid),
            failed=failed,
            dropped={reason: count for reason, count in l1.dropped.items() if count},
            unused=self._unused,
            late=counts.late,
            statements_accepted=topn.accepted,
            statements=counts.statements,
            statements_invalid=counts.invalid_statements,
            statements_failed=failed_statements,
            statements_dropped={reason: count for reason, count in topn.dropped.items() if count},
            commits=counts.commits,
            retries=counts.retries,
        )

    def close(self, timeout: float | None = None) -> bool:
        """Commit what was accepted and close the store; True when nothing was ever lost.

        It waits up to ``close_timeout_s``, or ``timeout`` seconds, for a store that does not
        answer; what is not committed then is lost, and counted as failed.
        """
        wait_s = self.settings.close_timeout_s if timeout is None else timeout
        deadline_s = time.monotonic() + wait_s
        return _uninterrupted(lambda: self._close(deadline_s))

    async def aclose(self, timeout: float | None = None) -> bool:
        """Like :meth:`close`, without blocking the event loop."""
        return await asyncio.to_thread(self.close, timeout)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    def begin_close(self) -> None:
        """At exit: commit what was accepted, before the queues are closed."""
        self.close()

    def await_close(self) -> None:
        """At exit: nothing is left to wait for."""

    def before_fork(self) -> None:
        """Let the workers pause: the child must not inherit what they are in the middle of."""
        if not self._forking.acquire(timeout=_PAUSE_S):
            return  # another thread forks
        taken = [self._forking]
        workers = [worker.lock for worker in self._workers.values()]
        deadline_s = time.monotonic() + _PAUSE_S
        for lock in (*workers, self._topn.lock):
            # A worker that waits for room in L2, while the store is down, does not pause.
            if lock.acquire(timeout=max(0.0, deadline_s - time.monotonic())):
                taken.append(lock)
        if self._committer.turn.acquire(timeout=_PAUSE_S):
            taken.append(self._committer.turn)
            self._committer.prepare_fork()
        else:
            log.warning("a fork in the middle of a commit that hangs: its child may hang as well")
        if self._committer.lock.acquire(timeout=_PAUSE_S):
            taken.append(self._committer.lock)
        self._paused, self._paused_by = taken, threading.get_ident()

    def after_fork_in_parent(self) -> None:
        """Let the workers go on."""
        if self._paused_by == threading.get_ident():
            taken, self._paused, self._paused_by = self._paused, [], None
            for lock in reversed(taken):
                lock.release()

    def after_fork_in_child(self) -> None:
        """Start with nothing: what was accepted before belongs to the parent."""
        self._closing, self._forking = threading.Lock(), threading.Lock()
        self._counting = threading.Lock()
        self._paused, self._paused_by = [], None
        self._unused = 0
        for worker in self._workers.values():
            worker.reset()
        self._topn.reset()
        self._committer.abandon()

    def _flush(self, deadline_s: float) -> bool:
        def left_s() -> float:
            return max(0.0, deadline_s - time.monotonic())

        before = self.stats()
        in_time = self._l1.flush(left_s()) and self._topn_queue.flush(left_s())
        for worker in self._workers.values():
            in_time = worker.flush(left_s()) and in_time
        in_time = self._topn.flush(left_s()) and in_time
        in_time = self._l2.flush(left_s()) and in_time
        in_time = self._committer.commit_all(deadline_s) and in_time
        after = self.stats()
        lost = after.failed - before.failed + after.statements_failed - before.statements_failed
        return in_time and not lost

    def _close(self, deadline_s: float) -> bool:
        def left_s() -> float:
            return max(0.0, deadline_s - time.monotonic())

        with self._closing:
            if not self._closed:
                self._committer.give_up_at(deadline_s)
                for queue in (self._l1, self._topn_queue, self._l2):  # upstream first
                    queue.shutdown(left_s())
                self._committer.commit_all(deadline_s)
                self._committer.close(deadline_s)
                self._closed = True
                lifecycle.release(self)
                self._registration.close(self)
        stats = self.stats()
        return not (stats.failed or stats.statements_failed)

    def _emit_many(self, items: list[Any], timeout: float | None) -> int:
        """Put items into their queues; None stands for an event that no metric reads."""
        deadline_s = None if timeout is None else time.monotonic() + timeout
        done = 0
        for kind, run in groupby(items, _kind):
            some = list(run)
            if kind is None:
                self._count_unused(len(some))
                accepted = len(some)
            else:
                left_s = None if deadline_s is None else max(0.0, deadline_s - time.monotonic())
                accepted = self._queue_of(some[0]).produce_many(some, left_s)
            done += accepted
            if accepted < len(some):
                break
        return done

    def _queue_of(self, item: object) -> BatchQueue[Any]:
        return self._topn_queue if type(item) is Statement else self._l1

    def _item(self, event: object, source: str | None) -> object | None:
        """What goes into a queue; None if no metric reads such events. Raises if it is no event."""
        if source is None and (type(event) in self._direct or type(event) is Statement):
            return event
        if source is None:
            if isinstance(event, Mapping):
                raise TypeError("a mapping does not say which type it is: emit(event, 'Endpoint')")
            source = source_of(type(event)).name
        worker = self._workers.get(source)
        if worker is not None:
            return worker.reader.row(event, source)
        self._metrics.catalog.source(source)  # raises if there is no such type
        return None

    def _count_unused(self, count: int) -> None:
        with self._counting:
            self._unused += count


def _kind(item: object) -> str | None:
    if item is None:
        return None
    return "statement" if type(item) is Statement else "event"


def _uninterrupted(work: Callable[[], T]) -> T:
    """Run ``work`` where no signal handler can raise in the middle of it: not in the main thread.

    If this call is interrupted, the work goes on.
    """
    if threading.current_thread() is not threading.main_thread():
        return work()
    outcome: Future[T] = Future()

    def run() -> None:
        try:
            outcome.set_result(work())
        except BaseException as error:  # noqa: BLE001 - for the caller
            outcome.set_exception(error)

    try:
        threading.Thread(target=run, name="batchmill-embedded", daemon=True).start()
    except RuntimeError:  # while Python exits, newer versions start no thread
        return work()
    return outcome.result()


def exit_on_sigterm() -> None:
    """Have SIGTERM end the process like ``sys.exit()``, so that what was accepted is committed.

    Python's default ends it at once. Does nothing where the application has a handler of its own,
    or outside the main thread, where no handler can be set.
    """
    if threading.current_thread() is not threading.main_thread():
        return
    if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(_TERMINATED))
