"""Deltas: the states of an event type's entities in some buckets, as columns that merge.

They are made of rows by an :class:`~batchmill.aggregate.Aggregator`, travel as Arrow tables, and
end as the cells that a store merges into its own.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from batchmill.aggregate.columns import (
    Column,
    Groups,
    Longs,
    Tallies,
    as_texts,
    group,
    joined_texts,
    numbered,
    numbered_starts,
)
from batchmill.aggregate.errors import DeltasError
from batchmill.aggregate.plan import SourcePlan, differences
from batchmill.errors import ConfigError
from batchmill.sources import Grain

START = "_start"
ROW_COUNT = "_rows"
"""The column that says how many rows went into the states of an entity and a bucket."""
_FORMAT = 1
METADATA = b"batchmill.deltas"


@dataclass(frozen=True, eq=False)
class Deltas:
    """One row of states for each bucket and entity; a pair may occur more than once."""

    grain: Grain
    starts: Longs
    """When the bucket begins, in minutes since 1970."""
    roles: tuple[pa.Array, ...]
    """What identifies the entity: the columns of the plan's roles; texts, or dictionaries of
    them."""
    rows: Longs
    """How many rows went into it."""
    totals: Mapping[str, Column]
    tallies: Mapping[str, Tallies]

    def __len__(self) -> int:
        return len(self.starts)

    @property
    def nbytes(self) -> int:
        """The memory that it takes."""
        arrays: list[Any] = [self.starts, *self.roles, self.rows]
        for column in self.totals.values():
            arrays += [column.values, *([] if column.valid is None else [column.valid])]
        for tallies in self.tallies.values():
            arrays += [tallies.offsets, tallies.keys, *tallies.amounts]
        return sum(int(array.nbytes) for array in arrays)

    def grouped(self) -> Deltas:
        """Deltas with each pair of bucket and entity once; these deltas if they are so already."""
        groups = group([numbered_starts(self.starts), *map(numbered, self.roles)])
        return self if len(groups) == len(self) else self.merged(groups)

    def merged(self, groups: Groups) -> Deltas:
        """One row for each group of rows."""
        firsts = pa.array(groups.firsts)
        return Deltas(
            self.grain,
            self.starts[groups.firsts],
            tuple(role.take(firsts) for role in self.roles),
            Column("sum", self.rows, None).merged(groups).values,
            {name: column.merged(groups) for name, column in self.totals.items()},
            {name: tallies.merged(groups) for name, tallies in self.tallies.items()},
        )


def concat(deltas: Sequence[Deltas]) -> Deltas:
    """All rows of several deltas of one plan and grain."""
    first = deltas[0]
    for other in deltas:
        if other.grain is not first.grain:
            raise ConfigError("deltas", other.grain.value, f"of one grain, {first.grain.value}")
    if len(deltas) == 1:
        return first
    return Deltas(
        first.grain,
        np.concatenate([part.starts for part in deltas]),
        tuple(map(joined_texts, zip(*(part.roles for part in deltas), strict=True))),
        np.concatenate([part.rows for part in deltas]),
        {name: Column.concat([part.totals[name] for part in deltas]) for name in first.totals},
        {name: Tallies.concat([part.tallies[name] for part in deltas]) for name in first.tallies},
    )


def to_arrow(deltas: Deltas, plan: SourcePlan) -> pa.Table:
    """Deltas as a table that says which metrics it is for; :func:`from_arrow` reads it."""
    columns: dict[str, pa.Array] = {START: pa.array(deltas.starts)}
    columns |= dict(zip(plan.roles, deltas.roles, strict=True))
    columns[ROW_COUNT] = pa.array(deltas.rows)
    columns |= {name: column.to_arrow() for name, column in deltas.totals.items()}
    for name, tallies in deltas.tallies.items():
        keys = tallies.keys if isinstance(tallies.keys, pa.Array) else pa.array(tallies.keys)
        fields = {"key": keys}
        fields |= {f"n{place}": pa.array(numbers) for place, numbers in enumerate(tallies.amounts)}
        entries = pa.StructArray.from_arrays(list(fields.values()), list(fields))
        columns[name] = pa.LargeListArray.from_arrays(pa.array(tallies.offsets), entries)
    content = {
        "format": _FORMAT,
        "source": plan.source.name,
        "grain": deltas.grain.value,
        "roles": plan.roles,
        "fields": plan.types,
        "metrics": plan.definitions,
        "apdex_ms": plan.thresholds,
    }
    return pa.table(columns).replace_schema_metadata({METADATA: json.dumps(content).encode()})


def is_deltas(schema: pa.Schema) -> bool:
    """Whether a table or file with this schema holds deltas, not rows."""
    return METADATA in (schema.metadata or {})


def check_schema(schema: pa.Schema, plan: SourcePlan) -> Grain:
    """The grain of deltas that were made for the same metrics as ``plan``'s.

    Raises :class:`DeltasError`, saying which metric differs, if they were made for others.
    """
    source = plan.source.name
    if not is_deltas(schema):
        raise DeltasError(source, "these are no deltas")
    content = json.loads(schema.metadata[METADATA])
    if content["format"] != _FORMAT:
        raise DeltasError(
            source, f"they are of format {content['format']}, and this version reads {_FORMAT}"
        )
    if content["source"] != source:
        raise DeltasError(source, f"they are of {content['source']}")
    different = differences(plan.definitions, content["metrics"])
    different += differences(plan.types, content["fields"], "field ")
    if content["roles"] != list(plan.roles):
        different.append(f"entities by {content['roles']}, here by {list(plan.roles)}")
    if content["apdex_ms"] != plan.thresholds:
        different.append(f"apdex thresholds {content['apdex_ms']}, here {plan.thresholds}")
    if different:
        raise DeltasError(source, "; ".join(different))
    return Grain(content["grain"])


def from_arrow(table: pa.Table, plan: SourcePlan) -> Deltas:
    """Deltas from a table that :func:`to_arrow` made for the same metrics."""
    grain = check_schema(table.schema, plan)
    columns = {name: table[name].combine_chunks() for name in table.column_names}
    totals = {name: Column.of(total.how, columns[name]) for name, total in plan.totals.items()}
    return Deltas(
        grain,
        columns[START].to_numpy(),
        tuple(as_texts(columns[role]) for role in plan.roles),
        columns[ROW_COUNT].to_numpy(),
        totals,
        {name: _read_tallies(columns[name]) for name in plan.tallies},
    )


def _read_tallies(lists: pa.ListArray) -> Tallies:
    offsets = lists.offsets.to_numpy().astype(np.int64)
    keys, *amounts = lists.values.flatten()
    first, last = int(offsets[0]), int(offsets[-1])
    keys = keys[first:last]
    return Tallies(
        offsets - first,
        keys if pa.types.is_string(keys.type) else keys.to_numpy(),
        tuple(amount[first:last].to_numpy() for amount in amounts),
    )
