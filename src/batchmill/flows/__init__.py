"""Flow-ordered dispatch: each flow in order on one worker, new flows to the least loaded."""

from batchmill._errors import BatchmillError, ConfigError, WouldDeadlockError
from batchmill.flows._config import Backpressure, FlowConfig
from batchmill.flows._dispatcher import FlowDispatcher
from batchmill.flows._stats import FlowStats, LatencyStats, WorkerStats

__all__ = [
    "Backpressure",
    "BatchmillError",
    "ConfigError",
    "FlowConfig",
    "FlowDispatcher",
    "FlowStats",
    "LatencyStats",
    "WorkerStats",
    "WouldDeadlockError",
]
