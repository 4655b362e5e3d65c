"""The ready-made handlers, and decisions."""

from __future__ import annotations

import queue
from typing import Any

import pytest

from batchmill import ConfigError
from batchmill.pressure import (
    QueueAction,
    QueueDecision,
    QueueFullError,
    QueueThresholdContext,
    ThresholdHandler,
    ThresholdLevel,
)
from batchmill.pressure.strategies import (
    accept,
    by_priority,
    dead_letter,
    drop,
    graceful_degradation,
    reject,
    retry,
)
from tests.kit.batchers import always, context

WARNING, CRITICAL, PLUS = ThresholdLevel


def _delays(attempts: list[int], **settings: Any) -> list[float | None]:
    handler = retry(jitter=0, **settings)
    return [handler(context(attempt=attempt)).delay_ms for attempt in attempts]


def test_accept_and_drop() -> None:
    """They decide what they are called."""
    assert accept()(context()).action is QueueAction.ACCEPT
    assert drop()(context()).action is QueueAction.DROP


def test_reject_carries_the_context() -> None:
    """Depth, threshold, level and retry_after are in its error."""
    reason = reject(retry_after_s=3)(context()).reason
    assert isinstance(reason, QueueFullError)
    assert (reason.depth, reason.threshold, reason.level, reason.retry_after) == (
        10,
        8,
        CRITICAL,
        3,
    )


def test_retry_waits_longer_each_time() -> None:
    """initial · multiplier^(attempt - 1)."""
    delays = _delays([1, 2, 3, 4], initial_ms=10, max_ms=1000, multiplier=3, max_attempts=9)
    assert delays == [10, 30, 90, 270]


def test_retry_never_waits_past_its_maximum() -> None:
    """The delay is capped."""
    assert _delays([4, 5], initial_ms=10, max_ms=100, multiplier=3, max_attempts=9) == [100, 100]


def test_retry_survives_a_power_that_overflows() -> None:
    """After very many attempts the delay is the maximum, not an OverflowError."""
    assert _delays([10**6], max_ms=777, multiplier=10.0, max_attempts=10**9) == [777]


@pytest.mark.parametrize(("chance", "delay"), [(0.0, 100), (0.5, 90), (1.0, 80)])
def test_jitter_takes_a_share_off(chance: float, delay: float) -> None:
    """Items refused together do not come back together."""
    handler = retry(initial_ms=100, jitter=0.2, rng=lambda: chance)
    assert handler(context()).delay_ms == pytest.approx(delay)


def test_retry_gives_up_after_its_attempts() -> None:
    """max_attempts offers in all; then it is rejected, and the error says so."""
    handler = retry(max_attempts=3)
    assert [handler(context(attempt=n)).action for n in (1, 2)] == [QueueAction.RETRY] * 2
    decision = handler(context(attempt=3))
    assert decision.action is QueueAction.REJECT
    assert isinstance(decision.reason, QueueFullError)
    assert "given up after 3 attempts" in str(decision.reason)


@pytest.mark.parametrize(
    ("wrong", "field"),
    [
        ({"initial_ms": 0}, "initial_ms"),
        ({"initial_ms": 11, "max_ms": 10}, "initial_ms"),
        ({"multiplier": 0.5}, "multiplier"),
        ({"max_attempts": 0}, "max_attempts"),
        ({"jitter": 1}, "jitter"),
    ],
)
def test_retry_checks_its_settings(wrong: dict[str, Any], field: str) -> None:
    """A wrong one is named."""
    with pytest.raises(ConfigError, match=field):
        retry(**wrong)


@pytest.mark.parametrize(
    ("level", "action"),
    [
        (WARNING, QueueAction.ACCEPT),
        (CRITICAL, QueueAction.REJECT),
        (PLUS, QueueAction.DROP),
    ],
)
def test_graceful_degradation(level: ThresholdLevel, action: QueueAction) -> None:
    """Accept, then reject, then drop."""
    assert graceful_degradation()(context(level)).action is action


def test_dead_letter_hands_the_item_over() -> None:
    """At CRITICAL_PLUS the sink gets it, and it is dropped."""
    letters: list[Any] = []
    assert dead_letter(letters.append)(context(PLUS, item="x")).action is QueueAction.DROP
    assert letters == ["x"]


@pytest.mark.parametrize(
    ("level", "action"), [(WARNING, QueueAction.ACCEPT), (CRITICAL, QueueAction.REJECT)]
)
def test_dead_letter_below_critical_plus(level: ThresholdLevel, action: QueueAction) -> None:
    """The sink gets nothing there."""
    letters: list[Any] = []
    assert dead_letter(letters.append)(context(level)).action is action
    assert letters == []


def test_dead_letter_may_decide_otherwise_below() -> None:
    """``otherwise`` stands in for the default there."""
    handler = dead_letter(lambda _: None, otherwise=drop())
    assert handler(context(WARNING)).action is QueueAction.DROP


def test_dead_letter_whose_sink_fails_rejects() -> None:
    """The item is not lost: its sender hears of it, with the sink's error as the cause."""
    failure = OSError("disk full")

    def sink(item: object) -> None:
        raise failure

    decision = dead_letter(sink)(context(PLUS))
    assert decision.action is QueueAction.REJECT
    assert decision.reason is not None
    assert "the dead-letter sink failed" in str(decision.reason)
    assert decision.reason.__cause__ is failure


@pytest.mark.parametrize(
    ("item", "action"),
    [
        ("vip", QueueAction.ACCEPT),
        ("bulk", QueueAction.DROP),
        ("other", QueueAction.REJECT),
    ],
)
def test_by_priority(item: str, action: QueueAction) -> None:
    """The handler of the item's priority decides; any other is rejected."""
    handler = by_priority(lambda item: item, {"vip": accept(), "bulk": drop()})
    assert handler(context(item=item)).action is action


def test_by_priority_has_a_default() -> None:
    """It decides about items of no known priority."""
    handler = by_priority(lambda item: item, {}, default=accept())
    assert handler(context()).action is QueueAction.ACCEPT


@pytest.mark.parametrize(
    "decision",
    [QueueDecision.reject("closed for lunch"), reject("closed for lunch")(context())],
    ids=["decision", "strategy"],
)
def test_a_text_becomes_an_error(decision: QueueDecision) -> None:
    """reject("...") is enough of a reason, and the sender gets a queue.Full."""
    assert isinstance(decision.reason, queue.Full)
    assert str(decision.reason) == "closed for lunch"


def test_reject_takes_seconds_by_name() -> None:
    """Its only argument by position is a text."""
    with pytest.raises(ConfigError, match="retry_after_s"):
        reject(5)  # type: ignore[arg-type]


class _Handler:
    """A handler that is an object."""

    def handle(self, context: QueueThresholdContext[Any]) -> QueueDecision:
        return QueueDecision.accept()


@pytest.mark.parametrize(
    "handler",
    [
        by_priority(lambda item: item, {"item": _Handler()}),
        by_priority(lambda item: item, {}, default=_Handler()),
        dead_letter(print, otherwise=_Handler()),
    ],
    ids=["priority", "default", "otherwise"],
)
def test_strategies_take_objects(handler: ThresholdHandler) -> None:
    """Where a strategy asks another handler, that may be an object with handle(context)."""
    assert handler(context()).action is QueueAction.ACCEPT


@pytest.mark.parametrize("delay", [-1, float("nan"), "1", True, None])
def test_a_delay_is_a_number_of_at_least_0(delay: Any) -> None:
    """NaN is none: it would never be over."""
    with pytest.raises(ConfigError, match="delay_ms"):
        QueueDecision.retry(delay)


def test_decisions_carry_what_goes_with_them() -> None:
    """A custom handler's answers are plain values."""
    assert always(QueueDecision.retry(5))(context()).delay_ms == 5.0
    assert QueueDecision.accept().action is QueueAction.ACCEPT
    assert QueueDecision.drop().action is QueueAction.DROP
    assert QueueDecision.reject().reason is None
