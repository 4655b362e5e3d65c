"""Parts: into which traces and entities are divided, so that tasks can share them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from batchmill.sources import (
    BLANK_NAME,
    ENDPOINT_NAME_LIMIT,
    INSTANCE_NAME_LIMIT,
    SERVICE_NAME_LIMIT,
    SourceType,
)
from batchmill.spans import combine, hash64, part_of

Parts: TypeAlias = npt.NDArray[Any]
"""The part of each row."""
_COUNTING = min(SERVICE_NAME_LIMIT, INSTANCE_NAME_LIMIT, ENDPOINT_NAME_LIMIT)
"""Characters of a name that are in every entity's id."""


@dataclass(frozen=True)
class Share:
    """Which parts of the traces are a task's."""

    parts: int
    tasks: int
    task: int

    @property
    def own(self) -> range:
        """Its parts."""
        return range(self.task, self.parts, self.tasks)


def trace_parts(rows: pa.Table, parts: int) -> Parts:
    """The part of each row, by its trace; rows without one, which have no partner, anywhere."""
    traces = rows["trace_id"]
    places = part_of(hash64(traces), parts)
    if traces.null_count:
        lone = np.flatnonzero(traces.is_null().to_numpy())
        places[lone] = lone % parts
    return places


def by_part(table: pa.Table, parts: Parts) -> Iterator[tuple[int, pa.Table]]:
    """The rows of each part; ``parts`` has the part of each row."""
    if not table.num_rows:
        return
    order = np.argsort(parts, kind="stable")
    present, starts = np.unique(parts[order], return_index=True)
    rows = table if len(present) == 1 else table.take(pa.array(order))
    for part, start, end in zip(present, starts, [*starts[1:], len(parts)], strict=True):
        yield int(part), rows.slice(start, end - start)


def entity_parts(roles: Sequence[pa.Array], source: SourceType, parts: int) -> Parts:
    """The part of each row, by its entity; ``roles`` are the columns of its plan's roles.

    All rows of an entity are in one part, though they may have different layers, and names of
    which an id has the beginning only. The parts of a batch that is half committed must stay the
    same, so this must not change from one version to the next.
    """
    columns = (role for role, name in source.entity.roles.items() if not name.startswith("="))
    names = [
        _counting(column, role)
        for role, column in zip(columns, roles, strict=True)
        if not role.endswith("layer")
    ]
    return part_of(combine(*map(hash64, names)), parts)


def _counting(names: pa.Array, role: str) -> pa.Array:
    """What two names have in common if an entity's id does not tell them apart.

    ``role`` says which of the entity's names they are.
    """
    if pa.types.is_dictionary(names.type):
        if names.null_count:
            return _counting(names.dictionary_decode(), role)
        texts = _counting(names.dictionary, role)
        return pa.DictionaryArray.from_arrays(names.indices, texts)
    names = pc.fill_null(names, "")
    if role == "field":  # the id itself
        return names
    if (pc.max(pc.binary_length(names)).as_py() or 0) > _COUNTING:
        names = pc.utf8_slice_codeunits(names, 0, _COUNTING)
    if role.endswith("service"):
        blank = pc.equal(pc.utf8_trim_whitespace(names), "")
        names = pc.if_else(blank, BLANK_NAME, names)
    return names


def text_parts(entities: pa.ChunkedArray, parts: int) -> Parts:
    """The part of each row, by the id of its entity."""
    return part_of(hash64(entities), parts)
