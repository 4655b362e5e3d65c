"""What an alert does in one minute, as a pure function: fires, waits, is silent, is resolved."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from batchmill.alerts.evaluation import (
    EntityNames,
    Occasion,
    Outcome,
    Verdict,
    burn_rate,
    judge,
    take_step,
)
from batchmill.alerts.expression import Window, parse
from batchmill.alerts.rules import NoData, Rule, Threshold, count_condition
from batchmill.store import AlertEpisode, AlertPhase, StoredAlert

WEB = EntityNames("d2Vi.1", "web")
YES, SOME, NO, UNKNOWN = Verdict.HOLDS, Verdict.PARTLY, Verdict.FAILS, Verdict.UNKNOWN
Said = list[tuple[int, str]]


def rule(**fields: Any) -> Rule:
    """A rule: the value is above 5 in two of three minutes."""
    condition = Threshold(condition=count_condition(parse("x"), ">", 5, 2), period=3, text="x > 5")
    return Rule(**{"name": "high", "condition": condition, **fields})


@dataclass
class Life:
    """An alert of one rule and one entity, minute by minute; the first minute ends at 60."""

    rule: Rule
    state: StoredAlert | None = None
    said: Said = field(default_factory=list)
    """The minute, from 1 on, and the occasion of each notification."""
    episodes: list[AlertEpisode] = field(default_factory=list)
    minutes: int = 0

    def live(self, verdicts: Iterable[Verdict | None]) -> Life:
        for verdict in verdicts:
            self.minutes += 1
            outcomes = {} if verdict is None else {WEB.id: Outcome(WEB, verdict, 7.0)}
            before = {} if self.state is None else {WEB.id: self.state}
            step = take_step(self.rule, before, outcomes, 60 * self.minutes)
            self.said += [(self.minutes, message.occasion.value) for message in step.messages]
            self.episodes += step.episodes
            if step.saved:
                [self.state] = step.saved
            elif step.deleted:
                self.state = None
        return self


def test_an_alert_is_told_once_and_resolved_once() -> None:
    """However long it fires."""
    life = Life(rule()).live([YES, YES, YES, NO, NO])
    assert life.said == [(1, "firing"), (4, "resolved")]
    assert life.state is None


def test_an_episode_lasts_from_firing_to_resolved() -> None:
    """It is written when it begins, and again when it ends."""
    life = Life(rule(severity="critical")).live([NO, YES, YES, NO])
    assert [(one.starts_s, one.ends_s) for one in life.episodes] == [(120, None), (120, 240)]
    assert {one.severity for one in life.episodes} == {"critical"}


def test_pending_comes_before_firing() -> None:
    """While too few minutes match nobody is told."""
    life = Life(rule()).live([SOME, SOME])
    assert life.state is not None
    assert (life.state.phase, life.state.since_s) == (AlertPhase.PENDING, 60)
    assert life.said == []
    assert life.live([YES]).said == [(3, "firing")]


def test_pending_that_does_not_fire_is_forgotten() -> None:
    """Nothing is sent, nothing stays."""
    life = Life(rule()).live([SOME, NO])
    assert (life.state, life.said, life.episodes) == (None, [], [])


def test_a_notification_is_repeated_only_if_the_rule_says_so() -> None:
    """After so many minutes, again and again."""
    assert Life(rule(repeat=2)).live([YES] * 5).said == [
        (1, "firing"),
        (3, "repeated"),
        (5, "repeated"),
    ]


def test_silence_holds_back_an_alert_that_fires_again() -> None:
    """Until the silence is over; what nobody heard of is not resolved either."""
    life = Life(rule(silence=5)).live([YES, NO, YES, NO])
    assert life.said == [(1, "firing"), (2, "resolved")]
    assert len({one.starts_s for one in life.episodes}) == 2
    assert life.state is not None
    assert life.state.phase is AlertPhase.SILENT


def test_silence_ends_while_the_alert_fires() -> None:
    """It is told then."""
    life = Life(rule(silence=4)).live([YES, NO, YES, YES, YES])
    assert life.said == [(1, "firing"), (2, "resolved"), (5, "firing")]


def test_silence_is_forgotten_when_it_is_over() -> None:
    """No state stays behind for ever."""
    assert Life(rule(silence=3)).live([YES, NO, NO]).state is not None
    assert Life(rule(silence=3)).live([YES, NO, NO, NO]).state is None


def test_recovery_waits_for_good_minutes() -> None:
    """So many more; a bad one in between begins anew."""
    life = Life(rule(recovery=1)).live([YES, NO, YES, NO, NO])
    assert life.said == [(1, "firing"), (5, "resolved")]


def test_an_entity_without_values_is_resolved() -> None:
    """By default."""
    assert Life(rule()).live([YES, None]).said == [(1, "firing"), (2, "resolved")]


@pytest.mark.parametrize("missing", [None, UNKNOWN])
def test_a_rule_may_keep_its_state_without_values(missing: Verdict | None) -> None:
    """However long there are none."""
    life = Life(rule(no_data=NoData.KEEP)).live([YES, missing, missing, NO])
    assert life.said == [(1, "firing"), (4, "resolved")]


def test_the_identity_of_an_alert_does_not_change() -> None:
    """Its labels and its start are the same in every notification."""
    state: StoredAlert | None = None
    seen = set()
    for minute, value in enumerate([7.0, 8.0, 9.0], 1):
        outcome = Outcome(WEB, YES, value)
        before = {} if state is None else {WEB.id: state}
        step = take_step(rule(repeat=1), before, {WEB.id: outcome}, 60 * minute)
        [state] = step.saved
        [message] = step.messages
        seen.add((tuple(sorted(message.alert.labels.items())), message.alert.since_s))
    assert len(seen) == 1
    assert message.occasion is Occasion.REPEATED


@pytest.mark.parametrize(
    ("values", "verdict", "value"),
    [
        ([1, 2, 3], NO, 3),
        ([1, 9, 3], SOME, 3),
        ([9, 2, 8], YES, 8),
        ([None, 9, 8], YES, 8),
        ([9, None, None], SOME, 9),
    ],
)
def test_minutes_are_counted(values: list[float | None], verdict: Verdict, value: float) -> None:
    """Two of three minutes must match; the newest value is shown."""
    outcome = judge(rule(), Window({"x": {"": values}}, 3), WEB)
    assert (outcome.verdict, outcome.value) == (verdict, value)


@pytest.mark.parametrize(
    ("no_data", "verdict"), [(NoData.OK, SOME), (NoData.FIRING, YES), (NoData.KEEP, UNKNOWN)]
)
def test_minutes_without_a_value(no_data: NoData, verdict: Verdict) -> None:
    """They do not match; or they do; or nothing changes."""
    window = Window({"x": {"": [9, 1, None]}}, 3)
    assert judge(rule(no_data=no_data), window, WEB).verdict is verdict


def test_any_label_may_fire() -> None:
    """Each is counted for itself, and the one that fires is shown."""
    window = Window({"x": {"{p=50}": [9, 1, 1], "{p=99}": [1, 9, 8]}}, 3)
    outcome = judge(rule(), window, WEB)
    assert (outcome.verdict, outcome.value) == (YES, 8)
    window = Window({"x": {"{p=50}": [9, 1, 1], "{p=99}": [1, 9, 1]}}, 3)
    assert judge(rule(), window, WEB).verdict is SOME


def test_burn_rates() -> None:
    """The share of bad calls by the share that is allowed."""
    assert burn_rate(90, 100, 0.99) == pytest.approx(10)
    assert burn_rate(100, 100, 0.99) == 0
    assert burn_rate(0, 0, 0.99) is None


def test_a_step_does_not_depend_on_how_often_it_is_taken() -> None:
    """The same minute gives the same states, episodes and messages: a retry changes nothing."""
    outcomes = {WEB.id: Outcome(WEB, YES, 7.0)}
    first, second = (take_step(rule(), {}, outcomes, 60) for _ in range(2))
    assert first == second
    [state] = first.saved
    assert replace(state) == state
