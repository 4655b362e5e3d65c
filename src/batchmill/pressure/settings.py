"""The settings of thresholds: frozen, keyword-only, validated on creation."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from batchmill.errors import ConfigError, check_int
from batchmill.pressure.decision import (
    QueueAction,
    QueueThresholdHandler,
    QueueThresholdListener,
    ThresholdHandler,
    ThresholdListener,
    handler_function,
    listener_function,
)
from batchmill.pressure.levels import ThresholdLevel, Thresholds

if TYPE_CHECKING:
    from batchmill.pressure.manager import ThresholdGuard


@dataclass(frozen=True, kw_only=True)
class QueueThresholdSettings:
    """When a depth is too much, and what to do then.

    Thresholds left out follow ``max_queue_size``: 50, 100 and 150 % of it.

    >>> QueueThresholdSettings(max_queue_size=200).critical_plus_threshold
    300
    """

    max_queue_size: int = 1000
    """What the queue should hold at most; the thresholds are derived from it."""

    warning_threshold: int = 0
    """Depth at which WARNING begins; 0: half of ``max_queue_size``."""

    critical_threshold: int = 0
    """Depth at which CRITICAL begins; 0: ``max_queue_size``."""

    critical_plus_threshold: int = 0
    """Depth at which CRITICAL_PLUS begins; 0: one and a half times ``max_queue_size``."""

    hard_capacity: int = 0
    """Depth past which even ACCEPT rejects; 0: twice ``max_queue_size``."""

    warning_handler: ThresholdHandler | QueueThresholdHandler | None = None
    """Decides at WARNING, and only there; without it, items are accepted there."""

    critical_handler: ThresholdHandler | QueueThresholdHandler | None = None
    """Decides at CRITICAL; without it ``default_action`` does."""

    critical_plus_handler: ThresholdHandler | QueueThresholdHandler | None = None
    """Decides at CRITICAL_PLUS; without it the CRITICAL handler does, else ``default_action``."""

    default_action: QueueAction = QueueAction.REJECT
    """What happens at CRITICAL and above where no handler decides, or where one fails."""

    listeners: tuple[ThresholdListener | QueueThresholdListener, ...] = ()
    """Called with every event, on a thread of their own.

    More can be added to, and removed from, a running manager, batcher or queue.
    """

    listener_capacity: int = 1024
    """Events that may wait for the listeners; more are dropped and counted."""

    synchronous_listeners: bool = False
    """Call listeners on the submitting thread instead: for tests."""

    leave_ratio: float = 0.9
    """A level is left when the depth falls below this share of its threshold."""

    retry_after_s: float | None = 1.0
    """How long a rejected sender is asked to wait."""

    handlers: dict[ThresholdLevel, ThresholdHandler | None] = field(
        init=False, repr=False, compare=False
    )
    thresholds: Thresholds = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        check_int("max_queue_size", self.max_queue_size, 1)
        size = self.max_queue_size
        self._derive("warning_threshold", max(1, size // 2))
        self._derive("critical_threshold", size)
        self._derive("critical_plus_threshold", size + size // 2)
        if not self.warning_threshold <= self.critical_threshold <= self.critical_plus_threshold:
            raise ConfigError(
                "critical_threshold",
                self.critical_threshold,
                f"from warning_threshold, {self.warning_threshold}, "
                f"to critical_plus_threshold, {self.critical_plus_threshold}",
            )
        self._derive("hard_capacity", max(2 * size, self.critical_plus_threshold))
        if self.hard_capacity < self.critical_plus_threshold:
            raise ConfigError(
                "hard_capacity",
                self.hard_capacity,
                f"at least critical_plus_threshold, {self.critical_plus_threshold}",
            )
        if not isinstance(self.default_action, QueueAction):
            raise ConfigError("default_action", self.default_action, "a QueueAction")
        object.__setattr__(self, "listeners", tuple(self.listeners))
        for listener in self.listeners:
            listener_function(listener, "listeners")
        check_int("listener_capacity", self.listener_capacity, 1)
        if not 0 < self.leave_ratio <= 1:
            raise ConfigError("leave_ratio", self.leave_ratio, "above 0 and at most 1")
        object.__setattr__(self, "handlers", self._handlers())
        thresholds = Thresholds(
            self.warning_threshold, self.critical_threshold, self.critical_plus_threshold
        )
        object.__setattr__(self, "thresholds", thresholds)

    def guard(self, name: str) -> ThresholdGuard:
        """Make the guard of a :class:`BatchQueue` (``BatchQueueSettings(thresholds=…)``)."""
        from batchmill.pressure.manager import ThresholdGuard  # it needs this module

        return ThresholdGuard(self, name)

    def _derive(self, name: str, default: int) -> None:
        if getattr(self, name) == 0:
            object.__setattr__(self, name, default)
        check_int(name, getattr(self, name), 1)

    def _handlers(self) -> dict[ThresholdLevel, ThresholdHandler | None]:
        """The handler of each level; CRITICAL_PLUS without one inherits CRITICAL's.

        WARNING's is not inherited: it decides where there is room left, so one that logs and
        accepts would let the queue grow past its maximum.
        """
        handlers: dict[ThresholdLevel, ThresholdHandler | None] = {}
        for level in ThresholdLevel:
            name = f"{level.name.lower()}_handler"
            own = getattr(self, name)
            handlers[level] = None if own is None else handler_function(own, name)
        critical = handlers[ThresholdLevel.CRITICAL]
        handlers[ThresholdLevel.CRITICAL_PLUS] = handlers[ThresholdLevel.CRITICAL_PLUS] or critical
        return handlers
