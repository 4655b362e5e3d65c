"""Waiting: for another thread or task without polling, and between two tries."""

from __future__ import annotations

import asyncio
import threading
import time
from typing import Protocol

_YIELDS = 20


def give_way(lock: threading.Lock) -> None:
    """Let the thread that holds ``lock`` finish, before queueing up for it.

    Under the GIL a held lock nearly always means that its holder was switched out in the few steps
    it needs it for. A thread that blocks on it then is handed the lock, in the kernel, long before
    its turn to run comes; whoever runs meanwhile blocks in turn, and soon there is a thread switch
    for every item. Yielding first avoids that convoy: with four producers on two cores (CPython
    3.11) it was several times as fast. The caller still takes the lock afterwards as usual.
    """
    for _ in range(_YIELDS):
        time.sleep(0)
        if not lock.locked():
            return


class Waiter(Protocol):
    """Somebody who waits; ``wake`` may be called from any thread, any number of times."""

    def wake(self) -> bool:
        """Wake; False when nobody can be there any more, so that the next in line may be woken."""
        ...


class ThreadWaiter:
    """A thread that waits. One thread waits, any thread wakes; a wake that comes first is kept.

    A lock used as a flag: held means nobody called yet. Waiting for a lock is the one wait in
    CPython that is both quick and interrupted by signals, so Ctrl-C gets through.
    """

    __slots__ = ("_lock",)

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._lock.acquire()

    def wake(self) -> bool:
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
    """An asyncio task that waits; its loop goes on meanwhile.

    Tasks of one loop that are woken in some order go on in that order, with or without a timeout.
    """

    __slots__ = ("_loop", "_woken")

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._woken: asyncio.Future[bool] = self._loop.create_future()

    def wake(self) -> bool:
        try:
            self._loop.call_soon_threadsafe(self._settle, self._woken, True)
        except RuntimeError:  # the loop is closed, and the task with it
            return False
        return True

    @staticmethod
    def _settle(future: asyncio.Future[bool], woken: bool) -> None:
        if not future.done():
            future.set_result(woken)

    async def wait(self, timeout_s: float | None) -> bool:
        """True when woken; False when ``timeout_s`` (None: for ever) passed first."""
        future = self._woken
        timer = None
        if timeout_s is not None:
            timer = self._loop.call_later(max(0.0, timeout_s), self._settle, future, False)
        try:
            return await future
        finally:
            if timer is not None:
                timer.cancel()
            if future.done():
                self._woken = self._loop.create_future()  # for the next wait


class Countdown:
    """Wakes a waiter when the last of several things has happened."""

    __slots__ = ("_left", "_lock", "_waiter")

    def __init__(self, waiter: Waiter) -> None:
        self._waiter = waiter
        self._left = 1  # held open while things are still being added
        self._lock = threading.Lock()

    def add(self) -> None:
        with self._lock:
            self._left += 1

    def done(self) -> None:
        with self._lock:
            self._left -= 1
            last = self._left == 0
        if last:
            self._waiter.wake()


def back_off_ms(initial_ms: float, max_ms: float, multiplier: float, attempt: int) -> float:
    """The delay after the ``attempt``-th try; never past ``max_ms``, however large the power."""
    try:
        return float(min(max_ms, initial_ms * multiplier ** (attempt - 1)))
    except OverflowError:
        return max_ms
