"""Backpressure: thresholds on any depth, and what to do with an item that meets one."""

from batchmill.pressure import strategies
from batchmill.pressure._config import QueueThresholdConfig
from batchmill.pressure._decision import (
    EventKind,
    QueueAction,
    QueueDecision,
    QueueThresholdContext,
    QueueThresholdEvent,
    ThresholdHandler,
    ThresholdListener,
)
from batchmill.pressure._errors import QueueFullError
from batchmill.pressure._levels import ThresholdLevel
from batchmill.pressure._manager import QueueThresholdManager, ThresholdStats

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
