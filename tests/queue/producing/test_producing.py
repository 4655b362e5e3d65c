"""Producing: what is accepted, what is refused, who waits, and for how long."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest

from batchmill import (
    BatchQueue,
    BufferStrategy,
    PartitionPolicy,
    ThreadPolicy,
)
from tests.kit.queues import Blue, Green, Recorder, Red, fill, make_queue, reds
from tests.kit.threads import WAIT_S, Gate, spawn
from tests.queue.kit import Waiters, quiet

IF_POSSIBLE = BufferStrategy.IF_POSSIBLE

both_strategies = pytest.mark.parametrize("strategy", BufferStrategy, ids=lambda s: s.name)


def hold(queue: BatchQueue[Any], gate: Gate) -> None:
    """Have the drain thread sit in the gate with one item, so that nothing else is drained."""
    queue.produce(Red(-1))
    gate.wait_entered()


@both_strategies
@pytest.mark.parametrize("size", [1, 2, 3, 7, 100, 5000])
def test_partition_holds_exactly_buffer_size(strategy: BufferStrategy, size: int) -> None:
    """Exactly buffer_size items are accepted, not one less and not one more."""
    gate = Gate()
    with make_queue(consumer=gate, buffer_size=size, strategy=strategy) as queue:
        hold(queue, gate)
        assert fill(queue) == size


@both_strategies
def test_partition_holds_exactly_buffer_size_of_produce_many(strategy: BufferStrategy) -> None:
    """The bound is the same however items come."""
    gate = Gate()
    with make_queue(consumer=gate, buffer_size=50, strategy=strategy) as queue:
        hold(queue, gate)
        queue.produce(Red())
        assert queue.produce_many(reds(100), timeout=0) == 49


@both_strategies
def test_bound_is_exact_with_many_producers(strategy: BufferStrategy) -> None:
    """Eight producers at once, by every road in, get exactly buffer_size items in between them."""
    gate = Gate()
    together = threading.Barrier(8)

    def produce(index: int) -> int:
        together.wait(WAIT_S)
        if index % 2:
            return sum(queue.produce_many(reds(7), timeout=0) for _ in range(30))
        return sum(queue.produce(item, timeout=0) for item in reds(200))

    with make_queue(consumer=gate, buffer_size=500, strategy=strategy) as queue:
        hold(queue, gate)
        producers = [spawn(produce, index) for index in range(8)]
        accepted = sum(producer.result(WAIT_S) for producer in producers)
        assert accepted == 500
        assert queue.stats().total_used == 500


def test_bound_holds_while_draining() -> None:
    """Producers that wait and a handler that drains: never more than buffer_size in there."""
    together = threading.Barrier(4)
    seen: list[int] = []

    def look(batch: list[Any]) -> None:
        seen.append(queue.stats().partitions[0].used)

    def produce() -> int:
        together.wait(WAIT_S)
        return sum(queue.produce(item) for item in reds(500))

    with make_queue(consumer=look, buffer_size=5) as queue:
        producers = [spawn(produce) for _ in range(4)]
        assert sum(producer.result(WAIT_S) for producer in producers) == 2000
    assert max(seen) <= 5


def test_bound_is_shared_by_the_classes_of_a_partition() -> None:
    """Several classes in one partition have its slots in common."""
    gate = Gate()
    with make_queue(buffer_size=10) as queue:
        queue.add_handler(Red, gate)
        hold(queue, gate)
        accepted = sum(
            queue.produce(cls(), timeout=0) for _ in range(10) for cls in (Red, Green, Blue)
        )
        assert accepted == 10


def test_bound_is_each_partitions_own() -> None:
    """A full partition leaves the others' slots alone."""
    gate = Gate()
    with make_queue(buffer_size=10, partitions=PartitionPolicy.fixed(2)) as queue:
        queue.add_handler(Red, gate)
        queue.add_handler(Green, Recorder())
        hold(queue, gate)
        assert (fill(queue, Red), fill(queue, Green)) == (10, 10)


def test_slots_come_back() -> None:
    """What was drained makes room: a queue of 5 passes 1000 items, in order."""
    recorder = Recorder()
    with make_queue(consumer=recorder, buffer_size=5) as queue:
        assert all(queue.produce(item) for item in reds(1000))
    assert recorder.items == reds(1000)


def test_produce_waits_for_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """BLOCKING: a producer on a full partition waits until something was drained, then is in."""
    waiters = Waiters(monkeypatch)
    gate = Gate()
    with make_queue(consumer=gate, buffer_size=3) as queue:
        hold(queue, gate)
        fill(queue)
        blocked = spawn(queue.produce, Red(99))
        waiters.wait_for_one()
        assert not blocked.done()
        gate.open()
        assert blocked.result(WAIT_S) is True
    assert gate.items[-1] == Red(99)


def test_all_that_wait_get_in(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ten producers wait on a partition of two: each gets its turn."""
    waiters = Waiters(monkeypatch)
    gate = Gate()
    with make_queue(consumer=gate, buffer_size=2) as queue:
        hold(queue, gate)
        fill(queue)
        blocked = [spawn(queue.produce, Red(100 + index)) for index in range(10)]
        for _ in blocked:
            waiters.wait_for_one()
        gate.open()
        assert [producer.result(WAIT_S) for producer in blocked] == [True] * 10
    assert {item.number for item in gate.items} >= set(range(100, 110))


@both_strategies
def test_timeout_zero_never_waits(
    strategy: BufferStrategy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """timeout=0 answers False on a full partition without waiting at all."""
    waiters = Waiters(monkeypatch)
    gate = Gate()
    with make_queue(consumer=gate, buffer_size=3, strategy=strategy) as queue:
        hold(queue, gate)
        fill(queue)
        assert queue.produce(Red(), timeout=0) is False
    assert waiters.seen == []


@both_strategies
@pytest.mark.parametrize("timeout", [0, -1, 0.001])
def test_timeout_zero_takes_a_free_slot(strategy: BufferStrategy, timeout: float) -> None:
    """A timeout, also none at all, is about waiting only: where there is room, in it goes."""
    gate = Gate()
    with make_queue(consumer=gate, buffer_size=3, strategy=strategy) as queue:
        hold(queue, gate)
        assert queue.produce(Red(), timeout=timeout) is True


@both_strategies
@pytest.mark.parametrize("many", [False, True], ids=["produce", "produce_many"])
def test_timeout_is_waited_out(strategy: BufferStrategy, many: bool) -> None:
    """Where no room comes, a producer waits for its timeout, not less, and is refused."""
    gate = Gate()
    with make_queue(consumer=gate, buffer_size=3, strategy=strategy) as queue:
        hold(queue, gate)
        fill(queue)
        started = time.monotonic()
        accepted = (
            queue.produce_many(reds(2), timeout=0.02)
            if many
            else queue.produce(Red(), timeout=0.02)
        )
        assert time.monotonic() - started >= 0.02
        assert accepted == 0


@both_strategies
def test_timeout_ends_when_room_comes(
    strategy: BufferStrategy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A producer with a timeout is let in as soon as there is room, under either strategy."""
    waiters = Waiters(monkeypatch)
    gate = Gate()
    with make_queue(consumer=gate, buffer_size=3, strategy=strategy) as queue:
        hold(queue, gate)
        fill(queue)
        blocked = spawn(queue.produce, Red(99), 600.0)
        waiters.wait_for_one()
        gate.open()
        assert blocked.result(WAIT_S) is True


def test_if_possible_refuses_what_does_not_fit() -> None:
    """IF_POSSIBLE: a full partition answers False, though nothing is ever drained."""
    gate = Gate()
    with make_queue(consumer=gate, buffer_size=3, strategy=IF_POSSIBLE) as queue:
        hold(queue, gate)
        fill(queue)
        assert queue.produce(Red()) is False


def test_if_possible_does_not_wait_for_a_queue_that_stands_still(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Once refused, and with nothing drained since, the next is refused without any grace."""
    waiters = Waiters(monkeypatch)
    gate = Gate()
    with make_queue(consumer=gate, buffer_size=3, strategy=IF_POSSIBLE) as queue:
        hold(queue, gate)
        fill(queue)
        assert [queue.produce(Red()) for _ in range(3)] == [False] * 3
    assert waiters.seen == []  # fill() was refused once, and nothing has moved since


def test_refused_item_is_not_in_the_queue() -> None:
    """An item for which the answer was False is never consumed."""
    gate = Gate()
    with make_queue(consumer=gate, buffer_size=3, strategy=IF_POSSIBLE) as queue:
        hold(queue, gate)
        fill(queue)
        assert queue.produce(Red(99)) is False
    assert Red(99) not in gate.items


def test_timed_out_item_is_not_in_the_queue() -> None:
    """Nor is one whose producer gave up waiting, though there is room afterwards."""
    gate = Gate()
    with make_queue(consumer=gate, buffer_size=3) as queue:
        hold(queue, gate)
        fill(queue)
        assert queue.produce(Red(99), timeout=0.001) is False
    assert Red(99) not in gate.items


def test_producer_that_gave_up_leaves_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that timed out does not swallow the wake of the one behind it."""
    waiters = Waiters(monkeypatch)
    gate = Gate()
    with make_queue(consumer=gate, buffer_size=1, max_batch=1) as queue:
        hold(queue, gate)
        fill(queue)
        impatient = spawn(queue.produce, Red(1), 0.01)
        waiters.wait_for_one()
        patient = spawn(queue.produce, Red(2))
        waiters.wait_for_one()
        assert impatient.result(WAIT_S) is False
        gate.open()
        assert patient.result(WAIT_S) is True


def test_produce_after_shutdown_is_refused() -> None:
    """A queue that was shut down answers False, and the item is not consumed."""
    recorder = Recorder()
    with make_queue(consumer=recorder) as queue:
        queue.shutdown()
        assert queue.produce(Red()) is False
        assert queue.produce_many(reds(3)) == 0
    assert recorder.items == []


@both_strategies
def test_counters_balance_after_a_rush(strategy: BufferStrategy) -> None:
    """Four producers, three fates: accepted = consumed + failed + unregistered, to the item."""
    together = threading.Barrier(4)
    reports: list[int] = []

    def refuse(batch: list[Any]) -> None:
        raise ValueError("no")

    def produce() -> int:
        together.wait(WAIT_S)
        return sum(
            queue.produce(cls(number)) for number in range(200) for cls in (Red, Green, Blue)
        )

    with make_queue(
        threads=ThreadPolicy.fixed(2),
        partitions=PartitionPolicy.fixed(2),
        buffer_size=20,
        strategy=strategy,
        error_handler=lambda batch, error: reports.append(len(batch)),
    ) as queue:
        recorder = Recorder()
        queue.add_handler(Red, recorder)
        queue.add_handler(Green, refuse)
        producers = [spawn(produce) for _ in range(4)]
        accepted = sum(producer.result(WAIT_S) for producer in producers)
        assert queue.flush(WAIT_S)
        stats = queue.stats()
    assert (stats.accepted, stats.dropped["full"]) == (accepted, 2400 - accepted)
    assert (stats.consumed, stats.failed) == (len(recorder.items), sum(reports))
    assert quiet(stats)


def test_counters_balance_while_a_handler_is_held() -> None:
    """With items in a handler and in the buffer, both are pending and the sum is right."""
    gate = Gate()
    with make_queue(consumer=gate, buffer_size=10, strategy=IF_POSSIBLE) as queue:
        hold(queue, gate)
        accepted = queue.produce_many(reds(25))
        stats = queue.stats()
    assert (stats.accepted, stats.pending) == (accepted + 1, accepted + 1)
    assert stats.dropped["full"] == 25 - accepted
