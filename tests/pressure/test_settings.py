"""The settings of thresholds: derived, checked, frozen."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from batchmill import ConfigError
from batchmill.batcher import BatcherSettings, MicroBatcher
from batchmill.pressure import (
    QueueAction,
    QueueDecision,
    QueueThresholdContext,
    QueueThresholdSettings,
    ThresholdLevel,
    strategies,
)

WARNING, CRITICAL, PLUS = ThresholdLevel


def _marks(config: QueueThresholdSettings) -> tuple[int, ...]:
    return (
        config.warning_threshold,
        config.critical_threshold,
        config.critical_plus_threshold,
        config.hard_capacity,
    )


def test_defaults() -> None:
    """1000 items: 50, 100 and 150 % of them, a hard capacity of 200 %, and REJECT."""
    config = QueueThresholdSettings()
    assert (config.max_queue_size, *_marks(config)) == (1000, 500, 1000, 1500, 2000)
    assert config.default_action is QueueAction.REJECT


@pytest.mark.parametrize(
    ("size", "marks"), [(200, (100, 200, 300, 400)), (1, (1, 1, 1, 2)), (3, (1, 3, 4, 6))]
)
def test_thresholds_follow_the_maximum(size: int, marks: tuple[int, ...]) -> None:
    """Thresholds that are not set are derived from max_queue_size, however small it is."""
    assert _marks(QueueThresholdSettings(max_queue_size=size)) == marks


def test_a_threshold_that_is_set_stays() -> None:
    """The others are derived as before."""
    config = QueueThresholdSettings(max_queue_size=100, warning_threshold=80)
    assert _marks(config) == (80, 100, 150, 200)


def test_hard_capacity_is_never_derived_below_critical_plus() -> None:
    """A high CRITICAL_PLUS lifts the default hard capacity with it."""
    config = QueueThresholdSettings(max_queue_size=10, critical_plus_threshold=99)
    assert config.hard_capacity == 99


def test_it_is_frozen() -> None:
    """Thresholds do not change under a running queue."""
    with pytest.raises(dataclasses.FrozenInstanceError):
        QueueThresholdSettings().max_queue_size = 5  # type: ignore[misc]


def test_listeners_become_a_tuple() -> None:
    """A list that is changed later changes nothing."""
    assert QueueThresholdSettings(listeners=[print]).listeners == (print,)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("wrong", "field", "allowed"),
    [
        ({"max_queue_size": 0}, "max_queue_size=0", "a whole number of at least 1"),
        ({"max_queue_size": True}, "max_queue_size=True", "a whole number"),
        ({"max_queue_size": 1.5}, "max_queue_size=1.5", "a whole number"),
        ({"warning_threshold": -1}, "warning_threshold=-1", "at least 1"),
        ({"warning_threshold": 1001}, "critical_threshold=1000", "from warning_threshold, 1001"),
        ({"critical_threshold": 9999}, "critical_threshold=9999", "critical_plus_threshold, 1500"),
        ({"hard_capacity": 1499}, "hard_capacity=1499", "at least critical_plus_threshold, 1500"),
        ({"critical_handler": 5}, "critical_handler=5", "or an object with handle(context)"),
        ({"default_action": "drop"}, "default_action='drop'", "a QueueAction"),
        ({"listeners": (5,)}, "listeners=5", "or objects with on_threshold(event)"),
        ({"listener_capacity": 0}, "listener_capacity=0", "at least 1"),
        ({"leave_ratio": 0}, "leave_ratio=0", "above 0 and at most 1"),
        ({"leave_ratio": float("nan")}, "leave_ratio=nan", "above 0 and at most 1"),
    ],
)
def test_a_wrong_setting_is_named(wrong: dict[str, Any], field: str, allowed: str) -> None:
    """The message names the field, its value and what is allowed."""
    with pytest.raises(ConfigError) as caught:
        QueueThresholdSettings(**wrong)
    assert field in str(caught.value)
    assert allowed in str(caught.value)


def test_critical_plus_without_a_handler_takes_that_of_critical() -> None:
    """A priority handler given for CRITICAL also decides at CRITICAL_PLUS."""
    handler = strategies.drop()
    config = QueueThresholdSettings(critical_handler=handler)
    assert config.handlers == {WARNING: None, CRITICAL: handler, PLUS: handler}


def test_a_warning_handler_decides_at_warning_only() -> None:
    """Above, a level without a handler has the default action."""
    low, high = strategies.accept(), strategies.drop()
    config = QueueThresholdSettings(warning_handler=low)
    assert config.handlers == {WARNING: low, CRITICAL: None, PLUS: None}
    config = QueueThresholdSettings(warning_handler=low, critical_plus_handler=high)
    assert config.handlers == {WARNING: low, CRITICAL: None, PLUS: high}


def test_a_warning_handler_that_accepts_does_not_let_the_queue_grow() -> None:
    """A queue of 1,000 stays one: at CRITICAL the default action rejects."""
    seen: list[ThresholdLevel] = []

    def log_and_accept(context: QueueThresholdContext[Any]) -> QueueDecision:
        seen.append(context.level)
        return QueueDecision.accept()

    config = QueueThresholdSettings(warning_handler=log_and_accept)
    settings = BatcherSettings(batch_size=10_000, linger_ms=3_600_000)
    batcher: MicroBatcher[int] = MicroBatcher(lambda batch: batch, settings, config)
    with batcher:
        batcher.submit_many(range(3000))
        assert batcher.queue_depth == 1000
        assert batcher.stats().rejected == 2000
    assert seen == [WARNING] * 500
