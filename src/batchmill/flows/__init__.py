"""Flow-ordered dispatch: each flow in order on one worker, new flows to the least loaded.

Gives :class:`FlowDispatcher` with its settings, assignment rules, stats and errors.
"""

from batchmill.errors import BatchmillError, ConfigError, WouldDeadlockError
from batchmill.flows.assignment import (
    Assignment,
    LeastLoaded,
    RoundRobin,
    ShortestQueue,
    WorkerView,
)
from batchmill.flows.core import snapshot_flows
from batchmill.flows.dispatcher import FlowDispatcher
from batchmill.flows.settings import (
    Backpressure,
    FlowErrorHandler,
    FlowHandler,
    FlowSettings,
)
from batchmill.flows.stats import FlowStats, LatencyStats, WorkerStats

FlowConfig = FlowSettings  # its former name

__all__ = [
    "Assignment",
    "Backpressure",
    "BatchmillError",
    "ConfigError",
    "FlowConfig",
    "FlowDispatcher",
    "FlowErrorHandler",
    "FlowHandler",
    "FlowSettings",
    "FlowStats",
    "LatencyStats",
    "LeastLoaded",
    "RoundRobin",
    "ShortestQueue",
    "WorkerStats",
    "WorkerView",
    "WouldDeadlockError",
    "snapshot_flows",
]
