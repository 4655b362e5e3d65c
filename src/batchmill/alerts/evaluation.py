"""Decides what an alert does in one minute: from values and the state before to the state after.

Pure functions, without store, clock or network. All times are seconds since 1970, and those of an
alert are ends of minutes of the data: whoever evaluates the same minutes again, gets the same.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from batchmill.alerts.expression import Window
from batchmill.alerts.rules import NoData, Rule, Threshold
from batchmill.store import AlertEpisode, AlertPhase, StoredAlert

MINUTE_S = 60


@dataclass(frozen=True, slots=True)
class EntityNames:
    """An entity, and what it is called."""

    id: str
    name: str
    """In full: ``GET / in shop``."""
    others: tuple[str, ...] = ()
    """Other names that a rule may mean it by."""

    @property
    def all(self) -> tuple[str, ...]:
        """All of its names."""
        return (self.name, self.id, *self.others)


class Verdict(enum.Enum):
    """What the values of an entity say about a rule's condition."""

    HOLDS = "holds"
    PARTLY = "partly"
    """It holds in some minutes, but not in enough."""
    FAILS = "fails"
    UNKNOWN = "unknown"
    """There is no value, and the rule wants to keep its state then."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """The condition of a rule for one entity, over the minutes up to one."""

    entity: EntityNames
    verdict: Verdict
    value: float | None = None


class Occasion(enum.Enum):
    """Why a notification is sent."""

    FIRING = "firing"
    REPEATED = "repeated"
    RESOLVED = "resolved"


@dataclass(frozen=True, slots=True)
class Message:
    """An alert that receivers are to be told of."""

    occasion: Occasion
    alert: StoredAlert
    ends_s: int | None = None
    """When it was resolved."""


@dataclass(slots=True)
class Step:
    """What one minute changes."""

    saved: list[StoredAlert] = field(default_factory=list)
    deleted: list[StoredAlert] = field(default_factory=list)
    episodes: list[AlertEpisode] = field(default_factory=list)
    messages: list[Message] = field(default_factory=list)


def judge(rule: Rule, window: Window, entity: EntityNames) -> Outcome:
    """Whether a rule's condition on values holds for an entity; not for burn rates."""
    condition = rule.condition
    assert isinstance(condition, Threshold)
    has_newest = any(
        values and values[-1] is not None
        for labels in window.metrics.values()
        for values in labels.values()
    )
    if rule.no_data is NoData.KEEP and not has_newest:
        return Outcome(entity, Verdict.UNKNOWN)
    absent = 1.0 if rule.no_data is NoData.FIRING else None
    window = replace(window, absent=absent, names=entity.all)
    results = condition.condition.compute(window)
    label = next((label for label, (value,) in results.items() if value), None)
    verdict = Verdict.FAILS
    if label is not None:
        verdict = Verdict.HOLDS
    elif (counted := condition.counted) is not None:
        counts = counted.compute(window)
        label = next((label for label, (count,) in counts.items() if count), None)
        verdict = Verdict.FAILS if label is None else Verdict.PARTLY
    return Outcome(entity, verdict, _value(condition, window, label))


def _value(condition: Threshold, window: Window, label: str | None) -> float | None:
    """The newest value of what is compared; of the label that the condition holds for."""
    values = condition.subject.compute(window)
    chosen = values.get(label or "", next(iter(values.values()), ()))
    return next((value for value in reversed(chosen) if value is not None), None)


def burn_rate(good: int, total: int, objective: float) -> float | None:
    """How fast an error budget is used up, 1 being the allowed rate; None without a call.

    >>> round(burn_rate(990, 1000, 0.999), 3)
    10.0
    """
    return (1 - good / total) / (1 - objective) if total else None


def take_step(
    rule: Rule,
    before: Mapping[str, StoredAlert],
    outcomes: Mapping[str, Outcome],
    at_s: int,
) -> Step:
    """What a minute that ended at ``at_s`` changes for all entities of a rule.

    ``before`` are the states by entity id, ``outcomes`` what is known of this minute. An entity
    that has a state and no outcome has no values any more: its condition fails, or is unknown to a
    rule that keeps its state then.
    """
    step = Step()
    for entity_id in dict.fromkeys((*outcomes, *before)):
        state, outcome = before.get(entity_id), outcomes.get(entity_id)
        after = _next_state(rule, state, outcome, at_s, step)
        if after is None:
            if state is not None:
                step.deleted.append(state)
        elif after != state:
            step.saved.append(after)
    return step


def rewind(rule: Rule, before: Mapping[str, StoredAlert], at_s: int) -> Step:
    """What becomes of states when a rule goes back to a minute that ended at ``at_s``.

    No time may be later than that: else an alert would be silent, or fire, until then. An episode
    that began later ends, and goes on as one that begins now.
    """
    step = Step()
    for state in before.values():
        if max(state.since_s, state.notified_s) <= at_s:
            continue
        notified_s = min(state.notified_s, at_s if state.is_notified else at_s - 1)
        after = replace(state, since_s=min(state.since_s, at_s), notified_s=notified_s)
        step.saved.append(after)
        if state.phase is AlertPhase.FIRING and state.since_s > at_s:
            step.episodes.append(episode(rule.severity, state, state.since_s))
            step.episodes.append(episode(rule.severity, after, None))
    return step


def _next_state(
    rule: Rule, state: StoredAlert | None, outcome: Outcome | None, at_s: int, step: Step
) -> StoredAlert | None:
    if outcome is not None:
        verdict = outcome.verdict
    else:
        verdict = Verdict.UNKNOWN if rule.no_data is NoData.KEEP else Verdict.FAILS
    if verdict is Verdict.UNKNOWN:
        if state is not None and state.phase is AlertPhase.FIRING:
            return _notify(rule, state, at_s, step)
        return state
    if verdict is Verdict.HOLDS:
        assert outcome is not None
        return _notify(rule, _fire(rule, state, outcome, at_s, step), at_s, step)
    if state is not None and state.phase is AlertPhase.FIRING:
        if state.cleared < rule.recovery:
            return _notify(rule, replace(state, cleared=state.cleared + 1), at_s, step)
        _resolve(rule, state, at_s, step)
    if verdict is Verdict.PARTLY:
        assert outcome is not None
        return _pending(rule, state, outcome, at_s)
    return _silent(rule, state, at_s)


def _fire(
    rule: Rule, state: StoredAlert | None, outcome: Outcome, at_s: int, step: Step
) -> StoredAlert:
    if state is not None and state.phase is AlertPhase.FIRING:
        value = state.value if outcome.value is None else outcome.value
        return replace(state, cleared=0, value=value)
    fired = replace(
        _state(rule, state, outcome, AlertPhase.FIRING, at_s),
        message=rule.message_for(outcome.entity.name, value_text(outcome.value)),
    )
    step.episodes.append(episode(rule.severity, fired, None))
    return fired


def _notify(rule: Rule, state: StoredAlert, at_s: int, step: Step) -> StoredAlert:
    """Tell receivers that an alert fires, if it is time to."""
    if not state.is_notified:
        if state.notified_s and at_s < state.notified_s + rule.silence * MINUTE_S:
            return state
        occasion = Occasion.FIRING
    elif rule.repeat and at_s >= state.notified_s + rule.repeat * MINUTE_S:
        occasion = Occasion.REPEATED
    else:
        return state
    notified = replace(state, notified_s=at_s)
    step.messages.append(Message(occasion, notified))
    return notified


def _resolve(rule: Rule, state: StoredAlert, at_s: int, step: Step) -> None:
    step.episodes.append(episode(rule.severity, state, at_s))
    # Who was not told that it fires need not be told that it does not.
    if state.is_notified:
        step.messages.append(Message(Occasion.RESOLVED, state, at_s))


def _pending(rule: Rule, state: StoredAlert | None, outcome: Outcome, at_s: int) -> StoredAlert:
    if state is not None and state.phase is AlertPhase.PENDING:
        return replace(state, value=outcome.value)
    return _state(rule, state, outcome, AlertPhase.PENDING, at_s)


def _silent(rule: Rule, state: StoredAlert | None, at_s: int) -> StoredAlert | None:
    """The state while the last notification still forbids another one; then there is none."""
    if state is None or not state.notified_s:
        return None
    if at_s >= state.notified_s + rule.silence * MINUTE_S:
        return None
    if state.phase is AlertPhase.SILENT:
        return state
    return replace(state, phase=AlertPhase.SILENT, since_s=at_s, cleared=0, value=None)


def _state(
    rule: Rule, state: StoredAlert | None, outcome: Outcome, phase: AlertPhase, at_s: int
) -> StoredAlert:
    entity = outcome.entity
    return StoredAlert(
        rule=rule.id,
        entity_id=entity.id,
        entity_name=entity.name,
        phase=phase,
        since_s=at_s,
        notified_s=0 if state is None else state.notified_s,
        value=outcome.value,
        labels=rule.alert_labels(entity.name, entity.id),
    )


def episode(severity: str, state: StoredAlert, ends_s: int | None) -> AlertEpisode:
    """The episode of an alert that fires, or did."""
    return AlertEpisode(
        rule=state.rule,
        entity_id=state.entity_id,
        entity_name=state.entity_name,
        starts_s=state.since_s,
        ends_s=ends_s,
        severity=severity,
        value=state.value,
        message=state.message,
    )


def value_text(value: float | None) -> str:
    """A value for a message.

    >>> value_text(9950.0), value_text(0.12345678), value_text(None)
    ('9950', '0.1235', 'not there')
    """
    if value is None:
        return "not there"
    return f"{value:.10g}" if value == round(value) else f"{value:.4g}"
