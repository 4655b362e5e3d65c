"""What a batch brought, and where its time went."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from batchmill.aggregate import Overflow
from batchmill.store import CommitResult

READ, HOOK, SPARK, DELTAS, OUTBOX, COMMIT, UPKEEP = PHASES = (
    "read",  # find its segments, and check the state that earlier batches have left
    "hook",  # give the rows to the application, if it has a hook
    "spark",  # read, aggregate and merge, in Spark's tasks
    "deltas",  # turn the results into cells of three grains, in the driver
    "outbox",  # write the changes for exporters
    "commit",  # merge them into the store
    "upkeep",  # remove what no batch needs any more
)
"""The phases of a batch, in their order."""


class Stopwatch:
    """Measures time by phase. Each lap covers all time since the one before it, so the phases add
    up to the whole."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._since = clock()
        self.phases: dict[str, float] = {}

    def lap(self, phase: str) -> None:
        """Add the time since the last lap to ``phase``."""
        now = self._clock()
        self.phases[phase] = self.phases.get(phase, 0.0) + now - self._since
        self._since = now


@dataclass
class BatchStats:
    """What went into a batch."""

    segments: int = 0
    rows: int = 0
    quarantined_segments: int = 0
    quarantined_rows: int = 0
    late: int = 0
    duplicates: int = 0
    """Spans that were delivered before."""
    overflow: Overflow = field(default_factory=Overflow)
    """What went under overflow entities, because there were too many new ones."""


@dataclass(frozen=True)
class BatchReport:
    """What a batch brought, and where its time went."""

    stream: str
    number: int
    applied: bool
    """False: it was in the store already."""
    stats: BatchStats
    result: CommitResult
    spark_s: float
    """From the first look at its segments until its deltas were in the driver's memory."""
    store_s: float
    """The commit."""
    outbox_s: float = 0.0
    """Writing its changes for exporters, before the commit."""
    given: int = 0
    """How many segments it was made of, including quarantined ones."""
    phases: Mapping[str, float] = field(default_factory=dict)
    """Seconds by phase, in their order; they add up to the time of the whole batch."""

    def with_upkeep(self, seconds: float) -> BatchReport:
        """Add time that was spent on upkeep before the batch began; not if no batch was made."""
        if not self.phases:
            return self
        upkeep = self.phases.get(UPKEEP, 0.0) + seconds
        return replace(self, phases={**self.phases, UPKEEP: upkeep})
