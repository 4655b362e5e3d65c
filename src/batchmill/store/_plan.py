"""A metric's plan: what it takes to read its values without its script.

Whoever reads a store may not have the sources that its metrics were defined over, so the plan holds
the function, its numbers and the shapes of its states, and not the paths and conditions.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from batchmill.oal import FUNCTIONS, Metric, Value
from batchmill.store._cells import Cell, Shape, shape


@dataclass(frozen=True, slots=True)
class Plan:
    """From the cells of a metric to its states and its value."""

    function: str
    args: tuple[int | None, ...]
    """The function's arguments that are numbers; None for the others."""
    shapes: tuple[Shape, ...]

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
        found = []
        start = 0
        for each in self.shapes:
            end = start + len(each.cells)
            found.append(each.decode(values[start:end]))
            start = end
        return tuple(found)

    def value(self, states: Sequence[Any], minutes: int) -> Value:
        """The final value; None: no row matched."""
        return FUNCTIONS[self.function].finish(self.args, states, minutes)
