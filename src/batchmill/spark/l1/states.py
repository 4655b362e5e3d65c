"""How states are made of rows: what is asked about a row, what is kept of it, and what is added up.

Totals are numbers: how many rows meet some conditions, or the sum, the greatest or the least of
what they have. Tallies are made of lists of keys. It is computed by :mod:`.summed` or by
:mod:`.listed`: the same either way.

Text in, text out; see :mod:`._l1` for who puts it together.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
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
    Path,
    State,
    Sum,
    Tally,
)
from batchmill.spark.l1 import sql

COUNT = "_n"
"""The column that says how many rows a row stands for."""

When: TypeAlias = tuple[str, ...]
"""The conditions that a row must meet, all of them, by their names; none for every row."""

COUNT_BITS, CONDITION_BITS = 24, 8
"""A packed item is one long: the key, which conditions are met, and how many rows it stands for."""

_LOW = "4294967295L"
"""The lower half of a long."""


@dataclass(frozen=True)
class Measure:
    """What is kept of a value while rows become one."""

    value: str
    """Of a single row."""
    how: str
    """SUM, MAX, MIN; or COUNT, which is of those rows that have the value."""

    @property
    def single(self) -> str:
        """Of one row."""
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
    """The keys of a group's rows, collected; tallies of one key share it."""

    key: str
    """The column of the key; rows without one are left out."""
    kind: str
    """``int``, ``long`` or ``text``."""
    measures: tuple[str, ...] = ()
    """What is collected beside the key; none for how many rows there are."""

    @property
    def name(self) -> str:
        """The column that it is collected in: the same for the same listing."""
        return _named("_l", repr(self))

    @property
    def item(self) -> str:
        """What one row puts into the list."""
        if self.packed:
            shift = CONDITION_BITS + COUNT_BITS
            return f"SHIFTLEFT(CAST({self.key} AS BIGINT), {shift}) | {COUNT}"
        key = f"MAKE_VALID_UTF8({self.key})" if self.kind == "text" else self.key
        if not self.measures:
            return key
        rest = [f"{each} AS m{number}" for number, each in enumerate(self.measures)]
        return f"STRUCT({', '.join([f'{key} AS k', *rest])})"

    @property
    def packed(self) -> bool:
        """Whether an item is one number; any other item stands for one row."""
        return self.kind == "int"

    @property
    def there(self) -> str:
        """Whether a row has something to put there."""
        found = f"{self.key} IS NOT NULL"
        return f"{found} AND {self.measures[-1]} > 0" if self.measures else found


@dataclass(frozen=True)
class Tallied:
    """A tally, made of a listing."""

    listing: Listing
    when: When
    coarser: int = 1
    """How many of the listing's buckets make one of this tally."""
    last: int | None = None
    """The last bucket, which takes all beyond it, as the first takes all before it."""


@dataclass
class Recipe:
    """Everything that the states of one source need, each thing once. Names say what is meant: two
    sources that need the same call it the same."""

    thresholds: Mapping[str, int]
    conditions: dict[str, str] = field(default_factory=dict)
    """Name to condition of a row."""
    keys: dict[str, str] = field(default_factory=dict)
    """Column to key of a row."""
    measures: dict[str, Measure] = field(default_factory=dict)
    totals: dict[str, Total] = field(default_factory=dict)
    """The delta's column to what is in it."""
    tallies: dict[str, Tallied] = field(default_factory=dict)
    """The delta's column to what is in it."""
    _widths: dict[Path, tuple[int, ...]] = field(default_factory=dict)

    @property
    def listings(self) -> set[str]:
        """The lists that are collected."""
        return {each.listing.name for each in self.tallies.values()}

    def expect(self, states: Iterable[State]) -> None:
        """Look at all states first: tallies of one value share a key if the finer buckets of one
        fill the coarser ones of the other."""
        widths: dict[Path, set[int]] = {}
        for each in states:
            if isinstance(each, Tally) and not isinstance(each.key, Label):
                widths.setdefault(each.key.value, set()).add(_width(each.key))
        for value, found in widths.items():
            chosen: list[int] = []
            for width in sorted(found):
                if all(width % finer for finer in chosen):
                    chosen.append(width)
            self._widths[value] = tuple(chosen)

    def add(self, state: State) -> tuple[str, ...]:
        """The columns that hold the state: one, or several."""
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
        return tuple(self._total(how, self._measure(how, each), when) for each in _parts(state))

    def _tally(self, state: Tally | LabelSum, when: When) -> Tallied:
        if isinstance(state, LabelSum):
            whole = f"CAST({sql.path(state.value)} AS BIGINT)"
            parts = [self._measure("SUM", each) for each in _halves(whole)]
            parts.append(self._measure("COUNT", whole))
            return Tallied(Listing(self._label(state.label), "text", tuple(parts)), when)
        if isinstance(state.key, Label):
            return Tallied(Listing(self._label(state.key.value), "text"), when)
        value, width = state.key.value, _width(state.key)
        kind = "int" if value.type.kind == "int" else "long"
        finest = next(each for each in self._widths[value] if width % each == 0)
        # Toward zero, here and later: the same as at once.
        text = f"{sql.path(value)} DIV {finest}"
        key = _put(self.keys, "_k", f"CAST({text} AS {'INT' if kind == 'int' else 'BIGINT'})")
        last = state.key.steps if isinstance(state.key, Clamped) else None
        return Tallied(Listing(key, kind), when, width // finest, last)

    def _label(self, value: Path) -> str:
        return _put(self.keys, "_k", f"CAST({sql.path(value)} AS STRING)")

    def _when(self, conditions: Iterable[Condition]) -> When:
        made = (_put(self.conditions, "_w", sql.condition(each)) for each in conditions)
        return tuple(sorted(set(made)))

    def _total(self, how: str, what: str, when: When) -> str:
        total = Total(how, what, when)
        column = _named("_s", repr(total))
        self.totals[column] = total
        return column

    def _measure(self, how: str, value: str) -> str:
        column = _named("_m", f"{how}({value})")
        self.measures[column] = Measure(value, how)
        return column


def _parts(state: Sum | DoubleSum | Extreme) -> tuple[str, ...]:
    """The values of one row that are added up, or compared."""
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
    """A long as two, its upper and its lower half: the sum of neither outgrows a long."""
    return f"SHIFTRIGHT({whole}, 32)", f"({whole} & {_LOW})"


def _width(key: Bucketed | Clamped) -> int:
    return key.precision if isinstance(key, Bucketed) else key.step


def _put(columns: dict[str, str], kind: str, text: str) -> str:
    column = _named(kind, text)
    columns[column] = text
    return column


def _named(kind: str, text: str) -> str:
    """A column's name that says what is in it: the same text, the same name, in every plan."""
    return f"{kind}_{hashlib.md5(text.encode(), usedforsecurity=False).hexdigest()[:12]}"
