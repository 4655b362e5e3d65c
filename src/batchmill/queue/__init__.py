"""The batch queue: bounded, partitioned, self-draining, with a handler per class."""

from batchmill.queue._balancer import DrainBalancer
from batchmill.queue._config import BatchQueueConfig, BufferStrategy
from batchmill.queue._handler import HandlerConsumer
from batchmill.queue._manager import BatchQueueManager, default_manager
from batchmill.queue._policy import PartitionPolicy, ThreadPolicy
from batchmill.queue._queue import BatchQueue
from batchmill.queue._selector import PartitionSelector
from batchmill.queue._snapshot import snapshot_queues
from batchmill.queue._stats import BatchQueueStats, PartitionMove, PartitionStats, ThreadLoad

__all__ = [
    "BatchQueue",
    "BatchQueueConfig",
    "BatchQueueManager",
    "BatchQueueStats",
    "BufferStrategy",
    "DrainBalancer",
    "HandlerConsumer",
    "PartitionMove",
    "PartitionPolicy",
    "PartitionSelector",
    "PartitionStats",
    "ThreadLoad",
    "ThreadPolicy",
    "default_manager",
    "snapshot_queues",
]
