"""What a process tells of its queues and micro-batchers, for a status file."""

from __future__ import annotations

import json
import threading
from typing import Any

from batchmill import PartitionPolicy, snapshot_queues
from batchmill.batcher import BatcherSettings, MicroBatcher, snapshot_batchers
from batchmill.flows import FlowDispatcher, FlowSettings, snapshot_flows
from batchmill.pressure import QueueThresholdManager, QueueThresholdSettings
from batchmill.process_stats import ProcessStats
from batchmill.testing import ManualClock
from tests.kit.queues import Red, Scripted, fill, make_queue, owners, rebalance_now, reds, settled
from tests.kit.threads import WAIT_S, Gate


def named(queues: list[dict[str, Any]], name: str) -> dict[str, Any]:
    """The queue of that name."""
    (one,) = [queue for queue in queues if queue["name"] == name]
    return one


def test_every_queue_is_found_as_long_as_it_runs() -> None:
    """Nobody has to tell who made it; one that is shut down is not there any more."""
    with make_queue("one"), make_queue("two"):
        assert [queue.name for queue in snapshot_queues()] == ["one", "two"]
    assert snapshot_queues() == ()


def test_a_queue_tells_how_full_each_partition_is() -> None:
    """And what it turned away, by reason; all of it fit for a JSON file."""
    gate = Gate()
    with make_queue(
        "full", buffer_size=5, partitions=PartitionPolicy.fixed(2), consumer=gate
    ) as queue:
        queue.produce(Red())
        gate.wait_entered()
        held = fill(queue)
        facts = named(ProcessStats().queues(), "full")
    assert json.loads(json.dumps(facts)) == facts
    assert facts["kind"] == "queue"
    assert (facts["depth"], facts["capacity"]) == (held, 10)
    assert sorted(partition["depth"] for partition in facts["partitions"]) == [0, 5]
    assert [partition["capacity"] for partition in facts["partitions"]] == [5, 5]
    assert facts["rejected"] == {"full": 1}
    assert facts["accepted"] == held + 1


def test_a_handler_that_hangs_is_a_full_load() -> None:
    """Though its call is not over, and so not counted in busy_seconds yet."""
    gate, clock = Gate(), ManualClock(100.0)
    process_stats = ProcessStats(clock.now)
    with make_queue("held", consumer=gate) as queue:
        idle = named(process_stats.queues(), "held")
        queue.produce(Red())
        gate.wait_entered()
        clock.advance(1)
        process_stats.queues()
        clock.advance(1)
        held = named(process_stats.queues(), "held")
    assert [thread["load"] for thread in idle["threads"]] == [0.0]
    assert held["threads"] == [{"name": "held-0", "load": 1.0}]


def test_a_load_is_what_was_done_since_the_last_look() -> None:
    """Not since the start, and never more than all of the time."""
    clock = ManualClock(100.0)
    process_stats = ProcessStats(clock.now)
    with make_queue("busy", consumer=lambda batch: None) as queue:
        process_stats.queues()
        queue.produce_many(reds(1000))
        assert queue.flush(WAIT_S)
        clock.advance(1e-9)
        worked = named(process_stats.queues(), "busy")
        clock.advance(1)
        rested = named(process_stats.queues(), "busy")
    assert worked["threads"][0]["load"] == 1.0
    assert rested["threads"][0]["load"] == 0.0


def test_the_balancers_moves_are_listed() -> None:
    """How many, and the newest of them in words, the newest first."""
    balancer = Scripted()
    with make_queue(threads=2, partitions=3, balancer=balancer) as queue:
        first = owners(queue)
        for plan in ([1, 1, 1], [0, 0, 0]):
            balancer.plan = plan
            rebalance_now(queue)
            settled(queue, plan)
        moves = queue.stats().last_moves
        facts = named(ProcessStats().queues(), queue.name)
    moved = first.count(0) + 3
    assert facts["moves"] == moved == len(moves)
    assert [(move.from_thread, move.to_thread) for move in moves[-3:]] == [(1, 0)] * 3
    assert len(facts["last_moves"]) == moved
    assert facts["last_moves"][0].endswith(f"partition {moves[-1].partition}: thread 1 → 0")


def test_few_moves_are_kept() -> None:
    """A queue that moves partitions for weeks keeps the newest eight."""
    balancer = Scripted()
    with make_queue(threads=2, partitions=4, balancer=balancer) as queue:
        for turn in range(6):
            balancer.plan = [turn % 2] * 4
            rebalance_now(queue)
            settled(queue, balancer.plan)
        stats = queue.stats()
    assert stats.moved_partitions > len(stats.last_moves) == 8


def test_a_batcher_tells_what_waits_and_how_busy_its_workers_are() -> None:
    """A batch that is under way counts up to now, on the batcher's own clock."""
    clock, entered, go = ManualClock(), threading.Event(), threading.Event()

    def backend(batch: list[int]) -> list[int]:
        entered.set()
        assert go.wait(WAIT_S)
        return batch

    thresholds = QueueThresholdSettings(max_queue_size=10)
    config = BatcherSettings(batch_size=1, max_in_flight=1)
    orders: MicroBatcher[int] = MicroBatcher(
        backend, config, thresholds, name="orders", clock=clock
    )
    with orders as batcher:
        answer = batcher.submit(1)
        assert entered.wait(WAIT_S)
        batcher.submit(2)
        clock.advance(3.0)
        (stats,) = snapshot_batchers()
        facts = named(ProcessStats().queues(), "orders")
        go.set()
        answer.result(WAIT_S)
    assert [(worker.name, worker.busy_seconds) for worker in stats.workers] == [
        ("batchmill-orders-0", 3)
    ]
    assert facts["kind"] == "batcher"
    assert (facts["depth"], facts["capacity"]) == (1, 20)
    assert facts["partitions"] == [{"depth": 1, "capacity": 20}]
    assert facts["accepted"] == 2
    assert snapshot_batchers() == ()


def test_flows_are_told_with_the_depth_of_each_worker() -> None:
    """And how many flows were assigned, are active, have completed; fit for a JSON file."""
    gate, clock = Gate(), ManualClock(100.0)
    process_stats = ProcessStats(clock.now)
    settings = FlowSettings(
        worker_count=2,
        worker_queue_capacity=10,
        ingress_capacity=5,
        flow_id=lambda signal: signal[0],
        finished=lambda signal: signal[1] == "end",
    )
    with FlowDispatcher[tuple[str, str]](gate, settings, name="orders") as dispatcher:
        dispatcher.dispatch(("a", "begin"))
        gate.wait_entered()
        process_stats.queues()
        dispatcher.dispatch(("a", "more"))
        dispatcher.dispatch(("a", "end"))
        clock.advance(1)
        held = named(process_stats.queues(), "orders")
        gate.open()
    assert json.loads(json.dumps(held)) == held
    assert (held["kind"], held["depth"], held["capacity"]) == ("flows", 2, 25)
    assert sorted(worker["depth"] for worker in held["partitions"]) == [0, 2]
    assert sorted(worker["load"] for worker in held["threads"]) == [0.0, 1.0]
    assert held["accepted"] == 3
    flows = {"active": 1, "assigned": 1, "completed": 0, "expired": 0, "displaced": 0}
    assert held["flows"] == flows
    assert snapshot_flows() == ()


def test_thresholds_are_told() -> None:
    """The level, the depth that was seen last, where levels begin, and what was decided."""
    manager = QueueThresholdManager(
        QueueThresholdSettings(max_queue_size=10), lambda: 12, name="weir"
    )
    manager.check("water")
    level = named(ProcessStats().report()["levels"], "weir")
    manager.close()
    assert json.loads(json.dumps(level)) == level
    assert (level["level"], level["value"], level["critical"]) == ("CRITICAL", 12, 10)
    assert level["decisions"] == {"critical reject": 1}


def test_a_batcher_without_thresholds_has_no_capacity() -> None:
    """Nothing bounds what waits there, and no number is made up."""
    unbounded: MicroBatcher[int] = MicroBatcher(lambda batch: batch, name="open")
    with unbounded as batcher:
        batcher.submit(1).result(WAIT_S)
        facts = named(ProcessStats().queues(), "open")
    assert facts["capacity"] is None
