"""Coroutine functions as handlers, sinks and listeners of thresholds: refused, or counted."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from batchmill import ConfigError
from batchmill.pressure import (
    QueueAction,
    QueueThresholdManager,
    QueueThresholdSettings,
    strategies,
)
from tests.kit.batchers import levels
from tests.kit.queues import RECOGNIZED, UNRECOGNIZED, awaitable_of, coroutine_function

recognized = pytest.mark.parametrize("function", RECOGNIZED.values(), ids=RECOGNIZED.keys())
unrecognized = pytest.mark.parametrize("function", UNRECOGNIZED.values(), ids=UNRECOGNIZED.keys())


@recognized
def test_settings_refuse_functions_that_would_not_run(function: Callable[..., Any]) -> None:
    """A threshold handler has to decide at once, a listener to hear at once."""
    for settings in ({"critical_handler": function}, {"listeners": (function,)}):
        with pytest.raises(ConfigError, match="a plain function"):
            QueueThresholdSettings(max_queue_size=10, **settings)


@recognized
def test_dead_letter_refuses_a_sink_that_would_not_run(function: Callable[..., Any]) -> None:
    """Its items would be dropped and be nowhere."""
    with pytest.raises(ConfigError, match=r"sink=.* a plain function"):
        strategies.dead_letter(function)


@unrecognized
def test_item_is_rejected_if_the_sink_returns_an_awaitable(function: Callable[..., Any]) -> None:
    """The sink does not have it, so its sender gets the error."""
    settings = levels(critical_plus_handler=strategies.dead_letter(function))
    manager = QueueThresholdManager(settings, lambda: 0)
    decision, _ = manager.decide("item", settings.critical_plus_threshold)
    assert decision.action is QueueAction.REJECT
    assert "the dead-letter sink failed" in str(decision.reason)


def test_listener_that_returns_an_awaitable_is_counted() -> None:
    """It did not hear the event."""
    listener = awaitable_of(coroutine_function)
    settings = levels(listeners=(listener,), synchronous_listeners=True)
    manager = QueueThresholdManager(settings, lambda: 0)
    manager.decide("item", settings.critical_threshold)
    assert manager.stats().listener_failures > 0
