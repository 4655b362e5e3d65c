"""Tallies: lists of keys, as Spark collected them, become the store's text.

A list holds a key as often as there were rows that differ in something else, so what belongs to
one key is added up here. A column at a time, by Arrow and numpy: as an expression of Spark's it is
interpreted for every entry, which took a quarter of a large batch's time.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from batchmill.spark.l1.states import Listing, Tallied, When

Numbers = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]

_LOW = (1 << 32) - 1
_WIDE = 1 << 30
"""Upper halves below this: the whole number fits 64 bits."""


@dataclass(frozen=True)
class Entries:
    """The entries of all lists of a column, ordered by list and key."""

    rows: int
    """How many lists there are."""
    row: Numbers
    """The list that an entry is in."""
    key: Numbers
    """Its key; where keys are texts, the number of one."""
    amounts: tuple[Numbers, ...]
    """What is added up: the count of rows, or measures."""
    places: Numbers
    """Where an entry was before they were ordered, among all items of the lists."""
    texts: tuple[str, ...] | None = None
    """The keys, where they are texts."""

    def text(self, tally: Tallied, met: Mask | None) -> pa.Array:
        """The tally of each list, as the store writes it; null where it has no entry. Of those
        entries only that ``met`` tells, by where they were."""
        row, key, amounts = self.row, self.key, self.amounts
        if met is not None:
            kept = met[self.places]
            row, key, amounts = row[kept], key[kept], tuple(each[kept] for each in amounts)
        # Neither of these changes the order.
        if tally.coarser > 1:
            # Toward zero, also for the least of all numbers, which has no opposite.
            key = key // tally.coarser + ((key < 0) & (key % tally.coarser != 0))
        if tally.last is not None:
            key = np.clip(key, 0, tally.last)
        row, key, amounts = _added_up(row, key, amounts)
        return _joined(self.rows, row, self._pieces(key, amounts))

    def _pieces(self, key: Numbers, amounts: Sequence[Numbers]) -> pa.Array:
        if self.texts is None:
            return _numbered(key, amounts[0])
        label = pa.array([json.dumps(each) for each in self.texts], pa.string()).take(pa.array(key))
        if len(amounts) == 1:
            return pc.binary_join_element_wise(
                label, pc.cast(pa.array(amounts[0]), pa.string()), ":"
            )
        upper, lower, count = amounts
        parts = [_whole(upper, lower), pc.cast(pa.array(count), pa.string())]
        both = pc.binary_join_element_wise(*parts, ",")
        return pc.binary_join_element_wise(label, ":[", both, "]", "")


def in_order(
    row: Numbers,
    rows: int,
    keys: pa.Array,
    amounts: Sequence[Numbers],
    kept: Mask | None = None,
) -> Entries:
    """Entries of lists: the list of each, how many lists there are, keys, and what is added up. If
    they are not all items of the lists, ``kept`` tells which ones."""
    known = None
    if not pa.types.is_integer(keys.type):
        coded = keys.dictionary_encode()
        keys, known = coded.indices, tuple(coded.dictionary.to_pylist())
    key = keys.to_numpy().astype(np.int64, copy=False)
    # As one number, where that is possible, they are sorted several times as fast.
    one = (row << 32) + key if _narrow(key) else None
    order = np.lexsort((key, row)) if one is None else np.argsort(one, kind="stable")
    return Entries(
        rows=rows,
        row=row[order],
        key=key[order],
        amounts=tuple(each[order] for each in amounts),
        places=order if kept is None else np.flatnonzero(kept)[order],
        texts=known,
    )


def texts_of(
    tallies: Mapping[str, Tallied],
    entries: Callable[[Listing], Entries],
    met: Callable[[Listing, When], Mask | None],
) -> dict[str, pa.Array]:
    """The column of each tally. ``met`` tells which items of a list meet some conditions; None
    stands for all."""
    made: dict[str, pa.Array] = {}
    known: dict[str, Entries] = {}
    for column, tally in tallies.items():
        name = tally.listing.name
        if name not in known:
            known[name] = entries(tally.listing)
        made[column] = known[name].text(tally, met(tally.listing, tally.when))
    return made


def _added_up(
    row: Numbers, key: Numbers, amounts: tuple[Numbers, ...]
) -> tuple[Numbers, Numbers, tuple[Numbers, ...]]:
    """Each key once for each row."""
    if not len(row):
        return row, key, amounts
    new = np.empty(len(row), dtype=np.bool_)
    new[0] = True
    np.not_equal(key[1:], key[:-1], out=new[1:])
    new[1:] |= row[1:] != row[:-1]
    starts = np.flatnonzero(new)
    sums = tuple(np.add.reduceat(each, starts) for each in amounts)
    return row[starts], key[starts], sums


def _numbered(key: Numbers, count: Numbers) -> pa.Array:
    """Number and count as the store writes them: the same are written once."""
    if _narrow(key) and count.max(initial=0) <= _LOW:
        coded = pa.array((key << 32) + count).dictionary_encode()
        both = coded.dictionary.to_numpy()
        if len(both) * 4 < len(key):
            return _written(both >> 32, both & _LOW).take(coded.indices)
    return _written(key, count)


def _written(key: Numbers, count: Numbers) -> pa.Array:
    number = pc.cast(pa.array(key), pa.string())
    counted = pc.binary_join_element_wise(number, pc.cast(pa.array(count), pa.string()), ":")
    return pc.if_else(pa.array(count == 1), number, counted)


def _narrow(key: Numbers) -> bool:
    """Whether 32 bits hold every key."""
    return not len(key) or bool(key.min() >= -(2**31) and key.max() < 2**31)


def _joined(rows: int, row: Numbers, pieces: pa.Array) -> pa.Array:
    """The pieces of each row with commas between them; null for a row without."""
    counts = np.bincount(row, minlength=rows)
    offsets = np.concatenate(([0], np.cumsum(counts)))
    lists = pa.LargeListArray.from_arrays(pa.array(offsets, pa.int64()), pieces)
    joined = pc.binary_join(lists, ",")
    return pc.if_else(pa.array(counts > 0), joined, pa.scalar(None, joined.type))


def _whole(upper: Numbers, lower: Numbers) -> pa.Array:
    """Sums of halves as whole numbers, written."""
    upper, lower = upper + (lower >> 32), lower & _LOW
    if not len(upper) or np.abs(upper).max() < _WIDE:
        return pc.cast(pa.array((upper << 32) + lower), pa.string())
    halves = zip(upper.tolist(), lower.tolist(), strict=True)
    return pa.array([str((high << 32) + low) for high, low in halves], pa.string())
