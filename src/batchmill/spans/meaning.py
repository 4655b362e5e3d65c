"""Which attributes of a span give it its meaning, and in which order they are looked up.

The names are those of OpenTelemetry's semantic conventions, newer ones before older ones. The table
in ``docs/sources.md`` is the same; a test compares the two and tries every entry.
"""

from __future__ import annotations

from collections.abc import Mapping

MEANINGS: Mapping[str, tuple[str, ...]] = {
    "peer": ("service.peer.name", "peer.service"),
    "system": ("db.system.name", "db.system"),
    "namespace": ("db.namespace", "db.name"),
    "operation": ("db.operation.name", "db.operation"),
    "statement": ("db.query.text", "db.statement"),
    "messaging": ("messaging.system",),
    "topic": ("messaging.destination.name", "messaging.destination"),
    "message operation": (
        *("messaging.operation.type", "messaging.operation", "messaging.operation.name"),
    ),
    "HTTP": (
        *("http.request.method", "http.method", "http.route", "url.full", "http.url"),
        *("http.response.status_code", "http.status_code"),
    ),
    "HTTP status": ("http.response.status_code", "http.status_code"),
    "RPC": ("rpc.system.name", "rpc.system"),
    "RPC status": ("rpc.response.status_code", "rpc.grpc.status_code"),
    "model call": (
        *("gen_ai.provider.name", "gen_ai.system", "gen_ai.request.model"),
        *("gen_ai.response.model", "gen_ai.operation.name"),
    ),
    "provider": ("gen_ai.provider.name", "gen_ai.system"),
    "model": ("gen_ai.response.model", "gen_ai.request.model"),
    "input tokens": ("gen_ai.usage.input_tokens", "gen_ai.usage.prompt_tokens"),
    "output tokens": ("gen_ai.usage.output_tokens", "gen_ai.usage.completion_tokens"),
}
"""Attributes by what they tell; the first one that is present does."""

ADDRESSES: tuple[tuple[str, str | None], ...] = (
    ("server.address", "server.port"),
    ("net.peer.name", "net.peer.port"),
    ("url.full", None),
    ("http.url", None),
    ("net.sock.peer.name", "net.sock.peer.port"),
    ("network.peer.address", "network.peer.port"),
    ("net.sock.peer.addr", "net.sock.peer.port"),
    ("net.peer.ip", "net.peer.port"),
)
"""Attributes that say which host was called, and on which port. Names come first: clients in all
languages know the name that they were configured with, and only some the address it resolved to. A
URL has the port itself."""

PORTS: Mapping[str, str] = {
    "postgresql": "5432",
    "cockroachdb": "26257",
    "mysql": "3306",
    "mariadb": "3306",
    "microsoft.sql_server": "1433",
    "mssql": "1433",
    "oracle.db": "1521",
    "oracle": "1521",
    "ibm.db2": "50000",
    "db2": "50000",
    "mongodb": "27017",
    "cassandra": "9042",
    "elasticsearch": "9200",
    "opensearch": "9200",
    "clickhouse": "8123",
    "redis": "6379",
    "memcached": "11211",
    "kafka": "9092",
    "rabbitmq": "5672",
    "activemq": "61616",
    "nats": "4222",
    "pulsar": "6650",
}
"""The usual port of a database, cache or broker, by its system: by the conventions a client leaves
out ``server.port`` if it is that one, and some clients do, so both must give one name."""

CACHES = ("redis", "memcached")
"""Systems that are caches, not databases."""

SENDS = ("send", "publish")
"""Operations of a client that hand a message to its broker."""
STEPS = ("create", "receive", "poll", "settle")
"""Operations on messages that are only steps of sending or processing one."""

CONNECTING = r"\b(re|get)?connect(ion)?\b|\bpool\b"
"""Regular expression of names of spans that connect to a database, in small letters."""
