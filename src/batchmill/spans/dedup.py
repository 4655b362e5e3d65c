"""Deduplication: a span that is delivered twice counts once.

A sender that did not receive our answer sends again. So the ids of spans that counted are kept: an
index of tables with the columns of :data:`ID_SCHEMA`, sorted by them. An id is a pair of hashes of
64 bits (:mod:`.ids`) of the trace id and the span id, made with two seeds: 128 bits, of which two
spans with different ids share all with a probability of 3e-39. Among a hundred million ids in the
index are 5e15 pairs; the chance that any of them would be taken for one span is below 2e-23.

A span whose id is in the index does not count again. Of several in one batch, one counts: the first
in the order of all columns, which depends neither on files nor on partitions. A span that lacks the
trace id or the span id is never a duplicate.

Nearly every batch has no duplicates at all. So one half of the ids is looked up first, and all else
is done only for spans whose half occurs again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from batchmill.spans.ids import Hashes, combine, hash64
from batchmill.spans.texts import Longs, Mask

ID_SCHEMA = pa.schema([("high", pa.uint64()), ("low", pa.uint64())])
_HIGH_SEED, _LOW_SEED = 0, 1


def ids_of(spans: pa.Table) -> pa.Table:
    """The ids of spans that have both a trace id and a span id, sorted."""
    spans = _with_ids(spans)
    return _sorted(_half(spans, _HIGH_SEED), _half(spans, _LOW_SEED))


def merge_ids(tables: Sequence[pa.Table]) -> pa.Table:
    """One sorted table of several."""
    merged = pa.concat_tables([ID_SCHEMA.empty_table(), *tables])
    return _sorted(merged["high"].to_numpy(), merged["low"].to_numpy())


def drop_duplicates(spans: pa.Table, known: Sequence[pa.Table]) -> tuple[pa.Table, int]:
    """The spans that count, and how many do not; ``known`` are the tables of the index."""
    ids = _with_ids(spans)
    highs = _half(ids, _HIGH_SEED)
    suspects = _suspects(np.sort(highs), known)
    if not len(suspects):
        return spans, 0
    places = np.flatnonzero(_among(highs, suspects))
    rows = np.flatnonzero(_has_ids(spans))[places]
    counts = np.ones(len(spans), np.bool_)
    counts[rows] = False
    counts[_first_ones(spans, rows, highs[places], known)] = True
    return spans.filter(pa.array(counts)), int(len(spans) - counts.sum())


def _has_ids(spans: pa.Table) -> Mask:
    valid = pc.and_(spans["trace_id"].is_valid(), spans["span_id"].is_valid())
    return valid.to_numpy()  # type: ignore[no-any-return]


def _with_ids(spans: pa.Table) -> pa.Table:
    """The two ids of spans that have both."""
    ids = spans.select(["trace_id", "span_id"])
    if ids["trace_id"].null_count or ids["span_id"].null_count:
        return ids.filter(pa.array(_has_ids(spans)))
    return ids


def _half(ids: pa.Table, seed: int) -> Hashes:
    return combine(hash64(ids["trace_id"], seed), hash64(ids["span_id"], seed))


def _sorted(highs: Hashes, lows: Hashes) -> pa.Table:
    order = np.argsort(highs)
    highs, lows = highs[order], lows[order]
    if (highs[1:] == highs[:-1]).any():
        order = np.lexsort((lows, highs))
        highs, lows = highs[order], lows[order]
    return pa.table([highs, lows], schema=ID_SCHEMA)


def _suspects(highs: Hashes, known: Sequence[pa.Table]) -> Hashes:
    """Which of these halves, sorted, occur more than once or in the index."""
    again = np.zeros(len(highs), np.bool_)
    again[1:] = highs[1:] == highs[:-1]
    for table in known:
        again |= _among(highs, table["high"].to_numpy())
    return highs[again]


def _among(numbers: Hashes, ordered: Hashes) -> Mask:
    """Which numbers are among others, which are sorted."""
    if not len(ordered):
        return np.zeros(len(numbers), np.bool_)
    places = np.searchsorted(ordered, numbers)
    np.minimum(places, len(ordered) - 1, out=places)
    return ordered[places] == numbers  # type: ignore[no-any-return]


def _first_ones(spans: pa.Table, rows: Longs, highs: Hashes, known: Sequence[pa.Table]) -> Longs:
    """Which of these rows count: not in the index, and the first of those with one id."""
    lows = _half(spans.select(["trace_id", "span_id"]).take(pa.array(rows)), _LOW_SEED)
    order = np.lexsort((lows, highs))
    rows, highs, lows = rows[order], highs[order], lows[order]
    new = ~_known(highs, lows, known)
    rows, highs, lows = rows[new], highs[new], lows[new]
    if not len(rows):
        return rows
    starts = np.ones(len(rows), np.bool_)
    starts[1:] = (highs[1:] != highs[:-1]) | (lows[1:] != lows[:-1])
    return _least(spans, rows, np.cumsum(starts) - 1)


def _known(highs: Hashes, lows: Hashes, known: Sequence[pa.Table]) -> Mask:
    """Which ids are in the index."""
    result = np.zeros(len(highs), np.bool_)
    for table in known:
        their_highs, their_lows = table["high"].to_numpy(), table["low"].to_numpy()
        rows = np.arange(len(highs))
        places = np.searchsorted(their_highs, highs)
        # Nearly always one step: several ids of the index rarely have one half in common.
        while len(rows):
            here = places < len(their_highs)
            rows, places = rows[here], places[here]
            here = their_highs[places] == highs[rows]
            rows, places = rows[here], places[here]
            same = their_lows[places] == lows[rows]
            result[rows[same]] = True
            rows, places = rows[~same], places[~same] + 1
    return result


def _least(spans: pa.Table, rows: Longs, groups: Longs) -> Longs:
    """The first row of each group in the order of all columns; ``groups`` count up from 0.

    Column by column, those that are not the least of their group are left out.
    """
    size = int(groups[-1]) + 1
    for column in spans.columns:
        if len(rows) == size:
            break
        if column.null_count == len(column):
            continue
        values = column.take(pa.array(rows))
        if pa.types.is_dictionary(values.type):
            values = values.cast(values.type.value_type)
        differing = np.zeros(size, np.bool_)
        differing[groups[_unequal(values, _starts(groups)[groups])]] = True
        places = np.flatnonzero(differing[groups])
        if len(places):
            ranks = _ranks(values.take(pa.array(places)))
            inside = groups[places]
            least = np.zeros(size, np.int64)
            starts = _starts(inside)
            least[inside[starts]] = np.minimum.reduceat(ranks, starts)
            kept = np.ones(len(rows), np.bool_)
            kept[places] = ranks == least[inside]
            rows, groups = rows[kept], groups[kept]
    return rows[_starts(groups)]


def _starts(groups: Longs) -> Longs:
    """Where each group starts."""
    return np.flatnonzero(np.diff(groups, prepend=-1))


def _unequal(values: pa.ChunkedArray, others: Longs) -> Mask:
    """Which values are not equal to those at other places; null is equal to null."""
    if pa.types.is_nested(values.type):
        hashes = np.concatenate([_nested_hashes(chunk) for chunk in values.chunks])
        return hashes != hashes[others]  # type: ignore[no-any-return]
    theirs = values.take(pa.array(others))
    unequal = pc.not_equal(values, theirs)
    if values.null_count:
        unequal = unequal.fill_null(False)
        unequal = pc.or_(unequal, pc.xor(values.is_null(), theirs.is_null()))
    return unequal.to_numpy()  # type: ignore[no-any-return]


def _ranks(values: pa.ChunkedArray) -> Longs:
    """Numbers that sort as the values do, null first; texts sort by their bytes."""
    if pa.types.is_nested(values.type):
        keys = [_sort_key(value) for value in values.to_pylist()]
        numbers = {key: number for number, key in enumerate(sorted(set(keys)))}
        return np.array([numbers[key] for key in keys], np.int64)
    ranks = pc.rank(values, "ascending", tiebreaker="dense").to_numpy().astype(np.int64)
    if values.null_count:
        ranks[values.is_null().to_numpy()] = 0
    return ranks  # type: ignore[no-any-return]


def _nested_hashes(values: pa.Array) -> Hashes:
    """A hash of each list or map, in which the order of its entries counts."""
    if pa.types.is_map(values.type):
        entry = pa.struct([("key", values.type.key_type), ("value", values.type.item_type)])
        values = values.cast(pa.list_(entry))
    sizes = pc.list_value_length(values)
    counts = sizes.fill_null(0).to_numpy().astype(np.int64)
    nulls = sizes.is_null().to_numpy(zero_copy_only=False)
    entries = pc.list_flatten(values)
    if pa.types.is_struct(entries.type):
        hashes = combine(*(hash64(column) for column in entries.flatten()))
    else:
        hashes = hash64(entries)
    ends = np.cumsum(counts)
    places = np.arange(len(hashes)) - np.repeat(ends - counts, counts)
    sums = np.concatenate(
        (np.zeros(1, np.uint64), np.cumsum(combine(hashes, places.astype(np.uint64))))
    )
    result: Hashes = combine(sums[ends] - sums[ends - counts], (counts - nulls).astype(np.uint64))
    return result


def _sort_key(value: list[Any] | None) -> tuple[Any, ...]:
    """Null first, then by element; the entries of a map are sorted."""
    if value is None:
        return ()
    pairs = [entry if isinstance(entry, tuple) else (entry,) for entry in value]
    keys = [tuple((text is not None, (text or "").encode()) for text in pair) for pair in pairs]
    if value and isinstance(value[0], tuple):
        keys.sort()
    return (tuple(keys),)
