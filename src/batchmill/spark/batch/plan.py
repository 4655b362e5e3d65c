"""What the steps of a batch share: the plan, the limits, and how their results become blobs."""

from __future__ import annotations

import contextlib
import functools
import gc
import pickle
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field

import pyarrow as pa

from batchmill.aggregate import (
    AggregationResult,
    AggregationSettings,
    Aggregator,
    Deltas,
    TopNThresholds,
    to_arrow,
)
from batchmill.sources import Catalog
from batchmill.spark.input.deltas import DeltaReader
from batchmill.spark.shuffle import Blob, Kind, Parts, by_part, entity_parts
from batchmill.store import Layout


@dataclass(frozen=True)
class TaskPlan:
    """What the steps of every batch of a stream need."""

    catalog: Catalog
    aggregators: Mapping[str, Aggregator]
    """By event type: those that a metric reads."""
    attributes: Collection[str] | None
    """The keys of attributes that metrics look up; None: some metric reads all of them."""
    settings: AggregationSettings
    parts: int
    """Into how many shares traces and entities are divided."""
    layout: Layout = field(default_factory=lambda: Layout({}))
    """Where the store keeps the states of metrics."""
    normalise_names: bool = True
    """Whether names of spans that look like URLs have no ids."""

    @property
    def top_n(self) -> int:
        """How many of the slowest statements are kept."""
        return self.settings.top_n

    @functools.cached_property
    def thresholds(self) -> TopNThresholds:
        """Above how many milliseconds statements are slow."""
        return self.settings.thresholds()

    @functools.cached_property
    def readers(self) -> dict[str, DeltaReader]:
        """Readers of deltas that processes have made themselves, by event type."""
        return {source: DeltaReader(own) for source, own in self.aggregators.items()}

    @property
    def reads_maps(self) -> bool:
        """Whether metrics look up attributes that have no column of their own."""
        return self.attributes is None or bool(self.attributes)


class PickledPlan:
    """A plan on its way to the executors, which unpack it once for all their tasks."""

    def __init__(self, plan: TaskPlan) -> None:
        self._data = pickle.dumps(plan)

    @property
    def plan(self) -> TaskPlan:
        """The plan; a task asks for it when it begins."""
        plan = _unpacked(self._data)
        # After every task, Spark's worker looks for garbage in all objects: modules and plans that
        # the tasks before have loaded cost it tens of milliseconds each time, and are no garbage.
        gc.freeze()
        return plan


@functools.lru_cache(8)
def _unpacked(data: bytes) -> TaskPlan:
    pa.set_cpu_count(1)  # a task has one core
    # Of Arrow's allocators, this one takes the least time in the system.
    with contextlib.suppress(NotImplementedError):
        pa.set_memory_pool(pa.jemalloc_memory_pool())
    plan: TaskPlan = pickle.loads(data)
    return plan


@dataclass(frozen=True)
class Limits:
    """What depends on when a batch is made."""

    latest_us: int
    """The latest valid start, in microseconds since 1970."""
    late_before_us: int | None
    """Spans that start before this are late; None: none is."""
    quarantine: str | None
    """Where tasks write invalid rows: a folder in the quarantine. None: they return them."""
    tasks: int | None = None
    """How many tasks share the parts after a shuffle: all parts of one go into one blob, because
    small blobs cost more than their rows. None: each part has its own."""


def split_blobs(
    kind: Kind, table: pa.Table, parts: Parts, limits: Limits, *, source: str = ""
) -> Iterator[Blob]:
    """The blobs of a table's rows, by part, or by the task that gets the part."""
    for part, rows in by_part(table, parts if limits.tasks is None else parts % limits.tasks):
        yield from Blob.of(kind, rows, source=source, part=part)


def row_blobs(source: str, rows: pa.Table, made: AggregationResult) -> Iterator[Blob]:
    """The rows that deltas were made of."""
    valid = rows.filter(pa.array(made.reasons.valid)) if made.reasons else rows
    yield from Blob.of(Kind.ROWS, valid, source=source)


def delta_blobs(deltas: Deltas, plan: TaskPlan, source: str, limits: Limits) -> Iterator[Blob]:
    """The blobs of a source's deltas, by the parts of their entities."""
    if not len(deltas):
        return
    own = plan.aggregators[source].plan
    parts = entity_parts(deltas.roles, own.source, plan.parts)
    yield from split_blobs(Kind.DELTAS, to_arrow(deltas, own), parts, limits, source=source)
