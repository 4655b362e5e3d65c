"""What happens to an entry that meets a threshold: accepted, refused, dropped, or offered again.

Guarantees
    * Threshold handlers run outside the lock. What they decide is acted on under the lock that
      guards the depth, after looking again; where the level rose meanwhile, they decide anew.
    * Entries that wait for another try are bounded by the hard capacity and wait on one timer;
      closing answers them all.
    * Whatever a handler raises, the entry is answered.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

from batchmill.batcher.clock import Clock
from batchmill.batcher.pending import Entry, Pending
from batchmill.batcher.result import (
    BatcherClosedError,
    DeadlineExceededError,
    ItemResult,
    Outcome,
)
from batchmill.batcher.timer import Timer
from batchmill.batcher.twins import Twins
from batchmill.pressure import QueueAction, QueueDecision, QueueThresholdManager, ThresholdLevel
from batchmill.waiters import ThreadWaiter, Waiter

Answer: TypeAlias = tuple[Entry, ItemResult[Any] | None, str]
"""An entry, what it is told (None: it does not listen any more), and the counter it ends in."""


class Intake:
    """Decides about entries at or past the first threshold."""

    def __init__(
        self,
        manager: QueueThresholdManager | None,
        clock: Clock,
        timer: Timer,
        lock: threading.Lock,
        pending: Pending,
        twins: Twins,
        accept: Callable[[Entry], None],
        settle: Callable[[Sequence[Answer]], None],
    ) -> None:
        self._manager = manager
        self._clock = clock
        self._timer = timer
        self._lock = lock
        self._pending = pending
        self._twins = twins
        self._accept = accept
        self._settle = settle
        self._closed = False
        self._room: deque[Waiter] = deque()
        self.deciding: set[Entry] = set()
        """Entries being decided about, or whose submitter waits for room."""
        self.parked: set[Entry] = set()
        """Entries that wait for another try."""
        self._full_at = manager.config.critical_threshold if manager is not None else 1 << 62
        self._bound = manager.config.hard_capacity if manager is not None else 0

    def offer(self, entry: Entry, patient: bool = False) -> bool:
        """Do what the thresholds say; False when there is no room and a patient entry may wait.

        The entry is among ``deciding``, and stays there only if the answer is False.
        """
        try:
            return self._offer(entry, patient)
        except BaseException as error:  # a handler's way out of the process is not the item's end
            self._settle([(entry, failure(entry, error), "rejected")])
            raise

    def _offer(self, entry: Entry, patient: bool) -> bool:
        manager = self._manager
        while True:
            if self._closed or manager is None:
                self._settle([(entry, failure(entry, BatcherClosedError()), "rejected")])
                return True
            depth = len(self._pending)
            if patient and depth >= self._full_at:
                return False
            decision, level = manager.decide(entry.item, depth, entry.attempt)
            if decision.action is QueueAction.ACCEPT:
                with self._lock:
                    if not self._closed and manager.allows(level, len(self._pending)):
                        self.deciding.discard(entry)
                        entry.since = self._clock.now()
                        self._accept(entry)
                        return True
                continue  # the level rose meanwhile, or the batcher closed: decide again
            if decision.action is QueueAction.RETRY:
                if self._park(entry, decision.delay_ms or 0.0):
                    return True
                if self._closed:
                    continue
                error = manager.full_error(depth, "no room to wait for another try")
                decision = QueueDecision.reject(error)
            self._settle([_refusal(entry, decision, level)])
            return True

    def _park(self, entry: Entry, delay_ms: float) -> bool:
        """Let an entry wait for another try; False when too many do."""
        again_at = self._clock.now() + delay_ms / 1000
        if entry.deadline is not None and again_at > entry.deadline:
            again_at = entry.deadline
        with self._lock:
            if self._closed or len(self.parked) >= self._bound:
                return False
            self.deciding.discard(entry)
            self.parked.add(entry)
            # Under the lock: close() forgets what is timed only after it has taken the parked.
            self._timer.at(again_at, lambda: self._unpark(entry))
            return True

    def _unpark(self, entry: Entry) -> None:
        now = self._clock.now()
        with self._lock:
            if entry not in self.parked:
                return
            self.parked.discard(entry)
            self.deciding.add(entry)
        if entry.is_cancelled():
            self.withdraw(entry)
        elif entry.deadline is not None and now >= entry.deadline:
            self._pass_on(entry, (entry, late(entry, now), "expired"))
        else:
            entry.attempt += 1
            self.offer(entry)

    def withdraw(self, entry: Entry) -> None:
        """Its submitter does not want it any more; whoever joined it is decided about instead."""
        if entry in self.deciding:
            entry.start()
            self._pass_on(entry, (entry, None, "cancelled"))

    def _pass_on(self, entry: Entry, answer: Answer) -> None:
        with self._lock:
            heir = self._twins.heir(entry) if entry.key is not None else None
            if heir is not None:
                self.deciding.add(heir)
        self._settle([answer])
        if heir is not None:
            self.offer(heir)

    def wait_for_room(self, until: float | None) -> bool:
        """Wait while the depth is at or past the critical threshold; False after ``until``."""
        waiter = ThreadWaiter()
        try:
            while self.full_for(waiter):
                if not self._clock.wait(waiter, until):
                    return False
            return True
        finally:
            self.forget_room(waiter)

    def full_for(self, waiter: Waiter) -> bool:
        """Whether there is no room; ``waiter`` is then woken when there may be some."""
        with self._lock:
            if self._closed or len(self._pending) < self._full_at:
                return False
            self._room.append(waiter)
            return True

    def forget_room(self, waiter: Waiter) -> None:
        """Wake that one no more."""
        with self._lock:
            if waiter in self._room:
                self._room.remove(waiter)

    def make_room(self) -> None:
        """Wake all who wait for room; the lock is held."""
        while self._room:
            self._room.popleft().wake()

    def close(self) -> list[Entry]:
        """Take nothing more; the entries that were parked, for an answer. The lock is held."""
        self._closed = True
        self.make_room()
        parked = list(self.parked)
        self.parked.clear()
        return parked


def failure(entry: Entry, error: BaseException) -> ItemResult[Any]:
    """The result of an entry that ``error`` befell."""
    return ItemResult(entry.item, Outcome.FAILURE, error=error)


def late(entry: Entry, now: float) -> ItemResult[Any]:
    """The result of an entry whose deadline has passed."""
    return failure(entry, DeadlineExceededError(now - entry.born))


def _refusal(entry: Entry, decision: QueueDecision, level: ThresholdLevel | None) -> Answer:
    if decision.action is QueueAction.DROP:
        return entry, ItemResult(entry.item, Outcome.DROPPED, level=level), "dropped"
    assert decision.reason is not None  # the manager sees to it
    return entry, failure(entry, decision.reason), "rejected"
