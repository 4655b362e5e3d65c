"""Numbers that must not mislead: rates, what is still filling, totals, and both sides of a call."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

import batchmill
from batchmill.sources import service_id
from batchmill.store import Store, decode_numbers, open_store
from batchmill.web.api import listing, measures, overview, service, topology
from batchmill.web.api.entity import entity
from batchmill.web.api.measures import MeasureCache
from batchmill.web.api.parameters import read_range
from tests.web.entities_kit import TicketSold
from tests.web.traffic import USER, Call, Shop

MINUTE = 1_709_215_200
"""2024-02-29T14:00:00Z."""
FILLING = MINUTE + 30.0
"""While that minute is still filling."""
LATER = MINUTE + 70.0
"""When the minutes before it are complete, if it has no calls."""


@contextlib.contextmanager
def shop_with(folder: Path, *calls: Call) -> Iterator[Store]:
    """A store with some calls."""
    with open_store(f"sqlite:///{folder}/store.db") as store:
        Shop(store).commit(calls)
        yield store


def services(store: Store, now: float = LATER, **params: Any) -> Any:
    """The answer about all services at a moment."""
    query = overview.ServicesQuery.read({"from": "now-1h"} | params, now)
    return store.read(lambda snapshot: overview.services(snapshot, query))


def one(store: Store, name: str, now: float = LATER, **params: Any) -> Any:
    """The answer about one service at a moment."""
    time_range = read_range({"from": "now-1h"} | params, now)
    return store.read(lambda snapshot: service.service(snapshot, name, time_range))


def explore(store: Store, metric: str, now: float = LATER, **params: Any) -> Any:
    """The values of one metric, as the explorer shows them."""
    time_range = read_range(params, now)
    return store.read(lambda snapshot: listing.values(snapshot, metric, time_range, {}))


def map_of(store: Store, now: float = LATER) -> Any:
    """The answer about the topology at a moment."""
    time_range = read_range({"from": "now-1h"}, now)
    return store.read(lambda snapshot: topology.topology(snapshot, time_range, None))


def steady(minutes: int, per_minute: int = 10, **more: Any) -> list[Call]:
    """The same calls in each of the complete minutes before now."""
    return [
        Call("shop", 20, MINUTE - 60 * minute, **more)
        for minute in range(1, minutes + 1)
        for _ in range(per_minute)
    ]


@pytest.mark.parametrize("length", ["15m", "1h", "6h", "7d", "30d"])
@pytest.mark.parametrize("grain", ["auto", "hour"])
def test_a_rate_divides_by_the_minutes_that_data_covers(
    tmp_path: Path, length: str, grain: str
) -> None:
    """Ten calls a minute are ten calls a minute, however long before the first data a range is."""
    with shop_with(tmp_path, *steady(12, caller="gate")) as store:
        query: dict[str, Any] = {"from": f"now-{length}", "grain": grain}
        [shown] = services(store, limit="9", **query)["services"]
        detail = one(store, "shop", **query)
        [explored] = explore(store, "service_cpm", **query)["series"]
    assert shown["range"]["cpm"] == 10
    assert {rate for rate in shown["series"]["cpm"] if rate} == {10}
    assert detail["range"]["cpm"] == detail["callers"][0]["cpm"] == 10
    assert {rate for rate in detail["series"]["cpm"] if rate} == {10}
    assert explored["over"] == 10
    assert {rate for rate in explored["values"] if rate} == {10}


@pytest.mark.parametrize("length", ["15m", "6h"])
def test_an_event_type_of_a_user_covers_its_own_minutes(tmp_path: Path, length: str) -> None:
    """A store without spans divides its rates by the minutes since the first event, too."""
    url, oal = f"sqlite:///{tmp_path}/own.db", "ticket_cpm = from(TicketSold.*).cpm();"
    with batchmill.Embedded(oal=oal, store=url, ttl_days=3650) as mill:
        for minute in range(12):
            at = datetime.fromtimestamp(MINUTE - 60 * (1 + minute), UTC)
            for _ in range(10):
                mill.emit(TicketSold(at, "Berlin", 100))
    with open_store(url) as store:
        query: dict[str, Any] = {"from": f"now-{length}"}
        [explored] = explore(store, "ticket_cpm", **query)["series"]
        time_range = read_range(query, LATER)
        page = store.read(lambda snapshot: entity(snapshot, "service", "Berlin", time_range))
    [group] = page["groups"]
    assert explored["over"] == group["range"]["cpm"] == 10
    assert {rate for rate in explored["values"] if rate} == {10}


def test_a_long_bucket_shows_a_fraction_of_a_call_per_minute(tmp_path: Path) -> None:
    """Fifteen calls in an hour are a quarter of a call a minute, not 0."""
    begin = MINUTE - 3 * 3600
    calls = [Call("shop", 20, begin + 60 * minute) for minute in (0, 59, *range(13))]
    with shop_with(tmp_path, *calls) as store:
        query: dict[str, Any] = {"from": "now-6h", "grain": "hour"}
        [shown] = services(store, **query)["services"]
    assert [rate for rate in shown["series"]["cpm"] if rate] == [0.25]


def test_the_minute_that_is_filling_is_named_and_not_in_totals(tmp_path: Path) -> None:
    """Two calls, of which one failed, do not make 50 %; the bucket's own value is still there."""
    filling = [Call("shop", 20, MINUTE, ok=ok) for ok in (True, False)]
    with shop_with(tmp_path, *steady(10), *filling) as store:
        answer, detail = services(store, FILLING), one(store, "shop", FILLING)
    [shown] = answer["services"]
    assert answer["incomplete"] == detail["incomplete"] == MINUTE == answer["times"][-1]
    for whole in (shown["range"], detail["range"]):
        assert (whole["cpm"], whole["success"]) == (10, 1)
    assert answer["lowest"]["success"] == 1
    assert (shown["series"]["cpm"][-1], shown["series"]["success"][-1]) == (2, 0.5)


@pytest.mark.parametrize(
    ("after_s", "incomplete"),
    [(30, True), (69, True), (119, True), (120, False)],
)
def test_the_newest_minute_is_complete_when_nothing_more_comes(
    tmp_path: Path, after_s: int, incomplete: bool
) -> None:
    """A minute after its end, if no later minute has data: the pipeline may be behind."""
    with shop_with(tmp_path, *steady(10), Call("shop", 20, MINUTE)) as store:
        assert (services(store, MINUTE + after_s)["incomplete"] == MINUTE) == incomplete


def test_a_minute_is_complete_some_seconds_after_its_end(tmp_path: Path) -> None:
    """Clients send the spans of its last seconds a little later."""
    with shop_with(tmp_path, *steady(10), Call("shop", 20, MINUTE)) as store:
        assert services(store, MINUTE + 9.0)["incomplete"] == MINUTE - 60
        assert services(store, MINUTE + 11.0)["incomplete"] == MINUTE


def test_the_first_minute_of_all_is_shown(tmp_path: Path) -> None:
    """A newcomer sees calls at once: there is nothing complete to show instead."""
    with shop_with(tmp_path, Call("shop", 20, MINUTE), Call("shop", 20, MINUTE)) as store:
        answer = services(store, FILLING)
    assert answer["services"][0]["range"]["cpm"] == 2


def test_a_service_that_starts_is_listed_before_it_has_totals(tmp_path: Path) -> None:
    """Its calls are in the minute that is filling."""
    with shop_with(tmp_path, *steady(10), Call("new", 20, MINUTE)) as store:
        answer = services(store, FILLING, sort="name")
    rates = {shown["name"]: shown["range"]["cpm"] for shown in answer["services"]}
    assert rates == {"new": None, "shop": 10}


def test_all_services_together_are_the_requests_from_outside(tmp_path: Path) -> None:
    """A request counts once, however many services it passes; whatever is searched for."""
    calls = [
        *steady(10, caller=USER),
        *(Call("cart", 5, MINUTE - 60 * n, caller="shop", ok=n > 1) for n in range(1, 11)),
        Call("cart", 5, MINUTE - 60, caller=USER, ok=False),
    ]
    with shop_with(tmp_path, *calls) as store:
        answers = [services(store), services(store, search="shop"), services(store, limit="1")]
    for answer in answers:
        assert answer["all"]["cpm"] == 10.1
        assert answer["all"]["success"] == 0.99
        lowest = {"id": service_id("cart", True), "name": "cart", "success": 0.8181}
        assert answer["lowest"] == lowest | {"busiest": None}


@pytest.mark.parametrize("search", [None, "s"])
def test_the_lowest_success_is_that_of_the_calls_in_the_range(
    tmp_path: Path, search: str | None
) -> None:
    """Some services have gaps, some no calls there but failures around it, in the same hour."""
    chance = random.Random(7)
    begin = MINUTE - 6 * 3600
    calls = []
    for service_number in range(6):
        gap = chance.randrange(360)
        for minute in range(360):
            if chance.random() < 0.4 and not gap <= minute < gap + 120:
                ok = chance.random() < 0.9 and not gap - 10 <= minute < gap
                calls.append(Call(f"s{service_number}", 20, begin + 60 * minute, ok=ok))
    with shop_with(tmp_path, *calls) as store:
        for _ in range(40):
            first = chance.randrange(350)
            last = chance.randrange(first + 1, 360)
            from_s, to_s = begin + 60 * first, begin + 60 * last
            shares: dict[str, float] = {}
            for name in {call.service for call in calls}:
                own = [
                    call.ok for call in calls if call.service == name and from_s <= call.at < to_s
                ]
                if own:
                    shares[name] = sum(own) * 10_000 // len(own) / 10_000
            params: dict[str, Any] = {"from": str(from_s), "to": str(to_s)}
            params |= {"search": search} if search else {}
            answer = services(store, **params, sort="success", order="asc")
            shown = [
                (row["range"]["success"], row["name"])
                for row in answer["services"]
                if row["range"]["success"] is not None
            ]
            assert shown == sorted((share, name) for name, share in shares.items())
            lowest = answer["lowest"] and (answer["lowest"]["success"], answer["lowest"]["name"])
            assert lowest == min(shown, default=None)


def test_totals_are_there_for_any_number_of_services(tmp_path: Path) -> None:
    """More than a page shows."""
    calls = [Call(f"s{n}", 5, MINUTE - 60, ok=n != 7, caller=USER) for n in range(120)]
    with shop_with(tmp_path, *calls) as store:
        answer = services(store, limit="50")
    assert (len(answer["services"]), answer["total"]) == (50, 120)
    assert (answer["all"]["cpm"], answer["lowest"]["name"]) == (120, "s7")


def test_totals_of_the_busiest_services_say_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of how many: the failure of the one that is called least is not among them."""
    calls = [
        Call(f"s{n}", 5, MINUTE - 60, ok=n != 0, caller=USER)
        for n in range(8)
        for _ in range(n + 1)
    ]
    with shop_with(tmp_path, *calls) as store:
        everything = services(store)
        for module in (measures, overview):
            monkeypatch.setattr(module, "MANY", 5)
        some = [services(store), services(store, search="s7")]
    assert (everything["all"]["cpm"], everything["all"]["busiest"]) == (36, None)
    assert (everything["lowest"]["name"], everything["lowest"]["busiest"]) == ("s0", None)
    for answer in some:
        assert (answer["all"]["cpm"], answer["all"]["busiest"]) == (8 + 7 + 6 + 5 + 4, 5)
        assert (answer["lowest"]["success"], answer["lowest"]["busiest"]) == (1, 5)


def test_an_edge_has_the_values_of_both_sides(tmp_path: Path) -> None:
    """A call that timed out failed for its caller, and succeeded for its callee."""
    calls = [Call("cart", 5, MINUTE - 60, caller="shop", caller_ok=n != 0) for n in range(4)]
    with shop_with(
        tmp_path, *calls, Call("db", 3, MINUTE - 60, caller="cart", layer="VIRTUAL_DATABASE")
    ) as store:
        [edge, to_database] = map_of(store)["edges"]
        [caller] = one(store, "cart")["callers"]
    for shown in (edge, caller):
        assert (shown["caller"]["success"], shown["callee"]["success"]) == (0.75, 1)
    assert (to_database["caller"]["cpm"], to_database["callee"]) == (1, None)


def test_a_databases_page_has_the_values_of_its_accesses(tmp_path: Path) -> None:
    """By its id, as the topology links to it, and by its name."""
    calls = [
        Call("db", 0.4, MINUTE - 60 * n, caller="cart", layer="VIRTUAL_DATABASE", ok=n != 1)
        for n in range(1, 5)
    ]
    with shop_with(tmp_path, *calls) as store:
        [node] = [node for node in map_of(store)["nodes"] if node["name"] == "db"]
        pages = [one(store, node["id"]), one(store, "db")]
    for page in pages:
        assert page["service"]["id"] == node["id"]
        assert page["measured_by"] == "callers"
        assert (page["range"]["cpm"], page["range"]["success"]) == (1, 0.75)
        assert page["range"]["avg"] == 0.4
        p50 = next(value for value in page["series"]["percentiles"]["p50"] if value)
        assert p50 == pytest.approx(0.4, rel=0.02)
        assert [success for success in page["series"]["success"] if success is not None] == [
            1,
            1,
            1,
            0,
        ]
        assert [caller["name"] for caller in page["callers"]] == ["cart"]


def test_a_host_outside_has_a_page_too(tmp_path: Path) -> None:
    """It is known from relations only; so is the user."""
    outside = [
        Call("api.pay", 30, MINUTE - 60 * n, caller=name, layer="VIRTUAL_X")
        for n, name in ((1, "shop"), (2, "cart"))
    ]
    with shop_with(tmp_path, *outside, Call("shop", 20, MINUTE - 60, caller=USER)) as store:
        names = {node["name"]: node["id"] for node in map_of(store)["nodes"]}
        for name in ("api.pay", USER):
            page = one(store, names[name])
            assert page["service"]["name"] == name
        page = one(store, names["api.pay"])
    assert page["range"]["cpm"] == 1
    assert [rate for rate in page["series"]["cpm"] if rate] == [1, 1]
    assert {caller["name"] for caller in page["callers"]} == {"shop", "cart"}


class _Plan:
    """Reads a tally by number."""

    def states(self, values: Sequence[Any]) -> tuple[Any, ...]:
        return (decode_numbers(values[0]),)


def test_a_cache_of_measures_removes_the_older_half(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows and tallies are kept up to a limit, and results are right."""
    monkeypatch.setattr(measures, "MOST_CACHED_ROWS", 10)
    monkeypatch.setattr(measures, "MOST_TALLIES", 4)
    cache = MeasureCache()
    known = cache.rows("mark", 1)
    known.update({(number, 0): (number, ()) for number in range(12)})
    assert [key for key, _ in cache.rows("mark", 1)] == [6, 7, 8, 9, 10, 11]
    assert cache.rows("mark", 60) == {}
    for number in range(20):
        tally = cache.tally(_Plan(), [f"{number + 9}", "1:2"], ["5", "1"])
        assert tally == {number + 9: 1, 1: 3, 5: 1}
        assert len(cache._tallies) <= 4
