"""produce_many(): in order, none skipped, and each one counted."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest

from batchmill import (
    BatchQueue,
    BufferStrategy,
    PartitionPolicy,
    PartitionSelector,
    ThreadPolicy,
)
from tests.kit.queues import Green, Recorder, Red, make_queue, reds
from tests.kit.threads import WAIT_S, Gate, spawn
from tests.queue.kit import Waiters, make_classes, parked

IF_POSSIBLE = BufferStrategy.IF_POSSIBLE

both_strategies = pytest.mark.parametrize("strategy", BufferStrategy, ids=lambda s: s.name)


def hold(queue: BatchQueue[Any], gate: Gate) -> None:
    """Have the drain thread sit in the gate with one item, so that nothing else is drained."""
    queue.produce(Red(-1))
    gate.wait_entered()


@pytest.mark.parametrize(
    "wrap", [list, tuple, iter, dict.fromkeys], ids=["list", "tuple", "iterator", "dict keys"]
)
def test_produce_many_takes_any_iterable(wrap: Callable[[list[Red]], Iterable[Red]]) -> None:
    """Items may come from anything that can be gone through, in its order."""
    recorder = Recorder()
    with make_queue(consumer=recorder) as queue:
        assert queue.produce_many(wrap(reds(20))) == 20
    assert recorder.items == reds(20)


def test_produce_many_of_nothing() -> None:
    """No items, none accepted, nothing counted."""
    with make_queue(consumer=Recorder()) as queue:
        assert queue.produce_many([]) == 0
        assert queue.stats().accepted == 0


def test_produce_many_does_not_keep_the_list() -> None:
    """The caller's list is the caller's: what happens to it afterwards does not reach the queue."""
    gate = Gate()
    items = reds(5)
    with make_queue(consumer=gate) as queue:
        hold(queue, gate)
        queue.produce_many(items)
        items.clear()
    assert gate.items[1:] == reds(5)


def test_produce_many_waits_until_all_are_in() -> None:
    """BLOCKING: more items than fit go in as room comes, all of them, in order."""
    recorder = Recorder()
    with make_queue(consumer=recorder, buffer_size=7) as queue:
        assert queue.produce_many(reds(1000)) == 1000
    assert recorder.items == reds(1000)


@both_strategies
def test_produce_many_accepts_the_first(strategy: BufferStrategy) -> None:
    """Of more items than fit, the first ones are accepted and their number is the answer."""
    gate = Gate()
    with make_queue(consumer=gate, buffer_size=10, strategy=strategy) as queue:
        hold(queue, gate)
        assert queue.produce_many(reds(15), timeout=0) == 10
    assert gate.items[1:] == reds(10)


def test_produce_many_counts_each_item_it_did_not_accept() -> None:
    """The five of fifteen that found no room are five drops."""
    gate = Gate()
    with make_queue(consumer=gate, buffer_size=10, strategy=IF_POSSIBLE) as queue:
        hold(queue, gate)
        queue.produce_many(reds(15))
        assert queue.stats().dropped["full"] == 5


@pytest.mark.parametrize("run", [1, 3, 20], ids=["alternating", "short runs", "long runs"])
def test_produce_many_keeps_the_order_of_each_class(run: int) -> None:
    """Classes may be mixed in any way: each handler gets its own, all of them, in order."""
    red, green = Recorder(), Recorder()
    mixed = [(Red, Green)[number // run % 2](number) for number in range(200)]
    with make_queue(buffer_size=7) as queue:
        queue.add_handler(Red, red)
        queue.add_handler(Green, green)
        assert queue.produce_many(mixed) == 200
    assert red.items == [item for item in mixed if type(item) is Red]
    assert green.items == [item for item in mixed if type(item) is Green]


@pytest.mark.parametrize("run", [1, 20], ids=["alternating", "long runs"])
def test_produce_many_stops_at_the_first_refused(run: int) -> None:
    """Nothing after a refused item is accepted, though another class would have room."""
    gate, green = Gate(), Recorder()
    mixed = [(Red, Green)[number // run % 2](number) for number in range(200)]
    with make_queue(buffer_size=30, partitions=PartitionPolicy.fixed(2)) as queue:
        queue.add_handler(Red, gate)
        queue.add_handler(Green, green)
        hold(queue, gate)
        accepted = queue.produce_many(mixed, timeout=0)
        gate.open()
        assert queue.flush(WAIT_S)
    assert sorted(gate.items[1:] + green.items, key=lambda item: item.number) == mixed[:accepted]
    assert accepted < 200


@pytest.mark.parametrize("run", [1, 20], ids=["alternating", "long runs"])
def test_produce_many_counts_what_it_never_tried(run: int) -> None:
    """Every item after the first refused one is a drop too: accepted + dropped = offered."""
    gate = Gate()
    mixed = [(Red, Green)[number // run % 2](number) for number in range(200)]
    with make_queue(buffer_size=30, strategy=IF_POSSIBLE) as queue:
        queue.add_handler(Red, gate)
        hold(queue, gate)
        accepted = queue.produce_many(mixed)
        assert accepted + queue.stats().dropped["full"] == 200


def test_produce_many_through_a_selector_keeps_order() -> None:
    """Where a selector decides, items of one key are consumed in order, none missing."""
    recorder = Recorder()
    selector = PartitionSelector.key_hash(lambda item: item.number % 5)
    with make_queue(partitions=PartitionPolicy.fixed(4), selector=selector, buffer_size=9) as queue:
        queue.add_handler(Red, recorder)
        assert queue.produce_many(reds(300)) == 300
    for key in range(5):
        numbers = [item.number for item in recorder.items if item.number % 5 == key]
        assert numbers == list(range(key, 300, 5))


def test_produce_many_ends_with_shutdown(monkeypatch: pytest.MonkeyPatch) -> None:
    """A shutdown while it waits ends it: the answer is what got in, and that is consumed."""
    waiters = Waiters(monkeypatch)
    gate = Gate()
    with make_queue(consumer=gate, buffer_size=3) as queue:
        hold(queue, gate)
        blocked = spawn(queue.produce_many, reds(10))
        waiters.wait_for_one()
        queue._core.begin_close()
        assert blocked.result(WAIT_S) == 3
        gate.open()
        assert queue.shutdown()
        assert queue.stats().dropped["stopped"] == 7
    assert gate.items[1:] == reds(3)


def test_mixed_items_reach_a_direct_consumer_in_order() -> None:
    """One consumer for all classes gets them as they were produced."""
    recorder = Recorder()
    mixed = [(Red, Green)[number % 3 % 2](number) for number in range(500)]
    with make_queue(consumer=recorder, buffer_size=70) as queue:
        assert queue.produce_many(mixed) == 500
    assert recorder.items == mixed


def test_mixed_items_of_classes_that_nobody_registered() -> None:
    """They are accepted, and counted when they are drained; the others are consumed."""
    recorder = Recorder()
    strangers = [cls() for cls in make_classes(20)]
    with make_queue(partitions=PartitionPolicy.fixed(3)) as queue:
        queue.add_handler(Red, recorder)
        assert queue.produce_many([*strangers, *reds(5), *strangers]) == 45
        assert queue.flush(WAIT_S)
        assert queue.stats().dropped["unregistered"] == 40
    assert recorder.items == reds(5)


def test_mixed_items_wake_every_drain_thread() -> None:
    """Items for sleeping partitions of several threads are all consumed, without another put."""
    classes = make_classes(8)
    recorders = {cls: Recorder() for cls in classes}
    with make_queue(threads=ThreadPolicy.fixed(4), partitions=PartitionPolicy.fixed(8)) as queue:
        for cls, recorder in recorders.items():
            queue.add_handler(cls, recorder)
        for _ in range(20):
            parked(queue)
            queue.produce_many([cls() for cls in classes])
        for recorder in recorders.values():
            assert len(recorder.wait_for(20)) == 20
