"""How the states of a metric are kept in columns, and read back.

A state is kept in one or several cells, each one column that SQL alone can merge. A tally (counts
by number or by label) is kept as text: two are merged by putting a comma between them, and reading
adds up keys that occur more than once. There are three kinds of text: by number ``12:3,14,15:2``
(a count of 1 is left out), by label ``"GET":3,"POST":1``, and sum and count by label
``"GET":[120,3]``; the latter two are a JSON object without its braces. An empty tally is None.

Compacting a tally adds up its keys, and bounds it: of more than :data:`MAX_LABELS` labels, those
with the highest counts stay, ties by name, and the others become one label, ``overflow``.

A :class:`Plan` is what it takes to read a metric's values without its script: readers of a store
may not have the sources that its metrics were defined over.
"""

from __future__ import annotations

import enum
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import Any

from batchmill.oal import (
    FUNCTIONS,
    ApdexCount,
    Count,
    DoubleSum,
    Extreme,
    Label,
    LabelSum,
    Metric,
    State,
    Sum,
    Tally,
    Value,
)

DOUBLE_LIMBS = 4
LOW_BITS = 32
"""A sum that could outgrow 64 bits is kept as two: of the upper halves and of the lower ones."""
MAX_CACHED_PIECES = 100_000
MAX_LABELS = 1_000
"""How many labels of one cell are kept apart, beside ``overflow``. PostgreSQL's functions have the
same number in them: another one takes a migration."""
OVERFLOW_LABEL = "overflow"
"""What labels are merged to that are too many."""


def encode_numbers(tally: Mapping[int, int]) -> str | None:
    """A tally by number as text.

    >>> encode_numbers({12: 3, 14: 1})
    '12:3,14'
    """
    pieces = (str(key) if n == 1 else f"{key}:{n}" for key, n in sorted(tally.items()))
    return ",".join(pieces) or None


def decode_numbers(text: str) -> dict[int, int]:
    """The tally by number in a text.

    >>> decode_numbers("12:3,14,12")
    {12: 4, 14: 1}
    """
    if len(_PIECES) > MAX_CACHED_PIECES:
        _PIECES.clear()
    pieces = list(map(_PIECES.__getitem__, text.split(",")))
    tally = dict(pieces)
    if len(tally) < len(pieces):  # some numbers are there more than once
        tally = dict.fromkeys(tally, 0)
        for number, count in pieces:
            tally[number] += count
    return tally


class _PieceCache(dict[str, tuple[int, int]]):
    """Number and count by the text of a piece; most pieces come again and again."""

    def __missing__(self, piece: str) -> tuple[int, int]:
        key, _, count = piece.partition(":")
        parsed = self[piece] = (int(key), int(count) if count else 1)
        return parsed


_PIECES = _PieceCache()


def compact_numbers(text: str) -> str | None:
    """The same tally with each number once."""
    return encode_numbers(decode_numbers(text))


def encode_labels(tally: Mapping[str, int]) -> str | None:
    """A tally by label as text.

    >>> encode_labels({"GET": 3})
    '"GET":3'
    """
    return _json_body(dict(sorted(tally.items())))


def decode_labels(text: str) -> dict[str, int]:
    """The tally by label in a text."""
    tally: dict[str, int] = {}
    for label, count in _json_pairs(text):
        tally[label] = tally.get(label, 0) + count
    return tally


def compact_labels(text: str) -> tuple[str | None, int]:
    """The same tally with each label once; and how much of it went under ``overflow``."""
    tally = decode_labels(text)
    rare = rare_labels(tally)
    moved = sum(tally.pop(label) for label in rare)
    if rare:
        tally[OVERFLOW_LABEL] = tally.get(OVERFLOW_LABEL, 0) + moved
    return encode_labels(tally), moved


def rare_labels(counts: Mapping[str, int]) -> list[str]:
    """The labels that are too many: with the lowest counts, of equal ones the last by name."""
    if len(counts) <= MAX_LABELS:
        return []
    labels = (label for label in counts if label != OVERFLOW_LABEL)
    return sorted(labels, key=lambda label: (-counts[label], label))[MAX_LABELS:]


def encode_label_sums(sums: Mapping[str, tuple[int, int]]) -> str | None:
    """Sum and count by label, as text.

    >>> encode_label_sums({"GET": (120, 3)})
    '"GET":[120,3]'
    """
    return _json_body({label: list(pair) for label, pair in sorted(sums.items())})


def decode_label_sums(text: str) -> dict[str, tuple[int, int]]:
    """The sums and counts by label in a text."""
    sums: dict[str, tuple[int, int]] = {}
    for label, (total, count) in _json_pairs(text):
        before = sums.get(label, (0, 0))
        sums[label] = (before[0] + total, before[1] + count)
    return sums


def compact_label_sums(text: str) -> tuple[str | None, int]:
    """The same sums with each label once; and how many rows of them went under ``overflow``."""
    sums = decode_label_sums(text)
    moved = 0
    for label in rare_labels({label: count for label, (_, count) in sums.items()}):
        (total, count), rest = sums.pop(label), sums.get(OVERFLOW_LABEL, (0, 0))
        sums[OVERFLOW_LABEL] = (rest[0] + total, rest[1] + count)
        moved += count
    return encode_label_sums(sums), moved


def _json_body(content: Mapping[str, Any]) -> str | None:
    return json.dumps(content, separators=(",", ":"))[1:-1] or None


def _json_pairs(text: str) -> Iterable[tuple[str, Any]]:
    # As pairs: a dict would keep the last of two equal keys only.
    pairs: list[tuple[str, Any]] = _DECODER.decode(f"{{{text}}}")
    return pairs


_DECODER = json.JSONDecoder(object_pairs_hook=list)


class Cell(enum.Enum):
    """How one column merges. Null merged with a value is that value."""

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

    def merge(self, values: Iterable[Any]) -> Any:
        """The value of this cell over several rows, in any order.

        >>> Cell.SUM.merge([1, None, 2]), Cell.NUMBERS.merge(["12:3", "12"])
        (3, '12:3,12')
        """
        present = [value for value in values if value is not None]
        if len(present) < 2:
            return present[0] if present else None
        return _MERGES[self](present)


_MERGES: Mapping[Cell, Callable[[list[Any]], Any]] = {
    Cell.SUM: sum,
    Cell.MAX_INT: max,
    Cell.MIN_INT: min,
    Cell.MAX_FLOAT: max,
    Cell.MIN_FLOAT: min,
    **dict.fromkeys((Cell.NUMBERS, Cell.LABELS, Cell.LABEL_SUMS), ",".join),
}


class Shape(enum.Enum):
    """What the store has to know of a state to read it back."""

    COUNT = "count"
    SUM = "sum"
    """Of 32-bit numbers: no possible number of rows makes it outgrow 64 bits."""
    WIDE_SUM = "wide_sum"
    """Of 64-bit numbers: :func:`split` in two, good for 2^31 rows of one bucket and entity."""
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

    @classmethod
    def of(cls, state: State) -> Shape:
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

    @property
    def cells(self) -> tuple[Cell, ...]:
        """The cells that it is kept in."""
        if self in _SUM_CELLS:
            return (Cell.SUM,) * _SUM_CELLS[self]
        return (Cell(self.value),)

    def decode(self, values: Sequence[Any]) -> Any:
        """The merged state, from the values of its cells."""
        if len(values) > 1:
            if all(value is None for value in values):
                return None
            filled = tuple(value or 0 for value in values)
            if self is Shape.DOUBLE_SUM:
                return filled
            whole = join(filled[0], filled[1])
            return whole if self is Shape.WIDE_SUM else (whole, *filled[2:])
        (value,) = values
        if self is Shape.COUNT:
            return value or 0
        if value is None or self not in _DECODERS:
            return value
        return _DECODERS[self](value)


_DECODERS: Mapping[Shape, Callable[[str], Any]] = {
    Shape.NUMBERS: decode_numbers,
    Shape.LABELS: decode_labels,
    Shape.LABEL_SUMS: decode_label_sums,
}
_SUM_CELLS = {
    Shape.COUNT: 1,
    Shape.SUM: 1,
    Shape.WIDE_SUM: 2,
    Shape.DOUBLE_SUM: DOUBLE_LIMBS,
    Shape.WIDE_DOUBLE_SUM: DOUBLE_LIMBS + 1,
}
"""How many cells each shape takes that is a sum."""


def split(value: int) -> tuple[int, int]:
    """A whole number as upper and lower half, which are summed up separately.

    >>> split(-1)
    (-1, 4294967295)
    """
    return value >> LOW_BITS, value & ((1 << LOW_BITS) - 1)


def join(upper: int, lower: int) -> int:
    """The number, or the sum of numbers, of those halves.

    >>> join(-1, 4294967295)
    -1
    """
    return (upper << LOW_BITS) + lower


def cells(state: State) -> tuple[Cell, ...]:
    """The cells that a state is kept in, in order."""
    return Shape.of(state).cells


def decode(state: State, cell_values: Sequence[Any]) -> Any:
    """The merged state that ``Metric.values`` takes, from the values of its cells."""
    return Shape.of(state).decode(cell_values)


@dataclass(frozen=True, slots=True)
class Plan:
    """From the cells of a metric to its states and its value."""

    function: str
    args: tuple[int | None, ...]
    """The function's arguments that are numbers; None for the others."""
    shapes: tuple[Shape, ...]
    cells: tuple[Cell, ...] = field(init=False, repr=False, compare=False)
    """The cells of all its states, in order."""
    _slices: tuple[tuple[Shape, slice], ...] = field(init=False, repr=False, compare=False)
    """Where the cells of each state are."""

    def __post_init__(self) -> None:
        cells = tuple([cell for shape in self.shapes for cell in shape.cells])
        object.__setattr__(self, "cells", cells)
        ends = list(accumulate((len(shape.cells) for shape in self.shapes), initial=0))
        slices = tuple(
            (shape, slice(start, end))
            for shape, (start, end) in zip(self.shapes, pairwise(ends), strict=True)
        )
        object.__setattr__(self, "_slices", slices)

    @classmethod
    def of(cls, metric: Metric) -> Plan:
        """The plan of a metric."""
        args = tuple(arg if isinstance(arg, int) else None for arg in metric.args)
        return cls(metric.function, args, tuple(map(Shape.of, metric.states)))

    @classmethod
    def load(cls, text: str) -> Plan:
        """The plan that :meth:`dump` wrote."""
        content = json.loads(text)
        shapes = tuple(map(Shape, content["shapes"]))
        return cls(content["function"], tuple(content["args"]), shapes)

    def dump(self) -> str:
        """As text, for the store."""
        shapes = [shape.value for shape in self.shapes]
        return json.dumps({"function": self.function, "args": self.args, "shapes": shapes})

    def states(self, values: Sequence[Any]) -> tuple[Any, ...]:
        """The merged states, from the values of all cells."""
        return tuple([shape.decode(values[part]) for shape, part in self._slices])

    def merge(self, columns: Iterable[Iterable[Any]]) -> list[Any]:
        """The value of each cell over several rows, merged as the database would merge it.

        ``columns`` has the values of the first cell in all rows, then those of the second.
        """
        return [cell.merge(column) for cell, column in zip(self.cells, columns, strict=True)]

    def final_value(self, values: Sequence[Any], minutes: int) -> Value:
        """The final value, from the values of all cells; None: no row matched."""
        return self.value(self.states(values), minutes)

    def value(self, states: Sequence[Any], minutes: int) -> Value:
        """The final value, from the merged states; None: no row matched."""
        return FUNCTIONS[self.function].finish(self.args, states, minutes)
