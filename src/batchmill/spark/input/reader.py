"""Reads segments as rows of an event type, each marked with whether it is valid.

A file's columns are mapped to those of the catalog. The catalog's types are kept where the file has
them; some others are converted because common writers produce them: wider and narrower whole
numbers, dictionaries, timestamps in other units. A file with a column that cannot be converted is
quarantined whole, with that column as the reason.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql import types as T
from pyspark.sql.pandas.types import to_arrow_schema

from batchmill import spool
from batchmill.aggregate import LARGEST_DOUBLE
from batchmill.files import sync
from batchmill.sources import TIME_COLUMN, Field, FieldType, SourceType
from batchmill.spark import sql
from batchmill.spark.input.rows import END_COLUMN, KEYS
from batchmill.spark.input.rows import REASON as REASON
from batchmill.spark.input.rows import SPAN as SPAN
from batchmill.spark.input.rows import ColumnTypeError as ColumnTypeError
from batchmill.spark.input.segments import BadSegment, Segment, spark_path
from batchmill.spool import FOREIGN

FITS = "_fits"
"""The column that marks valid rows."""
_INT_MIN, _INT_MAX = -(2**31), 2**31 - 1
_NO_PATTERNS = "__globPaths__"
_PATTERN = frozenset("*?[]{}\\#")

_SCALARS: Mapping[str, T.DataType] = {
    "int": T.IntegerType(),
    "long": T.LongType(),
    "double": T.DoubleType(),
    "bool": T.BooleanType(),
}


def spark_type(kind: FieldType) -> T.DataType:
    """The Spark type of a field."""
    if kind.kind == "struct":
        members = kind.fields
        return T.StructType(
            [T.StructField(member.name, spark_type(member.type)) for member in members]
        )
    if kind.kind == "list" and kind.item is not None:
        return T.ArrayType(spark_type(kind.item))
    if kind.kind == "map" and kind.item is not None:
        return T.MapType(T.StringType(), spark_type(kind.item))
    return _SCALARS.get(kind.kind, T.StringType())


SPAN_SCHEMA = T.StructType(
    [
        T.StructField(
            name,
            spark_type(SPAN.fields[name].type) if name in SPAN.fields else T.TimestampType(),
        )
        for name in (*spool.SPAN_COLUMNS, *KEYS)
    ]
)
"""A span as Spark reads it from a segment: the columns of :data:`batchmill.spool.SPAN_SCHEMA`, and
those of well-known attributes."""


class Check(NamedTuple):
    """A way in which a row can be invalid."""

    condition: str
    """SQL that is true for an invalid row; ``{latest}`` stands for the latest valid start."""
    reason: str


@dataclass(frozen=True)
class Projection:
    """How files with one schema are read as rows of an event type."""

    schema: T.StructType
    """The columns that Spark reads from the files."""
    columns: tuple[str, ...]
    """The catalog's columns, as SQL."""
    checks: tuple[Check, ...]
    """What makes a row invalid; the first check that applies gives the reason."""


@dataclass(frozen=True)
class FileGroup:
    """Files that are read in the same way."""

    projection: Projection
    paths: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class CheckedFrame:
    """The rows of a frame, and those of them that are invalid."""

    rows: DataFrame
    """All rows, with ``_fits``."""
    invalid: DataFrame
    """The invalid rows, with ``_reason``."""


def project(
    source: SourceType, needed: Iterable[str], physical: pa.Schema, *, whole: bool = False
) -> Projection:
    """How to read the ``needed`` columns of ``source`` from files with the schema ``physical``.

    With ``whole``, every other column of the catalog is read as well. Spans are read like an event
    type of the catalog; they have a second time, ``end_time``.
    """
    fields = {declared.column: declared for declared in source.fields.values()}
    measured = frozenset(needed)
    schema, columns, checks = [], [], []
    kind, time = _timestamp(physical, TIME_COLUMN)
    if kind is not None:
        schema.append(T.StructField(TIME_COLUMN, kind))
    columns.append(f"{time} AS `time`")
    checks.append(Check(f"{time} IS NULL", "no time"))
    if source is SPAN and physical.get_field_index(FOREIGN) >= 0:
        schema.append(T.StructField(FOREIGN, T.BinaryType()))
        checks.insert(0, Check(f"{FOREIGN} IS NOT NULL", "not a message of spans"))
        if whole:
            columns.append(FOREIGN)
    if source is SPAN:
        kind, end = _timestamp(physical, END_COLUMN)
        if kind is not None:
            schema.append(T.StructField(END_COLUMN, kind))
        columns.append(f"{end} AS {END_COLUMN}")
        checks.append(Check(f"{end} IS NULL", f"no {END_COLUMN}"))
    checks.append(Check(f"{time} < TIMESTAMP'1970-01-01T00:00:00Z'", "time before 1970"))
    checks.append(Check(f"{time} > TIMESTAMP_MICROS({{latest}})", "time too far ahead"))
    for name in [column for column in fields if whole or column in measured]:
        declared = fields[name]
        try:
            column = _column(declared, physical)
        except ColumnTypeError:
            if name in measured:
                raise
            continue
        if column.kind is not None:
            schema.append(T.StructField(name, column.kind))
        elif source is SPAN:
            column = _from_map(name, column, physical)
        columns.append(f"{column.sql} AS {sql.name(name)}")
        if name not in measured:
            continue  # no metric reads it, so it cannot make a row invalid
        checks += column.checks
        if declared.required or declared.name == source.entity.roles.get("field"):
            checks.append(Check(f"{column.sql} IS NULL", f"no {declared.name}"))
    return Projection(T.StructType(schema), tuple(columns), tuple(checks))


def group_by_schema(
    source: SourceType, needed: Iterable[str], segments: Sequence[Segment]
) -> tuple[list[FileGroup], list[BadSegment]]:
    """The segments by how they are read, mostly all in one way; and those that cannot be read."""
    groups: dict[str, FileGroup] = {}
    bad = []
    columns = {"time", *(declared.column for declared in source.fields.values())}
    for segment in segments:
        known = [column for column in segment.schema if column.name in columns]
        key = ";".join(f"{column.name}:{column.type}" for column in known)
        if key not in groups:
            try:
                groups[key] = FileGroup(project(source, needed, segment.schema))
            except ColumnTypeError as error:
                bad.append(
                    BadSegment(segment.path, segment.source, "wrong type", str(error), segment.rows)
                )
                continue
        groups[key].paths.append(segment.path)
    return list(groups.values()), bad


def read_rows(spark: SparkSession, groups: Sequence[FileGroup], latest_us: int) -> DataFrame:
    """The rows of files, with the catalog's columns and ``_fits``."""
    return _union(
        read_parquet(spark, group.projection.schema, group.paths).selectExpr(
            *group.projection.columns, _fits(group.projection, latest_us)
        )
        for group in groups
    )


def read_invalid(
    spark: SparkSession,
    source: SourceType,
    needed: Iterable[str],
    segments: Sequence[Segment],
    latest_us: int,
) -> DataFrame:
    """The invalid rows, with all columns and ``_reason``, for the quarantine."""
    groups: dict[str, FileGroup] = {}
    for segment in segments:
        projection = project(source, needed, segment.schema, whole=True)
        groups.setdefault(str(segment.schema), FileGroup(projection)).paths.append(segment.path)
    return _union(
        _invalid(
            read_parquet(spark, group.projection.schema, group.paths), group.projection, latest_us
        )
        for group in groups.values()
    )


def check_frame(
    source: SourceType, needed: Iterable[str], rows: DataFrame, latest_us: int
) -> CheckedFrame:
    """Check rows that lie in no segment."""
    schema = to_arrow_schema(rows.schema, timezone="UTC")
    projection = project(source, needed, schema)
    whole = project(source, needed, schema, whole=True)
    return CheckedFrame(
        rows.selectExpr(*projection.columns, _fits(projection, latest_us)),
        _invalid(rows, whole, latest_us),
    )


def read_parquet(spark: SparkSession, schema: T.StructType, paths: Sequence[str]) -> DataFrame:
    """Read Parquet files by their exact names, whatever characters are in them.

    A name with characters of a pattern is read by itself: among others, Spark reads a file twice.
    """
    reader = spark.read.schema(schema).option(_NO_PATTERNS, "false")
    odd = [path for path in paths if not _PATTERN.isdisjoint(path)]
    groups = [[path] for path in odd]
    if len(odd) < len(paths):
        groups.append([path for path in paths if path not in odd])
    return functools.reduce(DataFrame.unionAll, (reader.parquet(*group) for group in groups))


def write_parquet(rows: DataFrame, folder: Path, *, overwrite: bool = False) -> None:
    """Write rows as a folder of Parquet files that survives a power cut."""
    rows.write.mode("overwrite" if overwrite else "error").parquet(spark_path(folder))
    sync_folder(folder)


def sync_folder(folder: Path) -> None:
    """Wait until a new folder, its files and its name are on the disk."""
    for path in (*sorted(folder.iterdir()), folder, folder.parent, folder.parent.parent):
        sync(path)


def _union(frames: Iterable[DataFrame]) -> DataFrame:
    return functools.reduce(lambda left, right: left.unionByName(right, True), frames)


def _fits(projection: Projection, latest_us: int) -> str:
    invalid = " OR ".join(
        f"COALESCE({check.condition.format(latest=latest_us)}, false)"
        for check in projection.checks
    )
    return f"NOT ({invalid}) AS {FITS}"


def _invalid(rows: DataFrame, projection: Projection, latest_us: int) -> DataFrame:
    cases = " ".join(
        f"WHEN {check.condition.format(latest=latest_us)} THEN '{check.reason}'"
        for check in projection.checks
    )
    reasoned = rows.selectExpr(*projection.columns, f"CASE {cases} END AS {REASON}")
    return reasoned.where(F.col(REASON).isNotNull())


@dataclass(frozen=True)
class _Column:
    kind: T.DataType | None
    """The type to read from the file; None: it is not in the file."""
    sql: str
    checks: tuple[Check, ...] = ()


def _column(declared: Field, physical: pa.Schema) -> _Column:
    wanted = spark_type(declared.type)
    index = physical.get_field_index(declared.column)
    if index < 0:
        return _Column(None, f"CAST(NULL AS {wanted.simpleString()})")
    actual = physical.field(index).type
    name = sql.name(declared.column)
    if pa.types.is_null(actual):
        return _Column(None, f"CAST(NULL AS {wanted.simpleString()})")
    if declared.type.kind == "int" and (pa.types.is_int64(actual) or pa.types.is_uint32(actual)):
        over = f"{name} NOT BETWEEN {_INT_MIN} AND {_INT_MAX}"
        reason = f"{declared.name}: too large for an int"
        return _Column(T.LongType(), f"CAST({name} AS INT)", (Check(over, reason),))
    if declared.type.kind == "double" and declared.type.can_read(actual):
        odd = f"ISNAN({name}) OR ABS({name}) >= {LARGEST_DOUBLE!r}D"
        return _Column(wanted, name, (Check(odd, f"{declared.name}: not a finite number"),))
    if not declared.type.can_read(actual):
        raise ColumnTypeError(
            f"column {declared.column}: {actual}, where {declared.type} is expected"
        )
    return _Column(wanted, name)


def _from_map(name: str, absent: _Column, physical: pa.Schema) -> _Column:
    """A well-known attribute in a file that has no column for it: from the map."""
    column, key = KEYS.get(name, ("", ""))
    if not _has(physical, column):
        return absent
    return _Column(None, f"TRY_ELEMENT_AT({column}, {sql.literal(key)})")


def _has(physical: pa.Schema, column: str) -> bool:
    index = physical.get_field_index(column)
    return index >= 0 and not pa.types.is_null(physical.field(index).type)


def _timestamp(physical: pa.Schema, column: str) -> tuple[T.DataType | None, str]:
    index = physical.get_field_index(column)
    actual = None if index < 0 else physical.field(index).type
    if actual is None or pa.types.is_null(actual):
        return None, "CAST(NULL AS TIMESTAMP)"
    if not pa.types.is_timestamp(actual):
        raise ColumnTypeError(f"column {column}: {actual}, where timestamp[us, tz=UTC] is expected")
    if actual.unit == "ns":  # Spark reads those as the plain number (nanosAsLong)
        return T.LongType(), f"TIMESTAMP_MICROS({column} DIV 1000)"
    if actual.tz is None:
        return T.TimestampNTZType(), f"CAST({column} AS TIMESTAMP)"
    return T.TimestampType(), column
