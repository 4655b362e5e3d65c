"""Turns L1's results into what the store merges: entities numbered, deltas of three grains.

Hours are merged from minutes, and days from hours; see :mod:`batchmill.spark.l1.states`.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from batchmill.aggregate import Contribution, EntityBook
from batchmill.sources import Grain
from batchmill.spark.l1.plan import MINUTE, ROWS, SourcePlan
from batchmill.spark.l1.states import Longs, column_of, group
from batchmill.store import Deltas

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_MINUTES = {Grain.MINUTE: 1, Grain.HOUR: 60, Grain.DAY: 1440}


@dataclass
class SourceDeltas(Contribution):
    """What the rows of one source contribute to a batch."""

    invalid: int = 0


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
    roles = [table[role].combine_chunks() for role in plan.roles]
    entities = book.numbers_of(plan.source, roles)
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


def _buckets(minutes: Longs, grain: Grain, size: int) -> Longs:
    distinct, codes = np.unique(minutes // size, return_inverse=True)
    buckets = [_bucket(int(number) * size, grain) for number in distinct]
    return np.asarray(buckets, dtype=np.int64)[codes]


def _bucket(minute: int, grain: Grain) -> int:
    return grain.bucket(_EPOCH + timedelta(minutes=minute))
