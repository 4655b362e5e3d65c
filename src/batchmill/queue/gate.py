"""Thresholds in front of a queue: who is asked, and when.

The queue knows nothing of levels and strategies; it asks a :class:`Guard`, which
``batchmill.pressure.QueueThresholdSettings`` provides.

Guarantees
    * The guard, and the user's handlers behind it, are asked outside the lock.
    * What was decided holds for the put: under the lock the depth is looked at once more, and the
      item goes in before the next one is looked at. So no limit is passed, however many produce.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any, Final, Protocol

from batchmill.queue.partition import Lane
from batchmill.waiters import TaskWaiter, ThreadWaiter, Waiter

REFUSED: Final = -2


class Verdict(Protocol):
    """What a guard says of an item."""

    @property
    def accepted(self) -> bool:
        """Whether it may go in."""
        ...

    @property
    def retry_after_s(self) -> float | None:
        """If not: after how long to ask again, or None for never."""
        ...

    @property
    def reason(self) -> str:
        """If never: what to count it as."""
        ...


class Guard(Protocol):
    """Decides about items by the depth they meet."""

    @property
    def free_below(self) -> int:
        """Depths below this one need no decision."""
        ...

    def judge(self, item: Any, depth: int, attempt: int) -> Verdict:
        """What to do with ``item``, which is here for the ``attempt``-th time."""
        ...

    def holds(self, verdict: Any, depth: int) -> bool:
        """Whether an acceptance still stands at ``depth``."""
        ...

    def observe(self, depth: int) -> None:
        """Take note of a depth."""
        ...

    def close(self) -> None:
        """The queue has drained."""
        ...


class GuardFactory(Protocol):
    """What ``BatchQueueSettings.thresholds`` takes."""

    def guard(self, name: str) -> Guard:
        """A guard for one queue."""
        ...


class Gate:
    """Applies a guard to the items of one queue, and counts those it turns away."""

    def __init__(self, guard: Guard, depth: Callable[[], int]) -> None:
        self.guard = guard
        self._depth = depth
        self.reset()

    def reset(self) -> None:
        """A new gate, or one in a forked child."""
        self._lock = threading.Lock()
        self._waiters: set[Waiter] = set()
        self.turned_away: dict[str, int] = {}
        self.closed = False

    def close(self) -> None:
        """Send those away who wait for another try."""
        with self._lock:
            self.closed = True
            waiters = list(self._waiters)
        for waiter in waiters:
            waiter.wake()

    def count(self, reason: str, count: int = 1) -> None:
        """Count items that were turned away."""
        with self._lock:
            self.turned_away[reason] = self.turned_away.get(reason, 0) + count

    def put_if(self, lane: Lane, item: Any, verdict: Verdict | None) -> int | None:
        """Put the item if the depth is low enough, or ``verdict`` still holds; else None.

        The answer is that of :meth:`Partition.admit`: 1 put, 0 no room there, CLOSED.
        """
        with self._lock:
            depth = self._depth()
            free = depth < self.guard.free_below
            if not free and (verdict is None or not self.guard.holds(verdict, depth)):
                return None
            return lane.partition.admit(lane, [item])

    def judge(self, item: Any, attempt: int) -> Verdict:
        """What the guard says of the item at the depth of this moment."""
        return self.guard.judge(item, self._depth(), attempt)

    def wait_for_retry(self, waiter: Waiter) -> bool:
        """Note somebody who waits for another try; False when the queue is closing."""
        with self._lock:
            if not self.closed:
                self._waiters.add(waiter)
            return not self.closed

    def stop_waiting(self, waiter: Waiter) -> None:
        """The wait is over."""
        with self._lock:
            self._waiters.discard(waiter)


class Attempt:
    """One item at the gate: asked about until it is in, or turned away."""

    def __init__(self, gate: Gate, lane: Lane, item: Any, timeout_s: float | None) -> None:
        self._gate = gate
        self._lane = lane
        self._item = item
        self._deadline = None if timeout_s is None else time.monotonic() + timeout_s
        self._number = 1
        self.answer = 0
        """1: it is in. 0: it may go in, but its partition is full. CLOSED. REFUSED."""

    def step(self) -> float | None:
        """Ask once; seconds to wait before the next step, or None when there is an answer."""
        verdict: Verdict | None = None
        while True:
            put = self._gate.put_if(self._lane, self._item, verdict)
            if put is not None:
                self.answer = put
                return None
            verdict = self._gate.judge(self._item, self._number)
            if verdict.accepted:
                continue
            wait_s = verdict.retry_after_s
            if wait_s is None or self._is_late(wait_s):
                self.refuse(verdict.reason)
                return None
            self._number += 1
            return wait_s

    def _is_late(self, wait_s: float) -> bool:
        return self._deadline is not None and time.monotonic() + wait_s > self._deadline

    def refuse(self, reason: str) -> None:
        """Turn the item away."""
        self._gate.count(reason)
        self.answer = REFUSED


def pass_gate(gate: Gate, lane: Lane, item: Any, timeout_s: float | None) -> int:
    """Take an item through the gate, waiting where the guard says to try again."""
    attempt = Attempt(gate, lane, item, timeout_s)
    waiter = ThreadWaiter()
    while (wait_s := attempt.step()) is not None:
        try:
            if not gate.wait_for_retry(waiter) or waiter.wait(wait_s):
                attempt.refuse("rejected")
                break
        finally:
            gate.stop_waiting(waiter)
    return attempt.answer


async def apass_gate(gate: Gate, lane: Lane, item: Any, timeout_s: float | None) -> int:
    """Like :func:`pass_gate`, but it is the task that waits, not the thread."""
    attempt = Attempt(gate, lane, item, timeout_s)
    waiter = TaskWaiter()
    while (wait_s := attempt.step()) is not None:
        try:
            if not gate.wait_for_retry(waiter) or await waiter.wait(wait_s):
                attempt.refuse("rejected")
                break
        finally:
            gate.stop_waiting(waiter)
    return attempt.answer
