"""TopN: keeps the slowest statements."""

from __future__ import annotations

import logging
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any, TypeAlias

from batchmill.aggregate import SlowestStatements
from batchmill.workers.periodic import PeriodicWorker
from batchmill.workers.settings import WorkerSettings

log = logging.getLogger("batchmill.workers")

HandOn: TypeAlias = Callable[[SlowestStatements, int, int, float | None], bool]
"""Takes the slowest statements, of how many they are, how many are invalid, and a timeout."""


class TopNWorker(PeriodicWorker):
    """The handler of statements on TopN's queue: exact, whatever the order they come in."""

    def __init__(self, hand_on: HandOn, settings: WorkerSettings | None = None) -> None:
        """``hand_on`` is ``add_statements`` of a :class:`~batchmill.workers.Committer`."""
        self._hand_on = hand_on
        self._settings = settings or WorkerSettings()
        super().__init__("TopN", "statement", self._settings.l1_period_s)

    def _collect(self, batch: list[Any]) -> None:
        latest = datetime.now(UTC) + timedelta(seconds=self._settings.max_ahead_s)
        valid = [statement for statement in batch if statement.time <= latest]
        self._slowest.add(valid)
        self._count += len(valid)
        self._too_far_ahead += len(batch) - len(valid)

    def _waiting(self) -> int:
        return self._count + self._too_far_ahead

    def _hand_over(self, timeout: float | None) -> bool:
        return self._hand_on(self._slowest, self._count, self._too_far_ahead, timeout)

    def _empty(self) -> None:
        self._slowest = SlowestStatements(self._settings.top_n, self._settings.thresholds())
        self._count = self._too_far_ahead = 0
