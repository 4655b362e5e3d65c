"""QueueThresholdManager: which action, and how it is counted, at any depth."""

from __future__ import annotations

import logging
import os
import queue
import time
from typing import Any

import pytest

from batchmill.pressure import (
    QueueAction,
    QueueDecision,
    QueueFullError,
    QueueThresholdContext,
    QueueThresholdManager,
    QueueThresholdSettings,
    ThresholdLevel,
    strategies,
)
from tests.kit.batchers import PRESSURE_LOGGER, always, levels
from tests.kit.processes import in_child

WARNING, CRITICAL, PLUS = ThresholdLevel
ACCEPT, REJECT, DROP, RETRY = QueueAction


def _manager(depth: int = 0, **settings: Any) -> QueueThresholdManager:
    return QueueThresholdManager(levels(**settings), lambda: depth)


def _action(manager: QueueThresholdManager) -> QueueAction | None:
    decision = manager.check("item")
    return decision.action if decision is not None else None


def test_below_every_threshold_nothing_is_decided() -> None:
    """And nothing is counted."""
    manager = _manager(1)
    assert manager.check("item") is None
    assert manager.decide("item", 1) == (QueueDecision.accept(), None)
    assert manager.stats().decisions == {}


def test_warning_without_a_handler_accepts() -> None:
    """The default action is for CRITICAL and above: half the queue stays usable."""
    assert _action(_manager(2)) is ACCEPT


@pytest.mark.parametrize("depth", [4, 6])
@pytest.mark.parametrize("action", [ACCEPT, REJECT, DROP, RETRY])
def test_the_default_action_holds_from_critical(depth: int, action: QueueAction) -> None:
    """Where no handler was given."""
    assert _action(_manager(depth, default_action=action)) is action


def test_the_default_retry_gives_up_too() -> None:
    """RETRY as the default action is bounded like the strategy."""
    manager = _manager(4, default_action=RETRY)
    assert manager.decide("item", 4, attempt=5)[0].action is REJECT


@pytest.mark.parametrize(("depth", "action"), [(2, ACCEPT), (4, DROP), (6, DROP)])
def test_a_critical_handler_decides_at_critical_plus_too(depth: int, action: QueueAction) -> None:
    """But not at WARNING, which accepts."""
    assert _action(_manager(depth, critical_handler=strategies.drop())) is action


def test_the_handler_gets_the_whole_context() -> None:
    """Item, depth, threshold, level, attempt, the time on the manager's clock and of the wall."""
    seen: list[QueueThresholdContext[Any]] = []

    def handler(context: QueueThresholdContext[Any]) -> QueueDecision:
        seen.append(context)
        return QueueDecision.accept()

    config = levels(critical_handler=handler)
    manager = QueueThresholdManager(config, lambda: 5, clock=lambda: 77.0)
    before = time.time()
    manager.check("item", attempt=3)
    assert seen == [QueueThresholdContext("item", 5, 4, CRITICAL, 3, 77.0)]
    assert before <= seen[0].timestamp <= time.time()


def _raises(context: object) -> QueueDecision:
    raise LookupError("a bug in the handler")


@pytest.mark.parametrize("handler", [_raises, lambda context: None, lambda context: "accept"])
def test_a_handler_that_fails_leaves_it_to_the_default_action(
    handler: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """Raising or answering no decision: logged and counted, and the item is decided about."""
    manager = _manager(2, warning_handler=handler, default_action=DROP)
    with caplog.at_level(logging.ERROR, PRESSURE_LOGGER):
        assert _action(manager) is DROP
    assert manager.stats().handler_failures == 1
    assert "the default action is taken" in caplog.text


def test_past_the_hard_capacity_even_accept_rejects() -> None:
    """The error names the hard capacity."""
    decision = _manager(8, critical_handler=strategies.accept()).check("item")
    assert decision is not None
    assert isinstance(decision.reason, QueueFullError)
    assert (decision.reason.threshold, decision.reason.level) == (8, PLUS)


def test_a_rejection_at_the_hard_capacity_is_counted_as_one() -> None:
    """Though the handler said ACCEPT."""
    manager = _manager(8, critical_handler=strategies.accept())
    manager.check("item")
    assert manager.stats().decisions == {(PLUS, REJECT): 1}


def test_just_below_the_hard_capacity_accept_holds() -> None:
    """Its boundary is exact."""
    assert _action(_manager(7, critical_handler=strategies.accept())) is ACCEPT


def test_decisions_are_counted_by_level() -> None:
    """Each action at each level has a count of its own."""
    handler = strategies.graceful_degradation()
    manager = _manager(0, warning_handler=handler, critical_handler=handler)
    for depth in (2, 3, 4, 6, 7, 7):
        manager.decide("item", depth)
    assert manager.stats().decisions == {
        (WARNING, ACCEPT): 2,
        (CRITICAL, REJECT): 1,
        (PLUS, DROP): 3,
    }


@pytest.mark.parametrize(
    ("level", "depth", "holds"),
    [
        (None, 1, True),
        (None, 2, False),
        (WARNING, 3, True),
        (WARNING, 1, True),
        (WARNING, 4, False),
        (CRITICAL, 6, False),
        (PLUS, 7, True),
        (PLUS, 8, False),
    ],
)
def test_an_accept_holds_while_the_level_has_not_risen(
    level: ThresholdLevel | None, depth: int, holds: bool
) -> None:
    """Nor the hard capacity been reached: what is asked again on commit."""
    assert _manager().allows(level, depth) is holds


def test_a_rejection_without_reason_gets_one() -> None:
    """Depth, threshold, level, and the configured retry_after."""
    decision = _manager(5, critical_handler=always(QueueDecision.reject()), retry_after_s=9).check(
        1
    )
    assert decision is not None
    error = decision.reason
    assert isinstance(error, QueueFullError)
    assert (error.depth, error.threshold, error.level, error.retry_after) == (5, 4, CRITICAL, 9)


@pytest.mark.parametrize(
    "handler", [strategies.reject(), strategies.retry(max_attempts=1)], ids=["reject", "retry"]
)
def test_a_full_queue_tells_when_to_come_back(handler: Any) -> None:
    """The configured retry_after, where a strategy names none."""
    decision = _manager(5, critical_handler=handler, retry_after_s=9).check(1)
    assert decision is not None
    assert isinstance(decision.reason, QueueFullError)
    assert decision.reason.retry_after == 9


def test_a_rejection_with_a_text_says_that_and_carries_the_rest() -> None:
    """A queue.Full with the handler's words, and depth, threshold, level and retry_after."""
    handler = always(QueueDecision.reject("come back tomorrow"))
    decision = _manager(5, critical_handler=handler, retry_after_s=9).check(1)
    assert decision is not None
    error = decision.reason
    assert isinstance(error, queue.Full)
    assert isinstance(error, QueueFullError)
    assert str(error) == "come back tomorrow"
    assert (error.depth, error.threshold, error.level, error.retry_after) == (5, 4, CRITICAL, 9)


class _Drops:
    """A handler that is an object."""

    def handle(self, context: QueueThresholdContext[Any]) -> QueueDecision:
        return QueueDecision.drop()


@pytest.mark.parametrize("name", ["warning_handler", "critical_handler", "critical_plus_handler"])
def test_a_handler_may_be_an_object(name: str) -> None:
    """With the method handle(context)."""
    depth = {"warning_handler": 2, "critical_handler": 4, "critical_plus_handler": 6}[name]
    assert _action(_manager(depth, **{name: _Drops()})) is DROP


def test_a_custom_reason_is_kept() -> None:
    """The sender gets the handler's own error."""
    reason = OSError("no")
    decision = _manager(5, critical_handler=always(QueueDecision.reject(reason))).check(1)
    assert decision is not None
    assert decision.reason is reason


def test_any_depth_will_do() -> None:
    """A spool's bytes, for one: the supplier is asked each time."""
    spool = {"bytes": 0}
    manager = QueueThresholdManager(
        QueueThresholdSettings(max_queue_size=1 << 20), lambda: spool["bytes"]
    )
    assert manager.check(b"row") is None
    spool["bytes"] = 1 << 20
    assert _action(manager) is REJECT


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork")
def test_a_child_forked_while_the_lock_is_held_does_not_hang() -> None:
    """It has a lock of its own, and counts of its own."""
    manager = _manager(4)
    manager.check("parent")
    with manager._lock:
        count = in_child(lambda: [manager.check(1) is not None, len(manager.stats().decisions)])
    assert count == [True, 1]
