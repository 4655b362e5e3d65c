"""When a batch is sent, and why: size, weight, linger, flush, close."""

from __future__ import annotations

from typing import Any

import pytest

from batchmill import ConfigError
from batchmill.batcher import FlushReason
from batchmill.testing import ManualClock
from tests.kit.batchers import FOREVER_MS, Echo, Gate, answer, batching, held
from tests.kit.threads import WAIT_S, spawn


def _reasons(batcher: Any) -> dict[str, int]:
    return {reason.value: count for reason, count in batcher.stats().flushes.items() if count}


def test_a_full_batch_is_sent_without_waiting() -> None:
    """batch_size items, not one more."""
    echo = Echo()
    with batching(echo, batch_size=3, linger_ms=FOREVER_MS) as batcher:
        for future in batcher.submit_many(range(3)):
            answer(future)
        assert _reasons(batcher) == {"size": 1}
    assert echo.batches == [[0, 1, 2]]


def test_linger_counts_from_acceptance() -> None:
    """The batch goes linger_ms after its oldest item was accepted, whatever came after."""
    clock = ManualClock()
    echo = Echo()
    with batching(echo, clock=clock, linger_ms=1000) as batcher:
        oldest = batcher.submit("oldest")
        assert clock.await_sleepers()
        clock.advance(0.75)
        batcher.submit("newer")
        clock.advance(0.125)
        assert batcher.queue_depth == 2
        clock.advance(0.125)
        assert answer(oldest).is_success
        assert _reasons(batcher) == {"linger": 1}
    assert echo.batches == [["oldest", "newer"]]


def test_linger_is_not_counted_from_dequeue() -> None:
    """What waited for the backend long enough is sent as soon as the backend is free."""
    clock = ManualClock()
    gate = Gate()
    with batching(gate, clock=clock, linger_ms=100, batch_size=10) as batcher:
        batcher.submit("first")
        assert clock.await_sleepers()
        clock.advance(0.1)
        gate.wait_entered()
        waited = batcher.submit("waited")
        clock.advance(0.1)
        gate.open()
        assert answer(waited).is_success
        assert _reasons(batcher) == {"linger": 2}


def test_no_linger_at_all() -> None:
    """0: an item goes at once when the backend is free."""
    with batching(Echo(), clock=ManualClock(), linger_ms=0) as batcher:
        assert answer(batcher.submit("a")).is_success
        assert _reasons(batcher) == {"linger": 1}


def test_flush_sends_what_waits() -> None:
    """And returns when all accepted before it has been answered."""
    with batching(Echo(), linger_ms=FOREVER_MS) as batcher:
        futures = batcher.submit_many(range(250))
        assert batcher.flush(WAIT_S)
        assert all(future.done() for future in futures)
        assert _reasons(batcher) == {"size": 2, "flush": 1}


def test_flush_of_nothing_is_true() -> None:
    """Before the first item, and after the last."""
    with batching(Echo()) as batcher:
        assert batcher.flush(0)
        answer(batcher.submit(1))
        assert batcher.flush(WAIT_S)
        assert batcher.flush(0)


def test_flush_gives_up_after_its_timeout() -> None:
    """False; the item is answered later all the same."""
    with held() as (batcher, gate):
        future = batcher.submit("a")
        assert not batcher.flush(0)
        gate.open()
        assert answer(future).is_success


def test_flush_does_not_wait_for_what_came_later() -> None:
    """Only for what was accepted before it."""
    with held(waiting=1) as (batcher, gate), spawn(lambda: batcher.flush(WAIT_S)) as flushed:
        while not batcher._engine._outcomes.waiters:
            pass
        batcher.submit_many(["later", "later still"])
        gate.let_pass(2)
        assert flushed.result(WAIT_S)
        gate.wait_entered(2)
        assert batcher.stats().in_flight == 1


def test_several_flushes_at_once() -> None:
    """Each comes back."""
    with (
        held(waiting=3) as (batcher, gate),
        spawn(lambda: batcher.flush(WAIT_S)) as one,
        spawn(lambda: batcher.flush(WAIT_S)) as two,
    ):
        gate.open()
        assert one.result(WAIT_S)
        assert two.result(WAIT_S)


def test_hurry_sends_what_waits_if_it_is_enough() -> None:
    """And does not wait for it; what is too little goes on lingering."""
    with batching(Echo(), linger_ms=FOREVER_MS) as batcher:
        assert not batcher.hurry()
        futures = batcher.submit_many("ab")
        assert not batcher.hurry(3)
        futures.append(batcher.submit("c"))
        assert batcher.hurry(3)
        assert all(answer(future).is_success for future in futures)
        assert _reasons(batcher) == {"flush": 1}
        later = batcher.submit("d")
        assert not batcher.hurry(2)
        assert not later.done()


def test_hurry_can_wait_for_an_idle_backend() -> None:
    """While a batch is with the backend, items gather; then they go together."""
    gate = Gate()
    with batching(gate, linger_ms=FOREVER_MS, max_in_flight=2) as batcher:
        first = batcher.submit("a")
        assert batcher.hurry(when_idle=True)
        gate.wait_entered()
        rest = batcher.submit_many("bc")
        assert not batcher.hurry(when_idle=True)
        gate.open()
        assert answer(first).is_success
        assert batcher.hurry(when_idle=True)
        assert all(answer(future).is_success for future in rest)
        assert _reasons(batcher) == {"flush": 2}


def test_hurry_goes_by_weight_where_items_have_one() -> None:
    """The same measure that fills a batch."""
    with batching(Echo(), linger_ms=FOREVER_MS, max_weight=10, weigh=len) as batcher:
        futures = batcher.submit_many(["aaa", "bbb"])
        assert not batcher.hurry(7)
        assert batcher.hurry(6)
        assert all(answer(future).is_success for future in futures)


def test_close_sends_what_waits() -> None:
    """The reason is close."""
    echo = Echo()
    with batching(echo, linger_ms=FOREVER_MS) as batcher:
        batcher.submit_many(range(3))
    assert echo.batches == [[0, 1, 2]]
    assert _reasons(batcher) == {"close": 1}


def test_a_batch_is_no_heavier_than_it_may_be() -> None:
    """Its items weigh max_weight at most, and it goes as soon as that is reached."""
    echo = Echo()
    with batching(echo, linger_ms=FOREVER_MS, max_weight=10, weigh=len) as batcher:
        first = batcher.submit_many(["x" * 4, "y" * 4, "z" * 4])
        assert answer(first[1]).is_success
        assert batcher.queue_depth == 1
        assert _reasons(batcher) == {"weight": 1}
    assert [[len(item) for item in batch] for batch in echo.batches] == [[4, 4], [4]]


def test_an_exact_weight_is_reached() -> None:
    """5 and 5 of 10 is a full batch."""
    with batching(Echo(), linger_ms=FOREVER_MS, max_weight=10, weigh=len) as batcher:
        futures = batcher.submit_many(["x" * 5, "y" * 5])
        assert answer(futures[1]).is_success


def test_an_item_that_is_too_heavy_goes_alone() -> None:
    """It is sent, not refused."""
    echo = Echo()
    with batching(echo, linger_ms=FOREVER_MS, max_weight=3, weigh=len) as batcher:
        answer(batcher.submit("x" * 50))
    assert echo.batches == [["x" * 50]]


def test_weight_is_the_reason_when_it_cut_the_batch() -> None:
    """Though enough items for a batch were waiting."""
    gate = Gate()
    with batching(gate, linger_ms=0, batch_size=3, max_weight=10, weigh=len) as batcher:
        batcher.submit("")
        gate.wait_entered()
        batcher.submit_many(["x" * 6, "y" * 6, "z" * 6])
        gate.open()
        assert batcher.flush(WAIT_S)
        assert _reasons(batcher)["weight"] == 2
        assert "size" not in _reasons(batcher)


@pytest.mark.parametrize("weight", [-1, float("nan")])
def test_a_weight_is_at_least_0(weight: float) -> None:
    """A wrong one raises from submit, and nothing is counted."""
    with batching(Echo(), max_weight=3, weigh=lambda item: weight) as batcher:
        with pytest.raises(ConfigError, match="weigh"):
            batcher.submit("a")
        assert batcher.stats().submitted == 0


def test_every_reason_has_a_count() -> None:
    """Zeros too, so that a dashboard need not guess."""
    with batching(Echo()) as batcher:
        assert set(batcher.stats().flushes) == set(FlushReason)
