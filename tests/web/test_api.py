"""The JSON API: every figure is that of the calls that were written, worked out the plain way."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from batchmill.sources import Grain, endpoint_id, service_id
from batchmill.store import EntityRow, StatementRow, TopNRow, open_store
from batchmill.web.api import measures
from tests.web.kit import (
    DATABASE_STATEMENTS,
    START_S,
    STATEMENTS,
    Call,
    CallWriter,
    Client,
    bucket_of,
    figures,
    percentile,
    serving,
    serving_all,
)
from tests.web.traffic import WITHOUT_MICROS

HOUR_S = 3600
NEWEST_S = START_S + 30 * HOUR_S


def _calls(seed: int = 7) -> list[Call]:
    """Two and a half days of calls, with holes: of a shop, its parts and a database."""
    chance = random.Random(seed)
    calls = []
    for _ in range(1500):
        service = chance.choice(["shop", "shop", "cart", "Änderung/1"])
        calls.append(
            Call(
                service,
                START_S - 30 * HOUR_S + chance.randrange(60 * HOUR_S),
                int(chance.lognormvariate(5, 1)),
                chance.random() < 0.95,
                f"GET /{chance.randrange(3)}",
                chance.choice("ab"),
                chance.choice([None, "gate", "shop"]) if service != "shop" else None,
            )
        )
    calls += [
        Call("orders", result.at_s, result.latency // 2, caller="shop", database=True)
        for result in calls[:200]
    ]
    return [*calls, Call("shop", NEWEST_S, 77)]


CALLS = _calls()


def _of(
    service: str, start_s: int, end_s: int, calls: Sequence[Call] = CALLS, **more: Any
) -> list[Call]:
    return [
        call
        for call in calls
        if call.service == service
        and start_s <= call.at_s < end_s
        and all(getattr(call, name) == value for name, value in more.items())
    ]


def _service(name: str, normal: bool, layer: str) -> EntityRow:
    id_ = service_id(name, normal)
    return EntityRow("service", id_, name, frozenset({layer}), {"service": name})


@pytest.fixture(scope="module")
def calls_store(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The address of a store with all the calls."""
    path: Path = tmp_path_factory.mktemp("web") / "store.db"
    url = f"sqlite:///{path}"
    with open_store(url) as store:
        writer = CallWriter(store)
        shop = _service("shop", True, "GENERAL")
        orders = _service("orders", False, "VIRTUAL_DATABASE")
        minute = bucket_of(Grain.MINUTE, START_S)
        for number in range(0, len(CALLS), 400):
            writer.write(CALLS[number : number + 400])
        writer.write(
            [],
            [
                TopNRow(stream, entity, minute, ms, ms, f"t{ms}", f"s{ms}", f"SELECT {ms}", text)
                for stream, entity in ((STATEMENTS, 0), (DATABASE_STATEMENTS, 1))
                for ms, text in ((900, "SELECT ?"), (800, "SELECT ?"), (700, "DELETE"))
            ],
            [
                StatementRow(stream, entity, minute + number, "SELECT ?", 3, 30)
                for stream, entity in ((STATEMENTS, 0), (DATABASE_STATEMENTS, 1))
                for number in range(2)
            ],
            [shop, orders],
        )
    return url


@pytest.fixture(scope="module")
def client(calls_store: str) -> Iterator[Client]:
    """A server over the store of the calls."""
    with serving_all(calls_store) as connected:
        yield connected


RANGES = [
    pytest.param(START_S - 90 * 60, START_S, "minute", id="minutes"),
    pytest.param(START_S - 24 * HOUR_S + 17 * 60, START_S + 17 * 60, "hour", id="ragged hours"),
    pytest.param(START_S - 24 * HOUR_S - 60, NEWEST_S + HOUR_S, "hour", id="up to the newest"),
    pytest.param(START_S - 29 * HOUR_S - 120, START_S + 25 * HOUR_S, "day", id="ragged days"),
    pytest.param(START_S - 20 * HOUR_S, START_S + 180, "minute", id="many minutes"),
]


@pytest.mark.parametrize(("start_s", "end_s", "grain"), RANGES)
def test_a_service_over_a_range_is_all_its_calls(
    client: Client, start_s: int, end_s: int, grain: str
) -> None:
    """However ragged the range, its figures are those of just the calls in it."""
    query = {"from_": start_s, "to": end_s, "grain": grain, "limit": 100}
    answer = client.get("/api/v1/services", **query)
    minutes = (min(end_s, NEWEST_S + 60) - start_s) / 60
    expected = {
        name: figures(_of(name, start_s, end_s, database=False), minutes)
        for name in ("shop", "cart", "Änderung/1")
        if _of(name, start_s, end_s)
    }
    assert {service["name"]: service["range"] for service in answer["services"]} == expected
    assert answer["total"] == len(expected)
    again = client.get("/api/v1/services", **query)
    assert again == answer  # what was remembered is what was worked out


@pytest.mark.parametrize(("start_s", "end_s", "grain"), RANGES)
def test_each_bucket_has_the_metrics_own_values(
    client: Client, calls_store: str, start_s: int, end_s: int, grain: str
) -> None:
    """The series are what the store answers for each metric, bucket by bucket."""
    query = {"from_": start_s, "to": end_s, "grain": grain, "limit": 100}
    answer = client.get("/api/v1/services", **query)
    size_s = 60 * Grain(grain).minutes
    assert answer["times"] == list(range(start_s // size_s * size_s, end_s, size_s))
    with open_store(calls_store) as store:
        for figure, metric in (
            ("avg", "service_resp_time_micros"),
            ("p99", "service_percentile_micros"),
            ("success", "service_sla"),
            ("apdex", "service_apdex"),
        ):
            values = store.values(metric, grain=Grain(grain))
            for service in answer["services"]:
                mine: dict[int, Any] = {
                    value.bucket: value.value
                    for value in values
                    if value.entity_id == service["id"]
                }
                shown = [mine.get(bucket_of(Grain(grain), time)) for time in answer["times"]]
                if figure == "p99":
                    shown = [value and value["{p=99}"] for value in shown]
                if figure in ("avg", "p99"):
                    shown = [None if value is None else value / 1000 for value in shown]
                if figure in ("success", "apdex"):
                    shown = [None if value is None else value / 10_000 for value in shown]
                assert service["series"][figure] == shown, (figure, service["name"])


@pytest.mark.parametrize(("start_s", "end_s", "grain"), RANGES)
def test_buckets_of_any_length_show_calls_per_minute(
    client: Client, start_s: int, end_s: int, grain: str
) -> None:
    """An hour or a day shows the rate over its minutes that have data, not a truncated 0."""
    query = {"from_": start_s, "to": end_s, "grain": grain, "limit": 100}
    answer = client.get("/api/v1/services", **query)
    first_s = min(call.at_s for call in CALLS) // 60 * 60
    size_s = 60 * Grain(grain).minutes
    for service in answer["services"]:
        expected = []
        for time_s in answer["times"]:
            calls = _of(service["name"], time_s, time_s + size_s, database=False)
            minutes = (min(time_s + size_s, NEWEST_S + 60) - max(time_s, first_s)) / 60
            expected.append(round(len(calls) / minutes, 3) if calls else None)
        assert service["series"]["cpm"] == expected


@pytest.mark.parametrize(
    ("compare", "back_s"), [("before", 4 * HOUR_S), ("1d", 24 * HOUR_S), ("1w", 168 * HOUR_S)]
)
def test_services_are_compared_with_an_earlier_time(
    client: Client, compare: str, back_s: int
) -> None:
    """With the same services then, whoever is first at that time, point by point."""
    start_s, end_s = START_S - 4 * HOUR_S + 600, START_S
    query = {"from_": start_s, "to": end_s, "grain": "hour", "sort": "avg", "limit": 2}
    answer = client.get("/api/v1/services", compare=compare, **query)
    before = answer.pop("before")
    names = [service["name"] for service in answer["services"]]
    plain = client.get("/api/v1/services", **query)
    assert plain.pop("before") is None
    assert answer == plain
    then = client.get(
        "/api/v1/services",
        **{**query, "from_": start_s - back_s, "to": end_s - back_s, "limit": 100},
    )
    assert (before["from"], before["to"]) == (start_s - back_s, end_s - back_s)
    assert [time_s + back_s for time_s in before["times"]] == answer["times"]
    then["services"] = [service for service in then["services"] if service["name"] in names]
    assert before == {name: value for name, value in then.items() if name in before}
    assert bool(before["services"]) is (compare != "1w")
    nobody = client.get("/api/v1/services", compare=compare, search="nobody", **query)
    assert nobody["before"]["services"] == nobody["services"] == []


def test_services_are_sorted_searched_and_cut(client: Client) -> None:
    """By any figure, either way, by part of the name in any case, page by page."""
    query = {"from_": START_S - 24 * HOUR_S, "to": START_S}

    def names(**more: Any) -> list[str]:
        answer = client.get("/api/v1/services", **query, **more)
        return [service["name"] for service in answer["services"]]

    by_calls = sorted(
        ("shop", "cart", "Änderung/1"),
        key=lambda name: -len(_of(name, START_S - 24 * HOUR_S, START_S)),
    )
    assert names() == by_calls
    assert names(order="asc") == by_calls[::-1]
    assert names(sort="name") == ["cart", "shop", "Änderung/1"]
    assert names(sort="name", limit=1, offset=1) == ["shop"]
    assert names(search="änder") == ["Änderung/1"]
    assert names(search="nobody") == []
    assert len(names(layer="GENERAL")) == 3
    assert names(layer="MESH") == []


def test_a_service_with_its_parts(client: Client) -> None:
    """Its endpoints and instances, the busiest first, each with the figures of its own calls."""
    start_s, end_s = START_S - 24 * HOUR_S + 60, START_S
    answer = client.get("/api/v1/services/cart", from_=start_s, to=end_s)
    minutes = (end_s - start_s) / 60
    for part, field in (("endpoints", "endpoint"), ("instances", "instance")):
        names = {getattr(call, field) for call in CALLS}
        expected = []
        for name in names:
            whole = figures(_of("cart", start_s, end_s, **{field: name}), minutes)
            if whole["cpm"]:
                expected.append({"name": name, **whole} | {"apdex": None})
        expected.sort(key=lambda part: (-part["cpm"], part["name"]))
        shown = [
            {name: value for name, value in result.items() if name != "id"} | {"apdex": None}
            for result in answer[part]
        ]
        assert shown == expected
    assert answer["endpoints"][0]["id"] == endpoint_id(
        service_id("cart", True), answer["endpoints"][0]["name"]
    )
    assert answer["range"] == figures(_of("cart", start_s, end_s), minutes)


def test_a_services_percentiles_over_time(client: Client) -> None:
    """Five ranks of each bucket."""
    answer = client.get("/api/v1/services/shop", from_=START_S - 5 * HOUR_S, to=START_S)
    for rank, values in answer["series"]["percentiles"].items():
        for start_s, value in zip(answer["times"], values, strict=True):
            calls = _of("shop", start_s, start_s + HOUR_S)
            assert value == (percentile(calls, int(rank[1:])) if calls else None)


def test_a_fast_service_has_fractions_of_a_millisecond(tmp_path: Path) -> None:
    """Averages and percentiles of calls, relations and parts that take 120 to 900 µs."""
    url = f"sqlite:///{tmp_path}/store.db"
    calls = [Call("fast", START_S + 60 * minute, 0, caller="gate") for minute in range(60)]
    with open_store(url) as store:
        CallWriter(store).write(calls)
    end_s = START_S + HOUR_S
    with serving(url) as client:
        answer = client.get("/api/v1/services/fast", from_=START_S, to=end_s)
        edges = client.get("/api/v1/topology", from_=START_S, to=end_s)["edges"]
    expected = figures(calls, 60)
    assert 0.12 <= expected["avg"] <= expected["p99"] <= 0.9
    assert answer["range"] == expected
    for part in (answer["endpoints"][0], answer["instances"][0], edges[0]):
        assert (part["avg"], part["p99"]) == (expected["avg"], expected["p99"])
    assert answer["callers"][0]["avg"] == expected["avg"]
    assert all(0.1 < value < 1 for value in answer["series"]["percentiles"]["p50"])


def test_0_ms_of_events_in_milliseconds_stay_0(tmp_path: Path) -> None:
    """Less than a millisecond is all that is known; the page says so."""
    url = f"sqlite:///{tmp_path}/store.db"
    with open_store(url) as store:
        CallWriter(store).write([Call("fast", START_S, 0, whole=True)])
    with serving(url) as client:
        service = client.get("/api/v1/services/fast", from_=START_S, to=START_S + HOUR_S)
    assert (service["range"]["avg"], service["range"]["p99"]) == (0, 0)


def test_milliseconds_are_shown_as_long_as_there_are_no_microseconds(tmp_path: Path) -> None:
    """A store that an older version began: the metrics that cover more of the range are read."""
    url = f"sqlite:///{tmp_path}/store.db"
    old, new = ([Call("fast", START_S + 60 * minute, 0)] for minute in (0, 5))

    def shown(client: Client, first: int, last: int) -> tuple[Any, Any]:
        query = {"from_": START_S + 60 * first, "to": START_S + 60 * last, "grain": "minute"}
        [service] = client.get("/api/v1/services", **query)["services"]
        return service["range"]["avg"], service["range"]["p99"]

    with open_store(url) as store, serving(url) as client:
        CallWriter(store, script=WITHOUT_MICROS).write(old)
        assert shown(client, 0, 5) == (0, 0)
        CallWriter(store, stream="later").write(new)
        exact = figures(new)
        assert shown(client, 5, 9) == (exact["avg"], exact["p99"])
        assert shown(client, 0, 5) == (0, 0)
        assert shown(client, 0, 9) == (0, 0)


def test_a_service_is_found_by_id_whatever_is_in_it(client: Client) -> None:
    """An id is base64, which may hold a slash; a name may hold anything."""
    id_ = service_id("Änderung/1", True)
    for given in (id_, "Änderung%2F1", id_.replace("/", "%2F")):
        answer = client.get(f"/api/v1/services/{given}", from_=START_S - HOUR_S, to=START_S)
        assert answer["service"] == {"id": id_, "name": "Änderung/1", "layers": ["GENERAL"]}


def test_callers_and_callees(client: Client) -> None:
    """Who calls a service, as it saw it, and whom it calls, be it a database."""
    start_s, end_s = START_S - 24 * HOUR_S, START_S
    query = {"from_": start_s, "to": end_s}
    minutes = (end_s - start_s) / 60
    cart = client.get("/api/v1/services/cart", **query)
    expected = {
        name: figures(_of("cart", start_s, end_s, caller=name), minutes)
        for name in ("gate", "shop")
    }
    assert {caller["name"]: caller["cpm"] for caller in cart["callers"]} == {
        name: values["cpm"] for name, values in expected.items()
    }
    assert {caller["name"]: caller["avg"] for caller in cart["callers"]} == {
        name: values["avg"] for name, values in expected.items()
    }
    shop = client.get("/api/v1/services/shop", **query)
    called = {callee["name"]: callee for callee in shop["callees"]}
    assert called.keys() == {"cart", "Änderung/1", "orders"}
    orders = figures(_of("orders", start_s, end_s), minutes)
    assert (called["orders"]["cpm"], called["orders"]["avg"]) == (orders["cpm"], orders["avg"])


def test_slow_statements_with_counts(client: Client) -> None:
    """Each normalised statement once, its slowest run, how often it ran, and in which database."""
    query = {"from_": START_S - HOUR_S, "to": START_S + HOUR_S}
    for service in ("shop", "orders"):
        statements = client.get(f"/api/v1/services/{service}", **query)["statements"]
        assert [
            (
                result["statement"],
                result["latency"],
                result["runs"],
                result["total_ms"],
                result["database_name"],
            )
            for result in statements
        ] == [("SELECT 900", 900, 6, 60, "orders"), ("SELECT 700", 700, 0, 0, "orders")]


def test_a_service_that_is_not_there(client: Client) -> None:
    """404, with the nearest names."""
    status, answer = client.ask("/api/v1/services/shopp")
    assert (status, answer["error"]) == (
        404,
        "no service is called 'shopp': did you mean shop? There are also cart, orders, Änderung/1",
    )


def test_who_calls_whom(client: Client) -> None:
    """An edge for each pair, as the callee saw it; a database as its callers did."""
    start_s, end_s = START_S - 24 * HOUR_S + 300, START_S - 60
    answer = client.get("/api/v1/topology", from_=start_s, to=end_s)
    minutes = (end_s - start_s) / 60
    names = {node["id"]: node["name"] for node in answer["nodes"]}
    edges = {(names[edge["from"]], names[edge["to"]]): edge for edge in answer["edges"]}
    pairs = {
        (call.caller, call.service)
        for call in CALLS
        if call.caller and start_s <= call.at_s < end_s
    }
    assert edges.keys() == pairs
    for (caller, callee), edge in edges.items():
        expected = figures(_of(callee, start_s, end_s, caller=caller), minutes)
        shown = {name: edge[name] for name in ("cpm", "avg", "p99", "success")}
        assert shown == {name: expected[name] for name in shown}
    nodes = {node["name"]: node for node in answer["nodes"]}
    expected = figures(_of("orders", start_s, end_s), minutes)
    assert nodes["orders"]["cpm"] == expected["cpm"]
    assert nodes["orders"]["layers"] == ["VIRTUAL_DATABASE"]
    assert nodes["gate"]["cpm"] is None
    assert answer["left_out"] == {"nodes": 0, "edges": 0}


def test_the_topology_of_a_layer(client: Client) -> None:
    """Its services, and whoever is at the other end of their edges."""
    query = {"from_": START_S - 24 * HOUR_S, "to": START_S, "layer": "VIRTUAL_DATABASE"}
    answer = client.get("/api/v1/topology", **query)
    assert {node["name"] for node in answer["nodes"]} == {"shop", "orders"}
    assert len(answer["edges"]) == 1


def test_the_values_of_a_metric(client: Client, calls_store: str) -> None:
    """A series for each entity: rates with their fractions, else what the store has."""
    query = {"from_": START_S - 24 * HOUR_S, "to": START_S, "grain": "hour"}
    hours = range(START_S - 24 * HOUR_S, START_S, HOUR_S)
    rates: dict[str, list[Any]] = {}
    for call in CALLS:
        if call.at_s in range(hours[0], START_S) and not call.database:
            id_ = endpoint_id(service_id(call.service, True), call.endpoint)
            mine = rates.setdefault(id_, [None] * len(hours))
            place = (call.at_s - hours[0]) // HOUR_S
            mine[place] = (mine[place] or 0) + 1
    rates = {id_: [n and round(n / 60, 3) for n in counts] for id_, counts in rates.items()}
    percentiles: dict[str, list[Any]] = {}
    buckets = [bucket_of(Grain.HOUR, start_s) for start_s in hours]
    with open_store(calls_store) as store:
        for value in store.values("endpoint_percentile", grain=Grain.HOUR):
            if value.bucket in buckets:
                mine = percentiles.setdefault(value.entity_id, [None] * len(hours))
                mine[buckets.index(value.bucket)] = value.value
    for metric, expected in (("endpoint_cpm", rates), ("endpoint_percentile", percentiles)):
        answer = client.get(f"/api/v1/metrics/{metric}/values", **query)
        assert answer["times"] == list(hours)
        assert {e["entity_id"]: e["values"] for e in answer["series"]} == expected
        assert answer["left_out"] == 0
    cut = client.get("/api/v1/metrics/endpoint_cpm/values", **query, limit=2)
    assert (len(cut["series"]), cut["left_out"]) == (2, len(expected) - 2)
    one = client.get("/api/v1/metrics/service_cpm/values", **query, entity="shop")
    assert [line["entity_name"] for line in one["series"]] == ["shop"]


def test_metrics_and_entities(client: Client) -> None:
    """What is measured, how it is defined, and about whom."""
    metrics = {metric["name"]: metric for metric in client.get("/api/v1/metrics")["metrics"]}
    assert metrics["service_cpm"]["definition"] == "from(Service.*).cpm()"
    assert metrics["service_percentile"]["labelled"] is True
    answer = client.get("/api/v1/entities", kind="service", name="OR")
    assert [entity["name"] for entity in answer["entities"]] == ["orders"]
    assert client.get("/api/v1/entities", kind="endpoint", limit=1)["total"] == 10


def test_the_slowest_calls(client: Client) -> None:
    """Ranked over the range; without a stream, those of the first there is."""
    query = {"from_": START_S - HOUR_S, "to": START_S + HOUR_S}
    answer = client.get("/api/v1/topn", **query, stream=STATEMENTS, entity="shop", n=2)
    assert answer["streams"] == [DATABASE_STATEMENTS, STATEMENTS]
    assert [(record["rank"], record["latency"]) for record in answer["records"]] == [
        (1, 900),
        (2, 800),
    ]
    assert client.get("/api/v1/topn", **query)["stream"] == DATABASE_STATEMENTS


@pytest.mark.parametrize(
    ("path", "params", "status", "reason"),
    [
        ("/api/v1/services", {"sort": "size"}, 400, "it must be cpm, name, avg"),
        ("/api/v1/services", {"limit": "0"}, 400, "a whole number from 1 to 1,000"),
        ("/api/v1/services", {"from_": "now-1d", "grain": "minute"}, 400, "at most 1,000,000"),
        ("/api/v1/services", {"compare": "2d"}, 400, "it must be before, 1d, 1w"),
        ("/api/v1/services", {"compare": "1w", "from_": 9, "to": 99}, 400, "before the year 1970"),
        ("/api/v1/services", {"page": 2}, 400, "'page' is no parameter here"),
        ("/api/v1/services", {"search": "\0"}, 400, "NUL"),
        ("/api/v1/services/%00", {}, 400, "NUL"),
        ("/api/v1/metrics/service_cpn/values", {}, 404, "did you mean service_cpm"),
        ("/api/v1/metrics/service_cpm/values", {"entity": "x"}, 404, "no entity 'x'"),
        ("/api/v1/topn", {"stream": "x"}, 404, "there are top_n_database_statement"),
        ("/api/v1/nothing", {}, 404, "openapi.json"),
        ("/api/v1/pipeline", {}, 503, "has no run"),
    ],
)
def test_a_bad_question_gets_a_reason(
    client: Client, path: str, params: dict[str, Any], status: int, reason: str
) -> None:
    """What is wrong, and what would be right."""
    answer = client.ask(path, **params)
    assert answer[0] == status
    assert reason in answer[1]["error"]


def test_too_many_rows_are_refused(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    """A question that would read without end is answered 400 instead."""
    monkeypatch.setattr(measures, "MOST_ROWS", 10)
    status, answer = client.ask("/api/v1/services", from_=START_S - HOUR_S * 24, to=START_S)
    assert (status, "rows would be read" in answer["error"]) == (400, True)


def test_postgresql_answers_the_same(postgres_url: str, calls_store: str) -> None:
    """Both databases, one answer: overview, service, topology, values and entities."""
    with open_store(postgres_url) as store:
        CallWriter(store).write(CALLS)
    query = {"from_": START_S - 24 * HOUR_S + 17 * 60, "to": START_S + 17 * 60}
    with serving(postgres_url) as one, serving(calls_store) as other:
        for path, more in (
            ("/api/v1/services", query),
            ("/api/v1/topology", query),
            ("/api/v1/entities", {}),
            ("/api/v1/metrics/endpoint_percentile/values", query),
            ("/api/v1/status", {}),
        ):
            ours, theirs = one.get(path, **more), other.get(path, **more)
            for answer in (ours, theirs):
                answer.pop("now_s", None)
                answer.pop("answers", None)
                answer.get("store", {}).pop("url", None)
            assert ours == theirs, path
        service = one.get("/api/v1/services/cart", **query)
        assert service == other.get("/api/v1/services/cart", **query)
