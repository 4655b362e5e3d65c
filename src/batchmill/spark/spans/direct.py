"""The rows that a span gives by itself: of the service that served, and of what a call went to.

Which service called which needs two spans: see :mod:`.links`.
"""

from __future__ import annotations

from collections.abc import Mapping

from pyspark.sql import DataFrame

from batchmill.spark.l1.fusion import Rows
from batchmill.spark.spans.columns import SERVES

_SERVED = (
    *("latency", "status", "httpResponseStatusCode", "rpcStatusCode", "type", "tags", "tag"),
)
_TOKENS = (
    "input_tokens AS inputTokens",
    "output_tokens AS outputTokens",
    "0L AS totalEstimatedCost",
    "CAST(latency AS BIGINT) AS latency",
    "status",
)
_BROKERED = (
    "broker_operation AS operation",
    "IF(kind = 'CONSUMER', CAST(latency AS BIGINT), 0L) AS transmissionLatency",
    "status",
)

_SOURCES: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "Service": (
        SERVES,
        (
            *("service AS name", "'GENERAL' AS layer", "instance AS serviceInstanceName"),
            *("name AS endpointName", *_SERVED),
        ),
    ),
    "ServiceInstance": (
        SERVES,
        (
            *("instance AS name", "service AS serviceName", "'GENERAL' AS serviceLayer"),
            *("name AS endpointName", *_SERVED),
        ),
    ),
    "Endpoint": (
        SERVES,
        (
            *("name", "service AS serviceName", "instance AS serviceInstanceName"),
            *("'GENERAL' AS serviceLayer", *_SERVED),
        ),
    ),
    "DatabaseAccess": (
        "store IS NOT NULL AND cache_operation IS NULL",
        ("store AS name", "latency", "status"),
    ),
    "CacheAccess": (
        "cache_operation IS NOT NULL",
        ("store AS name", "latency", "status", "cache_operation AS operation"),
    ),
    "MQAccess": ("broker IS NOT NULL", ("broker AS name", *_BROKERED)),
    "MQEndpointAccess": (
        "broker IS NOT NULL",
        ("broker AS serviceName", "broker_endpoint AS endpoint", *_BROKERED),
    ),
    "GenAIProviderAccess": ("provider IS NOT NULL", ("provider AS name", *_TOKENS)),
    "GenAIModelAccess": (
        "provider IS NOT NULL",
        ("provider AS serviceName", "model AS modelName", *_TOKENS),
    ),
}


def direct_sources(compact_spans: DataFrame) -> dict[str, Rows]:
    """The rows of each source that single spans give, by the source's name.

    They have ``time`` and those of the catalog's columns that spans know; the rest of them are
    nulls to whoever needs them.
    """
    return {
        source: Rows(compact_spans, ("time", *columns), condition)
        for source, (condition, columns) in _SOURCES.items()
    }


def row_counts(compact_spans: DataFrame) -> tuple[dict[str, int], int, int]:
    """How many rows each source will get, and under the empty name, how many spans there are; then
    the first and the latest start of a span, in microseconds since 1970. One pass for all."""
    conditions = {source: condition for source, (condition, _) in _SOURCES.items()}
    counted = compact_spans.selectExpr(
        "COUNT(1) AS spans",
        "COALESCE(MIN(UNIX_MICROS(time)), 0) AS oldest",
        "COALESCE(MAX(UNIX_MICROS(time)), 0) AS newest",
        *(f"COUNT_IF({each}) AS {source}" for source, each in conditions.items()),
    ).first()
    assert counted is not None
    counts = {source: int(counted[source]) for source in conditions}
    found = {"": int(counted["spans"]), **counts}
    return found, int(counted["oldest"]), int(counted["newest"])
