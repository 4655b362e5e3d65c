"""BatchQueueStats: what the numbers mean, and that they add up."""

from __future__ import annotations

import dataclasses
import pickle
import time
from collections.abc import Callable
from typing import Any

import pytest

from batchmill import (
    BatchQueueStats,
    BufferStrategy,
    PartitionPolicy,
    PartitionSelector,
    PartitionStats,
    ThreadPolicy,
)
from batchmill.queue.stats import DropCounts
from tests.kit.queues import Blue, Green, Recorder, Red, fill, make_queue, reds
from tests.kit.threads import WAIT_S, Gate
from tests.queue.kit import Idler, quiet


def partition(index: int, used: int, capacity: int = 100) -> PartitionStats:
    """A partition that is so full."""
    return PartitionStats(
        index=index, used=used, capacity=capacity, drained=0, refused=0, thread=0, classes=()
    )


def snapshot_of(*used: int, **counters: Any) -> BatchQueueStats:
    """A snapshot with partitions that are so full and with these counters."""
    values: dict[str, Any] = {
        field.name: 0 for field in dataclasses.fields(BatchQueueStats) if field.name != "dropped"
    }
    values |= {
        "name": "made",
        "running": True,
        "partitions": tuple(partition(index, count) for index, count in enumerate(used)),
        "threads": (),
        "dropped": DropCounts(unregistered=counters.pop("unregistered", 0)),
    }
    return BatchQueueStats(**(values | counters))


def test_capacity_is_that_of_all_partitions() -> None:
    """Capacity and use are added up over the partitions."""
    stats = snapshot_of(10, 0, 5)
    assert (stats.capacity, stats.total_used) == (300, 15)


def test_used_percentage_is_of_the_whole() -> None:
    """30 items where 300 fit are 10 per cent."""
    assert snapshot_of(30, 0, 0).used_percentage == 10.0


def test_partition_used_percentage_is_its_own() -> None:
    """30 items where 120 fit are 25 per cent of that partition."""
    assert partition(0, used=30, capacity=120).used_percentage == 25.0


def test_top_n_has_the_fullest_first() -> None:
    """top_n(2) is the two fullest partitions, fullest first."""
    assert [p.index for p in snapshot_of(5, 50, 0, 7).top_n(2)] == [1, 3]


def test_top_n_keeps_the_order_of_equals() -> None:
    """Equally full partitions come in the order of their numbers."""
    assert [p.index for p in snapshot_of(5, 5, 9, 5).top_n(3)] == [2, 0, 1]


@pytest.mark.parametrize(("count", "length"), [(0, 0), (-1, 0), (3, 3), (99, 3)])
def test_top_n_has_no_more_than_there_are(count: int, length: int) -> None:
    """Asked for more partitions than there are, top_n() has all; for none or less, none."""
    assert len(snapshot_of(1, 2, 3).top_n(count)) == length


def test_pending_is_what_is_not_finished() -> None:
    """Pending is accepted less consumed, failed and dropped for want of a handler."""
    stats = snapshot_of(6, accepted=20, consumed=5, failed=3, unregistered=2)
    assert (stats.pending, stats.in_handlers) == (10, 4)


def test_snapshot_is_frozen() -> None:
    """A snapshot cannot be changed."""
    with pytest.raises(dataclasses.FrozenInstanceError):
        snapshot_of(1).accepted = 3  # type: ignore[misc]


def test_drops_are_read_only() -> None:
    """Nor can the drop reasons in it."""
    with pytest.raises(TypeError):
        snapshot_of(1).dropped["full"] = 3  # type: ignore[index]


@pytest.mark.parametrize(
    "copy",
    [dataclasses.asdict, lambda stats: pickle.loads(pickle.dumps(stats))],
    ids=["asdict", "pickle"],
)
def test_snapshot_can_be_passed_on(copy: Callable[[BatchQueueStats], object]) -> None:
    """A snapshot is plain data: it becomes a dict (for JSON), and crosses processes."""
    assert copy(snapshot_of(1))


def test_snapshot_does_not_follow_the_queue() -> None:
    """What happens after stats() was called does not show in it."""
    with make_queue(consumer=Recorder()) as queue:
        before = queue.stats()
        queue.produce(Red())
        assert queue.flush(WAIT_S)
    assert (before.accepted, before.running) == (0, True)


def test_new_queue_has_counted_nothing() -> None:
    """All counters start at zero, under every reason."""
    with make_queue() as queue:
        stats = queue.stats()
    assert (stats.accepted, stats.consumed, stats.failed, stats.pending) == (0, 0, 0, 0)
    assert dict(stats.dropped) == {"full": 0, "stopped": 0, "unregistered": 0}


def test_name_is_the_queues() -> None:
    """A snapshot says whose it is."""
    with make_queue("whose") as queue:
        assert queue.stats().name == "whose"


def test_running_ends_with_shutdown() -> None:
    """A snapshot of a queue that was shut down says so."""
    with make_queue() as queue:
        queue.shutdown()
        assert not queue.stats().running


def test_consumed_counts_items_not_batches() -> None:
    """Items whose handler returned are counted one by one."""
    with make_queue(consumer=Recorder()) as queue:
        queue.produce_many(reds(7))
        assert queue.flush(WAIT_S)
        assert queue.stats().consumed == 7


def test_failed_counts_the_whole_batch() -> None:
    """Items whose handler raised are failed, all of the batch, and not consumed."""

    def refuse(batch: list[Any]) -> None:
        raise ValueError("no")

    with make_queue(consumer=refuse, error_handler=lambda batch, error: None) as queue:
        queue.produce_many(reds(7))
        assert queue.flush(WAIT_S)
        stats = queue.stats()
    assert (stats.failed, stats.consumed) == (7, 0)


def test_full_counts_what_was_turned_away() -> None:
    """Each item that found no room is counted as dropped for being full."""
    gate = Gate()
    with make_queue(consumer=gate, buffer_size=3, strategy=BufferStrategy.IF_POSSIBLE) as queue:
        queue.produce(Red())
        gate.wait_entered()
        assert [queue.produce(item) for item in reds(5)].count(False) == 2
        assert queue.stats().dropped["full"] == 2


def test_stopped_counts_what_came_too_late() -> None:
    """Each item offered after shutdown is counted as dropped for being late."""
    with make_queue(consumer=Recorder()) as queue:
        queue.shutdown()
        queue.produce(Red())
        queue.produce_many(reds(3))
        assert queue.stats().dropped["stopped"] == 4


def test_refused_is_counted_where_it_happened() -> None:
    """A partition counts the items that it, and no other, turned away."""
    gate = Gate()
    with make_queue(
        consumer=gate,
        buffer_size=2,
        strategy=BufferStrategy.IF_POSSIBLE,
        partitions=PartitionPolicy.fixed(3),
        selector=lambda item, count: item.number,
    ) as queue:
        queue.produce(Red(0))
        gate.wait_entered()
        for _ in range(5):
            queue.produce(Red(1))
        assert [p.refused for p in queue.stats().partitions] == [0, 3, 0]


def test_used_is_what_waits() -> None:
    """Items in a partition are used; those a handler has are in_handlers; both are pending."""
    gate = Gate()
    with make_queue(consumer=gate, buffer_size=10) as queue:
        queue.produce(Red())
        gate.wait_entered()
        queue.produce_many(reds(4))
        stats = queue.stats()
    assert (stats.total_used, stats.in_handlers, stats.pending) == (4, 1, 5)


def test_full_queue_is_at_100_per_cent() -> None:
    """A partition with no room left is used to 100 per cent."""
    gate = Gate()
    with make_queue(consumer=gate, buffer_size=5) as queue:
        queue.produce(Red())
        gate.wait_entered()
        fill(queue)
        assert queue.stats().used_percentage == 100.0


def test_capacity_grows_with_the_partitions() -> None:
    """Capacity is buffer_size times the partitions there are now."""
    with make_queue(buffer_size=5, partitions=PartitionPolicy.adaptive()) as queue:
        for cls in (Red, Green, Blue):
            queue.add_handler(cls, print)
        assert queue.stats().capacity == 15


def test_partition_names_its_classes() -> None:
    """A partition lists the classes that go there, registered or just seen."""
    with make_queue() as queue:
        queue.add_handler(Red, print)
        queue.produce(Green())
        assert queue.stats().partitions[0].classes == (Red, Green)


def test_partitions_name_their_threads() -> None:
    """Each partition says which thread serves it: dealt out in turn at first."""
    with make_queue(threads=ThreadPolicy.fixed(2), partitions=PartitionPolicy.fixed(5)) as queue:
        assert [p.thread for p in queue.stats().partitions] == [0, 1, 0, 1, 0]


def test_thread_load_counts_what_each_thread_handed_over() -> None:
    """Items are counted on the thread that took them to their handler."""
    with make_queue(
        consumer=Recorder(),
        threads=ThreadPolicy.fixed(2),
        partitions=PartitionPolicy.fixed(2),
        selector=lambda item, count: item.number,
    ) as queue:
        queue.produce_many([Red(0), Red(1), Red(1)])
        queue.shutdown()
        assert [thread.items for thread in queue.stats().threads] == [1, 2]


def test_busy_seconds_is_the_time_in_handlers() -> None:
    """A thread whose handler took a while was busy for that while, and the other was not."""
    took: list[float] = []

    def tarry(batch: list[Any]) -> None:
        started = time.monotonic()
        while time.monotonic() - started <= 0.001:
            pass
        took.append(time.monotonic() - started)

    with make_queue(
        consumer=tarry,
        threads=ThreadPolicy.fixed(2),
        partitions=PartitionPolicy.fixed(2),
        selector=lambda item, count: 1,
    ) as queue:
        queue.produce(Red())
        queue.shutdown()
        idle, busy = queue.stats().threads
    assert idle.busy_seconds == 0
    assert busy.busy_seconds >= took[0]


def test_flush_cycles_count_cycles_with_work() -> None:
    """Four batches for one lane are four cycles that handed something over."""
    gate = Gate()
    with make_queue(consumer=gate, max_batch=10) as queue:
        queue.produce(Red())
        gate.wait_entered()
        queue.produce_many(reds(30))
        gate.open()
        queue.shutdown()
        assert queue.stats().flush_cycles == 4


def test_idle_cycles_count_cycles_without() -> None:
    """A queue that was never given anything has idle cycles only."""
    handler = Idler()
    with make_queue() as queue:
        queue.add_handler(Red, handler)
        handler.wait_idle()
        stats = queue.stats()
    assert (stats.flush_cycles, stats.idle_cycles > 0) == (0, True)


def test_counters_survive_shutdown() -> None:
    """After shutdown the counters are still there, and balance."""
    with make_queue(consumer=Recorder()) as queue:
        queue.produce_many(reds(100))
        queue.shutdown()
        stats = queue.stats()
    assert stats.consumed == 100
    assert quiet(stats)


def test_counters_balance_with_every_fate() -> None:
    """accepted = consumed + failed + unregistered, with items of each kind and some refused."""

    def refuse(batch: list[Any]) -> None:
        raise ValueError("no")

    with make_queue(
        threads=ThreadPolicy.fixed(2),
        partitions=PartitionPolicy.fixed(4),
        selector=PartitionSelector.round_robin(),
        buffer_size=5,
        strategy=BufferStrategy.IF_POSSIBLE,
        error_handler=lambda batch, error: None,
    ) as queue:
        queue.add_handler(Red, Recorder())
        queue.add_handler(Green, refuse)
        accepted = sum(
            queue.produce(cls(number)) for number in range(500) for cls in (Red, Green, Blue)
        )
        queue.shutdown()
        late = sum(queue.produce(Red()) for _ in range(3))
        stats = queue.stats()
    assert late == 0
    assert (stats.accepted, stats.dropped["stopped"]) == (accepted, 3)
    assert stats.dropped["full"] == 1500 - accepted
    assert quiet(stats)
