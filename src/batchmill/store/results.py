"""What a store returns to a reader."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from batchmill.sources import Grain
from batchmill.store.clock import ClockState
from batchmill.store.reading.units import Measured, Unit, read_definition, unit_of
from batchmill.store.states import Plan

CellRow: TypeAlias = tuple[Any, ...]
"""Bucket, the entity's key, then the cells of each metric."""


@dataclass(frozen=True, slots=True)
class StoredMetric:
    """A metric as the store knows it; a changed definition is another version."""

    name: str
    version: int
    source: str
    definition: str
    """Its canonical text, without the name."""
    function: str
    decorator: str | None
    columns: tuple[str, ...]
    """One a cell; empty once they were given to another metric, long after this one's removal."""
    since_minute: int | None
    """The newest minute in the store when this version was added; None: it was empty."""
    active: bool
    """Whether it is being computed; False: removed or redefined, its history stays readable."""
    labelled: bool
    """Whether its values are dicts with one number for each label."""
    plan: Plan = field(repr=False)
    """How values are computed from cells."""

    @property
    def measured(self) -> Measured:
        """What it measures, and the conditions of its filters."""
        return read_definition(self.definition, self.source, self.function)

    @property
    def unit(self) -> Unit:
        """The unit of its values."""
        return unit_of(self.source, self.function, self.measured.path)


@dataclass(frozen=True, slots=True)
class Value:
    """The final value of a metric for one bucket and entity."""

    metric: str
    grain: Grain
    bucket: int
    entity_id: str
    entity_name: str
    layers: frozenset[str]
    value: int | float | dict[str, int]


@dataclass(frozen=True, slots=True)
class StateRow:
    """The merged states of a metric for one bucket and entity, as ``Metric.values`` takes them."""

    metric: str
    grain: Grain
    bucket: int
    entity_id: str
    entity_name: str
    layers: frozenset[str]
    states: tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class EntityValues:
    """All values of one entity in one bucket, of the metrics of one source."""

    source: str
    kind: str
    id: str
    name: str
    layers: frozenset[str]
    busy: int
    """About how many rows it had: the mean of all counts of its metrics; 0 without a count."""
    values: Mapping[str, int | float | dict[str, int]]
    """By metric; those without a matching row are left out."""


@dataclass(frozen=True, slots=True)
class BucketValues:
    """All values of one bucket, read at one moment."""

    grain: Grain
    bucket: int
    metrics: tuple[StoredMetric, ...]
    """The active metrics, by name."""
    entities: list[EntityValues]
    """By source, the busiest first."""
    left_out: Mapping[str, int]
    """By metric, how many entities have a value but are over the limit of ``entities``."""


@dataclass(frozen=True, slots=True)
class StoredEntity:
    """An entity: something that metrics are about."""

    kind: str
    id: str
    name: str
    layers: frozenset[str]
    roles: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class EntityPage:
    """Some of the entities that were asked for."""

    entities: list[StoredEntity]
    total: int
    """How many there are altogether."""


@dataclass(frozen=True, slots=True)
class EntityName:
    """The entity that a key of :class:`CellRows` stands for."""

    key: int
    kind: str
    id: str
    name: str


@dataclass(frozen=True, slots=True)
class CellRows:
    """Rows of several metrics of one source, in no order."""

    rows: list[CellRow]
    places: Mapping[str, slice]
    """By metric, where its cells are in a row."""
    complete: bool = True
    """False: there are more rows than the limit."""


@dataclass(frozen=True, slots=True)
class TopRecord:
    """One of the N slowest calls of an entity and bucket."""

    stream: str
    grain: Grain
    bucket: int
    entity_id: str
    entity_name: str
    rank: int
    """From 1, the slowest."""
    latency: int
    time_us: int
    trace_id: str
    span_id: str
    statement: str
    normalised: str
    runs: int
    """How often the normalised statement ran in that bucket, slow or not; 0: unknown."""
    total_ms: int
    """How long those runs took altogether."""


@dataclass(frozen=True, slots=True)
class StreamInfo:
    """The progress of a stream."""

    name: str
    checkpoint_id: str
    epoch: int
    last_batch: int | None
    committed_ms: int | None
    """When it last committed, in milliseconds since 1970."""


@dataclass(frozen=True, slots=True)
class ClockRepair:
    """What the repair of a store's clock removes, or has removed."""

    applied: bool
    """False: nothing was changed."""
    before: ClockState
    """What the store knew of the time before it."""
    newest_before: int | None
    """The newest minute that readers saw before it."""
    newest: int | None
    """The newest minute that they see after it; None: no minute is left."""
    rows: Mapping[Grain, int]
    """How many rows of each grain lie after the last minute that is kept."""
    first: int | None
    """The first minute that has such rows."""
    last: int | None


@dataclass(frozen=True, slots=True)
class OutboxFile:
    """A file in the outbox, with what one commit changed."""

    seq: int
    """In the order of commits; a number is never used again."""
    stream: str
    path: str
    """Its name in the outbox's folder."""
    rows: int
    bytes: int
    committed_ms: int
    """In milliseconds since 1970."""


@dataclass(frozen=True, slots=True)
class OutboxDepth:
    """How much waits in an outbox."""

    files: int
    rows: int
    bytes: int
    oldest_ms: int | None
    """When the oldest file was committed, in milliseconds since 1970; None if empty."""


@dataclass(frozen=True, slots=True)
class ExportPosition:
    """The position of an exporter in an outbox."""

    exporter: str
    place: str
    seq: int
    """The last file that it has exported; 0: none."""
