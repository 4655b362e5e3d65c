"""Verdicts: whether something grew without end, honest clients were answered, and all took place.

A soak that did not do to the run what it had planned proves nothing, so that is judged as well.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from tests.soak.schedule import Disturbance

Series = Sequence[tuple[float, float]]
"""Moments in seconds and values."""
FEWEST_SAMPLES = 10
"""With fewer of them, growth is not judged."""
GOAL = 0.95
"""Honest clients are answered so often while strangers attack, and pages all the time."""
FEWEST_ATTEMPTS = 20
"""With fewer attempts than that, there is no verdict."""
RECOVERY_S = 30.0
"""What is down is back so soon: a process that was killed has started, on a busy machine."""
MOST_MISSED = 0.05
"""The share of the planned spans that may be left out, since the receiver took no more."""
LEAST_OF_BURSTS = 0.5
"""The share of the spans planned for bursts that must be acknowledged while a burst lasts."""
MOST_LEFT_OUT = 0.1
"""The share of disturbances whose target may be away for too long."""


@dataclass(frozen=True, kw_only=True)
class Bound:
    """How much a series may grow after the warm-up, and how large it may become.

    The time after the warm-up is divided in halves. What three quarters of the samples of the
    second half stay below may be ``ratio`` times that of the first half, and ``slack`` more. So a
    single peak decides nothing, and bursts, which both halves have, cancel out.
    """

    ratio: float = 1.2
    slack: float = 0.0
    most: float = math.inf
    """No sample may be larger, the warm-up included."""
    usual: float = math.inf
    """Three quarters of the samples after the warm-up may not be larger."""
    per_second: bool = False
    """What is compared is the growth per second: for a store, which grows with time by design."""

    def problem(self, series: Series, from_s: float, until_s: float = math.inf) -> str | None:
        """What is wrong with a series; None if nothing is. ``most`` holds at all times."""
        peak = max((value for _, value in series), default=0.0)
        if peak > self.most:
            return f"was {_number(peak)}, and may be {_number(self.most)}"
        judged = [sample for sample in series if from_s <= sample[0] <= until_s]
        if len(judged) >= FEWEST_SAMPLES and (level := _high(judged)) > self.usual:
            return f"was {_number(level)} for a quarter of the time; {_number(self.usual)} is usual"
        halves = _halves(judged)
        if halves is None:
            return None
        before, after = (_slope(half) if self.per_second else _high(half) for half in halves)
        limit = max(0.0, before) * self.ratio + self.slack
        if after <= limit:
            return None
        unit = " a second" if self.per_second else ""
        return (
            f"grew from {_number(before)} to {_number(after)}{unit}; "
            f"up to {_number(limit)}{unit} is allowed"
        )


def growth_problems(
    samples: Mapping[str, Series],
    bounds: Mapping[str, Bound],
    from_s: float,
    until_s: float = math.inf,
) -> list[str]:
    """What grew beyond its bound; a bound is for all series whose name begins with its own.

    The longest such name counts. A series without a bound is a problem, too: nobody has thought of
    it. Growth is that from the end of the warm-up, ``from_s``, to that of the traffic, ``until_s``.
    """
    texts = []
    for name, series in samples.items():
        prefixes = [prefix for prefix in bounds if name.startswith(prefix)]
        if not prefixes:
            texts.append(f"{name}: has no bound")
        elif (text := bounds[max(prefixes, key=len)].problem(series, from_s, until_s)) is not None:
            texts.append(f"{name}: {text}")
    return texts


def _halves(judged: Series) -> tuple[Series, Series] | None:
    """The samples after the warm-up, in two halves of equal time; None if there are too few."""
    if not judged:
        return None
    middle = (judged[0][0] + judged[-1][0]) / 2
    before = [sample for sample in judged if sample[0] < middle]
    after = [sample for sample in judged if sample[0] >= middle]
    return (before, after) if min(len(before), len(after)) >= FEWEST_SAMPLES // 2 else None


def _high(series: Series) -> float:
    """What three quarters of the samples are not above."""
    values = sorted(value for _, value in series)
    return values[(3 * (len(values) - 1)) // 4]


def _slope(series: Series) -> float:
    """The growth per second from the first to the last sample."""
    (start, first), (end, last) = series[0], series[-1]
    return (last - first) / (end - start)


def _number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


class Attempt(NamedTuple):
    """A request of an honest client: when it began, and whether it succeeded."""

    at_s: float
    answered: bool


@dataclass(frozen=True)
class Happened:
    """A disturbance that took place."""

    event: Disturbance
    began_s: float
    ended_s: float


@dataclass(frozen=True, kw_only=True)
class Share:
    """How many of the attempts succeeded."""

    answered: int
    attempts: int

    @classmethod
    def of(cls, attempts: Iterable[Attempt]) -> Share:
        """Count them."""
        counts = Counter(attempt.answered for attempt in attempts)
        return cls(answered=counts[True], attempts=counts.total())

    def __str__(self) -> str:
        if not self.attempts:
            return "nobody asked"
        return f"{self.answered:,} of {self.attempts:,} ({self.answered / self.attempts:.1%})"

    @property
    def is_bad(self) -> bool:
        """Whether it is below the goal, of attempts that are enough to tell."""
        return self.attempts >= FEWEST_ATTEMPTS and self.answered < GOAL * self.attempts


def is_down(listener: str, event: Disturbance) -> bool:
    """Whether a disturbance keeps a listener from answering, whoever asks."""
    if event.kind in ("kill", "stop"):
        return event.target == listener or (
            event.target == "supervisor" and not listener.startswith("side-")
        )
    return event.kind == "disk"


def undisturbed(
    listener: str, attempts: Iterable[Attempt], happened: Sequence[Happened]
) -> list[Attempt]:
    """The attempts while a listener was neither down nor just back."""
    down = [
        (one.began_s - RECOVERY_S / 3, one.ended_s + RECOVERY_S)  # the answer comes later
        for one in happened
        if is_down(listener, one.event)
    ]
    return [
        attempt
        for attempt in attempts
        if not any(begin <= attempt.at_s <= end for begin, end in down)
    ]


def shares_under_attack(
    attempts: Mapping[str, Sequence[Attempt]], happened: Sequence[Happened]
) -> dict[str, Share]:
    """By attack: the share of honest clients that its listener answered meanwhile.

    ``attempts`` are by listener. What happened while the listener was down does not count.
    """
    shares = {}
    attacks = [one for one in happened if one.event.kind == "strangers"]
    for target in sorted({one.event.target for one in attacks}):
        listener = target.rpartition(" at ")[2]
        times = [(one.began_s, one.ended_s) for one in attacks if one.event.target == target]
        shares[target] = Share.of(
            attempt
            for attempt in undisturbed(listener, attempts.get(listener, ()), happened)
            if any(begin <= attempt.at_s <= end for begin, end in times)
        )
    return shares


def load_problems(counts: Mapping[str, int]) -> list[str]:
    """Whether enough of the planned spans were sent, and those of bursts fast enough."""
    hint = "the receiver took no more, or this machine is too slow (--spans, --burst)"
    problems = []
    due, missed = counts.get("due", 0), counts.get("missed", 0)
    if missed > MOST_MISSED * due:
        problems.append(
            f"{missed / due:.0%} of the planned spans were not sent outside of bursts, and "
            f"{MOST_MISSED:.0%} may be: {hint}"
        )
    due, taken = counts.get("burst_due", 0), counts.get("burst_acknowledged", 0)
    if taken < LEAST_OF_BURSTS * due:
        problems.append(
            f"{taken / due:.0%} of the spans planned for bursts were acknowledged while a burst "
            f"lasted, and {LEAST_OF_BURSTS:.0%} must be: {hint}"
        )
    return problems


def plan_problems(planned: Sequence[Disturbance], happened: Sequence[Happened]) -> list[str]:
    """Whether the disturbances took place that were planned."""
    done = {(one.event.kind, one.event.target) for one in happened}
    never = sorted({(event.kind, event.target) for event in planned} - done)
    problems = [f"{kind}: {target} was planned and never took place" for kind, target in never]
    left_out = len(planned) - len(happened)
    if left_out > MOST_LEFT_OUT * len(planned):
        problems.append(f"{left_out} of {len(planned)} disturbances did not take place")
    return problems
