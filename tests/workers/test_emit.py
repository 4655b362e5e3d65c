"""What becomes of events: counted exactly, or left out under a reason."""

from __future__ import annotations

import asyncio
import random
import time
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta, timezone
from pathlib import Path
from typing import Any
from zoneinfo import ZoneInfo

import pytest

pytest.importorskip("pyarrow")
pytest.importorskip("pyspark")

from batchmill import ConfigError, Embedded
from batchmill.oal import OalErrors, load
from batchmill.sources import Grain, UnknownNameError, service, source
from batchmill.spool import BadRowsError
from batchmill.store import open_store
from batchmill.workers import WorkerSettings
from tests.kit.events import BASKET, Basket, Mood
from tests.kit.pipelines import (
    EVERY_FUNCTION,
    EVERY_SOURCE,
    differences,
    every_events,
    expected,
    stored,
)
from tests.kit.stores import Backend
from tests.kit.threads import WAIT_S, spawn
from tests.workers.kit import NOON, OAL, MillSale, MillVisit, embedded, totals


@source(entity=service("shop"))
@dataclass(frozen=True)
class MillOrder:
    """An event with a field of every kind."""

    shop: str
    cents: int
    time: datetime | None = None
    weight: float | None = None
    mood: Mood = Mood.GOOD
    basket: Basket = BASKET
    tags: list[str] = field(default_factory=list)
    labels: dict[str, str] = field(default_factory=dict)


ORDERS = """
mill_orders = from(MillOrder.*).count();
mill_good = from(MillOrder.*).filter(mood == Mood.GOOD).count();
mill_items = from(MillOrder.basket.items).sum();
mill_noted = from(MillOrder.*).filter(basket.note == "gift").count();
mill_tagged = from(MillOrder.*).filter(tags contain "new").count();
mill_till = from(MillOrder.*).filter(labels["till"] == "2").count();
mill_weight = from(MillOrder.weight).doubleAvg();
"""


@pytest.fixture
def url(tmp_path: Path) -> str:
    """The address of an empty place for a store."""
    return f"sqlite:///{tmp_path}/metrics.db"


def values(url: str) -> dict[str, Any]:
    """The values of a day, by metric; of one entity."""
    with open_store(url, create=False) as store:
        return {
            metric.name: value.value
            for metric in store.metrics()
            for value in store.values(metric, grain=Grain.DAY)
        }


def test_every_function_equals_the_oracle(backend: Backend) -> None:
    """Events of every type in random order, split over calls, flushes and two instances."""
    events = every_events(1, EVERY_SOURCE, 60)
    rows = [(name, row) for name, some in events.items() for row in some]
    rng = random.Random(1)
    rng.shuffle(rows)
    settings: dict[str, Any] = {"l1_chunk": 7, "ttl_days": 3650}
    with (
        Embedded(oal=EVERY_FUNCTION, store=backend.url, **settings) as one,
        Embedded(oal=load(EVERY_FUNCTION), store=backend.url, **settings) as other,
    ):
        for name, row in rows:
            mill = rng.choice((one, other))
            if rng.random() < 0.5:
                assert mill.emit(row, name)
            else:
                assert mill.emit_many([row], name, timeout=WAIT_S) == 1
            if rng.random() < 0.005:
                assert mill.flush(WAIT_S)
    accepted = [mill.stats().accepted for mill in (one, other)]
    assert [mill.stats().committed for mill in (one, other)] == accepted
    assert sum(accepted) == len(rows)
    assert differences(stored(backend.url), expected(events)) == []


def test_events_are_in_the_store_after_flush(backend: Backend) -> None:
    """All that were accepted, without closing; and again."""
    with embedded(backend.url) as mill:
        for total in (1, 2):
            assert mill.emit(MillSale("a", 10))
            assert mill.flush(WAIT_S)
            assert totals(backend.url) == (total, 10 * total)
        assert mill.stats().commits == 2
    assert mill.close()


def test_events_are_committed_without_a_call(url: str) -> None:
    """When the periods are over, though no event comes any more."""
    with embedded(url, l1_period_s=0.01, l2_period_s=0.01) as mill:
        mill.emit(MillSale("a", 1))
        while not mill.stats().committed:
            pass
        assert totals(url) == (1, 1)


def test_fields_of_every_kind(url: str) -> None:
    """Enums, structs, lists, maps, and values that are missing; from classes and from mappings."""
    order = MillOrder("a", 1, NOON, 1.5, Mood.BAD, Basket(2, "gift"), ["new"], {"till": "2"})
    rows = [
        {"time": NOON, "shop": "a", "cents": 1, "mood": "GOOD", "basket": {"items": 5}},
        {"time": NOON, "shop": "a", "cents": 1, "weight": 2, "labels": {"till": "2"}},
    ]
    with Embedded(oal=ORDERS, store=url, ttl_days=3650) as mill:
        assert mill.emit_many([order, replace(order, weight=None)]) == 2
        assert mill.emit_many(rows, "MillOrder") == 2
        assert mill.emit_many([order, MillVisit("a", 1.0), order]) == 3
    assert (mill.stats().committed, mill.stats().unused) == (6, 1)
    assert values(url) == {
        "mill_orders": 6,
        "mill_good": 1,
        "mill_items": 2 * 4 + 5,
        "mill_noted": 4,
        "mill_tagged": 4,
        "mill_till": 5,
        "mill_weight": (3 * 1.5 + 2) / 4,
    }


@pytest.mark.parametrize(
    ("moment", "minute"),
    [
        (NOON.astimezone(timezone(timedelta(hours=5))), 202611151200),
        (datetime(2026, 10, 25, 2, 30, fold=0, tzinfo=ZoneInfo("Europe/Berlin")), 202610250030),
        (datetime(2026, 10, 25, 2, 30, fold=1, tzinfo=ZoneInfo("Europe/Berlin")), 202610250130),
        (NOON + timedelta(seconds=59, microseconds=999_999), 202611151200),
        (NOON - timedelta(days=900), 202405291200),
    ],
)
def test_an_event_goes_to_its_own_minute(url: str, moment: datetime, minute: int) -> None:
    """Whatever its time zone, and however late it is."""
    with embedded(url) as mill:
        mill.emit(MillSale("a", 1, NOON))
        mill.flush(WAIT_S)
        mill.emit_many([MillSale("a", 1, moment), MillSale("a", 1, NOON)])
        mill.emit({"shop": "a", "cents": 1, "time": moment}, "MillSale")
    with open_store(url) as store:
        buckets = {value.bucket: value.value for value in store.values("mill_sales")}
        late = store.counters().get(("late", "MillSale", ""), 0)
    on_time = minute == 202611151200
    assert buckets == ({minute: 4} if on_time else {minute: 2, 202611151200: 2})
    assert late == mill.stats().late == (0 if on_time else 2)


def test_events_without_a_time_happened_now(url: str) -> None:
    """Those of a class without the field, of a mapping without it, and where it is None."""
    oal = OAL + "mill_visits = from(MillVisit.*).count();" + ORDERS
    before = datetime.now(UTC)
    with Embedded(oal=oal, store=url) as mill:
        mill.emit(MillVisit("a", 1.0))
        mill.emit({"shop": "a", "cents": 1}, "MillSale")
        mill.emit(MillOrder("a", 1))
    times = {Grain.MINUTE.bucket(moment) for moment in (before, datetime.now(UTC))}
    with open_store(url) as store:
        for metric in ("mill_visits", "mill_sales", "mill_orders"):
            assert {value.bucket for value in store.values(metric)} <= times
            assert sum(value.value for value in store.values(metric)) == 1  # type: ignore[misc]


@pytest.mark.parametrize(
    ("event", "name", "error", "says"),
    [
        ({"time": NOON}, None, TypeError, "which type"),
        ({"time": NOON}, "Nope", UnknownNameError, "Nope"),
        ({"cents": 1, "shoop": "a"}, "MillSale", UnknownNameError, "shop"),
        ({"cents": 1, "time": datetime(2026, 1, 1)}, "MillSale", BadRowsError, "time zone"),
        ({"cents": 1, "time": "noon"}, "MillSale", BadRowsError, "datetime"),
        ({"shop": "a"}, "MillSale", BadRowsError, "cents is required"),
        (MillSale("a", 1), "MillVisit", TypeError, "not a MillVisit"),
        (object(), None, UnknownNameError, "object"),
    ],
)
def test_what_is_no_event_raises(
    url: str, event: object, name: str | None, error: type[Exception], says: str
) -> None:
    """At once, saying what is wrong; nothing of that call is counted."""
    oal = OAL + "mill_visits = from(MillVisit.*).count();"
    with Embedded(oal=oal, store=url) as mill:
        with pytest.raises(error, match=says):
            mill.emit(event, name)
        with pytest.raises(error, match=says):
            mill.emit_many([event], name)
        with pytest.raises(error, match=says):
            asyncio.run(mill.aemit(event, name))
        assert mill.stats().accepted == mill.stats().unused == 0


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"time": datetime(2026, 1, 1)}, "time: no time zone"),
        ({"time": "noon"}, "time: not a datetime"),
        ({"time": 2**63}, "time: not a moment"),
        ({"time": datetime(1969, 1, 1, tzinfo=UTC)}, "time before 1970"),
        ({"time": datetime(2100, 1, 1, tzinfo=UTC)}, "time too far ahead"),
        ({"cents": "much"}, "cents: a value of the wrong type"),
        ({"cents": 1.5}, "cents: a value of the wrong type"),
        ({"cents": 2**63}, "cents: a value of the wrong type"),
        ({"cents": None}, "no cents"),
        ({"shop": 7}, "shop: a value of the wrong type"),
        ({"shop": "\ud800"}, "shop: a value of the wrong type"),
    ],
)
def test_an_event_that_does_not_fit_is_counted_under_its_reason(
    url: str, changes: dict[str, Any], reason: str
) -> None:
    """In the stats and in the store; the events around it count."""
    good = [MillSale("a", 1) for _ in range(50)]
    with embedded(url) as mill:
        mill.emit_many([*good[:20], replace(good[0], **changes), *good[20:]])
        assert mill.flush(WAIT_S)
    stats = mill.stats()
    assert (stats.accepted, stats.committed, stats.invalid) == (51, 50, {reason: 1})
    assert mill.close()
    assert totals(url) == (50, 50)
    with open_store(url) as store:
        assert store.counters()["invalid", "MillSale", reason] == 1


def test_events_older_than_the_store_keeps(url: str) -> None:
    """They are counted as expired, by the store and in the stats."""
    with embedded(url, ttl_days=2) as mill:
        mill.emit(MillSale("a", 1))
        mill.flush(WAIT_S)
        mill.emit(MillSale("a", 1, NOON - timedelta(days=30)))
    assert (mill.stats().committed, mill.stats().expired) == (1, 1)
    assert mill.stats().waiting == 0


@pytest.mark.parametrize("days", [40, -40])
def test_a_wrong_clock_for_a_commit_removes_nothing(
    url: str, monkeypatch: pytest.MonkeyPatch, days: int
) -> None:
    """The events of the week stay, and those with the right clock count as before."""
    right = time.time
    today = datetime.fromtimestamp(right(), UTC)
    with embedded(url, ttl_days=7) as mill:
        for age in range(7):
            mill.emit(MillSale("a", 1, today - timedelta(days=age)))
        mill.flush(WAIT_S)
        with monkeypatch.context() as patch:
            patch.setattr(time, "time", lambda: right() + days * 86_400)
            mill.emit(MillSale("a", 10, today + timedelta(days=days)))
            mill.flush(WAIT_S)
        mill.emit(MillSale("a", 100, today))
    assert totals(url) == (9, 117)
    assert (mill.stats().committed, mill.stats().expired) == (9, 0)


def test_events_that_no_metric_reads_are_counted(url: str) -> None:
    """They are no error and no drop."""
    with embedded(url) as mill:
        assert mill.emit(MillVisit("a", 1.0))
        assert mill.emit({"serviceName": "a", "latency": 1}, "Endpoint")
        assert mill.emit_many([MillVisit("a", 1.0), MillSale("a", 1)]) == 2
        assert asyncio.run(mill.aemit(MillVisit("a", 1.0)))
    assert (mill.stats().unused, mill.stats().accepted) == (4, 1)


def test_after_close_events_are_dropped_and_counted(url: str) -> None:
    """It can be closed twice, and flushed; the store stays closed."""
    mill = embedded(url)
    mill.emit(MillSale("a", 1))
    assert mill.close()
    assert not mill.emit(MillSale("a", 1))
    assert not mill.emit({"shop": "a", "cents": 1}, "MillSale")
    assert mill.emit_many([MillSale("a", 1)] * 3) == 0
    assert not asyncio.run(mill.aemit(MillSale("a", 1)))
    assert mill.flush(WAIT_S)
    assert mill.close()
    assert (mill.stats().accepted, mill.stats().dropped) == (1, {"stopped": 6})
    assert totals(url) == (1, 1)


def test_many_threads(url: str) -> None:
    """Nothing is lost or counted twice; flushes at the same time do no harm."""
    with embedded(url, l1_period_s=0.01, l2_period_s=0.01, l1_chunk=100) as mill:

        def emit(number: int) -> None:
            for _ in range(40):
                assert mill.emit_many([MillSale(f"s{number}", 1)] * 25, timeout=WAIT_S) == 25
                while not mill.emit(MillSale(f"s{number}", 1000)):
                    pass
                if number < 2:
                    mill.emit(MillVisit("a", 1.0))
                if number == 3:
                    assert mill.flush(WAIT_S)
                assert mill.stats().waiting >= 0

        threads = [spawn(emit, number) for number in range(4)]
        for thread in threads:
            thread.result()
    assert totals(url) == (4 * 40 * 26, 4 * 40 * 1025)
    assert (mill.stats().unused, mill.stats().waiting) == (80, 0)


def test_asyncio(url: str) -> None:
    """aemit from many tasks, aflush and aclose; the loop is never blocked."""

    async def main() -> None:
        async with embedded(url) as mill:
            accepted = await asyncio.gather(*(mill.aemit(MillSale("a", 1)) for _ in range(500)))
            assert all(accepted)
            assert await mill.aflush(WAIT_S)
            assert mill.stats().committed == 500
            await mill.aemit(MillSale("a", 1))

    asyncio.run(main())
    assert totals(url) == (501, 501)


def test_settings_are_checked(url: str) -> None:
    """By name, before the store is touched."""
    with pytest.raises(ConfigError, match="l1_period_s"):
        embedded(url, l1_period_s=-1)
    with pytest.raises(ConfigError, match="apdex_ms"):
        WorkerSettings(apdex_ms={"a": 0})
    with pytest.raises(ConfigError, match="slow thresholds"):
        WorkerSettings(slow_database_ms="mysql")
    with pytest.raises(OalErrors):
        embedded(url, oal="nonsense = from(Nope.*).count();")
    with pytest.raises(ConfigError, match="at least one metric"):
        embedded(url, oal=OAL + "disable(mill_sales); disable(mill_cents);")
    assert not list(Path(url.removeprefix("sqlite:///")).parent.iterdir())


def test_apdex_threshold_of_a_service(url: str) -> None:
    """As apdex_ms says; 500 ms for others."""
    oal = "apdex = from(Service.latency).apdex(name, status);"
    with Embedded(oal=oal, store=url, apdex_ms={"quick": 10}) as mill:
        for name in ("quick", "other"):
            mill.emit({"name": name, "latency": 11, "status": True, "layer": "GENERAL"}, "Service")
    with open_store(url) as store:
        apdex = {value.entity_name: value.value for value in store.values("apdex")}
    assert apdex == {"quick": 5000, "other": 10000}


def test_oal_from_a_file(url: str, tmp_path: Path) -> None:
    """A path is a script, or a folder of scripts."""
    (tmp_path / "scripts").mkdir()
    (tmp_path / "scripts" / "sales.oal").write_text(OAL)
    with embedded(url, oal=tmp_path / "scripts") as mill:
        mill.emit(MillSale("a", 1))
    assert totals(url) == (1, 1)


@pytest.mark.parametrize(
    ("limits", "reason"),
    [
        ({"max_new_entities": 10}, "too many new entities in a minute"),
        ({"max_new_entities": 0, "max_entities": 10}, "too many entities in the store"),
    ],
)
def test_shops_without_end_are_counted_under_overflow(
    tmp_path: Path, limits: dict[str, int], reason: str
) -> None:
    """No more new entities than the limit of a minute, or two if one ends; no sale is lost."""
    url = f"sqlite:///{tmp_path / 'store.db'}"
    with embedded(url, **limits) as mill:
        for number in range(100):
            assert mill.emit(MillSale(f"shop {number}", 1))
    assert totals(url) == (100, 100)
    with open_store(url) as store:
        names = {entity.name for entity in store.entities()}
        counters = store.counters()
    assert "overflow" in names
    assert 11 <= len(names) <= 21
    assert counters["overflow", "MillSale", reason] == 100 - (len(names) - 1)
