"""Batches as Arrow tables, and tables as Parquet. No threads, no disk."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import pyarrow as pa
import pyarrow.parquet as pq

from batchmill.sources import TIME_COLUMN, FieldType, SourceType
from batchmill.spool.batches import SPAN_SOURCE, EventBatch, SpanBatch
from batchmill.spool.errors import BadRowsError

Convert: TypeAlias = Callable[[Sequence[Any]], pa.Table]

_TIME = pa.timestamp("us", tz="UTC")
_MAP = pa.map_(pa.string(), pa.string())
SPAN_SCHEMA = pa.schema(
    [
        (TIME_COLUMN, _TIME),
        ("end_time", _TIME),
        *(
            (name, pa.string())
            for name in (
                *("trace_id", "span_id", "parent_span_id"),
                *("name", "kind", "status", "service"),
            )
        ),
        ("resource", _MAP),
        ("attributes", _MAP),
    ]
)
"""What a segment of spans looks like."""

_UNIQUE = frozenset(("trace_id", "span_id", "parent_span_id", TIME_COLUMN, "end_time"))
"""Columns whose values hardly repeat: a dictionary of them would be all cost."""
# What Arrow raises about values that do not fit a column.
_MISFIT = (pa.ArrowException, ValueError, TypeError, OverflowError)


def table_of(
    source: str, batches: Sequence[Any], convert: Convert
) -> tuple[pa.Table | None, dict[int, BadRowsError]]:
    """All batches as one table, and by number those that do not fit.

    They are converted together, which is quick. Only where that fails each is looked at alone, so
    that nobody's batch fails for another's.
    """
    try:
        return convert(batches), {}
    except MemoryError:  # Arrow's own is also one of its other errors; it says nothing of the rows
        raise
    except _MISFIT:
        pass
    good, bad = [], {}
    for number, batch in enumerate(batches):
        try:
            good.append(convert([batch]))
        except MemoryError:
            raise
        except _MISFIT as error:
            bad[number] = _bad_rows(source, error)
    return (pa.concat_tables(good) if good else None), bad


def _bad_rows(source: str, error: Exception) -> BadRowsError:
    detail = str(error).splitlines()[0] if str(error) else type(error).__name__
    return BadRowsError(source, detail)


def span_table(batch: SpanBatch) -> pa.Table:
    """Spans as a table."""
    columns = [
        _MAPS[each.name](batch.columns[each.name])
        if each.name in _MAPS
        else pa.array(batch.columns[each.name], each.type)
        for each in SPAN_SCHEMA
    ]
    return pa.table(columns, schema=SPAN_SCHEMA)


class SpanTable:
    """A SpanBatch that waits for its segment.

    It is a table already. Python's objects would take several times the memory until then: to
    get that from the system and to give it back cost more than half of what converting does.
    """

    __slots__ = ("table", "weight")

    def __init__(self, batch: SpanBatch) -> None:
        """Raises BadRowsError if the spans do not fit."""
        try:
            self.table = span_table(batch)
        except MemoryError:
            raise
        except _MISFIT as error:
            raise _bad_rows(SPAN_SOURCE, error) from None
        self.weight = batch.weight
        """The bytes it counts for."""

    def __len__(self) -> int:
        return int(self.table.num_rows)


def _joined(batches: Sequence[SpanTable]) -> pa.Table:
    return pa.concat_tables([each.table for each in batches])


def event_tables(source: SourceType) -> Convert:
    """How events of ``source`` become a table."""
    schema = source.arrow_schema()
    kinds = {each.column: each.type for each in source.fields.values()}
    shape = {name: _shaper(kind) for name, kind in kinds.items()}

    def convert(batches: Sequence[EventBatch]) -> pa.Table:
        rows = [row for batch in batches for row in batch.rows]
        columns = []
        for each in schema:
            values = [row.get(each.name) for row in rows]
            shaper = shape.get(each.name)
            if shaper is not None:
                values = [None if value is None else shaper(value) for value in values]
            columns.append(pa.array(values, each.type))
        return pa.table(columns, schema=schema)

    return convert


def encode(table: pa.Table) -> memoryview:
    """A table as the bytes of a Parquet file."""
    repeating = [path for path in _leaves(table.schema) if path.split(".")[0] not in _UNIQUE]
    out = pa.BufferOutputStream()
    pq.write_table(
        table, out, compression="zstd", use_dictionary=repeating, write_statistics=[TIME_COLUMN]
    )
    return memoryview(out.getvalue())


def warm_up() -> None:
    """Have pyarrow load what it loads at first use: seconds, or impossible when Python ends."""
    encode(span_table(SpanBatch()))


def converter(source: str, kind: SourceType | None) -> Convert:
    """How batches of an event type become a table."""
    if source == SPAN_SOURCE or kind is None:
        return _joined
    return event_tables(kind)


def _maps(dicts: Sequence[dict[str, str]]) -> pa.Array:
    """Dicts as maps."""
    sizes = pa.array([0, *itertools.accumulate(map(len, dicts))], pa.int32())
    keys = pa.array(list(itertools.chain.from_iterable(dicts)), pa.string())
    texts = pa.array(list(itertools.chain.from_iterable(map(dict.values, dicts))), pa.string())
    return pa.MapArray.from_arrays(sizes, keys, texts)


def _shared(dicts: Sequence[dict[str, str]]) -> pa.Array:
    """Dicts as maps, where many rows share one dict: each is converted once."""
    places: dict[int, int] = {}
    distinct: list[dict[str, str]] = []
    indices = []
    for each in dicts:
        place = places.get(id(each))
        if place is None:
            place = places[id(each)] = len(distinct)
            distinct.append(each)
        indices.append(place)
    if 2 * len(distinct) > len(dicts):
        return _maps(dicts)
    return _maps(distinct).take(pa.array(indices, pa.int32()))


_MAPS = {"resource": _shared, "attributes": _maps}


def _shaper(kind: FieldType) -> Callable[[Any], Any] | None:
    """What makes of a value what Arrow takes for it; None where that is the value itself.

    Arrow takes a map as its pairs, a number for a truth, and a text for a list of letters.
    """
    if kind.kind == "map":
        return _pairs
    if kind.kind == "bool":
        return _truth
    if kind.kind in ("int", "long"):
        return _whole
    if kind.kind == "list":
        return _listed
    if kind.kind == "struct":
        inside = {each.name: _shaper(each.type) for each in kind.fields}
        return lambda value: _members(value, inside)
    return None


def _pairs(value: Any) -> Any:
    return list(value.items()) if isinstance(value, Mapping) else value


def _listed(value: Any) -> Any:
    if isinstance(value, (str, bytes)):
        raise TypeError(f"{value!r} is not a list")
    return value


def _truth(value: Any) -> bool:
    if not isinstance(value, bool):
        raise TypeError(f"{value!r} is not True or False")
    return value


def _whole(value: Any) -> int:
    if isinstance(value, bool):
        raise TypeError(f"{value!r} is not a whole number")
    return operator.index(value)


def _members(value: Any, shapers: Mapping[str, Callable[[Any], Any] | None]) -> Any:
    if not isinstance(value, Mapping):
        raise TypeError(f"{value!r} is not a mapping of field names to values")
    if not value.keys() <= shapers.keys():
        unknown = ", ".join(sorted(value.keys() - shapers.keys()))
        raise ValueError(f"no such field: {unknown}; there are {', '.join(shapers)}")
    shaped = dict(value)
    for name, shaper in shapers.items():
        if shaper is not None and shaped.get(name) is not None:
            shaped[name] = shaper(shaped[name])
    return shaped


def _leaves(schema: pa.Schema) -> list[str]:
    return [path for each in schema for path in _paths(each.name, each.type)]


def _paths(path: str, kind: pa.DataType) -> list[str]:
    """The Parquet columns of a field, as pyarrow's writer names them."""
    if pa.types.is_map(kind):
        return [
            *_paths(f"{path}.key_value.key", kind.key_type),
            *_paths(f"{path}.key_value.value", kind.item_type),
        ]
    if pa.types.is_list(kind):
        return _paths(f"{path}.list.element", kind.value_type)
    if pa.types.is_struct(kind):
        return [each for member in kind for each in _paths(f"{path}.{member.name}", member.type)]
    return [path]
