"""Columns of rows: Python lists, or Arrow arrays, which are not turned into Python's objects.

Nothing here imports Arrow or NumPy unless such an array is given.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import compress
from typing import TYPE_CHECKING, Any, TypeAlias

if TYPE_CHECKING:
    import numpy as np

Values: TypeAlias = Any
"""The values of a column, a list or an Arrow array; None, or null, where there is none."""
Columns: TypeAlias = Sequence[Values]
"""Rows, given column by column: all as lists, or all as Arrow arrays."""


def is_arrow(columns: Columns) -> bool:
    """Whether the columns are Arrow arrays."""
    return bool(columns) and hasattr(columns[0], "to_pylist")


def as_lists(columns: Columns, null: object = None) -> list[Sequence[Any]]:
    """The columns as Python's lists, with ``null`` where there is no value."""
    return [_as_list(column, null) for column in columns]


def _as_list(column: Values, null: object) -> Sequence[Any]:
    values: Sequence[Any] = column
    if hasattr(column, "to_pylist"):
        values = column.to_pylist()
        if not column.null_count:
            return values
    return values if null is None else [null if value is None else value for value in values]


def bounds(values: Values) -> tuple[int, int]:
    """The least and the greatest of whole numbers, of which there are some."""
    if hasattr(values, "to_numpy"):
        numbers: np.ndarray[Any, Any] = values.to_numpy()
        return int(numbers.min()), int(numbers.max())
    return min(values), max(values)


def distinct(values: Values) -> Iterable[int]:
    """The whole numbers that occur."""
    return values.unique().to_pylist() if hasattr(values, "unique") else set(values)


def place_rows(columns: Columns, keys: Sequence[int]) -> list[Values]:
    """Put keys for the indices in the second column; Arrow rows by the first two columns."""
    buckets, indices, *cells = columns
    if not is_arrow(columns):
        return [buckets, [keys[index] for index in indices], *cells]
    import numpy as np
    import pyarrow as pa

    row_keys = np.asarray(keys, np.int64)[indices.to_numpy()]
    order = np.lexsort((row_keys, buckets.to_numpy()))
    placed: list[Values] = [buckets, pa.array(row_keys), *cells]
    if (np.diff(order) == 1).all():
        return placed
    return [column.take(pa.array(order)) for column in placed]


def split_rows(columns: Columns, first: int) -> tuple[list[Values], list[Values]]:
    """The rows whose first column is smaller than a number, and the others."""
    if not len(columns[0]):
        return [column[:0] for column in columns], list(columns)
    least, greatest = bounds(columns[0])
    if least >= first or greatest < first:
        none = [column[:0] for column in columns]
        return (none, list(columns)) if least >= first else (list(columns), none)
    if is_arrow(columns):
        import pyarrow as pa

        later = columns[0].to_numpy() >= first
        return (
            [column.filter(pa.array(~later)) for column in columns],
            [column.filter(pa.array(later)) for column in columns],
        )
    later = [value >= first for value in columns[0]]
    earlier = [not choice for choice in later]
    return (
        [list(compress(column, earlier)) for column in columns],
        [list(compress(column, later)) for column in columns],
    )
