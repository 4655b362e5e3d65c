"""Detects a drain thread that would wait for itself, directly or through other drain threads.

A handler may produce into its own queue. On a full partition it waits for the thread that drains
it: this may be the same thread, or one that waits for this one. Each wait is recorded before it
begins, so the thread that would close the cycle gets an error instead.
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
    """Replace the lock in a forked child, where its holder may not exist."""
    global _lock
    _lock = threading.Lock()


def is_needed_to_drain(core: QueueCore) -> bool:
    """Whether ``core`` cannot be drained to the end before the calling handler returns."""
    task = current_task()
    if task is None:
        return False
    if task.core is core:
        return True
    return task.core.scheduler is core.scheduler and core.scheduler.size == 1


def would_deadlock(partition: Partition) -> bool:
    """Whether the calling thread, waiting for room in ``partition``, would wait for itself."""
    task = current_task()
    if task is None:
        return False
    with _lock:
        return _closes_cycle(task, partition)


def begin_wait(partition: Partition) -> bool:
    """Record that the calling thread waits; False when that would be a deadlock."""
    task = current_task()
    if task is None:
        return True
    with _lock:
        if _closes_cycle(task, partition):
            return False
        task.waits_for = partition
        task.core.scheduler.waiting += 1
        return True


def end_wait() -> None:
    """The wait recorded by :func:`begin_wait` is over."""
    task = current_task()
    if task is None:
        return
    with _lock:
        if task.waits_for is not None:
            task.waits_for = None
            task.core.scheduler.waiting -= 1


def _closes_cycle(task: DrainTask, partition: Partition) -> bool:
    owner = partition.owner
    following: DrainTask | None = owner
    while following is not None:
        if following is task:
            return True
        following = following.waits_for.owner if following.waits_for is not None else None
    calling = task.calling
    if calling is not None and calling.lock is not None:
        # Everything in the partition is for the handler that this thread is calling.
        receivers = [lane.receiver for lane in partition.lanes if lane.buffer]
        if receivers and all(receiver is calling for receiver in receivers):
            return True
    scheduler = owner.core.scheduler
    # Every thread of the pool would wait for a task that only a thread of the pool can run.
    return scheduler is task.core.scheduler and scheduler.waiting + 1 >= scheduler.size
