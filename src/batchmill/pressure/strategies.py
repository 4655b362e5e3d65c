"""Ready-made threshold handlers.

Each function returns a handler for ``QueueThresholdSettings``; compose your own from them, or write
a plain function from context to decision.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from typing import Any

from batchmill.callables import check_done, check_plain
from batchmill.errors import ConfigError
from batchmill.pressure.decision import (
    QueueDecision,
    QueueThresholdContext,
    QueueThresholdHandler,
    ThresholdHandler,
    handler_function,
)
from batchmill.pressure.levels import QueueFullError, ThresholdLevel
from batchmill.waiters import back_off_ms
from batchmill.wording import count_of

__all__ = [
    "accept",
    "by_priority",
    "dead_letter",
    "drop",
    "graceful_degradation",
    "reject",
    "retry",
]


def accept() -> ThresholdHandler:
    """Queue the item nevertheless, up to the hard capacity."""
    return lambda context: QueueDecision.accept()


def reject(text: str = "", *, retry_after_s: float | None = None) -> ThresholdHandler:
    """Refuse with a QueueFullError that carries depth, threshold, level and ``retry_after``.

    ``text`` is its message; without one it says how full the queue is.
    """
    if not isinstance(text, str):
        raise ConfigError("text", text, "a text; seconds are given as retry_after_s=…")

    def decide(context: QueueThresholdContext[Any]) -> QueueDecision:
        error = QueueFullError(
            context.depth, context.threshold, context.level, retry_after_s, text=text
        )
        return QueueDecision.reject(error)

    return decide


def drop() -> ThresholdHandler:
    """Discard the item; the outcome is *dropped*, counted by level."""
    return lambda context: QueueDecision.drop()


def retry(
    initial_ms: float = 100,
    max_ms: float = 10_000,
    multiplier: float = 2.0,
    max_attempts: int = 5,
    jitter: float = 0.1,
    rng: Callable[[], float] = random.random,
) -> ThresholdHandler:
    """Offer it again with growing delays: ``initial_ms``, times ``multiplier``, up to ``max_ms``.

    ``jitter`` takes up to that share off each delay, so that items refused together do not
    return together. After ``max_attempts`` offers in all it is rejected, and the error says so.
    """
    if not 0 < initial_ms <= max_ms:
        raise ConfigError("initial_ms", initial_ms, f"above 0 and at most max_ms, {max_ms:g}")
    if multiplier < 1:
        raise ConfigError("multiplier", multiplier, "at least 1")
    if max_attempts < 1:
        raise ConfigError("max_attempts", max_attempts, "at least 1")
    if not 0 <= jitter < 1:
        raise ConfigError("jitter", jitter, "from 0 to below 1")

    def decide(context: QueueThresholdContext[Any]) -> QueueDecision:
        if context.attempt >= max_attempts:
            error = QueueFullError(
                context.depth,
                context.threshold,
                context.level,
                detail=f"given up after {count_of(context.attempt, 'attempt')}",
            )
            return QueueDecision.reject(error)
        delay_ms = back_off_ms(initial_ms, max_ms, multiplier, context.attempt)
        return QueueDecision.retry(delay_ms * (1 - jitter * rng()))

    return decide


def graceful_degradation() -> ThresholdHandler:
    """Accept at WARNING, reject at CRITICAL (the sender may retry), drop at CRITICAL_PLUS."""

    def decide(context: QueueThresholdContext[Any]) -> QueueDecision:
        if context.level is ThresholdLevel.WARNING:
            return QueueDecision.accept()
        if context.level is ThresholdLevel.CRITICAL:
            return QueueDecision.reject()
        return QueueDecision.drop()

    return decide


def dead_letter(
    sink: Callable[[Any], object],
    otherwise: ThresholdHandler | QueueThresholdHandler | None = None,
) -> ThresholdHandler:
    """Give the item to ``sink`` (any callable) and drop it; if that fails, reject it.

    It happens at CRITICAL_PLUS; below, ``otherwise`` decides (default: accept at WARNING, reject
    at CRITICAL). An item is never lost: either the sink has it, or its sender gets the error.
    """
    check_plain("sink", sink)
    below = graceful_degradation() if otherwise is None else handler_function(otherwise)

    def decide(context: QueueThresholdContext[Any]) -> QueueDecision:
        if context.level is not ThresholdLevel.CRITICAL_PLUS:
            return below(context)
        try:
            check_done(sink, sink(context.item))
        except Exception as failure:  # noqa: BLE001 - whatever it is, the sender must hear of it
            error = QueueFullError(
                context.depth,
                context.threshold,
                context.level,
                detail=f"and the dead-letter sink failed: {failure!r}",
            )
            error.__cause__ = failure
            return QueueDecision.reject(error)
        return QueueDecision.drop()

    return decide


def by_priority(
    priority: Callable[[Any], Any],
    handlers: Mapping[Any, ThresholdHandler | QueueThresholdHandler],
    default: ThresholdHandler | QueueThresholdHandler | None = None,
) -> ThresholdHandler:
    """Let the handler of the item's priority decide; ``default`` (reject) for any other.

    >>> by_priority(lambda order: order.kind, {"vip": accept(), "bulk": drop()})  # doctest: +SKIP
    """
    fallback = reject() if default is None else handler_function(default)
    functions = {key: handler_function(handler) for key, handler in handlers.items()}

    def decide(context: QueueThresholdContext[Any]) -> QueueDecision:
        return functions.get(priority(context.item), fallback)(context)

    return decide
