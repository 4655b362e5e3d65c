"""Bounds on flows and signals: what is evicted, refused or waited for."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from batchmill.flows import Backpressure
from tests.flows.kit import (
    DROP_NEWEST,
    DROP_OLDEST,
    Recorder,
    Signal,
    assert_balanced,
    dispatching,
    hold,
    signals,
)
from tests.kit.threads import WAIT_S, Gate, spawn


def test_a_new_flow_takes_the_place_of_one_that_rests() -> None:
    """At max_flows the flow that rested longest is displaced, and counted as that."""
    recorder = Recorder()
    handled = threading.Semaphore(0)

    def handle(batch: list[Any]) -> None:
        recorder(batch)
        handled.release()

    with dispatching(handle, max_flows=1, backpressure=DROP_NEWEST) as dispatcher:
        dispatcher.dispatch(Signal("a"))
        dispatcher.dispatch(Signal(None))  # handled after it: by then the flow rests
        for _ in range(2):
            assert handled.acquire(timeout=WAIT_S)
        assert dispatcher.dispatch(Signal("b"))
        stats = dispatcher.stats()
        assert (stats.active_flows, stats.displaced_flows, stats.expired_flows) == (1, 1, 0)


@pytest.mark.parametrize("policy", [DROP_OLDEST, DROP_NEWEST])
def test_a_new_flow_is_dropped_when_all_known_ones_have_signals_pending(
    policy: Backpressure,
) -> None:
    """Counted under max_flows; the known flows go on."""
    gate = Gate()
    with dispatching(gate, max_flows=1, backpressure=policy) as dispatcher:
        hold(dispatcher, gate)
        assert not dispatcher.dispatch(Signal("new"))
        assert dispatcher.dispatch(Signal("held", 1))
        stats = dispatcher.stats()
        assert stats.dropped[policy.value, "max_flows"] == 1
        assert stats.refused["max_flows"] == 1


def test_a_new_flow_waits_for_a_place_under_block(about_to_wait: threading.Semaphore) -> None:
    """All who wait with that flow get in, in order, once another flow has gone."""
    gate = Gate()
    with dispatching(gate, max_flows=1) as dispatcher:
        hold(dispatcher, gate)
        dispatcher.complete("held")
        with spawn(lambda: dispatcher.dispatch(Signal("new", 1))) as first:
            assert about_to_wait.acquire(timeout=WAIT_S)
            with spawn(lambda: dispatcher.dispatch(Signal("new", 2, last=True))) as second:
                assert about_to_wait.acquire(timeout=WAIT_S)
                assert dispatcher.stats().blocked == 2
                gate.open()
                assert first.result(WAIT_S)
                assert second.result(WAIT_S)
    assert [signal.number for signal in gate.items] == [0, 1, 2]
    assert dispatcher.stats().active_flows == 0


def test_drop_newest_refuses_and_leaves_no_flow_behind() -> None:
    """The first signal of a flow that is refused does not map the flow."""
    gate = Gate()
    with dispatching(gate, worker_queue_capacity=1, backpressure=DROP_NEWEST) as dispatcher:
        hold(dispatcher, gate)
        assert dispatcher.dispatch(Signal("held", 1))
        assert not dispatcher.dispatch(Signal("new"))
        stats = dispatcher.stats()
        assert (stats.active_flows, stats.workers[0].flows) == (1, 1)
        assert stats.dropped["drop_newest", "queue_full"] == 1


def test_a_refused_finish_still_finishes_its_flow() -> None:
    """DROP_NEWEST: the flow goes when what is pending of it is handled."""
    gate = Gate()
    with dispatching(gate, worker_queue_capacity=1, backpressure=DROP_NEWEST) as dispatcher:
        hold(dispatcher, gate)
        assert dispatcher.dispatch(Signal("held", 1))
        assert not dispatcher.dispatch(Signal("held", 2, last=True))
    assert dispatcher.stats().active_flows == 0


def test_drop_oldest_evicts_the_oldest_and_counts_it() -> None:
    """The new signal is in, the oldest queued one is gone, its flow's count with it."""
    gate = Gate()
    with dispatching(gate, worker_queue_capacity=2, backpressure=DROP_OLDEST) as dispatcher:
        hold(dispatcher, gate)
        assert all(dispatcher.dispatch(signal) for signal in signals("a", 4))
        stats = dispatcher.stats()
        assert stats.evicted == {"queue_full": 2, "ingress_full": 0}
        assert stats.dropped["drop_oldest", "queue_full"] == 2
        assert_balanced(stats)
    assert gate.items == [Signal("held"), Signal("a", 2), Signal("a", 3)]


def test_an_evicted_finish_leaves_no_flow_behind() -> None:
    """All that is queued are finish signals: the oldest goes, and its flow with it."""
    gate = Gate()
    with dispatching(gate, worker_queue_capacity=1, backpressure=DROP_OLDEST) as dispatcher:
        hold(dispatcher, gate)
        for flow in "abc":
            assert dispatcher.dispatch(Signal(flow, last=True))
        assert dispatcher.stats().active_flows == 2
        dispatcher.complete("held")
    assert dispatcher.stats().active_flows == 0
    assert gate.items[1:] == [Signal("c", last=True)]


def test_evicting_a_flows_last_signal_for_its_own_next_keeps_the_flow() -> None:
    """The eviction must not unmap the very flow whose signal is coming in."""
    gate = Gate()
    with dispatching(gate, worker_queue_capacity=1, backpressure=DROP_OLDEST) as dispatcher:
        hold(dispatcher, gate)
        assert dispatcher.dispatch(Signal("a", 1, last=True))
        assert dispatcher.dispatch(Signal("a", 2))
        assert dispatcher.dispatch(Signal("a", 3))
        assert dispatcher.stats().active_flows == 2
    assert gate.items[1:] == [Signal("a", 3)]


def test_the_ingress_buffer_comes_before_backpressure() -> None:
    """A full worker queue drops nothing while the buffer has room; each has its own depth."""
    gate = Gate()
    with dispatching(
        gate,
        worker_count=2,
        worker_queue_capacity=2,
        ingress_capacity=3,
        backpressure=DROP_NEWEST,
    ) as dispatcher:
        for flow in "ab":
            hold(dispatcher, gate, flow)
        accepted = [dispatcher.dispatch(signal) for signal in signals("a", 7, start=1)]
        assert accepted == [True] * 5 + [False] * 2
        assert dispatcher.dispatch(Signal("b", 1))
        stats = dispatcher.stats()
        assert (stats.ingress_depth, stats.ingress_capacity, stats.queued) == (3, 3, 6)
        busy, other = sorted(stats.workers, key=lambda worker: -worker.buffered)
        assert (busy.depth, busy.buffered, busy.capacity, busy.load) == (2, 3, 2, 6)
        assert (other.depth, other.buffered) == (1, 0)
        assert stats.dropped["drop_newest", "ingress_full"] == 2
        assert_balanced(stats)
    numbers = [signal.number for signal in gate.items if signal.flow == "a"]
    assert numbers == [0, 1, 2, 3, 4, 5]


def test_producers_wait_only_when_the_ingress_buffer_is_full_too(
    about_to_wait: threading.Semaphore,
) -> None:
    """BLOCK: the first that finds neither room waits, and gets in when a batch is taken."""
    gate = Gate()
    with dispatching(gate, worker_queue_capacity=1, ingress_capacity=2) as dispatcher:
        hold(dispatcher, gate)
        for signal in signals("held", 3, start=1):
            assert dispatcher.dispatch(signal, timeout=0)
        with spawn(lambda: dispatcher.dispatch(Signal("held", 4))) as producer:
            assert about_to_wait.acquire(timeout=WAIT_S)
            assert dispatcher.stats().ingress_depth == 2
            gate.open()
            assert producer.result(WAIT_S)
    assert [signal.number for signal in gate.items] == [0, 1, 2, 3, 4]


def test_with_an_ingress_buffer_the_oldest_of_the_same_worker_is_evicted() -> None:
    """DROP_OLDEST: another worker does not pay, and what is in the buffer moves up."""
    gate = Gate()
    with dispatching(
        gate,
        worker_count=2,
        worker_queue_capacity=2,
        ingress_capacity=1,
        backpressure=DROP_OLDEST,
    ) as dispatcher:
        for flow in "ab":
            hold(dispatcher, gate, flow)
        for number in (1, 2, 3, 4):
            assert dispatcher.dispatch(Signal("a", number))
        for number in (1, 2):
            assert dispatcher.dispatch(Signal("b", number))
        stats = dispatcher.stats()
        assert stats.evicted == {"queue_full": 0, "ingress_full": 1}
        assert stats.ingress_depth == 1
        assert_balanced(stats)
    assert [signal.number for signal in gate.items if signal.flow == "a"] == [0, 2, 3, 4]
    assert [signal.number for signal in gate.items if signal.flow == "b"] == [0, 1, 2]


def test_close_returns_what_is_in_the_ingress_buffer() -> None:
    """In the order in which it was dispatched, with what is in the queues."""
    gate = Gate()
    with dispatching(
        gate, worker_count=2, worker_queue_capacity=1, ingress_capacity=9
    ) as dispatcher:
        for flow in "ab":
            hold(dispatcher, gate, flow)
        sent = [Signal(flow, number) for number in range(1, 4) for flow in "ab"]
        assert all(dispatcher.dispatch(signal) for signal in sent)
        assert dispatcher.stats().ingress_depth == 4
        assert dispatcher.close(0) == sent
        stats = dispatcher.stats()
        assert (stats.ingress_depth, stats.unprocessed) == (0, 6)
        assert_balanced(stats)
