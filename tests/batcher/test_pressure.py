"""Thresholds at work in the batcher: every decision, and the races around them."""

from __future__ import annotations

import functools
from typing import Any

import pytest

from batchmill.batcher import BatcherClosedError, DeadlineExceededError, MicroBatcher
from batchmill.pressure import (
    QueueAction,
    QueueDecision,
    QueueFullError,
    QueueThresholdContext,
    ThresholdLevel,
    strategies,
)
from batchmill.testing import ManualClock
from tests.kit.batchers import (
    Gate,
    always,
    answer,
    assert_balanced,
    batching,
    held,
    levels,
    threads_of,
)
from tests.kit.threads import WAIT_S, until

WARNING, CRITICAL, PLUS = ThresholdLevel


def test_half_full_is_not_full() -> None:
    """WARNING without a handler accepts."""
    with held(levels(), waiting=2) as (batcher, gate):
        future = batcher.submit("a")
        gate.open()
        assert answer(future).is_success


def test_rejected_by_default_at_critical() -> None:
    """The failure carries the item; its error depth, threshold, level and retry_after."""
    with held(levels(), waiting=4) as (batcher, _):
        result = answer(batcher.submit("refused"))
        assert (result.item, result.is_failure) == ("refused", True)
        error = result.error
        assert isinstance(error, QueueFullError)
        assert (error.depth, error.threshold, error.level, error.retry_after) == (4, 4, CRITICAL, 1)
        assert batcher.stats().rejected == 1


def test_drop_is_a_third_outcome() -> None:
    """Neither success nor failure; it carries item and level, and is counted by level."""
    with held(levels(critical_handler=strategies.drop()), waiting=4) as (batcher, _):
        result = answer(batcher.submit("gone"))
        assert (result.item, result.is_dropped, result.level) == ("gone", True, CRITICAL)
        stats = batcher.stats()
        assert (stats.dropped, stats.succeeded, stats.failed) == (1, 0, 0)
        assert stats.thresholds is not None
        assert stats.thresholds.decisions[CRITICAL, QueueAction.DROP] == 1


def test_accept_fills_up_to_the_hard_capacity() -> None:
    """Past it even ACCEPT rejects."""
    with held(levels(critical_handler=strategies.accept()), waiting=8) as (batcher, _):
        result = answer(batcher.submit("one too many"))
        assert isinstance(result.error, QueueFullError)
        assert (result.error.threshold, result.error.level) == (8, ThresholdLevel.CRITICAL_PLUS)
        assert batcher.queue_depth == 8


def test_a_handler_that_raises_costs_no_item() -> None:
    """The default action decides, and the failure is counted."""

    def handler(context: object) -> QueueDecision:
        raise LookupError("a bug")

    with held(levels(critical_handler=handler), waiting=4) as (batcher, _):
        assert isinstance(answer(batcher.submit("a")).error, QueueFullError)
        stats = batcher.stats()
        assert stats.thresholds is not None
        assert (stats.rejected, stats.thresholds.handler_failures) == (1, 1)


def test_a_handler_that_exits_costs_no_item() -> None:
    """The exception goes through to the submitter, and the counts balance."""

    def handler(context: object) -> QueueDecision:
        raise KeyboardInterrupt

    with held(levels(critical_handler=handler), waiting=4) as (batcher, _):
        with pytest.raises(KeyboardInterrupt):
            batcher.submit("a")
        stats = batcher.stats()
        assert (stats.submitted, stats.rejected, stats.deciding) == (6, 1, 0)
        assert_balanced(stats)


def test_depth_is_what_waits() -> None:
    """What is with the backend is not counted: depth measures pressure."""
    with held(levels(), waiting=3) as (batcher, _):
        assert batcher.queue_depth == 3
        assert batcher.stats().in_flight == 1


def _filling(batcher_box: list[MicroBatcher[Any]], fill: int, seen: list[ThresholdLevel]) -> Any:
    """Accepts; but the first time, the queue fills up while it decides."""

    def handler(context: QueueThresholdContext[Any]) -> QueueDecision:
        if context.item == "raced":
            seen.append(context.level)
            if len(seen) == 1:
                batcher_box[0].submit_many(range(fill))
        return QueueDecision.accept()

    return handler


def test_a_decision_is_checked_again_on_commit() -> None:
    """The level rose while the handler decided: it decides again, at the new level."""
    box: list[MicroBatcher[Any]] = []
    seen: list[ThresholdLevel] = []
    handler = _filling(box, 2, seen)
    with held(levels(warning_handler=handler, critical_handler=handler), waiting=2) as (
        batcher,
        gate,
    ):
        box.append(batcher)
        future = batcher.submit("raced")
        assert seen == [WARNING, CRITICAL]
        gate.open()
        assert answer(future).is_success


def test_the_hard_capacity_is_checked_again_on_commit() -> None:
    """Filled up while the handler said ACCEPT: rejected, and the depth stays within bounds."""
    box: list[MicroBatcher[Any]] = []
    handler = _filling(box, 6, [])
    config = levels(warning_handler=handler, critical_handler=handler)
    with held(config, waiting=2) as (batcher, _):
        box.append(batcher)
        assert isinstance(answer(batcher.submit("raced")).error, QueueFullError)
        assert batcher.queue_depth == 8


def test_closed_while_the_handler_decides() -> None:
    """Not accepted any more, and answered."""
    box: list[MicroBatcher[Any]] = []

    def handler(context: object) -> QueueDecision:
        box[0]._engine.begin_close()
        return QueueDecision.accept()

    with held(levels(warning_handler=handler), waiting=2) as (batcher, _):
        box.append(batcher)
        assert isinstance(answer(batcher.submit("a")).error, BatcherClosedError)


def _retrying(**settings: Any) -> Any:
    settings = {"initial_ms": 1000, "multiplier": 2, "jitter": 0, **settings}
    return levels(critical_handler=strategies.retry(**settings))


def test_a_retry_is_parked_and_offered_again() -> None:
    """After the delay; when there is room by then, it is accepted."""
    clock = ManualClock()
    with held(_retrying(), waiting=4, clock=clock) as (batcher, gate):
        future = batcher.submit("patient")
        assert (batcher.stats().parked, batcher.queue_depth) == (1, 4)
        gate.let_pass()
        gate.wait_entered()
        assert clock.await_sleepers()
        clock.advance(1)
        until(lambda: batcher.queue_depth == 4, "it is accepted")
        gate.open()
        assert answer(future).is_success


def test_retries_wait_longer_each_time_and_end() -> None:
    """1, then 2 seconds; the third attempt is the last, and the error says so."""
    clock = ManualClock()
    with held(_retrying(max_attempts=3), waiting=4, clock=clock) as (batcher, _):
        future = batcher.submit("unlucky")
        for delay in (1, 2):
            assert clock.await_sleepers()
            clock.advance(delay / 2)
            assert batcher.stats().parked == 1
            clock.advance(delay / 2)
            until(functools.partial(_decided_more, batcher, delay), "it is offered again")
        error = answer(future).error
        assert isinstance(error, QueueFullError)
        assert "given up after 3 attempts" in str(error)
        assert batcher.stats().rejected == 1


def _decided_more(batcher: MicroBatcher[Any], times: int) -> bool:
    stats = batcher.stats().thresholds
    assert stats is not None
    return sum(n for (level, _), n in stats.decisions.items() if level is CRITICAL) > times


def test_a_deadline_ends_retries() -> None:
    """At the deadline, not at the next try."""
    clock = ManualClock()
    with held(_retrying(), waiting=4, clock=clock) as (batcher, _):
        future = batcher.submit("hasty", deadline_s=0.5)
        assert clock.await_sleepers()
        clock.advance(0.5)
        assert isinstance(answer(future).error, DeadlineExceededError)
        assert batcher.stats().expired == 1


def test_parked_retries_are_bounded() -> None:
    """By the hard capacity; one more is rejected."""
    clock = ManualClock()
    with held(_retrying(), waiting=4, clock=clock) as (batcher, _):
        parked = batcher.submit_many(range(8))
        assert batcher.stats().parked == 8
        result = answer(batcher.submit("one too many"))
        assert isinstance(result.error, QueueFullError)
        assert "no room to wait" in str(result.error)
        assert not any(future.done() for future in parked)


def test_parked_retries_share_one_timer_thread() -> None:
    """However many wait."""
    clock = ManualClock()
    with held(_retrying(), waiting=4, clock=clock, name="parking") as (batcher, _):
        batcher.submit_many(range(8))
        assert len([t for t in threads_of("parking") if t.name.endswith("-timer")]) == 1


def test_parked_retries_are_answered_on_close() -> None:
    """At once: they do not hold up the close, and no thread waits on for them."""
    clock = ManualClock()
    with held(_retrying(), waiting=4, clock=clock, name="closing") as (batcher, gate):
        parked = batcher.submit_many(range(3))
        gate.open()
        assert batcher.close(WAIT_S)
        for future in parked:
            assert isinstance(answer(future).error, BatcherClosedError)
        assert threads_of("closing") == []


def test_a_parked_item_may_be_taken_back() -> None:
    """It gives up its place at the next try, and counts as cancelled."""
    clock = ManualClock()
    with held(_retrying(), waiting=4, clock=clock) as (batcher, _):
        assert batcher.submit("never mind").cancel()
        assert clock.await_sleepers()
        clock.advance(1)
        until(lambda: batcher.stats().cancelled == 1, "it is counted")
        assert batcher.stats().parked == 0


def test_linger_of_a_retried_item_counts_from_acceptance() -> None:
    """Not from when it was first refused."""
    clock = ManualClock()
    gate = Gate()
    thresholds = levels(critical_handler=strategies.retry(initial_ms=8000, jitter=0))
    with batching(gate, thresholds, clock=clock, batch_size=5, linger_ms=4000) as batcher:
        batcher.submit_many(range(4))
        retried = batcher.submit("retried")
        assert batcher.flush(0) is False
        gate.wait_entered()
        gate.let_pass()
        assert batcher.flush(WAIT_S)
        assert clock.await_sleepers()
        clock.advance(8)
        until(lambda: batcher.queue_depth == 1, "it is accepted")
        assert clock.await_sleepers()
        clock.advance(3)
        assert batcher.stats().batches == 1
        clock.advance(1)
        gate.wait_entered()
        gate.let_pass()
        assert answer(retried).is_success


def test_the_attempt_number_reaches_the_handler() -> None:
    """1 for the first offer, then 2, 3, and so on."""
    clock = ManualClock()
    attempts: list[int] = []

    def handler(context: QueueThresholdContext[Any]) -> QueueDecision:
        attempts.append(context.attempt)
        if context.attempt == 3:
            return QueueDecision.drop()
        return QueueDecision.retry(1000)

    with held(levels(critical_handler=handler), waiting=4, clock=clock) as (batcher, _):
        future = batcher.submit("a")
        for _ in range(2):
            assert clock.await_sleepers()
            clock.advance(1)
        assert answer(future).is_dropped
    assert attempts == [1, 2, 3]


def test_a_retry_without_delay_is_offered_at_once() -> None:
    """A delay of nothing is allowed."""
    decisions = iter([QueueDecision(QueueAction.RETRY), QueueDecision.drop()])
    with held(levels(critical_handler=lambda _: next(decisions)), waiting=4) as (batcher, _):
        assert answer(batcher.submit("a")).is_dropped


def test_dead_letters_are_not_lost() -> None:
    """Sent to the sink and dropped; rejected where the sink fails."""
    letters: list[Any] = []

    def sink(item: Any) -> None:
        if item == "bad":
            raise OSError("sink full")
        letters.append(item)

    with held(
        levels(
            critical_handler=strategies.accept(),
            critical_plus_handler=strategies.dead_letter(sink),
        ),
        waiting=6,
    ) as (batcher, _):
        assert answer(batcher.submit("letter")).is_dropped
        assert isinstance(answer(batcher.submit("bad")).error, QueueFullError)
    assert letters == ["letter"]


def test_by_priority_in_the_batcher() -> None:
    """The important item is accepted where another is dropped."""
    handler = strategies.by_priority(
        lambda item: item, {"vip": strategies.accept()}, default=strategies.drop()
    )
    with held(levels(critical_handler=handler), waiting=4) as (batcher, gate):
        vip, bulk = batcher.submit("vip"), batcher.submit("bulk")
        assert answer(bulk).is_dropped
        gate.open()
        assert answer(vip).is_success


def test_a_custom_rejection_reaches_the_submitter() -> None:
    """As the result's error."""
    reason = PermissionError("not today")
    config = levels(critical_handler=always(QueueDecision.reject(reason)))
    with held(config, waiting=4) as (batcher, _):
        assert answer(batcher.submit("a")).error is reason
