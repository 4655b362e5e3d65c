"""Turns segments and kept files into tables of kept spans: sorted by trace id, each span once."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from batchmill.spool import ATTRIBUTE_COLUMNS, KEPT_COLUMNS, SEGMENT_COLUMNS
from batchmill.traces.layout import HOUR_US, MAP_PATHS, MAPS, REPEATING, SCHEMA

ROW_GROUP = 20_000
"""Few enough that reading one of them takes some milliseconds."""
_TEXTS = ("service", "name", "kind", "status")
_IDS = ("trace_id", "span_id", "parent_span_id")
_CODED = pa.dictionary(pa.int32(), pa.string())
_CODED_MAP = pa.map_(_CODED, _CODED)

Longs: TypeAlias = npt.NDArray[np.int64]


def read_kept(path: Path) -> pa.Table:
    """The spans of a kept file, with texts that repeat as dictionaries."""
    file = pq.ParquetFile(path, read_dictionary=list(REPEATING))
    return file.read(use_threads=False)


def read_segment(path: Path) -> tuple[pa.Table, int]:
    """The spans of a segment as kept ones, and how many rows of it are no valid spans."""
    with pq.ParquetFile(path) as footer:
        schema = footer.schema_arrow
        texts = [*_TEXTS, "service_instance_id", *SEGMENT_COLUMNS.values()]
        coded = [name for name in texts if _is_text(schema, name)]
        file = pq.ParquetFile(path, read_dictionary=[*coded, *MAP_PATHS], metadata=footer.metadata)
        wanted = ["time", "end_time", *_IDS, *_TEXTS, *MAPS, *texts]
        present = [name for name in dict.fromkeys(wanted) if schema.get_field_index(name) >= 0]
        table = file.read(present, use_threads=False).combine_chunks()
    return _as_kept(table)


def _is_text(schema: pa.Schema, name: str) -> bool:
    index = schema.get_field_index(name)
    return index >= 0 and schema.field(index).type in (pa.string(), pa.large_string())


def _as_kept(table: pa.Table) -> tuple[pa.Table, int]:
    rows = table.num_rows
    required = ("trace_id", "span_id", "time", "end_time")
    if any(name not in table.column_names for name in required):
        return SCHEMA.empty_table(), rows
    valid = np.ones(rows, np.bool_)
    for name in required:
        if table[name].null_count:
            valid &= table[name].is_valid().to_numpy()
    if not valid.all():
        table = table.filter(pa.array(valid)).combine_chunks()
    columns: dict[str, pa.Array] = {name: _one(table, name, pa.string()) for name in _IDS}
    time, end = (_one(table, name, pa.timestamp("us", "UTC")) for name in ("time", "end_time"))
    columns["time"] = time
    took = np.maximum(end.cast(pa.int64()).to_numpy() - time.cast(pa.int64()).to_numpy(), 0)
    columns["duration_us"] = pa.array(took)
    for name in _TEXTS:
        columns[name] = _one(table, name, _CODED)
    columns["instance"] = _one(table, "service_instance_id", _CODED)
    for name in KEPT_COLUMNS.values():
        columns[name] = _one(table, name, _CODED)
    columns["resource"] = _one(table, "resource", _CODED_MAP)
    columns["attributes"] = merged_attributes(table)
    return pa.table([columns[name] for name in SCHEMA.names], SCHEMA.names), int(
        rows - np.count_nonzero(valid)
    )


def _one(table: pa.Table, name: str, kind: pa.DataType) -> pa.Array:
    """A column in one piece; nulls if the table has none."""
    if name not in table.column_names:
        return pa.nulls(table.num_rows, kind)
    column = table[name].combine_chunks()
    if isinstance(column, pa.ChunkedArray):
        column = pa.concat_arrays(column.chunks) if column.num_chunks else pa.nulls(0, column.type)
    return column if column.type == kind else column.cast(kind)


def merged_attributes(table: pa.Table) -> pa.Array:
    """All attributes of spans as one map: those with a column of their own, and the others."""
    rows = table.num_rows
    rest = _one(table, "attributes", _CODED_MAP)
    own = {
        key: array
        for key, name in ATTRIBUTE_COLUMNS.items()
        if name in table.column_names and table[name].null_count < rows
        for array in [_one(table, name, _CODED)]
    }
    if not own:
        return rest
    offsets = rest.offsets.to_numpy().astype(np.int64)
    sizes = np.diff(offsets)
    if rest.null_count:
        sizes = np.where(rest.is_valid().to_numpy(zero_copy_only=False), sizes, 0)
    present = {key: array.is_valid().to_numpy(zero_copy_only=False) for key, array in own.items()}
    filled = sum((mask.astype(np.int64) for mask in present.values()), np.zeros(rows, np.int64))
    ends = np.cumsum(filled + sizes)
    starts = ends - filled - sizes
    total = int(ends[-1]) if rows else 0
    keys, values = np.empty(total, np.int32), np.empty(total, np.int32)
    key_texts, value_texts = _Dictionary(), _Dictionary()
    place = starts.copy()
    for key, array in own.items():
        mask = present[key]
        at = place[mask]
        keys[at] = key_texts.add(pa.array([key], pa.string()))
        codes = array.indices.fill_null(0).to_numpy()[mask]
        values[at] = codes + value_texts.add(array.dictionary)
        place[mask] += 1
    if sizes.any():
        inner = np.arange(int(sizes.sum())) - np.repeat(np.cumsum(sizes) - sizes, sizes)
        at = np.repeat(place, sizes) + inner
        source = np.repeat(offsets[:-1], sizes) + inner
        keys[at] = _codes(rest.keys)[source] + key_texts.add(rest.keys.dictionary)
        codes = _codes(rest.items)[source]
        values[at] = np.where(codes < 0, -1, codes + value_texts.add(rest.items.dictionary))
    return pa.MapArray.from_arrays(
        pa.array(np.append(starts, total).astype(np.int32)),
        pa.DictionaryArray.from_arrays(pa.array(keys), key_texts.texts()),
        pa.DictionaryArray.from_arrays(pa.array(values, mask=values < 0), value_texts.texts()),
    )


class _Dictionary:
    """Texts of several dictionaries, one after the other."""

    def __init__(self) -> None:
        self._parts: list[pa.Array] = [pa.array([], pa.string())]
        self._length = 0

    def add(self, texts: pa.Array) -> int:
        """Add texts; the number of the first one."""
        first = self._length
        self._parts.append(texts.cast(pa.string()))
        self._length += len(texts)
        return first

    def texts(self) -> pa.Array:
        return pa.concat_arrays(self._parts)


def _codes(coded: pa.DictionaryArray) -> npt.NDArray[np.int32]:
    codes: npt.NDArray[np.int32] = coded.indices.fill_null(-1).to_numpy()
    return codes


def sorted_once(tables: Sequence[pa.Table]) -> tuple[pa.Table, int]:
    """All spans sorted by trace and span id, each once; how many were there before."""
    table = pa.concat_tables(tables, promote_options="permissive")
    table = table.unify_dictionaries().combine_chunks()
    traces, spans = _numbers(table["trace_id"], 32), _numbers(table["span_id"], 16)
    if traces is None or spans is None:
        order = pc.sort_indices(
            table.select(["trace_id", "span_id"]),
            [("trace_id", "ascending"), ("span_id", "ascending")],
        ).to_numpy()
        ids = [table[name].take(pa.array(order)).to_numpy() for name in ("trace_id", "span_id")]
    else:
        order = np.lexsort((spans, traces[:, 1], traces[:, 0]))
        ids = [traces[order, 0], traces[order, 1], spans[order]]
    if len(order):
        again = np.logical_and.reduce([np.append(False, part[1:] == part[:-1]) for part in ids])
        order = order[~again]
    return table.take(pa.array(order)), table.num_rows - len(order)


def trace_number(trace_id: str) -> int:
    """The first half of a trace id as a number, in the order of the texts."""
    return int.from_bytes(bytes.fromhex(trace_id)[:8], "big")


def trace_numbers(ids: pa.Array | pa.ChunkedArray) -> npt.NDArray[np.uint64] | None:
    """The same of many ids; None if some of them are not 32 hex digits."""
    numbers = _numbers(ids, 32)
    return None if numbers is None else numbers[:, 0]


_DIGITS = np.full(256, 255, np.uint8)
for _place, _digit in enumerate(b"0123456789abcdef"):
    _DIGITS[_digit] = _place


def _numbers(ids: pa.Array | pa.ChunkedArray, length: int) -> Any:
    """Hex digits as 64-bit numbers, in the order of the texts; None if they are something else."""
    if isinstance(ids, pa.ChunkedArray):
        ids = ids.combine_chunks()
        if isinstance(ids, pa.ChunkedArray):
            ids = pa.concat_arrays(ids.chunks) if ids.num_chunks else pa.array([], pa.string())
    if pa.types.is_dictionary(ids.type):
        ids = ids.cast(pa.string())
    if ids.null_count or ids.type != pa.string():
        return None
    _, offsets_buffer, data = ids.buffers()
    if not len(ids):
        return np.empty((0, length // 16) if length > 16 else 0, np.uint64)
    offsets = np.frombuffer(offsets_buffer, np.int32, len(ids) + 1, ids.offset * 4)
    if not (np.diff(offsets) == length).all():
        return None
    texts = np.frombuffer(data, np.uint8)[offsets[0] : offsets[-1]]
    digits = _DIGITS[texts]
    if (digits == 255).any():
        return None
    pairs = (digits[0::2] << 4) | digits[1::2]
    numbers = pairs.reshape(-1, 8).view(">u8").astype(np.uint64)
    return numbers.reshape(len(ids), -1) if length > 16 else numbers.reshape(-1)


def _with_used_texts(table: pa.Table) -> pa.Table:
    """Rows without texts that none of them has: Parquet would write all of a dictionary."""
    return pa.table(
        [_with_used(column.combine_chunks()) for column in table.columns], table.column_names
    )


def _with_used(array: Any) -> pa.Array:
    if isinstance(array, pa.ChunkedArray):
        array = pa.concat_arrays(array.chunks)
    if pa.types.is_map(array.type):
        first, last = array.offsets[0].as_py(), array.offsets[-1].as_py()
        return pa.MapArray.from_arrays(
            pc.subtract(array.offsets, pa.scalar(first, pa.int32())),
            _with_used(array.keys[first:last]),
            _with_used(array.items[first:last]),
            mask=array.is_null() if array.null_count else None,
        )
    if not pa.types.is_dictionary(array.type) or 4 * len(array.dictionary) < len(array):
        return array
    codes = array.indices.fill_null(-1).to_numpy()
    used = np.unique(codes[codes >= 0])
    places = np.full(len(array.dictionary) + 1, -1, np.int32)
    places[used] = np.arange(len(used), dtype=np.int32)
    codes = places[codes]
    return pa.DictionaryArray.from_arrays(
        pa.array(codes, mask=codes < 0), array.dictionary.take(pa.array(used))
    )


def by_hour(table: pa.Table) -> Iterator[tuple[int, pa.Table]]:
    """The rows of each hour, in their order; the hour in microseconds since 1970."""
    hours: Longs = table["time"].cast(pa.int64()).to_numpy() // HOUR_US
    for hour in np.unique(hours).tolist():
        mine = hours == hour
        yield hour * HOUR_US, table if mine.all() else table.filter(pa.array(mine))


def write_kept(table: pa.Table, path: Path, metadata: Mapping[str, str]) -> None:
    """Write spans that are sorted by trace id to a file."""
    with pq.ParquetWriter(
        path,
        table.schema.remove_metadata(),
        compression="zstd",
        compression_level=1,
        use_dictionary=["trace_id", *REPEATING],
        write_statistics=["trace_id", "time", "duration_us"],
        store_schema=False,
    ) as writer:
        for first in range(0, table.num_rows, ROW_GROUP):
            writer.write_table(_with_used_texts(table.slice(first, ROW_GROUP)))
        writer.add_key_value_metadata(dict(metadata))
