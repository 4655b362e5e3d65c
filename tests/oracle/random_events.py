"""Random rows of any source of the catalog, the same for the same seed."""

from __future__ import annotations

import math
import random
from collections.abc import Iterable
from datetime import UTC, datetime, timedelta
from typing import Any

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
