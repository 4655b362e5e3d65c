"""The columns of a file against those of the catalog: how each is read, and what does not fit.

The catalog's types are kept where the file has them. Some others are understood because common
writers produce them: wider and narrower whole numbers, dictionaries, timestamps in other units.
A file whose column cannot be understood is set aside whole, with that column as the reason.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import pyarrow as pa
from pyspark.sql import types as T

from batchmill.sources import TIME_COLUMN, Entity, Field, FieldType, SourceType
from batchmill.spark.l1 import sql as sql_module
from batchmill.spool import FOREIGN, SPAN_SCHEMA, SPAN_SOURCE

_INT_MIN, _INT_MAX = -(2**31), 2**31 - 1
LARGEST_DOUBLE = 2.0**62
"""Doubles are summed exactly up to here; a larger one does not fit."""


END_COLUMN = "end_time"

_TYPES = {
    "id": FieldType("string"),
    "text": FieldType("string"),
    "map": FieldType("map", item=FieldType("string")),
}
SPAN = SourceType(
    SPAN_SOURCE,
    {
        column.name: Field(column.name, _TYPES[column.kind], required=column.required)
        for column in SPAN_SCHEMA
        if column.kind != "time"
    },
    Entity("service", {"service": "service", "layer": "=normal"}),
)
"""A span's columns, beside ``time`` and ``end_time``. No event type: several come of it."""


@dataclass(frozen=True)
class Reading:
    """How the rows of files with one schema are read."""

    schema: T.StructType
    """What Spark asks the files for."""
    columns: tuple[str, ...]
    """The projection onto the catalog's columns, as SQL."""
    misfits: tuple[tuple[str, str], ...]
    """Condition and reason: the ways in which a row may not fit, first match counts."""


class NotUnderstood(Exception):
    """A column has a type that cannot be read as the catalog's."""


def reading(
    source: SourceType, needed: Iterable[str], physical: pa.Schema, *, whole: bool = False
) -> Reading:
    """How to read ``needed`` columns of ``source`` from files with the schema ``physical``.

    ``whole`` also takes every other column that the catalog has. Spans are read the same way, as
    if they were in the catalog; they have a second moment, ``end_time``.
    """
    fields = {each.column: each for each in source.fields.values()}
    asked_for = frozenset(needed)
    wanted = [column for column in fields if whole or column in asked_for]
    asked, columns, misfits = [], [], []
    kind, time = _moment(physical, TIME_COLUMN)
    if kind is not None:
        asked.append(T.StructField(TIME_COLUMN, kind))
    columns.append(f"{time} AS `time`")
    misfits.append((f"{time} IS NULL", "no time"))
    if source is SPAN and physical.get_field_index(FOREIGN) >= 0:
        asked.append(T.StructField(FOREIGN, T.BinaryType()))
        misfits.insert(0, (f"{FOREIGN} IS NOT NULL", "not a message of spans"))
        if whole:
            columns.append(FOREIGN)
    if source is SPAN:
        kind, end = _moment(physical, END_COLUMN)
        if kind is not None:
            asked.append(T.StructField(END_COLUMN, kind))
        columns.append(f"{end} AS {END_COLUMN}")
        misfits.append((f"{end} IS NULL", f"no {END_COLUMN}"))
    misfits.append((f"{time} < TIMESTAMP'1970-01-01T00:00:00Z'", "time before 1970"))
    misfits.append((f"{time} > TIMESTAMP_MICROS({{latest}})", "time too far ahead"))
    for column in wanted:
        field = fields[column]
        try:
            read = _column(field, physical)
        except NotUnderstood:
            if column in asked_for:
                raise
            continue
        if read.kind is not None:
            asked.append(T.StructField(column, read.kind))
        columns.append(f"{read.sql} AS {sql_module.name(column)}")
        if column not in asked_for:
            continue  # nobody measures it, so nothing about it can be wrong
        misfits += read.misfits
        if field.required or field.name == source.entity.roles.get("field"):
            misfits.append((f"{read.sql} IS NULL", f"no {field.name}"))
    return Reading(T.StructType(asked), tuple(columns), tuple(misfits))


@dataclass(frozen=True)
class _Read:
    kind: T.DataType | None
    sql: str
    misfits: tuple[tuple[str, str], ...] = ()


def _column(field: Field, physical: pa.Schema) -> _Read:
    wanted = spark_type(field.type)
    index = physical.get_field_index(field.column)
    if index < 0:
        return _Read(None, f"CAST(NULL AS {wanted.simpleString()})")
    found = physical.field(index).type
    name = sql_module.name(field.column)
    if pa.types.is_null(found):
        return _Read(None, f"CAST(NULL AS {wanted.simpleString()})")
    if field.type.kind == "int" and (pa.types.is_int64(found) or pa.types.is_uint32(found)):
        over = f"{name} NOT BETWEEN {_INT_MIN} AND {_INT_MAX}"
        reason = f"{field.name}: too large for an int"
        return _Read(T.LongType(), f"CAST({name} AS INT)", ((over, reason),))
    if field.type.kind == "double" and _fits(found, field.type):
        odd = f"ISNAN({name}) OR ABS({name}) >= {LARGEST_DOUBLE!r}D"
        return _Read(wanted, name, ((odd, f"{field.name}: not a finite number"),))
    if not _fits(found, field.type):
        raise NotUnderstood(f"column {field.column}: {found}, where {field.type} is expected")
    return _Read(wanted, name)


def _moment(physical: pa.Schema, column: str) -> tuple[T.DataType | None, str]:
    index = physical.get_field_index(column)
    found = None if index < 0 else physical.field(index).type
    if found is None or pa.types.is_null(found):
        return None, "CAST(NULL AS TIMESTAMP)"
    if not pa.types.is_timestamp(found):
        raise NotUnderstood(f"column {column}: {found}, where timestamp[us, tz=UTC] is expected")
    if found.unit == "ns":  # Spark reads those as the plain number (nanosAsLong)
        return T.LongType(), f"TIMESTAMP_MICROS({column} DIV 1000)"
    if found.tz is None:
        return T.TimestampNTZType(), f"CAST({column} AS TIMESTAMP)"
    return T.TimestampType(), column


def _fits(found: pa.DataType, wanted: FieldType) -> bool:
    if pa.types.is_dictionary(found):
        found = found.value_type
    kind = wanted.kind
    if kind in ("string", "layer", "enum"):
        return bool(pa.types.is_string(found) or pa.types.is_large_string(found))
    if kind == "bool":
        return bool(pa.types.is_boolean(found))
    if kind == "int":
        return found in (pa.int8(), pa.int16(), pa.int32(), pa.uint8(), pa.uint16())
    if kind == "long":
        return bool(pa.types.is_integer(found)) and found != pa.uint64()
    if kind == "double":
        return found in (pa.float32(), pa.float64())
    if kind == "list" and wanted.item is not None:
        listed = pa.types.is_list(found) or pa.types.is_large_list(found)
        return listed and _fits(found.value_type, wanted.item)
    if kind == "map" and wanted.item is not None:
        return (
            pa.types.is_map(found)
            and _fits(found.key_type, FieldType("string"))
            and _fits(found.item_type, wanted.item)
        )
    if not pa.types.is_struct(found):
        return False
    there = {each.name: each.type for each in found}
    return all(
        each.name not in there or _fits(there[each.name], each.type) for each in wanted.fields
    )


def spark_type(kind: FieldType) -> T.DataType:
    """The Spark type of a field."""
    if kind.kind == "struct":
        return T.StructType(
            [T.StructField(each.name, spark_type(each.type)) for each in kind.fields]
        )
    if kind.kind == "list" and kind.item is not None:
        return T.ArrayType(spark_type(kind.item))
    if kind.kind == "map" and kind.item is not None:
        return T.MapType(T.StringType(), spark_type(kind.item))
    if kind.kind == "int":
        return T.IntegerType()
    if kind.kind == "long":
        return T.LongType()
    if kind.kind == "double":
        return T.DoubleType()
    return T.BooleanType() if kind.kind == "bool" else T.StringType()


def span_type() -> T.StructType:
    """A span as Spark reads it from a segment."""
    fields = SPAN.fields
    return T.StructType(
        [
            T.StructField(
                column.name,
                T.TimestampType()
                if column.kind == "time"
                else spark_type(fields[column.name].type),
            )
            for column in SPAN_SCHEMA
        ]
    )
