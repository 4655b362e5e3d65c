"""How far a store trusts the clocks of its writers, for expiry.

Expiry removes data, so it must not follow a clock that is wrong for a while. A store therefore has
a clock of its own, the *trusted time*. Each commit moves it towards the clock of its writer:

* Back, at once: to trust an earlier time removes nothing.
* Forward, as long as the writer's clock has no step in it, by at most :data:`RATE` times the time
  that has passed. In normal operation that is all the way; far behind, it is a day for each hour.
* Not at all after a step, until the clock has gone on for :data:`CONFIRM_S` without another one. So
  a clock that is wrong for less than that removes nothing.

A step is what the wall clock moves beyond the time that has passed by a clock nobody can set. That
is known within a process; a pipeline that is idle for a weekend has no step in its clock. From one
process to the next nothing says how much time has passed: there, a day (:data:`GAP_S`) is no step.
A store that was off for longer gets one, and so keeps what has expired for an hour more, and then
removes it little by little; what is written meanwhile is kept, and readers see it at once.

A writer that runs less often than once a day, and commits once each time, has nothing but steps.
There the next run confirms the last one: the trusted time follows with one run's delay, by at most
:data:`RUN_S` each.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime

from batchmill.sources import Grain, bucket_start
from batchmill.wording import count_of

HOUR_S, DAY_S = 3_600.0, 86_400.0
STEP_S = HOUR_S
"""A smaller step of the clock does not matter: rows may be that far ahead, too."""
GAP_S = 26 * HOUR_S
"""Between two processes, so much is no step: one that is started once a day goes on."""
CONFIRM_S = HOUR_S
"""So long a clock must go on without a step until it is trusted again."""
RATE = 24
"""How many times faster than time passes the trusted time may catch up."""
RUN_S = 7 * DAY_S
"""The most that it moves because of a run that a later one confirms."""
AHEAD_S = DAY_S
"""Minutes that are further ahead of a clock than this are not believed."""


@dataclass(frozen=True, slots=True)
class ClockReading:
    """What the clocks of a writer say at a commit."""

    wall_s: float
    """Seconds since 1970."""
    steady_s: float
    """Seconds by a clock that nobody can set; only differences mean something."""

    @classmethod
    def now(cls, wall_s: float | None = None) -> ClockReading:
        """The clocks of this machine, with another wall clock if one is given."""
        return cls(time.time() if wall_s is None else wall_s, _steady_s())


def _steady_s() -> float:
    """Seconds since the machine was started, those of a suspended machine included."""
    try:
        return time.clock_gettime(time.CLOCK_BOOTTIME)
    except (AttributeError, OSError):  # not Linux
        return time.monotonic()


@dataclass(frozen=True, slots=True)
class WriterClock:
    """A writer's clock, as its commits have shown it."""

    seen_s: float
    """What it said then, in seconds since 1970."""
    steady_s: float
    """How long it had gone on without a step."""

    def advance(self, wall_s: float, elapsed_s: float | None) -> tuple[WriterClock, float, float]:
        """The state after another commit, the time that has passed, and the step or 0.

        ``elapsed_s`` is how much time has passed by a clock that nobody can set; None: not known.
        """
        moved_s = wall_s - self.seen_s
        step_s = moved_s - (elapsed_s or 0.0)
        bound_s = GAP_S if elapsed_s is None and moved_s > 0 else STEP_S
        if abs(step_s) > bound_s:
            return WriterClock(wall_s, 0.0), 0.0, step_s
        passed_s = max(0.0, moved_s if elapsed_s is None else min(moved_s, elapsed_s))
        return WriterClock(wall_s, self.steady_s + passed_s), passed_s, 0.0


@dataclass(frozen=True, slots=True)
class Observation:
    """What a commit makes of the clock of its writer."""

    trusted_s: float
    """The trusted time from now on."""
    writer: WriterClock
    step_s: float = 0.0
    """The step of the writer's clock since its last commit; 0: none."""


def observe(
    trusted_s: float | None, last: WriterClock | None, wall_s: float, elapsed_s: float | None
) -> Observation:
    """The trusted time after a commit at ``wall_s`` by its writer's clock.

    ``trusted_s`` is that before it, None in a store without commits. ``last`` is what is known of
    the writer's clock; ``elapsed_s`` as for :meth:`WriterClock.advance`.
    """
    if last is None:
        writer, passed_s, step_s = WriterClock(wall_s, 0.0), 0.0, 0.0
    else:
        writer, passed_s, step_s = last.advance(wall_s, elapsed_s)
    if trusted_s is None or wall_s < trusted_s - STEP_S:
        return Observation(wall_s, writer, step_s)
    latest_s = trusted_s
    if writer.steady_s >= CONFIRM_S:
        latest_s = trusted_s + RATE * passed_s
    elif last is not None and elapsed_s is None and step_s > 0:
        latest_s = min(last.seen_s, trusted_s + RUN_S)
    return Observation(max(trusted_s, min(wall_s, latest_s)), writer, step_s)


@dataclass(frozen=True, slots=True)
class ClockState:
    """What a store knows of the time."""

    trusted_s: float | None = None
    """Expiry counts from here, in seconds since 1970; None: there are only past events."""
    seen_s: float | None = None
    """What the clock of the last commit's writer said."""
    last_minute: int | None = None
    """The newest minute that is in the store, be it from the future."""
    furthest_s: float | None = None
    """The latest that the trusted time ever was: it goes back with a clock."""

    @property
    def held_back_s(self) -> float:
        """How far the trusted time was behind the clock of the last commit's writer."""
        if self.trusted_s is None or self.seen_s is None:
            return 0.0
        return max(0.0, self.seen_s - self.trusted_s)

    def ahead_s(self, now_s: float) -> float:
        """How far the newest minute is ahead of a clock."""
        if self.last_minute is None:
            return 0.0
        return max(0.0, bucket_start(self.last_minute).timestamp() - now_s)

    def behind_s(self, now_s: float) -> float:
        """How far a clock is behind the latest time that was trusted; 0: by no more than a step."""
        behind_s = (self.furthest_s or 0.0) - now_s
        return behind_s if behind_s > STEP_S else 0.0

    def latest_s(self, now_s: float, most_s: float) -> float:
        """The latest time that is believed of an event: ``most_s`` ahead of a clock.

        Of one that is behind, so much ahead of what was trusted, and of the newest minute: events
        of the right time are not refused.
        """
        ahead_s = max(self.behind_s(now_s), self.ahead_s(now_s))
        return now_s + most_s + (ahead_s if self.behind_s(now_s) else 0.0)

    def doubts(self, now_s: float) -> list[str]:
        """What looks wrong with a clock, in sentences for an operator; ``now_s``: the time now."""
        doubts = []
        if self.held_back_s > 2 * STEP_S:
            doubts.append(
                f"expiry is held back: the clock is {span_of(self.held_back_s)} ahead of the "
                f"store's, {moment_of(self.trusted_s or 0.0)}. After an hour without a step "
                "expiry follows, a day in an hour: if the clock is wrong, correct it before"
            )
        if self.ahead_s(now_s) > AHEAD_S:
            doubts.append(
                f"the store has minutes up to {moment_of(now_s + self.ahead_s(now_s))}, "
                f"{span_of(self.ahead_s(now_s))} ahead of the clock: correct the clock if it is "
                "behind; if it was ahead, `batchmill store repair` shows and removes them"
            )
        elif behind_s := self.behind_s(now_s):
            trusted = moment_of(self.furthest_s or 0.0)
            doubts.append(
                f"the clock is {span_of(behind_s)} behind {trusted}, which the store trusted "
                "before: correct the clock; if it was ahead before, `batchmill store repair` shows "
                "and removes what it has written"
            )
        return doubts


class TrustedTime:
    """The time that a store trusts, also between its commits: there, a steady clock goes on."""

    def __init__(self, steady_s: Callable[[], float] = _steady_s) -> None:
        self._steady_s = steady_s
        self._known: tuple[ClockState, float] | None = None

    def note(self, state: ClockState) -> None:
        """Go on from what a store knows of the time; nothing new means no commit meanwhile."""
        if self._known is None or self._known[0] != state:
            self._known = state, self._steady_s()

    def now_s(self) -> float | None:
        """The trusted time, in seconds since 1970; None: nobody knows it.

        Where there are only past events, their time.
        """
        if self._known is None:
            return None
        state, since_s = self._known
        if state.trusted_s is not None:
            return state.trusted_s + self._steady_s() - since_s
        if state.last_minute is not None:
            return bucket_start(state.last_minute).timestamp()
        return None


def minute_of(wall_s: float) -> int:
    """The minute of a time in seconds since 1970."""
    return Grain.MINUTE.bucket(datetime.fromtimestamp(wall_s, UTC))


def moment_of(wall_s: float) -> str:
    """A time in seconds since 1970, for people.

    >>> moment_of(1_700_000_000)
    '2023-11-14 22:13 UTC'
    """
    return f"{datetime.fromtimestamp(wall_s, UTC):%Y-%m-%d %H:%M} UTC"


def span_of(seconds: float) -> str:
    """A length of time in hours or days.

    >>> span_of(40 * DAY_S), span_of(3 * HOUR_S)
    ('40 days', '3 hours')
    """
    days = round(seconds / DAY_S)
    return count_of(days, "day") if days > 1 else count_of(round(seconds / HOUR_S), "hour")
