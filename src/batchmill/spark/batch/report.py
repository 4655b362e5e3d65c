"""What the tasks of a batch count, what the batch brought, and where its time went."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from batchmill.aggregate import Overflow
from batchmill.errors import BatchmillError
from batchmill.spark.files.statefiles import StatePiece
from batchmill.spark.input.segments import BadSegment
from batchmill.store import ChangeFile, CommitResult

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
class TaskReport:
    """What tasks count; the driver adds the reports up."""

    segments: int = 0
    """Segments that could be read."""
    spans: int = 0
    """Spans that went from the first step to the second."""
    events: Counter[tuple[str, int]] = field(default_factory=Counter)
    """Rows of events by event type and minute (``yyyyMMddHHmm``)."""
    derived: Counter[tuple[str, int]] = field(default_factory=Counter)
    """The same of rows that spans gave."""
    counters: Counter[tuple[str, str, str]] = field(default_factory=Counter)
    """The store's counters, as far as tasks know them."""
    newest: int = 0
    """The newest minute of statements that processes have counted themselves; 0: of none."""
    bad: list[BadSegment] = field(default_factory=list)
    kept: list[StatePiece] = field(default_factory=list)
    """The state that this batch keeps."""
    invalid: list[tuple[str, str]] = field(default_factory=list)
    """Files of invalid rows, with the event type of each."""
    invalid_schemas: list[tuple[str, bytes]] = field(default_factory=list)
    """The schemas of invalid rows that are in blobs, with the event type of each."""
    outgoing: list[ChangeFile] = field(default_factory=list)
    """Files of changes for exporters."""
    failures: list[BatchmillError | MemoryError] = field(default_factory=list)
    """Why parts could not be committed."""
    answered: set[str] = field(default_factory=set)
    """Destinations of calls that somebody has answered for."""
    given_up: set[str] = field(default_factory=set)
    """Destinations of calls that nobody has answered in time."""
    overflow: Overflow = field(default_factory=Overflow)
    """What the limit of new entities has done."""

    def add(self, other: TaskReport) -> None:
        """Add what another task has counted."""
        self.segments += other.segments
        self.spans += other.spans
        for name in ("events", "derived", "counters"):
            getattr(self, name).update(getattr(other, name))
        self.newest = max(self.newest, other.newest)
        self.answered |= other.answered
        self.given_up |= other.given_up
        for name in ("bad", "kept", "invalid", "invalid_schemas", "outgoing", "failures"):
            getattr(self, name).extend(getattr(other, name))
        self.overflow.add(other.overflow)


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
