"""The slow path into a partition: when it is full, closed, asleep or new, or has thresholds.

Each step is decided in one place, :class:`Admission` for room and :class:`GateAttempt` for
thresholds; a thread and an asyncio task differ only in how they wait between steps.

Guarantees
    * The guard, and the user's threshold handlers behind it, are called outside the gate's lock.
    * A guard's decision holds for the put: under the lock the depth is checked once more, and the
      item is put before the next one is checked. So no limit is exceeded by many producers.
"""

from __future__ import annotations

import asyncio
import math
import threading
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from batchmill.errors import ConfigError, WouldDeadlockError
from batchmill.queue import deadlock
from batchmill.queue.partition import CLOSED, Lane, Route
from batchmill.queue.settings import BufferStrategy, Guard, Verdict
from batchmill.queue.task import current_task
from batchmill.waiters import TaskWaiter, ThreadWaiter, Waiter

if TYPE_CHECKING:
    from batchmill.queue.core import QueueCore

_GRACE_S = 0.001
"""How long IF_POSSIBLE waits for a drain thread that may just not have been scheduled."""


def put_fast(core: QueueCore, routes: Mapping[type, Route], item: object) -> bool:
    """Put an item without a lock; False when that is not possible now.

    ``BatchQueue.produce`` repeats these lines: a call would cost it half as much again.
    """
    try:
        take_slot, put_item = routes[type(item)]
        token = take_slot()
    except (KeyError, IndexError):  # a class not seen before, or no free slot among the tokens
        return False
    except BaseException:
        core.interrupted()
        raise
    try:
        put_item(item)
        if token is not None:
            token.wake_owner()
    except BaseException:
        core.interrupted()
        raise
    return True


def put(core: QueueCore, lane: Lane, items: list[Any], timeout_s: float | None) -> int:
    """Put ``items``, waiting as the strategy says; how many were accepted.

    With thresholds, ``items`` is a single item.
    """
    if core.gate is not None:
        attempt = _pass_gate(core.gate, lane, items[0], timeout_s)
        if attempt.accepted or attempt.refused:
            return _noted(core, 1, int(attempt.accepted))
    admission = Admission(core, lane, items, timeout_s)
    waiter = ThreadWaiter()
    try:
        while admission.step(waiter):
            woken = False
            if deadlock.begin_wait(lane.partition):
                try:
                    woken = waiter.wait(admission.remaining_s())
                finally:
                    deadlock.end_wait()
            if not woken:
                lane.partition.leave(waiter)
    except WouldDeadlockError:
        raise
    except BaseException:
        lane.partition.leave(waiter)
        core.interrupted()
        raise
    return _noted(core, len(items), admission.accepted)


async def aput(core: QueueCore, lane: Lane, items: list[Any], timeout_s: float | None) -> int:
    """Like :func:`put`, but the asyncio task waits, not the thread."""
    if core.gate is not None:
        attempt = await _apass_gate(core.gate, lane, items[0], timeout_s)
        if attempt.accepted or attempt.refused:
            return _noted(core, 1, int(attempt.accepted))
    admission = Admission(core, lane, items, timeout_s)
    waiter = TaskWaiter()
    try:
        while admission.step(waiter):
            if not await waiter.wait(admission.remaining_s()):
                lane.partition.leave(waiter)
    except asyncio.CancelledError:
        lane.partition.leave(waiter)
        raise
    except WouldDeadlockError:
        raise
    except BaseException:
        lane.partition.leave(waiter)
        core.interrupted()
        raise
    return _noted(core, len(items), admission.accepted)


def _noted(core: QueueCore, offered: int, accepted: int) -> int:
    """``accepted``; items that a handler of another queue passed on in vain are counted there."""
    if accepted < offered:
        task = current_task()
        if task is not None:
            task.core.count_refused_hand_over(core, offered - accepted)
    return accepted


def count_untried(core: QueueCore, lane: Lane, count: int) -> None:
    """Count the items that came after one that was not accepted, and so were not tried."""
    _noted(core, count, 0)
    if core.gate is not None:
        core.gate.count_dropped("rejected", count)
    elif lane.partition.closed:
        lane.partition.count_stopped(count)
    else:
        lane.partition.count_refused(count)


class Admission:
    """An attempt to put ``items`` on ``lane``, in order, none skipped."""

    __slots__ = ("_core", "_deadline", "_items", "_lane", "_timeout_s", "accepted")

    def __init__(
        self, core: QueueCore, lane: Lane, items: list[Any], timeout_s: float | None
    ) -> None:
        if timeout_s is not None and not isinstance(timeout_s, (int, float)):
            raise ConfigError("timeout", timeout_s, "a number of seconds, or None")
        self._core = core
        self._lane = lane
        self._items = items
        self._timeout_s = timeout_s
        self._deadline: float | None = None
        self.accepted = 0

    def step(self, waiter: Waiter) -> bool:
        """Put the items that fit; True when ``waiter`` should wait and step again."""
        partition = self._lane.partition
        registered: Waiter | None = None
        while True:
            count = partition.admit(self._lane, self._items, registered)
            if count == CLOSED:
                partition.count_stopped(len(self._items))
                return False
            if count == 0:
                if registered is not None:
                    return True
                if not self._should_wait():
                    partition.count_refused(len(self._items))
                    return False
                registered = waiter  # and try once more: there may be room by now
                continue
            self.accepted += count
            if count == len(self._items):
                return False
            self._items = self._items[count:]

    def remaining_s(self) -> float | None:
        """How long to wait at most; None is for ever."""
        if self._deadline is None:
            return None
        return max(0.0, self._deadline - time.monotonic())

    def _should_wait(self) -> bool:
        """Whether to wait for room, now that there is none."""
        if self._deadline is not None:  # it has waited before
            return time.monotonic() < self._deadline
        timeout_s = self._timeout_s
        if timeout_s is None:
            if self._core.settings.strategy is BufferStrategy.BLOCKING:
                return self._may_wait_for_ever()
            partition = self._lane.partition
            # Refused once since it last drained, it is stuck or overloaded: do not wait again.
            timeout_s = 0.0 if partition.stalled_at == partition.drained else _GRACE_S
        if deadlock.would_deadlock(self._lane.partition):
            timeout_s = 0.0
        self._deadline = time.monotonic() + timeout_s
        return timeout_s > 0

    def _may_wait_for_ever(self) -> bool:
        if not deadlock.would_deadlock(self._lane.partition):
            return True
        if self.accepted:
            return False
        raise WouldDeadlockError(self._core.name, "produce() on a full partition")


class Gate:
    """Applies a guard (thresholds) to the items of one queue, and counts the drops."""

    def __init__(self, guard: Guard, depth: Callable[[], int]) -> None:
        self.guard = guard
        self.depth = depth
        self.reset()

    def reset(self) -> None:
        """A new gate, or one in a forked child."""
        self._lock = threading.Lock()
        self._waiters: set[Waiter] = set()
        self.dropped: dict[str, int] = {}
        self.closed = False

    def close(self) -> None:
        """Wake the producers that wait for a retry: their items are refused."""
        with self._lock:
            self.closed = True
            waiters = list(self._waiters)
        for waiter in waiters:
            waiter.wake()

    def count_dropped(self, reason: str, count: int = 1) -> None:
        with self._lock:
            self.dropped[reason] = self.dropped.get(reason, 0) + count

    def put_if(self, lane: Lane, item: Any, verdict: Verdict | None) -> int | None:
        """Put the item if the depth is low enough, or ``verdict`` still holds; else None.

        The result is that of :meth:`Partition.admit`: 1 put, 0 no room there, CLOSED.
        """
        with self._lock:
            depth = self.depth()
            free = depth < self.guard.free_below
            if not free and (verdict is None or not self.guard.holds(verdict, depth)):
                return None
            return lane.partition.admit(lane, [item])

    def begin_retry_wait(self, waiter: Waiter) -> bool:
        """Register a producer that waits for a retry; False when the queue is closing."""
        with self._lock:
            if not self.closed:
                self._waiters.add(waiter)
            return not self.closed

    def end_retry_wait(self, waiter: Waiter) -> None:
        with self._lock:
            self._waiters.discard(waiter)


class GateAttempt:
    """One item at the gate: judged until it is put or refused.

    Neither ``accepted`` nor ``refused``: the guard accepts it, but its partition is full or closed.
    """

    def __init__(self, gate: Gate, lane: Lane, item: Any, timeout_s: float | None) -> None:
        self._gate = gate
        self._lane = lane
        self._item = item
        self._deadline = math.inf if timeout_s is None else time.monotonic() + timeout_s
        self._number = 1
        self.accepted = False
        self.refused = False

    def step(self) -> float | None:
        """Judge once; seconds to wait before the next step, or None when it is decided."""
        gate = self._gate
        verdict: Verdict | None = None
        while True:
            count = gate.put_if(self._lane, self._item, verdict)
            if count is not None:
                self.accepted = count == 1
                return None
            verdict = gate.guard.judge(self._item, gate.depth(), self._number)
            if verdict.accepted:
                continue
            wait_s = verdict.retry_after_s
            if wait_s is None or time.monotonic() + wait_s > self._deadline:
                self.refuse(verdict.reason)
                return None
            self._number += 1
            return wait_s

    def refuse(self, reason: str) -> None:
        """Drop the item and count it under ``reason``."""
        self._gate.count_dropped(reason)
        self.refused = True


def _pass_gate(gate: Gate, lane: Lane, item: Any, timeout_s: float | None) -> GateAttempt:
    """Try to put an item, waiting where the guard says to retry."""
    attempt = GateAttempt(gate, lane, item, timeout_s)
    waiter = ThreadWaiter()
    while (wait_s := attempt.step()) is not None:
        try:
            if not gate.begin_retry_wait(waiter) or waiter.wait(wait_s):
                attempt.refuse("rejected")
                break
        finally:
            gate.end_retry_wait(waiter)
    return attempt


async def _apass_gate(gate: Gate, lane: Lane, item: Any, timeout_s: float | None) -> GateAttempt:
    """Like :func:`_pass_gate`, but the asyncio task waits, not the thread."""
    attempt = GateAttempt(gate, lane, item, timeout_s)
    waiter = TaskWaiter()
    while (wait_s := attempt.step()) is not None:
        try:
            if not gate.begin_retry_wait(waiter) or await waiter.wait(wait_s):
                attempt.refuse("rejected")
                break
        finally:
            gate.end_retry_wait(waiter)
    return attempt
