"""Dispatching: order, spreading, the three policies, the life of a flow, handlers that raise."""

from __future__ import annotations

import contextlib
import functools
import logging
import threading
from typing import Any

import pytest

from batchmill._waiting import ThreadWaiter
from batchmill.flows import Backpressure, WouldDeadlockError, _dispatcher
from tests.flows_kit import (
    LOGGER,
    WAIT_S,
    Gate,
    ManualClock,
    Recorder,
    Signal,
    assert_balanced,
    dispatching,
    in_thread,
    signals,
)

BLOCK, DROP_OLDEST, DROP_NEWEST = (
    Backpressure.BLOCK,
    Backpressure.DROP_OLDEST,
    Backpressure.DROP_NEWEST,
)


@pytest.fixture
def lined_up(monkeypatch: pytest.MonkeyPatch) -> threading.Semaphore:
    """Released each time a thread has its place in line and is about to wait."""
    told = threading.Semaphore(0)

    class Telling(ThreadWaiter):
        def wait(self, timeout_s: float | None) -> bool:
            told.release()
            return super().wait(timeout_s)

    monkeypatch.setattr(_dispatcher, "ThreadWaiter", Telling)
    return told


def hold(dispatcher: Any, gate: Gate, flow: str | None = "held") -> None:
    """Keep a worker busy with one signal of ``flow``."""
    assert dispatcher.dispatch(Signal(flow))
    gate.wait_entered()


def test_a_flow_is_handled_in_order() -> None:
    """What one thread dispatches of a flow arrives in that order."""
    recorder = Recorder()
    sent = signals("a", 500)
    with dispatching(recorder, worker_count=3, batch_max=7) as dispatcher:
        assert all(dispatcher.dispatch(signal) for signal in sent)
    assert recorder.signals == sent


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
    assert [signal.number for signal in gate.signals] == [0, 1, 2]


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
    with dispatching(recorder, idle_ttl=5.0, clock=clock) as dispatcher:
        dispatcher.dispatch(Signal("a"))
        dispatcher.close(WAIT_S)
        clock.now += 4.9
        assert dispatcher.stats().active_flows == 1
        clock.now += 0.1
        stats = dispatcher.stats()
        assert (stats.active_flows, stats.expired_flows) == (0, 1)
        assert stats.workers[0].flows == 0


def test_a_flow_with_something_pending_does_not_expire() -> None:
    """However long its signal is in the handler."""
    clock, gate = ManualClock(), Gate()
    with dispatching(gate, idle_ttl=5.0, clock=clock) as dispatcher:
        hold(dispatcher, gate)
        clock.now += 1_000
        stats = dispatcher.stats()
        assert (stats.active_flows, stats.expired_flows) == (1, 0)


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


def test_a_new_flow_waits_for_a_place_under_block(lined_up: threading.Semaphore) -> None:
    """All who wait with that flow get in, in order, once another flow has gone."""
    gate = Gate()
    with dispatching(gate, max_flows=1) as dispatcher:
        hold(dispatcher, gate)
        dispatcher.complete("held")
        with in_thread(lambda: dispatcher.dispatch(Signal("new", 1))) as first:
            assert lined_up.acquire(timeout=WAIT_S)
            with in_thread(lambda: dispatcher.dispatch(Signal("new", 2, last=True))) as second:
                assert lined_up.acquire(timeout=WAIT_S)
                assert dispatcher.stats().blocked == 2
                gate.open()
                assert first.result(WAIT_S)
                assert second.result(WAIT_S)
    assert [signal.number for signal in gate.signals] == [0, 1, 2]
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
    assert gate.signals == [Signal("held"), Signal("a", 2), Signal("a", 3)]


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
    assert gate.signals[1:] == [Signal("c", last=True)]


def test_evicting_a_flows_last_signal_for_its_own_next_keeps_the_flow() -> None:
    """The eviction must not unmap the very flow whose signal is coming in."""
    gate = Gate()
    with dispatching(gate, worker_queue_capacity=1, backpressure=DROP_OLDEST) as dispatcher:
        hold(dispatcher, gate)
        assert dispatcher.dispatch(Signal("a", 1, last=True))
        assert dispatcher.dispatch(Signal("a", 2))
        assert dispatcher.dispatch(Signal("a", 3))
        assert dispatcher.stats().active_flows == 2
    assert gate.signals[1:] == [Signal("a", 3)]


def test_the_ingress_bound_is_over_all_workers() -> None:
    """It has a reason of its own, and a depth of its own."""
    gate = Gate()
    with dispatching(
        gate, worker_count=2, ingress_capacity=2, backpressure=DROP_NEWEST
    ) as dispatcher:
        for flow in "ab":
            hold(dispatcher, gate, flow)
        assert dispatcher.dispatch(Signal("a", 1))
        assert dispatcher.dispatch(Signal("b", 1))
        assert not dispatcher.dispatch(Signal("a", 2))
        stats = dispatcher.stats()
        assert (stats.ingress_depth, stats.ingress_capacity) == (2, 2)
        assert stats.dropped["drop_newest", "ingress_full"] == 1


def test_the_ingress_bound_evicts_from_the_longest_queue() -> None:
    """A worker with little queued does not pay for one with much."""
    gate = Gate()
    with dispatching(
        gate, worker_count=2, ingress_capacity=3, backpressure=DROP_OLDEST
    ) as dispatcher:
        for flow in "ab":
            hold(dispatcher, gate, flow)
        for number in (1, 2, 3):
            assert dispatcher.dispatch(Signal("a", number))
        assert dispatcher.dispatch(Signal("b", 1))
        assert dispatcher.stats().evicted == {"queue_full": 0, "ingress_full": 1}
    assert Signal("a", 1) not in gate.signals
    assert Signal("b", 1) in gate.signals


def test_block_waits_for_room(lined_up: threading.Semaphore) -> None:
    """The producer goes on when the worker has taken something, and nothing is lost."""
    gate = Gate()
    with dispatching(gate, worker_queue_capacity=1) as dispatcher:
        hold(dispatcher, gate)
        dispatcher.dispatch(Signal("held", 1))
        with in_thread(lambda: dispatcher.dispatch(Signal("held", 2))) as producer:
            assert lined_up.acquire(timeout=WAIT_S)
            stats = dispatcher.stats()
            assert (stats.blocked, stats.workers[0].blocked) == (1, 1)
            gate.open()
            assert producer.result(WAIT_S)
    assert [signal.number for signal in gate.signals] == [0, 1, 2]


def test_producers_that_wait_with_one_flow_get_in_in_order(lined_up: threading.Semaphore) -> None:
    """Whoever came first is first, though all are woken by one batch that was taken."""
    gate = Gate()
    with dispatching(gate, worker_queue_capacity=8, batch_max=8) as dispatcher:
        hold(dispatcher, gate)
        for signal in signals("held", 8, start=1):
            assert dispatcher.dispatch(signal)
        with contextlib.ExitStack() as threads:
            for signal in signals("held", 8, start=9):
                threads.enter_context(in_thread(functools.partial(dispatcher.dispatch, signal)))
                assert lined_up.acquire(timeout=WAIT_S)
            assert dispatcher.stats().workers[0].blocked == 8
            gate.open()
    assert [signal.number for signal in gate.signals] == list(range(17))


def test_one_full_worker_does_not_stop_the_flows_of_others(lined_up: threading.Semaphore) -> None:
    """The wait is per worker."""
    gate = Gate()
    with dispatching(gate, worker_count=2, worker_queue_capacity=1) as dispatcher:
        for flow in "ab":
            hold(dispatcher, gate, flow)
        dispatcher.dispatch(Signal("a", 1))
        with in_thread(lambda: dispatcher.dispatch(Signal("a", 2))) as producer:
            assert lined_up.acquire(timeout=WAIT_S)
            assert dispatcher.dispatch(Signal("b", 1), timeout=0)
            gate.open()
            assert producer.result(WAIT_S)


@pytest.mark.parametrize("timeout", [0, -1, 0.001])
def test_block_gives_up_after_its_timeout(timeout: float) -> None:
    """False; counted under what it waited for; nothing of it is left, and no fresh flow."""
    gate = Gate()
    with dispatching(gate, worker_queue_capacity=1) as dispatcher:
        hold(dispatcher, gate)
        dispatcher.dispatch(Signal("held", 1))
        assert not dispatcher.dispatch(Signal("new", 2), timeout=timeout)
        stats = dispatcher.stats()
        assert stats.dropped["block", "queue_full"] == 1
        assert (stats.blocked, stats.active_flows) == (0, 1)
    assert [signal.number for signal in gate.signals] == [0, 1]


def test_a_handler_that_waits_for_its_own_worker_is_told() -> None:
    """Its own queue is full: WouldDeadlockError without a timeout, False at once with one."""
    outcome: list[Any] = []
    tried = threading.Event()

    def handle(batch: list[Signal]) -> None:
        if batch[0].number == 0:
            dispatcher.dispatch(Signal("a", 1))
            outcome.append(dispatcher.dispatch(Signal("a", 2), timeout=WAIT_S * 10))
            try:
                dispatcher.dispatch(Signal("a", 3))
            except WouldDeadlockError as error:
                outcome.append((error.name, "dispatch()" in error.call))
            tried.set()

    with dispatching(handle, worker_queue_capacity=1, name="orders") as dispatcher:
        dispatcher.dispatch(Signal("a", 0))
        assert tried.wait(WAIT_S)
    assert outcome == [False, ("orders", True)]
    stats = dispatcher.stats()
    assert (stats.handled, stats.failed, stats.refused["queue_full"]) == (2, 0, 2)


def test_two_handlers_that_wait_for_each_other_are_told(lined_up: threading.Semaphore) -> None:
    """The one that would close the circle gets the error; the other goes on."""
    inside = threading.Barrier(3)
    outcome: dict[str, Any] = {}
    other = {"a": "b", "b": "a"}
    tried = threading.Semaphore(0)

    def handle(batch: list[Signal]) -> None:
        [signal] = batch
        if signal.number > 0:
            return
        inside.wait(WAIT_S)  # both are in their handlers
        inside.wait(WAIT_S)  # both queues are full
        if signal.flow == "b":
            assert lined_up.acquire(timeout=WAIT_S)  # a's handler waits for b's worker
        try:
            outcome[signal.flow] = dispatcher.dispatch(Signal(other[signal.flow], 2))
        except WouldDeadlockError:
            outcome[signal.flow] = "told"
        tried.release()

    with dispatching(handle, worker_count=2, worker_queue_capacity=1) as dispatcher:
        for flow in "ab":
            dispatcher.dispatch(Signal(flow))
        inside.wait(WAIT_S)
        for flow in "ab":
            dispatcher.dispatch(Signal(flow, 1))
        inside.wait(WAIT_S)
        for _ in range(2):
            assert tried.acquire(timeout=WAIT_S)
    assert outcome == {"a": True, "b": "told"}


@pytest.mark.parametrize("bound", ["ingress_capacity", "max_flows"])
def test_a_handler_does_not_wait_for_a_bound_that_all_share(bound: str) -> None:
    """Only its own return might bring the room: told, not hung."""
    outcome: list[str] = []
    tried = threading.Event()

    def handle(batch: list[Signal]) -> None:
        if batch[0].number == 0:
            dispatcher.dispatch(Signal("a", 1))
            try:
                dispatcher.dispatch(Signal("b", 2))
            except WouldDeadlockError:
                outcome.append("told")
            tried.set()

    with dispatching(handle, worker_count=2, **{bound: 1}) as dispatcher:
        dispatcher.dispatch(Signal("a", 0))
        assert tried.wait(WAIT_S)
    assert outcome == ["told"]


def test_a_handler_may_dispatch_where_there_is_room() -> None:
    """Also to its own worker and flow."""
    recorder = Recorder()

    def handle(batch: list[Signal]) -> None:
        recorder(batch)
        for signal in batch:
            if signal.number < 3:
                dispatcher.dispatch(Signal("a", signal.number + 1))
            else:
                done.set()

    done = threading.Event()
    with dispatching(handle) as dispatcher:
        dispatcher.dispatch(Signal("a", 0))
        assert done.wait(WAIT_S)
    assert [signal.number for signal in recorder.signals] == [0, 1, 2, 3]


@pytest.mark.parametrize("error", [ValueError("no"), SystemExit(3), KeyboardInterrupt()])
def test_a_handler_that_raises_is_counted_and_reported(error: BaseException) -> None:
    """Whatever it raises: the batch has failed, the error handler hears, the worker lives."""
    heard: list[tuple[list[Any], BaseException]] = []

    def handle(batch: list[Signal]) -> None:
        if batch[0].number == 1:
            batch.clear()  # the list is the handler's own
            raise error

    with dispatching(
        handle, error_handler=lambda batch, error: heard.append((batch, error))
    ) as dispatcher:
        for signal in signals("a", 3):
            dispatcher.dispatch(signal)
    stats = dispatcher.stats()
    assert heard == [([Signal("a", 1)], error)]
    assert (stats.handled, stats.failed) == (2, 1)
    assert stats.handler_latency.count == 3
    assert_balanced(stats)


def test_without_an_error_handler_the_log_hears(caplog: pytest.LogCaptureFixture) -> None:
    """At level ERROR, with the traceback and how many signals it hit."""

    def handle(batch: list[Signal]) -> None:
        raise ValueError("no")

    with caplog.at_level(logging.ERROR, LOGGER), dispatching(handle) as dispatcher:
        dispatcher.dispatch(Signal("a"))
    [record] = caplog.records
    assert "failed on 1 signals" in record.getMessage()
    assert record.exc_info is not None


def test_an_error_handler_that_raises_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    """And the worker lives through that too."""
    recorder = Recorder()

    def handle(batch: list[Signal]) -> None:
        recorder(batch)
        raise ValueError("no")

    def complain(batch: list[Signal], error: BaseException) -> None:
        raise RuntimeError("worse")

    with (
        caplog.at_level(logging.ERROR, LOGGER),
        dispatching(handle, error_handler=complain) as dispatcher,
    ):
        for signal in signals("a", 2):
            dispatcher.dispatch(signal)
    assert len(recorder.signals) == 2
    assert ["error handler failed" in record.getMessage() for record in caplog.records] == [
        True,
        True,
    ]


def test_a_failed_finish_ends_its_flow() -> None:
    """A handler that raises on the finish signal does not leave the flow mapped."""

    def handle(batch: list[Signal]) -> None:
        raise ValueError("no")

    with dispatching(handle, error_handler=lambda batch, error: None) as dispatcher:
        dispatcher.dispatch(Signal("a", 0))
        dispatcher.dispatch(Signal("a", 1, last=True))
    stats = dispatcher.stats()
    assert (stats.failed, stats.active_flows) == (2, 0)


@pytest.mark.parametrize("setting", ["flow_id", "finished"])
def test_what_flow_id_or_finished_raises_is_the_producers(setting: str) -> None:
    """The signal is not in, and the dispatcher goes on."""

    def refuse(signal: Signal) -> Any:
        if signal.number == 0:
            raise LookupError("no such thing")
        return None

    recorder = Recorder()
    with dispatching(recorder, **{setting: refuse}) as dispatcher:
        with pytest.raises(LookupError):
            dispatcher.dispatch(Signal("a", 0))
        assert dispatcher.dispatch(Signal("a", 1))
    assert recorder.signals == [Signal("a", 1)]


def test_an_unhashable_flow_id_is_a_type_error() -> None:
    """The signal is not in, the counts still balance, and the dispatcher goes on."""
    gate = Gate()
    with dispatching(gate, worker_count=2) as dispatcher:
        hold(dispatcher, gate)
        dispatcher.dispatch(Signal("held", 1))
        with pytest.raises(TypeError, match="unhashable"):
            dispatcher.dispatch(Signal(["a"]))
        stats = dispatcher.stats()
        assert (stats.dispatched, stats.pending) == (2, 2)
        assert_balanced(stats)
    assert [signal.number for signal in gate.signals] == [0, 1]


def test_durations_and_rates_are_measured_by_the_clock() -> None:
    """Handler latency per call, waiting time per signal, signals a second per worker."""
    clock, gate = ManualClock(), Gate()
    with dispatching(gate, batch_max=2, clock=clock) as dispatcher:
        hold(dispatcher, gate)
        for signal in signals("a", 2):
            dispatcher.dispatch(signal)
        clock.now += 0.5
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
