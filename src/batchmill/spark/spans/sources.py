"""Turns spans into rows of event types.

A single span gives rows of the service that served, and of the database, cache or model that was
called. Calls between services take two spans, and so does a message's way through its broker:
:mod:`.links` finds them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from pyspark.sql import DataFrame

from batchmill.spark.l1.fusion import Rows
from batchmill.spark.spans.columns import SERVES

SERVED = ("Service", "ServiceInstance", "Endpoint")
"""The event types that a span gives that serves a request."""
TAGS = frozenset(("tags", "tag"))
"""Their columns that hold attributes of the span."""
_TIMED = ("latency", "latencyMicros", "status")
_SERVED = (*_TIMED, "httpResponseStatusCode", "rpcStatusCode", "type", "tags", "tag")
_RELATED = (
    "latencyMicros",
    "status",
    "httpResponseStatusCode",
    "rpcStatusCode",
    "type",
    "detectPoint",
)
_TOKENS = (
    "input_tokens AS inputTokens",
    "output_tokens AS outputTokens",
    "0L AS totalEstimatedCost",
    "CAST(latency AS BIGINT) AS latency",
    "latencyMicros",
    "status",
)
_BROKERED = (
    "IF(kind = 'CONSUMER', 'Consume', 'Produce') AS operation",
    "IF(kind = 'CONSUMER', on_the_way, 0L) AS transmissionLatency",
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
        ("store AS name", *_TIMED),
    ),
    "CacheAccess": (
        "cache_operation IS NOT NULL",
        ("store AS name", *_TIMED, "cache_operation AS operation"),
    ),
    "GenAIProviderAccess": ("provider IS NOT NULL", ("provider AS name", *_TOKENS)),
    "GenAIModelAccess": (
        "provider IS NOT NULL",
        ("provider AS serviceName", "model AS modelName", *_TOKENS),
    ),
}


@dataclass(frozen=True)
class SpanCounts:
    """The number of spans and of the rows they give, and the range of their starts."""

    spans: int
    rows: Mapping[str, int]
    """The rows that single spans give, by event type."""
    messages: int
    """How many spans send or consume a message."""
    oldest_us: int
    """The first start of a span, in microseconds since 1970; 0 without spans."""
    newest_us: int


def direct_sources(compact_spans: DataFrame, counts: SpanCounts | None = None) -> dict[str, Rows]:
    """The rows that single spans give, by event type; ``counts`` are those of the same spans.

    They have ``time`` and those of the catalog's columns that spans have; the others are null.
    """
    return {
        source: Rows(
            compact_spans,
            ("time", *columns),
            condition,
            most_rows=None if counts is None else counts.rows[source],
        )
        for source, (condition, columns) in _SOURCES.items()
    }


def count_spans(compact_spans: DataFrame) -> SpanCounts:
    """Count spans and the rows they give, in one pass."""
    conditions = {source: condition for source, (condition, _) in _SOURCES.items()}
    counted = compact_spans.selectExpr(
        "COUNT(1) AS spans",
        "COALESCE(MIN(UNIX_MICROS(time)), 0) AS oldest",
        "COALESCE(MAX(UNIX_MICROS(time)), 0) AS newest",
        "COUNT(broker) AS messages",
        *(f"COUNT_IF({condition}) AS {source}" for source, condition in conditions.items()),
    ).first()
    assert counted is not None
    return SpanCounts(
        int(counted["spans"]),
        {source: int(counted[source]) for source in conditions},
        int(counted["messages"]),
        int(counted["oldest"]),
        int(counted["newest"]),
    )


def relation_sources(relations: DataFrame, most_paired: int | None = None) -> dict[str, Rows]:
    """The rows of calls between services, as :func:`.links.link` finds them, by event type.

    ``most_paired``: from how many spans at most, new and pending; each gives up to two relations.
    They have ``time`` (the start of the span that was measured: the serving one where the detect
    point is SERVER, else the calling one) and those of the catalog's columns that spans have.
    """
    most_rows = None if most_paired is None else 2 * most_paired
    return {
        "ServiceRelation": Rows(
            relations,
            (
                "time",
                "sourceService AS sourceServiceName",
                "sourceInstance AS sourceServiceInstanceName",
                "sourceLayer",
                "destService AS destServiceName",
                "destInstance AS destServiceInstanceName",
                "destLayer",
                *("endpoint", "latency", *_RELATED),
            ),
            most_rows=most_rows,
        ),
        "ServiceInstanceRelation": Rows(
            relations,
            (
                "time",
                "sourceService AS sourceServiceName",
                "sourceInstance AS sourceServiceInstanceName",
                "sourceLayer AS sourceServiceLayer",
                "destService AS destServiceName",
                "destInstance AS destServiceInstanceName",
                "destLayer AS destServiceLayer",
                *("endpoint", "latency", *_RELATED),
            ),
            most_rows=most_rows,
        ),
        "EndpointRelation": Rows(
            relations,
            (
                "time",
                "sourceService AS serviceName",
                "sourceInstance AS serviceInstanceName",
                "sourceLayer AS serviceLayer",
                "sourceEndpoint AS endpoint",
                "destService AS childServiceName",
                "destInstance AS childServiceInstanceName",
                "destLayer AS childServiceLayer",
                "endpoint AS childEndpoint",
                *("latency AS rpcLatency", *_RELATED),
            ),
            "ofEndpoints",
            most_rows=most_rows,
        ),
    }


def broker_sources(paired: DataFrame, most_paired: int | None = None) -> dict[str, Rows]:
    """The rows of messages, as :func:`.links.link` pairs them, by event type.

    ``most_paired``: from how many spans at most, new and pending; each gives up to one row.
    ``transmissionLatency`` of a message that was consumed is the time from the start of the span
    that sent it to the start of the span that consumed it; null if the former is not known.
    """
    return {
        "MQAccess": Rows(
            paired, ("time", "broker AS name", *_BROKERED), "accessed", most_rows=most_paired
        ),
        "MQEndpointAccess": Rows(
            paired,
            ("time", "broker AS serviceName", "broker_endpoint AS endpoint", *_BROKERED),
            "accessed",
            most_rows=most_paired,
        ),
    }
