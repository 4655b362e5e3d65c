"""Reads the segments of one source as rows of the catalog, each marked with whether it fits."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql import types as T
from pyspark.sql.pandas.types import to_arrow_schema

from batchmill.sources import SourceType
from batchmill.spark.input.schema import NotUnderstood, Reading, reading
from batchmill.spark.input.segments import BadSegment, Segment

FITS = "_fits"
REASON = "_reason"
_NO_PATTERNS = "__globPaths__"
_PATTERN = frozenset("*?[]{}\\#")


def understood(
    source: SourceType, needed: Iterable[str], segments: Sequence[Segment]
) -> tuple[list[tuple[Reading, list[str]]], list[BadSegment]]:
    """The segments by how they are read, most often one way for all; and those that cannot be."""
    ways: dict[str, tuple[Reading, list[str]]] = {}
    bad = []
    columns = {"time", *(each.column for each in source.fields.values())}
    for segment in segments:
        known = [each for each in segment.schema if each.name in columns]
        key = ";".join(f"{each.name}:{each.type}" for each in known)
        if key not in ways:
            try:
                ways[key] = (reading(source, needed, segment.schema), [])
            except NotUnderstood as error:
                bad.append(
                    BadSegment(segment.path, segment.source, "wrong type", str(error), segment.rows)
                )
                continue
        ways[key][1].append(segment.path)
    return list(ways.values()), bad


def read_rows(
    spark: SparkSession, ways: Sequence[tuple[Reading, list[str]]], latest_us: int
) -> DataFrame:
    """The rows, with the catalog's columns and ``_fits``."""
    return _union(
        _load(spark, way, paths).selectExpr(
            *way.columns, f"NOT ({_any_misfit(way, latest_us)}) AS {FITS}"
        )
        for way, paths in ways
    )


def misfits(
    spark: SparkSession,
    source: SourceType,
    needed: Iterable[str],
    segments: Sequence[Segment],
    latest_us: int,
) -> DataFrame:
    """The rows that do not fit, whole, with ``_reason``; for the quarantine."""
    ways: dict[str, tuple[Reading, list[str]]] = {}
    for segment in segments:
        way = reading(source, needed, segment.schema, whole=True)
        ways.setdefault(str(segment.schema), (way, []))[1].append(segment.path)
    return _union(
        _misfits(_load(spark, way, paths), way, latest_us) for way, paths in ways.values()
    )


def frame_rows(
    source: SourceType, needed: Iterable[str], rows: DataFrame, latest_us: int
) -> tuple[DataFrame, DataFrame]:
    """Rows that lie in no segment: with ``_fits``, and those that do not, with ``_reason``."""
    schema = to_arrow_schema(rows.schema, timezone="UTC")
    way = reading(source, needed, schema)
    whole = reading(source, needed, schema, whole=True)
    fits = f"NOT ({_any_misfit(way, latest_us)}) AS {FITS}"
    return rows.selectExpr(*way.columns, fits), _misfits(rows, whole, latest_us)


def _misfits(rows: DataFrame, way: Reading, latest_us: int) -> DataFrame:
    reasoned = rows.selectExpr(*way.columns, f"{_first_reason(way, latest_us)} AS {REASON}")
    return reasoned.where(F.col(REASON).isNotNull())


def _load(spark: SparkSession, way: Reading, paths: list[str]) -> DataFrame:
    return read_parquet(spark, way.schema, paths)


def read_parquet(spark: SparkSession, schema: T.StructType, paths: Sequence[str]) -> DataFrame:
    """Parquet files by their exact names: no character of them means anything but itself.

    A name with characters of a pattern is read by itself: among others, Spark takes a file twice.
    """
    reader = spark.read.schema(schema).option(_NO_PATTERNS, "false")
    odd = [each for each in paths if not _PATTERN.isdisjoint(each)]
    groups = [[each] for each in odd]
    if len(odd) < len(paths):
        groups.append([each for each in paths if each not in odd])
    return functools.reduce(DataFrame.unionAll, (reader.parquet(*each) for each in groups))


def _union(frames: Iterable[DataFrame]) -> DataFrame:
    return functools.reduce(lambda one, other: one.unionByName(other, True), frames)


def _any_misfit(way: Reading, latest_us: int) -> str:
    return " OR ".join(
        f"COALESCE({each.format(latest=latest_us)}, false)" for each, _ in way.misfits
    )


def _first_reason(way: Reading, latest_us: int) -> str:
    cases = " ".join(
        f"WHEN {each.format(latest=latest_us)} THEN '{reason}'" for each, reason in way.misfits
    )
    return f"CASE {cases} END"
