"""Random traces: a user calls a gateway, services call each other, databases, queues and models."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta

from tests.oracle.catalog import Row

START = datetime(2026, 3, 30, 22, 57, 41, tzinfo=UTC)

SERVICES: tuple[str | None, ...] = (
    "gateway",
    "orders",
    "payments 💳",
    "Lagerhaltung-ß",
    "推荐服务",
    "s" * 80,
    None,
    " ",
)
ENDPOINTS = (
    "GET /orders/{id}",
    "POST /pay",
    "搜索",
    "/" + "p" * 170,
    "grpc.Stock/Reserve",
    "GET /ü",
)
STATEMENTS = (
    "select * from users where id = {number} and name = 'o''neil {number}'",
    "SELECT  a,\n\tb FROM t2 WHERE x IN ({number}, 2,{number}) AND y = 1.5",
    "insert into größen values ('{number}', 'x')",
    "update t_2024 set v = v + {number} where k in ('a', 'b')",
    "delete from log where at < {number} /* " + "pad " * 600 + "*/",
)
COMMANDS = (
    "GET k:1",
    "hgetall h",
    "SET k:{number} v",
    "del k",
    "PING",
    "EVAL 'x' 0",
    "lrange l 0 9",
)
LOST_SHARE = 0.03


def random_spans(
    seed: int,
    n: int,
    services: Sequence[str | None] = SERVICES,
    *,
    start: datetime = START,
    days: int = 3,
) -> list[Row]:
    """Exactly `n` spans in random order; some traces have lost spans, one may be cut short."""
    rng = random.Random(seed)
    minutes = [day * 1440 + rng.randrange(1440) for day in range(days)]
    minutes += [rng.randrange(days * 1440) for _ in range(math.isqrt(n) // 4)]
    spans: list[Row] = []
    while len(spans) < n:
        at = start + timedelta(minutes=rng.choice(minutes), microseconds=rng.randrange(60_000_000))
        spans += _Trace(rng, services).build(at)
    del spans[n:]
    rng.shuffle(spans)
    return spans


class _Trace:
    def __init__(self, rng: random.Random, services: Sequence[str | None]) -> None:
        self._rng = rng
        self._services = services
        self._id = f"{rng.getrandbits(128):032x}"
        self._spans: list[Row] = []

    def build(self, at: datetime) -> list[Row]:
        rng = self._rng
        stranger = f"{rng.getrandbits(64):016x}"
        parent = rng.choices((None, "", stranger), (80, 10, 10))[0]
        kind = "SERVER" if rng.random() < 0.9 else "CONSUMER"
        self._serve(self._services[0], parent, at, kind, 0)
        return [span for span in self._spans if rng.random() >= LOST_SHARE]

    def _serve(
        self, service: str | None, parent: str | None, at: datetime, kind: str, depth: int
    ) -> None:
        rng = self._rng
        attributes = self._queue() if kind == "CONSUMER" else self._http()
        name = rng.choice(ENDPOINTS)
        span = self._span(kind, name, service, parent, at, rng.lognormvariate(4, 1.5), attributes)
        calls = (self._inside, self._call, self._query, self._cache, self._publish, self._ask)
        for _ in range(rng.randrange(5) if depth < 3 else 0):
            at += timedelta(microseconds=rng.randrange(40_000))
            call = rng.choices(calls, (1, 3, 3, 3, 2, 1))[0]
            call(span, at, depth)

    def _inside(self, parent: Row, at: datetime, depth: int) -> None:
        span = self._span("INTERNAL", "compute", parent["service"], parent["span_id"], at, 3, {})
        if self._rng.random() < 0.3:
            # A server span whose parent is no client: propagation through custom code.
            self._serve(self._other(), span["span_id"], at, "SERVER", depth + 1)

    def _call(self, parent: Row, at: datetime, depth: int) -> None:
        rng = self._rng
        attributes = self._http() | self._peer("api.example.com", "443")
        span = self._client("CLIENT", rng.choice(ENDPOINTS), parent, at, 60, attributes)
        for _ in range(rng.choices((0, 1, 2), (3, 6, 1))[0]):
            callee = parent["service"] if rng.random() < 0.1 else self._other()
            later = at + timedelta(microseconds=rng.randrange(3) * 500)
            self._serve(callee, span["span_id"], later, "SERVER", depth + 1)

    def _query(self, parent: Row, at: datetime, depth: int) -> None:
        rng = self._rng
        key = rng.choice(("db.system", "db.system.name"))
        system = rng.choice(("mysql", "postgresql", "mongodb"))
        attributes = {key: system} | self._peer(f"{system}-ü", "3306")
        if rng.random() < 0.8:
            text = rng.choice(STATEMENTS).replace("{number}", str(rng.randrange(1000)))
            attributes[rng.choice(("db.query.text", "db.statement"))] = text
        if rng.random() < 0.5:
            attributes[rng.choice(("db.namespace", "db.name"))] = "shop"
        self._client("CLIENT", "SELECT shop.t1", parent, at, 150, attributes)

    def _cache(self, parent: Row, at: datetime, depth: int) -> None:
        rng = self._rng
        system = rng.choice(("redis", "memcached"))
        command = rng.choice(COMMANDS).replace("{number}", str(rng.randrange(50)))
        attributes = {"db.system": system} | self._peer(system, "6379")
        if rng.random() < 0.7:
            attributes[rng.choice(("db.query.text", "db.statement"))] = command
        if rng.random() < 0.4:
            attributes[rng.choice(("db.operation.name", "db.operation"))] = command.split()[0]
        self._client("CLIENT", command, parent, at, 12, attributes)

    def _publish(self, parent: Row, at: datetime, depth: int) -> None:
        rng = self._rng
        kind = "PRODUCER" if rng.random() < 0.8 else "CLIENT"
        span = self._client(kind, "publish orders", parent, at, 5, self._queue())
        for _ in range(rng.randrange(3)):
            later = at + timedelta(microseconds=rng.randrange(9_000_000))
            self._serve(self._other(), span["span_id"], later, "CONSUMER", depth + 1)

    def _ask(self, parent: Row, at: datetime, depth: int) -> None:
        rng = self._rng
        possible = {
            "gen_ai.provider.name": "anthropic",
            "gen_ai.system": "openai",
            "gen_ai.request.model": "model-a",
            "gen_ai.response.model": "model-a-2026",
            "gen_ai.operation.name": "chat",
            "gen_ai.usage.input_tokens": str(rng.randrange(5000)),
            "gen_ai.usage.output_tokens": rng.choice(("0", "77", "many")),
        }
        attributes = {key: value for key, value in possible.items() if rng.random() < 0.7}
        attributes |= self._peer("llm.example.com", "443")
        self._client("CLIENT", "chat model-a", parent, at, 900, attributes)

    def _http(self) -> dict[str, str]:
        rng = self._rng
        code = rng.choice(("200", "204", "404", "500", "503", "n/a"))
        match rng.randrange(4):
            case 0:
                return {"http.request.method": "GET", "http.response.status_code": code}
            case 1:
                return {"http.method": "POST", "http.status_code": code, "http.url": "http://x/ü"}
            case 2:
                return {"rpc.system": "grpc", "rpc.grpc.status_code": rng.choice(("0", "14"))}
        return {}

    def _queue(self) -> dict[str, str]:
        attributes = {"messaging.system": self._rng.choice(("kafka", "rabbitmq"))}
        if self._rng.random() < 0.7:
            attributes["messaging.destination.name"] = self._rng.choice(("orders", "Rückgabe"))
        return attributes | self._peer("broker", "9092")

    def _peer(self, host: str, port: str) -> dict[str, str]:
        possible = {"peer.service": host.partition(".")[0], "server.address": host}
        chosen = {key: value for key, value in possible.items() if self._rng.random() < 0.5}
        if "server.address" in chosen and self._rng.random() < 0.7:
            chosen["server.port"] = port
        return chosen

    def _other(self) -> str | None:
        return self._rng.choice(self._services)

    def _client(
        self, kind: str, name: str, parent: Row, at: datetime, ms: float, attributes: dict[str, str]
    ) -> Row:
        elapsed = ms * self._rng.lognormvariate(0, 1)
        return self._span(kind, name, parent["service"], parent["span_id"], at, elapsed, attributes)

    def _span(
        self,
        kind: str,
        name: str,
        service: str | None,
        parent: str | None,
        at: datetime,
        ms: float,
        attributes: dict[str, str],
    ) -> Row:
        rng = self._rng
        resource = {} if service is None else {"service.name": service}
        if rng.random() < 0.6:
            resource["service.instance.id"] = f"{service}-{rng.randrange(2)}"
        if rng.random() < 0.6:
            resource["host.name"] = rng.choice(("host-1", "höst-2"))
        # Whole milliseconds now and then, for ties; a clock that goes back, rarely.
        elapsed = round(ms) * 1000 if rng.random() < 0.5 else round(ms * 1000)
        span: Row = {
            "trace_id": self._id,
            "span_id": f"{rng.getrandbits(64):016x}",
            "parent_span_id": parent,
            "name": name,
            "kind": kind,
            "time": at,
            "end_time": at + timedelta(microseconds=elapsed if rng.random() < 0.98 else -1500),
            "status": rng.choices(("OK", "ERROR", "UNSET"), (3, 1, 6))[0],
            "service": service,
            "resource": resource,
            "attributes": attributes,
        }
        self._spans.append(span)
        return span
