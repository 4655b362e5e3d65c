"""What a writer gives to a store and gets from it: a batch and its parts, claim and layout."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeAlias

from batchmill.sources import Grain
from batchmill.store.clock import ClockReading

if TYPE_CHECKING:
    import pyarrow as pa

CounterKey: TypeAlias = tuple[str, str, str]
"""What is counted: (what, source, reason)."""

EXPIRED = "expired"
"""The counter of rows that came too late for the TTL; its reason is :data:`TOO_OLD`."""
TOO_OLD = "older than the TTL"
OVERFLOW_LABELS = "overflow labels"
"""The counter of what was counted under the label ``overflow``, for every metric and grain."""
TOO_MANY_LABELS = "too many labels of an entity"
DOUBTFUL = "doubtful"
"""The counter of rows that were counted, though a clock must be wrong, now or before."""
UNCONFIRMED = "ahead of the store's clock"
REMOVED_DAY = "of a day that was removed before"


@dataclass(frozen=True, slots=True)
class EntityRow:
    """An entity that a batch mentions."""

    kind: str
    id: str
    name: str
    layers: frozenset[str] = frozenset()
    """Layers it was seen in; they add up over batches."""
    roles: Mapping[str, str] = field(default_factory=dict)
    """Its parts by role: the service of an endpoint, both ends of a relation."""


@dataclass(slots=True)
class Deltas:
    """What one batch adds to one table: one source, one grain.

    Columns, not rows: all are equally long, and a (bucket, entity) occurs once. They are lists, or
    all of them Arrow arrays, of int64, double and string: PostgreSQL takes those much faster. The
    store does not roll up: hours and days are deltas of their own.
    """

    source: str
    grain: Grain
    buckets: list[int] | pa.Array
    entities: list[int] | pa.Array
    """Indices into the batch's ``entities``."""
    cells: dict[str, list[Any]] | dict[str, pa.Array]
    """By column, as the layout names it; None where there is nothing to add. A tally's text is
    made by ``encode_numbers()`` and the like, and is None, not empty, without a key."""
    shared: Mapping[str, str] = field(default_factory=dict)
    """Further columns, by the column in ``cells`` whose list they take: metrics share states."""

    @property
    def columns(self) -> tuple[str, ...]:
        """All columns: those of ``cells``, then the shared ones."""
        return (*self.cells, *self.shared)


@dataclass(frozen=True, slots=True)
class TopNRow:
    """A slow call: a candidate for the N slowest of its entity's minute, hour and day."""

    stream: str
    """The TopN stream it belongs to, such as slow database statements."""
    entity: int
    """An index into the batch's ``entities``."""
    minute: int
    latency: int
    time_us: int
    """When it started, in microseconds since 1970; of equal latencies the earlier ranks first."""
    trace_id: str
    span_id: str
    statement: str
    normalised: str


@dataclass(frozen=True, slots=True)
class StatementRow:
    """How often a normalised statement ran in a minute, and how long altogether."""

    stream: str
    entity: int
    """An index into the batch's ``entities``."""
    minute: int
    normalised: str
    runs: int
    total_ms: int


@dataclass(frozen=True, slots=True)
class StreamFile:
    """A file that a stream keeps from batch to batch: of pending spans, or of its dedup index."""

    path: str
    batch: int
    """The batch that wrote it."""
    arrived_ms: int
    rows: int


@dataclass(frozen=True, slots=True)
class ChangeFile:
    """A file with what a batch changes, for exporters; it is durable before the commit."""

    place: str
    """The id of the outbox that it lies in."""
    path: str
    """Its name in the outbox's folder."""
    rows: int
    bytes: int
    max_files: int
    """How many files may wait, this one included; beyond that the oldest are dropped."""
    max_bytes: int
    """Likewise; the newest file is kept, however large."""


@dataclass(slots=True)
class Batch:
    """Everything that one micro-batch changes; it is committed as a whole or not at all."""

    stream: str
    epoch: int
    """As :meth:`Store.claim` returned it."""
    number: int
    """0 for the first batch of a stream, then one more each time."""
    newest_minute: int | None = None
    """The newest minute of its rows."""
    entities: list[EntityRow] = field(default_factory=list)
    """Each kind and id once."""
    deltas: list[Deltas] = field(default_factory=list)
    topn: list[TopNRow] = field(default_factory=list)
    statements: list[StatementRow] = field(default_factory=list)
    counters: dict[CounterKey, int] = field(default_factory=dict)
    """What to add to the store's counters."""
    rows: dict[tuple[str, int], int] = field(default_factory=dict)
    """How many rows there are by (source, day), to count those of a day that has expired."""
    add_files: list[StreamFile] = field(default_factory=list)
    drop_files: list[str] = field(default_factory=list)
    """Paths of files that are pending no more."""
    outgoing: list[ChangeFile] = field(default_factory=list)
    """The files with its changes, if there is an outbox; an entity's are in one of them, but for
    overflow entities."""
    parts: int | None = None
    """Into how many parts it was divided, if :meth:`Store.commit_parts` has committed those."""
    expected_rows: Mapping[str, int] = field(default_factory=dict)
    """With ``parts``: how many rows of each source its parts must have had altogether."""
    clock: ClockReading | None = None
    """What the writer's clocks say; None: those of this machine, at the commit."""


@dataclass(frozen=True, slots=True)
class OpenParts:
    """A batch whose parts are about to be committed."""

    run: int
    """Changes each time the batch is begun: tasks of an earlier run cannot commit any more."""
    cutoff: int
    """The oldest day that is kept, for all its parts and in all its runs."""
    recorded: frozenset[int] = frozenset()
    """Parts that an earlier run has committed."""
    committed: bool = False
    """The whole batch was committed before: there is nothing to run."""


@dataclass(frozen=True, slots=True)
class PartShare:
    """The parts of a batch that one task commits together."""

    parts: tuple[int, ...]
    """The same in each attempt of the task."""
    opened: OpenParts
    """As :meth:`Store.begin_parts` returned it to the driver."""
    rows: Mapping[str, int]
    """How many rows went into these parts, by source."""
    layout: Layout
    """As :meth:`Store.register` returned it to the driver."""
    overflows: bool = False
    """Whether there are rows of entities that other parts may write, too: overflow entities."""


@dataclass(frozen=True, slots=True)
class PartsResult:
    """The outcome of committing a task's parts."""

    applied: bool
    """False: an earlier attempt has committed them, or the whole batch is committed."""
    merged: int = 0
    """Delta rows merged."""


@dataclass(frozen=True, slots=True)
class CommitResult:
    """The outcome of committing a batch."""

    applied: bool
    """False: a batch of that number was committed before, and nothing was changed."""
    merged: int = 0
    """Delta rows merged."""
    expired: int = 0
    """Rows left out because their day is older than the TTL."""
    removed: int = 0
    """Rows of the store that had expired, and were removed."""
    counters: Mapping[CounterKey, int] = field(default_factory=dict)
    """What was added to the store's counters, the expired rows included."""
    outbox_dropped: tuple[str, ...] = ()
    """Paths of files that were dropped from the outbox to make room for this batch's file."""
    clock_step_s: float = 0.0
    """The step of the writer's clock since its last commit, in seconds; 0: none."""


@dataclass(frozen=True, slots=True)
class Claim:
    """The right to write a stream, until somebody claims it again."""

    epoch: int
    last_batch: int | None
    """The last batch that was committed; None: none yet."""
    state_files: tuple[StreamFile, ...]
    """Files of pending spans and of the dedup index, oldest first."""


@dataclass(frozen=True, slots=True)
class Layout:
    """Where the cells of each metric go."""

    columns: Mapping[str, tuple[str, ...]]
    """By metric: one column a cell, in the order of its states, and of each state's cells."""
    owners: Mapping[tuple[str, str], tuple[str, int]] = field(default_factory=dict)
    """By (source, column): name and version of the metric that it was given to."""
