"""The traffic of the shop: who asks for what and when, and the loop that plays it in real time.

:func:`plan` is pure: a seed gives the same plan on every machine, and a longer run begins like a
shorter one.
"""

from __future__ import annotations

import math
import random
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import FrameType
from typing import TYPE_CHECKING, Any, Self

from batchmill.demo.pages import visit
from batchmill.demo.steps import Request

if TYPE_CHECKING:
    from batchmill.demo.sender import Sender, Shop

WAVE_S = 30.0
"""The period of the waves in the traffic."""
SWING = 0.6
"""How far the waves go above and below the mean, as a share of it."""
LONGEST_S = 4.0
"""No request takes longer, with all that follows from it."""
LONG_RUN_S = 240.0
"""From this length on a run has incidents of two minutes."""
INCIDENT_EVERY = 15
"""Minutes from one incident to the next."""
INCIDENT_MINUTES = (2, 3)
"""The minutes of an incident, counted from the first minute of the run."""
CLOSING_S = 10.0
"""How long after Ctrl-C the sender tries to send the rest."""
_POLL_S = 0.1


def rate_at(seconds: float, mean_per_s: float) -> float:
    """Requests per second at a moment of the run."""
    return mean_per_s * (1 + SWING * math.sin(2 * math.pi * seconds / WAVE_S))


def incidents(begin_s: float, seconds: float | None = None) -> Callable[[float], bool]:
    """When the shop has an incident: a function of the seconds since the start of a run.

    ``begin_s`` is the time at the start. Incidents last whole minutes of the clock, as alerts are
    about those: two minutes in each quarter of an hour. A run that is too short for that begins
    with one, which ends with the first minute.
    """
    first = math.floor(begin_s / 60)
    long = seconds is None or seconds >= LONG_RUN_S

    def is_incident(offset_s: float) -> bool:
        minute = math.floor((begin_s + offset_s) / 60) - first
        return minute % INCIDENT_EVERY in INCIDENT_MINUTES if long else minute == 0

    return is_incident


def plan(
    seed: int,
    mean_per_s: float,
    seconds: float | None = None,
    is_incident: Callable[[float], bool] = lambda offset_s: False,
) -> Iterator[Request]:
    """The requests of a run in the order in which they begin; without end if ``seconds`` is None.

    Visitors come independently of each other (a Poisson process), more and fewer of them in waves.
    """
    arrivals = random.Random(f"{seed}:arrivals")
    highest = mean_per_s * (1 + SWING)
    at_s, index = 0.0, 0
    while True:
        at_s += arrivals.expovariate(highest)
        if seconds is not None and at_s >= seconds:
            return
        # Thinning: arrivals at the highest rate, of which the wave's share is kept.
        if arrivals.random() * highest < rate_at(at_s, mean_per_s):
            # A generator for each request: none depends on those before it.
            root = visit(random.Random(f"{seed}:{index}"), incident=is_incident(at_s))
            yield Request(index, round(at_s * 1_000_000), root)
            index += 1


class Stop:
    """While entered, the first Ctrl-C or SIGTERM is noted; the next one does what it always does.

    The handler only sets an attribute: a lock taken there could be one that the main thread holds.
    """

    def __init__(self) -> None:
        self.requested = False
        self._before: dict[int, Any] = {}

    def sleep_until(self, moment_s: float) -> bool:
        """Whether the moment came before a signal."""
        while not self.requested and (left_s := moment_s - time.monotonic()) > 0:
            time.sleep(min(left_s, _POLL_S))
        return not self.requested

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.requested = True
        self._restore()

    def _restore(self) -> None:
        for number, before in self._before.items():
            signal.signal(number, before)

    def __enter__(self) -> Self:
        for number in (signal.SIGINT, signal.SIGTERM):
            before = signal.getsignal(number)
            if before is not signal.SIG_IGN:  # a shell's background job is not to be stopped
                self._before[number] = before
                signal.signal(number, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        self._restore()


@dataclass(frozen=True)
class TrafficReport:
    """What the simulated traffic sent, and how long it took."""

    requests: int
    seconds: float
    abandoned: bool
    """Whether a second Ctrl-C ended it before the rest was sent."""


def play(
    shop: Shop,
    sender: Sender,
    requests: Iterator[Request],
    stop: Stop,
    *,
    seconds: float | None,
    on_stop: Callable[[], None] = lambda: None,
) -> TrafficReport:
    """Make the spans of requests at their times, then send the rest and close the sender.

    Ends after ``seconds`` (None: when ``requests`` do), at a signal, or when the sender gives up.
    """
    started = time.monotonic()
    # The visits happened a little before now, so that no span ends in the future.
    begin_ns = time.time_ns() - int(LONGEST_S * 1_000_000_000)
    count, abandoned = 0, False
    try:
        for request in requests:
            if not stop.sleep_until(started + request.offset_us / 1_000_000) or sender.given_up:
                break
            count += 1
            shop.play(request, begin_ns)
        if seconds is not None and not sender.given_up:
            stop.sleep_until(started + seconds)
        if stop.requested:
            on_stop()
            sender.close(CLOSING_S)
        else:
            sender.close()
    except KeyboardInterrupt:  # the second Ctrl-C
        sender.abandon()
        abandoned = True
    return TrafficReport(count, time.monotonic() - started, abandoned)
