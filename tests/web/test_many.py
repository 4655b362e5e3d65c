"""The API with more entities than a page shows: the busiest, and how many there are."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from batchmill.store import open_store
from batchmill.web.api import entity, listing, measures, overview, topology
from tests.web.kit import START_S, Call, CallWriter, Client, serving

MANY = 40
FLOOD = 300


@pytest.fixture(scope="module")
def calls_store(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A shop of 30 services, each with calls of its own number, among 300 that were called once."""
    calls = [
        Call(f"s{number:02}", START_S + at, endpoint=f"/{at % 3}", caller="gate")
        for number in range(30)
        for at in range(number + 2)
    ]
    calls += [Call(f"flood-{number}", START_S, caller="gate") for number in range(FLOOD)]
    calls.append(Call("gate", START_S))
    calls += [Call("s29", START_S, endpoint=f"/flood-{number}") for number in range(FLOOD)]
    url = f"sqlite:///{tmp_path_factory.mktemp('web') / 'store.db'}"
    with open_store(url) as store:
        CallWriter(store).write(calls)
    return url


@pytest.fixture
def client(calls_store: str) -> Iterator[Client]:
    """A server over that store."""
    with serving(calls_store) as connected:
        yield connected


@pytest.fixture
def both(client: Client, monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[Any, Any]]:
    """Answers where 40 are many, and where all are read."""

    def ask(path: str, **params: Any) -> tuple[Any, Any]:
        everything = client.get(path, **params, **RANGE)
        with monkeypatch.context() as patch:
            for module in (entity, listing, measures, overview, topology):
                patch.setattr(module, "MANY", MANY)
            return client.get(path, **params, **RANGE), everything

    return ask


RANGE: dict[str, Any] = {"from_": START_S, "to": START_S + 600}


Both = Callable[..., tuple[Any, Any]]
SERVICES = 1 + 30 + FLOOD


def test_the_busiest_services_and_how_many_there_are(both: Both) -> None:
    """As if all had been read and the first ones shown."""
    few, everything = both("/api/v1/services", limit=25)
    assert few.pop("lowest")["success"] == everything.pop("lowest")["success"] == 1
    assert few == everything
    assert few["total"] == SERVICES
    assert [entry["name"] for entry in few["services"][:2]] == ["s29", "s28"]


def test_a_later_page_is_there_too(both: Both) -> None:
    """Also of services that were called once."""
    few, _ = both("/api/v1/services", limit=20, offset=100)
    assert len(few["services"]) == 20
    assert all(entry["name"].startswith(("flood-", "gate")) for entry in few["services"])


def test_a_search_among_many(both: Both) -> None:
    """What matches is counted; of that, the busiest are shown."""
    few, everything = both("/api/v1/services", search="flood", limit=10)
    assert few["total"] == everything["total"] == FLOOD
    assert len(few["services"]) == 10
    few, everything = both("/api/v1/services", search="s07")
    assert (few["lowest"].pop("busiest"), everything["lowest"].pop("busiest")) == (MANY, None)
    assert few == everything


def test_the_topology_of_many(both: Both, monkeypatch: pytest.MonkeyPatch) -> None:
    """The busiest nodes and edges with their figures, and how many are left out."""
    monkeypatch.setattr(topology, "MOST_NODES", 20)
    monkeypatch.setattr(topology, "MOST_EDGES", 15)
    few, everything = both("/api/v1/topology")
    assert few["left_out"]["edges"] == 30 + FLOOD - len(few["edges"])
    assert few["left_out"]["nodes"] == SERVICES - len(few["nodes"])
    assert [node["name"] for node in few["nodes"][:2]] == ["s29", "s28"]
    assert [edge["to"] for edge in few["edges"]] == [edge["to"] for edge in everything["edges"]]
    figures = {node["id"]: node for node in everything["nodes"]}
    assert [node for node in few["nodes"] if figures.get(node["id"], node) != node] == []


def test_only_what_a_topology_shows_is_measured(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Computing measures takes most of its time: not those of edges that are left out."""
    monkeypatch.setattr(topology, "MOST_EDGES", 15)
    computed = []
    over = measures.Measures.over

    def counting(self: measures.Measures, *args: Any, **options: Any) -> Any:
        computed.append(args)
        return over(self, *args, **options)

    monkeypatch.setattr(measures.Measures, "over", counting)
    shown = client.get("/api/v1/topology", **RANGE)
    assert (len(shown["nodes"]), len(shown["edges"])) == (SERVICES, 15)
    assert SERVICES + 15 <= len(computed) <= SERVICES + 2 * 15


def test_a_service_with_many_endpoints(both: Both) -> None:
    """The hundred busiest, and how many more there are."""
    few, everything = both("/api/v1/services/s29")
    assert few["endpoints"][:3] == everything["endpoints"][:3]
    assert len(few["endpoints"]) == 100
    assert few["left_out"] == everything["left_out"]
    assert few["left_out"]["endpoints"] == 3 + FLOOD - 100
    assert few["callers"] == everything["callers"]


def test_a_service_that_calls_many(both: Both) -> None:
    """The hundred busiest of those that it calls."""
    few, everything = both("/api/v1/services/gate")
    assert few["callees"][:29] == everything["callees"][:29]
    assert few["left_out"]["callees"] == everything["left_out"]["callees"] == 30 + FLOOD - 100


def test_the_page_of_a_service_with_many_endpoints_and_callees(both: Both) -> None:
    """Its lists are the same as if all had been read, but for which of equally busy ones."""
    for path, key, busy, count in (
        ("s29", "endpoints", 3, 3 + FLOOD),
        ("gate", "callees", 29, 30 + FLOOD),
    ):
        few, everything = (
            next(shown for shown in page["lists"] if shown["key"] == key)
            for page in both(f"/api/v1/entities/service/{path}")
        )
        assert few["rows"][:busy] == everything["rows"][:busy]
        assert len(few["rows"]) == 100
        assert few["left_out"] == everything["left_out"] == count - 100


def test_the_largest_values_of_many(both: Both) -> None:
    """The explorer's first lines: as if all had been read."""
    few, everything = both("/api/v1/metrics/service_cpm/values", order="top", limit=8)
    assert few == everything
    assert few["left_out"] == SERVICES - 8
    assert few["series"][0]["entity_name"] == "s29"
