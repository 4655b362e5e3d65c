"""What happens to an entry at or past a threshold: accepted, refused, dropped, or offered again.

Guarantees
    * Threshold handlers run outside the lock. Their decision is carried out under the lock that
      guards the depth, after looking again; if the level rose meanwhile, they decide again.
    * Entries that wait for another try are bounded by the hard capacity and wait on one timer;
      closing answers them all.
    * Whatever a handler raises, the entry is answered.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence

from batchmill.batcher.entries import Entry
from batchmill.batcher.pending import Duplicates, Pending
from batchmill.batcher.result import BatcherClosedError
from batchmill.batcher.threads import Clock, Timer
from batchmill.pressure import QueueAction, QueueDecision, QueueThresholdManager
from batchmill.waiters import ThreadWaiter, Waiter


class Intake:
    """Decides about entries at or past the first threshold."""

    def __init__(
        self,
        manager: QueueThresholdManager | None,
        clock: Clock,
        timer: Timer,
        lock: threading.Lock,
        pending: Pending,
        duplicates: Duplicates,
        accept: Callable[[Entry], None],
        settle: Callable[[Sequence[Entry]], None],
    ) -> None:
        self._manager = manager
        self._clock = clock
        self._timer = timer
        self._lock = lock
        self._pending = pending
        self._duplicates = duplicates
        self._accept = accept
        self._settle = settle
        self._closed = False
        self._room_waiters: deque[Waiter] = deque()
        self.deciding: set[Entry] = set()
        """Entries being decided about, or whose submitter waits for room."""
        self.parked: set[Entry] = set()
        """Entries that wait for another try."""
        self._full_at = manager.config.critical_threshold if manager is not None else 1 << 62
        self._most_parked = manager.config.hard_capacity if manager is not None else 0

    def offer(self, entry: Entry, patient: bool = False) -> bool:
        """Do what the thresholds say; False when there is no room and a patient entry may wait.

        The entry is among ``deciding``, and stays there only if the result is False.
        """
        try:
            return self._offer(entry, patient)
        except BaseException as error:  # a handler raised even SystemExit: answer the item first
            self._settle([entry.fail("rejected", error)])
            raise

    def _offer(self, entry: Entry, patient: bool) -> bool:
        manager = self._manager
        while True:
            if self._closed or manager is None:
                self._settle([entry.fail("rejected", BatcherClosedError())])
                return True
            depth = len(self._pending)
            if patient and depth >= self._full_at:
                return False
            decision, level = manager.decide(entry.item, depth, entry.attempt)
            if decision.action is QueueAction.ACCEPT:
                with self._lock:
                    if not self._closed and manager.allows(level, len(self._pending)):
                        self.deciding.discard(entry)
                        entry.accepted_at = self._clock.now()
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
            if decision.action is QueueAction.DROP:
                self._settle([entry.drop(level)])
            else:
                assert decision.reason is not None  # the manager sees to it
                self._settle([entry.fail("rejected", decision.reason)])
            return True

    def _park(self, entry: Entry, delay_ms: float) -> bool:
        """Let an entry wait for another try; False when too many do."""
        again_at = self._clock.now() + delay_ms / 1000
        if entry.deadline is not None and again_at > entry.deadline:
            again_at = entry.deadline
        with self._lock:
            if self._closed or len(self.parked) >= self._most_parked:
                return False
            self.deciding.discard(entry)
            self.parked.add(entry)
            # Under the lock: close() cancels the timer only after it has taken the parked entries.
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
            self._replace(entry.expire(now))
        else:
            entry.attempt += 1
            self.offer(entry)

    def withdraw(self, entry: Entry) -> None:
        """Its submitter does not want it any more; a follower is decided about instead."""
        if entry in self.deciding:
            entry.start()
            self._replace(entry.cancel())

    def _replace(self, ended: Entry) -> None:
        """Answer an entry that was being decided about, and decide about its follower instead."""
        with self._lock:
            follower = self._duplicates.promote(ended)
            if follower is not None:
                self.deciding.add(follower)
        self._settle([ended])
        if follower is not None:
            self.offer(follower)

    def wait_for_room(self, until: float | None) -> bool:
        """Wait while the depth is at or past the critical threshold; False after ``until``."""
        waiter = ThreadWaiter()
        try:
            while self.full_for(waiter):
                if not self._clock.wait(waiter, until):
                    return False
            return True
        finally:
            self.stop_waking(waiter)

    def full_for(self, waiter: Waiter) -> bool:
        """Whether there is no room; ``waiter`` is then woken when there may be some."""
        with self._lock:
            if self._closed or len(self._pending) < self._full_at:
                return False
            self._room_waiters.append(waiter)
            return True

    def stop_waking(self, waiter: Waiter) -> None:
        """Undo what :meth:`full_for` did."""
        with self._lock:
            if waiter in self._room_waiters:
                self._room_waiters.remove(waiter)

    def notify_room(self) -> None:
        """Wake all that wait for room; the lock is held."""
        while self._room_waiters:
            self._room_waiters.popleft().wake()

    def close(self) -> list[Entry]:
        """Accept no more; the entries that were parked, to be answered. The lock is held."""
        self._closed = True
        self.notify_room()
        parked = list(self.parked)
        self.parked.clear()
        return parked
