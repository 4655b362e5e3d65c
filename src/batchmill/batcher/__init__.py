"""The micro-batcher: single items in, batches to a backend, one answer per item."""

from batchmill.batcher.adaptive import AdaptiveConcurrency
from batchmill.batcher.backend import Backend
from batchmill.batcher.batcher import MicroBatcher
from batchmill.batcher.clock import Clock, SystemClock
from batchmill.batcher.engine import snapshot_batchers
from batchmill.batcher.failure import BreakerPolicy, RetryPolicy, bisect
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
from batchmill.batcher.settings import BatcherSettings
from batchmill.batcher.stats import BatcherStats, WorkerLoad

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
