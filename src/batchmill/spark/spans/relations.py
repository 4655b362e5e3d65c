"""Calls between services, as :func:`.links.link` finds them, made rows of the relation sources."""

from __future__ import annotations

from pyspark.sql import DataFrame

from batchmill.spark.l1.fusion import Rows

_MEASURED = ("status", "httpResponseStatusCode", "rpcStatusCode", "type", "detectPoint")


def relation_sources(relations: DataFrame) -> dict[str, Rows]:
    """The rows of each relation source, by the source's name.

    All have ``time`` (the start of the span that was measured: the serving one where the
    detect point is SERVER, else the calling one) and those of the catalog's columns that spans
    know.
    """
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
                *("endpoint", "latency", *_MEASURED),
            ),
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
                *("endpoint", "latency", *_MEASURED),
            ),
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
                *("latency AS rpcLatency", *_MEASURED),
            ),
            "ofEndpoints",
        ),
    }
