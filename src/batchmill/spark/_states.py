"""How states are made of rows: in two steps, of which the first may be left out.

First, rows that agree in all that any metric asks about (minute, entity, conditions, keys of
tallies) become one row with a count and the sums of its values. Then those are added up for each
state, and the keys of a tally with their counts are collected as a list, which becomes the store's
text. Without the first step every row stands for itself: the second is the same either way.

Text in, text out; see :mod:`._l1` for who puts it together.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from batchmill.oal import (
    ApdexCount,
    Bucketed,
    Clamped,
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
from batchmill.spark import _sql

COUNT = "_n"
"""The column that says how many rows a row stands for."""

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
class Listed:
    """A tally on its way to the store's text: a list of keys, each with what belongs to it."""

    item: str
    """Of one row: null where it has no key."""
    key: str
    """The key of an item, which is ``{x}``."""
    amounts: tuple[str, ...]
    """What is added up of the items ``{x}`` with the same key; the count is the last."""
    text: str
    """One key, as the store writes it: ``{key}`` is it, ``{0}``, ``{1}`` … the sums."""

    def starts(self, listed: str) -> str:
        """The positions in a sorted list at which a new key begins."""
        here, before = (self.key.format(x=f"{listed}[{each}]") for each in ("i", "i - 1"))
        return (
            f"IF(SIZE({listed}) = 0, ARRAY(), FILTER(SEQUENCE(0, SIZE({listed}) - 1), "
            f"i -> i = 0 OR {here} <> {before}))"
        )

    def pieces(self, listed: str, starts: str) -> str:
        """The store's text from the sorted list; null where it is empty."""
        end = f"COALESCE(GET({starts}, j + 1), SIZE({listed}))"
        sums = [
            f"IF({end} - i = 1, {each.format(x=f'{listed}[i]')}, "
            f"AGGREGATE(SLICE({listed}, i + 1, {end} - i), 0L, (a, x) -> a + {each.format(x='x')}))"
            for each in self.amounts
        ]
        entry = self.text.format(*sums, key=self.key.format(x=f"{listed}[i]"))
        return f"NULLIF(ARRAY_JOIN(TRANSFORM({starts}, (i, j) -> {entry}), ','), '')"


@dataclass
class Recipe:
    """Everything that the states of one source need, each thing once. Names say what is meant: two
    sources that need the same call it the same."""

    thresholds: Mapping[str, int]
    flags: dict[str, str] = field(default_factory=dict)
    """Column to condition of a row."""
    keys: dict[str, str] = field(default_factory=dict)
    """Column to key of a row."""
    measures: dict[str, Measure] = field(default_factory=dict)
    sums: dict[str, str] = field(default_factory=dict)
    """Column to aggregate."""
    lists: dict[str, Listed] = field(default_factory=dict)
    """Column to tally."""
    _widths: dict[Path, tuple[int, ...]] = field(default_factory=dict)

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
        if isinstance(state, ApdexCount):
            met = f"({_sql.where(state.where)}) AND {_sql.apdex(state, self.thresholds)}"
            return (self._sum(f"SUM(IF({self._flag(met)}, {COUNT}, 0L))"),)
        flag = self._flag(_sql.where(state.where))
        if isinstance(state, Count):
            return (self._sum(f"SUM(IF({flag}, {COUNT}, 0L))"),)
        if isinstance(state, Tally | LabelSum):
            if isinstance(state, Tally):
                listed = self._tally(state, flag)
            else:
                listed = self._label_sum(state, flag)
            column = _named("_t", repr(listed))
            self.lists[column] = listed
            return (column,)
        how = state.which.upper() if isinstance(state, Extreme) else "SUM"
        return tuple(
            self._sum(f"{how}(IF({flag}, {self._measure(how, each)}, NULL))")
            for each in _parts(state)
        )

    def _tally(self, state: Tally, flag: str) -> Listed:
        key, number = self._key(state.key)
        there = f"{flag} AND {key} IS NOT NULL"
        if number == "int":
            # Key and count in one long, which is sorted faster than pairs.
            return Listed(
                f"IF({there}, SHIFTLEFT(CAST({key} AS BIGINT), 32) + {COUNT}, NULL)",
                "SHIFTRIGHT({x}, 32)",
                ("({x} & " + _LOW + ")",),
                _NUMBER,
            )
        text = _NUMBER if number else f"CONCAT({_json('{key}')}, ':', {{0}})"
        item = f"IF({there}, STRUCT({key} AS k, {COUNT} AS n), NULL)"
        return Listed(item, "{x}.k", ("{x}.n",), text)

    def _label_sum(self, state: LabelSum, flag: str) -> Listed:
        key, _ = self._key(Label(state.label))
        value = f"CAST({_sql.path(state.value)} AS BIGINT)"
        high, low = (self._measure("SUM", each) for each in _halves(value))
        count = self._measure("COUNT", value)
        item = (
            f"IF({flag} AND {key} IS NOT NULL AND {count} > 0,"
            f" STRUCT({key} AS k, {high} AS h, {low} AS l, {count} AS n), NULL)"
        )
        total = "CAST({0} AS DECIMAL(19,0)) * 4294967296BD + {1}"
        text = f"CONCAT({_json('{key}')}, ':[', {total}, ',', {{2}}, ']')"
        return Listed(item, "{x}.k", ("{x}.h", "{x}.l", "{x}.n"), text)

    def _key(self, key: Bucketed | Clamped | Label) -> tuple[str, str]:
        """The key of a row, and what number it is: int, long, or none."""
        value = _sql.path(key.value)
        if isinstance(key, Label):
            text = f"CAST({value} AS STRING)"
            return self._named_key(text), ""
        kind = "int" if key.value.type.kind == "int" else "long"
        width = _width(key)
        finest = next(each for each in self._widths[key.value] if width % each == 0)
        # Toward zero, both times: the same as at once.
        column = self._named_key(
            f"CAST({value} DIV {finest} AS {'INT' if kind == 'int' else 'BIGINT'})"
        )
        number = column if width == finest else f"({column} DIV {width // finest})"
        if isinstance(key, Clamped):
            number = f"GREATEST(0L, LEAST(CAST({number} AS BIGINT), {_sql.literal(key.steps)}))"
            kind = "int" if key.steps < 2**31 else "long"
        return number, kind

    def _flag(self, condition: str) -> str:
        return condition if condition == "true" else _put(self.flags, "_w", condition)

    def _named_key(self, text: str) -> str:
        return _put(self.keys, "_k", text)

    def _sum(self, aggregate: str) -> str:
        return _put(self.sums, "_s", aggregate)

    def _measure(self, how: str, value: str) -> str:
        made = Measure(value, how)
        column = _named("_m", f"{how}({value})")
        self.measures[column] = made
        return column


_NUMBER = "IF({0} = 1, CAST({key} AS STRING), CONCAT({key}, ':', {0}))"


def _parts(state: Sum | DoubleSum | Extreme) -> tuple[str, ...]:
    """The values of one row that are added up, or compared."""
    value = _sql.path(state.value)
    if isinstance(state, Extreme):
        return (value,)
    if isinstance(state, DoubleSum):
        whole, *rest = _sql.limbs(value)
        return (*_halves(whole), *rest)
    if state.value.type.kind == "long":
        return _halves(f"CAST({value} AS BIGINT)")
    return (value,)


def _halves(whole: str) -> tuple[str, str]:
    """A long as two, its upper and its lower half: the sum of neither outgrows a long."""
    return f"SHIFTRIGHT({whole}, 32)", f"({whole} & {_LOW})"


def _width(key: Bucketed | Clamped) -> int:
    return key.precision if isinstance(key, Bucketed) else key.step


def _json(text: str) -> str:
    """A string as JSON writes it, quotes included."""
    whole = f"TO_JSON(ARRAY(MAKE_VALID_UTF8({text})))"
    return f"SUBSTRING({whole}, 2, LENGTH({whole}) - 2)"


def _put(columns: dict[str, str], kind: str, text: str) -> str:
    column = _named(kind, text)
    columns[column] = text
    return column


def _named(kind: str, text: str) -> str:
    """A column's name that says what is in it: the same text, the same name, in every plan."""
    return f"{kind}_{hashlib.md5(text.encode(), usedforsecurity=False).hexdigest()[:12]}"
