"""Backpressure: thresholds on any depth, and a decision for every item that meets one.

Gives :class:`QueueThresholdManager` with its settings, levels, decisions and events, and ready-made
handlers in :mod:`strategies`; and :func:`snapshot_thresholds`, the stats of all of a process.
"""

from batchmill.pressure import strategies
from batchmill.pressure.decision import (
    EventKind,
    QueueAction,
    QueueDecision,
    QueueThresholdContext,
    QueueThresholdEvent,
    QueueThresholdHandler,
    QueueThresholdListener,
    ThresholdHandler,
    ThresholdListener,
)
from batchmill.pressure.levels import QueueFullError, ThresholdLevel
from batchmill.pressure.manager import QueueThresholdManager, snapshot_thresholds
from batchmill.pressure.settings import QueueThresholdSettings
from batchmill.pressure.stats import ThresholdStats

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
    "QueueThresholdHandler",
    "QueueThresholdListener",
    "QueueThresholdManager",
    "ThresholdHandler",
    "ThresholdLevel",
    "ThresholdListener",
    "ThresholdStats",
    "snapshot_thresholds",
    "strategies",
]
