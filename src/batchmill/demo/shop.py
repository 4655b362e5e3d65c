"""The plan of a simulated shop: who asks for what, when, and all that happens because of it.

Pure: a seed gives the same plan on every machine, and a longer run begins like a shorter one.
:mod:`.spans` makes OpenTelemetry spans of it.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator

from batchmill.demo.pages import visit
from batchmill.demo.steps import Request

WAVE_S = 30.0
"""From one crest of the traffic to the next."""
SWING = 0.6
"""The crest has this share more than the mean, the trough this share less."""
LONGEST_S = 4.0
"""No request takes longer, with all that follows from it."""


def rate_at(seconds: float, mean_per_s: float) -> float:
    """Requests per second at a moment of the run."""
    return mean_per_s * (1 + SWING * math.sin(2 * math.pi * seconds / WAVE_S))


def plan(seed: int, mean_per_s: float, seconds: float | None = None) -> Iterator[Request]:
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
        # Of those who come at the highest rate, as many stay as the wave has at that moment.
        if arrivals.random() * highest < rate_at(at_s, mean_per_s):
            # Chance starts anew with each: no request depends on those before it.
            root = visit(random.Random(f"{seed}:{index}"))
            yield Request(index, round(at_s * 1_000_000), root)
            index += 1
