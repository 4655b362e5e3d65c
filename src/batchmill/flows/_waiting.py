"""Two ways to wait for another thread without polling: one for threads, one for asyncio tasks."""

from __future__ import annotations

import asyncio
import threading
from typing import Protocol


class Waiter(Protocol):
    """Somebody who waits."""

    def wake(self) -> bool:
        """End the wait; from any thread, any number of times. False: nobody is there any more."""


class ThreadWaiter:
    """A thread that waits. One thread waits, any thread wakes; a wake that comes first is kept.

    A lock used as a flag: held means nobody called yet. Waiting for a lock is quick, is ended by
    signals (so Ctrl-C gets through), and releasing one is safe in a finaliser.
    """

    __slots__ = ("_lock",)

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._lock.acquire()

    def wake(self) -> bool:
        """Let the thread go on."""
        try:
            self._lock.release()
        except RuntimeError:  # woken already and not yet noticed: one wake is enough
            pass
        return True

    def wait(self, timeout_s: float | None) -> bool:
        """True when woken; False when ``timeout_s`` (None: for ever) passed first."""
        if timeout_s is None:
            return self._lock.acquire()
        return self._lock.acquire(timeout=min(max(0.0, timeout_s), threading.TIMEOUT_MAX))


class TaskWaiter:
    """An asyncio task that waits, once; its loop goes on meanwhile.

    Tasks of one loop that are woken in some order go on in that order, with or without a timeout.
    """

    __slots__ = ("_loop", "_woken")

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._woken: asyncio.Future[bool] = self._loop.create_future()

    def wake(self) -> bool:
        """Let the task go on."""
        try:
            self._loop.call_soon_threadsafe(self._settle, True)
        except RuntimeError:  # the loop is closed, and the task with it
            return False
        return True

    def _settle(self, woken: bool) -> None:
        if not self._woken.done():
            self._woken.set_result(woken)

    async def wait(self, timeout_s: float | None) -> bool:
        """True when woken; False when ``timeout_s`` (None: for ever) passed first."""
        if timeout_s is None:
            return await self._woken
        timer = self._loop.call_later(max(0.0, timeout_s), self._settle, False)
        try:
            return await self._woken
        finally:
            timer.cancel()
