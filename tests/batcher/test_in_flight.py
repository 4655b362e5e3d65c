"""How many batches are with the backend at once; blocking submitters; adaptive concurrency."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from batchmill import ConfigError, WouldDeadlockError
from batchmill.batcher import AdaptiveConcurrency
from batchmill.batcher.backend import InFlightLimit
from batchmill.pressure import QueueDecision, QueueFullError
from batchmill.testing import ManualClock
from tests.kit.batchers import Gate, answer, assert_balanced, batching, held, levels
from tests.kit.threads import WAIT_S, spawn, until


@pytest.mark.parametrize("limit", [1, 3])
def test_batches_in_flight_are_bounded(limit: int) -> None:
    """The dispatcher waits for a permit, so what waits stays in the depth."""
    gate = Gate()
    with batching(gate, batch_size=1, max_in_flight=limit) as batcher:
        batcher.submit_many(range(10))
        gate.wait_entered(limit)
        stats = batcher.stats()
        assert (stats.in_flight, stats.queue_depth) == (limit, 10 - limit)
        gate.let_pass()
        gate.wait_entered()
        assert batcher.stats().in_flight == limit


def test_one_in_flight_keeps_the_order() -> None:
    """Batches go out in the order of submission."""
    gate = Gate()
    gate.open()
    with batching(gate, batch_size=7) as batcher:
        batcher.submit_many(range(500))
    assert gate.items == list(range(500))


def test_a_worker_held_by_a_callback_does_not_stop_the_others() -> None:
    """Another worker is started in its place, within max_in_flight."""
    callback_started, go_on = threading.Event(), threading.Event()

    def callback(_: object) -> None:
        callback_started.set()
        go_on.wait(WAIT_S)

    gate = Gate()
    with batching(gate, batch_size=1, max_in_flight=2) as batcher:
        first = batcher.submit("a")
        gate.wait_entered()
        first.add_done_callback(callback)
        gate.open()
        assert callback_started.wait(WAIT_S)
        try:
            assert answer(batcher.submit("b")).is_success
        finally:
            go_on.set()


def test_submit_waits_for_room() -> None:
    """With a timeout: until the depth is below the critical threshold, then it is accepted."""
    with (
        held(levels(), waiting=4) as (batcher, gate),
        spawn(lambda: batcher.submit("patient", timeout=WAIT_S)) as submitted,
    ):
        until(lambda: batcher._engine.intake._room_waiters, "it waits")
        assert batcher.stats().deciding == 1
        assert_balanced(batcher.stats())
        gate.let_pass()
        future = submitted.result(WAIT_S)
        gate.open()
        assert answer(future).is_success


def test_after_the_timeout_the_thresholds_decide() -> None:
    """As for any other submit."""
    clock = ManualClock()
    with (
        held(levels(), waiting=4, clock=clock) as (batcher, _),
        spawn(lambda: batcher.submit("patient", timeout=3)) as submitted,
    ):
        assert clock.await_sleepers()
        clock.advance(3)
        assert isinstance(answer(submitted.result(WAIT_S)).error, QueueFullError)
        assert batcher.stats().rejected == 1


def test_a_timeout_of_0_does_not_wait() -> None:
    """It decides at once."""
    with held(levels(), waiting=4) as (batcher, _):
        assert isinstance(answer(batcher.submit("a", timeout=0)).error, QueueFullError)


def test_with_room_nobody_waits() -> None:
    """Below CRITICAL a timeout changes nothing."""
    with held(levels(), waiting=3) as (batcher, _):
        batcher.submit("a", timeout=WAIT_S)
        assert batcher.queue_depth == 4


def test_one_place_takes_one_of_those_who_wait() -> None:
    """The others go on waiting: nobody is rejected before his time."""
    with held(levels(), waiting=4) as (batcher, gate):
        futures: list[Any] = []
        threads = [
            threading.Thread(target=lambda: futures.append(batcher.submit("p", timeout=WAIT_S)))
            for _ in range(6)
        ]
        for thread in threads:
            thread.start()
        until(lambda: len(batcher._engine.intake._room_waiters) == 6, "all wait")
        gate.let_pass()
        until(lambda: len(futures) == 1 and batcher.queue_depth == 4, "one is in")
        assert batcher.stats().deciding == 5
        gate.open()
        for thread in threads:
            thread.join(WAIT_S)
        assert [answer(future).is_success for future in futures] == [True] * 6
        assert batcher.stats().rejected == 0


def test_waiting_inside_the_backend_is_refused() -> None:
    """Only the backend's return could make room."""
    caught: list[BaseException] = []

    def backend(batch: list[Any]) -> list[Any]:
        try:
            batcher.submit("again", timeout=WAIT_S)
        except WouldDeadlockError as error:
            caught.append(error)
        return batch

    with batching(backend, linger_ms=0) as batcher:
        answer(batcher.submit("a"))
    assert len(caught) == 1


def test_a_backend_may_submit() -> None:
    """Without a timeout: that never waits."""
    follow_ups: list[Any] = []

    def backend(batch: list[Any]) -> list[Any]:
        if batch == ["a"]:
            follow_ups.append(batcher.submit("b"))
        return batch

    with batching(backend, linger_ms=0) as batcher:
        answer(batcher.submit("a"))
        assert answer(follow_ups[0]).value == "b"


def _limit(ceiling: int = 10, **settings: Any) -> InFlightLimit:
    return InFlightLimit(ceiling, AdaptiveConcurrency(**settings))


def _feed(limit: InFlightLimit, took_s: float, times: int, ok: bool = True) -> int:
    for _ in range(times):
        limit.record(took_s, ok, limit.current)
    return limit.current


def test_without_a_policy_the_limit_stands() -> None:
    """It is max_in_flight, whatever happens."""
    limit = InFlightLimit(4, None)
    limit.record(99, False, 4)
    assert limit.current == 4


def test_quick_answers_raise_the_limit_to_the_ceiling() -> None:
    """From ``least``, and never past max_in_flight."""
    limit = _limit(ceiling=5, least=2)
    assert limit.current == 2
    assert _feed(limit, 0.1, 100) == 5


def test_slow_answers_lower_it() -> None:
    """At once, by the back-off; never below ``least``."""
    limit = _limit(least=2)
    _feed(limit, 0.1, 200)
    assert _feed(limit, 1.0, 1) == 7
    assert _feed(limit, 100.0, 9) == 2


def test_a_failure_lowers_it() -> None:
    """However quick it was."""
    limit = _limit()
    _feed(limit, 0.1, 200)
    assert _feed(limit, 0.01, 1, ok=False) == 7


def test_a_limit_that_is_not_used_up_does_not_grow() -> None:
    """One batch at a time says nothing about two."""
    limit = _limit(least=3)
    for _ in range(50):
        limit.record(0.1, True, 1)
    assert limit.current == 3


def test_a_backend_that_is_slower_for_good_is_not_taken_for_overloaded() -> None:
    """The baseline follows by and by, and the limit rises again."""
    limit = _limit()
    _feed(limit, 0.1, 200)
    assert _feed(limit, 0.3, 3) < 10
    assert _feed(limit, 0.3, 300) == 10


def test_a_batch_that_was_not_sent_teaches_nothing() -> None:
    """All of it was cancelled: its no time at all is no measure of the backend."""
    gate = Gate()
    with batching(gate, batch_size=1, max_in_flight=3, adaptive=AdaptiveConcurrency()) as batcher:
        batcher.submit("first")
        gate.wait_entered()
        batcher.submit("a").cancel()
        gate.let_pass()
        assert batcher.flush(WAIT_S)
        assert batcher.stats().in_flight_limit == 2
        assert (batcher._engine._limit._baseline_s or 0) > 0


@pytest.mark.parametrize(
    "wrong", [{"least": 0}, {"tolerance": 1}, {"back_off": 0}, {"back_off": 1}]
)
def test_adaptive_settings_are_checked(wrong: dict[str, Any]) -> None:
    """A wrong one is named."""
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        AdaptiveConcurrency(**wrong)


def test_a_warning_handler_decides_for_patient_items_too() -> None:
    """Room means below CRITICAL; what happens at WARNING is the handler's business."""
    config = levels(warning_handler=lambda _: QueueDecision.drop())
    gate = Gate()
    with batching(gate, config, batch_size=1) as batcher:
        batcher.submit("first")
        gate.wait_entered()
        batcher.submit_many(range(2))
        assert answer(batcher.submit("a", timeout=WAIT_S)).is_dropped
