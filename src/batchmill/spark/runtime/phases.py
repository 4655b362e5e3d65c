"""Where the time of a batch goes, phase by phase."""

from __future__ import annotations

import time
from collections.abc import Callable

READ, SPANS, L1, DELTAS, OUTBOX, COMMIT, UPKEEP = PHASES = (
    "read",  # its segments found, opened and looked at, and what to do with them written down
    "spans",  # spans read, made small, and told from those that were delivered before
    "l1",  # all sources aggregated by Spark
    "deltas",  # what came out made to deltas of three grains, in the driver
    "outbox",  # the changes put down for exporters
    "commit",  # the store merges them
    "upkeep",  # what no batch needs any more removed
)
"""In the order in which a batch goes through them."""


class Stopwatch:
    """Time by phase. Each lap takes what has passed since the lap before, so nothing is left out:
    the phases add up to the whole."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._since = clock()
        self.phases: dict[str, float] = {}

    def lap(self, phase: str) -> None:
        """What has passed since the last lap was this; what is done again is added."""
        now = self._clock()
        self.phases[phase] = self.phases.get(phase, 0.0) + now - self._since
        self._since = now
