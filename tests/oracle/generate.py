"""Random events and traces, the same for the same seed; rows as Parquet segments, and back."""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from tests.oracle.catalog import Row, column_of, load_catalog

START = datetime(2026, 3, 30, 22, 57, 41, tzinfo=UTC)

SERVICE_NAMES = ("gateway", "orders", "Bestellung-ß", "支付服务", "payment 💳", "s" * 75, "", "  ")
OTHER_NAMES = ("/api/orders/{id}", "GET:/", "node-1", "节点2", "e" * 160, "i" * 71, "a_b-c.d", "")
LAYERS = ("GENERAL", "MESH", "K8S_SERVICE", "UNDEFINED", "VIRTUAL_DATABASE", "VIRTUAL_MQ")

# Fields that a source cannot do without, besides those of its entity.
REQUIRED = frozenset({"latency", "rpcLatency", "transmissionLatency", "duration", "count"})

# Texts that filters of real scripts look for.
_TEXTS: dict[str, tuple[str, ...]] = {
    "tlsMode": ("NON_TLS", "TLS", "mTLS"),
    "metricName": (
        "server.memory_heap_size",
        "server.memory_allocated",
        "server.total_connections",
    ),
    "type": ("connect", "accept", "close", "write", "read", "protocol", "tcp", "http", "dns"),
    "verdict": ("forwarded", "dropped"),
    "direction": ("ingress", "egress"),
    "method": ("GET", "POST", "DELETE"),
    "internalErrorCode": ("NOT_FOUND", "rate_limited", "NR", ""),
    "rpcStatusCode": ("OK", "UNAVAILABLE", "0", "14"),
}
_CODES = (0, 100, 200, 204, 301, 399, 400, 404, 499, 500, 503)
_TAG_VALUES: dict[str, tuple[str, ...]] = {
    "transmission.latency": ("0", "17", "+5", "-4", "x", "", " 3", "2.5", "99999999999999999999"),
    "http.method": ("GET", "POST"),
    "größe": ("klein", "groß"),
    "region": ("eu", "us"),
}


def random_events(
    seed: int,
    sources: Iterable[str],
    n: int,
    *,
    start: datetime = START,
    days: int = 3,
    late_share: float = 0.1,
    null_share: float = 0.15,
) -> dict[str, list[Row]]:
    """`n` rows of each source, in the order of their arrival: late ones are up to `days` late.

    Values crowd in few minutes and few entities, so that buckets hold several rows.
    """
    return {
        source: _Generator(random.Random(f"{seed}/{source}"), source, null_share).rows(
            n, start, days, late_share
        )
        for source in sources
    }


class _Generator:
    def __init__(self, rng: random.Random, source: str, null_share: float) -> None:
        catalog = load_catalog()
        self._rng = rng
        self._fields = catalog.fields[source]
        rule = catalog.entities[source]
        self._services = {field for role, field in rule.items() if role.endswith("service")}
        self._names = {field for role, field in rule.items() if role.endswith("name")}
        self._given = rule.get("field")
        self._null_share = null_share

    def rows(self, n: int, start: datetime, days: int, late_share: float) -> list[Row]:
        rng = self._rng
        minutes = [day * 1440 + rng.randrange(1440) for day in range(days)]
        minutes += [rng.randrange(days * 1440) for _ in range(math.isqrt(n) // 4)]
        times = sorted(
            start + timedelta(minutes=rng.choice(minutes), microseconds=rng.randrange(60_000_000))
            for _ in range(n)
        )
        late = [rng.random() < late_share for _ in times]
        order = [time for time, is_late in zip(times, late, strict=True) if not is_late]
        for time, is_late in zip(times, late, strict=True):
            if is_late:
                order.insert(rng.randint(0, len(order)), time)
        return [{"time": time, **self._row()} for time in order]

    def _row(self) -> Row:
        row = {column_of(name): self._field(name, kind) for name, kind in self._fields.items()}
        if "tags" in row and row.get("tag") is not None:
            row["tags"] = [f"{key}:{row['tag'][key]}" for key in sorted(row["tag"])]
        return row

    def _field(self, name: str, kind: str) -> Any:
        rng = self._rng
        if name == self._given:
            return f"aWQ=.1_{rng.choice('ABC')}"
        if name in self._services:
            return rng.choice(SERVICE_NAMES)
        if name in self._names:
            return rng.choice(OTHER_NAMES)
        if kind == "layer":
            return rng.choice(LAYERS)
        if name not in REQUIRED and rng.random() < self._null_share:
            return None
        return self._value(name, kind)

    def _value(self, name: str, kind: str) -> Any:
        rng, catalog = self._rng, load_catalog()
        shape, _, of = kind.partition(":")
        match shape:
            case "int":
                codes = name.endswith(("tatusCode", "code", "responseCode"))
                return rng.choice(_CODES) if codes else self._whole(name, 31)
            case "long":
                return self._whole(name, 40)
            case "double":
                return rng.choice(
                    (0.0, -1.25, 0.1, rng.uniform(-50, 100), rng.lognormvariate(3, 4))
                )
            case "bool":
                return rng.random() < 0.8
            case "enum":
                return rng.choice(catalog.enums[of])
            case "struct":
                fields = catalog.structs[of]
                return {inner: self._inner(inner, type_) for inner, type_ in fields.items()}
            case "list<string>":
                return [
                    rng.choice(("region:eu", "a:1", "größe:groß")) for _ in range(rng.randrange(3))
                ]
            case "list<int>":
                return [rng.randrange(150) for _ in range(rng.randrange(4))]
            case "map<string,string>":
                keys = [key for key in _TAG_VALUES if rng.random() < 0.6]
                return {key: rng.choice(_TAG_VALUES[key]) for key in keys}
        return rng.choice(_TEXTS.get(name, ("one", "two", "drei ü", "四", "")))

    def _inner(self, name: str, kind: str) -> Any:
        return None if self._rng.random() < self._null_share else self._value(name, kind)

    def _whole(self, name: str, bits: int) -> int:
        """Mostly small, some large; below zero only where that is no nonsense in a test."""
        rng = self._rng
        if name in REQUIRED or name.lower().endswith(("duration", "latency", "time")):
            slow = rng.random() < 0.1
            return rng.randrange(20_000) if slow else int(rng.lognormvariate(3, 2)) % 100_000
        if rng.random() < 0.05:
            return rng.randrange(1 << (bits - 1))
        return rng.randrange(-20, 200)


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
ADDRESSES = (
    ("server.address", "server.port"),
    ("net.peer.name", "net.peer.port"),
    ("url.full", None),
    ("http.url", None),
    ("net.sock.peer.name", "net.sock.peer.port"),
    ("network.peer.address", "network.peer.port"),
    ("net.sock.peer.addr", "net.sock.peer.port"),
    ("net.peer.ip", "net.peer.port"),
)
URLS = (
    "http://{host}/orders?at=1:2",
    "https://{host}",
    "HTTPS://me:pass@word@{host}:8443/ü",
    "http://[::1]:8080?x=@y",
    "https://[fe80::1]#z",
    "amqp://{host}/vhost",
    "ftp://{host}:21",
    "/relative?to=http://{host}",
    "http:///no-host",
)
MESSAGE_OPERATIONS = ("messaging.operation.type", "messaging.operation", "messaging.operation.name")
PRODUCING = ("send", "publish", "create", "SEND", "settle", "commit")
CONSUMING = ("process", "deliver", "receive", "poll", "Receive", "own")


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
        attributes = self._queue(CONSUMING) if kind == "CONSUMER" else self._http()
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
        attributes = self._http() | self._peer("api.shop.svc", "443")
        span = self._client("CLIENT", rng.choice(ENDPOINTS), parent, at, 60, attributes)
        for _ in range(rng.choices((0, 1, 2), (3, 6, 1))[0]):
            callee = parent["service"] if rng.random() < 0.1 else self._other()
            later = at + timedelta(microseconds=rng.randrange(3) * 500)
            self._serve(callee, span["span_id"], later, "SERVER", depth + 1)

    def _query(self, parent: Row, at: datetime, depth: int) -> None:
        rng = self._rng
        key = rng.choice(("db.system", "db.system.name"))
        system = rng.choice(("mysql", "postgresql", "mongodb", "MongoDB"))
        attributes = {key: system} | self._peer(f"{system}-ü", "3306")
        if rng.random() < 0.8:
            text = rng.choice(STATEMENTS).replace("{number}", str(rng.randrange(1000)))
            attributes[rng.choice(("db.query.text", "db.statement"))] = text
        if rng.random() < 0.5:
            attributes[rng.choice(("db.namespace", "db.name"))] = "shop"
        name = rng.choices(("SELECT shop.t1", "pg-pool.connect", "getConnection"), (8, 1, 1))[0]
        self._client("CLIENT", name, parent, at, 150, attributes)

    def _cache(self, parent: Row, at: datetime, depth: int) -> None:
        rng = self._rng
        system = rng.choice(("redis", "Redis", "memcached"))
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
        span = self._client(kind, "publish orders", parent, at, 5, self._queue(PRODUCING))
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
            "gen_ai.usage.completion_tokens": "78",
        }
        attributes = {key: value for key, value in possible.items() if rng.random() < 0.7}
        attributes |= self._peer("llm.shop.svc", "443")
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
        if rng.random() < 0.3:
            return {"rpc.system.name": "grpc", "rpc.response.status_code": "OK", "http.route": "/"}
        return {}

    def _queue(self, operations: Sequence[str]) -> dict[str, str]:
        rng = self._rng
        attributes = {"messaging.system": rng.choice(("kafka", "rabbitmq"))}
        if rng.random() < 0.7:
            key = rng.choice(("messaging.destination.name", "messaging.destination"))
            attributes[key] = rng.choice(("orders", "Rückgabe"))
        if rng.random() < 0.6:
            attributes[rng.choice(MESSAGE_OPERATIONS)] = rng.choice(operations)
        return attributes | self._peer("broker", "9092")

    def _peer(self, host: str, port: str) -> dict[str, str]:
        """Some of what clients say about the other end of a call, in any spelling."""
        rng = self._rng
        chosen: dict[str, str] = {}
        if rng.random() < 0.5:
            chosen[rng.choice(("peer.service", "service.peer.name"))] = host.partition(".")[0]
        for key, port_key in rng.sample(ADDRESSES, rng.choice((0, 0, 1, 1, 2, 7))):
            if port_key is None:
                chosen[key] = rng.choice(URLS).format(host=host)
            else:
                chosen[key] = rng.choice((host, host, "10.0.0.7", "::1", " "))
                if rng.random() < 0.7:
                    chosen[port_key] = port
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


SPAN_SOURCE = "Span"

_SPAN_TEXTS = ("trace_id", "span_id", "parent_span_id", "name", "kind", "status", "service")
_SCALARS = {
    "string": pa.string(),
    "layer": pa.string(),
    "int": pa.int32(),
    "long": pa.int64(),
    "double": pa.float64(),
    "bool": pa.bool_(),
}
_TIME = pa.timestamp("us", tz="UTC")
_STRING_MAP = pa.map_(pa.string(), pa.string())


def write_segments(
    events: Mapping[str, Sequence[Row]], folder: Path, files_per_source: int, seed: int
) -> list[Path]:
    """Deal each source's rows out to its files at random; a file has at least one row."""
    rng = random.Random(seed)
    written = []
    for source in sorted(events):
        rows = list(events[source])
        rng.shuffle(rows)
        target = folder / source
        target.mkdir(parents=True, exist_ok=True)
        for number in range(min(files_per_source, len(rows))):
            path = target / f"{number}.parquet"
            pq.write_table(to_table(source, rows[number::files_per_source]), path)
            written.append(path)
    return written


def read_segments(folder: Path) -> dict[str, list[Row]]:
    """All rows below a folder, nulls as None, in the order of the files' numbers."""
    events: dict[str, list[Row]] = {}
    for source in sorted(path for path in folder.iterdir() if path.is_dir()):
        schema = schema_of(source.name)
        maps = [field.name for field in schema if pa.types.is_map(field.type)]
        rows = events.setdefault(source.name, [])
        for path in sorted(source.glob("*.parquet"), key=lambda file: int(file.stem)):
            for row in pq.read_table(path, schema=schema).to_pylist():
                rows.append(row | {name: _as_dict(row[name]) for name in maps})
    return events


def to_table(source: str, rows: Sequence[Row]) -> pa.Table:
    """The rows as a table of the source's columns; absent fields are null."""
    return pa.Table.from_pylist([dict(row) for row in rows], schema=schema_of(source))


def schema_of(source: str) -> pa.Schema:
    """The columns of a source; `time` is the event's own time."""
    columns: list[tuple[str, pa.DataType]] = [("time", _TIME)]
    if source == SPAN_SOURCE:
        columns += [("end_time", _TIME), ("resource", _STRING_MAP), ("attributes", _STRING_MAP)]
        columns += [(name, pa.string()) for name in _SPAN_TEXTS]
    else:
        fields = load_catalog().fields[source]
        columns += [(column_of(name), arrow_type(kind)) for name, kind in fields.items()]
    return pa.schema([pa.field(name, kind, nullable=name != "time") for name, kind in columns])


def arrow_type(kind: str) -> pa.DataType:
    """The Arrow type of a field, from its type in the catalog."""
    if kind in _SCALARS:
        return _SCALARS[kind]
    if kind.startswith("enum:"):
        return pa.string()
    if kind.startswith("list<"):
        return pa.list_(arrow_type(kind[5:-1]))
    if kind.startswith("map<"):
        return _STRING_MAP
    if kind.startswith("struct:"):
        fields = load_catalog().structs[kind.removeprefix("struct:")]
        return pa.struct([(name, arrow_type(inner)) for name, inner in fields.items()])
    raise ValueError(f"no Arrow type for {kind}")


def _as_dict(pairs: Any) -> dict[str, str] | None:
    return None if pairs is None else dict(pairs)
