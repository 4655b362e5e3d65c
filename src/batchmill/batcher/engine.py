"""The threads and the lock of a batcher.

Guarantees
    * Every submitted item is answered exactly once, and counted exactly once, whatever the backend,
      a handler or a caller does; only a backend call that never returns leaves its items open.
    * A worker forms a batch only when it may also send it, so ``depth`` is what waits and nothing
      else, and at most ``max_in_flight`` batches are with the backend.
    * User code (backend, weigh, key, threshold handlers, listeners) never runs under the lock.
    * An item is counted before its submitter is answered, and flush() returns after that.
"""

from __future__ import annotations

import functools
import os
import threading
import weakref
from collections.abc import Sequence

from batchmill import lifecycle
from batchmill.batcher.backend import BackendCaller, InFlightLimit
from batchmill.batcher.entries import Entry
from batchmill.batcher.intake import Intake
from batchmill.batcher.pending import Duplicates, FlushReason, Pending
from batchmill.batcher.result import BatcherClosedError, ItemResult, Outcome
from batchmill.batcher.settings import BatcherSettings
from batchmill.batcher.stats import BATCHER, BatcherStats, BatchTimes, Outcomes
from batchmill.batcher.threads import Clock, Timer, Work, WorkerPool, current_pool, enter_pool
from batchmill.errors import ConfigError
from batchmill.pressure import QueueThresholdManager, QueueThresholdSettings
from batchmill.telemetry import default_registry, register
from batchmill.waiters import ThreadWaiter, give_way


class Engine:
    """Accepts entries, forms batches, sends them, answers."""

    fork_order = 2  # after the thresholds and their listeners' queue
    kind = BATCHER

    def __init__(
        self,
        name: str,
        settings: BatcherSettings,
        thresholds: QueueThresholdSettings | None,
        caller: BackendCaller,
        clock: Clock,
    ) -> None:
        self.name = name
        self.settings = settings
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
        self._registration = register(self)

    def reset(self) -> None:
        """Empty and idle: at the start, and in a forked child, where the rest is the parent's."""
        self._lock = threading.Lock()
        self.workers = WorkerPool(self, self.clock)
        self._pending = Pending(self.settings)
        self._duplicates = Duplicates()
        self._outcomes = Outcomes(self.name, self._lock, self._duplicates)
        self.intake = Intake(
            self.thresholds,
            self.clock,
            self._timer,
            self._lock,
            self._pending,
            self._duplicates,
            self._accept,
            self._settle,
        )
        self._in_flight: dict[int, list[Entry]] = {}
        self._times = BatchTimes()
        self._flush_up_to = 0
        self._limit = InFlightLimit(self.settings.max_in_flight, self.settings.adaptive)
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
        """Accept or answer an entry; False when there is no room and a patient one may wait."""
        settings = self.settings
        if settings.weigh is not None:
            entry.weight = float(settings.weigh(entry.item))
            if not entry.weight >= 0:
                raise ConfigError("weigh", entry.weight, "a function that answers at least 0")
        if settings.key is not None:
            entry.key = settings.key(entry.item)
        if self._lock.locked():
            give_way(self._lock)
        with self._lock:
            if not self.closing:
                if entry.key is not None and self._duplicates.join(entry):
                    self._watch(entry)
                    self._outcomes.counts["submitted"] += 1
                    return True
                if len(self._pending) < self._warning:
                    try:
                        self._accept(entry)
                    except BaseException:  # no thread could be started: raise, and keep nothing
                        self._duplicates.release(entry)
                        raise
                    self._outcomes.counts["submitted"] += 1
                    return True
            self._outcomes.counts["submitted"] += 1
            self.intake.deciding.add(entry)
        return self.intake.offer(entry, patient)

    def submit_patiently(self, entry: Entry, until: float | None) -> None:
        """Accept an entry when there is room for it; after ``until`` the thresholds decide."""
        done = self.submit(entry, patient=True)
        try:
            while not done:
                done = self.intake.offer(entry, self.intake.wait_for_room(until))
        except BaseException:  # Ctrl-C: the item was not accepted
            self.intake.withdraw(entry)
            raise

    def _accept(self, entry: Entry) -> None:
        if not self.workers.threads:
            self._start_worker()
        self._watch(entry)
        if self._pending.add(entry):
            self._start_worker()
            self.workers.waiter.wake()

    def _watch(self, entry: Entry) -> None:
        """Have the entry expire at its deadline, if it has one."""
        if entry.deadline is not None:
            # Weakly: an entry that was answered in time need not stay until its deadline.
            subject = weakref.ref(entry)
            self._timer.at(entry.deadline, functools.partial(self.workers.expire, subject), subject)

    def _start_worker(self) -> None:
        self.workers.start_worker(self.settings.max_in_flight, f"batchmill-{self.name}")

    def expire(self, entry: Entry) -> None:
        """The entry's deadline has passed: answer it, unless it was sent already."""
        with self._lock:
            if entry in self._pending:
                follower = self._duplicates.promote(entry)
                if follower is not None:
                    self._pending.replace(entry, follower)
                else:
                    self._pending.remove(entry)
                    self.intake.notify_room()
            elif not self._duplicates.leave(entry):
                return
            delivery = self._outcomes.count([entry.expire(self.clock.now())])
        self._outcomes.deliver(delivery)

    def next_work(self) -> Work:
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
                self.workers.free -= 1
                return Work(leave=True)
            return Work(until=self._pending.due_at())

    def leave(self) -> None:
        """A worker ends: there will be no more batches."""
        with self._lock:
            self.workers.live -= 1
            last = self.workers.live == 0
        if last and self._unattended:
            self._clean_up()

    def fail(self, batch_id: int, error: BaseException) -> None:
        """A batch could not be sent because of a bug of ours: answer its entries."""
        left = self._in_flight.get(batch_id, [])
        self._finish(batch_id, [entry.fail("failed", error) for entry in left], None)

    def _take(self, reason: FlushReason, now: float) -> Work:
        batch = self._pending.take()
        if reason is FlushReason.SIZE and len(batch) < self.settings.batch_size:
            reason = FlushReason.WEIGHT  # enough of them wait, but they are too heavy together
        self._next_batch_id += 1
        self._in_flight[self._next_batch_id] = batch
        self._times.begin(self._next_batch_id, now)
        self._batches += 1
        self._flushes[reason] += 1
        self.workers.free -= 1
        if len(self._pending):
            self._start_worker()
        self.intake.notify_room()
        return Work(batch, self._next_batch_id)

    def send(self, batch_id: int, batch: list[Entry], process: int) -> None:
        """Call the backend with a batch and answer its entries."""
        if self.thresholds is not None:
            self.thresholds.observe(len(self._pending))
        now = self.clock.now()
        live = self._start_entries(batch_id, batch, now)
        if not live:
            self._finish(batch_id, [], None)
            return
        results = self.caller.deliver([entry.item for entry in live])
        if os.getpid() != process:
            lifecycle.leave_forked_child()
        ok = True
        for entry, value in zip(live, results, strict=True):
            if isinstance(value, BaseException):
                ok = False
                entry.fail("failed", value)
            else:
                entry.ending = "succeeded"
                entry.result = ItemResult(entry.item, Outcome.SUCCESS, value)
        self._finish(batch_id, live, self.clock.now() - now, ok)

    def _start_entries(self, batch_id: int, batch: list[Entry], now: float) -> list[Entry]:
        """Answer what is cancelled or expired; the entries to send, in order."""
        ended = {entry for entry in batch if not _start(entry, now)}
        if not ended:
            return batch
        live: list[Entry] = []
        unsent: list[Entry] = []
        with self._lock:
            for entry in batch:
                primary: Entry | None = entry
                if entry in ended:
                    unsent.append(entry)
                    primary = self._duplicates.promote(entry)
                    while primary is not None and not _start(primary, now):
                        unsent.append(primary)
                        primary = self._duplicates.promote(primary)
                if primary is not None:
                    live.append(primary)
            self._in_flight[batch_id] = live
            delivery = self._outcomes.count(unsent)
        self._outcomes.deliver(delivery)
        return live

    def _finish(
        self, batch_id: int, ended: Sequence[Entry], took_s: float | None, ok: bool = True
    ) -> None:
        """A batch is over: count and answer its entries, and let the next one go."""
        with self._lock:
            delivery = self._outcomes.count(ended)
            if took_s is not None:
                self._limit.record(took_s, ok, len(self._in_flight))
                self._times.sent(len(ended), took_s)
            self._in_flight.pop(batch_id, None)
            self._times.end(batch_id, self.clock.now())
            self.workers.waiter.wake()
        self._outcomes.deliver(delivery)
        with self._lock:
            self.workers.free += 1

    def _settle(self, ended: Sequence[Entry]) -> None:
        """Count and answer entries that were in no batch."""
        with self._lock:
            delivery = self._outcomes.count(ended)
            self.intake.deciding.difference_update(ended)
        self._outcomes.deliver(delivery)

    def _answered_up_to(self, seq: int) -> bool:
        first_seq = self._pending.first_seq
        return (
            (first_seq is None or first_seq > seq)
            and not any(batch and batch[0].seq <= seq for batch in self._in_flight.values())
            and self._outcomes.delivered_up_to(seq)
        )

    def flush(self, until: float | None) -> bool:
        """Send what waits without lingering; True when all accepted so far has been answered."""
        waiter = ThreadWaiter()
        with self._lock:
            seq = self._pending.last_seq
            self._flush_up_to = max(self._flush_up_to, seq)
            self._outcomes.waiters.append(waiter)
            self.workers.waiter.wake()
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
                self._outcomes.waiters.remove(waiter)

    def hurry(self, least: float, *, when_idle: bool = False) -> bool:
        """Send what waits without lingering if that is enough; whether it is."""
        with self._lock:
            if when_idle and self._in_flight:
                return False
            weighed = self.settings.max_weight is not None
            amount = self._pending.weight if weighed else float(len(self._pending))
            if not self._pending or amount < least:
                return False
            self._flush_up_to = max(self._flush_up_to, self._pending.last_seq)
            self.workers.waiter.wake()
            return True

    def begin_close(self, unattended: bool = False) -> None:
        """Accept no more; send what waits, and reject what was parked.

        ``unattended``: nobody waits for the end, so the last worker cleans up.
        """
        with self._lock:
            self._unattended = self._unattended or unattended or self.abandoned
            if not self.closing:
                self.closing = True
                self._close_until = self.clock.now() + self.settings.close_timeout_s
            parked = self.intake.close()
            if len(self._pending):
                self._start_worker()
            self.workers.waiter.wake()
        error = BatcherClosedError("it was waiting for another try")
        self._settle([entry.fail("rejected", error) for entry in parked])

    def finish_close(self, until: float | None) -> bool:
        """Wait for the rest; what is not with the backend by ``until`` is rejected."""
        in_time = self.flush(until)
        self.workers.waiter.wake()
        if in_time:
            for thread in self.workers.threads:
                if thread is not threading.current_thread():
                    thread.join()
        else:
            error = BatcherClosedError("it was not sent before close() ran out of time")
            with self._lock:
                rest = self._pending.take_all()
                delivery = self._outcomes.count([entry.fail("rejected", error) for entry in rest])
                self._unattended = True
            self._outcomes.deliver(delivery)
        self._clean_up(in_time)
        return in_time

    def _clean_up(self, drained: bool = True) -> None:
        self._timer.cancel_all()
        if drained:
            self.caller.close()
        if self.thresholds is not None:
            self.thresholds.close()
        lifecycle.release(self)
        self.workers.revived = None
        self._registration.close(self)

    def await_close(self) -> None:
        """Wait for the rest as long as the settings allow: at interpreter exit."""
        self.finish_close(self._close_until)

    def abandon(self) -> None:
        """The batcher was garbage collected: have its workers close it.

        Called by a finaliser, which may run at any point, so it takes no lock.
        """
        self.abandoned = True
        if self.workers.live:
            lifecycle.keep(self)
            self.workers.revived = self
        self.workers.waiter.wake()

    def stats(self) -> BatcherStats:
        thresholds = self.thresholds.stats() if self.thresholds is not None else None
        with self._lock:
            return BatcherStats(
                **self._outcomes.counts,
                queue_depth=len(self._pending),
                in_flight=sum(len(batch) for batch in self._in_flight.values()),
                parked=len(self.intake.parked),
                deciding=len(self.intake.deciding),
                joined=self._duplicates.count,
                batches=self._batches,
                backend_calls=self.caller.calls,
                flushes=dict(self._flushes),
                retries=self.caller.retries,
                in_flight_limit=self._limit.current,
                breaker_opened=self.caller.breaker_opened,
                thresholds=thresholds,
                name=self.name,
                capacity=self._capacity,
                workers=self._times.loads(self.clock.now()),
                batch_sizes=self._times.sizes,
                batch_seconds=self._times.durations,
            )

    def after_fork_in_child(self) -> None:
        closed, workers = self.closing, self.workers
        self._timer.reset()
        self.caller.reset()
        self.reset()
        self.closing = closed
        if closed:
            self.intake.close()
        if current_pool() is workers:  # forked in the backend: the child has no workers
            enter_pool(None)


def snapshot_batchers() -> tuple[BatcherStats, ...]:
    """The stats of each batcher of this process that is not closed yet, by name."""
    return tuple(batcher.stats() for batcher in default_registry.components(BATCHER))


def _start(entry: Entry, now: float) -> bool:
    """Whether the entry goes to the backend now; else it has ended."""
    if entry.deadline is not None and now >= entry.deadline:
        entry.expire(now)
        return False
    if not entry.start():
        entry.cancel()
        return False
    entry.sent = True
    return True
