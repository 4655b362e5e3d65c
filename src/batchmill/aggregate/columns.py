"""Columns of states with NumPy: rows are grouped, numbers merged by group, keys counted by group.

Whole numbers stay whole numbers: nothing passes through a float.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from batchmill.oal import LOG_BITS

Numbers: TypeAlias = npt.NDArray[Any]
Longs: TypeAlias = npt.NDArray[np.int64]
Mask: TypeAlias = npt.NDArray[np.bool_]

REDUCE: Mapping[str, Any] = {"sum": np.add, "max": np.maximum, "min": np.minimum}
"""The function that merges a column, by how it merges."""
_PACKED_LIMIT = 1 << 62
_DENSE = 8
"""Up to this many possible groups for each row, a table of all of them is the quickest."""


def identity(dtype: np.dtype[Any], how: str) -> Any:
    """The neutral element of a merge."""
    if how == "sum":
        return dtype.type(0)
    if dtype.kind == "f":
        return dtype.type(-np.inf if how == "max" else np.inf)
    limits = np.iinfo(dtype)
    return dtype.type(limits.min if how == "max" else limits.max)


@dataclass(frozen=True)
class Groups:
    """Rows by group: the group of each row, and for each group the first of its rows."""

    codes: Longs
    firsts: Longs

    def __len__(self) -> int:
        return len(self.firsts)


def group(columns: Sequence[tuple[Longs, int]]) -> Groups:
    """Group rows by several columns, each given as whole numbers from 0 up to below a size."""
    codes, size = columns[0]
    rows = len(codes)
    most = max(_DENSE * rows, 1024)
    for numbers, more in columns[1:]:
        if size * more > most:
            codes, size = _renumbered(codes, size, most)
        if size == 1:
            codes = numbers
        elif more > 1:
            codes = codes * more + numbers
        size *= more
    codes, size = _renumbered(codes, size, most)
    firsts = np.empty(size, np.int64)
    # Of several assignments the last one stays: in reverse, that of the first row.
    firsts[codes[::-1]] = np.arange(rows - 1, -1, -1)
    return Groups(codes, firsts)


def _renumbered(codes: Longs, size: int, most: int) -> tuple[Longs, int]:
    """Numbers below ``size`` without gaps, and how many there are; a table has ``most`` places."""
    if not len(codes):
        return codes, 0
    if size <= most:
        present = np.zeros(size, np.bool_)
        present[codes] = True
        places = np.cumsum(present, dtype=np.int64)
        return (places - 1)[codes], int(places[-1])
    encoded = pa.array(codes).dictionary_encode()
    return encoded.indices.to_numpy().astype(np.int64), len(encoded.dictionary)


def numbered_starts(starts: Longs) -> tuple[Longs, int]:
    """Starts of buckets as numbers from 0, in their order."""
    if not len(starts):
        return starts, 1
    earliest = int(starts.min())
    return starts - earliest, int(starts.max()) - earliest + 1


def distinct(starts: Longs) -> tuple[Longs, Longs]:
    """The distinct starts of buckets in order, and for each row the place of its own."""
    numbers, size = numbered_starts(starts)
    if size > _DENSE * len(starts):
        unique, places = np.unique(starts, return_inverse=True)
        return unique, places
    present = np.zeros(size, np.bool_)
    present[numbers] = True
    return np.flatnonzero(present) + starts.min(), (np.cumsum(present) - 1)[numbers]


def numbered(array: pa.Array) -> tuple[Longs, int]:
    """Texts as numbers from 0: equal texts have one number, null has one, too."""
    if pa.types.is_dictionary(array.type) and not array.indices.null_count:
        # A dictionary may have a text twice.
        numbers, size = numbered(array.dictionary)
        return numbers[array.indices.to_numpy()], size
    array = cast(array, pa.string())
    if _is_constant(array):
        return np.zeros(len(array), np.int64), 1
    encoded = array.dictionary_encode(null_encoding="encode")
    return encoded.indices.to_numpy().astype(np.int64), len(encoded.dictionary)


def as_texts(array: pa.Array) -> pa.Array:
    """Texts, as a dictionary if they are one: those of entities repeat, and stay small so."""
    if pa.types.is_dictionary(array.type):
        if array.type.value_type == pa.string() and array.type.index_type == pa.int32():
            return array
        codes, texts = cast(array.indices, pa.int32()), cast(array.dictionary, pa.string())
        return pa.DictionaryArray.from_arrays(codes, texts)
    return cast(array, pa.string())


def joined_texts(arrays: Sequence[pa.Array]) -> pa.Array:
    """The texts of several columns, one after the other."""
    if len({array.type for array in arrays}) > 1:
        arrays = [cast(array, pa.string()) for array in arrays]
    return pa.concat_arrays(arrays)


def count(codes: Longs, groups: int, counts: Mask | None) -> Longs:
    """How many rows of each group count; None: all."""
    if counts is None:
        return np.bincount(codes, minlength=groups).astype(np.int64, copy=False)
    # Quicker than to select the rows.
    both = np.bincount((codes << 1) + counts, minlength=2 * groups)
    return both[1::2].astype(np.int64)


def _is_constant(array: pa.Array) -> bool:
    """Whether all texts are equal, which is quicker to see than to number them."""
    if not len(array) or array.null_count or array[0] != array[-1]:
        return False
    return bool(pc.all(pc.equal(array, array[0])).as_py())


def truncated(numbers: Longs, divisor: int) -> Longs:
    """Quotients rounded toward zero."""
    quotients = numbers // divisor
    if len(numbers) and numbers.min() < 0:
        # The least of all numbers has no opposite, so signs are not simply turned.
        quotients += (numbers < 0) & (numbers % divisor != 0)
    return quotients


def log_buckets(numbers: Longs) -> Longs:
    """The bucket of each number, as :func:`batchmill.oal.values.log_bucket` has it."""
    numbers = np.maximum(numbers, 0)
    bits = np.frexp(numbers.astype(np.float64))[1].astype(np.int64)
    # A float may have been rounded up to the next power of two.
    bits -= (numbers >> np.maximum(bits - 1, 0)) == 0
    shifts = np.maximum(bits - LOG_BITS - 1, 0)
    return (shifts << LOG_BITS) + (numbers >> shifts)


def cast(array: pa.Array, kind: pa.DataType) -> pa.Array:
    """An array of another type; the same array if it is of that type."""
    return array if array.type == kind else pc.cast(array, kind)


@dataclass(frozen=True)
class Column:
    """One number of each group, and how it merges."""

    how: str
    values: Numbers
    """The neutral element where there is no value."""
    valid: Mask | None
    """Where there is a value; None: everywhere."""

    @classmethod
    def of(cls, how: str, array: pa.Array) -> Column:
        """From an Arrow array, null where there is no value."""
        if not array.null_count:
            return cls(how, array.to_numpy(), None)
        valid = array.is_valid().to_numpy(zero_copy_only=False)
        values = array.fill_null(0).to_numpy()
        return cls(how, np.where(valid, values, identity(values.dtype, how)), valid)

    @classmethod
    def reduced(
        cls, how: str, values: Numbers, valid: Mask | None, codes: Longs, groups: int
    ) -> Column:
        """Reduce values to one for each group; ``valid`` says which of them count."""
        if values.dtype.kind == "i":
            values = values.astype(np.int64, copy=False)
        neutral = identity(values.dtype, how)
        merged = np.full(groups, neutral)
        if valid is None:
            REDUCE[how].at(merged, codes, values)
            return cls(how, merged, None)
        REDUCE[how].at(merged, codes, np.where(valid, values, neutral))
        present = count(codes, groups, valid) > 0
        return cls(how, merged, None if present.all() else present)

    @classmethod
    def concat(cls, columns: Sequence[Column]) -> Column:
        """The groups of several columns, one after the other."""
        values = np.concatenate([column.values for column in columns])
        valid = None
        if any(column.valid is not None for column in columns):
            valid = np.concatenate([column.present for column in columns])
        return cls(columns[0].how, values, valid)

    @property
    def present(self) -> Mask:
        """Where there is a value."""
        return np.ones(len(self.values), np.bool_) if self.valid is None else self.valid

    def merged(self, groups: Groups) -> Column:
        """One value for each group of groups."""
        return Column.reduced(self.how, self.values, self.valid, groups.codes, len(groups))

    def to_arrow(self) -> pa.Array:
        """The values as an array; null where there is none."""
        return pa.array(self.values, mask=None if self.valid is None else ~self.valid)

    def tolist(self) -> list[Any]:
        """The values as Python's numbers; None where there is none."""
        values: list[Any] = self.values.tolist()
        if self.valid is not None:
            for place in np.flatnonzero(~self.valid).tolist():
                values[place] = None
        return values


@dataclass(frozen=True)
class Selection:
    """Rows that count, sorted by group."""

    rows: Longs
    """The place of each row."""
    starts: Longs
    """Where in ``rows`` each group starts, and where the last one ends."""

    @classmethod
    def all(cls, order: Longs, sizes: Longs) -> Selection:
        """All rows; ``order`` sorts them by group, ``sizes`` says how many are in each."""
        starts = np.zeros(len(sizes) + 1, np.int64)
        np.cumsum(sizes, out=starts[1:])
        return cls(order, starts)

    def where(self, counts: Mask | None) -> Selection:
        """Those of the rows for which ``counts`` is true; None: all."""
        if counts is None:
            return self
        places = np.flatnonzero(counts.take(self.rows))
        return Selection(self.rows.take(places), np.searchsorted(places, self.starts))

    def counts(self, met: Mask | None) -> Longs:
        """For how many rows of each group, none of which is empty, ``met`` is true; None: all."""
        if met is None or not len(self.rows):
            return np.diff(self.starts)
        return np.add.reduceat(met.take(self.rows).view(np.int8), self.starts[:-1], dtype=np.int64)

    def reduced(self, how: str, values: Numbers) -> Column:
        """One value for each group, of the values of its rows."""
        chosen = values.take(self.rows)
        if chosen.dtype.kind == "i":
            chosen = chosen.astype(np.int64, copy=False)
        first, last = self.starts[:-1], self.starts[1:]
        present = first < last
        if present.all():
            return Column(how, _reduced(how, chosen, first), None)
        merged = np.full(len(first), identity(chosen.dtype, how))
        merged[present] = _reduced(how, chosen, first[present])
        return Column(how, merged, present)


def _reduced(how: str, values: Numbers, starts: Longs) -> Numbers:
    """One value for each run of values."""
    return REDUCE[how].reduceat(values, starts) if len(starts) else values[:0]


Keys: TypeAlias = Longs | pa.Array
"""The keys of tallies: whole numbers, or texts."""


@dataclass(frozen=True)
class Tallies:
    """One tally of each group: keys, numbers in order, each once, with its amounts."""

    offsets: Longs
    """Where the entries of each group start, and where the last one's end."""
    keys: Keys
    amounts: tuple[Longs, ...]
    """The count of rows; or the upper and lower half of a sum, then the count of what it sums."""

    @classmethod
    def of_sorted(
        cls, groups: int, codes: Longs, keys: Keys, amounts: tuple[Longs, ...]
    ) -> Tallies:
        """From entries that are sorted by group; ``codes`` is the group of each."""
        offsets = np.zeros(groups + 1, np.int64)
        np.cumsum(np.bincount(codes, minlength=groups), out=offsets[1:])
        return cls(offsets, keys, amounts)

    @classmethod
    def of_runs(
        cls, groups: int, runs: Runs, texts: pa.Array | None, amounts: Sequence[Longs]
    ) -> Tallies:
        """One entry for each run whose count, the last of its amounts, is not 0.

        ``texts`` has the keys if they are texts; the keys of the runs are then places in it.
        """
        codes, keys = runs.codes, runs.keys
        if not amounts[-1].all():
            present = np.flatnonzero(amounts[-1])
            codes, keys = codes[present], keys[present]
            amounts = [amount[present] for amount in amounts]
        named = keys if texts is None else texts.take(pa.array(keys))
        return cls.of_sorted(groups, codes, named, tuple(amounts))

    @classmethod
    def summed(cls, codes: Longs, groups: int, keys: Keys, amounts: tuple[Longs, ...]) -> Tallies:
        """Add up entries of equal group and key; ``codes`` is the group of each."""
        if isinstance(keys, pa.Array):
            encoded = keys.dictionary_encode()
            numbers = encoded.indices.to_numpy().astype(np.int64)
            tallies = cls.summed(codes, groups, numbers, amounts)
            return replace(tallies, keys=encoded.dictionary.take(pa.array(tallies.keys)))
        if not len(keys):
            return cls.of_sorted(groups, codes, keys, amounts)
        low = int(keys.min())
        bits = (int(keys.max()) - low).bit_length()
        if groups << bits > _DENSE * len(keys):
            runs = Runs.of(codes, groups, keys)
            sums = tuple(runs.sums(amount) for amount in amounts)
            return cls.of_sorted(groups, runs.codes, runs.keys, sums)
        # In tables of all possible pairs.
        packed = (codes << bits) | (keys - low)
        tables = [np.zeros(groups << bits, np.int64) for _ in amounts]
        for table, amount in zip(tables, amounts, strict=True):
            np.add.at(table, packed, amount)
        # The last amount is a count, which is never 0.
        pairs = np.flatnonzero(tables[-1])
        sums = tuple(table[pairs] for table in tables)
        return cls.of_sorted(groups, pairs >> bits, (pairs & (1 << bits) - 1) + low, sums)

    @classmethod
    def concat(cls, tallies: Sequence[Tallies]) -> Tallies:
        """The groups of several columns, one after the other."""
        ends = np.cumsum([0, *(column.offsets[-1] for column in tallies)])
        offsets = [column.offsets[:-1] + end for column, end in zip(tallies, ends, strict=False)]
        keys = [column.keys for column in tallies]
        return cls(
            np.concatenate([*offsets, ends[-1:]]),
            pa.concat_arrays(keys) if isinstance(keys[0], pa.Array) else np.concatenate(keys),
            tuple(map(np.concatenate, zip(*(column.amounts for column in tallies), strict=True))),
        )

    def limited(self, most: int, rest: str) -> tuple[Tallies, int]:
        """Keep the ``most`` texts of each group with the highest counts, ties by name.

        The others become the text ``rest``, which is one more; the second result is their count.
        """
        large = np.diff(self.offsets) > most
        if not isinstance(self.keys, pa.Array) or not large.any():
            return self, 0
        codes, counts = self.rows, self.amounts[-1]
        by_name = np.empty(len(codes), np.int64)
        by_name[pc.array_sort_indices(self.keys).to_numpy()] = np.arange(len(codes))
        is_rest = pc.equal(self.keys, rest).to_numpy(zero_copy_only=False)
        order = np.lexsort((by_name, -counts, is_rest, codes))
        places = np.empty(len(codes), np.int64)
        places[order] = np.arange(len(codes)) - np.repeat(self.offsets[:-1], np.diff(self.offsets))
        rare = (places >= most) & ~is_rest
        keys = pc.if_else(pa.array(rare), pa.scalar(rest, self.keys.type), self.keys)
        groups = len(self.offsets) - 1
        limited = Tallies.summed(codes, groups, keys, self.amounts)
        return limited, int(counts[rare].sum())

    @property
    def rows(self) -> Longs:
        """The group of each entry."""
        groups = np.arange(len(self.offsets) - 1, dtype=np.int64)
        return np.repeat(groups, np.diff(self.offsets))

    def merged(self, groups: Groups) -> Tallies:
        """One tally for each group of groups."""
        return Tallies.summed(groups.codes[self.rows], len(groups), self.keys, self.amounts)


@dataclass(frozen=True)
class Runs:
    """Entries sorted by group and key: runs of equal ones, whose amounts can be added up."""

    order: Longs
    """The order that sorts the entries."""
    bounds: Longs
    """Where each run starts, and where the last one ends."""
    codes: Longs
    """The group of each run."""
    keys: Longs
    """The key of each run."""

    @classmethod
    def of(cls, codes: Longs, groups: int, keys: Longs) -> Runs:
        """Sort entries; ``codes`` is the group of each."""
        if not len(keys):
            return cls(codes, np.zeros(1, np.int64), codes, keys)
        low = int(keys.min())
        bits = (int(keys.max()) - low).bit_length()
        if groups << bits >= _PACKED_LIMIT:
            order = np.lexsort((keys, codes))
            codes, keys = codes[order], keys[order]
            changes = (codes[1:] != codes[:-1]) | (keys[1:] != keys[:-1])
            bounds = _bounds(changes)
            return cls(order, bounds, codes[bounds[:-1]], keys[bounds[:-1]])
        # Both in one number, which is sorted several times as fast as two.
        packed = (codes << bits) | (keys - low)
        order = sorted_order(packed, groups << bits)
        packed = packed[order]
        bounds = _bounds(packed[1:] != packed[:-1])
        packed = packed[bounds[:-1]]
        return cls(order, bounds, packed >> bits, (packed & (1 << bits) - 1) + low)

    def coarsened(self, by: int, last: int | None) -> Runs:
        """Runs of wider buckets; entries beyond bucket 0 or ``last`` go into those two."""
        if (by == 1 and last is None) or not len(self.keys):
            return self
        keys = truncated(self.keys, by) if by > 1 else self.keys
        if last is not None:
            keys = np.clip(keys, 0, last)
        # The order of the entries stays.
        runs = _bounds((self.codes[1:] != self.codes[:-1]) | (keys[1:] != keys[:-1]))
        starts = runs[:-1]
        return Runs(self.order, self.bounds[runs], self.codes[starts], keys[starts])

    def sums(self, amount: Longs) -> Longs:
        """The sum of each run; ``amount`` is that of each entry."""
        if not len(self.codes):
            return self.codes
        return np.add.reduceat(amount[self.order], self.bounds[:-1])

    def counts(self, before: Numbers | None) -> Longs:
        """How many entries of each run count; ``before`` is from :meth:`before`, None: all."""
        ends = self.bounds if before is None else before[self.bounds].astype(np.int64)
        return np.diff(ends)

    def before(self, counts: Mask) -> Numbers:
        """How many of the sorted entries before each place count."""
        before = np.zeros(len(self.order) + 1, np.int32)  # several times as fast as with 64 bits
        np.cumsum(counts[self.order], out=before[1:])
        return before


def sorted_order(numbers: Longs, size: int) -> Longs:
    """The order that sorts numbers below ``size``.

    By 16 bits at a time, which NumPy sorts by radix: several times as fast as all bits at once.
    """
    order = np.argsort(numbers.astype(np.uint16), kind="stable")
    for shift in range(16, (size - 1).bit_length(), 16):
        digits = (numbers >> shift).astype(np.uint16)
        order = order[np.argsort(digits[order], kind="stable")]
    return order


def _bounds(changes: Mask) -> Longs:
    """Where runs start, and the last one's end, from where values differ from the one before."""
    return np.concatenate(([0], np.flatnonzero(changes) + 1, [len(changes) + 1]))
