"""The threads and the lock of a batcher.

Guarantees
    * Every submitted item is answered exactly once, and counted exactly once, whatever the backend,
      a handler or a caller does; only a backend call that never returns leaves its items open.
    * A worker forms a batch only when it may also send it, so ``depth`` is what waits and nothing
      else, and at most ``max_in_flight`` batches are with the backend.
    * User code (backend, weigh, key, threshold handlers, listeners) never runs under the lock.
    * An ACCEPT is acted on under the lock that guards the depth, after looking again.
"""

from __future__ import annotations

import functools
import logging
import threading
import weakref
from collections import deque
from collections.abc import Hashable, Sequence
from typing import Any

from batchmill._waiting import ThreadWaiter, Waiter
from batchmill.batcher._adaptive import InFlightLimit
from batchmill.batcher._backend import BackendCaller
from batchmill.batcher._clock import Clock
from batchmill.batcher._config import BatcherConfig
from batchmill.batcher._pending import Entry, FlushReason, Pending
from batchmill.batcher._result import (
    BatcherClosedError,
    DeadlineExceededError,
    ItemResult,
    Outcome,
)
from batchmill.batcher._stats import BatcherStats
from batchmill.batcher._timer import Timer
from batchmill.pressure import QueueAction, QueueThresholdConfig, QueueThresholdManager

log = logging.getLogger("batchmill.batcher")

_worker = threading.local()


def current_engine() -> Engine | None:
    """The engine whose backend the calling thread is in, if any."""
    return getattr(_worker, "engine", None)


class Engine:
    """Takes entries, forms batches, sends them, answers."""

    fork_order = 1

    def __init__(
        self,
        name: str,
        config: BatcherConfig,
        thresholds: QueueThresholdConfig | None,
        caller: BackendCaller,
        clock: Clock,
    ) -> None:
        self.name = name
        self.config = config
        self.clock = clock
        self.caller = caller
        self.thresholds: QueueThresholdManager | None = None
        self._warning = 1 << 62
        if thresholds is not None:
            self.thresholds = QueueThresholdManager(
                thresholds, lambda: 0, name=name, clock=clock.now
            )
            self._warning = thresholds.warning_threshold
        self._timer = Timer(clock, f"batchmill-{name}-timer")
        self.reset()

    def reset(self) -> None:
        """Empty and idle: at the start, and in a forked child, where the rest is the parent's."""
        self._lock = threading.Lock()
        self._turn = threading.Lock()  # one worker at a time forms a batch
        self._bell = ThreadWaiter()  # rung for the worker whose turn it is
        self._pending = Pending(self.config)
        self._parked: set[Entry] = set()
        self._followers: dict[Hashable, list[Entry]] = {}
        self._in_flight: dict[int, list[Entry]] = {}
        self._room: deque[Waiter] = deque()
        self._flushers: list[tuple[int, Waiter]] = []
        self._flush_up_to = 0
        self._limit = InFlightLimit(self.config.max_in_flight, self.config.adaptive)
        self._workers: list[threading.Thread] = []
        self._free_workers = 0
        self._next_batch_id = 0
        self.closing = False
        self.abandoned = False
        self._close_until: float | None = None
        self._counts = dict.fromkeys(
            ("submitted", "succeeded", "failed", "rejected", "dropped", "expired", "cancelled"), 0
        )
        self._batches = 0
        self._flushes = dict.fromkeys(FlushReason, 0)

    @property
    def depth(self) -> int:
        """Items waiting for a batch."""
        return len(self._pending)

    def submit(self, entry: Entry) -> None:
        """Take an entry, or answer it at once."""
        config = self.config
        if config.weigh is not None:
            entry.weight = float(config.weigh(entry.item))
        if config.key is not None:
            entry.key = config.key(entry.item)
        with self._lock:
            self._counts["submitted"] += 1
            if not self.closing:
                if entry.key is not None and self._join(entry):
                    return
                if len(self._pending) < self._warning:
                    self._accept(entry)
                    return
        self._offer(entry)

    def wait_for_room(self, until: float | None) -> None:
        """Wait while the depth is at or past the critical threshold, ``until`` at the latest."""
        if self.thresholds is None:
            return
        limit = self.thresholds.config.critical_threshold
        waiter = ThreadWaiter()
        while True:
            with self._lock:
                if self.closing or len(self._pending) < limit:
                    return
                self._room.append(waiter)
            if not self.clock.wait(waiter, until):
                self.forget_room(waiter)
                return

    def full_for(self, waiter: Waiter) -> bool:
        """Whether there is no room; ``waiter`` is then woken when there may be some."""
        if self.thresholds is None:
            return False
        with self._lock:
            full = len(self._pending) >= self.thresholds.config.critical_threshold
            if full and not self.closing:
                self._room.append(waiter)
                return True
            return False

    def forget_room(self, waiter: Waiter) -> None:
        with self._lock:
            if waiter in self._room:
                self._room.remove(waiter)

    def _join(self, entry: Entry) -> bool:
        """Have an entry wait for an equal one's answer; False when it is the first of its kind."""
        followers = self._followers.get(entry.key)
        if followers is None:
            self._followers[entry.key] = []
            return False
        followers.append(entry)
        return True

    def _accept(self, entry: Entry) -> None:
        if entry.deadline is not None:
            # Weakly: an entry that was answered in time need not stay until its deadline.
            self._timer.at(entry.deadline, functools.partial(self._expire, weakref.ref(entry)))
        if self._pending.add(entry):
            self._want_worker()
            self._bell.wake()

    def _want_worker(self) -> None:
        if self._free_workers == 0 and len(self._workers) < self.config.max_in_flight:
            self._free_workers += 1  # it counts from now, so that no second one is started for it
            thread = threading.Thread(
                target=self._work, name=f"batchmill-{self.name}-{len(self._workers)}", daemon=True
            )
            self._workers.append(thread)
            thread.start()

    def _offer(self, entry: Entry) -> None:
        manager = self.thresholds
        while True:
            if self.closing or manager is None:
                self._settle([(entry, _failure(entry, BatcherClosedError()), "rejected")])
                return
            depth = len(self._pending)
            decision, level = manager.decide(entry.item, depth, entry.attempt)
            if decision.action is QueueAction.ACCEPT:
                with self._lock:
                    depth = len(self._pending)
                    if not self.closing and manager.allows(level, depth):
                        self._accept(entry)
                        return
                if depth >= manager.config.hard_capacity:
                    error: BaseException = manager.full_error(depth)
                    self._settle([(entry, _failure(entry, error), "rejected")])
                    return
                continue  # the level rose meanwhile, or the batcher closed: decide again
            if decision.action is QueueAction.RETRY:
                if self._park(entry, decision.delay_ms or 0.0):
                    return
                error = manager.full_error(depth, "no room to wait for another try")
                self._settle([(entry, _failure(entry, error), "rejected")])
            elif decision.action is QueueAction.DROP:
                result = ItemResult(entry.item, Outcome.DROPPED, level=level)
                self._settle([(entry, result, "dropped")])
            else:
                error = decision.reason or manager.full_error(depth)
                self._settle([(entry, _failure(entry, error), "rejected")])
            return

    def _park(self, entry: Entry, delay_ms: float) -> bool:
        """Let an entry wait for another try; False when too many do, or none is left in time."""
        assert self.thresholds is not None
        again_at = self.clock.now() + delay_ms / 1000
        if entry.deadline is not None and again_at > entry.deadline:
            again_at = entry.deadline
        with self._lock:
            if self.closing or len(self._parked) >= self.thresholds.config.hard_capacity:
                return False
            self._parked.add(entry)
        self._timer.at(again_at, lambda: self._unpark(entry))
        return True

    def _unpark(self, entry: Entry) -> None:
        with self._lock:
            if entry not in self._parked:
                return
            self._parked.discard(entry)
        now = self.clock.now()
        if entry.deadline is not None and now >= entry.deadline:
            self._settle([(entry, _late(entry, now), "expired")])
            return
        entry.attempt += 1
        self._offer(entry)

    def _expire(self, reference: weakref.ref[Entry]) -> None:
        entry = reference()
        with self._lock:
            if entry is None or not self._pending.remove(entry):
                return
        self._settle([(entry, _late(entry, self.clock.now()), "expired")])

    def _work(self) -> None:
        _worker.engine = self
        while True:
            taken = self._next_batch()
            if taken is None:
                return
            batch_id, batch = taken
            try:
                self._send(batch_id, batch)
            except BaseException as error:  # a fault of ours must cost neither items nor a worker
                log.exception("batchmill batcher %s: a worker failed", self.name)
                failed = [(entry, _failure(entry, error), "failed") for entry in batch]
                self._settle(failed, batch_id, ok=False)
            del taken, batch

    def _next_batch(self) -> tuple[int, list[Entry]] | None:
        with self._turn:
            while True:
                if self.abandoned and not self.closing:
                    self.begin_close()
                with self._lock:
                    until = None
                    if len(self._in_flight) < self._limit.current:
                        reason = self._pending.ready(
                            self.clock.now(), self._flush_up_to, self.closing
                        )
                        if reason is not None:
                            return self._take(reason)
                        if self.closing:
                            self._free_workers -= 1
                            return None
                        until = self._pending.due_at()
                self.clock.wait(self._bell, until)

    def _take(self, reason: FlushReason) -> tuple[int, list[Entry]]:
        batch = self._pending.take()
        self._next_batch_id += 1
        self._in_flight[self._next_batch_id] = batch
        self._batches += 1
        self._flushes[reason] += 1
        self._free_workers -= 1
        if len(self._pending):
            self._want_worker()
        while self._room:
            self._room.popleft().wake()
        return self._next_batch_id, batch

    def _send(self, batch_id: int, batch: list[Entry]) -> None:
        if self.thresholds is not None:
            self.thresholds.observe(len(self._pending))
        answers: list[tuple[Entry, ItemResult[Any] | None, str]] = []
        live: list[Entry] = []
        now = self.clock.now()
        for entry in batch:
            if entry.deadline is not None and now >= entry.deadline:
                answers.append((entry, _late(entry, now), "expired"))
            elif entry.start() or self._has_heir(entry):
                live.append(entry)
            else:
                answers.append((entry, None, "cancelled"))
        ok = True
        if live:
            results = self.caller.deliver([entry.item for entry in live])
            for entry, value in zip(live, results, strict=True):
                if isinstance(value, BaseException):
                    ok = False
                    answers.append((entry, _failure(entry, value), "failed"))
                else:
                    result = ItemResult(entry.item, Outcome.SUCCESS, value)
                    answers.append((entry, result, "succeeded"))
        self._settle(answers, batch_id, self.clock.now() - now, ok)

    def _has_heir(self, entry: Entry) -> bool:
        """Whether somebody else waits for the answer of an entry whose owner cancelled it."""
        with self._lock:
            return entry.key is not None and bool(self._followers.get(entry.key))

    def _settle(
        self,
        answers: Sequence[tuple[Entry, ItemResult[Any] | None, str]],
        batch_id: int | None = None,
        took_s: float = 0.0,
        ok: bool = True,
    ) -> None:
        """Count and answer entries, and those that joined them; a None result tells nobody."""
        with self._lock:
            told: list[tuple[Entry, ItemResult[Any] | None, str]] = list(answers)
            for entry, result, kind in answers:
                if entry.key is not None:
                    for follower in self._followers.pop(entry.key, ()):
                        told.append((follower, _for(follower, result), kind))
            for _, _, kind in told:
                self._counts[kind] += 1
            if batch_id is not None:
                self._limit.record(took_s, ok, len(self._in_flight))
                del self._in_flight[batch_id]
                self._free_workers += 1
                self._bell.wake()
            self._wake_flushers()
        for entry, result, _ in told:
            if result is not None:
                entry.resolve(result)

    def _wake_flushers(self) -> None:
        if not self._flushers:
            return
        oldest = self._oldest_open()
        for seq, waiter in self._flushers:
            if oldest is None or oldest > seq:
                waiter.wake()

    def _oldest_open(self) -> int | None:
        firsts = [batch[0].seq for batch in self._in_flight.values()]
        if self._pending.first_seq is not None:
            firsts.append(self._pending.first_seq)
        return min(firsts, default=None)

    def flush(self, until: float | None) -> bool:
        """Send what waits without lingering; True when all accepted so far has been answered."""
        waiter = ThreadWaiter()
        with self._lock:
            seq = self._pending.last_seq
            self._flush_up_to = max(self._flush_up_to, seq)
            self._flushers.append((seq, waiter))
            self._bell.wake()
        try:
            return self._await_open(seq, waiter, until)
        finally:
            with self._lock:
                self._flushers.remove((seq, waiter))

    def _await_open(self, seq: int, waiter: ThreadWaiter, until: float | None) -> bool:
        while True:
            with self._lock:
                oldest = self._oldest_open()
                if oldest is None or oldest > seq:
                    return True
            if not self.clock.wait(waiter, until):
                with self._lock:
                    oldest = self._oldest_open()
                    return oldest is None or oldest > seq

    def begin_close(self) -> None:
        """Take no more; send what waits, and give up on what was parked."""
        with self._lock:
            if not self.closing:
                self.closing = True
                self._close_until = self.clock.now() + self.config.close_timeout_s
            parked = list(self._parked)
            self._parked.clear()
            if len(self._pending):
                self._want_worker()
            self._bell.wake()
            while self._room:
                self._room.popleft().wake()
        error = BatcherClosedError("it was waiting for another try")
        self._settle([(entry, _failure(entry, error), "rejected") for entry in parked])

    def finish_close(self, until: float | None) -> bool:
        """Wait for the rest; what is not with the backend by ``until`` is rejected."""
        in_time = self.flush(until)
        self._timer.cancel_all()
        if not in_time:
            with self._lock:
                rest = self._pending.take_all()
            error = BatcherClosedError("it was not sent before close() ran out of time")
            self._settle([(entry, _failure(entry, error), "rejected") for entry in rest])
        self._bell.wake()
        if in_time:
            for thread in self._workers:
                if thread is not threading.current_thread():
                    thread.join()
            self.caller.close()
        if self.thresholds is not None:
            self.thresholds.close()
        return in_time

    def await_close(self) -> None:
        """Wait for the rest as long as the settings allow: at interpreter exit."""
        self.finish_close(self._close_until)

    def abandon(self) -> None:
        """Nobody has the batcher any more: have its workers close it.

        Called by a finaliser, which may run at any point, so it takes no lock.
        """
        self.abandoned = True
        self._bell.wake()

    def stats(self) -> BatcherStats:
        thresholds = self.thresholds.stats() if self.thresholds is not None else None
        with self._lock:
            return BatcherStats(
                **self._counts,
                queue_depth=len(self._pending),
                in_flight=sum(len(batch) for batch in self._in_flight.values()),
                parked=len(self._parked),
                joined=sum(len(followers) for followers in self._followers.values()),
                batches=self._batches,
                backend_calls=self.caller.calls,
                flushes=dict(self._flushes),
                retries=self.caller.retries,
                in_flight_limit=self._limit.current,
                breaker_opened=self.caller.breaker_opened,
                thresholds=thresholds,
            )

    def after_fork_in_child(self) -> None:
        closed = self.closing
        self._timer.reset()
        self.caller.reset()
        self.reset()
        self.closing = closed


def _failure(entry: Entry, error: BaseException) -> ItemResult[Any]:
    return ItemResult(entry.item, Outcome.FAILURE, error=error)


def _late(entry: Entry, now: float) -> ItemResult[Any]:
    return _failure(entry, DeadlineExceededError(now - entry.since))


def _for(entry: Entry, result: ItemResult[Any] | None) -> ItemResult[Any] | None:
    """Another entry's result as this one's."""
    if result is None:
        return None
    return ItemResult(entry.item, result.outcome, result.value, result.error, result.level)
