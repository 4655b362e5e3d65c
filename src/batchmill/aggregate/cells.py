"""Turns deltas into what a store merges: entities numbered, states as cells, all three grains.

A tally becomes a text, as :mod:`batchmill.store.states` describes it.
"""

from __future__ import annotations

import functools
import json
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from batchmill.aggregate.aggregator import Aggregator
from batchmill.aggregate.columns import (
    Groups,
    Longs,
    Tallies,
    distinct,
    group,
    numbered,
    numbered_starts,
)
from batchmill.aggregate.deltas import Deltas
from batchmill.aggregate.overflow import EntityLimiter, Names, role_fields
from batchmill.aggregate.plan import SourcePlan
from batchmill.errors import ConfigError
from batchmill.sources import Grain, SourceType, entity_id, split_entity_id
from batchmill.store import MAX_LABELS, OVERFLOW_LABEL, EntityRow, Layout
from batchmill.store import Deltas as StoreDeltas

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_LOW = (1 << 32) - 1
_WIDE = 1 << 30
"""If all upper halves are below this, the whole number fits 64 bits."""
_REMEMBERED = 20_000
"""Of how many entities of an event type the ids are remembered."""
_AT_ONCE = 50_000
"""Of more entities of an event type, only the ids are made before limits are applied: they take
little memory."""

FIXED_LAYERS: Mapping[str, str] = {
    "DatabaseAccess": "VIRTUAL_DATABASE",
    "CacheAccess": "VIRTUAL_CACHE",
    "MQAccess": "VIRTUAL_MQ",
    "MQEndpointAccess": "VIRTUAL_MQ",
    "GenAIProviderAccess": "VIRTUAL_GENAI",
    "GenAIModelAccess": "VIRTUAL_GENAI",
    **dict.fromkeys(
        (
            "BrowserAppPerf",
            "BrowserAppPagePerf",
            "BrowserAppSingleVersionPerf",
            "BrowserAppTraffic",
            "BrowserAppPageTraffic",
            "BrowserAppSingleVersionTraffic",
            "BrowserAppResourcePerf",
            "BrowserAppWebVitalsPerf",
            "BrowserAppWebInteractionPerf",
        ),
        "BROWSER",
    ),
}
"""The layer of sources whose rows have none."""
_ROLES: Mapping[str, tuple[str, ...]] = {
    "service": ("service",),
    "instance": ("service", "name"),
    "endpoint": ("service", "name"),
    "service_relation": ("source_service", "dest_service"),
    "instance_relation": ("source_service", "source_name", "dest_service", "dest_name"),
    "endpoint_relation": ("source_service", "source_name", "dest_service", "dest_name"),
    "given": ("id",),
}


class EntityBook:
    """Numbers the entities of one batch; several sources may have the same entity.

    With a limiter, entities that are over its limit have the number of an overflow entity.
    """

    def __init__(self, limiter: EntityLimiter | None = None) -> None:
        self._limiter = limiter
        self._numbers: dict[tuple[str, str], int] = {}
        self._rows: list[EntityRow] = []
        self._moved: dict[tuple[str, str], str] = {}
        """Services of statements that are over the limit: stream and id to the id of another."""

    def number(self, kind: str, id: str, names: tuple[str, ...], layers: set[str]) -> int:  # noqa: A002
        """The entity's number; a new entity gets the next one."""
        return self._number_of(_row(kind, id, names, layers))

    def service_number(self, stream: str, id: str, layers: set[str]) -> int:  # noqa: A002
        """The number of a service that statements are about."""
        id_ = self._moved.get((stream, id), id)
        return self.number("service", id_, split_entity_id("service", id_), layers)

    def limit_services(self, places: Iterable[tuple[str, str]]) -> None:
        """Apply the limit to the services of statements, given as stream and id, one a row."""
        if self._limiter is None:
            return
        by_stream: defaultdict[str, Counter[str]] = defaultdict(Counter)
        for stream, id_ in places:
            by_stream[stream][id_] += 1
        for stream, rows in sorted(by_stream.items()):
            for id_, other in self._limiter.service_replacements(stream, rows).items():
                self._moved[stream, id_] = other

    def rows(self) -> list[EntityRow]:
        """Every entity, by number."""
        return list(self._rows)

    def numbers_of(self, source: SourceType, roles: Sequence[pa.Array], rows: Longs) -> Longs:
        """The entity of each row, from its role columns (in the order of the entity's roles).

        ``rows`` says how many events each row stands for.
        """
        groups = group([numbered(column) for column in roles])
        values = [column.take(pa.array(groups.firsts)).to_pylist() for column in roles]
        entities = self._entities(source, list(zip(*values, strict=True)), groups, rows)
        numbers = [self._number_of(entity) for entity in entities]
        return np.asarray(numbers, dtype=np.int64)[groups.codes]

    def _entities(
        self, source: SourceType, names: list[Names], groups: Groups, rows: Longs
    ) -> Iterable[EntityRow]:
        """The entity of each group of rows, or its overflow entity."""
        entity_of = _entities(source)
        if self._limiter is None:
            return (entity_of(*own) for own in names)
        entities: list[EntityRow] = []
        if len(names) <= _AT_ONCE:
            entities = [entity_of(*own) for own in names]
            ids = [entity.id for entity in entities]
        else:
            fields = role_fields(source)
            ids = [entity_id(source, dict(zip(fields, own, strict=True))) for own in names]
        counts = np.zeros(len(names), np.int64)
        np.add.at(counts, groups.codes, rows)
        other = self._limiter.replacements(source, names, ids, counts.tolist())
        if entities and not other:
            return entities
        return (entity_of(*other.get(place, own)) for place, own in enumerate(names))

    def _number_of(self, entity: EntityRow) -> int:
        number = self._numbers.setdefault((entity.kind, entity.id), len(self._rows))
        if number == len(self._rows):
            self._rows.append(entity)
        elif not entity.layers <= (known := self._rows[number]).layers:
            self._rows[number] = replace(known, layers=known.layers | entity.layers)
        return number


@functools.lru_cache(64)
def _entities(source: SourceType) -> Callable[..., EntityRow]:
    """A function from what the roles are to the entity; it remembers those of earlier batches."""
    fields = role_fields(source)

    @functools.lru_cache(_REMEMBERED)
    def entity(*values: str | None) -> EntityRow:
        return _entity(source, dict(zip(fields, values, strict=True)))

    return entity


def _entity(source: SourceType, row: Mapping[str, str | None]) -> EntityRow:
    """The entity that a row is about."""
    kind, roles = source.entity.kind, source.entity.roles
    id_ = entity_id(source, row)
    layers = {layer for role, name in roles.items() if role == "layer" and (layer := row.get(name))}
    if roles.get("layer", "").startswith("=") and source.name in FIXED_LAYERS:
        layers.add(FIXED_LAYERS[source.name])
    return _row(kind, id_, split_entity_id(kind, id_), layers)


def _row(kind: str, id_: str, names: tuple[str, ...], layers: set[str]) -> EntityRow:
    roles = dict(zip(_ROLES[kind], names, strict=True))
    return EntityRow(kind, id_, names[-1], frozenset(layers), roles)


@dataclass
class Contribution:
    """What one event type contributes to a batch of a store."""

    deltas: list[StoreDeltas] = field(default_factory=list)
    rows: int = 0
    rows_by_minute: Counter[int] = field(default_factory=Counter)
    """How many rows each minute got, by its bucket ``yyyyMMddHHmm``."""
    moved_labels: int = 0
    """What went under the label ``overflow``: counts, for every state and grain."""


def contribution(
    deltas: Deltas,
    aggregator: Aggregator,
    layout: Layout,
    book: EntityBook,
) -> Contribution:
    """Turn deltas by minute into minutes, hours and days for the columns of a store."""
    if deltas.grain is not Grain.MINUTE:
        raise ConfigError("deltas", deltas.grain.value, "deltas by minute")
    result = Contribution()
    if not len(deltas):
        return result
    result.rows = int(deltas.rows.sum())
    result.rows_by_minute = rows_by_minute(deltas)
    columns = _ColumnMap(aggregator.plan, layout)
    entities = book.numbers_of(aggregator.plan.source, deltas.roles, deltas.rows)
    cells: dict[str, pa.Array] = {}
    moved: dict[str, int] = {}
    for grain in Grain:
        deltas = replace(deltas, grain=grain, starts=deltas.starts // grain.minutes * grain.minutes)
        # Grouped by entity, not by roles: names are cut to a limit, and layers share an id.
        groups = group([numbered_starts(deltas.starts), (entities, int(entities.max()) + 1)])
        if len(groups) < len(deltas):
            deltas, entities = deltas.merged(groups), entities[groups.firsts]
            cells = {}
        # A batch of one minute has the same states in its hour and its day, in the same order.
        if not cells:
            for name, column in deltas.totals.items():
                cells[name] = column.to_arrow()
            for name, tallies in deltas.tallies.items():
                limited, moved[name] = tallies.limited(MAX_LABELS, OVERFLOW_LABEL)
                cells[name] = texts(limited)
        result.moved_labels += sum(moved.values())
        buckets = _buckets(deltas.starts, grain)
        result.deltas.append(
            StoreDeltas(
                source=aggregator.plan.source.name,
                grain=grain,
                buckets=pa.array(buckets),
                entities=pa.array(entities),
                cells={cell: cells[name] for name, cell in columns.first.items()},
                shared=columns.shared,
            )
        )
    return result


def rows_by_minute(deltas: Deltas) -> Counter[int]:
    """How many rows each minute of deltas got, by its bucket ``yyyyMMddHHmm``."""
    starts, places = distinct(deltas.starts)
    rows = np.zeros(len(starts), np.int64)
    np.add.at(rows, places, deltas.rows)
    counts = zip(starts.tolist(), rows.tolist(), strict=True)
    return Counter({_bucket(start, Grain.MINUTE): count for start, count in counts})


class _ColumnMap:
    """Which cells of a store the columns of deltas fill; a state that metrics share is one list."""

    def __init__(self, plan: SourcePlan, layout: Layout) -> None:
        self.first: dict[str, str] = {}
        """A column of deltas to the first cell that holds it."""
        self.shared: dict[str, str] = {}
        """A further cell to that first one."""
        for metric, columns in plan.cells.items():
            for cell, name in zip(layout.columns[metric], columns, strict=True):
                if self.first.setdefault(name, cell) != cell:
                    self.shared[cell] = self.first[name]


def texts(tallies: Tallies) -> pa.Array:
    """The tally of each group, as a store keeps it; null for a group without entries."""
    counts = np.diff(tallies.offsets)
    lists = pa.LargeListArray.from_arrays(pa.array(tallies.offsets), _entries(tallies))
    joined = pc.binary_join(lists, ",")
    return pc.if_else(pa.array(counts > 0), joined, pa.scalar(None, joined.type))


def _entries(tallies: Tallies) -> pa.Array:
    """Each key with its amounts."""
    if not isinstance(tallies.keys, pa.Array):
        (count,) = tallies.amounts
        return _numbers(tallies.keys, count)
    encoded = tallies.keys.dictionary_encode()
    quoted = pa.array([json.dumps(text) for text in encoded.dictionary.to_pylist()], pa.string())
    label = quoted.take(encoded.indices)
    if len(tallies.amounts) == 1:
        return pc.binary_join_element_wise(label, _digits(tallies.amounts[0]), ":")
    upper, lower, count = tallies.amounts
    pair = pc.binary_join_element_wise(_sum_digits(upper, lower), _digits(count), ",")
    return pc.binary_join_element_wise(label, ":[", pair, "]", "")


def _numbers(keys: Longs, count: Longs) -> pa.Array:
    """Number and count; a count of 1 is left out. Each distinct pair is formatted once."""
    if len(keys) and keys.min() >= -(2**31) and keys.max() < 2**31 and count.max() <= _LOW:
        encoded = pa.array((keys << 32) + count).dictionary_encode()
        pairs = encoded.dictionary.to_numpy()
        return _pairs(pairs >> 32, pairs & _LOW).take(encoded.indices)
    return _pairs(keys, count)


def _pairs(keys: Longs, count: Longs) -> pa.Array:
    number = _digits(keys)
    both = pc.binary_join_element_wise(number, _digits(count), ":")
    return pc.if_else(pa.array(count == 1), number, both)


def _digits(numbers: Longs) -> pa.Array:
    return pc.cast(pa.array(numbers), pa.string())


def _sum_digits(upper: Longs, lower: Longs) -> pa.Array:
    """Sums of upper and lower halves as the text of whole numbers."""
    upper, lower = upper + (lower >> 32), lower & _LOW
    if not len(upper) or np.abs(upper).max() < _WIDE:
        return _digits((upper << 32) + lower)
    halves = zip(upper.tolist(), lower.tolist(), strict=True)
    return pa.array([str((high << 32) + low) for high, low in halves], pa.string())


def _buckets(starts: Longs, grain: Grain) -> Longs:
    unique, places = distinct(starts)
    buckets = np.asarray([_bucket(start, grain) for start in unique.tolist()], np.int64)
    return buckets[places]


def _bucket(minute: int, grain: Grain) -> int:
    return grain.bucket(_EPOCH + timedelta(minutes=minute))
