"""Spans to the rows of sources, with every span at hand: joins see the whole of each trace.

A span is a row with trace_id, span_id, parent_span_id, name, kind, time, end_time, status, service,
resource and attributes; all values of the last two are strings.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Collection, Mapping, Sequence
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
DATABASE_KEYS = ("db.system.name", "db.system")
GEN_AI_KEYS = (
    "gen_ai.provider.name",
    "gen_ai.system",
    "gen_ai.request.model",
    "gen_ai.response.model",
    "gen_ai.operation.name",
)
RPC_STATUS_LIMIT = 64
CACHES = ("redis", "memcached")
PORTS = dict(
    re.findall(
        r"(\S+)=(\d+)",
        "postgresql=5432 cockroachdb=26257 mysql=3306 mariadb=3306 microsoft.sql_server=1433 "
        "mssql=1433 oracle.db=1521 oracle=1521 ibm.db2=50000 db2=50000 mongodb=27017 "
        "cassandra=9042 elasticsearch=9200 opensearch=9200 clickhouse=8123 redis=6379 "
        "memcached=11211 kafka=9092 rabbitmq=5672 activemq=61616 nats=4222 pulsar=6650",
    )
)
"""Where a system listens if nobody says otherwise."""
PEER_KEYS = ("service.peer.name", "peer.service")
URL_KEYS = ("url.full", "http.url")
OPERATION_KEYS = ("db.operation.name", "db.operation")
STATEMENT_KEYS = ("db.query.text", "db.statement")
MESSAGE_OPERATION_KEYS = (
    "messaging.operation.type",
    "messaging.operation",
    "messaging.operation.name",
)

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
    """Whether one of these keys is there and not blank."""
    return first(attributes, *keys) is not None


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
    if has_any(attributes, "rpc.system.name", "rpc.system"):
        return "RPC"
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


def _url(attributes: Attributes) -> tuple[str | None, str | None]:
    """Host and port of the URL that was called; the port is that of the scheme if it has none."""
    for key in URL_KEYS:
        scheme, separator, rest = (first(attributes, key) or "").partition("://")
        if not separator or not re.fullmatch(r"[A-Za-z][A-Za-z0-9+.-]*", scheme):
            continue
        authority = min((rest.split(end)[0] for end in "/?#"), key=len).rpartition("@")[2]
        if authority.startswith("["):
            address, _, port = authority.partition("]")
            host, port = f"{address}]", port.removeprefix(":")
        else:
            host, _, port = authority.partition(":")
        if host:
            return host, port or {"http": "80", "https": "443"}.get(scheme.lower())
    return None, None


def address_of(attributes: Attributes) -> str | None:
    """The host that was called, with its port where that is known."""
    url_host, url_port = _url(attributes)
    known = [
        (first(attributes, "server.address"), "server.port"),
        (first(attributes, "net.peer.name"), "net.peer.port"),
        (url_host, ""),
        (first(attributes, "net.sock.peer.name"), "net.sock.peer.port"),
        (first(attributes, "network.peer.address"), "network.peer.port"),
        (first(attributes, "net.sock.peer.addr"), "net.sock.peer.port"),
        (first(attributes, "net.peer.ip"), "net.peer.port"),
    ]
    for host, port_key in known:
        if host is None:
            continue
        port = (first(attributes, port_key) if port_key else None) or url_port
        if port is None and port_key:
            system = first(attributes, *DATABASE_KEYS) or first(attributes, "messaging.system")
            port = PORTS.get((system or "").lower())
        if port is None:
            return host
        is_ipv6 = host.count(":") > 1 and not host.startswith("[")
        return f"[{host}]:{port}" if is_ipv6 else f"{host}:{port}"
    return None


def destination_of(attributes: Attributes) -> str | None:
    """The one name of the other end of a call, or of the broker of a message."""
    return (
        first(attributes, *PEER_KEYS)
        or address_of(attributes)
        or first(attributes, "db.namespace", "db.name")
        or first(attributes, *DATABASE_KEYS)
        or first(attributes, "messaging.system")
        or first(attributes, "gen_ai.provider.name", "gen_ai.system")
    )


def message_operation(attributes: Attributes) -> str | None:
    """What was done with a message, in small letters."""
    operation = first(attributes, *MESSAGE_OPERATION_KEYS)
    return operation.lower() if operation is not None else None


def is_connecting(span: Row) -> bool:
    """Whether a client's span of a database only gets it a connection."""
    attributes = attributes_of(span)
    if span["kind"] != "CLIENT" or not has_any(attributes, *DATABASE_KEYS):
        return False
    text = first(attributes, *OPERATION_KEYS, *STATEMENT_KEYS)
    if text is not None:
        return text.strip(" ").upper() == "CONNECT"
    words = set(re.split(r"\W+", (span["name"] or "").lower()))
    connecting = {f"{head}connect{tail}" for head in ("", "re", "get") for tail in ("", "ion")}
    return not words.isdisjoint(connecting | {"pool"})


def kind_of(span: Row) -> str:
    """The span's kind, INTERNAL if it is only a step of a call or of a message."""
    kind: str = span["kind"] or "INTERNAL"
    if kind in ("CLIENT", "PRODUCER", "CONSUMER") and message_operation(attributes_of(span)) in (
        *("create", "receive", "poll", "settle"),
    ):
        return "INTERNAL"
    return "INTERNAL" if is_connecting(span) else kind


def is_database_call(span: Row) -> bool:
    """Whether the span is a call to a database or a cache."""
    return kind_of(span) == "CLIENT" and has_any(attributes_of(span), *DATABASE_KEYS)


def is_message(span: Row) -> bool:
    """Whether the span sends a message or processes one."""
    attributes, kind = attributes_of(span), kind_of(span)
    if not has_any(attributes, "messaging.system"):
        return False
    if kind == "CLIENT":
        return message_operation(attributes) in (None, "send", "publish")
    return kind in ("PRODUCER", "CONSUMER")


def cache_operation(span: Row) -> str:
    """Read, Write or Others, by the command."""
    text = first(attributes_of(span), *OPERATION_KEYS, *STATEMENT_KEYS)
    words = (text or span["name"]).split()
    command = words[0].upper() if words else ""
    if command in READS:
        return "Read"
    return "Write" if command in WRITES else "Others"


def statement_of(span: Row) -> str:
    """The text of what was executed, uncut."""
    return first(attributes_of(span), *STATEMENT_KEYS) or span["name"]


ENTRY_KINDS = ("SERVER", "CONSUMER")
EXIT_KINDS = ("CLIENT", "PRODUCER")
SILENT_LAYERS = ("VIRTUAL_DATABASE", "VIRTUAL_CACHE", "VIRTUAL_MQ")
"""What is called there sends no spans: a call to it needs nobody to answer."""


class SpanEvents(NamedTuple):
    """Rows by source, and what could not be resolved: `unresolved` is the sum of the other two."""

    events: dict[str, list[Row]]
    counters: dict[str, int]


class _Side(NamedTuple):
    service: str
    layer: str
    instance: str


def spans_to_events(spans: Sequence[Row], outside: Collection[int] = ()) -> SpanEvents:
    """The rows that spans give, whatever order the spans are in.

    ``outside`` are the places of calls that were counted for a host outside before anybody had
    answered them: see :func:`counted_at_once`.
    """
    early = {(spans[place]["trace_id"], spans[place]["span_id"]) for place in outside}
    by_id = {(span["trace_id"], span["span_id"]): span for span in spans}
    children: defaultdict[tuple[str, str], list[Row]] = defaultdict(list)
    for span in spans:
        parent = parent_of(span)
        if parent is not None and kind_of(span) in ENTRY_KINDS:
            children[span["trace_id"], parent].append(span)

    events: defaultdict[str, list[Row]] = defaultdict(list)
    answered = set()
    for key, span in by_id.items():
        if (
            kind_of(span) in EXIT_KINDS
            and children[key]
            and not (key in early or _goes_to_silence(span))
        ):
            answered.add(key)
            for source, row in _callee_rows(span, children[key]):
                events[source].append(_complete(source, span, row))

    counters = Counter({"unresolved_parent": 0, "unresolved_destination": 0})
    for span in spans:
        parent = parent_of(span)
        caller = by_id.get((span["trace_id"], parent)) if parent is not None else None
        if kind_of(span) in ENTRY_KINDS:
            rows = _entry_rows(span)
            counters["unresolved_parent"] += parent is not None and caller is None
            rows += _caller_rows(span, caller)
        elif kind_of(span) in EXIT_KINDS and (span["trace_id"], span["span_id"]) not in answered:
            rows = _peer_rows(span)
            counters["unresolved_destination"] += not rows
        else:
            rows = []
        for source, row in rows + _virtual_rows(span, caller):
            events[source].append(_complete(source, span, row))
    return SpanEvents(dict(events), {**counters, "unresolved": counters.total()})


def counted_at_once(
    spans: Sequence[Row], batches: Sequence[int], window: int | None = None
) -> list[int]:
    """The places of calls that count before anybody could answer; ``batches`` has each span's.

    Those to hosts outside (here: ``.org``) that have never answered, and those to hosts of which
    calls were given up, ``window`` batches after they came, in three batches with no answer since.
    Answers come within the window.
    """
    answers: defaultdict[tuple[str, str | None], list[int]] = defaultdict(list)
    calls: defaultdict[int, list[tuple[int, str, tuple[str, str]]]] = defaultdict(list)
    for place, (span, batch) in enumerate(zip(spans, batches, strict=True)):
        host = destination_of(attributes_of(span))
        if kind_of(span) in ENTRY_KINDS:
            answers[span["trace_id"], parent_of(span)].append(batch)
        elif kind_of(span) in EXIT_KINDS and host is not None:
            calls[batch].append((place, host, (span["trace_id"], span["span_id"])))

    early: list[int] = []
    talks: set[str] = set()
    silence: Counter[str] = Counter()
    last = max(batches, default=0) + (window or 0)
    for now in range(last + 1):
        quiet = {host for host, count in silence.items() if count >= 3}
        for place, host, key in calls[now]:
            known = ".org:" in host or host in quiet
            if known and host not in talks and min(answers[key], default=now + 1) > now:
                early.append(place)
        heard = {
            host
            for batch, own in list(calls.items())
            for _, host, key in own
            if now in [max(batch, answer) for answer in answers[key]]
        }
        due = [] if window is None else calls[now - window]
        unheard = {host for place, host, key in due if place not in early and not answers[key]}
        talks |= {host for host in heard if ".org:" in host or host in quiet}
        for host in heard:
            del silence[host]
        silence.update(unheard - heard - talks)
    return early


def _goes_to_silence(span: Row) -> bool:
    return _virtual_layer(attributes_of(span)) in SILENT_LAYERS


_Rows = list[tuple[str, Row]]


def _complete(source: str, span: Row, row: Row) -> Row:
    """The row with all of its source's fields, null where the span says nothing."""
    fields = load_catalog().fields[source]
    if unknown := row.keys() - fields.keys():
        raise KeyError(f"{source} has no {', '.join(sorted(unknown))}")
    return {"time": span["time"], **dict.fromkeys(fields), **row}


def _outcome(span: Row) -> Row:
    attributes = attributes_of(span)
    rpc_status = first(attributes, "rpc.response.status_code", "rpc.grpc.status_code")
    return {
        **timed(span),
        "httpResponseStatusCode": http_status(attributes),
        "rpcStatusCode": rpc_status and rpc_status[:RPC_STATUS_LIMIT],
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
    """The relations of a span that was called: by a user, by another service or by its own."""
    callee = _own_side(span)
    if caller is None:
        return _relations(span, _Side("User", "UNDEFINED", "User"), callee, span["name"], "SERVER")
    source = _own_side(caller)
    if source.service == callee.service and kind_of(caller) not in EXIT_KINDS:
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
    name = destination_of(attributes)
    if name is None:
        return []
    layer = "GENERAL" if has_any(attributes, *PEER_KEYS) else "UNDEFINED"
    dest = _Side(name, _virtual_layer(attributes) or layer, name)
    return _relations(span, _own_side(span), dest, span["name"], "CLIENT")


def _virtual_layer(attributes: dict[str, str]) -> str | None:
    match type_of(attributes):
        case "GenAI":
            return "VIRTUAL_GENAI"
        case "DATABASE":
            return "VIRTUAL_CACHE" if is_cache(attributes) else "VIRTUAL_DATABASE"
        case "MQ":
            return "VIRTUAL_MQ"
    return None


def _virtual_rows(span: Row, caller: Row | None) -> _Rows:
    """What the span says of the database, cache, queue or model that it used."""
    attributes = attributes_of(span)
    rows: _Rows = []
    outcome = timed(span)
    if is_database_call(span):
        name = {"name": destination_of(attributes)}
        if is_cache(attributes):
            rows.append(("CacheAccess", {**name, **outcome, "operation": cache_operation(span)}))
        else:
            rows.append(("DatabaseAccess", {**name, **outcome}))
    if is_message(span):
        rows += _messaging_rows(span, caller)
    if kind_of(span) == "CLIENT" and has_any(attributes, *GEN_AI_KEYS):
        rows += _gen_ai_rows(attributes, outcome)
    return rows


def _messaging_rows(span: Row, caller: Row | None) -> _Rows:
    attributes, consumed = attributes_of(span), kind_of(span) == "CONSUMER"
    name = destination_of(attributes)
    access = {
        "operation": "Consume" if consumed else "Produce",
        "transmissionLatency": _transmission_ms(span, caller) if consumed else 0,
        "status": is_ok(span),
    }
    topic = first(attributes, "messaging.destination.name", "messaging.destination")
    return [
        ("MQAccess", {"name": name, **access}),
        ("MQEndpointAccess", {"serviceName": name, "endpoint": topic or span["name"], **access}),
    ]


def _transmission_ms(span: Row, sender: Row | None) -> int | None:
    """From the start of the span that sent a message to that of the one that processes it."""
    if sender is None or kind_of(sender) not in EXIT_KINDS:
        return None
    if _virtual_layer(attributes_of(sender)) != "VIRTUAL_MQ":
        return None
    elapsed: timedelta = span["time"] - sender["time"]
    return max(0, elapsed // timedelta(milliseconds=1))


def _gen_ai_rows(attributes: dict[str, str], outcome: Row) -> _Rows:
    provider = first(attributes, "gen_ai.provider.name", "gen_ai.system") or "unknown"
    model = first(attributes, "gen_ai.response.model", "gen_ai.request.model") or "unknown"
    used = {
        "inputTokens": _tokens(attributes, "input_tokens", "prompt_tokens"),
        "outputTokens": _tokens(attributes, "output_tokens", "completion_tokens"),
        "totalEstimatedCost": 0,
        **outcome,
    }
    return [
        ("GenAIProviderAccess", {"name": provider, **used}),
        ("GenAIModelAccess", {"serviceName": provider, "modelName": model, **used}),
    ]


def _tokens(attributes: Attributes, *names: str) -> int:
    return parse_integer(first(attributes, *(f"gen_ai.usage.{name}" for name in names))) or 0
