"""Two ways to compute the states of groups, with the same result.

:class:`SparkAggregator` computes totals in Spark and collects the keys of tallies in lists.
:class:`NumpyAggregator` lets Spark collect pre-grouped rows, and computes everything in the driver,
one column at a time. For many states that is faster, since Spark does not compile sums that are
beside lists.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Protocol, TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from batchmill.aggregate import Column, Tallies
from batchmill.spark.l1.expressions import BITS, RowExpressions, codegen_barrier
from batchmill.spark.l1.plan import (
    CONDITION_BITS,
    COUNT,
    COUNT_BITS,
    ROWS,
    Listing,
    Recipe,
    Total,
    When,
)
from batchmill.spark.l1.states import Entries, GroupStates, Longs, Mask, tallies_of

LISTED = "_listed"
"""The column of a group's pre-grouped rows."""
MOST_NUMBERS = 150_000_000
"""How many numbers may be collected at once: they pass through the driver's memory and its JVM."""
_MOST_TOTALS = 12
"""Beside lists, each total costs Spark about as much as the driver needs for several."""

BitPlaces: TypeAlias = dict[str, dict[When, tuple[str, int]]]
"""By list, the column and the bit that stand for some conditions of its tallies. No entry for a
list whose tallies all have the same conditions. The column may be that of the list itself."""


class Aggregator(Protocol):
    """Computes the states of groups from rows."""

    def query(self, rows: str, group: Sequence[str], needs: RowExpressions) -> str:
        """The query of one row per group."""
        ...

    def columns(self, needs: RowExpressions) -> list[str]:
        """The columns of the query, beside those of the group."""
        ...

    def states(self, table: pa.Table, recipe: Recipe, needs: RowExpressions) -> GroupStates:
        """The states of a source's groups, from the query's result."""
        ...


class SparkAggregator:
    """Computes states in Spark; tallies are collected as lists of keys."""

    @staticmethod
    def suits(needs: RowExpressions, most_rows: int | None) -> bool:
        """Whether grouped rows are best aggregated this way; ``most_rows`` None: not known."""
        return (
            most_rows is not None
            and most_rows < 1 << COUNT_BITS
            and len(needs.totals) <= _MOST_TOTALS
            and all(listing.packed for listing in needs.lists.values())
            and all(len(whens) <= CONDITION_BITS for whens in needs.whens.values())
        )

    def query(self, rows: str, group: Sequence[str], needs: RowExpressions) -> str:
        """Sums and lists of each group."""
        items = _items(needs)
        if items:
            below = [f"{codegen_barrier(item)} AS {column}" for column, item in items.items()]
            rows = f"SELECT *, {', '.join(below)} FROM ({rows})"
        aggregates = [f"SUM({COUNT}) AS {ROWS}"]
        for column, total in needs.totals.items():
            # The sum of no values is null, but the count of no rows is 0.
            other = "0L" if total.what == COUNT else "NULL"
            value = total.what
            if total.when:
                value = f"IF({needs.met(total.when)}, {total.what}, {other})"
            aggregates.append(f"{total.how}({value}) AS {column}")
        aggregates += [f"COLLECT_LIST({column}) AS {column}" for column in items]
        grouped = ", ".join(group)
        return f"SELECT {grouped}, {', '.join(aggregates)} FROM ({rows}) GROUP BY {grouped}"

    def columns(self, needs: RowExpressions) -> list[str]:
        """Totals and lists."""
        return [ROWS, *needs.totals, *_items(needs)]

    def states(self, table: pa.Table, recipe: Recipe, needs: RowExpressions) -> GroupStates:
        """Totals as they came, tallies from their lists."""
        totals = {
            column: Column.of(total.how.lower(), table[column].combine_chunks())
            for column, total in recipe.totals.items()
        }
        tallies = listed_tallies(table, recipe, bit_places(needs))
        return GroupStates(table[ROWS].to_numpy(), totals, tallies)


class NumpyAggregator:
    """Aggregates pre-grouped rows with NumPy; see :func:`.expressions.grouped_rows`."""

    @staticmethod
    def fits(needs: RowExpressions, most_rows: int | None) -> bool:
        """Whether what is needed from up to ``most_rows`` rows fits the driver's memory."""
        fields = len(needs.columns) + 1 + len(needs.measures)
        return most_rows is not None and most_rows * fields <= MOST_NUMBERS

    def query(self, rows: str, group: Sequence[str], needs: RowExpressions) -> str:
        """The pre-grouped rows of each group, as a list of structs."""
        texts = {listing.key for listing in needs.lists.values() if listing.kind == "text"}
        fields = [
            f"MAKE_VALID_UTF8({column}) AS {column}" if column in texts else column
            for column in (*needs.columns, COUNT, *needs.measures)
        ]
        item = codegen_barrier(f"STRUCT({', '.join(fields)})")
        grouped = ", ".join(group)
        rows = f"SELECT {grouped}, {item} AS {LISTED} FROM ({rows})"
        return (
            f"SELECT {grouped}, COLLECT_LIST({LISTED}) AS {LISTED} FROM ({rows}) GROUP BY {grouped}"
        )

    def columns(self, needs: RowExpressions) -> list[str]:
        """The list."""
        return [LISTED]

    def states(self, table: pa.Table, recipe: Recipe, needs: RowExpressions) -> GroupStates:
        """Totals and tallies, computed from the lists."""
        groups = GroupedRows(table[LISTED], needs)
        totals = {column: groups.total(total) for column, total in recipe.totals.items()}
        tallies = tallies_of(recipe.tallies, groups.entries, lambda _, when: groups.met(when))
        return GroupStates(groups.total(Total("SUM", COUNT, ())).values, totals, tallies)


class GroupedRows:
    """The pre-grouped rows of all groups, one group after the other; no group is empty."""

    def __init__(self, lists: pa.ChunkedArray, needs: RowExpressions) -> None:
        whole = lists.combine_chunks()
        offsets = whole.offsets.to_numpy().astype(np.int64)
        self._starts: Longs = offsets[:-1] - offsets[0]
        items = whole.flatten()
        self._fields: Mapping[str, pa.Array] = {
            member.name: items.field(number) for number, member in enumerate(items.type)
        }
        self._items = len(items)
        self._needs = needs
        self._met: dict[When, Mask | None] = {}

    def met(self, when: When) -> Mask | None:
        """Which rows meet the conditions; None: all."""
        if when not in self._met:
            met: Mask | None = None
            for word, mask in self._needs.masks(when).items():
                has_bits = self._fields[word].to_numpy() & mask == mask
                met = has_bits if met is None else met & has_bits
            self._met[when] = met
        return self._met[when]

    def total(self, total: Total) -> Column:
        """One number of each group. The sum of no values is null, but the count of no rows is 0."""
        how = total.how.lower()
        column = Column.of(how, self._fields[total.what])
        met, values = self.met(total.when), column.values
        if total.what == COUNT:
            values = values if met is None else values * met
            return Column.reduced(how, values, None, self._group, len(self._starts))
        counts = column.valid if met is None else column.present & met
        return Column.reduced(how, values, counts, self._group, len(self._starts))

    def entries(self, listing: Listing) -> Entries:
        """The entries that a list of such keys would have."""
        key = self._fields[listing.key]
        measures = listing.measures or (COUNT,)
        amounts = [Column.of("sum", self._fields[name]).values for name in measures]
        kept: Mask | None = None
        if key.null_count:
            kept = pc.is_valid(key).to_numpy(zero_copy_only=False)
        if listing.measures:
            positive = amounts[-1] > 0
            kept = positive if kept is None else kept & positive
        return Entries.of(self._group, len(self._starts), key, amounts, kept)

    @cached_property
    def _group(self) -> Longs:
        """The group that a row belongs to."""
        sizes = np.diff(self._starts, append=self._items)
        return np.repeat(np.arange(len(self._starts)), sizes)


def bit_places(needs: RowExpressions) -> BitPlaces:
    """Where the bits of conditions are in the lists of a :class:`SparkAggregator`."""
    places: BitPlaces = {}
    for name, whens in needs.whens.items():
        conditions = [when for when in whens if when]
        if needs.lists[name].packed and len(conditions) <= CONDITION_BITS:
            bits = [(name, COUNT_BITS + n) for n, _ in enumerate(conditions)]
        else:
            bits = [(f"{name}_{n // BITS}", n % BITS) for n, _ in enumerate(conditions)]
        if len(whens) > 1:
            places[name] = dict(zip(conditions, bits, strict=True))
    return places


def listed_tallies(table: pa.Table, recipe: Recipe, places: BitPlaces) -> dict[str, Tallies]:
    """The tallies by their columns, from the lists of a :class:`SparkAggregator`."""

    def met(listing: Listing, when: When) -> Mask | None:
        place = places.get(listing.name, {}).get(when)
        if place is None:
            return None
        column, bit = place
        has_bit: Mask = (_flat(table, column) >> bit) & 1 == 1
        return has_bit

    return tallies_of(recipe.tallies, lambda listing: _entries(table, listing), met)


def _items(needs: RowExpressions) -> dict[str, str]:
    """What a row adds to lists, by their columns; null for nothing."""
    bits: dict[str, list[str]] = {}
    for places in bit_places(needs).values():
        for when, (column, bit) in places.items():
            bits.setdefault(column, []).append(f"IF({needs.met(when)}, {1 << bit}L, 0L)")
    items = {}
    for name, listing in needs.lists.items():
        present, whens = listing.present, needs.whens[name]
        if () not in whens:
            present += f" AND ({' OR '.join(needs.met(when) for when in whens)})"
        parts = [listing.item, *bits.pop(name, ())]
        items[name] = f"IF({present}, {' | '.join(parts)}, NULL)"
        for column in [name_ for name_ in bits if name_.startswith(f"{name}_")]:
            items[column] = f"IF({present}, {' | '.join(bits.pop(column))}, NULL)"
    return items


def _flat(table: pa.Table, column: str) -> Longs:
    return np.asarray(table[column].combine_chunks().flatten().to_numpy())


def _entries(table: pa.Table, listing: Listing) -> Entries:
    whole = table[listing.name].combine_chunks()
    items = whole.flatten()
    amounts: list[Longs] = [np.ones(len(items), np.int64)]
    if pa.types.is_struct(items.type):
        items, *measures = items.flatten()
        amounts = [measure.to_numpy() for measure in measures]
    elif listing.packed:
        packed = items.to_numpy()
        items = pa.array(packed >> (COUNT_BITS + CONDITION_BITS))
        amounts = [packed & ((1 << COUNT_BITS) - 1)]
    counts = np.diff(whole.offsets.to_numpy())
    return Entries.of(np.repeat(np.arange(len(whole)), counts), len(whole), items, amounts)
