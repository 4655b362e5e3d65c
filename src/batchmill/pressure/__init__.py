"""Backpressure: thresholds on any depth, and what to do with an item that meets one."""

from batchmill.pressure import strategies
from batchmill.pressure.config import QueueThresholdConfig
from batchmill.pressure.decision import (
    EventKind,
    QueueAction,
    QueueDecision,
    QueueThresholdContext,
    QueueThresholdEvent,
    ThresholdHandler,
    ThresholdListener,
)
from batchmill.pressure.errors import QueueFullError
from batchmill.pressure.levels import ThresholdLevel
from batchmill.pressure.manager import QueueThresholdManager, ThresholdStats

__all__ = [
    "EventKind",
    "QueueAction",
    "QueueDecision",
    "QueueFullError",
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
