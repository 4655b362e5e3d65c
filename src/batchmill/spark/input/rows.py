"""Reads the rows of a segment, and sorts out the invalid ones.

The catalog's types are kept where a file has them; some others are converted because common writers
produce them: wider and narrower whole numbers, dictionaries, timestamps in other units. A file with
a column that cannot be converted is refused whole. NumPy and Arrow, no Spark.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from itertools import chain
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from batchmill import spool
from batchmill.aggregate import TIMESTAMP, Reasons, is_readable, row_checks, timestamps
from batchmill.sources import TIME_COLUMN, Entity, Field, FieldType, SourceType
from batchmill.spool import ATTRIBUTE_COLUMNS, FOREIGN, RESOURCE_COLUMNS, SPAN_SOURCE

Mask: TypeAlias = npt.NDArray[np.bool_]

REASON = "_reason"
"""The column of a quarantined row that says why."""
END_COLUMN = "end_time"
_SPAN_TYPES = {
    "id": FieldType("string"),
    "text": FieldType("string"),
    "map": FieldType("map", item=FieldType("string")),
}
KEYS: Mapping[str, tuple[str, str]] = {
    **{name: ("resource", key) for key, name in RESOURCE_COLUMNS.items()},
    **{name: ("attributes", key) for key, name in ATTRIBUTE_COLUMNS.items()},
}
"""The columns of well-known attributes: the map and the key where files without them have them."""
SPAN = SourceType(
    SPAN_SOURCE,
    {
        **{
            column.name: Field(column.name, _SPAN_TYPES[column.kind], required=column.required)
            for column in spool.SPAN_SCHEMA
            if column.kind != "time"
        },
        **{name: Field(name, _SPAN_TYPES["text"]) for name in KEYS},
    },
    Entity("service", {"service": "service", "layer": "=normal"}),
)
"""A span's columns, beside ``time`` and ``end_time``, and those of its well-known attributes. Not
an event type: rows of several are derived from it."""

_ENCODED = pa.dictionary(pa.int32(), pa.string())
_ENCODED_MAP = pa.map_(_ENCODED, _ENCODED)
_IDS = frozenset(column.name for column in spool.SPAN_SCHEMA if column.kind == "id")
_MAPS = frozenset(column.name for column in spool.SPAN_SCHEMA if column.kind == "map")


class ColumnTypeError(Exception):
    """A column has a type that cannot be read as the catalog's."""


@dataclass(frozen=True)
class CheckedRows:
    """The rows of a segment or a frame, sorted out."""

    rows: pa.Table
    """The valid rows: ``time``, for spans ``end_time``, and the needed columns of the catalog, in
    its order and its types, null where the input has none. Texts are dictionaries, which may have a
    text twice; of a span, all but the ids are, also those in maps."""
    invalid: pa.Table | None
    """The invalid rows with ``_reason`` and every column of the catalog that the input has, unless
    it is of a wrong type; None: there are none. Numbers too large for an int stay as they are."""


def check_schema(source: SourceType, needed: Collection[str], schema: pa.Schema) -> None:
    """Raise :class:`ColumnTypeError` unless the ``needed`` columns can be read."""
    for name in _times(source):
        kind = _type(schema, name)
        if kind is not None and not pa.types.is_timestamp(kind):
            raise ColumnTypeError(f"column {name}: {kind}, where {TIMESTAMP} is expected")
    for field in _fields(source, needed):
        kind = _type(schema, field.column)
        if kind is not None and not is_readable(field, kind):
            raise ColumnTypeError(f"column {field.column}: {kind}, where {field.type} is expected")


def check_rows(
    source: SourceType, needed: Collection[str], table: pa.Table, latest_us: int
) -> CheckedRows:
    """Check rows in memory; ``latest_us`` is the latest valid start, in microseconds since 1970."""
    check_schema(source, needed, table.schema)
    rows, reasons = _sort_out(source, needed, table, latest_us)
    if not reasons:
        return CheckedRows(rows, None)
    return CheckedRows(rows, _set_aside(source, table.filter(pa.array(~reasons.valid)), reasons))


def with_other_columns(
    checked: CheckedRows, source: SourceType, table: pa.Table, latest_us: int
) -> pa.Table:
    """The valid rows with all columns of ``table`` that the catalog has, not only the needed ones.

    What is wrong in a column that is not needed makes no row invalid: all of it is null then.
    """
    needed = checked.rows.column_names
    _, reasons = _sort_out(source, needed, table, latest_us)
    others = table.filter(pa.array(reasons.valid)) if reasons else table
    rows = checked.rows
    for field in _readable(source, table.schema):
        if field.column not in needed:
            with contextlib.suppress(pa.ArrowInvalid):  # such as a number too large for an int
                array = _converted(_column(others, field.column), field.type.arrow_type())
                rows = rows.append_column(field.column, array)
    return rows


def check_spans(table: pa.Table, latest_us: int) -> CheckedRows:
    """Check spans in memory."""
    return check_rows(SPAN, SPAN.fields, table, latest_us)


def open_segment(file: pa.NativeFile, source: SourceType) -> pq.ParquetFile:
    """Open a file so that texts that repeat are read as the dictionaries they are stored as.

    A request of a few KiB may have a text of 4 KiB in each of a thousand spans.
    """
    footer = pq.ParquetFile(file)
    schema = footer.schema_arrow
    coded = {name for name in schema.names if _has_texts(schema, source, name)}
    leaves = (footer.metadata.schema.column(at).path for at in range(footer.metadata.num_columns))
    repeating = [path for path in leaves if path.split(".")[0] in coded]
    return pq.ParquetFile(
        file,
        metadata=footer.metadata,
        read_dictionary=repeating,
        coerce_int96_timestamp_unit="us",  # in nanoseconds, moments far off would overflow
    )


def read_rows(
    file: pq.ParquetFile, source: SourceType, needed: Collection[str], latest_us: int
) -> CheckedRows:
    """Read the ``needed`` columns of a file, best opened by :func:`open_segment`, and check them.

    Raises :class:`ColumnTypeError`, or pyarrow's error if the file is corrupt.
    """
    check_schema(source, needed, file.schema_arrow)
    return _read(file, source, needed, latest_us)


def read_spans(file: pq.ParquetFile, latest_us: int, *, maps: bool) -> CheckedRows:
    """Read spans and check them; without ``maps``, of all attributes only the well-known ones.

    Raises what :func:`read_rows` raises.
    """
    check_schema(SPAN, SPAN.fields, file.schema_arrow)
    return _read(file, SPAN, SPAN.fields if maps else SPAN.fields.keys() - _MAPS, latest_us)


def _read(
    file: pq.ParquetFile, source: SourceType, needed: Collection[str], latest_us: int
) -> CheckedRows:
    schema = file.schema_arrow
    first = [*_times(source), FOREIGN] if _is_span(source) else _times(source)
    fields = (field.column for field in _fields(source, needed))
    table = _read_columns(file, (*first, *fields, *_lookups(source, schema)))
    rows, reasons = _sort_out(source, needed, table, latest_us)
    if not reasons:
        return CheckedRows(rows, None)
    readable = (field.column for field in _readable(source, schema))
    invalid = _read_where(file, [*first, *readable], ~reasons.valid)
    return CheckedRows(rows, _set_aside(source, invalid, reasons))


def _read_columns(file: pq.ParquetFile, names: Iterable[str]) -> pa.Table:
    """Those of the columns that a file has; what is null in every row need not be read."""
    schema, metadata = file.schema_arrow, file.metadata
    present = [name for name in dict.fromkeys(names) if schema.get_field_index(name) >= 0]
    paths = {metadata.schema.column(number).path: number for number in range(metadata.num_columns)}
    groups = [metadata.row_group(number) for number in range(metadata.num_row_groups)]
    empty = {
        name
        for name in present
        if name in paths and all(_is_empty(group.column(paths[name])) for group in groups)
    }
    wanted = [name for name in present if name not in empty]
    if len(groups) > 1 and wanted:
        # Of maps with dictionaries, Arrow cannot read several groups at once.
        numbers = range(len(groups))
        table = pa.concat_tables(
            file.read_row_group(number, wanted, use_threads=False) for number in numbers
        )
    else:
        table = file.read(wanted, use_threads=False)
    for name in empty:
        field = schema.field(name)
        table = table.append_column(field, pa.nulls(metadata.num_rows, field.type))
    return table


def _is_empty(chunk: Any) -> bool:
    """Whether a column is null in every row of a group, by what its writer says."""
    if not chunk.is_stats_set or not chunk.statistics.has_null_count:
        return False
    return bool(chunk.statistics.null_count == chunk.num_values)


def _read_where(file: pq.ParquetFile, names: list[str], wanted: Mask) -> pa.Table:
    """Some rows of a file."""
    tables, start = [], 0
    for number in range(file.num_row_groups):
        part = wanted[start : start + file.metadata.row_group(number).num_rows]
        start += len(part)
        if part.any():
            group = file.read_row_group(number, names, use_threads=False)
            tables.append(group.filter(pa.array(part)))
    return pa.concat_tables(tables)


def _sort_out(
    source: SourceType, needed: Collection[str], table: pa.Table, latest_us: int
) -> tuple[pa.Table, Reasons]:
    """The valid rows, and why the others are invalid."""
    fields = _fields(source, needed)
    lookups = _lookups(source, table.schema)
    columns = {
        name: array
        for name in (*(field.column for field in fields), *lookups)
        if (array := _column(table, name)) is not None
    }
    times = {name: _moments(table, name) for name in _times(source)}
    checks = row_checks(source, fields, columns, times, latest_us)
    if _is_span(source) and (foreign := _column(table, FOREIGN)) is not None:
        is_foreign = pc.is_valid(foreign).to_numpy(zero_copy_only=False)
        checks = chain([("not a message of spans", is_foreign)], checks)
    reasons = Reasons.of(checks, table.num_rows)
    if reasons:
        kept = pa.array(reasons.valid)
        times = {name: time.filter(kept) for name, time in times.items()}
        columns = {name: array.filter(kept) for name, array in columns.items()}
    for name, keys in lookups.items():
        columns |= _look_up(columns[name], keys)
    nulls = functools.cache(functools.partial(pa.nulls, len(times[TIME_COLUMN])))
    converted = {}
    for field in fields:
        kind = _kind(source, field)
        array = columns.get(field.column)
        # Most columns of a span are entirely null: all of them share one array.
        is_null = array is None or array.null_count == len(array)
        converted[field.column] = nulls(kind) if is_null else _converted(array, kind)
    return pa.table(times | converted), reasons


def _set_aside(source: SourceType, table: pa.Table, reasons: Reasons) -> pa.Table:
    """Invalid rows for the quarantine."""
    columns = {
        name: _moments(table, name)
        for name in _times(source)
        if _type(table.schema, name) is not None
    }
    if _is_span(source) and (foreign := _column(table, FOREIGN)) is not None:
        columns[FOREIGN] = foreign
    for field in _readable(source, table.schema):
        array, kind = _column(table, field.column), _kind(source, field)
        try:
            columns[field.column] = _converted(array, kind)
        except pa.ArrowInvalid:  # too large for an int
            columns[field.column] = _converted(array, pa.int64())
    return pa.table({**columns, REASON: reasons.invalid})


def _look_up(maps: pa.Array, keys: Mapping[str, str]) -> dict[str, pa.Array]:
    """The values of some keys, by the column that each is for; of equal keys the first counts."""
    bounds = np.asarray(maps.offsets)
    entries = slice(bounds[0], bounds[-1])
    encoded = _converted(maps.keys[entries], _ENCODED)
    values = maps.items[entries]
    rows = np.repeat(np.arange(len(maps)), np.diff(bounds))
    codes, known = encoded.indices.to_numpy(), encoded.dictionary.to_pylist()
    columns = {}
    for name, key in keys.items():
        if key not in known:
            continue
        # Of several assignments the last one stays: in reverse, that of the first entry.
        places = np.flatnonzero(codes == known.index(key))[::-1]
        chosen = np.full(len(maps), -1)
        chosen[rows[places]] = places
        # Arrow may keep entries under a null.
        absent = (chosen < 0) | maps.is_null().to_numpy(zero_copy_only=False)
        columns[name] = values.take(pa.array(chosen, mask=absent))
    return columns


def _converted(array: pa.Array, kind: pa.DataType) -> pa.Array:
    """A column in a type of the catalog, its texts in valid UTF-8."""
    if kind == _ENCODED_MAP:
        # A copy of the offsets: they may be a part of others.
        offsets, is_null = pa.array(np.array(array.offsets)), array.is_null()
        keys, items = (_converted(texts, _ENCODED) for texts in (array.keys, array.items))
        return pa.MapArray.from_arrays(offsets, keys, items, mask=is_null)
    if kind == _ENCODED:
        if not pa.types.is_dictionary(array.type):
            array = array.dictionary_encode()
        if array.type != kind:
            indices, texts = (
                pc.cast(array.indices, pa.int32()),
                pc.cast(array.dictionary, pa.string()),
            )
            array = pa.DictionaryArray.from_arrays(indices, texts)
    elif array.type != kind:
        array = pc.cast(array, kind)
    if pa.types.is_primitive(kind):
        return array
    try:
        (array.dictionary if kind == _ENCODED else array).validate(full=True)
    except pa.ArrowInvalid:
        return _repaired(array)
    return array


def _repaired(array: pa.Array) -> pa.Array:
    """Texts with U+FFFD in place of what is no UTF-8."""
    if pa.types.is_dictionary(array.type):
        return pa.DictionaryArray.from_arrays(array.indices, _repaired(array.dictionary))
    raw = pc.cast(array, _as_bytes(array.type))
    raw.validate(full=True)
    return pa.array(_decoded(raw.to_pylist()), array.type)


def _as_bytes(kind: pa.DataType) -> pa.DataType:
    """A type with bytes in place of texts."""
    if pa.types.is_struct(kind):
        return pa.struct([(member.name, _as_bytes(member.type)) for member in kind])
    if pa.types.is_list(kind):
        return pa.list_(_as_bytes(kind.value_type))
    if pa.types.is_map(kind):
        return pa.map_(_as_bytes(kind.key_type), _as_bytes(kind.item_type))
    return pa.binary() if pa.types.is_string(kind) else kind


def _decoded(value: Any) -> Any:
    match value:
        case bytes():
            return value.decode("utf-8", "replace")
        case list():
            return [_decoded(item) for item in value]
        case tuple():
            return tuple(_decoded(item) for item in value)
        case dict():
            return {name: _decoded(member) for name, member in value.items()}
    return value


def _is_span(source: SourceType) -> bool:
    return source.name == SPAN_SOURCE


def _times(source: SourceType) -> tuple[str, ...]:
    """The moments that every row must have."""
    return (TIME_COLUMN, END_COLUMN) if _is_span(source) else (TIME_COLUMN,)


def _fields(source: SourceType, needed: Collection[str]) -> list[Field]:
    return [field for field in source.fields.values() if field.column in needed]


def _readable(source: SourceType, schema: pa.Schema) -> list[Field]:
    """The fields for which there is a column that can be read."""
    return [
        field
        for field in source.fields.values()
        if (kind := _type(schema, field.column)) is not None and is_readable(field, kind)
    ]


def _kind(source: SourceType, field: Field) -> pa.DataType:
    """The type that a column gets."""
    if field.column not in _encoded(source):
        return field.type.arrow_type()
    return _ENCODED_MAP if field.type.kind == "map" else _ENCODED


def _has_texts(schema: pa.Schema, source: SourceType, name: str) -> bool:
    """Whether a column becomes dictionaries, and has nothing but texts."""
    if name not in _encoded(source):
        return False
    is_map = source.fields[name].type.kind == "map"
    kind, texts = schema.field(name).type, (pa.string(), pa.large_string())
    if not is_map:
        return kind in texts
    return pa.types.is_map(kind) and kind.key_type in texts and kind.item_type in texts


@functools.cache
def _encoded(source: SourceType) -> frozenset[str]:
    """The columns that become dictionaries."""
    if _is_span(source):
        return frozenset(SPAN.fields) - _IDS
    fields = source.fields.values()
    return frozenset(field.column for field in fields if field.type.arrow_type() == pa.string())


def _lookups(source: SourceType, schema: pa.Schema) -> dict[str, dict[str, str]]:
    """By map, the columns that are absent but for which it may have a value, with their keys."""
    lookups: dict[str, dict[str, str]] = {}
    if _is_span(source):
        for name, (column, key) in KEYS.items():
            if _type(schema, name) is None and _type(schema, column) is not None:
                lookups.setdefault(column, {})[name] = key
    return lookups


def _type(schema: pa.Schema, name: str) -> pa.DataType | None:
    """The type of a column; None: there is none, or it has no type, since all of it is null."""
    index = schema.get_field_index(name)
    kind = None if index < 0 else schema.field(index).type
    return None if kind is None or pa.types.is_null(kind) else kind


def _column(table: pa.Table, name: str) -> pa.Array | None:
    """A column in one piece, not as a dictionary unless of texts; None: there is none."""
    kind = _type(table.schema, name)
    if kind is None:
        return None
    chunks = table[name]
    array = chunks.chunk(0) if chunks.num_chunks == 1 else chunks.combine_chunks()
    if pa.types.is_dictionary(kind) and (
        pa.types.is_primitive(kind.value_type) or array.dictionary.null_count
    ):
        return array.dictionary_decode()
    return array


def _moments(table: pa.Table, name: str) -> pa.Array:
    array = _column(table, name)
    return pa.nulls(table.num_rows, TIMESTAMP) if array is None else timestamps(array)
