"""Finds the slowest statements of each database and cache, and counts how often each text ran.

Records are kept per stream, entity and minute. Keeping the N slowest of a batch is exact: what is
not among them cannot be among the N slowest of all.
"""

from __future__ import annotations

from pyspark.sql import DataFrame
from pyspark.sql.functions import expr as _expr

from batchmill.aggregate import (
    CACHE_READ,
    CACHE_WRITE,
    DATABASE,
    NORMALISED,
    SERVICE_DATABASE,
    SlowThresholds,
    TopNThresholds,
)
from batchmill.errors import ConfigError
from batchmill.sources import BLANK_NAME, SERVICE_NAME_LIMIT
from batchmill.spark.spans.columns import is_blank
from batchmill.spark.sql import literal


def topn_records(
    compact_spans: DataFrame, n: int = 50, thresholds: TopNThresholds | None = None
) -> DataFrame:
    """The ``n`` slowest statements of each stream, entity and minute that are above the threshold.

    Equal latencies: the earlier start wins, then the smaller trace id, then the smaller span id.
    Columns: ``stream``, ``entity``, ``minute``, ``latency``, ``time_us``, ``trace_id``,
    ``span_id``, ``statement`` and ``normalised``.
    """
    if isinstance(n, bool) or not isinstance(n, int) or n < 1:
        raise ConfigError("n", n, "a whole number of at least 1")
    limits = thresholds or TopNThresholds()
    slow = (
        f"latency > IF(cache_operation IS NULL, {threshold_sql(limits.database, 'system')}, "
        f"{threshold_sql(limits.cache, 'system')})"
    )
    record = "STRUCT(latency, time_us, trace_id, span_id, statement)"
    # The statement comes last, so that duplicates of a span have an order as well.
    order = "STRUCT(-latency, time_us, trace_id, span_id, statement)"
    slowest = (
        _executions(compact_spans.where(slow))
        .groupBy("stream", "entity", "minute")
        .agg(_expr(f"MIN_BY({record}, {order}, {n}) AS slowest"))
    )
    return slowest.selectExpr("stream", "entity", "minute", "INLINE(slowest)").selectExpr(
        "*", f"{normalise('statement')} AS normalised"
    )


def statement_stats(compact_spans: DataFrame) -> DataFrame:
    """How often each normalised statement ran, slow or not, and its total time.

    Columns: ``stream``, ``entity``, ``minute``, ``normalised``, ``runs`` and ``total_ms``.
    """
    return (
        _executions(compact_spans, normalised=True)
        .groupBy("stream", "entity", "minute", "normalised")
        .agg(_expr("COUNT(*) AS runs"), _expr("SUM(CAST(latency AS BIGINT)) AS total_ms"))
    )


def service_id(name: str, normal: str) -> str:
    """SQL of a service's id, as ``batchmill.sources.entity_id`` makes it; ``normal`` is never null.

    Characters are code points, in SQL and in Python.
    """
    blank = f"COALESCE({is_blank(name)}, true)"
    text = f"SUBSTRING(COALESCE({name}, ''), 1, {SERVICE_NAME_LIMIT})"
    encoded = f"IF({blank}, {_base64(literal(BLANK_NAME))}, {_base64(text)})"
    return f"CONCAT({encoded}, IF({normal}, '.1', '.0'))"


def threshold_sql(thresholds: SlowThresholds, system: str) -> str:
    """SQL of the limit, where ``system`` is the SQL of the system's name."""
    cases = "".join(
        f" WHEN {literal(name)} THEN {literal(limit)}" for name, limit in thresholds.systems.items()
    )
    default = literal(thresholds.default_ms)
    return f"CASE LOWER({system}){cases} ELSE {default} END" if cases else default


def normalise(statement: str) -> str:
    """SQL of a statement without its values."""
    for pattern, replacement in NORMALISED:
        statement = f"REGEXP_REPLACE({statement}, {literal(pattern)}, {literal(replacement)})"
    return f"TRIM({statement})"


# yyyyMMddHHmm in UTC, whatever the session's time zone is.
_MINUTES = "FLOOR(UNIX_SECONDS(time) / 60)"
_DATE = f"DATE_FROM_UNIX_DATE(CAST(FLOOR({_MINUTES} / 1440) AS INT))"
_MINUTE = (
    f"(YEAR({_DATE}) * 100L + MONTH({_DATE})) * 1000000L + DAY({_DATE}) * 10000L "
    f"+ PMOD({_MINUTES}, 1440) DIV 60 * 100L + PMOD({_MINUTES}, 60)"
)


def _executions(compact_spans: DataFrame, *, normalised: bool = False) -> DataFrame:
    """One row for each execution and each stream that it belongs to."""
    store = service_id("store", "false")
    streams = (
        f"IF(cache_operation IS NULL, ARRAY("
        f"STRUCT('{DATABASE}' AS stream, {store} AS entity), "
        f"STRUCT('{SERVICE_DATABASE}' AS stream, {service_id('service', 'true')} AS entity)), "
        f"ARRAY(STRUCT(IF(cache_operation = 'Read', '{CACHE_READ}', '{CACHE_WRITE}') AS stream, "
        f"{store} AS entity)))"
    )
    text = "MAKE_VALID_UTF8(COALESCE(statement, ''))"
    if normalised:
        text = normalise(text)
    return (
        compact_spans.where("store IS NOT NULL AND NOT (cache_operation <=> 'Others')")
        .selectExpr(
            "latency",
            "UNIX_MICROS(time) AS time_us",
            f"{_MINUTE} AS minute",
            "MAKE_VALID_UTF8(COALESCE(trace_id, '')) AS trace_id",
            "MAKE_VALID_UTF8(COALESCE(span_id, '')) AS span_id",
            f"{text} AS {'normalised' if normalised else 'statement'}",
            f"{streams} AS streams",
        )
        .selectExpr("*", "INLINE(streams)")
        .drop("streams")
    )


def _base64(text: str) -> str:
    # BASE64 breaks its lines after 76 characters if spark.sql.chunkBase64String.enabled says so.
    return f"TRANSLATE(BASE64(CAST({text} AS BINARY)), '\r\n', '')"
