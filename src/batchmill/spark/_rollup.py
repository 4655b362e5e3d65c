"""Roll-up: a batch's deltas per minute, added up again per hour and day.

Deltas are few and lie in the driver's memory as Arrow columns, so they are added up there: one
sort, then one pass per column. Whole numbers stay whole numbers: nothing passes through a float.
"""

from __future__ import annotations

from collections.abc import Sequence
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


def merge_column(column: pa.ChunkedArray, how: str, groups: Groups) -> list[Any]:
    """One column of the deltas, merged within each group: ``sum``, ``max``, ``min`` or ``text``."""
    if how == "text":
        return _join(column.take(pa.array(groups.order)).to_pylist(), groups)
    valid = pc.is_valid(column).to_numpy(zero_copy_only=False)[groups.order]
    filler = _filler(column.type, how)
    values = pc.fill_null(column, filler).to_numpy()[groups.order]
    if not groups.single:
        values = {"sum": np.add, "max": np.maximum, "min": np.minimum}[how].reduceat(
            values, groups.starts
        )
        valid = np.logical_or.reduceat(valid, groups.starts)
    if valid.all():
        return list(values.tolist())
    return [
        value if there else None
        for value, there in zip(values.tolist(), valid.tolist(), strict=True)
    ]


def _filler(kind: pa.DataType, how: str) -> pa.Scalar:
    if how == "sum":
        return pa.scalar(0, kind)
    floating = pa.types.is_floating(kind)
    limits: Any = np.finfo(np.float64) if floating else np.iinfo(kind.to_pandas_dtype())
    if floating:
        return pa.scalar(float("-inf") if how == "max" else float("inf"), kind)
    return pa.scalar(limits.min if how == "max" else limits.max, kind)


def _join(texts: Sequence[str | None], groups: Groups) -> list[str | None]:
    if groups.single:
        return list(texts)
    ends = [*groups.starts[1:].tolist(), len(texts)]
    return [
        ",".join(each for each in texts[start:end] if each) or None
        for start, end in zip(groups.starts.tolist(), ends, strict=True)
    ]
