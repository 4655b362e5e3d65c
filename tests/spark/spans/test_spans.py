"""Spans to rows of sources, each by itself; entity ids in Spark as in Python."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from batchmill.sources import builtin_catalog, service_id
from tests.kit.spark import EPOCH, compact_frame, frame_of, in_order, rows_of, span

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytest.importorskip("pyspark")

SERVED = {
    "time": EPOCH,
    "latency": 5,
    "latencyMicros": 5000,
    "status": True,
    "httpResponseStatusCode": None,
    "rpcStatusCode": None,
    "type": "RPC",
    "tags": [],
    "tag": {},
}

Expected = dict[str, list[dict[str, Any]]]


def served(service: str, instance: str, endpoint: str | None, **changes: Any) -> Expected:
    """The three rows of a span that serves."""
    common = SERVED | changes
    of = {"serviceName": service, "serviceLayer": "GENERAL"}
    return {
        "Service": [
            {"name": service, "layer": "GENERAL", "serviceInstanceName": instance}
            | {"endpointName": endpoint}
            | common
        ],
        "ServiceInstance": [{"name": instance, "endpointName": endpoint} | of | common],
        "Endpoint": [{"name": endpoint, "serviceInstanceName": instance} | of | common],
    }


TIMED = {"time": EPOCH, "latency": 5, "latencyMicros": 5000, "status": True}


def database(name: str, **changes: Any) -> Expected:
    """The row of a call to a database."""
    return {"DatabaseAccess": [TIMED | {"name": name} | changes]}


def cache(name: str, operation: str) -> Expected:
    """The row of a call to a cache."""
    return {"CacheAccess": [TIMED | {"name": name, "operation": operation}]}


def broker(name: str, endpoint: str, operation: str, latency: int | None) -> Expected:
    """The two rows of a message."""
    row = {"time": EPOCH, "operation": operation, "transmissionLatency": latency, "status": True}
    return {
        "MQAccess": [{"name": name} | row],
        "MQEndpointAccess": [{"serviceName": name, "endpoint": endpoint} | row],
    }


def model(provider: str, name: str, tokens: tuple[int, int]) -> Expected:
    """The two rows of a call to a model."""
    row = TIMED | {"totalEstimatedCost": 0}
    row |= {"inputTokens": tokens[0], "outputTokens": tokens[1]}
    return {
        "GenAIProviderAccess": [{"name": provider} | row],
        "GenAIModelAccess": [{"serviceName": provider, "modelName": name} | row],
    }


HTTP = {"http.response.status_code": "404", "http.route": "/a", "a.b": "1", "a": "2"}
OLD_HTTP = {"http.status_code": "500"}
NO_CODE = {"http.response.status_code": "4.5", "http.status_code": "200"}
GRPC = {"rpc.grpc.status_code": "13"}
BLANK = {"http.method": " \t", "db.system": ""}
MIXED = {"http.method": "GET", "messaging.system": "kafka", "db.system": "mysql"}
AI_TOO = MIXED | {"gen_ai.operation.name": "chat"}
QUEUE = {"messaging.system": "kafka", "messaging.destination.name": "orders"}
HOST = {"server.address": "db1", "server.port": "5432"}

CASES: list[tuple[dict[str, Any], Expected]] = [
    (span("plain"), served("shop", "shop", "op plain")),
    (
        span("names", service=" \u2003", resource={"host.name": "h", "service.instance.id": " "}),
        served("unknown_service", "h", "op names"),
    ),
    (
        span(
            "id", service=None, resource={"host.name": "h", "service.instance.id": "i"}, name=None
        ),
        served("unknown_service", "i", None),
    ),
    (
        span("floor", us=1999),
        served("shop", "shop", "op floor", latency=1, latencyMicros=1999),
    ),
    (span("fast", us=120), served("shop", "shop", "op fast", latency=0, latencyMicros=120)),
    (
        span("backwards", us=-1),
        served("shop", "shop", "op backwards", latency=0, latencyMicros=0),
    ),
    (
        span("long", us=2**52),
        served("shop", "shop", "op long", latency=2**31 - 1, latencyMicros=2**31 * 1000 - 1),
    ),
    (span("failed", status="ERROR"), served("shop", "shop", "op failed", status=False)),
    (span("statusless", status=None), served("shop", "shop", "op statusless")),
    (
        span("http", attributes=HTTP),
        served("shop", "shop", "op http", type="HTTP", httpResponseStatusCode=404),
    ),
    (
        span("old", attributes=OLD_HTTP),
        served("shop", "shop", "op old", type="HTTP", httpResponseStatusCode=500),
    ),
    (span("odd", attributes=NO_CODE), served("shop", "shop", "op odd", type="HTTP")),
    (span("grpc", attributes=GRPC), served("shop", "shop", "op grpc", rpcStatusCode="13")),
    (span("blank", attributes=BLANK), served("shop", "shop", "op blank")),
    # A server that has database attributes is no database access.
    (span("mixed", attributes=MIXED), served("shop", "shop", "op mixed", type="DATABASE")),
    (span("ai too", attributes=AI_TOO), served("shop", "shop", "op ai too", type="GenAI")),
    (
        span("consumer", "CONSUMER", attributes=QUEUE),
        served("shop", "shop", "op consumer", type="MQ")
        | broker("kafka", "orders", "Consume", None),
    ),
    (span("received", "CONSUMER", attributes=QUEUE | {"messaging.operation": "receive"}), {}),
    (span("polled", "CLIENT", attributes=QUEUE | {"messaging.operation.type": "POLL"}), {}),
    (span("made", "PRODUCER", attributes=QUEUE | {"messaging.operation.type": "create"}), {}),
    (span("committed", "CLIENT", attributes=QUEUE | {"messaging.operation.name": "commit"}), {}),
    (
        span(
            "processed",
            "CONSUMER",
            attributes={"messaging.system": "kafka", "messaging.destination": "old"}
            | {"messaging.operation.type": "process", "messaging.operation": "receive"},
        ),
        served("shop", "shop", "op processed", type="MQ") | broker("kafka", "old", "Consume", None),
    ),
    (
        span("server of a queue", attributes=QUEUE),
        served("shop", "shop", "op server of a queue", type="MQ"),
    ),
    (
        span("producer", "PRODUCER", attributes={"messaging.system": "kafka", "peer.service": "k"}),
        broker("k", "op producer", "Produce", 0),
    ),
    (span("sent", "CLIENT", attributes=QUEUE | HOST), broker("db1:5432", "orders", "Produce", 0)),
    (span("db1", "CLIENT", attributes={"db.system": "pg"} | HOST), database("db1:5432")),
    (
        span("db2", "CLIENT", attributes={"db.system.name": "pg", "server.address": "h"}, us=7000),
        database("h", latency=7, latencyMicros=7000),
    ),
    (
        span("db3", "CLIENT", attributes={"db.system": "pg", "db.name": "n", "server.port": "1"}),
        database("n"),
    ),
    (
        span("db4", "CLIENT", attributes={"db.system": "pg", "db.namespace": "ns", "db.name": "n"}),
        database("ns"),
    ),
    (
        span(
            "db5", "CLIENT", attributes={"db.system": "x", "db.system.name": "pg"}, status="ERROR"
        ),
        database("pg", status=False),
    ),
    (
        span("db6", "CLIENT", attributes={"db.system": "pg", "peer.service": "p"} | HOST),
        database("p"),
    ),
    (span("db7", "PRODUCER", attributes={"db.system": "pg"}), {}),
    (span("pool", "CLIENT", name="pg-pool.connect", attributes={"db.system": "pg"} | HOST), {}),
    (span("get", "CLIENT", name="Hikari.getConnection", attributes={"db.system": "pg"}), {}),
    (span("cache", "CLIENT", attributes={"db.system": "redis", "db.statement": "connect"}), {}),
    (
        span(
            "of a pool",
            "CLIENT",
            name="SELECT pool",
            attributes={"db.system": "pg", "db.operation": "SELECT"},
        ),
        database("pg"),
    ),
    (span("carpool", "CLIENT", attributes={"db.system": "pg"}, name="carpool"), database("pg")),
    (
        span("url", "CLIENT", attributes={"db.system": "es", "url.full": "https://u:p@[::1]/_q"}),
        database("[::1]:443"),
    ),
    (span("internal", "INTERNAL", attributes=AI_TOO), {}),
    (span("odd kind", "?", attributes=AI_TOO), {}),
    (span("kindless", attributes=AI_TOO) | {"kind": None}, {}),
    (
        span("get", "CLIENT", attributes={"db.system": "redis", "db.operation.name": "get x"}),
        cache("redis", "Read"),
    ),
    (
        span("set", "CLIENT", attributes={"db.system": "redis", "db.operation": "SET"} | HOST),
        cache("db1:5432", "Write"),
    ),
    (
        span("text", "CLIENT", attributes={"db.system": "memcached", "db.statement": " \n gets k"}),
        cache("memcached", "Read"),
    ),
    (
        span("named", "CLIENT", name="hdel h", attributes={"db.system": "redis"}),
        cache("redis", "Write"),
    ),
    (
        span("other", "CLIENT", attributes={"db.system": "redis", "db.query.text": "GETX"}),
        cache("redis", "Others"),
    ),
    (
        span(
            "chat",
            "CLIENT",
            attributes={
                "gen_ai.system": "old",
                "gen_ai.provider.name": "openai",
                "gen_ai.request.model": "asked",
                "gen_ai.response.model": "given",
                "gen_ai.usage.input_tokens": "12",
                "gen_ai.usage.output_tokens": "many",
            },
        ),
        model("openai", "given", (12, 0)),
    ),
    (
        span("embed", "CLIENT", attributes={"gen_ai.operation.name": "embed"}),
        model("unknown", "unknown", (0, 0)),
    ),
    (
        span("ai server", "SERVER", attributes={"gen_ai.system": "s"}),
        served("shop", "shop", "op ai server", type="GenAI"),
    ),
]


@pytest.mark.parametrize("ansi", ["false", "true"])
def test_each_span_gives_the_rows_of_its_kind(spark: SparkSession, ansi: str) -> None:
    """Every rule for spans by themselves, each with the rows it must give and no others."""
    from batchmill.spark.spans.links import link
    from batchmill.spark.spans.sources import broker_sources, direct_sources

    before = spark.conf.get("spark.sql.ansi.enabled")
    spark.conf.set("spark.sql.ansi.enabled", ansi)
    try:
        spans = compact_frame(spark, [given for given, _ in CASES])
        frames = direct_sources(spans) | broker_sources(link(spans, None, 1).paired)
        actual = {source: rows_of(frame_of(rows)) for source, rows in frames.items()}
    finally:
        spark.conf.set("spark.sql.ansi.enabled", str(before))
    expected: Expected = {source: [] for source in actual}
    for given, rows in CASES:
        for source, source_rows in rows.items():
            for row in source_rows:
                expected[source].append(row | (_tags(given) if "tags" in row else {}))
    for source, frame_rows in actual.items():
        assert frame_rows == in_order(expected[source]), source


def _tags(given: dict[str, Any]) -> dict[str, Any]:
    attributes = given["attributes"]
    return {"tag": attributes, "tags": [f"{key}:{attributes[key]}" for key in sorted(attributes)]}


def test_rows_know_how_many_they_are_at_most(spark: SparkSession) -> None:
    """Of single spans exactly: those that wait from earlier batches do not count."""
    from batchmill.spark.spans.links import SUMMARY_SCHEMA, link
    from batchmill.spark.spans.sources import (
        broker_sources,
        count_spans,
        direct_sources,
        relation_sources,
    )

    spans = compact_frame(spark, [given for given, _ in CASES])
    for source, rows in direct_sources(spans, count_spans(spans)).items():
        assert rows.most_rows == frame_of(rows).count() > 0, source
    known = link(spans, None, 1).summary.collect()
    later = link(spans, spark.createDataFrame(known, SUMMARY_SCHEMA), 2, 1)
    most = len(CASES) + len(known)
    for source, rows in relation_sources(later.relations, most).items():
        assert rows.most_rows == 2 * most >= frame_of(rows).count(), source
    for source, rows in broker_sources(later.paired, most).items():
        assert rows.most_rows == most >= frame_of(rows).count() > 0, source


def test_columns_are_the_catalogs(spark: SparkSession) -> None:
    """What spans give has the columns and types of the catalog, and names its entity."""
    from batchmill.spark.input.reader import spark_type
    from batchmill.spark.spans.links import link
    from batchmill.spark.spans.sources import broker_sources, direct_sources, relation_sources

    spans = compact_frame(spark, [])
    links = link(spans, None, 1)
    frames = direct_sources(spans) | relation_sources(links.relations)
    frames |= broker_sources(links.paired)
    for name, rows in frames.items():
        frame = frame_of(rows)
        assert rows.names == set(frame.columns)
        source = builtin_catalog().source(name)
        types = {field.name: field.dataType.simpleString() for field in frame.schema}
        assert types.pop("time") == "timestamp"
        wanted = {column: spark_type(source.fields[column].type).simpleString() for column in types}
        assert types == wanted, name
        roles = {role for role in source.entity.roles.values() if not role.startswith("=")}
        assert roles <= types.keys(), name


NAMES = [
    *(None, "", " \t", "\u00a0\u3000", "shop", "a" * 70, "b" * 71, "ü" * 149 + "xyz", "😀" * 80),
    *("it's", "back\\slash", "`", "new\nline", " x "),
]


@pytest.mark.parametrize("chunked", ["false", "true"])
def test_service_ids_are_those_that_python_makes(spark: SparkSession, chunked: str) -> None:
    """The SQL of an id gives the same as Python, for awkward names."""
    from batchmill.spark.spans.topn import service_id as sql_id

    frame = spark.createDataFrame([(name,) for name in NAMES], "name string")
    key = "spark.sql.chunkBase64String.enabled"
    before = spark.conf.get(key)
    spark.conf.set(key, chunked)
    try:
        rows = frame.selectExpr(sql_id("name", "true"), sql_id("name", "false")).collect()
    finally:
        spark.conf.set(key, str(before))
    for name, ids in zip(NAMES, rows, strict=True):
        assert list(ids) == [service_id(name, normal=normal) for normal in (True, False)]
