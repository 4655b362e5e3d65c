"""What the oracle makes of spans: rows and slow statements, against results worked by hand."""

from __future__ import annotations

from collections import Counter
from datetime import timedelta
from typing import Any

import pytest

from tests.oracle.catalog import Row
from tests.oracle.kit import NOON, b64, rows_of, span
from tests.oracle.spans import spans_to_events
from tests.oracle.topn import Runs, expected_topn, normalise

RELATION = (
    "sourceServiceName",
    "sourceLayer",
    "destServiceName",
    "destLayer",
    "endpoint",
    "detectPoint",
)


def test_a_server_span() -> None:
    """It gives a Service, its instance and its endpoint, and a relation from the user."""
    attributes = {"http.status_code": "503", "a": "1"}
    resource = {"host.name": "h"}
    spans = [span("1", "SERVER", attributes=attributes, resource=resource, status="ERROR", ms=1.9)]
    outcome = ("latency", "status", "httpResponseStatusCode", "type", "tags", "time")
    expected = (1, False, 503, "HTTP", ["a:1", "http.status_code:503"], NOON)
    assert rows_of(spans, "Service", "name", *outcome) == [("a", *expected)]
    assert rows_of(spans, "ServiceInstance", "name", *outcome) == [("h", *expected)]
    assert rows_of(spans, "Endpoint", "name", *outcome) == [("n1", *expected)]
    user = ("User", "UNDEFINED", "a", "GENERAL", "n1", "SERVER")
    assert rows_of(spans, "ServiceRelation", *RELATION) == [user]
    assert rows_of(spans, "EndpointRelation", "endpoint") == []


def test_a_clock_that_goes_back_gives_no_latency() -> None:
    """Latency is never below 0."""
    assert rows_of([span("1", "SERVER", ms=-5)], "Service", "latency") == [(0,)]


def test_a_span_of_no_service() -> None:
    """No service name, or a blank one, is unknown_service; its instance bears the name too."""
    spans = [span("1", "SERVER", None), span("2", "SERVER", " ")]
    names = rows_of(spans, "Service", "name", "serviceInstanceName")
    assert names == [("unknown_service", "unknown_service")] * 2


def test_a_call_is_seen_from_both_sides() -> None:
    """The client's span finds the child, the server's span the parent."""
    spans = [
        span("1", "CLIENT", attributes={"peer.service": "p"}),
        span("2", "SERVER", "b", parent_span_id="1", ms=4),
    ]
    assert rows_of(spans, "ServiceRelation", *RELATION, "latency") == [
        ("a", "GENERAL", "b", "GENERAL", "n2", "CLIENT", 10),
        ("a", "GENERAL", "b", "GENERAL", "n2", "SERVER", 4),
    ]
    endpoints = ("serviceName", "endpoint", "childServiceName", "childEndpoint", "rpcLatency")
    assert rows_of(spans, "EndpointRelation", *endpoints) == [("a", "n1", "b", "n2", 4)]


def test_every_serving_child_is_a_destination() -> None:
    """All that answer, whenever they started; those of other traces do not."""
    later = NOON + timedelta(microseconds=1)
    spans = [
        span("1", "PRODUCER", attributes={"peer.service": "p"}, ms=7),
        span("2", "SERVER", "a", parent_span_id="1"),
        span("3", "SERVER", "late", parent_span_id="1", time=later),
        span("4", "CONSUMER", "b", parent_span_id="1"),
        span("5", "CONSUMER", "b", parent_span_id="1"),
        span("6", "INTERNAL", "c", parent_span_id="1"),
        span("7", "SERVER", "other trace", parent_span_id="1", trace_id="u"),
    ]
    fields = ("detectPoint", "destServiceName", "endpoint", "latency", "time")
    relations = rows_of(spans, "ServiceRelation", *fields)
    assert [row for row in relations if row[0] == "CLIENT"] == [
        ("CLIENT", "a", "n2", 7, NOON),
        ("CLIENT", "late", "n3", 7, NOON),
        ("CLIENT", "b", "n4", 7, NOON),
        ("CLIENT", "b", "n5", 7, NOON),
    ]


def test_spans_delivered_twice() -> None:
    """A pair counts as often as its child was delivered, a call without one as often as itself."""
    call, alone = (span(span_id, "CLIENT", attributes={"peer.service": "p"}) for span_id in "13")
    child = span("2", "SERVER", "b", parent_span_id="1")
    spans = [call, child, alone, call, child, alone, span("4", "CLIENT"), span("4", "CLIENT")]
    relations = rows_of(spans, "ServiceRelation", "detectPoint", "destServiceName")
    assert Counter(relations) == {("CLIENT", "b"): 2, ("SERVER", "b"): 2, ("CLIENT", "p"): 2}
    assert spans_to_events(spans).counters["unresolved_destination"] == 2


@pytest.mark.parametrize(
    ("attributes", "name", "layer"),
    [
        ({"peer.service": "p", "server.address": "s"}, "p", "GENERAL"),
        ({"server.address": "s", "server.port": "1"}, "s:1", "UNDEFINED"),
        ({"net.peer.name": "s", "http.url": "https://t:1/"}, "s:1", "UNDEFINED"),
        ({"http.url": "https://u:p@s/x"}, "s:443", "UNDEFINED"),
        ({"network.peer.address": "::1", "network.peer.port": "2"}, "[::1]:2", "UNDEFINED"),
        ({"peer.service": "p", "db.system": "mysql"}, "p", "VIRTUAL_DATABASE"),
        ({"db.namespace": "n", "db.system": "mysql"}, "n", "VIRTUAL_DATABASE"),
        ({"messaging.system": "kafka"}, "kafka", "VIRTUAL_MQ"),
        ({"server.address": "s", "db.system.name": "redis"}, "s:6379", "VIRTUAL_CACHE"),
        ({"server.address": "s", "messaging.system": "kafka"}, "s:9092", "VIRTUAL_MQ"),
        ({"server.address": "s", "gen_ai.system": "x"}, "s", "VIRTUAL_GENAI"),
    ],
)
def test_destinations_by_attribute(attributes: dict[str, str], name: str, layer: str) -> None:
    """Without a child the attributes name the destination, and the kind of work its layer."""
    spans = [span("1", "CLIENT", attributes=attributes)]
    relation = ("a", "GENERAL", name, layer, "n1", "CLIENT")
    assert rows_of(spans, "ServiceRelation", *RELATION) == [relation]
    assert rows_of(spans, "ServiceInstanceRelation", "destServiceInstanceName") == [(name,)]


def test_what_cannot_be_resolved_is_counted() -> None:
    """A parent that never came, a call to nobody known; steps of a call or message are neither."""
    connecting = {"db.system": "postgresql"}
    spans = [
        span("1", "SERVER", parent_span_id="lost"),
        span("2", "CLIENT", parent_span_id="1"),
        span("3", "SERVER", parent_span_id="1"),
        span("4", "INTERNAL"),
        span("5", "CLIENT", name="pg-pool.connect", attributes=connecting),
        span("6", "CLIENT", attributes=connecting | {"db.operation": "connect"}),
        span("7", "CLIENT", attributes={"messaging.operation": "receive"}),
        span("8", "CONSUMER", attributes={"messaging.operation.type": "Poll"}),
        span("9", "PRODUCER", attributes={"messaging.operation.name": "create"}),
    ]
    events, counters = spans_to_events(spans)
    of_relations = {"ServiceRelation", "ServiceInstanceRelation"}  # "1" came from outside
    assert set(events) == {"Service", "ServiceInstance", "Endpoint"} | of_relations
    assert [row["sourceServiceName"] for row in events["ServiceRelation"]] == ["User"]
    assert counters == {"unresolved_parent": 1, "unresolved_destination": 1, "unresolved": 2}


@pytest.mark.parametrize(
    ("attributes", "name"),
    [
        ({"peer.service": "p", "server.address": "s"}, "p"),
        ({"server.address": "s", "server.port": "1", "db.name": "d"}, "s:1"),
        ({"server.address": "s"}, "s:3306"),
        ({"db.namespace": "n", "db.name": "d"}, "n"),
        ({"db.name": "d"}, "d"),
        ({}, "mysql"),
    ],
)
def test_database_names(attributes: dict[str, str], name: str) -> None:
    """A database is named by the peer, its address, its own name, or its system."""
    spans = [span("1", "CLIENT", attributes={"db.system": "mysql", **attributes})]
    assert rows_of(spans, "DatabaseAccess", "name", "latency", "status") == [(name, 10, True)]


@pytest.mark.parametrize(
    ("attributes", "operation"),
    [
        ({"db.operation.name": "get", "db.statement": "SET k"}, "Read"),
        ({"db.operation": "HSET"}, "Write"),
        ({"db.query.text": "  lrange l 0 1"}, "Read"),
        ({"db.statement": "PING"}, "Others"),
        ({}, "Write"),
    ],
)
def test_cache_operations(attributes: dict[str, str], operation: str) -> None:
    """The command's first word tells, in capitals; the span's name is the last resort."""
    cache = {"db.system": "redis", **attributes}
    spans = [span("1", "CLIENT", attributes=cache, name="del k")]
    assert rows_of(spans, "CacheAccess", "name", "operation") == [("redis", operation)]
    assert rows_of(spans, "DatabaseAccess") == []


def test_messaging() -> None:
    """The way of a message ends where its consumer starts; without its producer it is unknown."""
    queue = {"messaging.system": "kafka", "messaging.destination.name": "d"}
    later = NOON + timedelta(microseconds=7999)
    spans = [
        span("1", "PRODUCER", attributes=queue),
        span("2", "CONSUMER", attributes={"messaging.system": "kafka", "server.address": "s"}),
        span("3", "SERVER", attributes=queue),
        span("4", "CONSUMER", "b", parent_span_id="1", time=later, attributes=queue),
        span("5", "CONSUMER", "b", parent_span_id="4", time=later, attributes=queue),
        span("6", "CLIENT", attributes=queue | {"messaging.operation": "commit"}),
    ]
    access = ("operation", "transmissionLatency")
    names = [("kafka", "d"), ("s:9092", "n2"), ("kafka", "d"), ("kafka", "d")]
    values = [("Produce", 0), ("Consume", None), ("Consume", 7), ("Consume", None)]
    expected = [(*name, *value) for name, value in zip(names, values, strict=True)]
    assert rows_of(spans, "MQEndpointAccess", "serviceName", "endpoint", *access) == expected
    assert rows_of(spans, "MQAccess", "name", *access) == [(row[0], *row[2:]) for row in expected]


def test_a_message_is_a_call_to_its_broker() -> None:
    """For the sender; the consumer sees the sender."""
    queue = {"messaging.system": "kafka"}
    spans = [
        span("1", "PRODUCER", attributes=queue),
        span("2", "CONSUMER", "b", parent_span_id="1", attributes=queue),
    ]
    assert rows_of(spans, "ServiceRelation", *RELATION) == [
        ("a", "GENERAL", "kafka", "VIRTUAL_MQ", "n1", "CLIENT"),
        ("a", "GENERAL", "b", "GENERAL", "n2", "SERVER"),
    ]


def test_a_call_to_oneself() -> None:
    """It goes to the service itself, not to the address; nested servers are no call."""
    spans = [
        span("1", "CLIENT", attributes={"server.address": "127.0.0.1"}),
        span("2", "SERVER", parent_span_id="1"),
        span("3", "SERVER", parent_span_id="2"),
    ]
    assert rows_of(spans, "ServiceRelation", *RELATION) == [
        ("a", "GENERAL", "a", "GENERAL", "n2", "CLIENT"),
        ("a", "GENERAL", "a", "GENERAL", "n2", "SERVER"),
    ]


def test_gen_ai() -> None:
    """Provider and model by their newer keys first; tokens that are no number are none."""
    attributes = {
        "gen_ai.system": "old",
        "gen_ai.request.model": "m",
        "gen_ai.usage.input_tokens": "12",
        "gen_ai.usage.output_tokens": "many",
        "db.system": "mysql",
    }
    spans = [span("1", "CLIENT", attributes=attributes)]
    tokens = ("inputTokens", "outputTokens", "totalEstimatedCost")
    assert rows_of(spans, "GenAIProviderAccess", "name", *tokens) == [("old", 12, 0, 0)]
    model = ("serviceName", "modelName", "timeToFirstToken", *tokens)
    assert rows_of(spans, "GenAIModelAccess", *model) == [("old", "m", None, 12, 0, 0)]
    assert len(rows_of(spans, "DatabaseAccess", "name")) == 1


@pytest.mark.parametrize(
    ("keys", "kind"),
    [
        (["gen_ai.operation.name", "db.system", "messaging.system", "http.route"], "GenAI"),
        (["db.system.name", "messaging.system", "http.route"], "DATABASE"),
        (["messaging.system", "http.url"], "MQ"),
        (["url.full"], "HTTP"),
        (["rpc.system", "http.route"], "RPC"),
    ],
)
def test_request_types(keys: list[str], kind: str) -> None:
    """Of several kinds of work the first of GenAI, DATABASE, MQ, HTTP is the type."""
    spans = [span("1", "SERVER", attributes=dict.fromkeys(keys, "x"))]
    assert rows_of(spans, "Service", "type") == [(kind,)]


def query(span_id: str, ms: int, text: str = "select 1", system: str = "mysql", **more: Any) -> Row:
    """A client span that runs a statement."""
    attributes = {"db.system": system, "db.statement": text}
    return span(span_id, "CLIENT", ms=ms, attributes=attributes, **more)


def test_slow_is_strictly_above_the_threshold() -> None:
    """mysql has the default of 200, mongodb 100; each slow one is in two streams."""
    spans = [query("1", 200), query("2", 201), query("3", 101, system="mongodb")]
    topn = expected_topn(spans)
    minute = {key[0::3]: top for key, top in topn.items() if key[1] == "minute"}
    kept = {key: [record.latency for record in top.records] for key, top in minute.items()}
    assert kept == {
        ("top_n_database_statement", f"{b64('mysql')}.0"): [201],
        ("top_n_database_statement", f"{b64('mongodb')}.0"): [101],
        ("top_n_service_database_statement", "YQ==.1"): [201, 101],
    }


def test_cache_commands() -> None:
    """Reads and writes have streams of their own, others none; redis is slow above 10."""
    spans = [
        query("1", 11, "GET k", "redis"),
        query("2", 11, "SET k", "memcached"),
        query("3", 21, "SET k", "memcached"),
        query("4", 99, "PING", "redis"),
    ]
    topn = expected_topn(spans)
    assert {(key[0], key[3]) for key in topn} == {
        ("top_n_cache_read_command", f"{b64('redis')}.0"),
        ("top_n_cache_write_command", f"{b64('memcached')}.0"),
    }


def test_equal_latencies() -> None:
    """The earlier start wins, then the smaller trace id, then the smaller span id."""
    later = NOON + timedelta(seconds=1)
    spans = [
        query("1", 300, "late", time=later, trace_id="a"),
        query("3", 300, "second span", trace_id="b"),
        query("2", 300, "first span", trace_id="b"),
        query("4", 300, "first trace", trace_id="a"),
        query("5", 301, "slowest", time=later),
    ]
    top = expected_topn(spans, n=4)[
        "top_n_database_statement", "day", 20260301, f"{b64('mysql')}.0"
    ]
    texts = [record.statement for record in top.records]
    assert texts == ["slowest", "first trace", "first span", "second span"]


def test_runs_of_kept_statements() -> None:
    """All executions of a kept text count, slow or not; those of other texts do not."""
    spans = [
        query("1", 900, "select 1"),
        query("2", 300, "select  2"),
        query("3", 400, "delete"),
        query("4", 100, "select 3"),
    ]
    top = expected_topn(spans, n=1)[
        "top_n_database_statement", "hour", 2026030112, f"{b64('mysql')}.0"
    ]
    assert [record.latency for record in top.records] == [900]
    assert top.runs == {"select ?": Runs(3, 1300)}


def test_statements_are_cut() -> None:
    """A statement has at most 2000 characters; without one the span's name stands in."""
    spans = [query("1", 300, "ü" * 2001), query("2", 299, " ")]
    (top,) = (
        top
        for key, top in expected_topn(spans).items()
        if key[:2] == ("top_n_service_database_statement", "day")
    )
    assert [record.statement for record in top.records] == ["ü" * 2000, "n2"]


@pytest.mark.parametrize(
    ("statement", "text"),
    [
        ("SELECT  *\n FROM t2 where a = 12 ", "SELECT * FROM t2 where a = ?"),
        ("a = 'x''y' and b = '' and c=1.50", "a = ? and b = ? and c=?"),
        ("x IN (1, 'b',3) and y in ( ? )", "x IN (?) and y in (?)"),
        ("x in(1,2) and f(1, 2)", "x in (?) and f(?, ?)"),
        ("t_2024.c1 = -5", "t_2024.c1 = -?"),
    ],
)
def test_normalised_statements(statement: str, text: str) -> None:
    """Literals are question marks, lists of them one; letter case and names stay."""
    assert normalise(statement) == text
