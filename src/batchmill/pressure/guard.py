"""Thresholds as a queue's guard."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from batchmill.pressure.config import QueueThresholdConfig
from batchmill.pressure.decision import QueueAction
from batchmill.pressure.levels import ThresholdLevel
from batchmill.pressure.manager import QueueThresholdManager

REJECTED = "rejected"
SHED = "shed"


@dataclass(frozen=True, slots=True)
class GuardVerdict:
    """What a queue does with an item."""

    accepted: bool
    retry_after_s: float | None
    reason: str
    level: ThresholdLevel | None = None
    """The level it was decided at."""


_REJECTED = GuardVerdict(False, None, REJECTED)
_SHED = GuardVerdict(False, None, SHED)


class ThresholdGuard:
    """Decides about the items of a :class:`BatchQueue` (``BatchQueueSettings(thresholds=…)``)."""

    def __init__(self, config: QueueThresholdConfig, name: str) -> None:
        self.manager = QueueThresholdManager(config, lambda: 0, name=name)
        self.free_below = config.warning_threshold

    def judge(self, item: Any, depth: int, attempt: int) -> GuardVerdict:
        """The decision for ``item`` at ``depth``; past the hard capacity nothing is accepted."""
        decision, level = self.manager.decide(item, depth, attempt)
        match decision.action:
            case QueueAction.ACCEPT:
                if not self.manager.allows(level, depth):
                    return _REJECTED
                return GuardVerdict(True, None, "", level)
            case QueueAction.DROP:
                return _SHED
            case QueueAction.RETRY:
                return GuardVerdict(False, (decision.delay_ms or 0.0) / 1000, REJECTED)
        return _REJECTED

    def holds(self, verdict: GuardVerdict, depth: int) -> bool:
        """Whether an acceptance still stands: not at a higher level, nor past the hard capacity."""
        return self.manager.allows(verdict.level, depth)

    def observe(self, depth: int) -> None:
        """Tell listeners when a level is entered or left."""
        self.manager.observe(depth)

    def close(self) -> None:
        """Let the listeners hear the rest, and end their thread."""
        self.manager.close()
