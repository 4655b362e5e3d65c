"""Flow-ordered dispatch: each flow in order on one worker, new flows to the least loaded."""

from batchmill.errors import BatchmillError, ConfigError, WouldDeadlockError
from batchmill.flows.config import Backpressure, FlowConfig
from batchmill.flows.dispatcher import FlowDispatcher
from batchmill.flows.stats import FlowStats, LatencyStats, WorkerStats

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
