"""Dispatching: order, spreading, the life of a flow, and what is measured."""

from __future__ import annotations

import pytest

from batchmill.flows import snapshot_flows
from batchmill.testing import ManualClock
from tests.flows.kit import Recorder, Signal, assert_balanced, dispatching, hold, signals
from tests.kit.threads import WAIT_S, Gate, until


def test_a_flow_is_handled_in_order() -> None:
    """What one thread dispatches of a flow arrives in that order."""
    recorder = Recorder()
    sent = signals("a", 500)
    with dispatching(recorder, worker_count=3, batch_max=7) as dispatcher:
        assert all(dispatcher.dispatch(signal) for signal in sent)
    assert recorder.items == sent


def test_a_call_gets_batch_max_signals_at_most() -> None:
    """What has piled up comes in batches of that size, and the rest."""
    gate = Gate()
    with dispatching(gate, batch_max=4) as dispatcher:
        hold(dispatcher, gate)
        for signal in signals("a", 10):
            dispatcher.dispatch(signal)
    assert [len(batch) for batch in gate.batches] == [1, 4, 4, 2]


def test_new_flows_go_to_workers_that_are_free() -> None:
    """A worker with a signal in its handler is not free, though its queue is empty."""
    gate = Gate()
    with dispatching(gate, worker_count=4) as dispatcher:
        for flow in "abcd":
            hold(dispatcher, gate, flow)
        assert [worker.running for worker in dispatcher.stats().workers] == [1, 1, 1, 1]


def test_signals_without_a_flow_go_round() -> None:
    """Flow id None: one for each worker in turn, and no flow to remember."""
    gate = Gate()
    with dispatching(gate, worker_count=3) as dispatcher:
        for _ in range(3):
            hold(dispatcher, gate, None)
        for _ in range(6):
            dispatcher.dispatch(Signal(None))
        stats = dispatcher.stats()
        assert [worker.depth for worker in stats.workers] == [2, 2, 2]
        assert stats.active_flows == 0


def test_a_finished_flow_is_forgotten_when_its_finish_is_handled() -> None:
    """Not when it is queued: until then its worker is its own."""
    gate = Gate()
    with dispatching(gate) as dispatcher:
        hold(dispatcher, gate)
        dispatcher.dispatch(Signal("a", 1, last=True))
        assert dispatcher.stats().active_flows == 2
        gate.open()
        gate.wait_entered()
        dispatcher.close(WAIT_S)
        assert dispatcher.stats().active_flows == 1


def test_a_reused_id_does_not_overtake_what_is_left_of_its_past() -> None:
    """A finished flow's id, used again while old signals wait, goes to the same worker."""
    gate = Gate()
    with dispatching(gate, worker_count=2) as dispatcher:
        hold(dispatcher, gate, "a")
        dispatcher.dispatch(Signal("a", 1, last=True))
        dispatcher.dispatch(Signal("a", 2))
        depths = [worker.depth for worker in dispatcher.stats().workers]
        assert sorted(depths) == [0, 2]
    assert [signal.number for signal in gate.items] == [0, 1, 2]


def test_complete_ends_a_flow_once_nothing_of_it_is_pending() -> None:
    """And says whether the flow was known."""
    gate = Gate()
    with dispatching(gate) as dispatcher:
        hold(dispatcher, gate)
        assert dispatcher.complete("held")
        assert not dispatcher.complete("nobody")
        assert dispatcher.stats().active_flows == 1
        gate.open()
        dispatcher.close(WAIT_S)
        assert dispatcher.stats().active_flows == 0


def test_a_flow_that_rests_for_its_ttl_expires() -> None:
    """By the clock it was given; counted; and a worker's share of flows goes down with it."""
    clock, recorder = ManualClock(), Recorder()
    with dispatching(recorder, idle_ttl=5.0, clock=clock.now) as dispatcher:
        dispatcher.dispatch(Signal("a"))
        dispatcher.close(WAIT_S)
        clock.advance(4.9)
        assert dispatcher.stats().active_flows == 1
        clock.advance(0.1)
        stats = dispatcher.stats()
        assert (stats.active_flows, stats.expired_flows) == (0, 1)
        assert stats.workers[0].flows == 0


def test_a_flow_with_something_pending_does_not_expire() -> None:
    """However long its signal is in the handler."""
    clock, gate = ManualClock(), Gate()
    with dispatching(gate, idle_ttl=5.0, clock=clock.now) as dispatcher:
        hold(dispatcher, gate)
        clock.advance(1_000)
        stats = dispatcher.stats()
        assert (stats.active_flows, stats.expired_flows) == (1, 0)


def test_durations_and_rates_are_measured_by_the_clock() -> None:
    """Handler latency per call, waiting time per signal, signals a second per worker."""
    clock, gate = ManualClock(), Gate()
    with dispatching(gate, batch_max=2, clock=clock.now) as dispatcher:
        hold(dispatcher, gate)
        for signal in signals("a", 2):
            dispatcher.dispatch(signal)
        clock.advance(0.5)
        gate.open()
        gate.wait_entered()
    stats = dispatcher.stats()
    assert (stats.handler_latency.count, stats.wait.count) == (2, 3)
    assert stats.handler_latency.p99_s == pytest.approx(0.5, rel=0.02)
    assert stats.handler_latency.p50_s == 0.0
    assert stats.wait.p50_s == pytest.approx(0.5, rel=0.02)
    assert stats.workers[0].rate == stats.rate == pytest.approx(3 / 0.5, rel=0.03)


def test_skew_is_the_largest_load_over_the_mean() -> None:
    """1 when nothing is there; the number of workers when all is on one."""
    gate = Gate()
    with dispatching(gate, worker_count=4) as dispatcher:
        assert dispatcher.stats().skew == 1.0
        hold(dispatcher, gate)
        dispatcher.dispatch(Signal("held", 1))
        stats = dispatcher.stats()
        assert stats.skew == 4.0
        assert (stats.in_handlers, stats.pending) == (1, 2)
        assert max(worker.load for worker in stats.workers) == 2


def test_every_dispatcher_is_listed_as_long_as_it_runs() -> None:
    """By name, whoever made it, with flows and workers; one that is closed is gone."""
    gate = Gate()
    with dispatching(gate, name="two", worker_count=2) as two, dispatching(gate, name="one"):
        for flow in "ab":
            hold(two, gate, flow)
        two.dispatch(Signal("a", 1))
        one, other = snapshot_flows()
        assert (one.name, other.name) == ("one", "two")
        assert sorted(worker.depth for worker in other.workers) == [0, 1]
        flows = (other.assigned_flows, other.completed_flows, other.active_flows)
        assert flows == (2, 0, 2)
    assert snapshot_flows() == ()


def test_flows_are_counted_from_assignment_to_completion() -> None:
    """An id that is used again after its flow has ended is a flow of its own."""
    recorder = Recorder()
    with dispatching(recorder) as dispatcher:
        for number in range(3):
            dispatcher.dispatch(Signal("a", number, last=True))
            until(lambda: dispatcher.stats().active_flows == 0)
        dispatcher.dispatch(Signal("b"))
        dispatcher.complete("never seen")
        stats = dispatcher.stats()
        assert (stats.assigned_flows, stats.completed_flows, stats.active_flows) == (4, 3, 1)
        assert_balanced(stats)


def test_a_flow_whose_first_signal_never_gets_in_is_not_counted() -> None:
    """Its producer waited in vain: it was never assigned, and nothing was completed."""
    gate = Gate()
    with dispatching(gate, worker_queue_capacity=1) as dispatcher:
        hold(dispatcher, gate)
        dispatcher.dispatch(Signal("held", 1))
        assert not dispatcher.dispatch(Signal("new", last=True), timeout=0.001)
        stats = dispatcher.stats()
        assert (stats.assigned_flows, stats.completed_flows, stats.active_flows) == (1, 0, 1)
