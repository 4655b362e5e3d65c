"""What a single span says of itself: its service, its kind of work, the system that it calls.

A span is a row with trace_id, span_id, parent_span_id, name, kind, time, end_time, status, service,
resource and attributes; all values of the last two are strings.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta

from tests.oracle.catalog import Row
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
