"""Items with equal keys are sent once, and all answered."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from batchmill.pressure import QueueDecision
from batchmill.testing import ManualClock
from tests.kit.batchers import (
    FOREVER_MS,
    Echo,
    Failing,
    Gate,
    answer,
    assert_balanced,
    batching,
    held,
    levels,
)
from tests.kit.threads import WAIT_S, spawn


def _key(item: Any) -> Any:
    return item[0] if isinstance(item, tuple) else None


def test_equal_keys_that_wait_are_sent_once() -> None:
    """The first one is; all get its answer, each with its own item."""
    echo = Echo()
    with batching(echo, key=_key, linger_ms=FOREVER_MS) as batcher:
        futures = batcher.submit_many([("a", 1), ("b", 2), ("a", 3)])
        assert batcher.stats().joined == 1
        assert batcher.flush(WAIT_S)
    assert echo.items == [("a", 1), ("b", 2)]
    assert [answer(future).item for future in futures] == [("a", 1), ("b", 2), ("a", 3)]
    assert answer(futures[2]).value == (("a", 1), "done")
    assert batcher.stats().succeeded == 3


def test_equal_keys_in_flight_are_sent_once() -> None:
    """One that comes while the first is with the backend gets its answer too."""
    gate = Gate()
    with batching(gate, key=_key, linger_ms=0) as batcher:
        batcher.submit(("a", 1))
        gate.wait_entered()
        late = batcher.submit(("a", 2))
        gate.open()
        assert answer(late).is_success
    assert gate.items == [("a", 1)]


def test_an_answered_key_is_free_again() -> None:
    """The next equal item is sent."""
    echo = Echo()
    with batching(echo, key=_key, linger_ms=0) as batcher:
        answer(batcher.submit(("a", 1)))
        answer(batcher.submit(("a", 2)))
    assert echo.items == [("a", 1), ("a", 2)]


def test_a_failure_is_shared() -> None:
    """All who waited for it hear the error."""
    with batching(Failing(("a", 1)), key=_key, linger_ms=FOREVER_MS) as batcher:
        futures = batcher.submit_many([("a", 1), ("a", 2)])
        batcher.flush(WAIT_S)
        assert [answer(future).is_failure for future in futures] == [True, True]
        assert batcher.stats().failed == 2


def test_items_without_a_key_stay_apart() -> None:
    """None is no key."""
    echo = Echo()
    with batching(echo, key=lambda item: None, linger_ms=FOREVER_MS) as batcher:
        batcher.submit_many(["same", "same"])
    assert echo.items == ["same", "same"]


@pytest.mark.parametrize("cancelled", [[0], [0, 1], [1], [1, 2], [0, 2]])
def test_cancelling_some_leaves_the_others_their_answer(cancelled: list[int]) -> None:
    """Whoever is left of equal items is sent; the cancelled ones count as cancelled."""
    with held(key=_key) as (batcher, gate):
        futures = batcher.submit_many([("a", 1), ("a", 2), ("a", 3)])
        for index in cancelled:
            assert futures[index].cancel()
        gate.open()
        for index in {0, 1, 2} - set(cancelled):
            assert answer(futures[index]).is_success
        assert batcher.flush(WAIT_S)
        stats = batcher.stats()
        assert (stats.cancelled, stats.succeeded) == (len(cancelled), 4 - len(cancelled))
        assert stats.batches == 2


def test_joining_one_that_was_cancelled_in_the_batch_being_sent() -> None:
    """It is not taken for a follower of an item that nobody sends: it is sent itself."""
    with held(key=_key, batch_size=2) as (batcher, gate):
        first = batcher.submit(("a", 1))
        batcher.submit("other")
        first.cancel()
        gate.let_pass()
        gate.wait_entered()  # with "other"; ("a", 1) is not sent
        second = batcher.submit(("a", 2))
        gate.open()
        assert batcher.flush(WAIT_S)
        assert answer(second).is_success


def test_the_first_one_running_out_of_time_leaves_its_place() -> None:
    """An equal item without a deadline is sent all the same, in its place."""
    clock = ManualClock()
    echo = Echo()
    with batching(echo, clock=clock, key=_key, linger_ms=FOREVER_MS) as batcher:
        hasty = batcher.submit(("a", 1), deadline_s=1)
        patient = batcher.submit(("a", 2))
        batcher.submit("behind")
        clock.await_sleepers(2)
        clock.advance(1)
        assert answer(hasty).is_failure
        assert batcher.stats().joined == 0
        assert batcher.flush(WAIT_S)
        assert answer(patient).is_success
    assert echo.items == [("a", 2), "behind"]


def test_a_follower_runs_out_of_time_by_itself() -> None:
    """While the item it joined is not sent; the joined one is not touched."""
    clock = ManualClock()
    with batching(Echo(), clock=clock, key=_key, linger_ms=FOREVER_MS) as batcher:
        first = batcher.submit(("a", 1))
        hasty = batcher.submit(("a", 2), deadline_s=1)
        clock.await_sleepers(2)
        clock.advance(1)
        assert answer(hasty).is_failure
        assert batcher.stats().expired == 1
        assert batcher.flush(WAIT_S)
        assert answer(first).is_success


def test_a_follower_of_what_was_sent_does_not_expire() -> None:
    """Its item is with the backend."""
    clock = ManualClock()
    gate = Gate()
    with batching(gate, clock=clock, key=_key, linger_ms=0) as batcher:
        batcher.submit(("a", 1))
        gate.wait_entered()
        follower = batcher.submit(("a", 2), deadline_s=1)
        assert clock.await_sleepers()
        clock.advance(1)
        gate.open()
        assert answer(follower).is_success


def test_a_refusal_is_shared() -> None:
    """Equal items that joined while the thresholds decided share the decision."""
    deciding, go_on = threading.Event(), threading.Event()

    def handler(context: Any) -> Any:
        deciding.set()
        go_on.wait(WAIT_S)
        return QueueDecision.drop()

    with (
        held(levels(critical_handler=handler), waiting=4, key=_key) as (batcher, _),
        spawn(lambda: batcher.submit(("a", 1))) as first,
    ):
        assert deciding.wait(WAIT_S)
        second = batcher.submit(("a", 2))
        assert_balanced(batcher.stats())
        assert batcher.stats().deciding == 1
        go_on.set()
        assert answer(second).is_dropped
        assert answer(first.result(WAIT_S)).is_dropped


def test_a_key_that_cannot_be_hashed_is_the_callers_error() -> None:
    """It raises from submit, and nothing is counted."""
    with batching(Echo(), key=lambda item: []) as batcher:
        with pytest.raises(TypeError, match="unhashable"):
            batcher.submit("a")
        assert batcher.stats().submitted == 0


def test_a_late_equal_item_shares_no_fate() -> None:
    """Refused after close(), it does not take those along who wait for the one in flight."""
    gate = Gate()
    with batching(gate, key=_key, linger_ms=0) as batcher:
        first = batcher.submit(("a", 1))
        gate.wait_entered()
        second = batcher.submit(("a", 2))
        batcher._engine.begin_close()
        assert answer(batcher.submit(("a", 3))).is_failure
        gate.open()
        assert answer(first).is_success
        assert answer(second).is_success
