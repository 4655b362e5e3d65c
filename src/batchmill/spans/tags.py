"""Puts the attributes of spans together: those with a column of their own, and the others."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from batchmill.spans.texts import Longs, Mask, Texts, at, one_array
from batchmill.spool import ATTRIBUTE_COLUMNS

_LIST = pa.list_(pa.string())
_MAP = pa.map_(pa.string(), pa.string())


@dataclass(frozen=True, slots=True)
class _Entries:
    """Attributes: of which span, and with which key and value."""

    rows: Longs
    keys: Texts
    values: pa.Array


def tag_columns(
    spans: pa.Table, chosen: Mask, keys: Collection[str] | None
) -> tuple[pa.Array, pa.Array]:
    """The attributes of the chosen spans, as sorted texts ``key:value`` and as a map.

    With ``keys`` those with these keys only: null if a span has none of them, else a key that it
    does not have is in both, with a null. Without ``keys`` all attributes.
    """
    if keys is None:
        return _columns(chosen, list(_all_entries(spans, chosen)))
    values = {key: _values(spans, key) for key in sorted(keys)}
    present = np.zeros(len(chosen), np.bool_)
    for texts in values.values():
        if not texts.is_empty:
            present |= texts.present
    present &= chosen
    rows = np.flatnonzero(present)
    entries = [
        _Entries(rows, _repeated(key, rows), texts.take(rows).strings())
        for key, texts in values.items()
        if len(rows)
    ]
    return _columns(present, entries)


def _values(spans: pa.Table, key: str) -> Texts:
    """The attribute with a key, of each span."""
    if key in ATTRIBUTE_COLUMNS:
        return Texts.of(spans[ATTRIBUTE_COLUMNS[key]])
    maps = one_array(spans["attributes"])
    if maps.null_count == len(maps):
        return Texts.none(len(maps))
    # Most spans lack a key that has no column, so looking at all entries at once is the quickest.
    places = np.flatnonzero(Texts.of(maps.keys).one_of(key))
    rows, firsts = np.unique(_rows(maps, places), return_index=True)
    values = maps.items.take(pa.array(places[firsts]))
    outside = np.searchsorted(rows, 0)
    return Texts.of(values[outside:]).spread(rows[outside:], len(maps))


def _rows(maps: pa.Array, places: Longs) -> Longs:
    """The row of each of these entries, in the order of rows; -1 if it belongs to none."""
    offsets = maps.offsets.to_numpy()
    rows = np.searchsorted(offsets, places, side="right") - 1
    rows[places >= offsets[-1]] = -1
    if maps.null_count:
        rows[~maps.is_valid().to_numpy(zero_copy_only=False)[rows]] = -1
    return rows


def _all_entries(spans: pa.Table, chosen: Mask) -> Iterator[_Entries]:
    maps = one_array(spans["attributes"])
    if maps.null_count < len(maps):
        rows = _rows(maps, np.arange(len(maps.keys)))
        keys = Texts.of(maps.keys)
        # A segment of an older version has attributes with a column in the map as well.
        kept = at(chosen, rows, False) & ~keys.one_of(*ATTRIBUTE_COLUMNS)
        places = np.flatnonzero(kept)
        values = maps.items.take(pa.array(places)).cast(pa.string())
        yield _Entries(rows[places], keys.take(places), values)
    for key, name in ATTRIBUTE_COLUMNS.items():
        texts = Texts.of(spans[name])
        if not texts.is_empty:
            rows = np.flatnonzero(texts.present & chosen)
            yield _Entries(rows, _repeated(key, rows), texts.take(rows).strings())


def _repeated(key: str, rows: Longs) -> Texts:
    return Texts.chosen(np.zeros(len(rows)), key)


def _columns(present: Mask, entries: Sequence[_Entries]) -> tuple[pa.Array, pa.Array]:
    """Both columns, from the entries of the rows that are present; the others are null."""
    if not present.any():
        return pa.nulls(len(present), _LIST), pa.nulls(len(present), _MAP)
    keys = sorted({key for part in entries for key in part.keys.values.to_pylist()})
    ranks = {key: rank for rank, key in enumerate(keys)}
    rows, codes, values = [np.zeros(0, np.int64)], [np.zeros(0, np.int64)], []
    for part in entries:
        of_part = np.array([ranks[key] for key in part.keys.values.to_pylist()], np.int64)
        rows.append(part.rows)
        codes.append(of_part[part.keys.codes] if len(of_part) else part.rows)
        values.append(part.values)
    row, code = np.concatenate(rows), np.concatenate(codes)
    order = np.lexsort((code, row))
    row, code = row[order], code[order]
    # Of a key that a map has twice, the last value counts.
    last = np.append((row[1:] != row[:-1]) | (code[1:] != code[:-1]), True)[: len(row)]
    row, code, order = row[last], code[last], order[last]
    offsets = np.zeros(len(present) + 1, np.int32)
    np.cumsum(np.bincount(row, minlength=len(present)), out=offsets[1:])
    of_keys = pa.array(keys, pa.string()).take(pa.array(code))
    of_values = pa.concat_arrays([*values, pa.array([], pa.string())]).take(pa.array(order))
    texts = pc.binary_join_element_wise(of_keys, of_values.fill_null(""), ":")
    mask = pa.array(~present)
    return (
        pa.ListArray.from_arrays(pa.array(offsets), texts, mask=mask),
        pa.MapArray.from_arrays(pa.array(offsets), of_keys, of_values, mask=mask),
    )
