"""Converts batches to Arrow tables, and tables to the bytes of Parquet files."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import pyarrow as pa
import pyarrow.parquet as pq

from batchmill.sources import TIME_COLUMN, FieldType, SourceType
from batchmill.spool.sink import BadRowsError
from batchmill.spool.span import (
    KEPT_COLUMNS,
    RESOURCE_COLUMNS,
    SEGMENT_COLUMNS,
    SPAN_SCHEMA,
    SPAN_SOURCE,
    EventBatch,
    PackedSpans,
    SpanBatch,
)

Convert: TypeAlias = Callable[[Sequence[Any]], pa.Table]

_TYPES = {
    "time": pa.timestamp("us", tz="UTC"),
    "id": pa.string(),
    "text": pa.string(),
    "map": pa.map_(pa.string(), pa.string()),
}
ARROW_SCHEMA = pa.schema(
    [
        *((column.name, _TYPES[column.kind]) for column in SPAN_SCHEMA),
        *((name, pa.string()) for name in RESOURCE_COLUMNS.values()),
        *((name, pa.string()) for name in SEGMENT_COLUMNS.values()),
    ]
)
"""The schema of a segment of spans: after the columns of a span, those of its well-known
attributes. The column ``attributes`` has the other ones."""

_UNIQUE = frozenset(column.name for column in SPAN_SCHEMA if column.kind in ("time", "id"))
"""Columns whose values hardly repeat: a dictionary of them would only cost."""
_MISFIT = (pa.ArrowException, ValueError, TypeError, OverflowError)
"""What Arrow raises about values that do not fit a column."""


@dataclass(frozen=True, slots=True)
class SegmentTable:
    """The batches of one segment, as far as they could be converted."""

    table: pa.Table | None
    """All rows that fit; None if there are none."""
    errors: dict[int, BadRowsError] = field(default_factory=dict)
    """What is wrong with the batches that do not fit, by their place in the sequence."""


def table_of(source: str, batches: Sequence[Any], convert: Convert) -> SegmentTable:
    """Convert batches to one table.

    They are converted together, which is quick. Only where that fails is each converted alone, so
    that no batch fails because of another.
    """
    try:
        return SegmentTable(convert(batches))
    except MemoryError:  # Arrow's own is also one of its other errors; it says nothing of the rows
        raise
    except _MISFIT:
        pass
    tables, errors = [], {}
    for number, batch in enumerate(batches):
        try:
            tables.append(convert([batch]))
        except MemoryError:
            raise
        except _MISFIT as error:
            errors[number] = _bad_rows(source, error)
    if not tables:
        return SegmentTable(None, errors)
    return SegmentTable(pa.concat_tables(tables).unify_dictionaries(), errors)


def _bad_rows(source: str, error: Exception) -> BadRowsError:
    detail = str(error).splitlines()[0] if str(error) else type(error).__name__
    return BadRowsError(source, detail)


def span_table(batch: SpanBatch) -> pa.Table:
    """Spans as a table."""
    resources, numbers = _distinct(batch.columns["resource"])
    columns = {"resource": _maps(resources).take(numbers), **_columns(batch)}
    return pa.table([columns[name] for name in ARROW_SCHEMA.names], schema=ARROW_SCHEMA)


def _columns(batch: SpanBatch) -> dict[str, pa.Array]:
    """The columns of a segment, but for the resource."""
    columns = {
        column.name: pa.array(batch.columns[column.name], _TYPES[column.kind])
        for column in SPAN_SCHEMA
        if column.kind != "map"
    }
    columns |= _resource_columns(batch.columns["resource"])
    columns |= _attribute_columns(batch.columns["attributes"])
    return columns


def _packed(name: str, column: pa.Array) -> pa.Array:
    """A column with each text once: texts, and those in maps, have dictionaries."""
    if name in _UNIQUE:
        return column
    if not pa.types.is_map(column.type):
        return column.dictionary_encode()
    keys, items = column.keys.dictionary_encode(), column.items.dictionary_encode()
    return pa.MapArray.from_arrays(column.offsets, keys, items)


def _nulls(name: str, rows: int) -> pa.Array:
    """A column without values, of the type that `_packed` gives it."""
    return _packed(name, pa.nulls(rows, ARROW_SCHEMA.field(name).type))


def _resource_columns(resources: Sequence[dict[str, str]]) -> dict[str, pa.Array]:
    """The well-known attributes of resources; null where a resource has none."""
    return {
        name: pa.array([resource.get(key) for resource in resources], pa.string())
        for key, name in RESOURCE_COLUMNS.items()
    }


def _attribute_columns(dicts: Sequence[dict[str, str]]) -> dict[str, pa.Array]:
    """Each well-known attribute of spans, null where a span has none, and the others as maps."""
    columns: dict[str, list[str | None]] = {}
    sizes, keys, texts = [0], [], []
    for place, attributes in enumerate(dicts):
        for key, text in dict.items(attributes):
            name = SEGMENT_COLUMNS.get(key)
            if name is None:
                keys.append(key)
                texts.append(text)
                continue
            if name not in columns:
                columns[name] = [None] * len(dicts)
            columns[name][place] = text
        sizes.append(len(keys))
    arrays = {
        name: pa.array(columns[name], pa.string())
        if name in columns
        else pa.nulls(len(dicts), pa.string())
        for name in SEGMENT_COLUMNS.values()
    }
    rest = pa.MapArray.from_arrays(
        pa.array(sizes, pa.int32()), pa.array(keys, pa.string()), pa.array(texts, pa.string())
    )
    return arrays | {"attributes": rest}


class SpanTable:
    """A SpanBatch that waits for its segment, as columns already.

    Python's objects would take several times the memory until then: getting that from the system
    and giving it back costs more than half as much as converting. Each resource is there once,
    with a number for each span, and columns without values are left out.
    """

    __slots__ = ("_columns", "_numbers", "_resources", "table_bytes", "weight")

    def __init__(self, batch: SpanBatch) -> None:
        """Raises BadRowsError if the spans do not fit."""
        try:
            resources, self._numbers = _distinct(batch.columns["resource"])
            self._resources = _packed("resource", _maps(resources))
            self._columns = {
                name: _packed(name, column)
                for name, column in _columns(batch).items()
                if column.null_count < len(column) or not len(column)
            }
        except MemoryError:
            raise
        except _MISFIT as error:
            raise _bad_rows(SPAN_SOURCE, error) from None
        columns = (*self._columns.values(), self._numbers, self._resources)
        self.weight = sum([int(column.get_total_buffer_size()) for column in columns])
        """The bytes it counts for."""
        absent = len(ARROW_SCHEMA) - len(self._columns)
        attributes = sum(map(len, batch.columns["resource"]))
        self.table_bytes = self.weight + 4 * absent * len(self) + 2 * 4 * attributes
        """What it takes in the table of a segment, where a text has a number of four bytes."""

    def __len__(self) -> int:
        return len(self._numbers)

    @classmethod
    def join(cls, parts: Sequence[SpanTable]) -> pa.Table:
        """The rows of ``parts``, one after the other."""
        return pa.concat_tables([part._table() for part in parts]).unify_dictionaries()

    def _table(self) -> pa.Table:
        columns = self._columns | {"resource": self._resources.take(self._numbers)}
        for name in ARROW_SCHEMA.names:
            if name not in columns:
                columns[name] = _nulls(name, len(self))
        return pa.table({name: columns[name] for name in ARROW_SCHEMA.names})


class DeltaTable:
    """Deltas of one event type that wait for their segment."""

    __slots__ = ("table", "weight")

    def __init__(self, table: pa.Table) -> None:
        self.table = table
        self.weight = int(table.nbytes)
        """The bytes it counts for."""

    def __len__(self) -> int:
        return int(self.table.num_rows)


def joined(batches: Sequence[DeltaTable]) -> pa.Table:
    """The rows of tables, one after the other."""
    return pa.concat_tables([batch.table for batch in batches])


def joined_spans(batches: Sequence[SpanTable | PackedSpans]) -> pa.Table:
    """The rows of batches of spans: those of one form one after the other."""
    forms: dict[type[SpanTable | PackedSpans], list[Any]] = {}
    for batch in batches:
        forms.setdefault(type(batch), []).append(batch)
    tables = [form.join(parts) for form, parts in forms.items()]
    return tables[0] if len(tables) == 1 else pa.concat_tables(tables).unify_dictionaries()


def converter(source: str, kind: SourceType | None) -> Convert:
    """The function that converts batches of an event type to a table."""
    if source == SPAN_SOURCE or kind is None:
        return joined_spans
    return event_tables(kind)


def event_tables(source: SourceType, columns: Collection[str] | None = None) -> Convert:
    """The function that converts events of ``source`` to a table of all ``columns``, or some."""
    schema = source.arrow_schema()
    if columns is not None:
        known = {TIME_COLUMN, *columns}
        schema = pa.schema([column for column in schema if column.name in known])
    adapters = {known.column: adapter(known.type) for known in source.fields.values()}

    def convert(batches: Sequence[EventBatch]) -> pa.Table:
        rows = [row for batch in batches for row in batch.rows]
        columns = []
        for column in schema:
            values = [row.get(column.name) for row in rows]
            adapt = adapters.get(column.name)
            if adapt is not None:
                values = [None if value is None else adapt(value) for value in values]
            columns.append(pa.array(values, column.type))
        return pa.table(columns, schema=schema)

    return convert


def encode(table: pa.Table) -> memoryview:
    """A table as the bytes of a Parquet file."""
    repeating = [path for path in _leaves(table.schema) if path.split(".")[0] not in _UNIQUE]
    out = pa.BufferOutputStream()
    pq.write_table(
        table,
        out,
        compression="zstd",
        use_dictionary=repeating,
        write_statistics=[TIME_COLUMN],
        store_schema=False,  # readers see the same columns, whatever form they had in memory
    )
    return memoryview(out.getvalue())


def encode_metrics_only(table: pa.Table) -> memoryview:
    """A file of spans without the values that only the pages of traces read."""
    for name in KEPT_COLUMNS.values():
        place = table.schema.get_field_index(name)
        empty = pa.nulls(table.num_rows, table.schema.field(place).type)
        table = table.set_column(place, name, empty)
    return encode(table)


def delta_file(table: pa.Table) -> memoryview:
    """A table of deltas as the bytes of a Parquet file.

    Smaller by a half than with :func:`encode`: most of it are small numbers in wide columns, and
    Arrow's own description of the columns, which says nothing that Parquet's does not.
    """
    leaves = _leaves(table.schema)
    texts = [path for path, kind in leaves.items() if pa.types.is_string(kind)]
    numbers = [path for path in leaves if path not in texts]
    out = pa.BufferOutputStream()
    with pq.ParquetWriter(
        out,
        table.schema.remove_metadata(),
        compression="zstd",
        use_dictionary=texts,
        column_encoding=dict.fromkeys(numbers, "BYTE_STREAM_SPLIT"),
        write_statistics=False,
        store_schema=False,
    ) as writer:
        writer.write_table(table.replace_schema_metadata(None))
        writer.add_key_value_metadata(table.schema.metadata or {})
    return memoryview(out.getvalue())


def warm_up() -> None:
    """Make pyarrow load what it loads at first use: that takes seconds, or fails at exit."""
    encode(span_table(SpanBatch()))


def _maps(dicts: Sequence[dict[str, str]]) -> pa.Array:
    """Dicts as maps."""
    sizes = pa.array([0, *itertools.accumulate(map(len, dicts))], pa.int32())
    keys = pa.array(list(itertools.chain.from_iterable(dicts)), pa.string())
    texts = pa.array(list(itertools.chain.from_iterable(map(dict.values, dicts))), pa.string())
    return pa.MapArray.from_arrays(sizes, keys, texts)


def _distinct(dicts: Sequence[dict[str, str]]) -> tuple[list[dict[str, str]], pa.Array]:
    """The objects in ``dicts``, where many rows share one, and the number of each row's."""
    places: dict[int, int] = {}
    distinct: list[dict[str, str]] = []
    indices = []
    for pairs in dicts:
        place = places.get(id(pairs))  # comparing their contents would cost as much as converting
        if place is None:
            place = places[id(pairs)] = len(distinct)
            distinct.append(pairs)
        indices.append(place)
    return distinct, pa.array(indices, pa.int32())


def adapter(kind: FieldType) -> Callable[[Any], Any] | None:
    """What turns a value into what Arrow expects; None where Arrow takes the value itself.

    Arrow wants a map as its pairs, would take a number for a bool, and a text for a list of
    letters.
    """
    if kind.kind == "map":
        return _pairs
    if kind.kind == "bool":
        return _bool
    if kind.kind in ("int", "long"):
        return _whole
    if kind.kind == "list":
        return _list
    if kind.kind == "struct":
        inside = {member.name: adapter(member.type) for member in kind.fields}
        return lambda value: _struct(value, inside)
    return None


def _pairs(value: Any) -> Any:
    return list(value.items()) if isinstance(value, Mapping) else value


def _list(value: Any) -> Any:
    if isinstance(value, (str, bytes)):
        raise TypeError(f"{value!r} is not a list")
    return value


def _bool(value: Any) -> bool:
    if not isinstance(value, bool):
        raise TypeError(f"{value!r} is not True or False")
    return value


def _whole(value: Any) -> int:
    if isinstance(value, bool):
        raise TypeError(f"{value!r} is not a whole number")
    return operator.index(value)


def _struct(value: Any, adapters: Mapping[str, Callable[[Any], Any] | None]) -> Any:
    if not isinstance(value, Mapping):
        raise TypeError(f"{value!r} is not a mapping of field names to values")
    if not value.keys() <= adapters.keys():
        unknown = ", ".join(sorted(value.keys() - adapters.keys()))
        raise ValueError(f"no such field: {unknown}; there are {', '.join(adapters)}")
    members = dict(value)
    for name, adapt in adapters.items():
        if adapt is not None and members.get(name) is not None:
            members[name] = adapt(members[name])
    return members


def _leaves(schema: pa.Schema) -> dict[str, pa.DataType]:
    """The Parquet columns of a table, as pyarrow's writer names them, and their types."""
    return dict(leaf for column in schema for leaf in _paths(column.name, column.type))


def _paths(path: str, kind: pa.DataType) -> list[tuple[str, pa.DataType]]:
    if pa.types.is_map(kind):
        return [
            *_paths(f"{path}.key_value.key", kind.key_type),
            *_paths(f"{path}.key_value.value", kind.item_type),
        ]
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        return _paths(f"{path}.list.element", kind.value_type)
    if pa.types.is_struct(kind):
        return [leaf for member in kind for leaf in _paths(f"{path}.{member.name}", member.type)]
    return [(path, kind)]
