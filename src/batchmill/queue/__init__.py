"""The batch queue: bounded, partitioned, self-draining, with a handler per class."""

from batchmill.queue.balancer import DrainBalancer
from batchmill.queue.config import BatchQueueSettings, BufferStrategy
from batchmill.queue.handler import HandlerConsumer
from batchmill.queue.manager import BatchQueueManager, default_manager
from batchmill.queue.policy import PartitionPolicy, ThreadPolicy
from batchmill.queue.queue import BatchQueue
from batchmill.queue.selector import PartitionSelector
from batchmill.queue.snapshot import snapshot_queues
from batchmill.queue.stats import BatchQueueStats, PartitionMove, PartitionStats, ThreadLoad

BatchQueueConfig = BatchQueueSettings  # its former name

__all__ = [
    "BatchQueue",
    "BatchQueueConfig",
    "BatchQueueManager",
    "BatchQueueSettings",
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
