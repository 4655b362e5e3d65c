"""Compiles a source's metrics to Spark SQL: all of them in one aggregation, equal states once.

States are made of totals and tallies. A total is a number: how many rows meet some conditions, or
the sum, maximum or minimum of a value of theirs. A tally is made of the keys of rows, collected in
a list. An :mod:`aggregator <.aggregators>` computes them; every aggregator gives the same result.

The plan is SQL text, written when a pipeline starts. :mod:`.fusion` runs it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from batchmill.oal import (
    ApdexCount,
    Bucketed,
    Clamped,
    Condition,
    Count,
    DoubleSum,
    Extreme,
    Label,
    LabelSum,
    Metric,
    Path,
    State,
    Sum,
    Tally,
)
from batchmill.sources import SourceType
from batchmill.spark import sql
from batchmill.store import Cell, Layout, cells

ROWS = "_rows"
"""The column of a delta that counts its rows."""
MINUTE = "_minute"
"""The column of a delta's minute, counted from 1970; null for invalid rows."""
COUNT = "_n"
"""The column that says how many rows a grouped row stands for."""

When: TypeAlias = tuple[str, ...]
"""The names of the conditions that a row must meet, all of them; none: every row counts."""

COUNT_BITS, CONDITION_BITS = 24, 8
"""A packed item is one long: the key, which conditions are met, and how many rows it stands for."""

_LOW = "4294967295L"
"""The lower half of a long."""
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
class Measure:
    """A value that is kept of rows when they are grouped."""

    value: str
    """The value of a single row."""
    how: str
    """SUM, MAX, MIN; or COUNT, the number of rows that have the value."""

    @property
    def single(self) -> str:
        """The measure of a single row."""
        return f"IF({self.value} IS NULL, 0L, 1L)" if self.how == "COUNT" else self.value


@dataclass(frozen=True)
class Total:
    """One number of a state."""

    how: str
    """SUM, MAX or MIN."""
    what: str
    """The column: the count of rows, or a measure."""
    when: When


@dataclass(frozen=True)
class Listing:
    """The keys of a group's rows, collected in a list; tallies of one key share it."""

    key: str
    """The column of the key; rows without one are left out."""
    kind: str
    """``int``, ``long`` or ``text``."""
    measures: tuple[str, ...] = ()
    """What is collected beside the key; empty: the number of rows."""

    @property
    def name(self) -> str:
        """The column that it is collected in: the same for the same listing."""
        return _named("_l", repr(self))

    @property
    def item(self) -> str:
        """What one row adds to the list."""
        if self.packed:
            shift = CONDITION_BITS + COUNT_BITS
            return f"SHIFTLEFT(CAST({self.key} AS BIGINT), {shift}) | {COUNT}"
        key = f"MAKE_VALID_UTF8({self.key})" if self.kind == "text" else self.key
        if not self.measures:
            return key
        rest = [f"{measure} AS m{number}" for number, measure in enumerate(self.measures)]
        return f"STRUCT({', '.join([f'{key} AS k', *rest])})"

    @property
    def packed(self) -> bool:
        """Whether an item is one number; any other item stands for one row."""
        return self.kind == "int"

    @property
    def present(self) -> str:
        """SQL: whether a row adds anything to the list."""
        has_key = f"{self.key} IS NOT NULL"
        return f"{has_key} AND {self.measures[-1]} > 0" if self.measures else has_key


@dataclass(frozen=True)
class ListedTally:
    """A tally that is made of a listing."""

    listing: Listing
    when: When
    coarser: int = 1
    """How many buckets of the listing make one bucket of this tally."""
    last: int | None = None
    """The last bucket, which takes all beyond it; the first one takes all before it."""


@dataclass
class Recipe:
    """Everything that the states of one source need, each thing once.

    Names are derived from what they stand for, so two sources that need the same use one name.
    """

    thresholds: Mapping[str, int]
    conditions: dict[str, str] = field(default_factory=dict)
    """Name to condition of a row."""
    keys: dict[str, str] = field(default_factory=dict)
    """Column to key of a row."""
    measures: dict[str, Measure] = field(default_factory=dict)
    totals: dict[str, Total] = field(default_factory=dict)
    """The delta's column to the total in it."""
    tallies: dict[str, ListedTally] = field(default_factory=dict)
    """The delta's column to the tally in it."""
    _widths: dict[Path, tuple[int, ...]] = field(default_factory=dict)

    @property
    def listings(self) -> set[str]:
        """The names of the lists that are collected."""
        return {tally.listing.name for tally in self.tallies.values()}

    def expect(self, states: Iterable[State]) -> None:
        """Look at all states before any is added: tallies of one value share a key if the buckets
        of one can be filled from the finer buckets of the other."""
        widths: dict[Path, set[int]] = {}
        for state in states:
            if isinstance(state, Tally) and not isinstance(state.key, Label):
                widths.setdefault(state.key.value, set()).add(_width(state.key))
        for value, all_widths in widths.items():
            chosen: list[int] = []
            for width in sorted(all_widths):
                if all(width % finer for finer in chosen):
                    chosen.append(width)
            self._widths[value] = tuple(chosen)

    def add(self, state: State) -> tuple[str, ...]:
        """Add a state; the columns that hold it: one, or several."""
        when = self._when(state.where)
        if isinstance(state, ApdexCount):
            met = _put(self.conditions, "_w", sql.apdex(state, self.thresholds))
            return (self._total("SUM", COUNT, (*when, met)),)
        if isinstance(state, Count):
            return (self._total("SUM", COUNT, when),)
        if isinstance(state, Tally | LabelSum):
            tally = self._tally(state, when)
            column = _named("_t", repr(tally))
            self.tallies[column] = tally
            return (column,)
        how = state.which.upper() if isinstance(state, Extreme) else "SUM"
        return tuple(self._total(how, self._measure(how, part), when) for part in _parts(state))

    def _tally(self, state: Tally | LabelSum, when: When) -> ListedTally:
        if isinstance(state, LabelSum):
            whole = f"CAST({sql.path(state.value)} AS BIGINT)"
            parts = [self._measure("SUM", half) for half in _halves(whole)]
            parts.append(self._measure("COUNT", whole))
            return ListedTally(Listing(self._label(state.label), "text", tuple(parts)), when)
        if isinstance(state.key, Label):
            return ListedTally(Listing(self._label(state.key.value), "text"), when)
        value, width = state.key.value, _width(state.key)
        kind = "int" if value.type.kind == "int" else "long"
        finest = next(finer for finer in self._widths[value] if width % finer == 0)
        # Rounded toward zero here and later, which is the same as once.
        text = f"{sql.path(value)} DIV {finest}"
        key = _put(self.keys, "_k", f"CAST({text} AS {'INT' if kind == 'int' else 'BIGINT'})")
        last = state.key.steps if isinstance(state.key, Clamped) else None
        return ListedTally(Listing(key, kind), when, width // finest, last)

    def _label(self, value: Path) -> str:
        return _put(self.keys, "_k", f"CAST({sql.path(value)} AS STRING)")

    def _when(self, conditions: Iterable[Condition]) -> When:
        names = (_put(self.conditions, "_w", sql.condition(term)) for term in conditions)
        return tuple(sorted(set(names)))

    def _total(self, how: str, what: str, when: When) -> str:
        total = Total(how, what, when)
        column = _named("_s", repr(total))
        self.totals[column] = total
        return column

    def _measure(self, how: str, value: str) -> str:
        column = _named("_m", f"{how}({value})")
        self.measures[column] = Measure(value, how)
        return column


@dataclass(frozen=True)
class SourcePlan:
    """How the rows of one source become deltas."""

    source: SourceType
    roles: tuple[str, ...]
    """The columns that identify entities, in the order of the entity's roles."""
    needed: frozenset[str]
    """The columns that the plan reads, beside ``time``."""
    recipe: Recipe
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
    """Plan all ``metrics`` of one source, for the columns that the store has assigned to them."""
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
        source.fields[role].column
        for role in source.entity.roles.values()
        if not role.startswith("=")
    )
    return SourcePlan(
        source=source,
        roles=roles,
        needed=frozenset(needed | set(roles) | set(source.required)),
        recipe=recipe,
        kinds=kinds,
        cells=filled,
    )


def minute_sql(fits: str) -> str:
    """The minute of a row by its own start; null for an invalid row."""
    return f"IF({fits}, UNIX_MICROS(time) DIV {_MINUTE_US}, NULL)"


def _columns(state: State) -> set[str]:
    """The top-level columns that a state reads."""
    columns = {_top(condition.path) for condition in state.where}
    for attribute in ("value", "label", "status", "name"):
        value = getattr(state, attribute, None)
        if isinstance(value, Path):
            columns.add(_top(value))
    if isinstance(state, Tally):
        columns.add(_top(state.key.value))
    return columns


def _top(path: Path) -> str:
    first = path.parts[0]
    assert isinstance(first, str)
    return "time_" if first == "time" else first


def _parts(state: Sum | DoubleSum | Extreme) -> tuple[str, ...]:
    """The values of one row that are summed, or compared."""
    value = sql.path(state.value)
    if isinstance(state, Extreme):
        return (value,)
    if isinstance(state, DoubleSum):
        whole, *rest = sql.limbs(value)
        return (*_halves(whole), *rest)
    if state.value.type.kind == "long":
        return _halves(f"CAST({value} AS BIGINT)")
    return (value,)


def _halves(whole: str) -> tuple[str, str]:
    """A long as its upper and its lower half: the sum of neither overflows a long."""
    return f"SHIFTRIGHT({whole}, 32)", f"({whole} & {_LOW})"


def _width(key: Bucketed | Clamped) -> int:
    return key.precision if isinstance(key, Bucketed) else key.step


def _put(columns: dict[str, str], kind: str, text: str) -> str:
    column = _named(kind, text)
    columns[column] = text
    return column


def _named(kind: str, text: str) -> str:
    """A column name derived from its content: the same text, the same name, in every plan."""
    return f"{kind}_{hashlib.md5(text.encode(), usedforsecurity=False).hexdigest()[:12]}"
