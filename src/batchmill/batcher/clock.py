"""Time as the batcher sees it, so that tests can move it by hand."""

from __future__ import annotations

import time
from typing import Protocol

from batchmill.waiters import ThreadWaiter


class Clock(Protocol):
    """Tells the time, and waits on it."""

    def now(self) -> float:
        """Seconds; never goes back."""
        ...

    def wait(self, waiter: ThreadWaiter, until: float | None) -> bool:
        """Wait until woken (True) or until that time on this clock (False); None: for ever."""
        ...


class SystemClock:
    """The monotonic clock of the machine."""

    def now(self) -> float:
        return time.monotonic()

    def wait(self, waiter: ThreadWaiter, until: float | None) -> bool:
        return waiter.wait(None if until is None else until - time.monotonic())
