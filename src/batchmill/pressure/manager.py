"""Applies thresholds to a depth: decides about items, notifies listeners, counts.

Guarantees
    * User handlers and listeners run outside any lock; their exceptions are logged and counted.
    * ``decide`` judges the depth that it is given. The caller that then queues the item checks
      ``allows`` under the lock that guards its depth: a decision made at a lower level, or past the
      hard capacity, is void by then.
    * Listeners receive events in order, through a bounded queue of their own; an event that does
      not fit is dropped and counted, and submitting never waits for listeners.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from batchmill import lifecycle
from batchmill.callables import check_done
from batchmill.pressure import strategies
from batchmill.pressure.decision import (
    EventKind,
    QueueAction,
    QueueDecision,
    QueueThresholdContext,
    QueueThresholdEvent,
    QueueThresholdListener,
    ThresholdListener,
    listener_function,
)
from batchmill.pressure.levels import LevelTracker, QueueFullError, ThresholdLevel
from batchmill.pressure.settings import QueueThresholdSettings
from batchmill.pressure.stats import THRESHOLDS, ThresholdStats, limits_of
from batchmill.queue import BatchQueue, BatchQueueSettings, BufferStrategy, ThreadPolicy
from batchmill.telemetry import default_registry, register

log = logging.getLogger("batchmill.pressure")

_FIRST_RETRY_MS = 100
_LAST_EVENTS_MS = 2_000


class QueueThresholdManager:
    """Applies a :class:`QueueThresholdSettings` to any depth: items, bytes, files.

    ``depth`` is called whenever the manager needs the depth; for a queue with its own lock, use
    :meth:`decide` and :meth:`allows` with the exact depth instead of :meth:`check`.
    """

    kind = THRESHOLDS

    def __init__(
        self,
        config: QueueThresholdSettings,
        depth: Callable[[], int],
        *,
        name: str = "thresholds",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.config = config
        self.depth = depth
        self.name = name
        self._clock = clock
        self._event_queue: BatchQueue[Any] | None = None
        self._closed = False
        self._listeners: dict[object, ThresholdListener] = {}
        self._default_retry = strategies.retry(initial_ms=_FIRST_RETRY_MS)
        self._limits = limits_of(config)
        self._reset()
        for listener in config.listeners:
            self.add_listener(listener)
        lifecycle.track(self)
        self._registration = register(self)

    def _reset(self) -> None:
        self._lock = threading.Lock()
        self._tracker = LevelTracker(self.config.thresholds, self.config.leave_ratio)
        self._seen_depth = 0
        self._decisions: dict[tuple[ThresholdLevel, QueueAction], int] = {}
        self._handler_failures = 0
        self._listener_failures = 0
        self._dropped_events = 0

    def check(self, item: Any, attempt: int = 1) -> QueueDecision | None:
        """Decide about ``item`` at the depth of this moment; None below every threshold."""
        depth = self.depth()
        if depth < self.config.warning_threshold:
            self.observe(depth)
            return None
        return self.decide(item, depth, attempt)[0]

    def decide(
        self, item: Any, depth: int, attempt: int = 1
    ) -> tuple[QueueDecision, ThresholdLevel | None]:
        """What to do with ``item``, and the level that was decided for.

        Past the hard capacity an ACCEPT has become a REJECT. A REJECT always has its reason.
        """
        self.observe(depth)
        thresholds = self.config.thresholds
        level = thresholds.level_at(depth)
        if level is None:
            return QueueDecision.accept(), None
        context = QueueThresholdContext(
            item, depth, thresholds.of(level), level, attempt, self._clock()
        )
        decision = self._with_reason(self._call_handler(context), context)
        event = QueueThresholdEvent(
            EventKind.DECISION,
            depth,
            context.threshold,
            level,
            context.time,
            item=item,
            decision=decision,
            timestamp=context.timestamp,
        )
        with self._lock:
            key = (level, decision.action)
            self._decisions[key] = self._decisions.get(key, 0) + 1
            self._enqueue([event])
        self._notify_synchronous([event])
        return decision, level

    def allows(self, level: ThresholdLevel | None, depth: int) -> bool:
        """Whether an ACCEPT decided at ``level`` still holds at ``depth``."""
        if depth >= self.config.hard_capacity:
            return False
        now = self.config.thresholds.level_at(depth)
        return (now or 0) <= (level or 0)

    def full_error(self, depth: int, detail: str = "") -> QueueFullError:
        """The error for an item that met ``depth``."""
        level = self.config.thresholds.level_at(depth)
        limit = self.config.thresholds.of(level or ThresholdLevel.WARNING)
        if depth >= self.config.hard_capacity:
            limit = self.config.hard_capacity
            detail = detail or "nothing is accepted past the hard capacity"
        return QueueFullError(depth, limit, level, self.config.retry_after_s, detail)

    def observe(self, depth: int) -> None:
        """Record a depth; listeners are notified if it enters or leaves a level."""
        self._seen_depth = depth
        tracker = self._tracker
        if tracker.settled(depth):
            return
        with self._lock:
            entered, left = tracker.move(depth)
            now = self._clock()
            # Plain, not QueueThresholdEvent[Any](...): Python 3.11 cannot make a frozen dataclass
            # with slots that way.
            events: list[QueueThresholdEvent[Any]] = [
                QueueThresholdEvent(kind, depth, self.config.thresholds.of(level), level, now)
                for kind, levels in ((EventKind.ENTERED, entered), (EventKind.LEFT, left))
                for level in levels
            ]
            self._enqueue(events)
        self._notify_synchronous(events)

    def add_listener(self, listener: ThresholdListener | QueueThresholdListener) -> None:
        """Have a listener called with every event from now on; any thread may call this.

        One that is there already is not added again.
        """
        function = listener_function(listener)
        with self._lock:
            # A new dict each time: the listeners' thread reads it without the lock.
            self._listeners = {**self._listeners, _identity(listener): function}

    def remove_listener(self, listener: ThresholdListener | QueueThresholdListener) -> bool:
        """Call a listener no more; False when it is not there. Any thread may call this.

        It gets no event after this, except for a call that is under way on another thread.
        """
        with self._lock:
            left = dict(self._listeners)
            was_there = left.pop(_identity(listener), None) is not None
            self._listeners = left
        return was_there

    def stats(self) -> ThresholdStats:
        """A snapshot of what was decided so far."""
        with self._lock:
            current = self._tracker.current
            return ThresholdStats(
                decisions=dict(self._decisions),
                handler_failures=self._handler_failures,
                listener_failures=self._listener_failures,
                dropped_events=self._dropped_events,
                level=ThresholdLevel(current) if current else None,
                name=self.name,
                limits=self._limits,
                depth=self._seen_depth,
            )

    def close(self) -> None:
        """Deliver the queued events to the listeners, then end their thread.

        Later events are not delivered; they count as dropped.
        """
        with self._lock:
            self._closed = True
            event_queue, self._event_queue = self._event_queue, None
        if event_queue is not None:
            event_queue.shutdown()
        self._registration.close(self)

    fork_order = 1

    def begin_close(self) -> None:
        """Nothing to do: the listeners' queue is tracked and closed by itself."""

    def await_close(self) -> None:
        """Nothing to do: see :meth:`begin_close`."""

    def after_fork_in_child(self) -> None:
        """Reset the lock, the level and the counters; the listeners' queue restarts by itself."""
        self._reset()

    def _with_reason(
        self, decision: QueueDecision, context: QueueThresholdContext[Any]
    ) -> QueueDecision:
        depth = context.depth
        if decision.action is QueueAction.ACCEPT:
            if depth < self.config.hard_capacity:
                return decision
            return QueueDecision.reject(self.full_error(depth))
        if decision.action is not QueueAction.REJECT:
            return decision
        reason = decision.reason
        if reason is None:
            return QueueDecision.reject(self.full_error(depth))
        if type(reason) is QueueFullError and (reason.retry_after is None or not reason.threshold):
            measured = reason if reason.threshold else context  # one of a text only knows neither
            retry_after = reason.retry_after
            error = QueueFullError(
                measured.depth,
                measured.threshold,
                measured.level,
                self.config.retry_after_s if retry_after is None else retry_after,
                reason.detail,
                reason.text,
            )
            error.__cause__ = reason.__cause__
            return QueueDecision.reject(error)
        return decision

    def _call_handler(self, context: QueueThresholdContext[Any]) -> QueueDecision:
        handler = self.config.handlers[context.level]
        if handler is None:
            if context.level is ThresholdLevel.WARNING:
                return QueueDecision.accept()
            return self._default(context)
        try:
            decision = handler(context)
            if isinstance(decision, QueueDecision):
                return decision
            log.error(
                "batchmill %s: threshold handler %r returned %r, which is no QueueDecision; "
                "the default action is taken",
                self.name,
                handler,
                decision,
            )
        except Exception:
            log.exception(
                "batchmill %s: threshold handler %r failed; the default action is taken",
                self.name,
                handler,
            )
        with self._lock:
            self._handler_failures += 1
        return self._default(context)

    def _default(self, context: QueueThresholdContext[Any]) -> QueueDecision:
        action = self.config.default_action
        if action is QueueAction.RETRY:
            return self._default_retry(context)
        return QueueDecision(action)

    def _enqueue(self, events: list[QueueThresholdEvent[Any]]) -> None:
        """Queue events for the listeners; under the lock, so that they arrive in order."""
        if not self._listeners or self.config.synchronous_listeners or not events:
            return
        if self._event_queue is None and not self._closed:
            self._event_queue = BatchQueue(
                f"{self.name}-listeners",
                BatchQueueSettings(
                    threads=ThreadPolicy.fixed(1),
                    buffer_size=self.config.listener_capacity,
                    strategy=BufferStrategy.IF_POSSIBLE,
                    consumer=self._notify,
                    # Closing waits for listeners, but a slow one must not hold it up for long.
                    shutdown_timeout_ms=_LAST_EVENTS_MS,
                ),
            )
        for event in events:
            if self._event_queue is None or not self._event_queue.produce(event, timeout=0):
                self._dropped_events += 1

    def _notify_synchronous(self, events: list[QueueThresholdEvent[Any]]) -> None:
        if self.config.synchronous_listeners:
            self._notify(events)

    def _notify(self, events: list[QueueThresholdEvent[Any]]) -> None:
        for event in events:
            for listener in self._listeners.values():
                try:
                    check_done(listener, listener(event))
                except Exception:
                    log.exception("batchmill %s: listener %r failed", self.name, listener)
                    with self._lock:
                        self._listener_failures += 1


def snapshot_thresholds() -> tuple[ThresholdStats, ...]:
    """The stats of all thresholds of this process that are not closed yet, by name."""
    return tuple(manager.stats() for manager in default_registry.components(THRESHOLDS))


def _identity(listener: Any) -> object:
    """What makes two listeners the same: equality for bound methods, else identity.

    ``obj.method`` is a new object each time it is read, but it is the same listener.
    """
    owner = getattr(listener, "__self__", None)
    return id(listener) if owner is None else (id(owner), listener.__name__)


REJECTED = "rejected"
SHED = "shed"


@dataclass(frozen=True, slots=True)
class GuardVerdict:
    """The decision about an item, in the terms of a queue."""

    accepted: bool
    retry_after_s: float | None
    reason: str
    level: ThresholdLevel | None = None
    """The level it was decided at."""


_REJECTED = GuardVerdict(False, None, REJECTED)
_SHED = GuardVerdict(False, None, SHED)


class ThresholdGuard:
    """Decides about the items of a :class:`BatchQueue` (``BatchQueueSettings(thresholds=…)``)."""

    def __init__(self, config: QueueThresholdSettings, name: str) -> None:
        self.manager = QueueThresholdManager(config, lambda: 0, name=name)
        self.free_below = config.warning_threshold

    def judge(self, item: Any, depth: int, attempt: int) -> GuardVerdict:
        """The decision for ``item`` at ``depth``; past the hard capacity nothing is accepted."""
        decision, level = self.manager.decide(item, depth, attempt)
        match decision.action:
            case QueueAction.ACCEPT:
                if not self.manager.allows(level, depth):
                    return _REJECTED
                return GuardVerdict(True, None, "", level)
            case QueueAction.DROP:
                return _SHED
            case QueueAction.RETRY:
                return GuardVerdict(False, (decision.delay_ms or 0.0) / 1000, REJECTED)
        return _REJECTED

    def holds(self, verdict: GuardVerdict, depth: int) -> bool:
        """Whether an ACCEPT is still valid: not at a higher level, nor past the hard capacity."""
        return self.manager.allows(verdict.level, depth)

    def observe(self, depth: int) -> None:
        """Record a depth; see :meth:`QueueThresholdManager.observe`."""
        self.manager.observe(depth)

    def add_listener(self, listener: ThresholdListener | QueueThresholdListener) -> None:
        """Have a listener called with every event from now on."""
        self.manager.add_listener(listener)

    def remove_listener(self, listener: ThresholdListener | QueueThresholdListener) -> bool:
        """Call a listener no more; False when it is not there."""
        return self.manager.remove_listener(listener)

    def close(self) -> None:
        """Deliver the remaining events, and end the listeners' thread."""
        self.manager.close()
