"""batchmill: typed events in, metrics out.

This package's own names are the in-process batch queue, on the standard library alone, and the
client that writes an application's events to a spool; that one is loaded when it is asked for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from batchmill.errors import (
    BatchmillError,
    ConfigError,
    HandlerExistsError,
    MissingExtraError,
    QueueClosedError,
    QueueConflictError,
    QueueExistsError,
    SelectorError,
    UnawaitedError,
    WouldDeadlockError,
)
from batchmill.queue import (
    BatchQueue,
    BatchQueueConfig,
    BatchQueueManager,
    BatchQueueManagerStats,
    BatchQueueSettings,
    BatchQueueStats,
    BufferStrategy,
    DrainBalancer,
    HandlerConsumer,
    PartitionMove,
    PartitionPolicy,
    PartitionSelector,
    PartitionStats,
    QueueErrorHandler,
    ThreadLoad,
    ThreadPolicy,
    default_manager,
    snapshot_queues,
)

if TYPE_CHECKING:
    from batchmill.client import Client
    from batchmill.workers import Embedded

__version__ = "0.1.0"

__all__ = [
    "BatchQueue",
    "BatchQueueConfig",
    "BatchQueueManager",
    "BatchQueueManagerStats",
    "BatchQueueSettings",
    "BatchQueueStats",
    "BatchmillError",
    "BufferStrategy",
    "Client",
    "ConfigError",
    "DrainBalancer",
    "Embedded",
    "HandlerConsumer",
    "HandlerExistsError",
    "MissingExtraError",
    "PartitionMove",
    "PartitionPolicy",
    "PartitionSelector",
    "PartitionStats",
    "QueueClosedError",
    "QueueConflictError",
    "QueueErrorHandler",
    "QueueExistsError",
    "SelectorError",
    "ThreadLoad",
    "ThreadPolicy",
    "UnawaitedError",
    "WouldDeadlockError",
    "__version__",
    "default_manager",
    "snapshot_queues",
]


_LAZY = {"Client": "batchmill.client", "Embedded": "batchmill.workers"}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(_LAZY[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_LAZY})
