"""The threads and the lock of a batcher.

Guarantees
    * Every submitted item is answered exactly once, and counted exactly once, whatever the backend,
      a handler or a caller does; only a backend call that never returns leaves its items open.
    * A worker forms a batch only when it may also send it, so ``depth`` is what waits and nothing
      else, and at most ``max_in_flight`` batches are with the backend.
    * User code (backend, weigh, key, threshold handlers, listeners) never runs under the lock.
    * An item is counted before its submitter hears of it, and flush() returns after.
"""

from __future__ import annotations

import functools
import logging
import os
import threading
import weakref
from collections.abc import Sequence

from batchmill import lifecycle
from batchmill.batcher import inside
from batchmill.batcher.adaptive import InFlightLimit
from batchmill.batcher.backend import BackendCaller
from batchmill.batcher.clock import Clock
from batchmill.batcher.desk import Desk, Work
from batchmill.batcher.intake import Answer, Intake, failure, late
from batchmill.batcher.ledger import Ledger
from batchmill.batcher.lock import give_way
from batchmill.batcher.pending import Entry, FlushReason, Pending
from batchmill.batcher.result import BatcherClosedError, ItemResult, Outcome
from batchmill.batcher.settings import BatcherSettings
from batchmill.batcher.shifts import Shifts
from batchmill.batcher.stats import BatcherStats
from batchmill.batcher.timer import Timer
from batchmill.batcher.twins import Twins
from batchmill.errors import ConfigError
from batchmill.pressure import QueueThresholdManager, QueueThresholdSettings
from batchmill.waiters import ThreadWaiter

log = logging.getLogger("batchmill.batcher")


class Engine:
    """Takes entries, forms batches, sends them, answers."""

    fork_order = 2  # after the thresholds and their listeners' queue

    def __init__(
        self,
        name: str,
        config: BatcherSettings,
        thresholds: QueueThresholdSettings | None,
        caller: BackendCaller,
        clock: Clock,
    ) -> None:
        self.name = name
        self.config = config
        self.clock = clock
        self.caller = caller
        self.thresholds: QueueThresholdManager | None = None
        self._warning = 1 << 62
        self._capacity: int | None = None
        if thresholds is not None:
            self.thresholds = QueueThresholdManager(
                thresholds, lambda: len(self._pending), name=name, clock=clock.now
            )
            self._warning = thresholds.warning_threshold
            self._capacity = thresholds.hard_capacity
        self._timer = Timer(clock, f"batchmill-{name}-timer")
        self.reset()

    def reset(self) -> None:
        """Empty and idle: at the start, and in a forked child, where the rest is the parent's."""
        self._lock = threading.Lock()
        self.desk = Desk(self, self.clock)
        self._pending = Pending(self.config)
        self._twins = Twins()
        self._ledger = Ledger(self.name, self._lock, self._twins)
        self.intake = Intake(
            self.thresholds,
            self.clock,
            self._timer,
            self._lock,
            self._pending,
            self._twins,
            self._accept,
            self._settle,
        )
        self._in_flight: dict[int, list[Entry]] = {}
        self._shifts = Shifts()
        self._flush_up_to = 0
        self._limit = InFlightLimit(self.config.max_in_flight, self.config.adaptive)
        self._next_batch_id = 0
        self.closing = False
        self.abandoned = False
        self._unattended = False
        self._close_until: float | None = None
        self._batches = 0
        self._flushes = dict.fromkeys(FlushReason, 0)

    @property
    def depth(self) -> int:
        """Items waiting for a batch."""
        return len(self._pending)

    def submit(self, entry: Entry, patient: bool = False) -> bool:
        """Take an entry, or answer it; False when there is no room and a patient one may wait."""
        config = self.config
        if config.weigh is not None:
            entry.weight = float(config.weigh(entry.item))
            if not entry.weight >= 0:
                raise ConfigError("weigh", entry.weight, "a function that answers at least 0")
        if config.key is not None:
            entry.key = config.key(entry.item)
        if self._lock.locked():
            give_way(self._lock)
        with self._lock:
            if not self.closing:
                if entry.key is not None and self._twins.join(entry):
                    self._watch(entry)
                    self._ledger.counts["submitted"] += 1
                    return True
                if len(self._pending) < self._warning:
                    try:
                        self._accept(entry)
                    except BaseException:  # no thread to be had: told at once, nothing is kept
                        self._twins.release(entry)
                        raise
                    self._ledger.counts["submitted"] += 1
                    return True
            self._ledger.counts["submitted"] += 1
            self.intake.deciding.add(entry)
        return self.intake.offer(entry, patient)

    def submit_patiently(self, entry: Entry, until: float | None) -> None:
        """Take an entry when there is room for it; after ``until`` the thresholds decide."""
        taken = self.submit(entry, patient=True)
        try:
            while not taken:
                taken = self.intake.offer(entry, self.intake.wait_for_room(until))
        except BaseException:  # Ctrl-C: the item was not taken
            self.intake.withdraw(entry)
            raise

    def _accept(self, entry: Entry) -> None:
        if not self.desk.workers:
            self._want_worker()
        self._watch(entry)
        if self._pending.add(entry):
            self._want_worker()
            self.desk.bell.wake()

    def _watch(self, entry: Entry) -> None:
        if entry.deadline is not None:
            # Weakly: an entry that was answered in time need not stay until its deadline.
            subject = weakref.ref(entry)
            self._timer.at(entry.deadline, functools.partial(self.desk.expire, subject), subject)

    def _want_worker(self) -> None:
        self.desk.want_worker(self.config.max_in_flight, f"batchmill-{self.name}")

    def expire(self, entry: Entry) -> None:
        """The entry's time is over: answer it, unless it was sent already."""
        with self._lock:
            if entry in self._pending:
                heir = self._twins.heir(entry) if entry.key is not None else None
                if heir is not None:
                    self._pending.replace(entry, heir)
                else:
                    self._pending.remove(entry)
                    self.intake.make_room()
            elif entry.key is None or not self._twins.leave(entry):
                return
            told = self._ledger.book([(entry, late(entry, self.clock.now()), "expired")])
        self._ledger.tell(told)

    def look(self) -> Work:
        """What the worker whose turn it is should do."""
        if self.abandoned and not self.closing:
            self.begin_close()
        with self._lock:
            if len(self._in_flight) >= self._limit.current:
                return Work()
            now = self.clock.now()
            reason = self._pending.ready(now, self._flush_up_to, self.closing)
            if reason is not None:
                return self._take(reason, now)
            if self.closing:
                self.desk.free -= 1
                return Work(leave=True)
            return Work(until=self._pending.due_at())

    def leave(self) -> None:
        """A worker goes: there will be no more."""
        with self._lock:
            self.desk.live -= 1
            last = self.desk.live == 0
        if last and self._unattended:
            self._wind_up()

    def fail(self, batch_id: int, error: BaseException) -> None:
        """A batch could not be sent for a reason of our own."""
        left = self._in_flight.get(batch_id, [])
        self._finish(batch_id, [(entry, failure(entry, error), "failed") for entry in left], None)

    def _take(self, reason: FlushReason, now: float) -> Work:
        batch = self._pending.take()
        if reason is FlushReason.SIZE and len(batch) < self.config.batch_size:
            reason = FlushReason.WEIGHT  # enough of them wait, but they are too heavy together
        self._next_batch_id += 1
        self._in_flight[self._next_batch_id] = batch
        self._shifts.begin(self._next_batch_id, now)
        self._batches += 1
        self._flushes[reason] += 1
        self.desk.free -= 1
        if len(self._pending):
            self._want_worker()
        self.intake.make_room()
        return Work(self._next_batch_id, batch)

    def send(self, batch_id: int, batch: list[Entry], process: int) -> None:
        """Hand a batch to the backend and answer its entries."""
        if self.thresholds is not None:
            self.thresholds.observe(len(self._pending))
        now = self.clock.now()
        live = self._screen(batch_id, batch, now)
        if not live:
            self._finish(batch_id, [], None)
            return
        results = self.caller.deliver([entry.item for entry in live])
        if os.getpid() != process:
            lifecycle.leave_forked_child()
        answers: list[Answer] = []
        ok = True
        for entry, value in zip(live, results, strict=True):
            if isinstance(value, BaseException):
                ok = False
                answers.append((entry, failure(entry, value), "failed"))
            else:
                result = ItemResult(entry.item, Outcome.SUCCESS, value)
                answers.append((entry, result, "succeeded"))
        self._finish(batch_id, answers, self.clock.now() - now, ok)

    def _screen(self, batch_id: int, batch: list[Entry], now: float) -> list[Entry]:
        """Answer what is cancelled or late; the entries to send, in order."""
        gone: list[Answer] = []
        leaving = {
            index: answer
            for index, entry in enumerate(batch)
            if (answer := _start(entry, now)) is not None
        }
        if not leaving:
            return batch
        live: list[Entry] = []
        with self._lock:
            for index, entry in enumerate(batch):
                answer = leaving.get(index)
                heir: Entry | None = entry
                while answer is not None:
                    gone.append(answer)
                    heir = self._twins.heir(answer[0]) if answer[0].key is not None else None
                    answer = _start(heir, now) if heir is not None else None
                if heir is not None:
                    live.append(heir)
            self._in_flight[batch_id] = live
            told = self._ledger.book(gone)
        self._ledger.tell(told)
        return live

    def _finish(
        self, batch_id: int, answers: Sequence[Answer], took_s: float | None, ok: bool = True
    ) -> None:
        """A batch is over: count and answer its entries, and let the next one go."""
        with self._lock:
            told = self._ledger.book(answers)
            if took_s is not None:
                self._limit.record(took_s, ok, len(self._in_flight))
            self._in_flight.pop(batch_id, None)
            self._shifts.end(batch_id, took_s or 0.0)
            self.desk.bell.wake()
        self._ledger.tell(told)
        with self._lock:
            self.desk.free += 1

    def _settle(self, answers: Sequence[Answer]) -> None:
        """Count and answer entries that were in no batch."""
        with self._lock:
            told = self._ledger.book(answers)
            for entry, _, _ in answers:
                self.intake.deciding.discard(entry)
        self._ledger.tell(told)

    def _answered_up_to(self, seq: int) -> bool:
        waiting = self._pending.first_seq
        return (
            (waiting is None or waiting > seq)
            and not any(batch and batch[0].seq <= seq for batch in self._in_flight.values())
            and self._ledger.told_up_to(seq)
        )

    def flush(self, until: float | None) -> bool:
        """Send what waits without lingering; True when all accepted so far has been answered."""
        waiter = ThreadWaiter()
        with self._lock:
            seq = self._pending.last_seq
            self._flush_up_to = max(self._flush_up_to, seq)
            self._ledger.waiters.append(waiter)
            self.desk.bell.wake()
        try:
            woken = True
            while True:
                with self._lock:
                    if self._answered_up_to(seq):
                        return True
                if not woken:
                    return False
                woken = self.clock.wait(waiter, until)
        finally:
            with self._lock:
                self._ledger.waiters.remove(waiter)

    def hurry(self, least: float) -> bool:
        """Send what waits without lingering if that is enough; whether it is."""
        with self._lock:
            weighed = self.config.max_weight is not None
            waits = self._pending.weight if weighed else float(len(self._pending))
            if not self._pending or waits < least:
                return False
            self._flush_up_to = max(self._flush_up_to, self._pending.last_seq)
            self.desk.bell.wake()
            return True

    def begin_close(self, unattended: bool = False) -> None:
        """Take no more; send what waits, and give up on what was parked.

        ``unattended``: nobody waits for the end, so the last worker tidies up.
        """
        with self._lock:
            self._unattended = self._unattended or unattended or self.abandoned
            if not self.closing:
                self.closing = True
                self._close_until = self.clock.now() + self.config.close_timeout_s
            parked = self.intake.close()
            if len(self._pending):
                self._want_worker()
            self.desk.bell.wake()
        error = BatcherClosedError("it was waiting for another try")
        self._settle([(entry, failure(entry, error), "rejected") for entry in parked])

    def finish_close(self, until: float | None) -> bool:
        """Wait for the rest; what is not with the backend by ``until`` is rejected."""
        in_time = self.flush(until)
        self.desk.bell.wake()
        if in_time:
            for thread in self.desk.workers:
                if thread is not threading.current_thread():
                    thread.join()
        else:
            error = BatcherClosedError("it was not sent before close() ran out of time")
            with self._lock:
                rest = self._pending.take_all()
                told = self._ledger.book(
                    [(entry, failure(entry, error), "rejected") for entry in rest]
                )
                self._unattended = True
            self._ledger.tell(told)
        self._wind_up(in_time)
        return in_time

    def _wind_up(self, drained: bool = True) -> None:
        self._timer.cancel_all()
        if drained:
            self.caller.close()
        if self.thresholds is not None:
            self.thresholds.close()
        lifecycle.release(self)
        self.desk.revived = None

    def await_close(self) -> None:
        """Wait for the rest as long as the settings allow: at interpreter exit."""
        self.finish_close(self._close_until)

    def abandon(self) -> None:
        """Nobody has the batcher any more: have its workers close it.

        Called by a finaliser, which may run at any point, so it takes no lock.
        """
        self.abandoned = True
        if self.desk.live:
            lifecycle.keep(self)
            self.desk.revived = self
        self.desk.bell.wake()

    def stats(self) -> BatcherStats:
        thresholds = self.thresholds.stats() if self.thresholds is not None else None
        with self._lock:
            return BatcherStats(
                **self._ledger.counts,
                queue_depth=len(self._pending),
                in_flight=sum(len(batch) for batch in self._in_flight.values()),
                parked=len(self.intake.parked),
                deciding=len(self.intake.deciding),
                joined=self._twins.count,
                batches=self._batches,
                backend_calls=self.caller.calls,
                flushes=dict(self._flushes),
                retries=self.caller.retries,
                in_flight_limit=self._limit.current,
                breaker_opened=self.caller.breaker_opened,
                thresholds=thresholds,
                name=self.name,
                capacity=self._capacity,
                workers=self._shifts.loads(self.clock.now()),
            )

    def after_fork_in_child(self) -> None:
        closed, desk = self.closing, self.desk
        self._timer.reset()
        self.caller.reset()
        self.reset()
        self.closing = closed
        if closed:
            self.intake.close()
        if inside.current() is desk:  # forked in the backend: here it is nobody's worker
            inside.enter(None)


def snapshot_batchers() -> tuple[BatcherStats, ...]:
    """A snapshot of each open batcher of this process, by name: for whoever watches all of it."""
    found = [engine for engine in lifecycle.tracked(Engine) if not engine.closing]
    return tuple(engine.stats() for engine in sorted(found, key=lambda engine: engine.name))


def _start(entry: Entry, now: float) -> Answer | None:
    """None when the entry goes to the backend now, else how it ends instead."""
    if entry.deadline is not None and now >= entry.deadline:
        return entry, late(entry, now), "expired"
    if not entry.start():
        return entry, None, "cancelled"
    entry.sent = True
    return None
