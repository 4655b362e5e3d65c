"""Backpressure.BLOCK: who waits for room, in which order, and who must not."""

from __future__ import annotations

import contextlib
import functools
import threading
from typing import Any

import pytest

from batchmill.flows import WouldDeadlockError
from tests.flows.kit import Recorder, Signal, dispatching, hold, signals
from tests.kit.threads import WAIT_S, Gate, spawn


def test_block_waits_for_room(about_to_wait: threading.Semaphore) -> None:
    """The producer goes on when the worker has taken something, and nothing is lost."""
    gate = Gate()
    with dispatching(gate, worker_queue_capacity=1) as dispatcher:
        hold(dispatcher, gate)
        dispatcher.dispatch(Signal("held", 1))
        with spawn(lambda: dispatcher.dispatch(Signal("held", 2))) as producer:
            assert about_to_wait.acquire(timeout=WAIT_S)
            stats = dispatcher.stats()
            assert (stats.blocked, stats.workers[0].blocked) == (1, 1)
            gate.open()
            assert producer.result(WAIT_S)
    assert [signal.number for signal in gate.items] == [0, 1, 2]


def test_producers_that_wait_with_one_flow_get_in_in_order(
    about_to_wait: threading.Semaphore,
) -> None:
    """Whoever came first is first, though all are woken by one batch that was taken."""
    gate = Gate()
    with dispatching(gate, worker_queue_capacity=8, batch_max=8) as dispatcher:
        hold(dispatcher, gate)
        for signal in signals("held", 8, start=1):
            assert dispatcher.dispatch(signal)
        with contextlib.ExitStack() as threads:
            for signal in signals("held", 8, start=9):
                threads.enter_context(spawn(functools.partial(dispatcher.dispatch, signal)))
                assert about_to_wait.acquire(timeout=WAIT_S)
            assert dispatcher.stats().workers[0].blocked == 8
            gate.open()
    assert [signal.number for signal in gate.items] == list(range(17))


def test_one_full_worker_does_not_stop_the_flows_of_others(
    about_to_wait: threading.Semaphore,
) -> None:
    """The wait is per worker."""
    gate = Gate()
    with dispatching(gate, worker_count=2, worker_queue_capacity=1) as dispatcher:
        for flow in "ab":
            hold(dispatcher, gate, flow)
        dispatcher.dispatch(Signal("a", 1))
        with spawn(lambda: dispatcher.dispatch(Signal("a", 2))) as producer:
            assert about_to_wait.acquire(timeout=WAIT_S)
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
    assert [signal.number for signal in gate.items] == [0, 1]


def test_a_handler_that_waits_for_its_own_worker_gets_an_error() -> None:
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


def test_two_handlers_that_wait_for_each_other_get_an_error(
    about_to_wait: threading.Semaphore,
) -> None:
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
            assert about_to_wait.acquire(timeout=WAIT_S)  # a's handler waits for b's worker
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


def test_a_handler_does_not_wait_for_a_place_among_the_flows() -> None:
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

    with dispatching(handle, worker_count=2, max_flows=1) as dispatcher:
        dispatcher.dispatch(Signal("a", 0))
        assert tried.wait(WAIT_S)
    assert outcome == ["told"]


def test_a_handler_may_wait_for_another_worker_though_the_ingress_buffer_is_full(
    about_to_wait: threading.Semaphore,
) -> None:
    """Room comes when that worker takes something, whoever has filled the buffer."""
    gate = Gate()
    outcome: list[bool] = []

    def handle(batch: list[Signal]) -> None:
        if batch == [Signal("a", 0)]:
            inside.wait(WAIT_S)
            inside.wait(WAIT_S)  # the queues and the buffer are full
            outcome.append(dispatcher.dispatch(Signal("b", 3)))
            tried.set()
        elif batch[0].flow == "b":
            gate(batch)

    inside, tried = threading.Barrier(2), threading.Event()
    with dispatching(
        handle, worker_count=2, worker_queue_capacity=1, ingress_capacity=1
    ) as dispatcher:
        dispatcher.dispatch(Signal("a", 0))
        inside.wait(WAIT_S)
        dispatcher.dispatch(Signal("b", 0))
        gate.wait_entered()
        for flow, number in (("b", 1), ("a", 1), ("a", 2)):
            assert dispatcher.dispatch(Signal(flow, number), timeout=0)
        inside.wait(WAIT_S)
        assert about_to_wait.acquire(timeout=WAIT_S)
        gate.open()
        assert tried.wait(WAIT_S)
    assert outcome == [True]
    assert [signal.number for signal in gate.items] == [0, 1, 3]


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
    assert [signal.number for signal in recorder.items] == [0, 1, 2, 3]
