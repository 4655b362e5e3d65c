"""A bounded, partitioned in-process queue that drains itself in batches into a handler per class.

It gives the queue, its settings with the policies and strategies they take, its stats, and a
manager for named queues that share threads.
"""

from batchmill.queue.core import snapshot_queues
from batchmill.queue.manager import BatchQueueManager, default_manager
from batchmill.queue.queue import BatchQueue
from batchmill.queue.settings import (
    BatchQueueSettings,
    BufferStrategy,
    HandlerConsumer,
    PartitionPolicy,
    QueueErrorHandler,
    ThreadPolicy,
)
from batchmill.queue.stats import (
    BatchQueueManagerStats,
    BatchQueueStats,
    PartitionMove,
    PartitionStats,
    ThreadLoad,
)
from batchmill.queue.strategies import DrainBalancer, PartitionSelector

BatchQueueConfig = BatchQueueSettings  # its former name

__all__ = [
    "BatchQueue",
    "BatchQueueConfig",
    "BatchQueueManager",
    "BatchQueueManagerStats",
    "BatchQueueSettings",
    "BatchQueueStats",
    "BufferStrategy",
    "DrainBalancer",
    "HandlerConsumer",
    "PartitionMove",
    "PartitionPolicy",
    "PartitionSelector",
    "PartitionStats",
    "QueueErrorHandler",
    "ThreadLoad",
    "ThreadPolicy",
    "default_manager",
    "snapshot_queues",
]
