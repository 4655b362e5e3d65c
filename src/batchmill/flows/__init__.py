"""Flow-ordered dispatch: each flow in order on one worker, new flows to the least loaded.

Gives :class:`FlowDispatcher` with its settings, stats and errors.
"""

from batchmill.errors import BatchmillError, ConfigError, WouldDeadlockError
from batchmill.flows.dispatcher import FlowDispatcher
from batchmill.flows.settings import Backpressure, FlowSettings
from batchmill.flows.stats import FlowStats, LatencyStats, WorkerStats

FlowConfig = FlowSettings  # its former name

__all__ = [
    "Backpressure",
    "BatchmillError",
    "ConfigError",
    "FlowConfig",
    "FlowDispatcher",
    "FlowSettings",
    "FlowStats",
    "LatencyStats",
    "WorkerStats",
    "WouldDeadlockError",
]
