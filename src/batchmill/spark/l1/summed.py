"""The states of groups by Spark: everything in one aggregation.

The keys of tallies are collected in lists, and the driver makes the store's text of those.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
import pyarrow as pa

from batchmill.spark.l1.asked import BITS, Asked, barred
from batchmill.spark.l1.plan import ROWS
from batchmill.spark.l1.states import CONDITION_BITS, COUNT, COUNT_BITS, Listing, Recipe, When
from batchmill.spark.l1.tallies import Entries, Mask, Numbers, in_order, texts_of

Places: TypeAlias = dict[str, dict[When, tuple[str, int]]]
"""A list to where the bit is that stands for some conditions of its tallies: column and place.
Nothing for a list all of whose tallies ask for the same. The column may be the list itself."""


_MOST_TOTALS = 12
"""Beside lists each of them costs about as much as the driver takes for several."""


def suits(asked: Asked, most: int | None) -> bool:
    """Whether to do it here for rows that stand for others, for up to ``most``; None: not known."""
    return (
        most is not None
        and most < 1 << COUNT_BITS
        and len(asked.totals) <= _MOST_TOTALS
        and all(each.packed for each in asked.lists.values())
        and all(len(whens) <= CONDITION_BITS for whens in asked.whens.values())
    )


def query(rows: str, group: Sequence[str], asked: Asked) -> str:
    """The states of each group; tallies as lists."""
    items = _items(asked)
    if items:
        made = [f"{barred(item)} AS {column}" for column, item in items.items()]
        rows = f"SELECT *, {', '.join(made)} FROM ({rows})"
    summed = [f"SUM({COUNT}) AS {ROWS}"]
    for column, total in asked.totals.items():
        # The sum of nothing is nothing, but there are none of something: 0.
        other = "0L" if total.what == COUNT else "NULL"
        value = f"IF({asked.met(total.when)}, {total.what}, {other})" if total.when else total.what
        summed.append(f"{total.how}({value}) AS {column}")
    summed += [f"COLLECT_LIST({column}) AS {column}" for column in items]
    grouped = ", ".join(group)
    return f"SELECT {grouped}, {', '.join(summed)} FROM ({rows}) GROUP BY {grouped}"


def states(table: pa.Table, recipe: Recipe, asked: Asked) -> dict[str, pa.Array]:
    """The columns of a source's deltas."""
    made = {ROWS: table[ROWS]} | {each: table[each] for each in recipe.totals}
    return made | texts(table, recipe, places(asked))


def texts(table: pa.Table, recipe: Recipe, places: Places) -> dict[str, pa.Array]:
    """The tallies, by their columns."""

    def met(listing: Listing, when: When) -> Mask | None:
        place = places.get(listing.name, {}).get(when)
        if place is None:
            return None
        column, bit = place
        found: Mask = (_flat(table, column) >> bit) & 1 == 1
        return found

    return texts_of(recipe.tallies, lambda listing: _entries(table, listing), met)


def places(asked: Asked) -> Places:
    """Where the bits are."""
    made: Places = {}
    for name, whens in asked.whens.items():
        conditions = [each for each in whens if each]
        if asked.lists[name].packed and len(conditions) <= CONDITION_BITS:
            found = [(name, COUNT_BITS + n) for n, _ in enumerate(conditions)]
        else:
            found = [(f"{name}_{n // BITS}", n % BITS) for n, _ in enumerate(conditions)]
        if len(whens) > 1:
            made[name] = dict(zip(conditions, found, strict=True))
    return made


def _items(asked: Asked) -> dict[str, str]:
    """What a row puts into lists, by their columns; null for nothing."""
    bits: dict[str, list[str]] = {}
    for found in places(asked).values():
        for when, (column, bit) in found.items():
            bits.setdefault(column, []).append(f"IF({asked.met(when)}, {1 << bit}L, 0L)")
    items = {}
    for name, listing in asked.lists.items():
        there, whens = listing.there, asked.whens[name]
        if () not in whens:
            there += f" AND ({' OR '.join(asked.met(when) for when in whens)})"
        inside = [listing.item, *bits.pop(name, ())]
        items[name] = f"IF({there}, {' | '.join(inside)}, NULL)"
        for column in [each for each in bits if each.startswith(f"{name}_")]:
            items[column] = f"IF({there}, {' | '.join(bits.pop(column))}, NULL)"
    return items


def columns(asked: Asked) -> list[str]:
    """What the query makes for each group, beside the group itself."""
    return [ROWS, *asked.totals, *_items(asked)]


def _flat(table: pa.Table, column: str) -> Numbers:
    return np.asarray(table[column].combine_chunks().flatten().to_numpy())


def _entries(table: pa.Table, listing: Listing) -> Entries:
    whole = table[listing.name].combine_chunks()
    items = whole.flatten()
    amounts: list[Numbers] = [np.ones(len(items), np.int64)]
    if pa.types.is_struct(items.type):
        items, *measures = items.flatten()
        amounts = [each.to_numpy() for each in measures]
    elif listing.packed:
        packed = items.to_numpy()
        items = pa.array(packed >> (COUNT_BITS + CONDITION_BITS))
        amounts = [packed & ((1 << COUNT_BITS) - 1)]
    counts = np.diff(whole.offsets.to_numpy())
    return in_order(np.repeat(np.arange(len(whole)), counts), len(whole), items, amounts)
