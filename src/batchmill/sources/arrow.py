"""The Parquet schema of an event type. The one module here that needs pyarrow."""

from __future__ import annotations

from batchmill.sources.types import TIME_COLUMN, Field, FieldType, SourceType

try:
    import pyarrow as pa
except ImportError as error:
    raise ImportError(
        f"an Arrow schema takes pyarrow, which could not be loaded ({error}); "
        "install it with: pip install 'batchmill[spool]'"
    ) from error


def schema(source: SourceType) -> pa.Schema:
    """The column ``time`` (microseconds, UTC), then one nullable column for each field.

    Required fields are nullable too: a row without one is read, and then set aside by name.
    """
    time = pa.field(TIME_COLUMN, pa.timestamp("us", tz="UTC"))
    return pa.schema([time, *(_column(each) for each in source.fields.values())])


def _column(field: Field) -> pa.Field:
    return pa.field(field.column, _type(field.type))


def _type(kind: FieldType) -> pa.DataType:
    if kind.kind == "struct":
        return pa.struct([_column(each) for each in kind.fields])
    if kind.kind == "list" and kind.item is not None:
        return pa.list_(_type(kind.item))
    if kind.kind == "map" and kind.item is not None:
        return pa.map_(pa.string(), _type(kind.item))
    return {
        "int": pa.int32(),
        "long": pa.int64(),
        "double": pa.float64(),
        "bool": pa.bool_(),
    }.get(kind.kind, pa.string())
