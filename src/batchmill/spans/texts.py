"""Columns of texts as codes: most texts of spans repeat, so each distinct one is looked at once."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

Codes: TypeAlias = npt.NDArray[np.int32]
Longs: TypeAlias = npt.NDArray[np.int64]
Mask: TypeAlias = npt.NDArray[np.bool_]

TEXT = pa.dictionary(pa.int32(), pa.string())
"""The Arrow type of a column of texts."""

WHITESPACE = (
    "\t\n\x0b\x0c\r\x1c\x1d\x1e\x1f \x85\xa0\u1680\u2000\u2001\u2002\u2003\u2004\u2005"
    "\u2006\u2007\u2008\u2009\u200a\u2028\u2029\u202f\u205f\u3000"
)
"""The characters that ``str.strip()`` removes: a text of nothing else is blank."""

_FEW = 64
"""So many distinct texts do no harm if no row has them."""


@dataclass(frozen=True, slots=True)
class Texts:
    """A text, or none, of each row."""

    codes: Codes
    """The place of each row's text in ``values``; -1 where there is none."""
    values: pa.Array
    """The texts, each once, and no null. None at all: no row has a text."""

    @classmethod
    def of(cls, column: pa.Array | pa.ChunkedArray) -> Texts:
        """A column of strings, or of a dictionary of strings."""
        rows = len(column)
        if column.null_count == rows:
            return cls.none(rows)
        column = one_array(column)
        if not pa.types.is_dictionary(column.type):
            column = column.dictionary_encode()
        indices = column.indices
        if indices.type != pa.int32():
            indices = indices.cast(pa.int32())
        if indices.null_count:
            indices = indices.fill_null(-1)
        texts = cls(indices.to_numpy(), column.dictionary.cast(pa.string()))
        if len(texts.values) > rows:  # of other rows as well
            texts = texts.used()
        return cls.distinct(texts.codes, texts.values)

    @classmethod
    def none(cls, rows: int) -> Texts:
        """No text of any row."""
        return cls(np.broadcast_to(np.int32(-1), rows), pa.array([], pa.string()))

    @classmethod
    def chosen(cls, codes: npt.NDArray[Any], *values: str) -> Texts:
        """Of each row one of several texts that are known; -1: none."""
        return cls(codes.astype(np.int32, copy=False), pa.array(values, pa.string()))

    @classmethod
    def distinct(cls, codes: Codes, values: pa.Array) -> Texts:
        """From texts of which some may be null or equal."""
        encoded = values.dictionary_encode()
        if len(encoded.dictionary) == len(values):
            return cls(codes, values)
        places = encoded.indices.fill_null(-1).to_numpy()
        return cls(at(places, codes, -1), encoded.dictionary)

    def __len__(self) -> int:
        return len(self.codes)

    @property
    def is_empty(self) -> bool:
        """Whether no row has a text, as far as is known without looking at all rows."""
        return len(self.values) == 0

    @property
    def is_complete(self) -> bool:
        """Whether every row has a text."""
        return bool(self.codes.min(initial=0) >= 0)

    @property
    def present(self) -> Mask:
        """Which rows have a text."""
        return self.codes >= 0

    def take(self, rows: Longs) -> Texts:
        """The texts of some rows."""
        if self.is_empty:
            return Texts.none(len(rows))
        return Texts(self.codes[rows], self.values).used()

    def where(self, mask: Mask) -> Texts:
        """The texts of rows where the mask is true; the other rows have none."""
        if self.is_empty or not mask.any():
            return Texts.none(len(self))
        return Texts(np.where(mask, self.codes, np.int32(-1)), self.values).used()

    def or_else(self, other: Texts) -> Texts:
        """The texts of another column where a row of this one has none."""
        if self.is_empty or other.is_empty:
            return other if self.is_empty else self
        missing = np.flatnonzero(self.codes < 0)
        more = other.codes[missing]
        codes = self.codes.copy()
        codes[missing] = np.where(more < 0, more, more + len(self.values))
        return Texts.distinct(codes, pa.concat_arrays([self.values, other.values])).used()

    def filled(self) -> Texts:
        """The texts that are not blank."""
        blank = _blank(self.values)
        if blank is None:
            return self
        return self.replaced(pc.if_else(pa.array(blank), None, self.values))

    def replaced(self, values: pa.Array) -> Texts:
        """Other texts, or nulls, in place of ``values``."""
        return Texts.distinct(self.codes, values)

    def meet(self, test: Callable[[pa.Array], pa.Array]) -> Mask:
        """Which rows have a text for which a test of distinct texts is true."""
        if self.is_empty:
            return np.zeros(len(self), np.bool_)
        return self.where_met(test(self.values))

    def where_met(self, met: pa.Array) -> Mask:
        """Which rows have a text for which ``met``, of distinct texts, is true."""
        return at(met.fill_null(False).to_numpy(zero_copy_only=False), self.codes, False)

    def one_of(self, *texts: str) -> Mask:
        """Which rows have one of these texts."""
        return self.meet(lambda values: pc.is_in(values, pa.array(texts, values.type)))

    def numbers(self, values: pa.Array) -> pa.Array:
        """The number of each row's text; ``values`` are those of the distinct texts, or null."""
        if values.null_count == len(values):
            return pa.nulls(len(self), values.type)
        if not values.null_count and self.is_complete:
            return pa.array(values.to_numpy()[self.codes])
        valid = at(values.is_valid().to_numpy(zero_copy_only=False), self.codes, False)
        return masked(at(values.fill_null(0).to_numpy(), self.codes, 0), valid)

    def spread(self, rows: Longs, count: int) -> Texts:
        """The texts of ``count`` rows, of which these are at the places ``rows``."""
        if self.is_empty or len(rows) == count:
            return self if len(rows) == count else Texts.none(count)
        codes = np.full(count, -1, np.int32)
        codes[rows] = self.codes
        return Texts(codes, self.values)

    def array(self) -> pa.Array:
        """As a column of type :data:`TEXT`."""
        if self.is_empty:
            return pa.nulls(len(self), TEXT)
        indices = self.codes
        validity, nulls = None, 0
        if not self.is_complete:
            valid = self.present
            nulls = len(self) - int(np.count_nonzero(valid))
            validity = pa.py_buffer(np.packbits(valid, bitorder="little"))
            # Some of Arrow's functions read the index of a null as well.
            indices = np.maximum(self.codes, 0)
        data = pa.py_buffer(np.ascontiguousarray(indices))
        return pa.DictionaryArray.from_buffers(
            TEXT, len(self), [validity, data], self.values, null_count=nulls
        )

    def strings(self) -> pa.Array:
        """As a column of strings."""
        return self.array().cast(pa.string())

    def used(self) -> Texts:
        """The same without those of ``values`` that no row has, if these are worth the search."""
        if len(self.values) <= _FEW:
            return self
        used = np.zeros(len(self.values) + 1, np.bool_)
        used[self.codes] = True
        used = used[:-1]
        if used.all():
            return self
        places = np.cumsum(used, dtype=np.int32) - np.int32(1)
        return Texts(at(places, self.codes, -1), self.values.filter(pa.array(used)))


def first(columns: Iterable[Texts], rows: int) -> Texts:
    """Of each row the text of the first column that has one.

    Columns are looked at only as long as rows lack a text, so an iterator can make them then.
    """
    chosen = Texts.none(rows)
    for column in columns:
        chosen = chosen.or_else(column)
        if chosen.is_complete:
            break
    return chosen


def one_array(column: pa.Array | pa.ChunkedArray) -> pa.Array:
    """A column in one piece."""
    if isinstance(column, pa.ChunkedArray):
        column = column.chunk(0) if column.num_chunks == 1 else column.combine_chunks()
    return column


def at(values: npt.NDArray[Any], codes: npt.NDArray[Any], otherwise: Any) -> npt.NDArray[Any]:
    """The values at places; ``otherwise`` where the place is -1."""
    # The last one is at place -1.
    chosen: npt.NDArray[Any] = np.append(values, np.asarray(otherwise, values.dtype))[codes]
    return chosen


def masked(values: npt.NDArray[Any], valid: Mask) -> pa.Array:
    """Numbers as a column, null where they are not valid."""
    if valid.all():
        return pa.array(values)
    return pa.array(values, mask=~valid)


def _blank(values: pa.Array) -> Mask | None:
    """Which texts have nothing but white space; None: no one."""
    if not len(values):
        return None
    # Nearly all begin with a visible character of ASCII.
    _, offsets, data = values.buffers()
    starts = np.frombuffer(offsets, np.int32)[values.offset : values.offset + len(values) + 1]
    texts = np.frombuffer(data, np.uint8) if data is not None else np.zeros(0, np.uint8)
    heads = np.zeros(len(values), np.uint8)
    has_text = starts[1:] > starts[:-1]
    heads[has_text] = texts[starts[:-1][has_text]]
    doubtful = np.flatnonzero((heads < 0x21) | (heads >= 0x7F))
    if not len(doubtful):
        return None
    # Trimming one end is enough, and it stops at the first character that stays.
    trimmed = pc.utf8_ltrim(values.take(pa.array(doubtful)), characters=WHITESPACE)
    blank = np.zeros(len(values), np.bool_)
    blank[doubtful] = pc.equal(trimmed, "").to_numpy(zero_copy_only=False)
    return blank if blank.any() else None
