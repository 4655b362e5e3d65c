"""The states of groups by the driver, from lists of rows that are alike.

Such a row says for how many rows it stands, and their sums, greatest and least: see
:func:`.asked.alike`. Spark lists them for each group, and the driver makes the states of a group
from its list, a column at a time. For many states that is quicker than Spark's own sums, which are
not compiled beside lists: see :mod:`.summed`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from batchmill.spark.l1.asked import Asked, barred
from batchmill.spark.l1.plan import ROWS
from batchmill.spark.l1.states import COUNT, Listing, Recipe, Total, When
from batchmill.spark.l1.tallies import Entries, Mask, Numbers, in_order, texts_of
from batchmill.spark.l2.rollup import REDUCE, column_of, filler

LISTED = "_listed"
"""The column of a group's list."""


MOST_NUMBERS = 150_000_000
"""How many may be listed at once: they pass through the memory of the driver, and of its JVM."""


def fits(asked: Asked, most: int | None) -> bool:
    """Whether ``most`` rows can be listed, with all that is asked about them."""
    fields = len(asked.columns) + 1 + len(asked.measures)
    return most is not None and most * fields <= MOST_NUMBERS


def query(rows: str, group: Sequence[str], asked: Asked) -> str:
    """Rows that are alike, as a list for each group."""
    texts = {each.key for each in asked.lists.values() if each.kind == "text"}
    fields = [
        f"MAKE_VALID_UTF8({each}) AS {each}" if each in texts else each
        for each in (*asked.columns, COUNT, *asked.measures)
    ]
    item = barred(f"STRUCT({', '.join(fields)})")
    grouped = ", ".join(group)
    rows = f"SELECT {grouped}, {item} AS {LISTED} FROM ({rows})"
    return f"SELECT {grouped}, COLLECT_LIST({LISTED}) AS {LISTED} FROM ({rows}) GROUP BY {grouped}"


def columns(_: Asked) -> list[str]:
    """What the query makes for each group, beside the group itself."""
    return [LISTED]


def states(table: pa.Table, recipe: Recipe, asked: Asked) -> dict[str, pa.Array]:
    """The columns of a source's deltas."""
    listed = Listed(table[LISTED], asked)
    made = {ROWS: listed.total(Total("SUM", COUNT, ()))}
    made |= {column: listed.total(each) for column, each in recipe.totals.items()}
    return made | texts_of(recipe.tallies, listed.entries, lambda _, when: listed.met(when))


class Listed:
    """The lists of all groups, end to end; none is empty."""

    def __init__(self, lists: pa.ChunkedArray, asked: Asked) -> None:
        whole = lists.combine_chunks()
        offsets = whole.offsets.to_numpy().astype(np.int64)
        self._starts: Numbers = offsets[:-1] - offsets[0]
        items = whole.flatten()
        self._fields: Mapping[str, pa.Array] = {
            each.name: items.field(number) for number, each in enumerate(items.type)
        }
        self._items = len(items)
        self._asked = asked
        self._met: dict[When, Mask | None] = {}
        self._some: dict[When, Mask] = {}

    def met(self, when: When) -> Mask | None:
        """Which items meet the conditions; None for all."""
        if when not in self._met:
            made: Mask | None = None
            for word, mask in self._asked.masks(when).items():
                found = self._fields[word].to_numpy() & mask == mask
                made = found if made is None else made & found
            self._met[when] = made
        return self._met[when]

    def total(self, total: Total) -> pa.Array:
        """One number of each group. A sum of nothing is null, but a count of nothing is 0."""
        how = total.how.lower()
        column = column_of(self._fields[total.what], how)
        met, values, valid = self.met(total.when), column.values, column.valid
        if met is not None:
            values = np.where(met, values, filler(self._fields[total.what].type, how).as_py())
            values = values.astype(column.values.dtype, copy=False)
        made = REDUCE[how].reduceat(values, self._starts) if len(self._starts) else values
        if total.what == COUNT or (met is None and valid is None):
            return pa.array(made)
        if valid is None:
            there = self._there(total.when)
        else:
            there = self._any(valid if met is None else valid & met)
        return pa.array(made, mask=~there)

    def entries(self, listing: Listing) -> Entries:
        """What a list of such keys would hold."""
        key = self._fields[listing.key]
        added = listing.measures or (COUNT,)
        amounts = [column_of(self._fields[each], "sum").values for each in added]
        kept: Mask | None = None
        if key.null_count:
            kept = pc.is_valid(key).to_numpy(zero_copy_only=False)
        if listing.measures:
            some = amounts[-1] > 0
            kept = some if kept is None else kept & some
        row = self._group
        if kept is None or kept.all():
            return in_order(row, len(self._starts), key, amounts)
        amounts = [each[kept] for each in amounts]
        return in_order(row[kept], len(self._starts), key.filter(pa.array(kept)), amounts, kept)

    @cached_property
    def _group(self) -> Numbers:
        """The group that an item belongs to."""
        sizes = np.diff(self._starts, append=self._items)
        return np.repeat(np.arange(len(self._starts)), sizes)

    def _there(self, when: When) -> Mask:
        """Which groups have an item that meets the conditions."""
        if when not in self._some:
            met = self.met(when)
            assert met is not None
            self._some[when] = self._any(met)
        return self._some[when]

    def _any(self, items: Mask) -> Mask:
        if not len(self._starts):
            return items
        made: Mask = np.logical_or.reduceat(items, self._starts)
        return made
