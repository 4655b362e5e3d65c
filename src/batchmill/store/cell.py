"""Cells: the columns that a state is kept in, each merged by SQL alone."""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from batchmill.oal import (
    ApdexCount,
    Count,
    DoubleSum,
    Extreme,
    Label,
    LabelSum,
    State,
    Sum,
    Tally,
)
from batchmill.store.tallies import decode_label_sums, decode_labels, decode_numbers

DOUBLE_LIMBS = 4
LOW_BITS = 32
"""A sum that could outgrow 64 bits is kept as two: of the upper parts and of the lower ones."""


class Cell(enum.Enum):
    """How one column merges. Nothing (null) merged with something is that something."""

    SUM = "sum"
    MAX_INT = "max_int"
    MIN_INT = "min_int"
    MAX_FLOAT = "max_float"
    MIN_FLOAT = "min_float"
    NUMBERS = "numbers"
    """A tally by number, as text: merged by appending."""
    LABELS = "labels"
    """A tally by label."""
    LABEL_SUMS = "label_sums"
    """Sum and count by label."""


def merged(cell: Cell, values: Iterable[Any]) -> Any:
    """The value of a cell over several rows, whatever their order.

    >>> merged(Cell.SUM, [1, None, 2]), merged(Cell.NUMBERS, ["12:3", "12"])
    (3, '12:3,12')
    """
    there = [each for each in values if each is not None]
    return _MERGING[cell](there) if there else None


_MERGING: Mapping[Cell, Callable[[list[Any]], Any]] = {
    Cell.SUM: sum,
    Cell.MAX_INT: max,
    Cell.MIN_INT: min,
    Cell.MAX_FLOAT: max,
    Cell.MIN_FLOAT: min,
    # A tally's text is merged by a comma between two.
    **dict.fromkeys((Cell.NUMBERS, Cell.LABELS, Cell.LABEL_SUMS), ",".join),
}


class Shape(enum.Enum):
    """What the store has to know of a state to read it back."""

    COUNT = "count"
    SUM = "sum"
    """Of numbers of 32 bits: no number of rows that there can be makes it outgrow 64."""
    WIDE_SUM = "wide_sum"
    """Of numbers of 64 bits: :func:`split` in two, good for 2^31 rows of one bucket and entity."""
    DOUBLE_SUM = "double_sum"
    """As older stores kept it: the whole part in one cell."""
    WIDE_DOUBLE_SUM = "wide_double_sum"
    """The whole part :func:`split` in two, then three limbs of the fraction."""
    MAX_INT = "max_int"
    MIN_INT = "min_int"
    MAX_FLOAT = "max_float"
    MIN_FLOAT = "min_float"
    NUMBERS = "numbers"
    LABELS = "labels"
    LABEL_SUMS = "label_sums"

    @property
    def cells(self) -> tuple[Cell, ...]:
        """The cells that it is kept in."""
        if self in _SUMS:
            return (Cell.SUM,) * _SUMS[self]
        return (Cell(self.value),)

    def decode(self, values: Sequence[Any]) -> Any:
        """The merged state, from the values of its cells."""
        if len(values) > 1:
            if all(each is None for each in values):
                return None
            filled = tuple(each or 0 for each in values)
            if self is Shape.DOUBLE_SUM:
                return filled
            whole = joined(filled[0], filled[1])
            return whole if self is Shape.WIDE_SUM else (whole, *filled[2:])
        (value,) = values
        if self is Shape.COUNT:
            return value or 0
        if value is None or self not in _TEXTS:
            return value
        return _TEXTS[self](value)


_TEXTS: Mapping[Shape, Callable[[str], Any]] = {
    Shape.NUMBERS: decode_numbers,
    Shape.LABELS: decode_labels,
    Shape.LABEL_SUMS: decode_label_sums,
}
_SUMS = {
    Shape.COUNT: 1,
    Shape.SUM: 1,
    Shape.WIDE_SUM: 2,
    Shape.DOUBLE_SUM: DOUBLE_LIMBS,
    Shape.WIDE_DOUBLE_SUM: DOUBLE_LIMBS + 1,
}
"""The shapes that are sums, and how many."""


def split(value: int) -> tuple[int, int]:
    """A whole number as upper and lower part, which may be added up each for itself.

    >>> split(-1)
    (-1, 4294967295)
    """
    return value >> LOW_BITS, value & ((1 << LOW_BITS) - 1)


def joined(upper: int, lower: int) -> int:
    """The number, or the sum of numbers, of those parts.

    >>> joined(-1, 4294967295)
    -1
    """
    return (upper << LOW_BITS) + lower


def shape(state: State) -> Shape:
    """The shape of a state."""
    match state:
        case Count() | ApdexCount():
            return Shape.COUNT
        case Sum(value=value):
            return Shape.WIDE_SUM if value.type.kind == "long" else Shape.SUM
        case DoubleSum():
            return Shape.WIDE_DOUBLE_SUM
        case Extreme(value=value, which=which):
            return Shape(f"{which}_{'int' if value.type.is_whole else 'float'}")
        case Tally(key=Label()):
            return Shape.LABELS
        case Tally():
            return Shape.NUMBERS
        case LabelSum():
            return Shape.LABEL_SUMS


def cells(state: State) -> tuple[Cell, ...]:
    """The cells that a state is kept in, in order."""
    return shape(state).cells


def decode(state: State, cell_values: Sequence[Any]) -> Any:
    """The merged state that ``Metric.values`` takes, from the values of its cells."""
    return shape(state).decode(cell_values)
