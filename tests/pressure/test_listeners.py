"""Listeners: their own thread, their own bounded line, and one event for each level."""

from __future__ import annotations

import logging
import threading
from typing import Any

import pytest

from batchmill.pressure import (
    EventKind,
    QueueAction,
    QueueThresholdEvent,
    QueueThresholdManager,
    ThresholdLevel,
)
from tests.kit.batchers import PRESSURE_LOGGER, batching, held, levels
from tests.kit.threads import WAIT_S

WARNING, CRITICAL, PLUS = ThresholdLevel
ENTERED, LEFT, DECISION = EventKind.ENTERED, EventKind.LEFT, EventKind.DECISION


def _manager(*listeners: Any, **settings: Any) -> QueueThresholdManager:
    return QueueThresholdManager(levels(listeners=listeners, **settings), lambda: 0)


def _stays(events: list[QueueThresholdEvent[Any]]) -> list[tuple[EventKind, ThresholdLevel]]:
    return [(event.kind, event.level) for event in events if event.kind is not DECISION]


def test_a_listener_hears_on_a_thread_of_its_own() -> None:
    """Submitting never waits for it."""
    heard: list[int] = []
    manager = _manager(lambda event: heard.append(threading.get_ident()))
    manager.decide("item", 2)
    manager.close()
    assert len(heard) == 2
    assert threading.get_ident() not in heard


def test_listeners_may_be_synchronous() -> None:
    """For tests: on the submitting thread, before the decision is back."""
    heard: list[QueueThresholdEvent[Any]] = []
    manager = _manager(heard.append, synchronous_listeners=True)
    manager.decide("item", 5)
    assert [event.kind for event in heard] == [ENTERED, ENTERED, DECISION]
    last = heard[-1]
    assert (last.item, last.depth, last.threshold, last.level) == ("item", 5, 4, CRITICAL)
    assert last.decision is not None
    assert last.decision.action is QueueAction.REJECT


def test_a_full_line_drops_events_and_counts_them() -> None:
    """A slow listener costs events, not speed."""
    entered, go_on = threading.Event(), threading.Event()

    def listener(event: object) -> None:
        entered.set()
        go_on.wait(WAIT_S)

    manager = _manager(listener, listener_capacity=3)
    try:
        manager.observe(2)
        assert entered.wait(WAIT_S)
        for _ in range(10):
            manager.decide("item", 2)
        assert manager.stats().dropped_events >= 10 - 3
    finally:
        go_on.set()
        manager.close()


def test_a_listener_that_raises_stops_nobody(caplog: pytest.LogCaptureFixture) -> None:
    """The others hear the event, it hears the next one, and its failures are counted."""
    heard: list[EventKind] = []

    def bad(event: object) -> None:
        raise LookupError("a bug in the listener")

    manager = _manager(bad, lambda event: heard.append(event.kind))
    with caplog.at_level(logging.ERROR, PRESSURE_LOGGER):
        manager.decide("item", 2)
        manager.close()
    assert heard == [ENTERED, DECISION]
    assert manager.stats().listener_failures == 2
    assert "a bug in the listener" in caplog.text


def test_a_level_is_reported_once() -> None:
    """However many items meet it, and however the depth trembles: ENTERED once, LEFT once."""
    heard: list[QueueThresholdEvent[Any]] = []
    manager = _manager(heard.append, synchronous_listeners=True, leave_ratio=0.5)
    for depth in (1, 2, 3, 2, 3, 2, 1, 2, 0, 0, 2):
        manager.observe(depth)
    assert _stays(heard) == [(ENTERED, WARNING), (LEFT, WARNING), (ENTERED, WARNING)]


def test_the_level_that_holds_is_in_the_stats() -> None:
    """None when none does."""
    manager = _manager()
    assert manager.stats().level is None
    manager.observe(7)
    assert manager.stats().level is PLUS


def test_listeners_hear_in_order() -> None:
    """Threads that cross a threshold back and forth at once: entered and left alternate."""
    heard: list[QueueThresholdEvent[Any]] = []
    manager = _manager(heard.append, listener_capacity=1 << 16)
    start = threading.Barrier(4)

    def cross() -> None:
        start.wait(WAIT_S)
        for _ in range(200):
            manager.observe(2)
            manager.observe(0)

    threads = [threading.Thread(target=cross) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_S)
    manager.close()
    kinds = [event.kind for event in heard]
    assert kinds == [ENTERED, LEFT] * (len(kinds) // 2)


def test_after_close_events_are_dropped_and_no_thread_is_started() -> None:
    """Whoever decides a little later still gets his decision."""
    heard: list[object] = []
    manager = _manager(heard.append)
    manager.close()
    manager.decide("item", 4)
    assert manager._event_queue is None
    assert manager.stats().dropped_events == 3
    assert heard == []


def test_a_batcher_tells_of_levels_entered_and_left() -> None:
    """Entered while its backend is held, left as it catches up."""
    heard: list[QueueThresholdEvent[Any]] = []
    config = levels(listeners=(heard.append,))
    with held(config, waiting=4) as (batcher, gate):
        batcher.submit("refused")
        gate.open()
        assert batcher.flush(WAIT_S)
    assert _stays(heard) == [
        (ENTERED, WARNING),
        (ENTERED, CRITICAL),
        (LEFT, CRITICAL),
        (LEFT, WARNING),
    ]


def test_closing_a_batcher_ends_the_listeners_thread() -> None:
    """What was lined up is heard first."""
    heard: list[object] = []
    config = levels(listeners=(heard.append,))
    with batching(lambda batch: batch, config, linger_ms=1000) as batcher:
        batcher.submit_many(range(3))
    assert len(heard) >= 2
