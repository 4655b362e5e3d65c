"""The slow road into a partition: when it is full, closed, asleep, or new to the class.

What happens at each step is decided once, in :class:`Admission`; a thread and an asyncio task only
differ in how they wait between steps.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from batchmill._errors import WouldDeadlockError
from batchmill.queue._config import BufferStrategy
from batchmill.queue._partition import CLOSED, Lane
from batchmill.queue._task import current_task
from batchmill.queue._waiting import TaskWaiter, ThreadWaiter, Waiter

if TYPE_CHECKING:
    from batchmill.queue._core import QueueCore

_GRACE_S = 0.001
"""How long IF_POSSIBLE waits for a drain thread that may just not have had its turn."""


class Admission:
    """One attempt to put ``items`` on ``lane``, in order, none skipped."""

    __slots__ = ("_core", "_deadline", "_items", "_lane", "_timeout_s", "accepted")

    def __init__(
        self, core: QueueCore, lane: Lane, items: list[Any], timeout_s: float | None
    ) -> None:
        self._core = core
        self._lane = lane
        self._items = items
        self._timeout_s = timeout_s
        self._deadline: float | None = None
        self.accepted = 0

    def step(self, waiter: Waiter) -> bool:
        """Put what there is room for; True when ``waiter`` should wait and step again."""
        partition = self._lane.partition
        patient = self._has_patience()
        while True:
            count = partition.admit(self._lane, self._items, waiter if patient else None)
            if count == CLOSED:
                partition.count_stopped(len(self._items))
                return False
            if count == 0:
                if not patient:
                    partition.count_refused(len(self._items))
                return patient
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
        if self._deadline is not None:  # not the first step
            return time.monotonic() < self._deadline
        partition = self._lane.partition
        blocking = self._core.config.strategy is BufferStrategy.BLOCKING
        inside = current_task() is partition.owner
        timeout_s = self._timeout_s
        if timeout_s is None:
            if blocking:
                if inside and partition.out >= partition.capacity:
                    raise WouldDeadlockError(self._core.name, "produce() on a full partition")
                return True
            # Refused once since it last moved, it is stuck or overrun: do not wait again.
            timeout_s = 0.0 if partition.stalled_at == partition.drained else _GRACE_S
        if inside:
            timeout_s = 0.0  # nothing can be drained before this very call returns
        self._deadline = time.monotonic() + timeout_s
        return timeout_s > 0


def put(core: QueueCore, lane: Lane, items: list[Any], timeout_s: float | None) -> int:
    """Put ``items``, waiting as the strategy says; how many were accepted."""
    admission = Admission(core, lane, items, timeout_s)
    waiter = ThreadWaiter()
    try:
        while admission.step(waiter):
            woken = False
            try:
                woken = waiter.wait(admission.remaining_s())
            finally:
                if not woken:
                    lane.partition.leave(waiter)
    except WouldDeadlockError:
        raise
    except BaseException:
        core.interrupted()
        raise
    return admission.accepted


async def aput(core: QueueCore, lane: Lane, items: list[Any], timeout_s: float | None) -> int:
    """Like :func:`put`, but it is the task that waits, not the thread."""
    admission = Admission(core, lane, items, timeout_s)
    waiter = TaskWaiter()
    while admission.step(waiter):
        woken = False
        try:
            woken = await waiter.wait(admission.remaining_s())
        finally:
            if not woken:
                lane.partition.leave(waiter)
    return admission.accepted


def count_unoffered(lane: Lane, count: int) -> None:
    """Count items that came after one that was not accepted and so were never tried."""
    if lane.partition.closed:
        lane.partition.count_stopped(count)
    else:
        lane.partition.count_refused(count)
