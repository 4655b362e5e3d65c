"""Columns of states with NumPy: rows are grouped, numbers merged by group, keys counted by group.

Whole numbers stay whole numbers: nothing passes through a float.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa

Numbers: TypeAlias = npt.NDArray[Any]
Longs: TypeAlias = npt.NDArray[np.int64]
Mask: TypeAlias = npt.NDArray[np.bool_]

REDUCE: Mapping[str, Any] = {"sum": np.add, "max": np.maximum, "min": np.minimum}
"""The function that merges a column, by how it merges."""
_PACKED_BITS = 62
_PACKED_LIMIT = 1 << _PACKED_BITS
_DENSE = 8
"""Up to this many possible groups a row, a table of all possible groups is the quickest."""


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
    for numbers, more in columns[1:]:
        if size * more >= _PACKED_LIMIT:
            codes = np.unique(codes, return_inverse=True)[1]
            size = int(codes.max(initial=-1)) + 1
        codes, size = codes * more + numbers, size * more
    rows = len(codes)
    if size > max(_DENSE * rows, 1024):
        _, firsts, codes = np.unique(codes, return_index=True, return_inverse=True)
        return Groups(codes, firsts)
    place = np.full(size, -1, np.int64)
    # The last assignment stays, so in reverse the first row of each group.
    place[codes[::-1]] = np.arange(rows - 1, -1, -1)
    present = place >= 0
    return Groups((np.cumsum(present, dtype=np.int64) - 1)[codes], place[present])


def numbered_starts(starts: Longs) -> tuple[Longs, int]:
    """Starts of buckets as numbers from 0, in their order."""
    if not len(starts):
        return starts, 1
    earliest = int(starts.min())
    return starts - earliest, int(starts.max()) - earliest + 1


def numbered(array: pa.Array) -> tuple[Longs, int]:
    """Texts as numbers from 0: equal texts have one number, null has one, too."""
    encoded = array.dictionary_encode(null_encoding="encode")
    indices = encoded.indices.to_numpy(zero_copy_only=False).astype(np.int64)
    return indices, len(encoded.dictionary)


@dataclass(frozen=True)
class Column:
    """One number of each group, and how it merges."""

    how: str
    values: Numbers
    """The neutral element where there is no value."""
    valid: Mask | None
    """Where there is a value; None: everywhere."""

    @classmethod
    def reduced(
        cls, how: str, values: Numbers, valid: Mask | None, codes: Longs, groups: int
    ) -> Column:
        """Reduce values to one for each group; ``valid`` says which of them count."""
        if valid is not None:
            values, codes = values[valid], codes[valid]
        if values.dtype.kind == "i":
            values = values.astype(np.int64, copy=False)
        merged = np.full(groups, identity(values.dtype, how))
        REDUCE[how].at(merged, codes, values)
        if valid is None:
            return cls(how, merged, None)
        present = np.zeros(groups, np.bool_)
        present[codes] = True
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

    def tolist(self) -> list[Any]:
        """The values as Python's numbers; None where there is none."""
        values: list[Any] = self.values.tolist()
        if self.valid is not None:
            for place in np.flatnonzero(~self.valid).tolist():
                values[place] = None
        return values


Keys: TypeAlias = Longs | pa.Array
"""The keys of tallies: whole numbers, or texts."""


@dataclass(frozen=True)
class Tallies:
    """One tally of each group: keys in order, each once, with its amounts."""

    offsets: Longs
    """Where the entries of each group start, and where the last one's end."""
    keys: Keys
    amounts: tuple[Longs, ...]
    """The count of rows; or the upper and lower half of a sum, then the count of what it sums."""

    @classmethod
    def counted(
        cls, codes: Longs, groups: int, keys: Keys, amounts: tuple[Longs, ...] | None = None
    ) -> Tallies:
        """Count entries by group and key; ``codes`` is the group of each entry.

        Without ``amounts`` every entry counts 1.
        """
        texts: pa.Array | None = None
        numbers = keys
        if isinstance(keys, pa.Array):
            encoded = keys.dictionary_encode()
            numbers = encoded.indices.to_numpy(zero_copy_only=False).astype(np.int64)
            texts = encoded.dictionary
        codes, numbers, sums = _count_equal(codes, np.asarray(numbers), amounts)
        offsets = np.zeros(groups + 1, np.int64)
        np.cumsum(np.bincount(codes, minlength=groups), out=offsets[1:])
        return cls(offsets, numbers if texts is None else texts.take(pa.array(numbers)), sums)

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

    @property
    def rows(self) -> Longs:
        """The group of each entry."""
        groups = np.arange(len(self.offsets) - 1, dtype=np.int64)
        return np.repeat(groups, np.diff(self.offsets))

    def merged(self, groups: Groups) -> Tallies:
        """One tally for each group of groups."""
        return Tallies.counted(groups.codes[self.rows], len(groups), self.keys, self.amounts)

    def coarsened(self, by: int, last: int | None) -> Tallies:
        """The same with wider buckets, and with all beyond the first and ``last`` in those."""
        assert isinstance(self.keys, np.ndarray)
        keys = self.keys
        if by > 1:
            # Rounded toward zero, also the least of all numbers, which has no opposite.
            keys = keys // by + ((keys < 0) & (keys % by != 0))
        if last is not None:
            keys = np.clip(keys, 0, last)
        if keys is self.keys:
            return self
        return Tallies.counted(self.rows, len(self.offsets) - 1, keys, self.amounts)


def _count_equal(
    codes: Longs, keys: Longs, amounts: tuple[Longs, ...] | None
) -> tuple[Longs, Longs, tuple[Longs, ...]]:
    """Entries sorted by group and key, each pair once, with the sums of its amounts."""
    entries = len(keys)
    if not entries:
        return codes, keys, amounts or (codes,)
    low = int(keys.min())
    key_bits = (int(keys.max()) - low).bit_length()
    bits = int(codes.max()).bit_length() + key_bits
    if bits < _PACKED_BITS:
        # Both in one number.
        packed = (codes << key_bits) + (keys - low)
        order = _order(packed, bits)
        packed = packed[order]
        starts = _run_starts(packed[1:] != packed[:-1])
        packed = packed[starts]
        codes, keys = packed >> key_bits, (packed & (1 << key_bits) - 1) + low
    else:
        order = np.lexsort((keys, codes))
        codes, keys = codes[order], keys[order]
        starts = _run_starts((codes[1:] != codes[:-1]) | (keys[1:] != keys[:-1]))
        codes, keys = codes[starts], keys[starts]
    if amounts is None:
        return codes, keys, (np.diff(starts, append=entries),)
    return codes, keys, tuple(np.add.reduceat(amount[order], starts) for amount in amounts)


def _order(numbers: Longs, bits: int) -> Longs:
    """The order that sorts whole numbers of so many bits, none of them negative.

    By 16 bits at a time: such numbers NumPy sorts by radix, several times as fast as longer ones.
    """
    order = np.argsort(numbers.astype(np.uint16), kind="stable")
    for shift in range(16, bits, 16):
        digits = (numbers >> shift).astype(np.uint16)
        order = order[np.argsort(digits[order], kind="stable")]
    return order


def _run_starts(changes: Mask) -> Longs:
    return np.concatenate(([0], np.flatnonzero(changes) + 1))
