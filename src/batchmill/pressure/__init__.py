"""Backpressure: thresholds on any depth, and a decision for every item that meets one.

Gives :class:`QueueThresholdManager` with its settings, levels, decisions and events, and ready-made
handlers in :mod:`strategies`.
"""

from batchmill.pressure import strategies
from batchmill.pressure.decision import (
    EventKind,
    QueueAction,
    QueueDecision,
    QueueThresholdContext,
    QueueThresholdEvent,
    ThresholdHandler,
    ThresholdListener,
)
from batchmill.pressure.levels import QueueFullError, ThresholdLevel
from batchmill.pressure.manager import QueueThresholdManager, ThresholdStats
from batchmill.pressure.settings import QueueThresholdSettings

QueueThresholdConfig = QueueThresholdSettings  # the older name

__all__ = [
    "EventKind",
    "QueueAction",
    "QueueDecision",
    "QueueFullError",
    "QueueThresholdSettings",
    "QueueThresholdConfig",
    "QueueThresholdContext",
    "QueueThresholdEvent",
    "QueueThresholdManager",
    "ThresholdHandler",
    "ThresholdLevel",
    "ThresholdListener",
    "ThresholdStats",
    "strategies",
]
