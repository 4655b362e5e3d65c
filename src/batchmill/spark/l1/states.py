"""States as columns, with Arrow and NumPy: merged by group, and tallies written as text.

Deltas are few and lie in the driver's memory as Arrow columns, so they are merged there: one sort,
then one pass per column. Whole numbers stay whole numbers: nothing passes through a float.

A tally comes as a list of keys, in which a key occurs as often as there were rows that differ in
something else; the amounts of equal keys are summed here. As a Spark expression that would be
interpreted for every entry, which took a quarter of a large batch's time.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from batchmill.spark.l1.plan import ListedTally, Listing, When

Numbers = npt.NDArray[Any]
Longs = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]

REDUCE: Mapping[str, Any] = {"sum": np.add, "max": np.maximum, "min": np.minimum}
"""The function that merges a column, by how it merges."""
_LOW = (1 << 32) - 1
_WIDE = 1 << 30
"""If all upper halves are below this, the whole number fits 64 bits."""


@dataclass(frozen=True)
class Groups:
    """Rows sorted by group: their order, where each group starts, and its key."""

    order: Longs
    starts: Longs
    buckets: Longs
    entities: Longs
    single: bool
    """Whether every group has one row only, so that nothing has to be merged."""


def group(buckets: Longs, entities: Longs) -> Groups:
    """Group rows by bucket and entity."""
    order = np.lexsort((entities, buckets))
    sorted_buckets, sorted_entities = buckets[order], entities[order]
    changes = (np.diff(sorted_buckets) != 0) | (np.diff(sorted_entities) != 0)
    starts = np.concatenate(([0], np.flatnonzero(changes) + 1))
    if not len(order):
        starts = starts[:0]
    return Groups(
        order, starts, sorted_buckets[starts], sorted_entities[starts], len(starts) == len(order)
    )


@dataclass(frozen=True)
class Column:
    """One column of deltas, and how it merges: ``sum``, ``max``, ``min`` or ``text``."""

    how: str
    values: Numbers
    """The neutral element where there is no value. Texts are Python strings, or None."""
    valid: Mask | None
    """Where there is a value; None: everywhere, and for texts."""

    def merged(self, groups: Groups) -> Column:
        """One value for each group, in the order of the groups."""
        values = self.values[groups.order]
        valid = None if self.valid is None else self.valid[groups.order]
        if groups.single:
            return Column(self.how, values, valid)
        if self.how == "text":
            return Column(self.how, _join_texts(values.tolist(), groups), None)
        values = REDUCE[self.how].reduceat(values, groups.starts)
        if valid is not None:
            valid = np.logical_or.reduceat(valid, groups.starts)
        return Column(self.how, values, valid)

    def tolist(self) -> list[Any]:
        """The values as the store takes them."""
        values: list[Any] = self.values.tolist()
        if self.valid is not None:
            for place in np.flatnonzero(~self.valid).tolist():
                values[place] = None
        return values


def column_of(column: pa.ChunkedArray | pa.Array, how: str) -> Column:
    """A column from Spark's result."""
    if how == "text":
        return Column(how, column.to_numpy(zero_copy_only=False), None)
    if not column.null_count:
        return Column(how, column.to_numpy(), None)
    valid = pc.is_valid(column).to_numpy(zero_copy_only=False)
    return Column(how, pc.fill_null(column, identity(column.type, how)).to_numpy(), valid)


def identity(kind: pa.DataType, how: str) -> pa.Scalar:
    """The neutral element of a merge."""
    if how == "sum":
        return pa.scalar(0, kind)
    if pa.types.is_floating(kind):
        return pa.scalar(float("-inf") if how == "max" else float("inf"), kind)
    limits = np.iinfo(kind.to_pandas_dtype())
    return pa.scalar(limits.min if how == "max" else limits.max, kind)


@dataclass(frozen=True)
class Entries:
    """The entries of all lists of a column, sorted by list and key."""

    rows: int
    """How many lists there are."""
    row: Longs
    """The list of each entry."""
    key: Longs
    """The key of each entry; where keys are texts, an index into ``texts``."""
    amounts: tuple[Longs, ...]
    """What is summed: the count of rows, or measures."""
    places: Longs
    """Where each entry was before sorting, among all items of the lists."""
    texts: tuple[str, ...] | None = None
    """The keys, where they are texts."""

    def text(self, tally: ListedTally, met: Mask | None) -> pa.Array:
        """The tally of each list, as the store writes it; null for a list without entries.

        ``met`` says which entries count, by their places; None: all.
        """
        row, key, amounts = self.row, self.key, self.amounts
        if met is not None:
            kept = met[self.places]
            row, key, amounts = row[kept], key[kept], tuple(amount[kept] for amount in amounts)
        # Neither of these changes the order.
        if tally.coarser > 1:
            # Rounded toward zero, also for the least of all numbers, which has no opposite.
            key = key // tally.coarser + ((key < 0) & (key % tally.coarser != 0))
        if tally.last is not None:
            key = np.clip(key, 0, tally.last)
        row, key, amounts = _sum_equal_keys(row, key, amounts)
        return _join_pieces(self.rows, row, self._pieces(key, amounts))

    def _pieces(self, key: Longs, amounts: Sequence[Longs]) -> pa.Array:
        if self.texts is None:
            return _number_pieces(key, amounts[0])
        label = pa.array([json.dumps(text) for text in self.texts], pa.string()).take(pa.array(key))
        if len(amounts) == 1:
            return pc.binary_join_element_wise(
                label, pc.cast(pa.array(amounts[0]), pa.string()), ":"
            )
        upper, lower, count = amounts
        parts = [_join_halves(upper, lower), pc.cast(pa.array(count), pa.string())]
        both = pc.binary_join_element_wise(*parts, ",")
        return pc.binary_join_element_wise(label, ":[", both, "]", "")


def sort_entries(
    row: Longs,
    rows: int,
    keys: pa.Array,
    amounts: Sequence[Longs],
    kept: Mask | None = None,
) -> Entries:
    """Sort entries by list and key: ``row`` is the list of each, of ``rows`` lists in all.

    ``kept`` says which items of the lists the entries are, if not all.
    """
    texts = None
    if not pa.types.is_integer(keys.type):
        encoded = keys.dictionary_encode()
        keys, texts = encoded.indices, tuple(encoded.dictionary.to_pylist())
    key = keys.to_numpy().astype(np.int64, copy=False)
    # Packed into one number, where that is possible, they are sorted several times as fast.
    packed = (row << 32) + key if _is_narrow(key) else None
    order = np.lexsort((key, row)) if packed is None else np.argsort(packed, kind="stable")
    return Entries(
        rows=rows,
        row=row[order],
        key=key[order],
        amounts=tuple(amount[order] for amount in amounts),
        places=order if kept is None else np.flatnonzero(kept)[order],
        texts=texts,
    )


def tally_texts(
    tallies: Mapping[str, ListedTally],
    entries: Callable[[Listing], Entries],
    met: Callable[[Listing, When], Mask | None],
) -> dict[str, pa.Array]:
    """The column of each tally. ``met`` says which items of a list meet conditions; None: all."""
    columns: dict[str, pa.Array] = {}
    sorted_entries: dict[str, Entries] = {}
    for column, tally in tallies.items():
        name = tally.listing.name
        if name not in sorted_entries:
            sorted_entries[name] = entries(tally.listing)
        columns[column] = sorted_entries[name].text(tally, met(tally.listing, tally.when))
    return columns


def _join_texts(texts: Sequence[str | None], groups: Groups) -> Numbers:
    joined = np.empty(len(groups.starts), dtype=object)
    ends = [*groups.starts[1:].tolist(), len(texts)]
    for number, (start, end) in enumerate(zip(groups.starts.tolist(), ends, strict=True)):
        joined[number] = ",".join(text for text in texts[start:end] if text) or None
    return joined


def _sum_equal_keys(
    row: Longs, key: Longs, amounts: tuple[Longs, ...]
) -> tuple[Longs, Longs, tuple[Longs, ...]]:
    if not len(row):
        return row, key, amounts
    new = np.empty(len(row), dtype=np.bool_)
    new[0] = True
    np.not_equal(key[1:], key[:-1], out=new[1:])
    new[1:] |= row[1:] != row[:-1]
    starts = np.flatnonzero(new)
    sums = tuple(np.add.reduceat(amount, starts) for amount in amounts)
    return row[starts], key[starts], sums


def _number_pieces(key: Longs, count: Longs) -> pa.Array:
    """Number and count as the store writes them; each distinct pair is formatted once."""
    if _is_narrow(key) and count.max(initial=0) <= _LOW:
        encoded = pa.array((key << 32) + count).dictionary_encode()
        pairs = encoded.dictionary.to_numpy()
        if len(pairs) * 4 < len(key):
            return _format_pairs(pairs >> 32, pairs & _LOW).take(encoded.indices)
    return _format_pairs(key, count)


def _format_pairs(key: Longs, count: Longs) -> pa.Array:
    number = pc.cast(pa.array(key), pa.string())
    counted = pc.binary_join_element_wise(number, pc.cast(pa.array(count), pa.string()), ":")
    return pc.if_else(pa.array(count == 1), number, counted)


def _is_narrow(key: Longs) -> bool:
    """Whether 32 bits hold every key."""
    return not len(key) or bool(key.min() >= -(2**31) and key.max() < 2**31)


def _join_pieces(rows: int, row: Longs, pieces: pa.Array) -> pa.Array:
    """The pieces of each row with commas between them; null for a row without any."""
    counts = np.bincount(row, minlength=rows)
    offsets = np.concatenate(([0], np.cumsum(counts)))
    lists = pa.LargeListArray.from_arrays(pa.array(offsets, pa.int64()), pieces)
    joined = pc.binary_join(lists, ",")
    return pc.if_else(pa.array(counts > 0), joined, pa.scalar(None, joined.type))


def _join_halves(upper: Longs, lower: Longs) -> pa.Array:
    """Sums of upper and lower halves as the text of whole numbers."""
    upper, lower = upper + (lower >> 32), lower & _LOW
    if not len(upper) or np.abs(upper).max() < _WIDE:
        return pc.cast(pa.array((upper << 32) + lower), pa.string())
    halves = zip(upper.tolist(), lower.tolist(), strict=True)
    return pa.array([str((high << 32) + low) for high, low in halves], pa.string())
