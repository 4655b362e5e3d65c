"""The description of an entity's page, and the values of metrics, against a shop that is known."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from batchmill.sources import endpoint_id, instance_id, service_id
from tests.web.entities_kit import (
    CACHE,
    CHECKOUT,
    DATABASE,
    GATEWAY,
    QUEUE,
    READ,
    STATEMENT,
    TRACE,
    WRITE,
    write_shop,
)
from tests.web.kit import Client, serving_all

BEGIN_S = 1_709_208_000
"""2024-02-29T12:00:00Z."""
HOUR = {"from_": BEGIN_S, "to": BEGIN_S + 3600, "grain": "minute"}
ENDPOINT, INSTANCE = endpoint_id(CHECKOUT, "POST /checkout"), instance_id(CHECKOUT, "checkout-1")


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The address of a store with the hour of the shop."""
    folder: Path = tmp_path_factory.mktemp("entities")
    store_url = f"sqlite:///{folder}/store.db"
    write_shop(store_url, BEGIN_S)
    return store_url


@pytest.fixture(scope="module")
def client(url: str) -> Iterator[Client]:
    """A server over it."""
    with serving_all(url) as api_client:
        yield api_client


def page_of(client: Client, kind: str, id_: str, **params: Any) -> Any:
    """The description of a page."""
    return client.get(f"/api/v1/entities/{kind}/{id_}", **{**HOUR, **params})


def figures(cpm: float, avg: float, success: float, **more: float) -> dict[str, float]:
    """The measures of an entity."""
    return {"cpm": cpm, "avg": avg, "success": success, **more}


def rows(page: Any, key: str) -> dict[str, Any]:
    """The rows of a list, by the name of their entity."""
    [matching] = [listed for listed in page["lists"] if listed["key"] == key]
    return {row["name"]: row for row in matching["rows"]}


@pytest.mark.parametrize(
    ("kind", "id_", "role", "group", "measures"),
    [
        ("service", CHECKOUT, "Service", "Service", figures(2, 20, 1, p99=30)),
        ("endpoint", ENDPOINT, "Endpoint", "Endpoint", figures(2, 20, 1, p99=30)),
        ("instance", INSTANCE, "Instance", "ServiceInstance", figures(2, 20, 1, p99=30)),
        ("service", DATABASE, "Database", "DatabaseAccess", figures(3, 5, 1)),
        ("service", CACHE, "Cache", "CacheAccess", figures(5, 2, 1)),
        (
            *("service", QUEUE, "Message queue"),
            *("MQAccess operation == Consume", figures(2, 40, 1, p99=40)),
        ),
        (
            *("endpoint", endpoint_id(QUEUE, "orders"), "Topic"),
            *("MQEndpointAccess operation == Consume", figures(2, 40, 1, p99=40)),
        ),
    ],
)
def test_every_kind_of_entity_has_a_page_with_its_measures(
    client: Client, kind: str, id_: str, role: str, group: str, measures: dict[str, float]
) -> None:
    """Load, latency, percentiles and success, from the metrics that the store has of it."""
    page = page_of(client, kind, id_)
    assert page["entity"]["role"] == role
    own = next(shown for shown in page["groups"] if shown["key"] == group)
    assert {name: own["range"][name] for name in measures} == pytest.approx(measures, rel=0.02)
    charts = {chart["key"]: chart for chart in own["charts"]}
    assert set(measures) <= set(charts)
    [load] = charts["cpm"]["series"]
    assert load["values"] == [measures["cpm"]] * 60
    ranks = [line["label"] for line in charts["p99"]["series"]]
    assert ranks == ["p50", "p75", "p90", "p95", "p99"]


def test_the_reads_and_writes_of_a_cache_are_groups_of_their_own(client: Client) -> None:
    """Metrics with the same filter are shown together, under a title that says which."""
    groups = {shown["title"]: shown for shown in page_of(client, "service", CACHE)["groups"]}
    loads = {title: shown["range"]["cpm"] for title, shown in groups.items()}
    assert loads == {
        "As its clients see it": 5,
        "As its clients see it, reads": 4,
        "As its clients see it, writes": 1,
    }


def test_a_relation_shows_both_sides(client: Client) -> None:
    """What the callee reports and what the caller does are two groups; both ends are named."""
    page = page_of(client, "service_relation", f"{GATEWAY}-{CHECKOUT}")
    success = {shown["title"]: shown["range"]["success"] for shown in page["groups"]}
    assert success == {
        "Calls, as the callee reports them": 1,
        "Calls, as the caller reports them": 0.95,
    }
    assert [end["id"] for end in page["entity"]["ends"]] == [GATEWAY, CHECKOUT]
    assert list(rows(page, "endpoint_relation")) == ["GET / → POST /checkout"]


def test_lists_name_who_calls_and_what_belongs(client: Client) -> None:
    """With the relation behind each row, and the success that each side sees."""
    page = page_of(client, "service", CHECKOUT)
    assert rows(page, "endpoints")["POST /checkout"]["id"] == ENDPOINT
    assert rows(page, "instances")["checkout-1"]["id"] == INSTANCE
    gateway = rows(page, "callers")["gateway"]
    assert gateway["relation_id"] == f"{GATEWAY}-{CHECKOUT}"
    assert (gateway["caller"]["success"], gateway["callee"]["success"]) == (0.95, 1)
    callees = rows(page, "callees")
    loads = {name: row["cpm"] for name, row in callees.items()}
    assert loads == {"redis": 5, "orders-db": 3, "bank": 1}
    assert callees["redis"]["callee"] is None
    [caller] = rows(page_of(client, "endpoint", ENDPOINT), "callers").values()
    assert caller["name"] == "gateway: GET /"
    assert (caller["caller"], caller["callee"]["cpm"]) == (None, 2), "only the callee reports it"
    assert caller["id"] == endpoint_id(GATEWAY, "GET /")
    assert list(rows(page_of(client, "service", QUEUE), "endpoints")) == ["orders"]


def test_slow_statements_are_on_all_pages_they_concern(client: Client) -> None:
    """The service's, the database's, and that of the relation between the two."""
    for kind, id_ in (
        ("service", CHECKOUT),
        ("service", DATABASE),
        ("service_relation", f"{CHECKOUT}-{DATABASE}"),
    ):
        [statement] = page_of(client, kind, id_)["statements"]["rows"]
        assert (statement["statement"], statement["trace_id"]) == (STATEMENT, TRACE)
        assert statement["database_id"] == DATABASE
    other = page_of(client, "service_relation", f"{GATEWAY}-{CHECKOUT}")
    assert other["statements"]["rows"] == []
    assert page_of(client, "endpoint", ENDPOINT)["statements"] is None


def test_slow_commands_are_on_the_page_of_a_cache(client: Client) -> None:
    """Reads and writes, each text once, with its slowest run; also of the API of services."""
    shown = page_of(client, "service", CACHE)["statements"]
    assert (shown["title"], shown["label"]) == ("Slow commands", "Command")
    of_service = client.get(f"/api/v1/services/{CACHE}", **HOUR)["statements"]
    for rows_of in (shown["rows"], of_service):
        assert [
            (row["statement"], row["latency"], row["runs"], row["total_ms"], row["trace_id"])
            for row in rows_of
        ] == [(WRITE, 120, 1, 120, TRACE), (READ, 80, 2, 130, TRACE)]
        assert {row["database_id"] for row in rows_of} == {CACHE}
    assert page_of(client, "service", DATABASE)["statements"]["title"] == "Slow statements"
    other = {**HOUR, "from_": BEGIN_S + 3600, "to": BEGIN_S + 7200}
    none = client.get(f"/api/v1/entities/service/{CACHE}", **other)["statements"]
    assert none["empty"] == "No slow commands in this time range."


@pytest.mark.parametrize(("grain", "points"), [("5m", 12), ("10m", 6), ("hour", 1)])
def test_points_of_several_minutes_are_merged(client: Client, grain: str, points: int) -> None:
    """A rate stays per minute, a percentile is that of all calls of the point."""
    page = page_of(client, "service", CHECKOUT, grain=grain)
    assert page["grain"] == grain
    assert page["times"] == [BEGIN_S + 3600 // points * n for n in range(points)]
    charts = {chart["key"]: chart["series"] for chart in page["groups"][0]["charts"]}
    assert charts["cpm"][0]["values"] == [2] * points
    assert charts["avg"][0]["values"] == [20] * points
    ranks = {line["label"]: line["values"] for line in charts["p99"]}
    assert ranks["p50"] == pytest.approx([10] * points, rel=0.02)
    assert ranks["p99"] == pytest.approx([30] * points, rel=0.02)
    services = client.get("/api/v1/services", **{**HOUR, "grain": grain})
    assert {len(shown["series"]["cpm"]) for shown in services["services"]} == {points}


def test_a_service_that_only_its_callers_know_has_a_page(client: Client) -> None:
    """Made of the relations that lead to it; by its id, or by its name."""
    for given in (service_id("bank", False), "bank"):
        page = page_of(client, "service", given)
        [group] = page["groups"]
        assert group["title"] == "Calls, as the caller reports them"
        assert (group["range"]["cpm"], group["range"]["avg"]) == (1, 5)
        assert list(rows(page, "callers")) == ["checkout"]
    status, answer = client.ask("/api/v1/entities/service/nobody")
    assert (status, "no service is called 'nobody'" in answer["error"]) == (404, True)
    status, answer = client.ask("/api/v1/entities/planet/mars")
    assert (status, "there are service, instance" in answer["error"]) == (404, True)


def test_metrics_of_own_event_types_are_described_like_ours(client: Client) -> None:
    """The server does not know the event type; its metrics have values, units and a page."""
    metrics = {metric["name"]: metric for metric in client.get("/api/v1/metrics")["metrics"]}
    sales = metrics["ticket_sales"]
    assert (sales["source"], sales["unit"]) == ("TicketSold", "count")
    assert sales["series"] == "batchmill_ticket_sales"
    assert metrics["service_resp_time_micros"]["unit"] == "ms"
    assert metrics["service_resp_time_micros"]["factor"] == 1000
    assert metrics["service_sla"]["unit"] == "share"
    page = page_of(client, "service", "Berlin")
    [group] = page["groups"]
    charts = {chart["key"]: chart["series"][0]["over"] for chart in group["charts"]}
    assert charts == {"ticket_sales": 60, "ticket_cents": 1200}


def test_values_are_those_of_the_largest_entities_first(client: Client) -> None:
    """With the value over the whole range; entities are searched by name, or named one by one."""
    path = "/api/v1/metrics/ticket_cents/values"
    top = client.get(path, **HOUR, order="top", limit=1)
    [berlin] = top["series"]
    assert (berlin["entity_name"], berlin["over"], top["left_out"]) == ("Berlin", 1200, 1)
    [paris] = client.get(path, **HOUR, search="par")["series"]
    assert paris["entity_name"] == "Paris"
    both = client.get(f"{path}?entity=Paris&entity=Berlin&from={BEGIN_S}&to={BEGIN_S + 3600}")
    assert len(both["series"]) == 2
    status, answer = client.ask(f"{path}?entity=Rome&entity=Paris")
    assert (status, "no entity 'Rome'" in answer["error"]) == (404, True)
