"""Spans to rows of event types, each by itself."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pytest

from batchmill.aggregate import Aggregator, Deltas, to_arrow
from batchmill.oal import core_script, load
from batchmill.sources import builtin_catalog
from batchmill.spans.columns import compact
from batchmill.spans.sources import broker_rows, direct_rows, relation_rows
from tests.kit.spark import EPOCH, in_order, span
from tests.spans.kit import compacted, encoded, rows_of, segment, sorted_rows

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


DIRECT = (
    *("Service", "ServiceInstance", "Endpoint", "DatabaseAccess", "CacheAccess"),
    *("GenAIProviderAccess", "GenAIModelAccess"),
)
BROKERED = ("MQAccess", "MQEndpointAccess")
RELATED = ("ServiceRelation", "ServiceInstanceRelation", "EndpointRelation")


def accessed(spans: pa.Table) -> pa.Table:
    """The messages of compacted spans, none of which has a parent."""
    messages = spans.filter(pc.is_valid(spans["broker"]))
    return messages.append_column("on_the_way", pa.nulls(len(messages), pa.int64()))


def relations(count: int) -> pa.Table:
    """Calls as links finds them; every other one is of endpoints, the others from elsewhere."""
    texts = (
        *("sourceService", "sourceInstance", "sourceLayer", "destService", "destInstance"),
        *("destLayer", "endpoint", "type", "rpcStatusCode", "detectPoint"),
    )
    whole = {
        "latency": pa.int32(),
        "latencyMicros": pa.int64(),
        "httpResponseStatusCode": pa.int32(),
    }
    numbers = list(range(count))
    of_endpoints = [number % 2 == 0 for number in numbers]
    columns = {name: pa.array([f"{name} {number}" for number in numbers]) for name in texts}
    endpoints = [f"caller {number}" if number % 2 == 0 else None for number in numbers]
    return pa.table(
        {
            "time": pa.array([EPOCH] * count, pa.timestamp("us", tz="UTC")),
            **{name: column.dictionary_encode() for name, column in columns.items()},
            **{name: pa.array(numbers, kind) for name, kind in whole.items()},
            "status": pa.array([True] * count),
            "sourceEndpoint": pa.array(endpoints, pa.string()).dictionary_encode(),
            "ofEndpoints": pa.array(of_endpoints),
        }
    )


@pytest.mark.parametrize("chunks", [0, 1, 3])
def test_each_span_gives_the_rows_of_its_kind(chunks: int) -> None:
    """Every rule for spans by themselves, each with the rows it must give and no others."""
    given = segment(row for row, _ in CASES)
    spans = compact(encoded(given, chunks) if chunks else given)
    actual = direct_rows(spans, DIRECT) | broker_rows(accessed(spans), BROKERED)
    expected: Expected = {}
    for case, rows in CASES:
        for source, source_rows in rows.items():
            for row in source_rows:
                tagged = row | (_tags(case) if "tags" in row else {})
                expected.setdefault(source, []).append(tagged)
    assert actual.keys() == expected.keys()
    for source, table in actual.items():
        assert sorted_rows(table) == in_order(expected[source]), source


def _tags(case: dict[str, Any]) -> dict[str, Any]:
    attributes = case["attributes"]
    return {"tag": attributes, "tags": [f"{key}:{attributes[key]}" for key in sorted(attributes)]}


def test_only_event_types_that_are_wanted_and_have_rows() -> None:
    """Types without a row are left out, so that nobody aggregates nothing."""
    spans = compacted([span("served"), span("query", "CLIENT", attributes={"db.system": "pg"})])
    assert direct_rows(spans, DIRECT).keys() == {*DIRECT[:3], "DatabaseAccess"}
    assert direct_rows(spans, ("Endpoint", "CacheAccess")).keys() == {"Endpoint"}
    assert direct_rows(spans, ()) == direct_rows(compacted([]), DIRECT) == {}
    assert broker_rows(accessed(spans), BROKERED) == {}
    assert relation_rows(relations(0), RELATED) == {}
    assert relation_rows(relations(1), ("ServiceRelation",)).keys() == {"ServiceRelation"}


def test_relations_of_endpoints_have_both_ends() -> None:
    """All relations are of services and instances, and those with two endpoints also of these."""
    rows = relation_rows(relations(4), RELATED)
    assert {source: table.num_rows for source, table in rows.items()} == {
        "ServiceRelation": 4,
        "ServiceInstanceRelation": 4,
        "EndpointRelation": 2,
    }
    last = rows_of(rows["EndpointRelation"])[-1]
    assert (last["serviceName"], last["endpoint"]) == ("sourceService 2", "caller 2")
    assert (last["childServiceName"], last["childEndpoint"]) == ("destService 2", "endpoint 2")
    assert last["rpcLatency"] == 2


def test_a_message_takes_its_time_only_if_it_is_consumed() -> None:
    """A message that was sent has no way behind it yet."""
    kinds = ("PRODUCER", "CONSUMER", "CONSUMER")
    spans = compacted(
        span(str(number), kind, attributes=QUEUE) for number, kind in enumerate(kinds)
    )
    messages = spans.append_column("on_the_way", pa.array([7, 8, None], pa.int64()))
    rows = rows_of(broker_rows(messages, BROKERED)["MQAccess"])
    assert [(row["operation"], row["transmissionLatency"]) for row in rows] == [
        *(("Produce", 0), ("Consume", 8)),
        ("Consume", None),
    ]


def all_rows() -> dict[str, pa.Table]:
    """Rows of every event type that spans give."""
    spans = compacted(case for case, _ in CASES)
    rows = direct_rows(spans, DIRECT) | broker_rows(accessed(spans), BROKERED)
    return rows | relation_rows(relations(4), RELATED)


def test_columns_are_the_catalogs() -> None:
    """What spans give has the columns and types of the catalog, and names its entity."""
    rows = all_rows()
    assert rows.keys() == {*DIRECT, *BROKERED, *RELATED}
    for name, table in rows.items():
        source = builtin_catalog().source(name)
        types = {field.name: field.type for field in table.schema}
        assert types.pop("time") == pa.timestamp("us", tz="UTC")
        for column, kind in types.items():
            wanted = source.fields[column].type.arrow_type()
            text = pa.dictionary(pa.int32(), pa.string())
            assert kind == (text if wanted == pa.string() else wanted), f"{name}.{column}"
        roles = {role for role in source.entity.roles.values() if not role.startswith("=")}
        assert roles <= types.keys(), name


def test_rows_are_what_the_kernel_aggregates() -> None:
    """With the core metrics, and the same whether texts are dictionaries or not."""
    metrics = load(core_script().read_text("utf-8"))
    rows = all_rows()
    of_source = metrics.by_source()
    assert rows.keys() <= of_source.keys()
    for source, table in rows.items():
        aggregator = Aggregator(metrics.catalog.source(source), of_source[source])
        texts = [
            column.cast(pa.string()) if pa.types.is_dictionary(column.type) else column
            for column in table.columns
        ]
        made = aggregator.make(table)
        again = aggregator.make(pa.table(texts, names=table.column_names))
        assert made.invalid == again.invalid
        assert _states(aggregator, made.deltas) == _states(aggregator, again.deltas)
        assert made.deltas.rows.sum() + made.invalid.total() == table.num_rows


def _states(aggregator: Aggregator, deltas: Deltas) -> list[dict[str, Any]]:
    return in_order(to_arrow(deltas, aggregator.plan).to_pylist())
