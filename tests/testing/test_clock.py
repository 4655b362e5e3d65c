"""The kit for tests: a clock that is moved by hand."""

from __future__ import annotations

import threading

from batchmill.testing import ManualClock
from batchmill.waiters import ThreadWaiter
from tests.kit.threads import WAIT_S, spawn


def test_the_clock_stands_still() -> None:
    """Until it is told to move, and then by just that much."""
    clock = ManualClock(start=5)
    assert clock.now() == clock.now() == 5
    clock.advance(2.5)
    assert clock.now() == 7.5


def test_a_sleeper_wakes_at_its_time() -> None:
    """Not before."""
    clock = ManualClock()
    with spawn(lambda: clock.wait(ThreadWaiter(), 2)) as woken:
        assert clock.await_sleepers()
        clock.advance(1)
        assert clock.await_sleepers()
        assert not woken.done()
        clock.advance(1)
        assert woken.result(WAIT_S) is False


def test_a_time_that_is_over_is_not_waited_for() -> None:
    """Not even once."""
    assert ManualClock(start=5).wait(ThreadWaiter(), 5) is False


def test_a_wake_that_came_first_is_kept() -> None:
    """As on the system's clock."""
    waiter = ThreadWaiter()
    waiter.wake()
    assert ManualClock(start=5).wait(waiter, 5) is True


def test_a_sleeper_may_be_woken_early() -> None:
    """True: it was called, its time had not come; and it sleeps no more."""
    clock, waiter = ManualClock(), ThreadWaiter()
    with spawn(lambda: clock.wait(waiter, 2)) as woken:
        assert clock.await_sleepers()
        waiter.wake()
        assert woken.result(WAIT_S) is True
    assert not clock.await_sleepers(timeout=0)


def test_for_ever_is_until_woken() -> None:
    """Time may pass meanwhile."""
    clock, waiter = ManualClock(), ThreadWaiter()
    with spawn(lambda: clock.wait(waiter, None)) as woken:
        clock.advance(10**9)
        assert not woken.done()
        waiter.wake()
        assert woken.result(WAIT_S) is True


def test_it_can_be_waited_for_several_sleepers() -> None:
    """How many sleep on the clock; those who wait for ever are not counted."""
    clock = ManualClock()
    waiters = [ThreadWaiter() for _ in range(3)]
    threads = [
        threading.Thread(target=clock.wait, args=(waiter, until))
        for waiter, until in zip(waiters, (1.0, 2.0, None), strict=True)
    ]
    for thread in threads:
        thread.start()
    assert clock.await_sleepers(2)
    assert not clock.await_sleepers(3, timeout=0)
    for waiter in waiters:
        waiter.wake()
    for thread in threads:
        thread.join(WAIT_S)
