"""The micro-batcher: collects single items into batches for a backend, and answers each item.

Gives :class:`MicroBatcher` with its settings, policies, results, errors and stats, and
:func:`snapshot_batchers`, the stats of all open batchers of the process.
"""

from batchmill.batcher.backend import Backend
from batchmill.batcher.batcher import MicroBatcher
from batchmill.batcher.engine import snapshot_batchers
from batchmill.batcher.pending import FlushReason
from batchmill.batcher.result import (
    BackendContractError,
    BatcherClosedError,
    BatchResult,
    CircuitOpenError,
    DeadlineExceededError,
    DroppedError,
    ItemResult,
    Outcome,
)
from batchmill.batcher.settings import (
    AdaptiveConcurrency,
    BatcherSettings,
    BreakerPolicy,
    RetryPolicy,
    bisect,
)
from batchmill.batcher.stats import BatcherStats, WorkerLoad
from batchmill.batcher.threads import Clock, SystemClock

BatcherConfig = BatcherSettings  # its former name

__all__ = [
    "AdaptiveConcurrency",
    "Backend",
    "BackendContractError",
    "BatchResult",
    "BatcherClosedError",
    "BatcherConfig",
    "BatcherSettings",
    "BatcherStats",
    "BreakerPolicy",
    "CircuitOpenError",
    "Clock",
    "DeadlineExceededError",
    "DroppedError",
    "FlushReason",
    "ItemResult",
    "MicroBatcher",
    "Outcome",
    "RetryPolicy",
    "SystemClock",
    "WorkerLoad",
    "bisect",
    "snapshot_batchers",
]
