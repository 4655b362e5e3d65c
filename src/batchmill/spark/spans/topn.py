"""The slowest statements of each database and cache, exactly, and how often each text ran.

Records are kept per stream, entity and minute. Taking the N best of a batch is safe: what is not
among them cannot be among the N best of all.
"""

from __future__ import annotations

from pyspark.sql import DataFrame
from pyspark.sql.functions import expr as _expr

from batchmill.errors import ConfigError
from batchmill.spark.l1.sql import literal
from batchmill.spark.spans.ids import service_id
from batchmill.spark.spans.thresholds import TopNThresholds

DATABASE = "top_n_database_statement"
SERVICE_DATABASE = "top_n_service_database_statement"
CACHE_READ = "top_n_cache_read_command"
CACHE_WRITE = "top_n_cache_write_command"
STREAMS = (DATABASE, SERVICE_DATABASE, CACHE_READ, CACHE_WRITE)
"""Slow statements per database, the same per calling service, slow cache reads, slow cache writes.
The entity of each is a service."""

NORMALISED = (
    # A text in quotes; a quote inside is written twice. Several side by side are one.
    (r"(?:'[^']*')+", "?"),
    # A number that is no part of a name, with fraction, exponent and sign of a placeholder ($1).
    (
        r"(?<![A-Za-z0-9_])[$]?(?:0[xX][0-9A-Fa-f]+|[0-9]+(?:[.][0-9]+)?(?:[eE][+-]?[0-9]+)?)"
        r"(?![A-Za-z0-9_])",
        "?",
    ),
    # Blanks: space, tab, line feed, vertical tab, form feed, carriage return.
    (r"[ \t\n\x0B\f\r]+", " "),
    # A list of placeholders, however long.
    (r"(?<![A-Za-z0-9_])([iI][nN]) ?[(] ?[?][?, ]*[)]", "$1 (?)"),
)
"""Pattern and replacement, in this order, then blanks at both ends go: what makes texts that differ
in their values only one text. The patterns mean the same to Java and to Python."""


def topn_records(
    compact_spans: DataFrame, n: int = 50, thresholds: TopNThresholds | None = None
) -> DataFrame:
    """The ``n`` slowest of each (``stream``, ``entity``, ``minute``), of those above the threshold.

    Equal latencies: the earlier start wins, then the smaller trace id, then the smaller span id.
    With them ``latency``, ``time_us``, ``trace_id``, ``span_id``, ``statement`` and ``normalised``.
    """
    if isinstance(n, bool) or not isinstance(n, int) or n < 1:
        raise ConfigError("n", n, "a whole number of at least 1")
    limits = thresholds or TopNThresholds()
    slow = (
        f"latency > IF(cache_operation IS NULL, {limits.database.sql('system')}, "
        f"{limits.cache.sql('system')})"
    )
    record = "STRUCT(latency, time_us, trace_id, span_id, statement)"
    # The statement comes last so that twins, which differ in it at most, have an order as well.
    order = "STRUCT(-latency, time_us, trace_id, span_id, statement)"
    best = (
        _executions(compact_spans.where(slow))
        .groupBy("stream", "entity", "minute")
        .agg(_expr(f"MIN_BY({record}, {order}, {n}) AS best"))
    )
    return best.selectExpr("stream", "entity", "minute", "INLINE(best)").selectExpr(
        "*", f"{normalise('statement')} AS normalised"
    )


def statement_stats(compact_spans: DataFrame) -> DataFrame:
    """How often each normalised statement ran, and its total time: of all, slow or not.

    Columns: ``stream``, ``entity``, ``minute``, ``normalised``, ``runs`` and ``total_ms``.
    """
    return (
        _executions(compact_spans, normalised=True)
        .groupBy("stream", "entity", "minute", "normalised")
        .agg(_expr("COUNT(*) AS runs"), _expr("SUM(CAST(latency AS BIGINT)) AS total_ms"))
    )


def normalise(statement: str) -> str:
    """The statement without its values, as SQL."""
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
    """One row for each execution and each stream that it is in."""
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
