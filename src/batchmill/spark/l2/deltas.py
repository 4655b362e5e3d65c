"""From L1's result to what the store merges: entities numbered, three grains, counts of rows."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from batchmill.sources import Grain
from batchmill.spark.l1.plan import MINUTE, ROWS, SourcePlan
from batchmill.spark.l2.entities import EntityBook
from batchmill.spark.l2.rollup import column_of, group
from batchmill.store import Deltas

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_PER = {Grain.MINUTE: 1, Grain.HOUR: 60, Grain.DAY: 1440}


@dataclass
class SourceDeltas:
    """What one source contributes to a batch."""

    deltas: list[Deltas] = field(default_factory=list)
    rows: int = 0
    misfits: int = 0
    rows_by_minute: Counter[int] = field(default_factory=Counter)
    """How many rows each minute got, by its bucket ``yyyyMMddHHmm``."""


def to_deltas(table: pa.Table, plan: SourcePlan, book: EntityBook) -> SourceDeltas:
    """The deltas of one source for the store, per minute, hour and day."""
    result = SourceDeltas()
    fits = pc.is_valid(table[MINUTE])
    if not pc.all(fits, min_count=0).as_py():
        result.misfits = int(pc.sum(table.filter(pc.invert(fits))[ROWS]).as_py() or 0)
        table = table.filter(fits)
    if not table.num_rows:
        return result
    minutes = table[MINUTE].to_numpy()
    entities = book.numbers_of(plan.source, [table[each] for each in plan.roles])
    rows = table[ROWS].to_numpy()
    result.rows = int(rows.sum())
    distinct, codes = np.unique(minutes, return_inverse=True)
    sums = np.zeros(len(distinct), dtype=np.int64)
    np.add.at(sums, codes, rows)
    for minute, count in zip(distinct.tolist(), sums.tolist(), strict=True):
        result.rows_by_minute[_bucket(minute, Grain.MINUTE)] = count
    columns = {column: column_of(table[column], kind) for column, kind in plan.kinds.items()}
    first: dict[str, str] = {}
    """By state, the first column that keeps it; further columns share its list."""
    shared: dict[str, str] = {}
    for column, state in plan.cells.items():
        if first.setdefault(state, column) != column:
            shared[column] = first[state]
    for grain, per in _PER.items():
        groups = group(_buckets(minutes, grain, per), entities)
        columns = {column: each.merged(groups) for column, each in columns.items()}
        merged = {column: each.tolist() for column, each in columns.items()}
        result.deltas.append(
            Deltas(
                source=plan.source.name,
                grain=grain,
                buckets=groups.buckets.tolist(),
                entities=groups.entities.tolist(),
                cells={column: merged[state] for state, column in first.items()},
                shared=shared,
            )
        )
        # The next grain is made of this one.
        minutes, entities = minutes[groups.order][groups.starts], groups.entities
    return result


def _buckets(minutes: npt.NDArray[np.int64], grain: Grain, per: int) -> npt.NDArray[np.int64]:
    distinct, codes = np.unique(minutes // per, return_inverse=True)
    buckets = [_bucket(int(each) * per, grain) for each in distinct]
    return np.asarray(buckets, dtype=np.int64)[codes]


def _bucket(minute: int, grain: Grain) -> int:
    return grain.bucket(_EPOCH + timedelta(minutes=minute))
