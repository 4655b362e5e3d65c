"""Alerts as the store keeps them: rules with their position, states, episodes, and what to send."""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any


class AlertPhase(enum.Enum):
    """Where an alert stands."""

    SILENT = "silent"
    """Not firing; kept because its last notification forbids another one for a while."""
    PENDING = "pending"
    """Some minutes match, but not as many as the rule wants."""
    FIRING = "firing"


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredAlert:
    """The state of one rule for one entity. Times are seconds since 1970, ends of minutes."""

    rule: str
    """The id of the rule."""
    entity_id: str
    entity_name: str
    phase: AlertPhase
    since_s: int
    """When it came into this phase."""
    notified_s: int = 0
    """When a notification that it fires was last due to be sent; 0: never."""
    cleared: int = 0
    """For how many minutes the condition has not held, while it fires."""
    value: float | None = None
    message: str = ""
    labels: Mapping[str, str] = field(default_factory=dict)

    @property
    def is_notified(self) -> bool:
        """Whether somebody was told that it fires now."""
        return self.phase is AlertPhase.FIRING and self.notified_s >= self.since_s


@dataclass(frozen=True, slots=True, kw_only=True)
class AlertEpisode:
    """From the moment an alert fires to the one it is resolved."""

    rule: str
    entity_id: str
    entity_name: str
    starts_s: int
    ends_s: int | None
    """None: it still fires."""
    severity: str
    value: float | None
    message: str


@dataclass(frozen=True, slots=True)
class StoredAlertRule:
    """A rule as the alerting process last had it."""

    id: str
    minute: int
    """The last minute that was evaluated."""
    definition: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class AlertBook:
    """All rules and the state of all alerts."""

    rules: Mapping[str, StoredAlertRule]
    alerts: Sequence[StoredAlert]


@dataclass(frozen=True, slots=True)
class Notification:
    """Something that a receiver has to be sent."""

    seq: int
    """In the order of sending; 0 before it is stored."""
    target: str
    content: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class AlertChange:
    """What one evaluation changes; it is written in one transaction, or not at all."""

    expected: Mapping[str, int | None] = field(default_factory=dict)
    """By rule, the minute that its position must have; None: the rule must not be there."""
    rules: Sequence[StoredAlertRule] = ()
    """Rules with their new position."""
    removed: Sequence[str] = ()
    """Rules that are gone, with all of their states."""
    saved: Sequence[StoredAlert] = ()
    deleted: Sequence[tuple[str, str]] = ()
    """States that are gone: rule and entity id."""
    episodes: Sequence[AlertEpisode] = ()
    """Episodes that begin, or that end."""
    notifications: Sequence[Notification] = ()
    max_waiting: int = 10_000
    """So many notifications may wait for a target; the oldest beyond that are dropped."""
    forget_before_s: int = 0
    """Episodes that ended before are removed."""


@dataclass(frozen=True, slots=True)
class AlertChangeResult:
    """What came of an :class:`AlertChange`."""

    applied: bool
    """False: another process has evaluated these minutes; nothing was changed."""
    dropped: Mapping[str, int] = field(default_factory=dict)
    """By target, notifications that were dropped because too many waited."""
