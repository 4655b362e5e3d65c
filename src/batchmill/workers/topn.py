"""TopN: keeps the slowest statements."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any, TypeAlias

from batchmill.aggregate import SlowestStatements
from batchmill.wording import count_of
from batchmill.workers.settings import WorkerSettings

log = logging.getLogger("batchmill.workers")

HandOn: TypeAlias = Callable[[SlowestStatements, int, int, float | None], bool]
"""Takes the slowest statements, of how many they are, how many are invalid, and a timeout."""


class TopNWorker:
    """The handler of statements on TopN's queue: exact, whatever the order they come in."""

    def __init__(self, hand_on: HandOn, settings: WorkerSettings | None = None) -> None:
        """``hand_on`` is ``add_statements`` of a :class:`~batchmill.workers.Committer`."""
        self._hand_on = hand_on
        self._settings = settings or WorkerSettings()
        self.reset()

    def reset(self) -> None:
        """Start with nothing: in a forked child, what was there is the parent's."""
        self.lock = threading.Lock()
        """Held while it works."""
        self._due_s: float | None = None
        self.failed = 0
        """Statements that were lost, which is in the log."""
        self._empty()

    def _empty(self) -> None:
        self._slowest = SlowestStatements(self._settings.top_n, self._settings.thresholds())
        self._count = self._too_far_ahead = 0

    def consume(self, batch: list[Any]) -> None:
        """Take a batch of statements."""
        with self.lock:
            now_s = time.monotonic()
            if self._due_s is None:
                self._due_s = now_s + self._settings.l1_period_s
            latest = datetime.now(UTC) + timedelta(seconds=self._settings.max_ahead_s)
            valid = [statement for statement in batch if statement.time <= latest]
            self._slowest.add(valid)
            self._count += len(valid)
            self._too_far_ahead += len(batch) - len(valid)
            if now_s >= self._due_s:
                self._flush(None)

    def on_idle(self) -> None:
        """Hand on what is due; called while no statements come."""
        with self.lock:
            if self._due_s is not None and time.monotonic() >= self._due_s:
                self._flush(None)

    def on_shutdown(self) -> None:
        """Hand on everything; the last call."""
        with self.lock:
            if not self._flush(None):
                lost = self._count + self._too_far_ahead
                self.failed += lost
                log.error("TopN: %s lost: nobody takes them", count_of(lost, "statement"))
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
        if not (self._count or self._too_far_ahead):
            return True
        taken = self._hand_on(self._slowest, self._count, self._too_far_ahead, timeout)
        if taken:
            self._empty()
        else:
            self._due_s = time.monotonic() + self._settings.l1_period_s
        return taken
