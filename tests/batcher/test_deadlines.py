"""Items whose time runs out, and items that are taken back."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from batchmill import ConfigError
from batchmill.batcher import DeadlineExceededError, MicroBatcher
from batchmill.testing import ManualClock
from tests.kit.batchers import FOREVER_MS, Echo, Gate, answer, batching, held, levels, threads_of
from tests.kit.threads import WAIT_S, spawn


def test_an_item_that_is_not_sent_in_time_expires() -> None:
    """It fails with how long it waited, is counted as expired, and is not sent."""
    clock = ManualClock()
    echo = Echo()
    with batching(echo, clock=clock, linger_ms=FOREVER_MS) as batcher:
        hasty = batcher.submit("hasty", deadline_s=2)
        patient = batcher.submit("patient")
        assert clock.await_sleepers(2)
        clock.advance(2)
        error = answer(hasty).error
        assert isinstance(error, DeadlineExceededError)
        assert error.waited_s == 2
        assert batcher.queue_depth == 1
        assert batcher.flush(WAIT_S)
        assert answer(patient).is_success
        assert batcher.stats().expired == 1
    assert echo.items == ["patient"]


def test_expiry_is_prompt_while_the_backend_hangs() -> None:
    """Nobody waits for the backend to hear that it is too late."""
    clock = ManualClock()
    with held(clock=clock) as (batcher, _):
        future = batcher.submit("late", deadline_s=1)
        assert clock.await_sleepers()
        clock.advance(1)
        assert isinstance(answer(future).error, DeadlineExceededError)


def test_an_item_that_was_sent_does_not_expire() -> None:
    """The deadline is for sending."""
    clock = ManualClock()
    gate = Gate()
    with batching(gate, clock=clock, linger_ms=0) as batcher:
        future = batcher.submit("a", deadline_s=1)
        gate.wait_entered()
        clock.advance(5)
        gate.open()
        assert answer(future).is_success


def test_the_earliest_deadline_comes_first() -> None:
    """In whatever order they were submitted, on one thread."""
    clock = ManualClock()
    order: list[int] = []
    with batching(Echo(), clock=clock, linger_ms=FOREVER_MS, name="timed") as batcher:
        futures = {n: batcher.submit(n, deadline_s=n) for n in (5, 1, 3, 2, 4)}
        for future in futures.values():
            future.add_done_callback(lambda future: order.append(future.result().item))
        timers = [t for t in threads_of("timed") if t.name.endswith("-timer")]
        assert len(timers) == 1
        clock.advance(5)
        for future in futures.values():
            answer(future)
    assert order == [1, 2, 3, 4, 5]


def test_no_deadline_left_no_timer_thread() -> None:
    """It exists only while something waits for a time."""
    clock = ManualClock()
    with batching(Echo(), clock=clock, linger_ms=FOREVER_MS, name="brief") as batcher:
        future = batcher.submit("a", deadline_s=1)
        (timer,) = [t for t in threads_of("brief") if t.name.endswith("-timer")]
        clock.await_sleepers(2)
        clock.advance(1)
        answer(future)
        timer.join(WAIT_S)
        assert not timer.is_alive()


def test_a_deadline_that_has_passed_already() -> None:
    """deadline_s=0: expired, not sent."""
    with held() as (batcher, gate):
        future = batcher.submit("a", deadline_s=0)
        assert isinstance(answer(future).error, DeadlineExceededError)
        gate.open()
    assert gate.items == ["first"]


@pytest.mark.parametrize("deadline", [-1, float("nan")])
def test_a_deadline_is_at_least_0(deadline: float) -> None:
    """NaN would stop the clock for all others."""
    with batching(Echo()) as batcher:
        with pytest.raises(ConfigError, match="deadline_s"):
            batcher.submit("a", deadline_s=deadline)

        async def main() -> None:
            with pytest.raises(ConfigError, match="deadline_s"):
                await batcher.asubmit("a", deadline_s=deadline)

        asyncio.run(main())
        assert batcher.stats().submitted == 0


def test_a_callback_on_the_timer_that_exits_stops_nobody() -> None:
    """The next deadline is kept."""
    clock = ManualClock()

    def callback(_: Any) -> None:
        raise SystemExit

    with batching(Echo(), clock=clock, linger_ms=FOREVER_MS) as batcher:
        first = batcher.submit("a", deadline_s=1)
        second = batcher.submit("b", deadline_s=1)
        third = batcher.submit("c", deadline_s=2)
        first.add_done_callback(callback)
        clock.await_sleepers(2)
        clock.advance(1)
        assert answer(second).is_failure
        clock.advance(1)
        assert answer(third).is_failure


def test_a_cancelled_item_is_skipped() -> None:
    """Not sent, counted as cancelled; the others of its batch are sent."""
    with held(batch_size=3) as (batcher, gate):
        futures = batcher.submit_many("abc")
        assert futures[1].cancel()
        gate.open()
        assert answer(futures[0]).is_success
        assert answer(futures[2]).is_success
        assert batcher.flush(WAIT_S)
        assert batcher.stats().cancelled == 1
    assert gate.batches == [["first"], ["a", "c"]]


def test_a_batch_of_cancelled_items_is_no_call() -> None:
    """The backend hears nothing of it."""
    with held(waiting=0) as (batcher, gate):
        batcher.submit("a").cancel()
        gate.open()
        assert batcher.flush(WAIT_S)
        stats = batcher.stats()
    assert (stats.cancelled, stats.backend_calls) == (1, 1)


def test_an_item_that_was_sent_cannot_be_taken_back() -> None:
    """cancel() says so."""
    with held() as (batcher, gate):
        future = batcher.submit("a")
        gate.let_pass()
        gate.wait_entered()
        assert not future.cancel()
        gate.open()
        assert answer(future).is_success


def test_answered_items_do_not_pile_up_until_their_deadline() -> None:
    """Far deadlines of items answered long ago take no room: the timer clears them out."""
    batcher: MicroBatcher[int] = MicroBatcher(lambda batch: batch)
    with batcher:
        for number in range(5_000):
            batcher.submit(number, deadline_s=3600)
            if number % 500 == 499:
                assert batcher.flush(30)
        assert len(batcher._engine._timer._heap) < 2_500


def test_an_expiry_makes_room() -> None:
    """Who waits for room gets it when waiting items run out of time, though nothing is sent."""
    with held(levels()) as (batcher, _):
        late = [batcher.submit(number, deadline_s=0.05) for number in range(4)]
        with spawn(lambda: batcher.submit("next", timeout=3600)) as waiting:
            waiting.result(WAIT_S)
        assert all(answer(future).is_failure for future in late)
