"""The slow statements of an endpoint: kept spans tell which of its service's it made."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

import batchmill
from batchmill.oal import core_script
from batchmill.sources import endpoint_id, service_id
from batchmill.workers import Statement
from tests.kit.traces.segments import HOUR, kept, made_span
from tests.web.kit import Client, serving, serving_all

SHOP, DATABASE = service_id("shop", True), service_id("orders-db", False)
SPANS = [
    made_span(1, 1, name="GET /cart"),
    made_span(1, 2, 1, kind="CLIENT", name="SELECT"),
    made_span(2, 1, name="POST /order"),
    made_span(2, 2, 1, kind="CLIENT", name="INSERT"),
]
MADE = [(1, "SELECT 1 FROM cart", 300), (1, "SELECT 2 FROM cart", 900), (2, "INSERT", 500)]
"""Traces, and the statements that a span of each made. A third trace is not kept."""


@pytest.fixture(scope="module")
def filled(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    """A store with slow statements of two endpoints, and their traces."""
    folder = tmp_path_factory.mktemp("statements")
    url = f"sqlite:///{folder}/store.db"
    at = datetime.fromtimestamp(HOUR, UTC)
    with batchmill.Embedded(oal=core_script(), store=url, ttl_days=3650) as mill:
        common = {"time": at, "type": "HTTP", "status": True, "latency": 950}
        for service, name in (("shop", "GET /cart"), ("shop", "POST /order"), ("gate", "GET /")):
            mill.emit({**common, "name": service, "layer": "GENERAL"}, "Service")
            part = {"name": name, "serviceName": service, "serviceLayer": "GENERAL"}
            mill.emit({**common, **part}, "Endpoint")
        for trace, text, ms in (*MADE, (3, "SELECT 1 FROM lost", 700)):
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


def test_an_endpoint_has_the_slow_statements_that_it_made(client: Client) -> None:
    """Each text once, with its slowest run, its database and its trace; not those of others."""
    (cart,) = statements(client, SHOP, "GET /cart")["rows"]
    assert (cart["statement"], cart["latency"]) == ("SELECT 2 FROM cart", 900)
    assert (cart["database_id"], cart["trace_id"]) == (DATABASE, f"{1:032x}")
    (order,) = statements(client, SHOP, "POST /order")["rows"]
    assert (order["statement"], order["latency"]) == ("INSERT", 500)


def test_an_endpoint_of_a_service_without_statements_has_no_list(client: Client) -> None:
    """Most endpoints of a shop call no database."""
    assert statements(client, service_id("gate", True), "GET /") is None


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
