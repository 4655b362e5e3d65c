"""The presets: each queue of the seeds' usage table, with its figures."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest

from batchmill import (
    BatchQueue,
    BatchQueueManager,
    BatchQueueSettings,
    BufferStrategy,
    ConfigError,
    PartitionPolicy,
    ThreadPolicy,
    presets,
)
from batchmill.queue.strategies import RoundRobin, ThroughputWeighted, TypeHash
from tests.kit.queues import Green, Recorder, Red, reds
from tests.kit.threads import WAIT_S

BLOCKING, IF_POSSIBLE = BufferStrategy.BLOCKING, BufferStrategy.IF_POSSIBLE
ONE_THREAD, ONE_PARTITION = ThreadPolicy.fixed(1), PartitionPolicy.fixed(1)
ADAPTIVE = PartitionPolicy.adaptive()

CONSUMER = Recorder()
PRESETS: dict[str, BatchQueueSettings] = {
    "l1_aggregation": presets.l1_aggregation(),
    "l2_persistence": presets.l2_persistence(),
    "topn_persistence": presets.topn_persistence(),
    "remote_client": presets.remote_client(CONSUMER),
    "grpc_exporter": presets.grpc_exporter(CONSUMER),
    "kafka_exporter": presets.kafka_exporter(CONSUMER),
    "jdbc_batch": presets.jdbc_batch(CONSUMER),
}

# threads, partitions, buffer size, strategy, shortest and longest idle time
FIGURES: dict[str, tuple[ThreadPolicy, PartitionPolicy, int, BufferStrategy, float, float]] = {
    "l1_aggregation": (ThreadPolicy.cpu_cores(1.0), ADAPTIVE, 20_000, IF_POSSIBLE, 1, 50),
    "l2_persistence": (
        ThreadPolicy.cpu_cores_with_base(1, 0.25),
        ADAPTIVE,
        2_000,
        BLOCKING,
        1,
        50,
    ),
    "topn_persistence": (ONE_THREAD, ADAPTIVE, 1_000, BLOCKING, 10, 100),
    "remote_client": (ONE_THREAD, ONE_PARTITION, 10_000, BLOCKING, 1, 50),
    "grpc_exporter": (ONE_THREAD, ONE_PARTITION, 20_000, BLOCKING, 1, 200),
    "kafka_exporter": (ONE_THREAD, ONE_PARTITION, 20_000, IF_POSSIBLE, 1, 200),
    "jdbc_batch": (ThreadPolicy.fixed(4), PartitionPolicy.fixed(4), 10_000, BLOCKING, 1, 20),
}
WITH_CONSUMER = {"remote_client", "grpc_exporter", "kafka_exporter", "jdbc_batch"}
REBALANCED = {"l1_aggregation", "l2_persistence"}

# Seed 000: cores, then the threads of L1, L2, TopN and the I/O pool, then all of them.
THREAD_TABLE = [
    (2, (2, 1, 1, 1), 5),
    (4, (4, 1, 1, 2), 8),
    (8, (8, 2, 1, 4), 15),
    (16, (16, 4, 1, 8), 29),
]

each_preset = pytest.mark.parametrize("name", PRESETS)


@each_preset
def test_figures_are_the_seeds(name: str) -> None:
    """Threads, partitions, buffer, strategy and idle times are those of the usage table."""
    config = PRESETS[name]
    assert FIGURES[name] == (
        config.threads,
        config.partitions,
        config.buffer_size,
        config.strategy,
        config.min_idle_ms,
        config.max_idle_ms,
    )


@each_preset
def test_mode_is_the_seeds(name: str) -> None:
    """I/O queues have the one consumer that was given; the others have a handler per class."""
    assert PRESETS[name].consumer is (CONSUMER if name in WITH_CONSUMER else None)


@each_preset
def test_balancer_is_the_seeds(name: str) -> None:
    """The metrics queues are rebalanced by throughput; the others have nothing to balance."""
    assert isinstance(PRESETS[name].balancer, ThroughputWeighted) == (name in REBALANCED)


@pytest.mark.parametrize("name", sorted(REBALANCED))
def test_rebalance_interval_is_the_seeds(name: str) -> None:
    """Rebalancing is looked at every ten seconds."""
    assert PRESETS[name].rebalance_interval_ms == 10_000


@each_preset
def test_selector_goes_by_class_but_for_jdbc(name: str) -> None:
    """JDBC items are all of one class, so they go round; the others go by class."""
    wanted = RoundRobin if name == "jdbc_batch" else TypeHash
    assert isinstance(PRESETS[name].selector, wanted)


def test_remote_buffer_is_channels_times_buffer() -> None:
    """A remote client's buffer is its channels times the buffer of each."""
    config = presets.remote_client(CONSUMER, channel_size=3, buffer_size=500)
    assert config.buffer_size == 1_500


def test_jdbc_pool_size_sets_threads_and_partitions() -> None:
    """A pool of seven connections is seven threads with a partition each."""
    config = presets.jdbc_batch(CONSUMER, pool_size=7)
    assert (config.threads, config.partitions) == (ThreadPolicy.fixed(7), PartitionPolicy.fixed(7))


def test_jdbc_keeps_all_connections_busy() -> None:
    """Items of one class reach the consumer on all four threads at once."""
    together = threading.Barrier(4)

    class Writer:
        def consume(self, batch: list[Any]) -> None:
            together.wait(WAIT_S)  # returns when four threads are here

    with BatchQueue[Any]("jdbc", presets.jdbc_batch(Writer(), max_batch=1)) as queue:
        queue.produce_many(reds(4))
        assert queue.flush(WAIT_S)
        assert queue.stats().consumed == 4


@pytest.mark.parametrize(
    "make",
    [
        presets.l1_aggregation,
        presets.l2_persistence,
        presets.topn_persistence,
        lambda **changes: presets.remote_client(CONSUMER, **changes),
        lambda **changes: presets.grpc_exporter(CONSUMER, **changes),
        lambda **changes: presets.kafka_exporter(CONSUMER, **changes),
        lambda **changes: presets.jdbc_batch(CONSUMER, **changes),
    ],
    ids=PRESETS,
)
def test_any_field_can_be_changed(make: Callable[..., BatchQueueSettings]) -> None:
    """A field that is passed replaces the preset's, defaults and figures alike."""
    config = make(buffer_size=77, max_batch=5, max_idle_ms=1_000)
    assert (config.buffer_size, config.max_batch, config.max_idle_ms) == (77, 5, 1_000)


def test_bad_change_is_refused() -> None:
    """What is passed is checked like any other setting."""
    with pytest.raises(ConfigError, match="buffer_size=0 "):
        presets.l1_aggregation(buffer_size=0)


def test_presets_do_not_share_selectors() -> None:
    """Two JDBC queues each go round on their own."""
    one, other = presets.jdbc_batch(CONSUMER), presets.jdbc_batch(CONSUMER)
    assert one.selector is not other.selector


@pytest.mark.parametrize("name", sorted(set(PRESETS) - WITH_CONSUMER))
def test_handler_preset_runs(name: str) -> None:
    """A queue made from the preset takes items of two classes to their handlers."""
    red, green = Recorder(), Recorder()
    with BatchQueue[Any](name, PRESETS[name]) as queue:
        queue.add_handler(Red, red)
        queue.add_handler(Green, green)
        queue.produce_many([Red(1), Green(2), Red(3)])
        assert queue.flush(WAIT_S)
    assert (red.items, green.items) == ([Red(1), Red(3)], [Green(2)])


def test_on_io_pool_moves_a_queue_to_the_pool() -> None:
    """The same settings, but on the shared scheduler, and with no thread of its own."""
    own = presets.grpc_exporter(CONSUMER)
    pooled = presets.on_io_pool(own)
    assert (pooled.threads, pooled.shared_scheduler) == (None, presets.IO_POOL)
    assert (pooled.buffer_size, pooled.max_idle_ms) == (own.buffer_size, own.max_idle_ms)


def test_io_queues_share_the_pools_threads() -> None:
    """Six I/O queues on the pool run on its threads and no others."""
    pool = ("io", ThreadPolicy.fixed(2))
    before = set(threading.enumerate())
    manager = BatchQueueManager()
    consumers = [Recorder() for _ in range(6)]
    for index, consumer in enumerate(consumers):
        config = presets.on_io_pool(presets.remote_client(consumer), pool)
        manager.create(f"peer{index}", config).produce(Red(index))
    started = [thread.name for thread in set(threading.enumerate()) - before]
    assert manager.shutdown_all()
    assert sorted(started) == ["batchmill-io-0", "batchmill-io-1"]
    assert [consumer.items for consumer in consumers] == [[Red(index)] for index in range(6)]


@pytest.mark.parametrize(("cores", "threads", "total"), THREAD_TABLE)
def test_thread_table_of_the_first_seed(cores: int, threads: tuple[int, ...], total: int) -> None:
    """With L2 at a quarter of the cores, the threads are those of seed 000's table."""
    plan = presets.thread_plan(cores, l2=ThreadPolicy.cpu_cores(0.25))
    assert tuple(plan.values()) == threads
    assert sum(plan.values()) == total


@pytest.mark.parametrize(("cores", "l2"), [(2, 2), (4, 2), (8, 3), (16, 5)])
def test_thread_plan_follows_the_newest_seed(cores: int, l2: int) -> None:
    """As the newest seed has L2, it takes one thread and one more per four cores."""
    assert presets.thread_plan(cores)[presets.METRICS_L2_PERSISTENCE] == l2


def test_thread_plan_is_by_queue() -> None:
    """The plan names the queues as the seeds do."""
    names = ["METRICS_L1_AGGREGATION", "METRICS_L2_PERSISTENCE", "TOPN_PERSISTENCE", "IO_POOL"]
    assert list(presets.thread_plan(8)) == names


def test_meter_weight_makes_the_seeds_partitions() -> None:
    """642 traced and 1247 metered classes take 452 partitions on 8 threads of the L1 preset."""
    weight = 642 + 1247 * presets.L1_MAL_WEIGHT
    assert presets.l1_aggregation().partitions.resolve(8, weight) == 452
