"""batchmill: typed events in, metrics out.

This package's own names are the in-process batch queue, on the standard library alone.
"""

from batchmill._errors import (
    BatchmillError,
    ConfigError,
    HandlerExistsError,
    QueueClosedError,
    QueueConflictError,
    QueueExistsError,
    SelectorError,
    WouldDeadlockError,
)
from batchmill.queue import (
    BatchQueue,
    BatchQueueConfig,
    BatchQueueManager,
    BatchQueueStats,
    BufferStrategy,
    DrainBalancer,
    HandlerConsumer,
    PartitionPolicy,
    PartitionSelector,
    PartitionStats,
    ThreadLoad,
    ThreadPolicy,
    default_manager,
)

__version__ = "0.1.0"

__all__ = [
    "BatchQueue",
    "BatchQueueConfig",
    "BatchQueueManager",
    "BatchQueueStats",
    "BatchmillError",
    "BufferStrategy",
    "ConfigError",
    "DrainBalancer",
    "HandlerConsumer",
    "HandlerExistsError",
    "PartitionPolicy",
    "PartitionSelector",
    "PartitionStats",
    "QueueClosedError",
    "QueueConflictError",
    "QueueExistsError",
    "SelectorError",
    "ThreadLoad",
    "ThreadPolicy",
    "WouldDeadlockError",
    "__version__",
    "default_manager",
]
