"""One source's plan: every metric of it in one aggregation, equal states computed once.

The plan is text, written when a pipeline starts. Running it is :func:`batchmill.spark._l1.l1`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from batchmill.oal import LabelSum, Metric, Path, State, Tally
from batchmill.sources import SourceType
from batchmill.spark import _sql
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
    flags: Mapping[str, str]
    """Column name to condition: one for each distinct ``where``."""
    sums: Mapping[str, str]
    """Column name to aggregate; lists, where a tally is to come of it."""
    texts: Mapping[str, State]
    """The columns of ``sums`` that are lists, and the state that each is of."""
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
    flags: dict[str, str] = {}
    sums: dict[str, str] = {}
    texts: dict[str, State] = {}
    kinds: dict[str, str] = {}
    filled: dict[str, str] = {}
    needed: set[str] = set()
    for metric in metrics:
        columns = iter(layout.columns[metric.name])
        for state in metric.states:
            needed |= _columns(state)
            flag = "true"
            if state.where:
                condition = _sql.where(state.where)
                flag = _named("_w", condition)
                flags[flag] = condition
            made = _sql.aggregates(state, flag, thresholds)
            for aggregate, cell in zip(made, cells(state), strict=True):
                column = _named("_s", aggregate)
                sums[column] = aggregate
                kinds[column] = _MERGES[cell]
                if isinstance(state, Tally | LabelSum):
                    texts[column] = state
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
        flags=flags,
        sums=sums,
        texts=texts,
        kinds=kinds,
        cells=filled,
    )


def _named(kind: str, text: str) -> str:
    """A column's name that says what is in it: the same text, the same name, in every plan."""
    return f"{kind}_{hashlib.md5(text.encode(), usedforsecurity=False).hexdigest()[:12]}"


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
