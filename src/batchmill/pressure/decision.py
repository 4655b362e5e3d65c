"""Decisions about items that meet a threshold, and the events that listeners receive."""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass, field
from time import time as wall_clock
from typing import Any, Generic, Protocol, TypeAlias, TypeVar

from batchmill.callables import check_plain
from batchmill.errors import ConfigError
from batchmill.pressure.levels import QueueFullError, ThresholdLevel

T = TypeVar("T")


class QueueAction(enum.Enum):
    """What is done with the item."""

    ACCEPT = "accept"
    """It is queued nevertheless (but never past the hard capacity)."""
    REJECT = "reject"
    """It is not queued; its sender gets the reason."""
    DROP = "drop"
    """It is not queued, without an error: a third outcome, counted by level."""
    RETRY = "retry"
    """It is offered again after a delay."""


@dataclass(frozen=True, slots=True)
class QueueDecision:
    """An action with its reason or delay. Made by :meth:`accept`, :meth:`reject` and so on."""

    action: QueueAction
    reason: Exception | None = None
    """Why, for REJECT. None stands for a QueueFullError with depth, threshold and level."""
    delay_ms: float | None = None
    """When to try again, for RETRY."""

    @staticmethod
    def accept() -> QueueDecision:
        """Queue the item."""
        return _ACCEPT

    @staticmethod
    def reject(reason: Exception | str | None = None) -> QueueDecision:
        """Refuse the item; ``reason`` is what its sender gets (a text: as a QueueFullError)."""
        if isinstance(reason, str):
            reason = QueueFullError(reason)
        return QueueDecision(QueueAction.REJECT, reason=reason)

    @staticmethod
    def drop() -> QueueDecision:
        """Discard the item."""
        return _DROP

    @staticmethod
    def retry(delay_ms: float) -> QueueDecision:
        """Offer the item again after ``delay_ms``."""
        number = isinstance(delay_ms, (int, float)) and not isinstance(delay_ms, bool)
        if not number or not delay_ms >= 0:
            raise ConfigError("delay_ms", delay_ms, "a number of at least 0")
        return QueueDecision(QueueAction.RETRY, delay_ms=float(delay_ms))


_ACCEPT = QueueDecision(QueueAction.ACCEPT)
_DROP = QueueDecision(QueueAction.DROP)


@dataclass(frozen=True, slots=True)
class QueueThresholdContext(Generic[T]):
    """What a handler knows when it decides."""

    item: T
    """The item that is being submitted."""
    depth: int
    """The depth it met."""
    threshold: int
    """The threshold that depth has reached."""
    level: ThresholdLevel
    """The level of that threshold."""
    attempt: int
    """1 for the first time, 2 for the first retry, and so on."""
    time: float
    """When, on the monotonic clock, in seconds."""
    timestamp: float = field(default_factory=wall_clock, compare=False)
    """When, by the wall clock, in seconds since 1970."""


ThresholdHandler: TypeAlias = Callable[[QueueThresholdContext[Any]], QueueDecision]
"""Decides about an item. Called on the submitting thread, outside any lock: it should be quick."""


class QueueThresholdHandler(Protocol):
    """A handler that is an object."""

    def handle(self, context: QueueThresholdContext[Any], /) -> QueueDecision:
        """Decide about an item, as a :data:`ThresholdHandler` does."""
        ...


class EventKind(enum.Enum):
    """The kind of an event."""

    DECISION = "decision"
    """An item met a threshold and was decided about."""
    ENTERED = "entered"
    """The depth rose to a level."""
    LEFT = "left"
    """The depth fell clearly below a level."""


@dataclass(frozen=True, slots=True)
class QueueThresholdEvent(Generic[T]):
    """What a listener receives."""

    kind: EventKind
    """A decision about an item, or a level entered or left."""
    depth: int
    """The depth at that moment."""
    threshold: int
    """The threshold of the level."""
    level: ThresholdLevel
    """The level."""
    time: float
    """When, on the monotonic clock, in seconds."""
    item: T | None = None
    """The item, for a decision."""
    decision: QueueDecision | None = None
    """What was decided, for a decision."""
    timestamp: float = field(default_factory=wall_clock, compare=False)
    """When, by the wall clock, in seconds since 1970."""


ThresholdListener: TypeAlias = Callable[[QueueThresholdEvent[Any]], object]
"""Receives events on a thread of its own; see QueueThresholdSettings.listeners."""


class QueueThresholdListener(Protocol):
    """A listener that is an object."""

    def on_threshold(self, event: QueueThresholdEvent[Any], /) -> object:
        """Receive an event, as a :data:`ThresholdListener` does."""
        ...


def handler_function(
    handler: ThresholdHandler | QueueThresholdHandler, field: str = "handler"
) -> ThresholdHandler:
    """The function of a handler: its method ``handle``, or the callable itself.

    A :class:`ConfigError` about ``field`` if it has neither.
    """
    method = getattr(handler, "handle", handler)
    if not callable(method):
        allowed = "a callable from context to decision, or an object with handle(context)"
        raise ConfigError(field, handler, allowed)
    check_plain(field, method)
    return method


def listener_function(
    listener: ThresholdListener | QueueThresholdListener, field: str = "listener"
) -> ThresholdListener:
    """The function of a listener: its method ``on_threshold``, or the callable itself.

    A :class:`ConfigError` about ``field`` if it has neither.
    """
    method = getattr(listener, "on_threshold", listener)
    if not callable(method):
        allowed = "callables that take an event, or objects with on_threshold(event)"
        raise ConfigError(field, listener, allowed)
    check_plain(field, method)
    return method
