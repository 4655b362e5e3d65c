"""Turns L1's results into what the store merges: entities numbered, deltas of three grains.

Hours are merged from minutes, and days from hours; see :mod:`batchmill.spark.l1.states`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from batchmill.sources import Grain, SourceType, entity_id, split_entity_id
from batchmill.spark.l1.plan import MINUTE, ROWS, SourcePlan
from batchmill.spark.l1.states import Longs, column_of, group
from batchmill.store import Deltas, EntityRow

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_MINUTES = {Grain.MINUTE: 1, Grain.HOUR: 60, Grain.DAY: 1440}

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


@dataclass
class SourceDeltas:
    """What one source contributes to a batch."""

    deltas: list[Deltas] = field(default_factory=list)
    rows: int = 0
    invalid: int = 0
    rows_by_minute: Counter[int] = field(default_factory=Counter)
    """How many rows each minute got, by its bucket ``yyyyMMddHHmm``."""


class EntityBook:
    """Numbers the entities of one batch; several sources may have the same entity."""

    def __init__(self) -> None:
        self._numbers: dict[tuple[str, str], int] = {}
        self._layers: list[set[str]] = []
        self._rows: list[tuple[str, str, tuple[str, ...]]] = []

    def number(self, kind: str, id: str, names: tuple[str, ...], layers: set[str]) -> int:  # noqa: A002
        """The entity's number; a new entity gets the next one."""
        number = self._numbers.get((kind, id))
        if number is None:
            number = self._numbers[kind, id] = len(self._rows)
            self._rows.append((kind, id, names))
            self._layers.append(set())
        self._layers[number] |= layers
        return number

    def rows(self) -> list[EntityRow]:
        """Every entity, by number."""
        return [
            EntityRow(
                kind,
                id_,
                names[-1],
                frozenset(layers),
                dict(zip(_ROLES[kind], names, strict=True)),
            )
            for (kind, id_, names), layers in zip(self._rows, self._layers, strict=True)
        ]

    def numbers_of(self, source: SourceType, roles: Sequence[pa.ChunkedArray]) -> Longs:
        """The entity of each row, from its role columns (in the order of the entity's roles)."""
        fields = [role for role in source.entity.roles.values() if not role.startswith("=")]
        codes, firsts = _distinct(roles)
        values = [column.take(pa.array(firsts)).to_pylist() for column in roles]
        numbers = [
            self._number_of(source, dict(zip(fields, row, strict=True)))
            for row in zip(*values, strict=True)
        ]
        return np.asarray(numbers, dtype=np.int64)[codes]

    def _number_of(self, source: SourceType, row: Mapping[str, str | None]) -> int:
        kind = source.entity.kind
        id_ = entity_id(source, row)
        layers = {
            layer
            for role, name in source.entity.roles.items()
            if role == "layer" and (layer := row.get(name))
        }
        if source.entity.roles.get("layer", "").startswith("=") and source.name in FIXED_LAYERS:
            layers.add(FIXED_LAYERS[source.name])
        return self.number(kind, id_, split_entity_id(kind, id_), layers)


def to_deltas(table: pa.Table, plan: SourcePlan, book: EntityBook) -> SourceDeltas:
    """The deltas of one source for the store, per minute, hour and day."""
    result = SourceDeltas()
    valid = pc.is_valid(table[MINUTE])
    if not pc.all(valid, min_count=0).as_py():
        result.invalid = int(pc.sum(table.filter(pc.invert(valid))[ROWS]).as_py() or 0)
        table = table.filter(valid)
    if not table.num_rows:
        return result
    minutes = table[MINUTE].to_numpy()
    entities = book.numbers_of(plan.source, [table[role] for role in plan.roles])
    rows = table[ROWS].to_numpy()
    result.rows = int(rows.sum())
    distinct, codes = np.unique(minutes, return_inverse=True)
    sums = np.zeros(len(distinct), dtype=np.int64)
    np.add.at(sums, codes, rows)
    for minute, count in zip(distinct.tolist(), sums.tolist(), strict=True):
        result.rows_by_minute[_bucket(minute, Grain.MINUTE)] = count
    columns = {name: column_of(table[name], kind) for name, kind in plan.kinds.items()}
    # Metrics that share a state share its list: by state, the first cell that holds it.
    first: dict[str, str] = {}
    shared: dict[str, str] = {}
    for cell, name in plan.cells.items():
        if first.setdefault(name, cell) != cell:
            shared[cell] = first[name]
    for grain, size in _MINUTES.items():
        groups = group(_buckets(minutes, grain, size), entities)
        columns = {name: column.merged(groups) for name, column in columns.items()}
        merged = {name: column.tolist() for name, column in columns.items()}
        result.deltas.append(
            Deltas(
                source=plan.source.name,
                grain=grain,
                buckets=groups.buckets.tolist(),
                entities=groups.entities.tolist(),
                cells={cell: merged[name] for name, cell in first.items()},
                shared=shared,
            )
        )
        # The next grain is merged from this one.
        minutes, entities = minutes[groups.order][groups.starts], groups.entities
    return result


def _distinct(
    columns: Sequence[pa.ChunkedArray],
) -> tuple[Longs, Longs]:
    """For each row the number of its combination of values; for each combination a row with it."""
    codes = np.zeros(len(columns[0]), dtype=np.int64)
    for column in columns:
        encoded = column.combine_chunks().dictionary_encode(null_encoding="encode")
        if isinstance(encoded, pa.ChunkedArray):
            encoded = encoded.combine_chunks()
        here = encoded.indices.to_numpy(zero_copy_only=False).astype(np.int64)
        # Renumbered after each column, so that the product never exceeds 64 bits.
        _, codes = np.unique(codes * (len(encoded.dictionary) + 1) + here, return_inverse=True)
    _, firsts = np.unique(codes, return_index=True)
    return codes, firsts


def _buckets(minutes: Longs, grain: Grain, size: int) -> Longs:
    distinct, codes = np.unique(minutes // size, return_inverse=True)
    buckets = [_bucket(int(number) * size, grain) for number in distinct]
    return np.asarray(buckets, dtype=np.int64)[codes]


def _bucket(minute: int, grain: Grain) -> int:
    return grain.bucket(_EPOCH + timedelta(minutes=minute))
