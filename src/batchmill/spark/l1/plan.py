"""One source's plan: every metric of it in one aggregation, equal states computed once.

The plan is text, written when a pipeline starts. Running it is :mod:`.fusion`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from batchmill.oal import Metric, Path, State, Tally
from batchmill.sources import SourceType
from batchmill.spark.l1.states import Recipe
from batchmill.store import Cell, Layout, cells

ROWS = "_rows"
"""The column of a delta that counts its rows."""
MINUTE = "_minute"
"""The column of a delta's minute, counted from 1970; null for rows that do not fit."""

_MINUTE_US = 60_000_000
_MERGES: Mapping[Cell, str] = {
    Cell.SUM: "sum",
    Cell.MAX_INT: "max",
    Cell.MAX_FLOAT: "max",
    Cell.MIN_INT: "min",
    Cell.MIN_FLOAT: "min",
    Cell.NUMBERS: "text",
    Cell.LABELS: "text",
    Cell.LABEL_SUMS: "text",
}


@dataclass(frozen=True)
class SourcePlan:
    """How the rows of one source become deltas."""

    source: SourceType
    roles: tuple[str, ...]
    """The columns that tell entities apart, in the order of the entity's roles."""
    needed: frozenset[str]
    """The columns that the plan reads, beside ``time``."""
    recipe: Recipe
    """What is computed of rows."""
    kinds: Mapping[str, str]
    """The delta's column to how it merges: sum, max, min or text."""
    cells: Mapping[str, str]
    """The store's column to the column of the delta that fills it."""


def plan_source(
    source: SourceType,
    metrics: Sequence[Metric],
    layout: Layout,
    thresholds: Mapping[str, int],
) -> SourcePlan:
    """The plan for all ``metrics`` of one source, into the columns that the store gave them."""
    recipe = Recipe(thresholds)
    recipe.expect(state for metric in metrics for state in metric.states)
    kinds: dict[str, str] = {}
    filled: dict[str, str] = {}
    needed: set[str] = set()
    for metric in metrics:
        columns = iter(layout.columns[metric.name])
        for state in metric.states:
            needed |= _columns(state)
            for column, cell in zip(recipe.add(state), cells(state), strict=True):
                kinds[column] = _MERGES[cell]
                filled[next(columns)] = column
    roles = tuple(
        source.fields[each].column
        for each in source.entity.roles.values()
        if not each.startswith("=")
    )
    return SourcePlan(
        source=source,
        roles=roles,
        needed=frozenset(needed | set(roles) | set(source.required)),
        recipe=recipe,
        kinds=kinds,
        cells=filled,
    )


def _columns(state: State) -> set[str]:
    """The top columns that a state reads."""
    found = {_top(each.path) for each in state.where}
    for attribute in ("value", "label", "status", "name"):
        value = getattr(state, attribute, None)
        if isinstance(value, Path):
            found.add(_top(value))
    if isinstance(state, Tally):
        found.add(_top(state.key.value))
    return found


def _top(path: Path) -> str:
    first = path.parts[0]
    assert isinstance(first, str)
    return "time_" if first == "time" else first


def minute_sql(fits: str) -> str:
    """The minute of a row by its own start; null where it does not fit."""
    return f"IF({fits}, UNIX_MICROS(time) DIV {_MINUTE_US}, NULL)"
