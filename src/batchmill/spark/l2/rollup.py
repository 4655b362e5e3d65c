"""Roll-up: a batch's deltas per minute, added up again per hour and day.

Deltas are few and lie in the driver's memory as Arrow columns, so they are added up there: one
sort, then one pass per column; days from hours, hours from minutes. Whole numbers stay whole
numbers: nothing passes through a float.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

Numbers = npt.NDArray[Any]


@dataclass(frozen=True)
class Groups:
    """Rows sorted by group: the order they come in, where each group starts, and its key."""

    order: npt.NDArray[np.int64]
    starts: npt.NDArray[np.int64]
    buckets: npt.NDArray[np.int64]
    entities: npt.NDArray[np.int64]
    single: bool
    """Whether every row is a group of its own, already in order of nothing: nothing to add up."""


def group(buckets: npt.NDArray[np.int64], entities: npt.NDArray[np.int64]) -> Groups:
    """Group rows by (bucket, entity)."""
    order = np.lexsort((entities, buckets))
    sorted_buckets, sorted_entities = buckets[order], entities[order]
    changes = (np.diff(sorted_buckets) != 0) | (np.diff(sorted_entities) != 0)
    starts = np.concatenate(([0], np.flatnonzero(changes) + 1))
    if not len(order):
        starts = starts[:0]
    return Groups(
        order, starts, sorted_buckets[starts], sorted_entities[starts], len(starts) == len(order)
    )


@dataclass(frozen=True)
class Column:
    """One column of deltas, and how it merges: ``sum``, ``max``, ``min`` or ``text``."""

    how: str
    values: Numbers
    """Where there is nothing: what changes nothing. Texts are Python's own, or None."""
    valid: npt.NDArray[np.bool_] | None
    """Where there is something; None for everywhere, and for texts."""

    def merged(self, groups: Groups) -> Column:
        """Each group as one value, in the order of the groups."""
        values = self.values[groups.order]
        valid = None if self.valid is None else self.valid[groups.order]
        if groups.single:
            return Column(self.how, values, valid)
        if self.how == "text":
            return Column(self.how, _join(values.tolist(), groups), None)
        values = REDUCE[self.how].reduceat(values, groups.starts)
        if valid is not None:
            valid = np.logical_or.reduceat(valid, groups.starts)
        return Column(self.how, values, valid)

    def tolist(self) -> list[Any]:
        """The values as the store takes them."""
        made: list[Any] = self.values.tolist()
        if self.valid is not None:
            for place in np.flatnonzero(~self.valid).tolist():
                made[place] = None
        return made


REDUCE: Mapping[str, Any] = {"sum": np.add, "max": np.maximum, "min": np.minimum}
"""What adds up a column, by how it merges."""


def column_of(column: pa.ChunkedArray | pa.Array, how: str) -> Column:
    """A column as it came from Spark."""
    if how == "text":
        return Column(how, column.to_numpy(zero_copy_only=False), None)
    if not column.null_count:
        return Column(how, column.to_numpy(), None)
    valid = pc.is_valid(column).to_numpy(zero_copy_only=False)
    return Column(how, pc.fill_null(column, filler(column.type, how)).to_numpy(), valid)


def filler(kind: pa.DataType, how: str) -> pa.Scalar:
    """What changes nothing."""
    if how == "sum":
        return pa.scalar(0, kind)
    floating = pa.types.is_floating(kind)
    limits: Any = np.finfo(np.float64) if floating else np.iinfo(kind.to_pandas_dtype())
    if floating:
        return pa.scalar(float("-inf") if how == "max" else float("inf"), kind)
    return pa.scalar(limits.min if how == "max" else limits.max, kind)


def _join(texts: Sequence[str | None], groups: Groups) -> Numbers:
    joined = np.empty(len(groups.starts), dtype=object)
    ends = [*groups.starts[1:].tolist(), len(texts)]
    for number, (start, end) in enumerate(zip(groups.starts.tolist(), ends, strict=True)):
        joined[number] = ",".join(each for each in texts[start:end] if each) or None
    return joined
