"""Compiles a source's metrics to Spark SQL: all of them in one aggregation, equal states once.

States are made of totals and tallies. A total is a number: how many rows meet some conditions, or
the sum, maximum or minimum of a value of theirs. A tally is made of the keys of rows, collected in
a list. An :mod:`aggregator <.aggregators>` computes them; every aggregator gives the same result.

The plan is SQL text, written when a pipeline starts. :mod:`.fusion` runs it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

from batchmill import aggregate
from batchmill.oal import ApdexCount, Condition, Path
from batchmill.sources import SourceType
from batchmill.spark import sql

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

    @property
    def listings(self) -> set[str]:
        """The names of the lists that are collected."""
        return {tally.listing.name for tally in self.tallies.values()}

    def add_total(self, column: str, total: aggregate.Total) -> None:
        """Add a total; ``column`` is the delta's."""
        how = total.how.upper()
        what = COUNT
        if total.value is not None:
            what = self._measure(how, _part(total.value, total.part))
        self.totals[column] = Total(how, what, self._when(total.where))

    def add_tally(self, column: str, tally: aggregate.TallyColumn) -> None:
        """Add a tally; ``column`` is the delta's."""
        listing = self._listing(tally)
        when = self._when(tally.where)
        self.tallies[column] = ListedTally(listing, when, tally.coarser, tally.last)

    def _listing(self, tally: aggregate.TallyColumn) -> Listing:
        value, width = tally.key.value, tally.key.width
        if width is None:
            key = _put(self.keys, "_k", f"CAST({sql.path(value)} AS STRING)")
            if tally.summed is None:
                return Listing(key, "text")
            whole = f"CAST({sql.path(tally.summed)} AS BIGINT)"
            parts = [self._measure("SUM", half) for half in _halves(whole)]
            return Listing(key, "text", (*parts, self._measure("COUNT", whole)))
        if tally.key.log:
            return Listing(_put(self.keys, "_k", sql.log_bucket(sql.path(value))), "int")
        kind = "int" if value.type.kind == "int" else "long"
        type_ = "INT" if kind == "int" else "BIGINT"
        # Rounded toward zero here and later, which is the same as once.
        key = _put(self.keys, "_k", f"CAST({sql.path(value)} DIV {width} AS {type_})")
        return Listing(key, kind)

    def _when(self, tests: Iterable[Condition | ApdexCount]) -> When:
        texts = (
            sql.apdex(test, self.thresholds)
            if isinstance(test, ApdexCount)
            else sql.condition(test)
            for test in tests
        )
        return tuple(sorted({_put(self.conditions, "_w", text) for text in texts}))

    def _measure(self, how: str, value: str) -> str:
        column = _named("_m", f"{how}({value})")
        self.measures[column] = Measure(value, how)
        return column


@dataclass(frozen=True)
class SourcePlan:
    """How Spark makes the deltas of an aggregator."""

    aggregator: aggregate.Aggregator
    recipe: Recipe

    @property
    def source(self) -> SourceType:
        """The event type."""
        return self.aggregator.plan.source

    @property
    def roles(self) -> tuple[str, ...]:
        """The columns that identify entities, in the order of the entity's roles."""
        return self.aggregator.plan.roles

    @property
    def paths(self) -> tuple[Path, ...]:
        """What the metrics read of a row."""
        return self.aggregator.plan.paths

    @property
    def needed(self) -> frozenset[str]:
        """The columns that the plan reads, beside ``time``."""
        return frozenset(read.column for read in self.aggregator.plan.fields)


def plan_source(aggregator: aggregate.Aggregator) -> SourcePlan:
    """Plan the totals and tallies of all metrics of one source."""
    plan = aggregator.plan
    recipe = Recipe(plan.apdex_ms)
    for column, total in plan.totals.items():
        recipe.add_total(column, total)
    for column, tally in plan.tallies.items():
        recipe.add_tally(column, tally)
    return SourcePlan(aggregator, recipe)


def minute_sql(fits: str) -> str:
    """The minute of a row by its own start; null for an invalid row."""
    return f"IF({fits}, UNIX_MICROS(time) DIV {_MINUTE_US}, NULL)"


def _part(value: Path, part: str) -> str:
    """The part of a row's value that is summed, or compared."""
    text = sql.path(value)
    if part == "value":
        return text
    if part.startswith("limb"):
        return sql.limbs(text)[int(part[-1])]
    upper, lower = _halves(f"CAST({text} AS BIGINT)")
    return upper if part == "upper" else lower


def _halves(whole: str) -> tuple[str, str]:
    """A long as its upper and its lower half: the sum of neither overflows a long."""
    return f"SHIFTRIGHT({whole}, 32)", f"({whole} & {_LOW})"


def _put(columns: dict[str, str], kind: str, text: str) -> str:
    column = _named(kind, text)
    columns[column] = text
    return column


def _named(kind: str, text: str) -> str:
    """A column name derived from its content: the same text, the same name, in every plan."""
    return f"{kind}_{hashlib.md5(text.encode(), usedforsecurity=False).hexdigest()[:12]}"
