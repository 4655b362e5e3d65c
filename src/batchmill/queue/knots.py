"""Sees to it that no drain thread waits, directly or in a circle, for itself.

A handler may produce into its own queue. When the partition it meets is full it waits for the
thread that drains it, and that may be this very thread, or one that waits for this one. Who waits
for what is noted here before the wait begins, so that whoever would close the circle is told
instead.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from batchmill.queue.task import DrainTask, current_task

if TYPE_CHECKING:
    from batchmill.queue.core import QueueCore
    from batchmill.queue.partition import Partition

_lock = threading.Lock()


def renew_lock() -> None:
    """In a forked child, the lock may be held by a thread that does not exist."""
    global _lock
    _lock = threading.Lock()


def would_wait_for_itself(core: QueueCore) -> bool:
    """Whether the calling thread has to return before ``core`` can be drained to the end."""
    task = current_task()
    if task is None:
        return False
    if task.core is core:
        return True
    return task.core.scheduler is core.scheduler and core.scheduler.size == 1


def is_knot(partition: Partition) -> bool:
    """Whether the calling thread, waiting for room in ``partition``, would wait for itself."""
    task = current_task()
    if task is None:
        return False
    with _lock:
        return _closes_circle(task, partition)


def begin_wait(partition: Partition) -> bool:
    """Note that the calling thread waits; False when that would be a knot."""
    task = current_task()
    if task is None:
        return True
    with _lock:
        if _closes_circle(task, partition):
            return False
        task.waits_for = partition
        task.core.scheduler.waiting += 1
        return True


def end_wait() -> None:
    """The wait noted by :func:`begin_wait` is over."""
    task = current_task()
    if task is None:
        return
    with _lock:
        if task.waits_for is not None:
            task.waits_for = None
            task.core.scheduler.waiting -= 1


def _closes_circle(task: DrainTask, partition: Partition) -> bool:
    owner = partition.owner
    following: DrainTask | None = owner
    while following is not None:
        if following is task:
            return True
        following = following.waits_for.owner if following.waits_for is not None else None
    held = task.calling
    if held is not None and held.lock is not None:
        # All that fills the partition is for the handler that this thread is in.
        full_of = [lane.receiver for lane in partition.lanes if lane.buffer]
        if full_of and all(receiver is held for receiver in full_of):
            return True
    scheduler = owner.core.scheduler
    # Every thread of the pool would wait for a task that only a thread of the pool can run.
    return scheduler is task.core.scheduler and scheduler.waiting + 1 >= scheduler.size
