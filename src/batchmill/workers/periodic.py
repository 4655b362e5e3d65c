"""What the workers of L1 and TopN have in common: they collect, and hand on once in a period."""

from __future__ import annotations

import logging
import threading
import time
from abc import ABC, abstractmethod
from typing import Any

from batchmill.wording import count_of

log = logging.getLogger("batchmill.workers")


class PeriodicWorker(ABC):
    """A queue's handler that hands on what it collected when its period is over.

    What is not taken then is kept, and handed on with what comes.
    """

    def __init__(self, name: str, item: str, period_s: float) -> None:
        """``name`` and ``item``, the noun of what it collects, are for messages."""
        self._name = name
        self._item = item
        self._period_s = period_s
        self.reset()

    def reset(self) -> None:
        """Start with nothing: in a forked child, what was there is the parent's."""
        self.lock = threading.Lock()
        """Held while it works."""
        self._due_s: float | None = None
        self.failed = 0
        """How many were lost, which is in the log."""
        self._empty()

    def consume(self, batch: list[Any]) -> None:
        """Take a batch."""
        with self.lock:
            now_s = time.monotonic()
            if self._due_s is None:
                self._due_s = now_s + self._period_s
            self._collect(batch)
            if now_s >= self._due_s:
                self._flush(None)

    def on_idle(self) -> None:
        """Hand on what is due; called while nothing comes."""
        with self.lock:
            if self._due_s is not None and time.monotonic() >= self._due_s:
                self._flush(None)

    def on_shutdown(self) -> None:
        """Hand on everything; the last call."""
        with self.lock:
            if not self._flush(None):
                lost = self._waiting()
                self.failed += lost
                log.error("%s: %s lost: L2 takes no more", self._name, count_of(lost, self._item))
                self._empty()

    def flush(self, timeout: float | None = None) -> bool:
        """Hand on everything now; False if it was not taken within ``timeout`` seconds."""
        start_s = time.monotonic()
        if not self.lock.acquire(timeout=-1 if timeout is None else timeout):
            return False
        try:
            spent_s = time.monotonic() - start_s
            return self._flush(None if timeout is None else max(0.0, timeout - spent_s))
        finally:
            self.lock.release()

    def _flush(self, timeout: float | None) -> bool:
        """Hand on everything; False if it was not taken, and is kept."""
        self._due_s = None
        if not self._waiting():
            return True
        taken = self._hand_over(timeout)
        if taken:
            self._empty()
        else:
            self._due_s = time.monotonic() + self._period_s
        return taken

    @abstractmethod
    def _collect(self, batch: list[Any]) -> None:
        """Add a batch to what waits."""

    @abstractmethod
    def _waiting(self) -> int:
        """How many wait to be handed on."""

    @abstractmethod
    def _hand_over(self, timeout: float | None) -> bool:
        """Hand on all that waits; whether it was taken."""

    @abstractmethod
    def _empty(self) -> None:
        """Forget what waits."""
