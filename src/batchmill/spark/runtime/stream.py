"""Runs the batches of a stream, one after the other, in a thread.

A batch goes through these steps; after a crash at any of them the next run continues there:

1. its input is chosen and written to the books, with the clock;
2. it is made, and committed to the store;
3. it is marked as done in the books;
4. what was read is removed, if that is wanted: before the next batch, or while the stream is idle.

A batch that is in the books and not done is run first, with the same input. If it is in the store
already, that changes nothing.

A batch without input gives up on spans that have waited long enough for a partner, while nothing
comes that could bring one.

A batch that ran out of memory twice, or whose process died twice, is made smaller, as long as the
store has nothing of it: half of its input waits again, and later batches take no more than that.
If the store has some of its parts, its tasks are: see :mod:`batchmill.spark.batch.job`.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import threading
import time
from collections.abc import Callable
from dataclasses import replace

from pyspark import InheritableThread

from batchmill.spark.batch.report import BatchReport
from batchmill.spark.batch.writer import StreamWriter
from batchmill.spark.errors import BatchTooLargeError, PipelineError
from batchmill.spark.failures import explain_full_disk, is_out_of_memory
from batchmill.spark.files.paths import local_only
from batchmill.spark.input.base import Input
from batchmill.spark.input.books import Books, Plan
from batchmill.spark.input.choice import Pace
from batchmill.store import FencedError, StoreUnavailableError
from batchmill.wording import count_of

log = logging.getLogger("batchmill.spark")

_POLL_S = 0.5
"""How often a wait checks whether a stop was requested."""
_PAUSE_S = 0.05
"""The shortest time between two looks at an input that has nothing new."""
SETTLE_EVERY_S = 10.0
"""How often spans are settled while nothing comes."""
_TRIES = 2
"""How often a batch may run out of memory with the same input."""


class StreamRun:
    """The batches of a stream, from :meth:`start` until :meth:`end`.

    ``stop_requested`` says whether the run is to end; it may read a plain flag, which a signal
    handler can set. The current batch is finished then, and no other begins.
    """

    def __init__(
        self,
        writer: StreamWriter,
        books: Books,
        source: Input,
        on_batch: Callable[[BatchReport], None],
        stop_requested: Callable[[], bool],
        *,
        pace: Pace,
        clock: Callable[[], float],
        settle_every_s: float = SETTLE_EVERY_S,
        before_batch: Callable[[], None] = lambda: None,
        after_batch: Callable[[], None] = lambda: None,
    ) -> None:
        self.cut_short = False
        """Whether it was ended before all input was read."""
        self._writer = writer
        self._books = books
        self._source = source
        self._on_batch = on_batch
        self._stop_requested = stop_requested
        self._clock = clock
        self._before_batch = before_batch
        self._after_batch = after_batch
        self._pace = pace
        if books.most is not None:
            pace.ceiling = pace.safe = books.most
        self._released = False
        """Whether input waits again that had been chosen."""
        self._turn = threading.Lock()
        """Held from the plan of a batch until it is done."""
        self._settle_every_s = settle_every_s
        self._settling_due = 0.0
        self._wake = threading.Event()
        self._failure: BaseException | None = None
        self._raised = False
        self._thread: threading.Thread | None = None

    def start(self, interval_s: float | None) -> None:
        """Look for input every so many seconds; None: once, and end when that is read."""
        self._source.check()
        self._thread = InheritableThread(
            target=self._run,
            args=(interval_s,),
            name=f"batchmill-stream-{self._writer.stream}",
            daemon=True,
        )
        self._thread.start()

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until the run ends; False if it still runs after ``timeout`` seconds.

        Raises the error that made it fail.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        while not self._stop_requested():
            left = _POLL_S if deadline is None else deadline - time.monotonic()
            if self._has_ended(max(0.0, min(left, _POLL_S))):
                return True
            if deadline is not None and time.monotonic() >= deadline:
                return False
        self.end()
        return self._has_ended(0)

    def end(self) -> None:
        """End the run after the current batch; not to be called by that batch's own callback."""
        self._wake.set()
        if self._thread is not None:
            self._thread.join()

    def settle(self, *, everything: bool = False) -> BatchReport | None:
        """Give up on spans that have waited long enough, or on all; None if there are none.

        May be called by another thread than the run's, but not by a batch's own callback.
        """
        with self._turn:
            if self._books.open_plan is not None:
                self._run_batch(self._plan_again(self._books.open_plan))
            now = self._clock()
            if not self._writer.must_settle(now, everything=everything):
                return None
            plan = Plan(
                self._books.next_batch,
                now,
                self._writer.divide(),
                settled=self._writer.settled,
                step=self._writer.clock_step(now),
                expire_all=everything,
            )
            return self._begin(plan)[0]

    def unraised_failure(self) -> BaseException | None:
        """The error that made it fail, if :meth:`wait` did not raise it."""
        return None if self._raised else self._failure

    def _has_ended(self, seconds: float) -> bool:
        """Wait up to ``seconds`` for the end of the thread; raises the error that made it fail."""
        assert self._thread is not None
        self._thread.join(seconds)
        if self._thread.is_alive():
            return False
        if (failure := self._failure) is not None:
            self._raised = True
            raise failure
        return True

    @property
    def _ending(self) -> bool:
        return self._wake.is_set() or self._stop_requested()

    def _run(self, interval_s: float | None) -> None:
        try:
            if interval_s is None:
                self._read_all(patient=False)
                return
            while not self._ending:
                due = time.monotonic() + interval_s
                try:
                    self._read_all(patient=True)
                    self._settle_if_due()
                except StoreUnavailableError as error:
                    plan = self._books.open_plan
                    if plan is None or plan.has_input:
                        raise
                    log.warning("expired spans cannot be settled, trying again later: %s", error)
                self._pause_until(max(due, time.monotonic() + _PAUSE_S))
        except BaseException as error:  # noqa: BLE001 - whoever waits for the run gets it
            self._failure = error

    def _read_all(self, *, patient: bool) -> None:
        """Run batches until all is read that is there now; if ``patient``, what is new as well,
        as long as there is a backlog."""
        with self._turn:
            plan = self._books.open_plan
            if not self._ending and plan is not None:
                self._before_batch()
                self._run_batch(self._plan_again(plan))
        self.cut_short = self._ending
        if self._ending:
            return
        self._look(patient=patient)
        while not self._ending and self._run_next():
            if self._released or (patient and self._source.waiting):
                self._look(patient=patient)
        self.cut_short = self._source.waiting

    def _look(self, *, patient: bool) -> None:
        self._source.look(patient=patient)
        self._released = False

    def _settle_if_due(self) -> None:
        now = time.monotonic()
        if not self._ending and not self._source.waiting and now >= self._settling_due:
            self._settling_due = now + self._settle_every_s
            self.settle()

    def _run_next(self) -> bool:
        """Choose a batch and run it; False if nothing waits."""
        with self._turn:
            if (begun := self._books.open_plan) is not None:  # a settle in another thread failed
                self._run_batch(self._plan_again(begun))
            choice = self._source.choose(self._pace)
            if choice is None:
                return False
            began = time.perf_counter()
            self._before_batch()
            upkeep_s = time.perf_counter() - began
            now = self._clock()
            plan = Plan(
                self._books.next_batch,
                now,
                self._writer.divide(),
                choice.segments,
                choice.topic,
                choice.offsets,
                choice.settled,
                self._writer.latest(now),
                self._pace.ceiling,
                self._writer.clock_step(now),
            )
            if self._begin(plan, upkeep_s)[1]:
                took = time.perf_counter() - began
                self._pace.note(choice.amount, took, backlog=choice.backlog)
            return True

    def _begin(self, plan: Plan, upkeep_s: float = 0.0) -> tuple[BatchReport, bool]:
        """Write a batch to the books, and run it."""
        with explain_full_disk(*local_only(self._books.folder)):
            self._books.begin(plan)
        return self._run_batch(plan, upkeep_s)

    def _run_batch(self, plan: Plan, upkeep_s: float = 0.0) -> tuple[BatchReport, bool]:
        """Run a batch that is in the books; its report, and whether it succeeded at once."""
        self._pace.begun = plan.batch, time.monotonic()
        try:
            return self._try_batch(plan, upkeep_s)
        finally:
            self._pace.begun = None

    def _try_batch(self, plan: Plan, upkeep_s: float) -> tuple[BatchReport, bool]:
        """Run a batch, and again if it runs out of memory."""
        at_once, failed = True, 0
        while True:
            try:
                paths = functools.partial(self._source.segments, plan) if plan.has_input else tuple
                report = self._writer.write(plan, paths)
                break
            except Exception as error:
                if not is_out_of_memory(error):
                    if not self._ending and self._writer.jvm_is_gone:
                        # Perhaps of this batch: that counts, as the end of this process does.
                        raise PipelineError(
                            f"the JVM of Spark ended in batch {plan.batch}: it ran out of memory, "
                            "or was killed (the log of the system may say why). Start again: the "
                            "batch is repeated, and made smaller if that happens again"
                        ) from error
                    if not isinstance(error, FencedError):  # then the books are another writer's
                        with contextlib.suppress(OSError):
                            self._books.excuse()
                    raise
                # One that is too large by its rows has taken no memory yet, and is divided at once.
                failed += not isinstance(error, BatchTooLargeError)
                if self._ending or failed > _TRIES or not self._writer.can_go_on:
                    raise
                log.warning("batch %d takes too much memory: %s", plan.batch, error)
                again = self._plan_again(plan, error)
                failed = failed if again is plan else 0
                plan, at_once = again, False
        report = report.with_upkeep(upkeep_s)
        self._on_batch(report)
        with explain_full_disk(*local_only(self._books.folder)):
            self._books.finish(plan.batch)
        self._after_batch()
        return report, at_once

    def _plan_again(self, plan: Plan, error: BaseException | None = None) -> Plan:
        """The plan of a batch that did not come to its end, or a smaller one if that is needed."""
        if plan.most is not None:
            self._pace.lower_ceiling(plan.most)
        begun = self._books.begun
        with explain_full_disk(*local_only(self._books.folder)):
            if begun < _TRIES and not isinstance(error, BatchTooLargeError):
                self._books.begin_again()
                return plan
            half = self._source.halve(plan) if plan.has_input else None
            if not self._writer.may_be_recut(plan.batch):
                log.warning(
                    "batch %d was begun %s and cannot be made smaller, as the store has some of "
                    "its parts: it is tried again without those, one part a task. If a single "
                    "part takes too much memory, give Spark more (--conf spark.driver.memory=4g)",
                    plan.batch,
                    count_of(begun, "time"),
                )
                if half is not None:
                    self._pace.lower_ceiling(half[1])
                self._books.begin_again()
                return plan
            if half is None and error is not None:
                part = ", ".join(plan.segments) or "one message"
                part = part if plan.has_input else "its pending spans"
                raise PipelineError(
                    f"the smallest part of {self._source.name} that can be read at once "
                    f"({part}) takes more memory than there is: give "
                    "Spark more (--conf spark.driver.memory=4g), or move the segment away"
                ) from error
            if half is None:
                self._books.begin_again()
                return plan
            smaller, count = half
            self._books.replace(replace(smaller, most=count))
        self._released = True
        self._pace.lower_ceiling(count)
        log.warning(
            "batch %d was begun %s and did not come to its end: it is made smaller, and the rest "
            "waits for the next batches",
            plan.batch,
            count_of(begun, "time"),
        )
        return smaller

    def _pause_until(self, due: float) -> None:
        while not self._ending and (left := due - time.monotonic()) > 0:
            self._wake.wait(min(left, _POLL_S))
