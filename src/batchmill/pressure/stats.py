"""What thresholds count, and their instruments."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from batchmill.pressure.decision import QueueAction
from batchmill.pressure.levels import ThresholdLevel
from batchmill.pressure.settings import QueueThresholdSettings
from batchmill.telemetry import ComponentKind, Snapshot, counter, gauge, up_down


@dataclass(frozen=True, slots=True)
class ThresholdStats(Snapshot):
    """What thresholds decided since the start."""

    decisions: Mapping[tuple[ThresholdLevel, QueueAction], int]
    """How often each action was decided at each level."""
    handler_failures: int
    """Handlers that raised or returned no decision; the default action was taken."""
    listener_failures: int
    """Listener calls that raised."""
    dropped_events: int
    """Events that did not fit the listeners' queue."""
    level: ThresholdLevel | None
    """The current level."""
    name: str = "thresholds"
    """The name in logs: of the queue or the batcher, where one applies them."""
    limits: Mapping[str, int] = field(default_factory=dict)
    """The depths at which ``warning``, ``critical`` and ``critical_plus`` begin, and the
    ``hard_capacity``."""
    depth: int = 0
    """The depth that was seen last, by a decision or an observation."""


def limits_of(settings: QueueThresholdSettings) -> Mapping[str, int]:
    """The depths at which the levels begin, by name, and the hard capacity."""
    limits = {level.name.lower(): settings.thresholds.of(level) for level in ThresholdLevel}
    return limits | {"hard_capacity": settings.hard_capacity}


THRESHOLDS: ComponentKind[ThresholdStats] = ComponentKind(
    "thresholds",
    (
        gauge(
            "level",
            "{level}",
            "The current level: 0 none, 1 warning, 2 critical, 3 critical plus.",
            lambda s: int(s.level or 0),
        ),
        up_down("depth", "{item}", "The depth that was seen last.", lambda s: s.depth),
        gauge(
            "limit",
            "{item}",
            "The depth at which a level begins, and the hard capacity.",
            lambda s: s.limits,
            "level",
        ),
        counter(
            "decisions",
            "{item}",
            "Decisions about items, by level and action.",
            lambda s: {
                (level.name.lower(), action.value): s.decisions.get((level, action), 0)
                for level in ThresholdLevel
                for action in QueueAction
            },
            "level",
            "action",
        ),
        counter(
            "handler_failures",
            "{failure}",
            "Threshold handlers that raised or gave no decision.",
            lambda s: s.handler_failures,
        ),
        counter(
            "listener_failures",
            "{failure}",
            "Calls of listeners that raised.",
            lambda s: s.listener_failures,
        ),
        counter(
            "dropped_events",
            "{event}",
            "Events that did not fit the listeners' queue.",
            lambda s: s.dropped_events,
        ),
    ),
    label="thresholds",
)
