"""The slow road into a partition: when it is full, closed, asleep, or new to the class.

What happens at each step is decided once, in :class:`Admission`; a thread and an asyncio task only
differ in how they wait between steps.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from batchmill.errors import ConfigError, WouldDeadlockError
from batchmill.queue import knots
from batchmill.queue.config import BufferStrategy
from batchmill.queue.partition import CLOSED, Lane, Route
from batchmill.waiters import TaskWaiter, ThreadWaiter, Waiter

if TYPE_CHECKING:
    from batchmill.queue.core import QueueCore

_GRACE_S = 0.001
"""How long IF_POSSIBLE waits for a drain thread that may just not have had its turn."""


class Admission:
    """One attempt to put ``items`` on ``lane``, in order, none skipped."""

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
        """Put what there is room for; True when ``waiter`` should wait and step again."""
        partition = self._lane.partition
        willing: Waiter | None = None
        while True:
            count = partition.admit(self._lane, self._items, willing)
            if count == CLOSED:
                partition.count_stopped(len(self._items))
                return False
            if count == 0:
                if willing is not None:
                    return True
                if not self._has_patience():
                    partition.count_refused(len(self._items))
                    return False
                willing = waiter  # and look once more: there may be room by now
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

    def _has_patience(self) -> bool:
        """Whether to wait for room, now that there is none."""
        if self._deadline is not None:  # it has waited before
            return time.monotonic() < self._deadline
        timeout_s = self._timeout_s
        if timeout_s is None:
            if self._core.config.strategy is BufferStrategy.BLOCKING:
                return self._may_wait_for_ever()
            partition = self._lane.partition
            # Refused once since it last moved, it is stuck or overrun: do not wait again.
            timeout_s = 0.0 if partition.stalled_at == partition.drained else _GRACE_S
        if knots.is_knot(self._lane.partition):
            timeout_s = 0.0
        self._deadline = time.monotonic() + timeout_s
        return timeout_s > 0

    def _may_wait_for_ever(self) -> bool:
        if not knots.is_knot(self._lane.partition):
            return True
        if self.accepted:
            return False
        raise WouldDeadlockError(self._core.name, "produce() on a full partition")


def quick(core: QueueCore, routes: Mapping[type, Route], item: object) -> bool:
    """Put an item by the road that takes no lock; False when it is closed at the moment.

    ``BatchQueue.produce`` has the same lines once more: a call would cost it half as much again.
    """
    try:
        take_slot, put_item = routes[type(item)]
        token = take_slot()
    except (KeyError, IndexError):  # a class not seen before, or no slot at hand
        return False
    except BaseException:
        core.interrupted()
        raise
    try:
        put_item(item)
        if token is not None:
            token.ring()
    except BaseException:
        core.interrupted()
        raise
    return True


def put(core: QueueCore, lane: Lane, items: list[Any], timeout_s: float | None) -> int:
    """Put ``items``, waiting as the strategy says; how many were accepted."""
    admission = Admission(core, lane, items, timeout_s)
    waiter = ThreadWaiter()
    try:
        while admission.step(waiter):
            woken = False
            if knots.begin_wait(lane.partition):
                try:
                    woken = waiter.wait(admission.remaining_s())
                finally:
                    knots.end_wait()
            if not woken:
                lane.partition.leave(waiter)
    except WouldDeadlockError:
        raise
    except BaseException:
        lane.partition.leave(waiter)
        core.interrupted()
        raise
    return admission.accepted


async def aput(core: QueueCore, lane: Lane, items: list[Any], timeout_s: float | None) -> int:
    """Like :func:`put`, but it is the task that waits, not the thread."""
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
    return admission.accepted


def count_unoffered(lane: Lane, count: int) -> None:
    """Count items that came after one that was not accepted and so were never tried."""
    if lane.partition.closed:
        lane.partition.count_stopped(count)
    else:
        lane.partition.count_refused(count)
