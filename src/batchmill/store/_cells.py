"""Cells: the columns that a state is kept in, each merged by SQL alone."""

from __future__ import annotations

import enum
from collections.abc import Sequence
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
from batchmill.store._tally import decode_label_sums, decode_labels, decode_numbers

DOUBLE_LIMBS = 4


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


class Shape(enum.Enum):
    """What the store has to know of a state to read it back."""

    COUNT = "count"
    SUM = "sum"
    DOUBLE_SUM = "double_sum"
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
        if self is Shape.DOUBLE_SUM:
            return (Cell.SUM,) * DOUBLE_LIMBS
        return (Cell.SUM,) if self is Shape.COUNT else (Cell(self.value),)

    def decode(self, values: Sequence[Any]) -> Any:
        """The merged state, from the values of its cells."""
        if self is Shape.DOUBLE_SUM:
            if all(each is None for each in values):
                return None
            return tuple(each or 0 for each in values)
        (value,) = values
        if self is Shape.COUNT:
            return value or 0
        if value is None:
            return None
        if self is Shape.NUMBERS:
            return decode_numbers(value)
        if self is Shape.LABELS:
            return decode_labels(value)
        if self is Shape.LABEL_SUMS:
            return decode_label_sums(value)
        return value


def shape(state: State) -> Shape:
    """The shape of a state."""
    match state:
        case Count() | ApdexCount():
            return Shape.COUNT
        case Sum():
            return Shape.SUM
        case DoubleSum():
            return Shape.DOUBLE_SUM
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
