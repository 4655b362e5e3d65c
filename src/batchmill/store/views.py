"""What a store answers to a reader."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from batchmill.sources import Grain
from batchmill.store.plan import Plan


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
    """One a cell; empty when they were given to another metric, long after this one was removed."""
    since_minute: int | None
    """The newest minute that the store knew when this version came; None: it was empty."""
    active: bool
    """Whether it is being computed; False: removed or redefined, its history stays readable."""
    labelled: bool
    """Whether its values are dicts with one number for each label."""
    plan: Plan = field(repr=False)
    """How to get from cells to values."""


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
    """How many rows it had, about: the mean of all that its metrics count; 0 if none counts."""
    values: Mapping[str, int | float | dict[str, int]]
    """By metric; one in which nothing matched is left out."""


@dataclass(frozen=True, slots=True)
class BucketValues:
    """All values of one bucket, as they were at one moment."""

    grain: Grain
    bucket: int
    metrics: tuple[StoredMetric, ...]
    """The metrics that are computed, by name."""
    entities: list[EntityValues]
    """By source, the busiest first."""
    left_out: Mapping[str, int]
    """By metric, how many entities have a value and are not among ``entities``: over the limit."""


@dataclass(frozen=True, slots=True)
class StoredEntity:
    """Something that metrics are about."""

    kind: str
    id: str
    name: str
    layers: frozenset[str]
    roles: Mapping[str, str]


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
    """How often the normalised statement ran in that bucket, slow or not; 0: not known."""
    total_ms: int
    """How long those runs took altogether."""


@dataclass(frozen=True, slots=True)
class StreamInfo:
    """How far a stream has come."""

    name: str
    checkpoint_id: str
    epoch: int
    last_batch: int | None
    committed_at: int | None
    """When it last committed, in milliseconds since 1970."""


@dataclass(frozen=True, slots=True)
class OutboxFile:
    """A file in the outbox, with what one commit changed."""

    seq: int
    """Commits in order; a number is never used again."""
    stream: str
    path: str
    """Its name in the outbox's folder."""
    rows: int
    bytes: int
    committed_ms: int
    """When, in milliseconds since 1970."""


@dataclass(frozen=True, slots=True)
class OutboxDepth:
    """How much waits in an outbox."""

    files: int
    rows: int
    bytes: int
    oldest_ms: int | None
    """When the oldest was committed, in milliseconds since 1970; None: nothing waits."""


@dataclass(frozen=True, slots=True)
class ExportPosition:
    """How far an exporter has come in an outbox."""

    exporter: str
    place: str
    seq: int
    """The last file that it is through with; 0: none."""
