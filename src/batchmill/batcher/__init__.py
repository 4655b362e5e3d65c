"""The micro-batcher: single items in, batches to a backend, one answer per item."""

from batchmill.batcher._adaptive import AdaptiveConcurrency
from batchmill.batcher._backend import Backend
from batchmill.batcher._batcher import MicroBatcher
from batchmill.batcher._clock import Clock, SystemClock
from batchmill.batcher._config import BatcherConfig
from batchmill.batcher._engine import snapshot_batchers
from batchmill.batcher._failure import BreakerPolicy, RetryPolicy, bisect
from batchmill.batcher._pending import FlushReason
from batchmill.batcher._result import (
    BackendContractError,
    BatcherClosedError,
    BatchResult,
    CircuitOpenError,
    DeadlineExceededError,
    DroppedError,
    ItemResult,
    Outcome,
)
from batchmill.batcher._stats import BatcherStats, WorkerLoad

__all__ = [
    "AdaptiveConcurrency",
    "Backend",
    "BackendContractError",
    "BatchResult",
    "BatcherClosedError",
    "BatcherConfig",
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
