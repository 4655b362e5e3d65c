"""Listeners: their own thread, their own bounded line, and one event for each level."""

from __future__ import annotations

import logging
import threading
import time
from typing import Any

import pytest

from batchmill import ConfigError
from batchmill.pressure import (
    EventKind,
    QueueAction,
    QueueThresholdEvent,
    QueueThresholdManager,
    ThresholdLevel,
)
from tests.kit.batchers import PRESSURE_LOGGER, batching, held, levels
from tests.kit.queues import make_queue
from tests.kit.threads import WAIT_S, Gate, spawn

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


class _Ear:
    """A listener that is an object."""

    def __init__(self) -> None:
        self.events: list[QueueThresholdEvent[Any]] = []

    def on_threshold(self, event: QueueThresholdEvent[Any]) -> None:
        self.events.append(event)


def test_a_listener_may_be_an_object() -> None:
    """With the method on_threshold(event)."""
    ear = _Ear()
    manager = _manager(ear, synchronous_listeners=True)
    manager.decide("item", 2)
    assert [event.kind for event in ear.events] == [ENTERED, DECISION]


def test_events_have_both_clocks() -> None:
    """The monotonic time, and the time of the wall; those of a decision are its context's."""
    ear = _Ear()
    config = levels(listeners=(ear,), synchronous_listeners=True)
    manager = QueueThresholdManager(config, lambda: 0, clock=lambda: 77.0)
    before = time.time()
    manager.decide("item", 2)
    assert [event.time for event in ear.events] == [77.0, 77.0]
    assert all(before <= event.timestamp <= time.time() for event in ear.events)


def test_listeners_come_and_go_while_the_manager_lives() -> None:
    """One that is added hears from then on; one that is removed hears no more."""
    first, second = _Ear(), _Ear()
    manager = _manager(first, synchronous_listeners=True)
    manager.decide("one", 2)
    manager.add_listener(second)
    manager.decide("two", 2)
    assert manager.remove_listener(first)
    manager.decide("three", 2)
    heard = [[event.item for event in ear.events if event.item] for ear in (first, second)]
    assert heard == [["one", "two"], ["two", "three"]]


def test_a_removed_listener_is_not_there() -> None:
    """Removing it again, or one that never was, answers False; adding twice is adding once."""
    heard: list[Any] = []
    manager = _manager(synchronous_listeners=True)
    manager.add_listener(heard.append)
    manager.add_listener(heard.append)
    manager.decide("item", 2)
    assert [event.kind for event in heard] == [ENTERED, DECISION]
    assert manager.remove_listener(heard.append)
    assert not manager.remove_listener(heard.append)
    assert not manager.remove_listener(print)


def test_the_first_listener_may_come_late() -> None:
    """A manager that was made without listeners starts their thread for the first one."""
    heard: list[EventKind] = []
    manager = _manager()
    manager.decide("item", 2)
    manager.add_listener(lambda event: heard.append(event.kind))
    manager.decide("item", 2)
    manager.close()
    assert heard == [DECISION]


def test_what_is_no_listener_is_refused() -> None:
    """At once, and not at the first event."""
    with pytest.raises(ConfigError, match="listener=5"):
        _manager().add_listener(5)  # type: ignore[arg-type]


def test_listeners_change_while_events_come() -> None:
    """Threads add and remove listeners while others decide; one that stays hears everything."""
    steady: list[QueueThresholdEvent[Any]] = []
    manager = _manager(steady.append, listener_capacity=1 << 16)
    start = threading.Barrier(4)

    def decide() -> None:
        start.wait(WAIT_S)
        for _ in range(300):
            manager.decide("item", 2)

    def change() -> None:
        start.wait(WAIT_S)
        for _ in range(300):
            ear = _Ear()
            manager.add_listener(ear)
            assert manager.remove_listener(ear)

    changes = [spawn(call) for call in (decide, decide, change, change)]
    for change_made in changes:
        change_made.result()
    manager.close()
    assert [event.kind for event in steady].count(DECISION) == 600
    assert manager.stats().listener_failures == 0


def test_listeners_of_a_batcher_and_a_queue() -> None:
    """Both pass on to their thresholds."""
    ear = _Ear()
    config = levels(synchronous_listeners=True)
    with held(config, waiting=2) as (batcher, _):
        batcher.add_listener(ear)
        batcher.submit("item")
        assert batcher.remove_listener(ear)
        batcher.submit("item")
    gate = Gate()
    with make_queue(consumer=gate, thresholds=config) as queue:
        queue.produce(0)
        gate.wait_entered()
        queue.produce_many([1, 2])
        queue.add_listener(ear)
        queue.produce(3)
        assert queue.remove_listener(ear)
        queue.produce(4)
    assert [event.item for event in ear.events if event.kind is DECISION] == ["item", 3]


def test_without_thresholds_there_is_nothing_to_listen_to() -> None:
    """The error names the setting that is missing."""
    with batching(lambda batch: batch) as batcher, make_queue(consumer=print) as queue:
        for add in (batcher.add_listener, queue.add_listener):
            with pytest.raises(ConfigError, match="thresholds=None"):
                add(print)
