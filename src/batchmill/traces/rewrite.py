"""Turns segments and kept files into tables of kept spans: sorted by trace id, each span once."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator, Sequence
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
_ROWS_AT_ONCE = 100_000
"""So many rows of segments are turned into kept spans at a time."""
SERVICES = b"batchmill.services"
"""Metadata of a file: JSON with the names and kinds of spans by service."""
KEYS = b"batchmill.keys"
"""Metadata of a file: JSON with the keys in its maps, by column; null if there are very many."""
_MOST_NAMES = 1000
"""How many names of spans a file lists for a service."""
_MOST_KEYS = 1000
_END_US = 253_402_300_800_000_000
"""The year 10000: no calendar has an hour from then on."""
_TEXTS = ("service", "name", "kind", "status")
_IDS = ("trace_id", "span_id", "parent_span_id")
_REQUIRED = ("trace_id", "span_id", "time", "end_time")
_CODED = pa.dictionary(pa.int32(), pa.string())
_CODED_MAP = pa.map_(_CODED, _CODED)

Longs: TypeAlias = npt.NDArray[np.int64]


def read_kept(path: Path) -> pa.Table:
    """The spans of a kept file, with texts that repeat as dictionaries."""
    with pq.ParquetFile(path, read_dictionary=list(REPEATING)) as file:
        return _all_rows(file, SCHEMA.names)


def read_segment(path: Path) -> tuple[pa.Table, int]:
    """The spans of a segment as kept ones, and how many rows of it are no valid spans."""
    return _as_kept(_with_one_dictionary(_read_columns(path)))


def read_segments(paths: Sequence[Path]) -> tuple[list[pa.Table], int]:
    """The kept spans of several segments; small ones share a table, which costs more than them."""
    tables, dropped = list[pa.Table](), 0
    waiting, rows = list[pa.Table](), 0
    for place, path in enumerate(paths, start=1):
        waiting.append(_read_columns(path))
        rows += waiting[-1].num_rows
        if rows < _ROWS_AT_ONCE and place < len(paths):
            continue
        try:
            waiting = [pa.concat_tables(waiting, promote_options="permissive")]
        except (pa.ArrowInvalid, pa.ArrowTypeError, pa.ArrowNotImplementedError):
            pass  # not all of them are ours
        for table in waiting:
            spans, invalid = _as_kept(_with_one_dictionary(table))
            tables.append(spans)
            dropped += invalid
        waiting, rows = [], 0
    return tables, dropped


def _with_one_dictionary(table: pa.Table) -> pa.Table:
    return table.unify_dictionaries().combine_chunks()


def _read_columns(path: Path) -> pa.Table:
    """The columns of a segment from which kept spans are made."""
    with pq.ParquetFile(path) as footer:
        schema = footer.schema_arrow
        texts = [*_TEXTS, "service_instance_id", *SEGMENT_COLUMNS.values()]
        coded = [name for name in texts if _is_text(schema, name)]
        file = pq.ParquetFile(path, read_dictionary=[*coded, *MAP_PATHS], metadata=footer.metadata)
        optional = _IDS[-1], *_TEXTS, *MAPS, *texts
        empty = _empty_columns(footer.metadata).intersection(optional)
        present = [
            name
            for name in dict.fromkeys((*_REQUIRED, *optional))
            if schema.get_field_index(name) >= 0 and name not in empty
        ]
        return _all_rows(file, present)


def _empty_columns(metadata: pq.FileMetaData) -> set[str]:
    """The columns that are null in every row, by what their writer says; most of a segment are."""
    empty = {metadata.schema.column(number).path for number in range(metadata.num_columns)}
    for number in range(metadata.num_row_groups):
        group = metadata.row_group(number)
        for place in range(metadata.num_columns):
            column = group.column(place)
            known = column.statistics
            if known is None or not known.has_null_count or known.null_count != column.num_values:
                empty.discard(column.path_in_schema)
    return empty


def _all_rows(file: pq.ParquetFile, columns: Sequence[str]) -> pa.Table:
    # Of maps with dictionaries, Arrow cannot read several groups at once.
    groups = [
        file.read_row_group(number, list(columns), use_threads=False)
        for number in range(file.num_row_groups)
    ]
    return pa.concat_tables(groups) if groups else file.read(list(columns), use_threads=False)


def _is_text(schema: pa.Schema, name: str) -> bool:
    index = schema.get_field_index(name)
    return index >= 0 and schema.field(index).type in (pa.string(), pa.large_string())


def _as_kept(table: pa.Table) -> tuple[pa.Table, int]:
    rows = table.num_rows
    if any(name not in table.column_names for name in _REQUIRED):
        return SCHEMA.empty_table(), rows
    valid = np.ones(rows, np.bool_)
    for name in _REQUIRED:
        if table[name].null_count:
            valid &= table[name].is_valid().to_numpy()
    times = table["time"].cast(pa.timestamp("us", "UTC")).cast(pa.int64()).fill_null(0).to_numpy()
    valid &= (times >= 0) & (times < _END_US)
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
        inner = np.arange(int(sizes.sum()))
        before = np.cumsum(sizes) - sizes
        at = np.repeat(place - before, sizes) + inner
        source: Any = slice(offsets[0], offsets[-1])
        if rest.null_count:
            source = np.repeat(offsets[:-1] - before, sizes) + inner
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
        order = _order(traces, spans)
        ids = [traces[order, 0], traces[order, 1], spans[order]]
    if len(order):
        again = np.logical_and.reduce([np.append(False, part[1:] == part[:-1]) for part in ids])
        order = order[~again]
    batches = table.to_batches()
    rows = batches[0] if len(batches) == 1 else table  # a table has its columns taken twice
    whole = rows.take(pa.array(order))
    whole = whole if rows is table else pa.Table.from_batches([whole])
    return whole, table.num_rows - len(order)


def _order(traces: Any, spans: Any) -> Any:
    """The order by trace and span id: two sorts of single numbers take half as long as one of
    three columns."""
    by_trace = np.argsort(traces[:, 0])
    first = traces[by_trace, 0]
    ranks = np.empty(len(spans), np.uint64)
    ranks[by_trace] = np.cumsum(np.append(False, first[1:] != first[:-1])[: len(spans)])
    bits = max(1, int(ranks.max(initial=0)).bit_length())
    order = np.argsort(ranks << np.uint64(64 - bits) | spans >> np.uint64(bits))
    one, two, three = traces[order, 0], traces[order, 1], spans[order]
    later = (two[1:] > two[:-1]) | ((two[1:] == two[:-1]) & (three[1:] >= three[:-1]))
    if ((one[1:] > one[:-1]) | later).all():
        return order
    return np.lexsort((spans, traces[:, 1], traces[:, 0]))


def trace_number(trace_id: str) -> int:
    """The first half of a trace id as a number, in the order of the texts."""
    return int.from_bytes(bytes.fromhex(trace_id)[:8], "big")


def trace_numbers(ids: pa.Array | pa.ChunkedArray) -> npt.NDArray[np.uint64] | None:
    """The first halves of many trace ids; None if some of them are not 32 hex digits."""
    numbers = _numbers(ids, 32)
    return None if numbers is None else numbers[:, 0]


_NO_DIGITS = 256
_PAIRS = np.full(2**16, _NO_DIGITS, np.uint16)
"""By two characters, as a number of this machine: the byte that they are as hex digits."""
for _number in range(256):
    _PAIRS[np.frombuffer(b"%02x" % _number, np.uint16)] = _number


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
    pairs = _PAIRS[texts.view(np.uint16)]
    if (pairs == _NO_DIGITS).any():
        return None
    numbers = pairs.astype(np.uint8).reshape(-1, 8).view(">u8").astype(np.uint64)
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


def within(table: pa.Table, oldest_us: float, latest_us: float) -> tuple[pa.Table, int, int]:
    """The rows that began in these hours; how many are too old, and how many too new."""
    hours: Longs = table["time"].cast(pa.int64()).to_numpy() // HOUR_US * HOUR_US
    too_old, too_new = hours + HOUR_US <= oldest_us, hours > latest_us
    counts = int(np.count_nonzero(too_old)), int(np.count_nonzero(too_new))
    return table.filter(pa.array(~(too_old | too_new))) if any(counts) else table, *counts


def by_hour(table: pa.Table) -> Iterator[tuple[int, pa.Table]]:
    """The rows of each hour, in their order; the hour in microseconds since 1970."""
    hours: Longs = table["time"].cast(pa.int64()).to_numpy() // HOUR_US
    for hour in np.unique(hours).tolist():
        mine = hours == hour
        yield hour * HOUR_US, table if mine.all() else table.filter(pa.array(mine))


def write_kept(table: pa.Table, path: Path) -> None:
    """Write spans that are sorted by trace id to a file."""
    keys = {name: _keys(table[name]) for name in MAPS}
    notes = {SERVICES: json.dumps(_services(table)), KEYS: json.dumps(keys)}
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
        writer.add_key_value_metadata({name.decode(): text for name, text in notes.items()})


def _services(spans: pa.Table) -> dict[str, list[list[str | None]]]:
    """The names and kinds of spans by service."""
    pairs = spans.select(["service", "name", "kind"])
    pairs = pa.table({name: pairs[name].cast(pa.string()) for name in pairs.column_names})
    names: dict[str, list[list[str | None]]] = defaultdict(list)
    for row in pairs.group_by(["service", "name", "kind"]).aggregate([]).to_pylist():
        own = names[row["service"] or ""]
        if len(own) < _MOST_NAMES:
            own.append([row["name"], row["kind"]])
    return names


def _keys(maps: pa.ChunkedArray) -> list[str] | None:
    """The keys in a column of maps; None: too many to name."""
    keys: set[str] = set()
    for chunk in maps.chunks:
        keys.update(pc.unique(chunk.keys).to_pylist())
    return sorted(keys) if len(keys) <= _MOST_KEYS else None
