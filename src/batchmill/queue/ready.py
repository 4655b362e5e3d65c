"""The line of tasks that are ready to run, and the threads that sleep until there is one.

Why not ``queue.SimpleQueue``: before Python 3.13 its timed ``get``, with several threads taking,
may wait for ever when a woken thread loses the item to another one just as its time is up.

Guarantees
    * ``put`` takes no lock and may be called from anywhere, a finaliser or a signal handler too.
    * No task waits in the line while a thread sleeps: ``put`` wakes one after adding, a thread
      looks once more after lying down, and one that takes a task while others wait wakes another.
    * Of several sleepers the one that lay down last is woken: what it needs is still in the caches.

It leans on ``deque.append``, ``pop``, ``popleft`` and ``remove`` being atomic each.
"""

from __future__ import annotations

from collections import deque
from typing import Generic, TypeVar

from batchmill.waiters import ThreadWaiter

T = TypeVar("T")


class ReadyLine(Generic[T]):
    """Tasks in order, and who waits for them."""

    __slots__ = ("_closed", "_line", "_nudged", "_sleepers")

    def __init__(self) -> None:
        self._line: deque[T] = deque()
        self._sleepers: deque[ThreadWaiter] = deque()
        self._closed = False
        self._nudged = False

    def put(self, task: T) -> None:
        """Add a task and wake a thread for it."""
        self._line.append(task)
        self._wake_one()

    def empty(self) -> bool:
        """Whether no task waits."""
        return not self._line

    def _wake_one(self) -> None:
        """Have one sleeping thread, if there is one, look around.

        It takes itself off the list when it does: interrupted here, nobody is off the list and
        still asleep.
        """
        try:
            sleeper = self._sleepers[-1]
        except IndexError:
            return
        sleeper.wake()

    def nudge(self) -> None:
        """Have some thread look around, one that is just about to lie down if none sleeps."""
        self._nudged = True
        self._wake_one()

    def close(self) -> None:
        """Let no thread sleep any more."""
        self._closed = True
        for sleeper in list(self._sleepers):
            sleeper.wake()

    def get(self, waiter: ThreadWaiter, timeout_s: float | None) -> T | None:
        """The next task; None when the thread was woken, or ``timeout_s`` passed, without one.

        ``waiter`` is the calling thread's own.
        """
        task = self._take()
        if task is not None:
            return task
        self._sleepers.append(waiter)
        # Looked at again only now: whoever added, closed or nudged before may have seen no sleeper.
        if not (self._line or self._closed or self._nudged):
            waiter.wait(timeout_s)
        self._nudged = False
        self._sleepers.remove(waiter)
        return self._take()

    def _take(self) -> T | None:
        try:
            task = self._line.popleft()
        except IndexError:
            return None
        if self._line:
            self._wake_one()
        return task
