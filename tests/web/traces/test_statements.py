"""The slow statements of an endpoint or instance: kept spans tell which ones it made."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

import batchmill
from batchmill.oal import core_script
from batchmill.sources import endpoint_id, instance_id, service_id
from batchmill.workers import Statement
from tests.kit.traces.segments import HOUR, kept, made_span
from tests.web.kit import Client, serving, serving_all

SHOP, DATABASE = service_id("shop", True), service_id("orders-db", False)
SPANS = [
    made_span(1, 1, name="GET /cart"),
    made_span(1, 2, 1, kind="CLIENT", name="SELECT"),
    made_span(2, 1, name="POST /order"),
    made_span(2, 2, 1, kind="CLIENT", name="INSERT")
    | {"resource": {"service.name": "shop", "host.name": "shop-2"}},
    made_span(4, 1, name="GET /orders/4711"),
    made_span(4, 2, 1, kind="CLIENT", name="SELECT"),
    made_span(5, 1, name="GET /orders/4712", http__route="/orders/4712"),
    made_span(5, 2, 1, kind="CLIENT", name="SELECT"),
]
MADE = [(1, "SELECT 1 FROM cart", 300), (1, "SELECT 2 FROM cart", 900), (2, "INSERT", 500)]
OF_ORDERS = [(4, "SELECT 3 FROM orders", 400), (5, "SELECT 4 FROM lines", 450)]
"""Traces, and the statements that a span of each made. A third trace is not kept."""


@pytest.fixture(scope="module")
def filled(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    """A store with slow statements of two endpoints and instances, and their traces."""
    folder = tmp_path_factory.mktemp("statements")
    url = f"sqlite:///{folder}/store.db"
    at = datetime.fromtimestamp(HOUR, UTC)
    with batchmill.Embedded(oal=core_script(), store=url, ttl_days=3650) as mill:
        common = {"time": at, "type": "HTTP", "status": True, "latency": 950}
        for service, name in (
            *(("shop", "GET /cart"), ("shop", "POST /order"), ("gate", "GET /")),
            *(("shop", "GET /orders/{id}"), ("shop", "GET /orders/4712")),
        ):
            mill.emit({**common, "name": service, "layer": "GENERAL"}, "Service")
            part = {"name": name, "serviceName": service, "serviceLayer": "GENERAL"}
            mill.emit({**common, **part}, "Endpoint")
            for number in (1, 2):
                instance = {**part, "name": f"{service}-{number}"}
                mill.emit({**common, **instance}, "ServiceInstance")
        for trace, text, ms in (*MADE, *OF_ORDERS, (3, "SELECT 1 FROM lost", 700)):
            slow = Statement(at, "shop", "orders-db", ms, text)
            mill.emit(replace(slow, trace_id=f"{trace:032x}", span_id=f"{2:016x}"))
        mill.flush()
    return url, kept(folder, SPANS).folder


@pytest.fixture(scope="module")
def client(filled: tuple[str, Path]) -> Iterator[Client]:
    """A server of the store and the kept spans."""
    with serving_all(filled[0], traces=filled[1]) as client:
        yield client


def statements(client: Client, service: str, name: str) -> Any:
    """Those on the page of an endpoint."""
    id_ = endpoint_id(service, name)
    range_ = {"from_": HOUR, "to": HOUR + 600}
    return client.get(f"/api/v1/entities/endpoint/{id_}", **range_)["statements"]


def instance_statements(client: Client, service: str, name: str) -> Any:
    """Those on the page of an instance."""
    id_ = instance_id(service, name)
    range_ = {"from_": HOUR, "to": HOUR + 600}
    return client.get(f"/api/v1/entities/instance/{id_}", **range_)["statements"]


def test_an_endpoint_has_the_slow_statements_that_it_made(client: Client) -> None:
    """Each text once, with its slowest run, its database and its trace; not those of others."""
    (cart,) = statements(client, SHOP, "GET /cart")["rows"]
    assert (cart["statement"], cart["latency"]) == ("SELECT 2 FROM cart", 900)
    assert (cart["database_id"], cart["trace_id"]) == (DATABASE, f"{1:032x}")
    (order,) = statements(client, SHOP, "POST /order")["rows"]
    assert (order["statement"], order["latency"]) == ("INSERT", 500)


def test_an_endpoint_has_the_statements_of_spans_with_ids_in_their_names(client: Client) -> None:
    """Its name has {id} where those of kept spans have ids; a span with a route has its own."""
    for endpoint, (_, text, _) in zip(("{id}", "4712"), OF_ORDERS, strict=True):
        (made,) = statements(client, SHOP, f"GET /orders/{endpoint}")["rows"]
        assert made["statement"] == text


def test_an_endpoint_of_a_service_without_statements_has_no_list(client: Client) -> None:
    """Most endpoints of a shop call no database."""
    assert statements(client, service_id("gate", True), "GET /") is None


def test_an_instance_has_the_slow_statements_that_it_made(client: Client) -> None:
    """By the id of the instance in the span's resource, else by its host, as metrics have it."""
    first, *others = instance_statements(client, SHOP, "shop-1")["rows"]
    assert [row["statement"] for row in others] == [text for _, text, _ in OF_ORDERS[::-1]]
    assert (first["statement"], first["latency"]) == ("SELECT 2 FROM cart", 900)
    assert (first["database_id"], first["trace_id"]) == (DATABASE, f"{1:032x}")
    (second,) = instance_statements(client, SHOP, "shop-2")["rows"]
    assert second["statement"] == "INSERT"
    assert instance_statements(client, service_id("gate", True), "gate-1") is None


def test_without_kept_spans_there_is_no_list(filled: tuple[str, Path]) -> None:
    """The store does not know which endpoint made a statement."""
    with serving(filled[0]) as client:
        assert statements(client, SHOP, "GET /cart") is None


def test_an_endpoint_that_made_none_says_so(filled: tuple[str, Path], tmp_path: Path) -> None:
    """And how many were looked at: the traces of others may be gone."""
    with serving(filled[0], traces=tmp_path) as client:
        shown = statements(client, SHOP, "GET /cart")
    assert shown["rows"] == []
    assert "None of the 50 slowest statements" in shown["empty"]
