"""Ready settings for the queues of a metrics pipeline: aggregation, persistence, TopN, I/O.

Each function returns a :class:`BatchQueueSettings`; pass any of its fields to change them.

>>> l2_persistence(buffer_size=500).buffer_size
500

======================  =====================  ==========  ========  ===========  ========  ========
queue                   threads                partitions  buffer    when full    idle ms   mode
======================  =====================  ==========  ========  ===========  ========  ========
l1_aggregation          1 per core             adaptive    20,000    IF_POSSIBLE  1..50     handlers
l2_persistence          1 + 1 per four cores   adaptive    2,000     BLOCKING     1..50     handlers
topn_persistence        1                      adaptive    1,000     BLOCKING     10..100   handlers
remote_client           1                      1           10,000    BLOCKING     1..50     consumer
grpc_exporter           1                      1           20,000    BLOCKING     1..200    consumer
kafka_exporter          1                      1           20,000    IF_POSSIBLE  1..200    consumer
jdbc_batch              4                      4           10,000    BLOCKING     1..20     consumer
======================  =====================  ==========  ========  ===========  ========  ========

The I/O queues have a thread each. Where there are many and none is busy, :func:`on_io_pool` puts
them on one shared scheduler instead.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, TypeAlias

from batchmill.queue import (
    BatchQueueSettings,
    BufferStrategy,
    DrainBalancer,
    HandlerConsumer,
    PartitionPolicy,
    PartitionSelector,
    ThreadPolicy,
)

Consumer: TypeAlias = HandlerConsumer[Any] | Callable[[list[Any]], object]

METRICS_L1_AGGREGATION = "METRICS_L1_AGGREGATION"
METRICS_L2_PERSISTENCE = "METRICS_L2_PERSISTENCE"
TOPN_PERSISTENCE = "TOPN_PERSISTENCE"
JDBC_BATCH_PERSISTENCE = "JDBC_BATCH_PERSISTENCE"

L1_THREADS = ThreadPolicy.cpu_cores(1.0)
L2_THREADS = ThreadPolicy.cpu_cores_with_base(1, 0.25)
TOPN_THREADS = ThreadPolicy.fixed(1)
IO_POOL = ("IO_POOL", ThreadPolicy.cpu_cores(0.5))
"""Name and size of the scheduler that I/O queues share."""

L1_MAL_WEIGHT = 0.05
"""Weight of a meter class beside a traced one on the L1 queue.

Such a class brings some 500 items per scrape, so about 40 of them fit a partition of 20,000; 1/20
leaves room to spare.
"""


def l1_aggregation(**overrides: Any) -> BatchQueueSettings:
    """Many classes, a handler each, and producers that must not wait: overload drops."""
    return _made(
        overrides,
        threads=L1_THREADS,
        partitions=PartitionPolicy.adaptive(),
        balancer=DrainBalancer.throughput_weighted(),
        rebalance_interval_ms=10_000,
        buffer_size=20_000,
        strategy=BufferStrategy.IF_POSSIBLE,
        min_idle_ms=1,
        max_idle_ms=50,
    )


def l2_persistence(**overrides: Any) -> BatchQueueSettings:
    """What L1 has merged, on its way to storage: nothing may be dropped any more."""
    return _made(
        overrides,
        threads=L2_THREADS,
        partitions=PartitionPolicy.adaptive(),
        balancer=DrainBalancer.throughput_weighted(),
        rebalance_interval_ms=10_000,
        buffer_size=2_000,
        strategy=BufferStrategy.BLOCKING,
        min_idle_ms=1,
        max_idle_ms=50,
    )


def topn_persistence(**overrides: Any) -> BatchQueueSettings:
    """Rankings of several classes, cheap enough for one thread."""
    return _made(
        overrides,
        threads=TOPN_THREADS,
        partitions=PartitionPolicy.adaptive(),
        buffer_size=1_000,
        strategy=BufferStrategy.BLOCKING,
        min_idle_ms=10,
        max_idle_ms=100,
    )


def remote_client(
    consumer: Consumer, *, channel_size: int = 1, **overrides: Any
) -> BatchQueueSettings:
    """One stream to one peer. The buffer is ``channel_size`` times ``buffer_size``."""
    buffer_size = channel_size * overrides.pop("buffer_size", 10_000)
    return _one_consumer(consumer, overrides, buffer_size=buffer_size, max_idle_ms=50)


def grpc_exporter(consumer: Consumer, **overrides: Any) -> BatchQueueSettings:
    """Metrics to a gRPC receiver: producers wait for a slow one."""
    return _one_consumer(consumer, overrides, buffer_size=20_000, max_idle_ms=200)


def kafka_exporter(consumer: Consumer, **overrides: Any) -> BatchQueueSettings:
    """Traces or logs to Kafka: when the broker is slow they are dropped, and counted."""
    return _one_consumer(
        consumer,
        overrides,
        buffer_size=20_000,
        max_idle_ms=200,
        strategy=BufferStrategy.IF_POSSIBLE,
    )


def jdbc_batch(consumer: Consumer, *, pool_size: int = 4, **overrides: Any) -> BatchQueueSettings:
    """Batches to a database over ``pool_size`` connections at once.

    All items are of one class, so they go round the partitions: by class they would all meet in
    one, and the other threads would have nothing to do. The consumer is called by all of them.
    """
    return _one_consumer(
        consumer,
        overrides,
        threads=ThreadPolicy.fixed(pool_size),
        partitions=PartitionPolicy.fixed(pool_size),
        selector=PartitionSelector.round_robin(),
        buffer_size=10_000,
        max_idle_ms=20,
    )


def on_io_pool(
    config: BatchQueueSettings, pool: tuple[str, ThreadPolicy] = IO_POOL
) -> BatchQueueSettings:
    """The same queue on a shared scheduler; to be created through a manager."""
    return dataclasses.replace(config, threads=None, shared_scheduler=pool)


def thread_plan(cores: int, *, l2: ThreadPolicy = L2_THREADS) -> dict[str, int]:
    """How many drain threads the pipeline's queues take on ``cores`` cores, I/O on its pool."""
    return {
        METRICS_L1_AGGREGATION: L1_THREADS.resolve(cores),
        METRICS_L2_PERSISTENCE: l2.resolve(cores),
        TOPN_PERSISTENCE: TOPN_THREADS.resolve(cores),
        IO_POOL[0]: IO_POOL[1].resolve(cores),
    }


def _one_consumer(
    consumer: Consumer, overrides: dict[str, Any], **defaults: Any
) -> BatchQueueSettings:
    base: dict[str, Any] = {
        "threads": ThreadPolicy.fixed(1),
        "partitions": PartitionPolicy.fixed(1),
        "strategy": BufferStrategy.BLOCKING,
        "min_idle_ms": 1,
        "consumer": consumer,
    }
    return _made(overrides, **(base | defaults))


def _made(overrides: dict[str, Any], **defaults: Any) -> BatchQueueSettings:
    return BatchQueueSettings(**(defaults | overrides))
