"""What helps to test code that uses batchmill: a clock that is moved by hand."""

from __future__ import annotations

import threading

from batchmill.waiters import ThreadWaiter

__all__ = ["ManualClock"]


class ManualClock:
    """Give it to a MicroBatcher as ``clock`` and decide yourself when time passes.

    >>> clock = ManualClock()
    >>> clock.advance(2.5)
    >>> clock.now()
    2.5
    """

    def __init__(self, start: float = 0.0) -> None:
        self._now = start
        self._changed = threading.Condition()
        self._sleepers: list[tuple[float, ThreadWaiter]] = []

    def now(self) -> float:
        """The time, in seconds."""
        with self._changed:
            return self._now

    def advance(self, seconds: float) -> None:
        """Let ``seconds`` pass: whoever waits for a time that is now over wakes."""
        with self._changed:
            self._now += seconds
            due = [waiter for until, waiter in self._sleepers if until <= self._now]
            self._sleepers = [(u, w) for u, w in self._sleepers if u > self._now]
        for waiter in due:
            waiter.wake()

    def wait(self, waiter: ThreadWaiter, until: float | None) -> bool:
        """Wait until woken (True) or until the clock reaches ``until`` (False)."""
        with self._changed:
            if until is not None:
                if until <= self._now:
                    return waiter.wait(0)
                self._sleepers.append((until, waiter))
            self._changed.notify_all()
        waiter.wait(None)
        with self._changed:
            self._sleepers = [pair for pair in self._sleepers if pair[1] is not waiter]
            self._changed.notify_all()
            return until is None or self._now < until

    def await_sleepers(self, count: int = 1, timeout: float = 30.0) -> bool:
        """Wait (in real time) until ``count`` threads wait for a time on this clock."""
        with self._changed:
            return self._changed.wait_for(lambda: len(self._sleepers) >= count, timeout)
