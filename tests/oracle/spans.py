"""Spans to the rows of sources, with every span at hand: joins see the whole of each trace.

A span is a row with trace_id, span_id, parent_span_id, name, kind, time, end_time, status, service,
resource and attributes; all values of the last two are strings.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import NamedTuple

from tests.oracle.catalog import Row, load_catalog
from tests.oracle.rows import parse_integer

HTTP_KEYS = (
    "http.request.method",
    "http.method",
    "http.route",
    "url.full",
    "http.url",
    "http.response.status_code",
    "http.status_code",
)
DATABASE_KEYS = ("db.system", "db.system.name")
GEN_AI_KEYS = (
    "gen_ai.provider.name",
    "gen_ai.system",
    "gen_ai.request.model",
    "gen_ai.response.model",
    "gen_ai.operation.name",
)
CACHES = ("redis", "memcached")

# fmt: off
READS = {
    "GET", "MGET", "HGET", "HGETALL", "HMGET", "LRANGE", "SMEMBERS", "EXISTS", "ZRANGE",
    "SCAN", "STRLEN", "TTL", "TYPE", "KEYS", "GETS",
}
WRITES = {
    "SET", "MSET", "SETEX", "SETNX", "HSET", "HMSET", "DEL", "INCR", "DECR", "INCRBY",
    "DECRBY", "EXPIRE", "LPUSH", "RPUSH", "LPOP", "RPOP", "SADD", "SREM", "ZADD", "ZREM",
    "APPEND", "PUT", "ADD", "REPLACE", "DELETE", "HDEL", "UNLINK", "GETSET",
}
# fmt: on

Attributes = Mapping[str, str]


def attributes_of(span: Row) -> dict[str, str]:
    """The span's own attributes."""
    return span["attributes"] or {}


def has_any(attributes: Attributes, *keys: str) -> bool:
    """Whether one of these keys is there, with whatever value."""
    return any(attributes.get(key) is not None for key in keys)


def first(attributes: Attributes, *keys: str) -> str | None:
    """The value of the first of these keys that is there and not blank."""
    for key in keys:
        value = attributes.get(key)
        if value is not None and value.strip():
            return value
    return None


def service_of(span: Row) -> str:
    """The service that a span belongs to."""
    name: str | None = span["service"]
    return name if name is not None and name.strip() else "unknown_service"


def instance_of(span: Row) -> str:
    """The service's instance that a span belongs to."""
    resource = span["resource"] or {}
    return first(resource, "service.instance.id", "host.name") or service_of(span)


def parent_of(span: Row) -> str | None:
    """The parent's span id; None of a root."""
    return span["parent_span_id"] or None


def latency_ms(span: Row) -> int:
    """Whole milliseconds from start to end; a clock that went back gives 0."""
    elapsed: timedelta = span["end_time"] - span["time"]
    return max(0, elapsed // timedelta(milliseconds=1))


def latency_micros(span: Row) -> int:
    """Microseconds from start to end."""
    elapsed: timedelta = span["end_time"] - span["time"]
    return max(0, elapsed // timedelta(microseconds=1))


def timed(span: Row) -> Row:
    """The two latencies of a span, and whether it did not fail."""
    return {
        "latency": latency_ms(span),
        "latencyMicros": latency_micros(span),
        "status": is_ok(span),
    }


def is_ok(span: Row) -> bool:
    """Whether the span did not fail: a status that is not set is no failure."""
    return bool(span["status"] != "ERROR")


def type_of(attributes: Attributes) -> str:
    """The type of request that the attributes tell of."""
    if has_any(attributes, *GEN_AI_KEYS):
        return "GenAI"
    if has_any(attributes, *DATABASE_KEYS):
        return "DATABASE"
    if has_any(attributes, "messaging.system"):
        return "MQ"
    return "HTTP" if has_any(attributes, *HTTP_KEYS) else "RPC"


def http_status(attributes: Attributes) -> int | None:
    """The HTTP status, by its newer key or its older one."""
    return parse_integer(first(attributes, "http.response.status_code", "http.status_code"), 32)


def database_system(attributes: Attributes) -> str | None:
    """The system of a database or a cache, in small letters."""
    system = first(attributes, *DATABASE_KEYS)
    return system.lower() if system is not None else None


def is_cache(attributes: Attributes) -> bool:
    """Whether the database is one that counts as a cache."""
    return database_system(attributes) in CACHES


def _address(attributes: Attributes) -> str | None:
    address, port = first(attributes, "server.address"), first(attributes, "server.port")
    return f"{address}:{port}" if address and port else address


def database_name(attributes: Attributes) -> str | None:
    """The name of the virtual service that a database or cache is."""
    return (
        first(attributes, "peer.service")
        or _address(attributes)
        or first(attributes, "db.namespace", "db.name", *DATABASE_KEYS)
    )


def queue_name(attributes: Attributes) -> str | None:
    """The name of the virtual service that a broker is."""
    system = first(attributes, "messaging.system")
    return first(attributes, "peer.service") or _address(attributes) or system


def cache_operation(span: Row) -> str:
    """Read, Write or Others, by the command."""
    text = first(
        attributes_of(span), "db.operation.name", "db.operation", "db.query.text", "db.statement"
    )
    words = (text or span["name"]).split()
    command = words[0].upper() if words else ""
    if command in READS:
        return "Read"
    return "Write" if command in WRITES else "Others"


def statement_of(span: Row) -> str:
    """The text of what was executed, uncut."""
    return first(attributes_of(span), "db.query.text", "db.statement") or span["name"]


ENTRY_KINDS = ("SERVER", "CONSUMER")
EXIT_KINDS = ("CLIENT", "PRODUCER")


class SpanEvents(NamedTuple):
    """Rows by source, and what could not be resolved: `unresolved` is the sum of the other two."""

    events: dict[str, list[Row]]
    counters: dict[str, int]


class _Side(NamedTuple):
    service: str
    layer: str
    instance: str


def spans_to_events(spans: Sequence[Row]) -> SpanEvents:
    """The rows that spans give, whatever order the spans are in."""
    by_id = {(span["trace_id"], span["span_id"]): span for span in spans}
    children: defaultdict[tuple[str, str], list[Row]] = defaultdict(list)
    for span in spans:
        parent = parent_of(span)
        if parent is not None and span["kind"] in ENTRY_KINDS:
            children[span["trace_id"], parent].append(span)

    events: defaultdict[str, list[Row]] = defaultdict(list)
    answered = set()
    for key, span in by_id.items():
        foreign = [child for child in children[key] if service_of(child) != service_of(span)]
        if span["kind"] in EXIT_KINDS and foreign:
            answered.add(key)
            for source, row in _callee_rows(span, foreign):
                events[source].append(_complete(source, span, row))

    counters = Counter({"unresolved_parent": 0, "unresolved_destination": 0})
    for span in spans:
        if span["kind"] in ENTRY_KINDS:
            rows = _entry_rows(span)
            parent = parent_of(span)
            caller = by_id.get((span["trace_id"], parent)) if parent is not None else None
            if parent is not None and caller is None:
                counters["unresolved_parent"] += 1
            else:
                rows += _caller_rows(span, caller)
        elif span["kind"] in EXIT_KINDS and (span["trace_id"], span["span_id"]) not in answered:
            rows = _peer_rows(span)
            counters["unresolved_destination"] += not rows
        else:
            rows = []
        for source, row in rows + _virtual_rows(span):
            events[source].append(_complete(source, span, row))
    return SpanEvents(dict(events), {**counters, "unresolved": counters.total()})


_Rows = list[tuple[str, Row]]


def _complete(source: str, span: Row, row: Row) -> Row:
    """The row with all of its source's fields, null where the span says nothing."""
    fields = load_catalog().fields[source]
    if unknown := row.keys() - fields.keys():
        raise KeyError(f"{source} has no {', '.join(sorted(unknown))}")
    return {"time": span["time"], **dict.fromkeys(fields), **row}


def _outcome(span: Row) -> Row:
    attributes = attributes_of(span)
    return {
        **timed(span),
        "httpResponseStatusCode": http_status(attributes),
        "rpcStatusCode": attributes.get("rpc.grpc.status_code"),
        "type": type_of(attributes),
    }


def _entry_rows(span: Row) -> _Rows:
    attributes = attributes_of(span)
    service, instance, endpoint = service_of(span), instance_of(span), span["name"]
    shared = {
        **_outcome(span),
        "tags": [f"{key}:{attributes[key]}" for key in sorted(attributes)],
        "tag": dict(attributes),
    }
    of_service = {"serviceName": service, "serviceLayer": "GENERAL"}
    at_instance = {"serviceInstanceName": instance}
    return [
        (
            "Service",
            {
                "name": service,
                "layer": "GENERAL",
                "endpointName": endpoint,
                **at_instance,
                **shared,
            },
        ),
        ("ServiceInstance", {"name": instance, "endpointName": endpoint, **of_service, **shared}),
        ("Endpoint", {"name": endpoint, **of_service, **at_instance, **shared}),
    ]


def _own_side(span: Row) -> _Side:
    return _Side(service_of(span), "GENERAL", instance_of(span))


def _relations(span: Row, source: _Side, dest: _Side, endpoint: str, detect_point: str) -> _Rows:
    shared = {
        "sourceServiceName": source.service,
        "sourceServiceInstanceName": source.instance,
        "destServiceName": dest.service,
        "destServiceInstanceName": dest.instance,
        "endpoint": endpoint,
        "detectPoint": detect_point,
        **_outcome(span),
    }
    layers = {"sourceLayer": source.layer, "destLayer": dest.layer}
    service_layers = {"sourceServiceLayer": source.layer, "destServiceLayer": dest.layer}
    return [
        ("ServiceRelation", {**shared, **layers}),
        ("ServiceInstanceRelation", {**shared, **service_layers}),
    ]


def _caller_rows(span: Row, caller: Row | None) -> _Rows:
    """The relations of a span that was called: by a user, or by another service."""
    callee = _own_side(span)
    if caller is None:
        return _relations(span, _Side("User", "UNDEFINED", "User"), callee, span["name"], "SERVER")
    source = _own_side(caller)
    if source.service == callee.service:
        return []
    outcome = _outcome(span)
    endpoints = {
        "serviceName": source.service,
        "serviceLayer": source.layer,
        "serviceInstanceName": source.instance,
        "endpoint": caller["name"],
        "childServiceName": callee.service,
        "childServiceLayer": callee.layer,
        "childServiceInstanceName": callee.instance,
        "childEndpoint": span["name"],
        "rpcLatency": outcome.pop("latency"),
        "detectPoint": "SERVER",
        **outcome,
    }
    relations = _relations(span, source, callee, span["name"], "SERVER")
    return [*relations, ("EndpointRelation", endpoints)]


def _callee_rows(span: Row, children: Sequence[Row]) -> _Rows:
    """The relations of a span that calls to all those who answered, as its own side saw them."""
    return [
        relation
        for child in children
        for relation in _relations(span, _own_side(span), _own_side(child), child["name"], "CLIENT")
    ]


def _peer_rows(span: Row) -> _Rows:
    """The relation of a call that nobody answered, to whom it says that it calls."""
    attributes = attributes_of(span)
    for key, layer in (("peer.service", "GENERAL"), ("server.address", "UNDEFINED")):
        name = first(attributes, key)
        if name is not None:
            dest = _Side(name, _virtual_layer(attributes) or layer, name)
            return _relations(span, _own_side(span), dest, span["name"], "CLIENT")
    return []


def _virtual_layer(attributes: dict[str, str]) -> str | None:
    match type_of(attributes):
        case "GenAI":
            return "VIRTUAL_GENAI"
        case "DATABASE":
            return "VIRTUAL_CACHE" if is_cache(attributes) else "VIRTUAL_DATABASE"
        case "MQ":
            return "VIRTUAL_MQ"
    return None


def _virtual_rows(span: Row) -> _Rows:
    """What the span says of the database, cache, queue or model that it used."""
    attributes, kind = attributes_of(span), span["kind"]
    rows: _Rows = []
    outcome = timed(span)
    if kind == "CLIENT" and database_system(attributes) is not None:
        name = {"name": database_name(attributes)}
        if is_cache(attributes):
            rows.append(("CacheAccess", {**name, **outcome, "operation": cache_operation(span)}))
        else:
            rows.append(("DatabaseAccess", {**name, **outcome}))
    if kind in (*EXIT_KINDS, "CONSUMER") and has_any(attributes, "messaging.system"):
        rows += _messaging_rows(span)
    if kind == "CLIENT" and has_any(attributes, *GEN_AI_KEYS):
        rows += _gen_ai_rows(attributes, outcome)
    return rows


def _messaging_rows(span: Row) -> _Rows:
    attributes, consumed = attributes_of(span), span["kind"] == "CONSUMER"
    name = queue_name(attributes)
    access = {
        "operation": "Consume" if consumed else "Produce",
        "transmissionLatency": latency_ms(span) if consumed else 0,
        "status": is_ok(span),
    }
    endpoint = first(attributes, "messaging.destination.name") or span["name"]
    return [
        ("MQAccess", {"name": name, **access}),
        ("MQEndpointAccess", {"serviceName": name, "endpoint": endpoint, **access}),
    ]


def _gen_ai_rows(attributes: dict[str, str], outcome: Row) -> _Rows:
    provider = first(attributes, "gen_ai.provider.name", "gen_ai.system") or "unknown"
    model = first(attributes, "gen_ai.response.model", "gen_ai.request.model") or "unknown"
    used = {
        "inputTokens": parse_integer(attributes.get("gen_ai.usage.input_tokens")) or 0,
        "outputTokens": parse_integer(attributes.get("gen_ai.usage.output_tokens")) or 0,
        "totalEstimatedCost": 0,
        **outcome,
    }
    return [
        ("GenAIProviderAccess", {"name": provider, **used}),
        ("GenAIModelAccess", {"serviceName": provider, "modelName": model, **used}),
    ]
