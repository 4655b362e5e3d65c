"""A metric's plan: what it takes to read its values without its script.

Whoever reads a store may not have the sources that its metrics were defined over, so the plan holds
the function, its numbers and the shapes of its states, and not the paths and conditions.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import Any

from batchmill.oal import FUNCTIONS, Metric, Value
from batchmill.store.cell import Cell, Shape, merged, shape


@dataclass(frozen=True, slots=True)
class Plan:
    """From the cells of a metric to its states and its value."""

    function: str
    args: tuple[int | None, ...]
    """The function's arguments that are numbers; None for the others."""
    shapes: tuple[Shape, ...]
    _places: tuple[tuple[Shape, slice], ...] = field(init=False, repr=False, compare=False)
    """Where the cells of each state stand."""

    def __post_init__(self) -> None:
        ends = list(accumulate((len(each.cells) for each in self.shapes), initial=0))
        places = tuple(
            (shape, slice(*ends_of))
            for shape, ends_of in zip(self.shapes, pairwise(ends), strict=True)
        )
        object.__setattr__(self, "_places", places)

    @classmethod
    def of(cls, metric: Metric) -> Plan:
        """The plan of a metric."""
        args = tuple(each if isinstance(each, int) else None for each in metric.args)
        return cls(metric.function, args, tuple(shape(each) for each in metric.states))

    @classmethod
    def load(cls, text: str) -> Plan:
        """The plan that :meth:`dump` wrote."""
        read = json.loads(text)
        return cls(read["function"], tuple(read["args"]), tuple(map(Shape, read["shapes"])))

    def dump(self) -> str:
        """As text, for the store."""
        shapes = [each.value for each in self.shapes]
        return json.dumps({"function": self.function, "args": self.args, "shapes": shapes})

    @property
    def cells(self) -> tuple[Cell, ...]:
        """The cells of all its states, in order."""
        return tuple(cell for each in self.shapes for cell in each.cells)

    def states(self, values: Sequence[Any]) -> tuple[Any, ...]:
        """The merged states, from the values of all cells."""
        return tuple([shape.decode(values[place]) for shape, place in self._places])

    def merged(self, columns: Iterable[Iterable[Any]]) -> list[Any]:
        """The value of each cell over several rows, merged as the database would have done it.

        ``columns`` has the values of the first cell in all rows, then those of the second.
        """
        return [merged(cell, column) for cell, column in zip(self.cells, columns, strict=True)]

    def finished(self, values: Sequence[Any], minutes: int) -> Value:
        """The final value, from the values of all cells; None: no row matched."""
        return self.value(self.states(values), minutes)

    def value(self, states: Sequence[Any], minutes: int) -> Value:
        """The final value; None: no row matched."""
        return FUNCTIONS[self.function].finish(self.args, states, minutes)
