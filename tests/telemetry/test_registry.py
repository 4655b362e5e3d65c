"""The registry: who is in it, and totals that never fall."""

from __future__ import annotations

import gc
import logging
import os
import threading

import pytest

from batchmill.batcher import BatcherSettings, MicroBatcher
from batchmill.flows import Backpressure, FlowDispatcher, FlowSettings
from batchmill.pressure import QueueThresholdManager, QueueThresholdSettings
from batchmill.telemetry import Distribution, Registry, register
from tests.kit.processes import in_child
from tests.kit.queues import Red, make_queue, new_queue, reds
from tests.kit.threads import WAIT_S, Gate, spawn
from tests.telemetry.kit import TOOL, Tool, shown

MADE, DEPTH = "batchmill.tool.made_parts", "batchmill.tool.depth"

needs_fork = pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork")


def test_a_component_is_shown_until_it_is_closed() -> None:
    """Its depth goes with it; what it counted stays."""
    registry, tool = Registry(), Tool(made=3, depth=2)
    registration = registry.register(tool)
    before = shown(registry)
    registration.close(tool)
    after = shown(registry)
    assert (before[MADE, "drill"], before[DEPTH, "drill"]) == (3, 2)
    assert after[MADE, "drill"] == 3
    assert (DEPTH, "drill") not in after
    assert registry.components(TOOL) == []


def test_a_component_is_not_kept_alive() -> None:
    """One that is collected without having been closed leaves, and its counters stay."""
    registry, tool = Registry(), Tool(made=3, depth=2)
    registry.register(tool)
    shown(registry)
    del tool
    gc.collect()
    after = shown(registry)
    assert registry.components(TOOL) == []
    assert after[MADE, "drill"] == 3
    assert (DEPTH, "drill") not in after


def test_records_of_collected_components_do_not_pile_up() -> None:
    """Though nobody ever collects the registry."""
    registry = Registry()
    for _ in range(100):
        registry.register(Tool())
    gc.collect()
    registry.register(Tool())
    assert len(registry._registrations) <= 3


def test_a_counter_goes_on_when_a_component_is_made_again() -> None:
    """What was counted between the last page and the close is in it."""
    registry, first = Registry(), Tool(made=3)
    registration = registry.register(first)
    shown(registry)
    first.now.made = 5
    registration.close(first)
    second = Tool(made=1)
    registry.register(second)
    assert shown(registry)[MADE, "drill"] == 6


def test_a_closed_component_is_still_counted_while_it_lives() -> None:
    """It may go on refusing what comes too late."""
    registry, tool = Registry(), Tool(broken={"late": 0})
    registry.register(tool).close(tool)
    tool.now.broken = {"late": 7}
    assert shown(registry)["batchmill.tool.broken_parts", "drill", "late"] == 7


def test_components_of_one_name_are_one_series() -> None:
    """Counts add up; of a gauge, which cannot be added up, the highest is shown."""
    registry = Registry()
    tools = [Tool(made=3, depth=2, level=1), Tool(made=4, depth=5, level=3), Tool(level=2)]
    for tool in tools:
        registry.register(tool)
    values = shown(registry)
    assert values[MADE, "drill"] == 7
    assert values[DEPTH, "drill"] == 7
    assert values["batchmill.tool.level", "drill"] == 3


def test_distributions_add_up_bucket_by_bucket() -> None:
    """Also where one of the components has ended."""
    registry = Registry()
    first = Tool(times=Distribution((1, 10), (1, 2, 0), 9.0))
    registry.register(first).close(first)
    second = Tool(times=Distribution((1, 10), (0, 1, 4), 200.0))
    registry.register(second)
    total = shown(registry)["batchmill.tool.work", "drill"]
    assert total == Distribution((1, 10), (1, 3, 4), 209.0)
    assert (total.count, total.mean) == (8, 209.0 / 8)


def test_a_counter_that_falls_is_not_shown_falling() -> None:
    """Two collectors at a time may apply what they read in the other order."""
    registry, tool = Registry(), Tool(made=5)
    registry.register(tool)
    pages = []
    for made in (5, 3, 6):
        tool.now.made = made
        pages.append(shown(registry)[MADE, "drill"])
    assert pages == [5, 5, 6]


def test_a_component_that_fails_does_not_spoil_the_page(caplog: pytest.LogCaptureFixture) -> None:
    """It is missing and counted, the others are there; the log has it once a minute."""
    registry, bad, good = Registry(), Tool("bad", made=1, depth=1), Tool("good", made=2)
    registry.register(bad)
    registry.register(good)
    shown(registry)
    bad.error = RuntimeError("out of order")
    with caplog.at_level(logging.ERROR, "batchmill.telemetry"):
        values = [shown(registry) for _ in range(3)][-1]
    assert values[MADE, "good"] == 2
    assert values[MADE, "bad"] == 1, "its counter is what it was"
    assert (DEPTH, "bad") not in values
    assert values["batchmill.telemetry.failures", "tool"] == 3
    assert len(caplog.records) == 1
    assert "tool bad cannot be read" in caplog.text


def test_names_are_bounded() -> None:
    """Later names share one series, so that names made of requests cannot fill a Prometheus."""
    registry = Registry(max_names=10)
    tools = [Tool(f"tool-{number}", made=1, depth=1) for number in range(25)]
    for tool in tools:
        registry.register(tool)
    shown(registry)
    values = shown(registry)
    assert sum(key[0] == MADE for key in values) == 11
    assert values[MADE, "_other"] == values[DEPTH, "_other"] == 15
    assert values["batchmill.telemetry.unnamed_components", "tool"] == 15
    assert values["batchmill.telemetry.components", "tool"] == 25


def test_no_lock_of_the_registry_is_held_while_a_component_is_read() -> None:
    """Another thread can make, close and read components meanwhile."""
    registry, gate = Registry(), Gate()

    class Slow(Tool):
        def stats(self) -> object:  # type: ignore[override]
            gate.wait()
            return self.now

    slow, quick = Slow("slow", made=1), Tool("quick", made=2)
    registry.register(slow)
    page = spawn(lambda: shown(registry))
    gate.wait_entered()
    registry.register(quick).close(quick)
    assert [tool.name for tool in registry.components(TOOL)] == ["slow"]
    gate.open()
    assert page.result(WAIT_S)[MADE, "quick"] == 2


def test_threads_that_collect_at_the_same_time_count_once() -> None:
    """Whatever is added to a counter is in the total exactly once."""
    registry, tool = Registry(), Tool()
    registry.register(tool)
    done = threading.Event()

    def collect() -> None:
        while not done.is_set():
            shown(registry)

    threads = [spawn(collect) for _ in range(3)]
    for _ in range(2_000):
        tool.now.made += 1
    done.set()
    for thread in threads:
        thread.result(WAIT_S)
    assert shown(registry)[MADE, "drill"] == 2_000


@needs_fork
def test_totals_start_at_0_in_a_forked_child() -> None:
    """The parent's are the parent's; a lock that was held then is not held in the child."""
    tool = Tool("forked", made=3)
    registration = register(tool)
    assert shown()[MADE, "forked"] == 3
    tool.now.made = 0  # as a component does in the child

    def child() -> list[int]:
        before = shown()[MADE, "forked"]
        tool.now.made = 2
        return [before, shown()[MADE, "forked"]]

    assert in_child(child) == [0, 2]
    tool.now.made = 4
    assert shown()[MADE, "forked"] == 4
    registration.close(tool)


@needs_fork
def test_a_child_forked_while_others_collect_does_not_hang() -> None:
    """Any number of times, with queues that come and go."""
    done = threading.Event()

    def collect() -> None:
        while not done.is_set():
            shown()

    def come_and_go() -> None:
        while not done.is_set():
            with make_queue("coming"):
                pass

    threads = [spawn(collect), spawn(come_and_go)]
    try:
        for _ in range(10):
            assert in_child(lambda: len(shown())) > 0
    finally:
        done.set()
    for thread in threads:
        thread.result(WAIT_S)


def test_queues_register_themselves() -> None:
    """Depth, capacity and all counters, and a closed one's counters when it is made again."""
    gate = Gate()
    with make_queue("busy-bee", buffer_size=4, consumer=gate) as queue:
        queue.produce(Red())
        gate.wait_entered()
        while queue.produce(Red(), timeout=0):
            pass
        held = shown()
    with make_queue("busy-bee", consumer=lambda batch: None) as queue:
        queue.produce_many(reds(10))
        assert queue.flush(WAIT_S)
        again = shown()
    prefix = "batchmill.queue"
    assert held[f"{prefix}.depth", "busy-bee"] == held[f"{prefix}.capacity", "busy-bee"] == 4
    assert held[f"{prefix}.used", "busy-bee"] == 1
    assert held[f"{prefix}.fullest_partition_used", "busy-bee"] == 1
    assert held[f"{prefix}.threads_in_handler", "busy-bee"] == 1
    assert held[f"{prefix}.dropped_items", "busy-bee", "full"] == 1
    assert held[f"{prefix}.consumed_items", "busy-bee"] == 0
    assert again[f"{prefix}.accepted_items", "busy-bee"] == 15
    assert again[f"{prefix}.consumed_items", "busy-bee"] == 15
    assert again[f"{prefix}.dropped_items", "busy-bee", "full"] == 1
    assert again[f"{prefix}.batch_size", "busy-bee"].sum == 15


def test_a_queue_that_is_shut_down_counts_what_it_refuses() -> None:
    """As long as somebody refers to it."""
    with make_queue("closed-shop", consumer=lambda batch: None) as queue:
        pass
    assert not queue.produce(Red())
    values = shown()
    assert values["batchmill.queue.dropped_items", "closed-shop", "stopped"] == 1
    assert ("batchmill.queue.depth", "closed-shop") not in values


@pytest.mark.filterwarnings("ignore::ResourceWarning")
def test_a_queue_that_nobody_refers_to_is_counted_to_the_end() -> None:
    """It drains itself; what it consumes after it was garbage is in the total."""
    gate = Gate()
    queue = new_queue("orphan", consumer=gate)
    queue.produce(Red())
    gate.wait_entered()
    queue.produce_many(reds(5))
    core = queue._core
    del queue
    gc.collect()
    gate.open()
    assert core.done.wait(WAIT_S)
    assert shown()["batchmill.queue.consumed_items", "orphan"] == 6


def test_batchers_register_themselves() -> None:
    """Submitted, succeeded and failed items, batches by size and time, and why they were sent."""

    def backend(batch: list[int]) -> list[object]:
        return [ValueError("odd") if item % 2 else item for item in batch]

    thresholds = QueueThresholdSettings(max_queue_size=100)
    batcher: MicroBatcher[int] = MicroBatcher(
        backend, BatcherSettings(batch_size=10, linger_ms=1e6), thresholds, name="oven"
    )
    with batcher:
        futures = batcher.submit_many(range(20))
        for future in futures:
            future.result(WAIT_S)
        assert batcher.flush(WAIT_S)
        values = shown()
    prefix = "batchmill.batcher"
    assert values[f"{prefix}.capacity", "oven"] == 200
    assert values[f"{prefix}.submitted_items", "oven"] == 20
    assert values[f"{prefix}.succeeded_items", "oven"] == 10
    assert values[f"{prefix}.failed_items", "oven"] == 10
    assert values[f"{prefix}.flushes", "oven", "size"] == 2
    sizes = values[f"{prefix}.batch_size", "oven"]
    assert (sizes.count, sizes.sum) == (2, 20)
    assert sizes.counts[sizes.bounds.index(15)] == 2
    assert values[f"{prefix}.backend_duration", "oven"].count == 2
    assert (f"{prefix}.depth", "oven") not in shown()


def test_flows_register_themselves() -> None:
    """Flows assigned, active and completed, the depth of each worker, and what was dropped."""
    gate = Gate()
    settings = FlowSettings(
        worker_count=2,
        worker_queue_capacity=2,
        ingress_capacity=1,
        batch_max=1,
        backpressure=Backpressure.DROP_NEWEST,
        flow_id=lambda signal: signal[0],
        finished=lambda signal: signal[1],
    )
    with FlowDispatcher[tuple[str, bool]](gate, settings, name="rivers") as dispatcher:
        dispatcher.dispatch(("rhine", False))
        gate.wait_entered()
        while dispatcher.dispatch(("rhine", False)):
            pass
        held = shown()
        gate.open()
        dispatcher.complete("rhine")
    after = shown()
    prefix = "batchmill.flows"
    assert (held[f"{prefix}.depth", "rivers"], held[f"{prefix}.capacity", "rivers"]) == (3, 5)
    assert held[f"{prefix}.ingress_depth", "rivers"] == 1
    depths = sorted(held[f"{prefix}.worker_depth", "rivers", worker] for worker in "01")
    assert depths == [0, 3]
    assert held[f"{prefix}.workers_in_handler", "rivers"] == 1
    assert held[f"{prefix}.active_flows", "rivers"] == 1
    assert held[f"{prefix}.dropped_signals", "rivers", "ingress_full"] == 1
    assert after[f"{prefix}.assigned_flows", "rivers"] == 1
    assert after[f"{prefix}.completed_flows", "rivers"] == 1
    assert after[f"{prefix}.handled_signals", "rivers"] == 4
    assert after[f"{prefix}.batch_size", "rivers"].sum == 4
    assert after[f"{prefix}.handler_duration", "rivers"].count == 4
    assert (f"{prefix}.depth", "rivers") not in after


@pytest.mark.filterwarnings("ignore::ResourceWarning")
def test_a_dispatcher_that_nobody_refers_to_is_counted_to_the_end() -> None:
    """It drains itself; what it handles after it was garbage is in the total."""
    gate, done = Gate(), threading.Event()
    handled: list[int] = []

    def handle(batch: list[int]) -> None:
        gate.wait()
        handled.extend(batch)
        if len(handled) == 3:
            done.set()

    settings = FlowSettings(worker_count=1, flow_id=lambda signal: signal)
    dispatcher: FlowDispatcher[int] = FlowDispatcher(handle, settings, name="stray")
    workers = [worker.thread for worker in dispatcher._core.workers]
    dispatcher.dispatch(1)
    gate.wait_entered()
    dispatcher.dispatch(2)
    dispatcher.dispatch(3)
    del dispatcher
    gc.collect()
    gate.open()
    assert done.wait(WAIT_S)
    for worker in workers:
        worker.join(WAIT_S)
    assert shown()["batchmill.flows.handled_signals", "stray"] == 3


def test_thresholds_register_themselves() -> None:
    """Their level and limits, and the decisions by level and action."""
    depth = 0
    settings = QueueThresholdSettings(max_queue_size=10)
    manager = QueueThresholdManager(settings, lambda: depth, name="dam")
    depth = 12
    manager.check("water")
    values = shown()
    manager.close()
    prefix = "batchmill.thresholds"
    assert values[f"{prefix}.level", "dam"] == 2
    limits = {level: values[f"{prefix}.limit", "dam", level] for level in manager.stats().limits}
    assert limits == {"warning": 5, "critical": 10, "critical_plus": 15, "hard_capacity": 20}
    assert values[f"{prefix}.decisions", "dam", "critical", "reject"] == 1
    assert values[f"{prefix}.decisions", "dam", "warning", "drop"] == 0
    assert (f"{prefix}.level", "dam") not in shown()
