"""Thresholds in front of a queue: who is asked, and when.

The queue knows nothing of levels and strategies; it asks a :class:`Guard`, which
``batchmill.pressure.QueueThresholdConfig`` provides. Asking takes the exact depth, which takes a
look at every partition, so it is not done for every item: while the depth is below ``free_below``,
that many more items may come as are missing to it, and each of them takes a token, with no lock.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any, Protocol


class Verdict(Protocol):
    """What a guard says of an item."""

    @property
    def accepted(self) -> bool:
        """Whether it may go in."""
        ...

    @property
    def retry_after_s(self) -> float | None:
        """If not: after how long to ask again, or None for never."""
        ...

    @property
    def reason(self) -> str:
        """If never: what to count it as."""
        ...


class Guard(Protocol):
    """Decides about items by the depth they meet."""

    @property
    def free_below(self) -> int:
        """Depths below this one need no decision."""
        ...

    def judge(self, item: Any, depth: int, attempt: int) -> Verdict:
        """What to do with ``item``, which is here for the ``attempt``-th time."""
        ...

    def observe(self, depth: int) -> None:
        """Take note of a depth."""
        ...

    def close(self) -> None:
        """The queue has drained."""
        ...


class GuardFactory(Protocol):
    """What ``BatchQueueConfig.thresholds`` takes."""

    def guard(self, name: str) -> Guard:
        """A guard for one queue."""
        ...


class Gate:
    """Applies a guard to the items of one queue, and counts those it turns away."""

    def __init__(self, guard: Guard, depth: Callable[[], int]) -> None:
        self.guard = guard
        self._depth = depth
        self.reset()

    def reset(self) -> None:
        """A new gate, or one in a forked child."""
        self._lock = threading.Lock()
        self._tokens: list[None] = []
        self.turned_away: dict[str, int] = {}
        self.closing = threading.Event()

    def lets_in(self, item: Any) -> bool:
        """The quick look: True when the depth is surely below every threshold."""
        try:
            self._tokens.pop()
        except IndexError:
            return False
        return True

    def judge(self, item: Any, attempt: int) -> Verdict | None:
        """The guard's verdict, or None when the item may simply go in."""
        depth = self._depth()
        missing = self.guard.free_below - depth
        if missing > 0:
            with self._lock:
                if not self._tokens:
                    self._tokens.extend([None] * (missing - 1))
            self.guard.observe(depth)
            return None
        return self.guard.judge(item, depth, attempt)

    def admit(self, item: Any, timeout_s: float | None) -> bool:
        """Whether ``item`` may go in; waits while the guard says to try again later."""
        if self.lets_in(item):
            return True
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        attempt = 1
        while True:
            verdict = self.judge(item, attempt)
            if verdict is None or verdict.accepted:
                return True
            wait_s = self.wait_of(verdict, deadline)
            if wait_s is None or self.closing.wait(wait_s):
                self.count(verdict.reason)
                return False
            attempt += 1

    @staticmethod
    def wait_of(verdict: Verdict, deadline: float | None) -> float | None:
        """How long to wait before the next try; None when there is none."""
        wait_s = verdict.retry_after_s
        if wait_s is None or (deadline is not None and time.monotonic() + wait_s > deadline):
            return None
        return wait_s

    def count(self, reason: str, count: int = 1) -> None:
        with self._lock:
            self.turned_away[reason] = self.turned_away.get(reason, 0) + count
