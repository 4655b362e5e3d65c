"""An hour of a shop with entities of every kind in a store, written without Spark.

Every minute has the same calls, so whoever reads this knows every number on a page.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

import batchmill
from batchmill.oal import core_script
from batchmill.sources import service, service_id, source
from batchmill.workers import Statement

MINUTES = 60
STATEMENT = "SELECT * FROM orders WHERE customer = ?"
READ, WRITE = "GET basket", "SET basket"
"""Slow commands of the cache: the read more than once."""
TRACE = "a" * 32
GATEWAY, CHECKOUT = service_id("gateway", True), service_id("checkout", True)
DATABASE, CACHE, QUEUE = (service_id(name, False) for name in ("orders-db", "redis", "kafka"))


@source(entity=service("shop"))
@dataclass(frozen=True)
class TicketSold:
    """An event type of a user's own."""

    time: datetime
    shop: str
    cents: int


OAL = f"""{core_script().read_text("utf-8")}
ticket_sales = from(TicketSold.*).count();
ticket_cents = from(TicketSold.cents).longAvg();
"""
_COMMON = {"type": "HTTP", "status": True}
_PART = {"serviceName": "checkout", "serviceLayer": "GENERAL"}


def write_shop(url: str, begin_s: int, minutes: int = MINUTES) -> None:
    """Fill a store with minutes of a shop, from ``begin_s``.

    A minute has 2 calls of the gateway to the checkout, of 10 ms (one of 30 ms); one of twenty
    fails at the caller, none at the callee. 3 of the database, of 5 ms; 4 reads and a write of the
    cache, of 2 ms; one to a bank, outside; 2 messages consumed from a topic after 40 ms; a ticket
    sold in each of two shops.
    """
    begin = datetime.fromtimestamp(begin_s, UTC)
    settings: dict[str, Any] = {"ttl_days": 3650, "close_timeout_s": 60}
    with batchmill.Embedded(oal=OAL, store=url, **settings) as mill:
        for minute in range(minutes):
            at = begin + timedelta(minutes=minute)
            for kind, row in _rows(minute):
                mill.emit({"time": at, **row}, kind)
            mill.emit(TicketSold(at, "Berlin", 1200))
            mill.emit(TicketSold(at, "Paris", 800))
        mill.emit(Statement(begin, "checkout", "orders-db", 900, STATEMENT, trace_id=TRACE))
        cached = functools.partial(Statement, begin, "checkout", "redis", trace_id=TRACE)
        mill.emit(cached(80, READ, cache_operation="Read"))
        mill.emit(cached(50, READ, cache_operation="Read"))
        mill.emit(cached(120, WRITE, cache_operation="Write"))
        mill.flush()


def _rows(minute: int) -> Iterator[tuple[str, dict[str, Any]]]:
    for call, ms in enumerate((10, 30)):
        timed = {**_COMMON, "latency": ms, "latencyMicros": ms * 1000}
        for name in ("gateway", "checkout"):
            yield "Service", {**timed, "name": name, "layer": "GENERAL"}
        yield "Endpoint", {**timed, **_PART, "name": "POST /checkout"}
        yield "ServiceInstance", {**timed, **_PART, "name": "checkout-1"}
        ends = {"sourceServiceName": "gateway", "destServiceName": "checkout"}
        layers = {"sourceLayer": "GENERAL", "destLayer": "GENERAL"}
        yield "ServiceRelation", {**timed, **ends, **layers, "detectPoint": "SERVER"}
        ok = (2 * minute + call) % 20 > 0
        yield (
            "ServiceRelation",
            {**timed, **ends, **layers, "detectPoint": "CLIENT", "status": ok},
        )
        yield (
            "EndpointRelation",
            {
                **_COMMON,
                "serviceName": "gateway",
                "serviceLayer": "GENERAL",
                "endpoint": "GET /",
                "childServiceName": "checkout",
                "childServiceLayer": "GENERAL",
                "childEndpoint": "POST /checkout",
                "rpcLatency": ms,
                "detectPoint": "SERVER",
            },
        )
        yield (
            "ServiceInstanceRelation",
            {
                **timed,
                "sourceServiceName": "gateway",
                "sourceServiceLayer": "GENERAL",
                "sourceServiceInstanceName": "gateway-1",
                "destServiceName": "checkout",
                "destServiceLayer": "GENERAL",
                "destServiceInstanceName": "checkout-1",
                "detectPoint": "SERVER",
            },
        )
        yield "MQAccess", {"name": "kafka", "operation": "Consume", **_SENT}
        topic = {"serviceName": "kafka", "endpoint": "orders", "operation": "Consume"}
        yield "MQEndpointAccess", {**topic, **_SENT}
    for _ in range(3):
        yield "DatabaseAccess", {"name": "orders-db", **_TIMED[5]}
        yield "ServiceRelation", _towards("orders-db", "VIRTUAL_DATABASE", 5)
    yield "ServiceRelation", _towards("bank", "UNDEFINED", 5)
    for operation in ("Read", "Read", "Read", "Read", "Write"):
        yield "CacheAccess", {"name": "redis", "operation": operation, **_TIMED[2]}
        yield "ServiceRelation", _towards("redis", "VIRTUAL_CACHE", 2)


_SENT = {"transmissionLatency": 40, "status": True}
_TIMED = {ms: {"latency": ms, "latencyMicros": ms * 1000, "status": True} for ms in (2, 5)}


def _towards(name: str, layer: str, ms: int) -> dict[str, Any]:
    ends = {"sourceServiceName": "checkout", "destServiceName": name}
    layers = {"sourceLayer": "GENERAL", "destLayer": layer}
    return {**_TIMED[ms], **ends, **layers, "detectPoint": "CLIENT", "type": "DATABASE"}
