"""The kernel's results against the oracle: every function, filter and label, on every source."""

from __future__ import annotations

import dataclasses
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("pyarrow")
pytest.importorskip("pyspark")

import pyarrow as pa

from batchmill import sources
from batchmill.errors import ConfigError
from batchmill.oal import core_script, load
from batchmill.sources import Grain
from batchmill.store import open_store
from tests.aggregate.kit import Kernel, content
from tests.kit.pipelines import (
    EVERY_FUNCTION,
    EVERY_FUNCTION_OF_TWO,
    EVERY_SOURCE,
    START,
    TWO_SOURCES,
    differences,
    endpoint_events,
    every_events,
    expected,
    sqlite,
    stored,
)
from tests.kit.stores import Backend
from tests.oracle.generate import random_events
from tests.oracle.metrics import expected_metrics

CORE = core_script().read_text("utf-8")


@dataclasses.dataclass(frozen=True)
class Box:
    time: int
    weight: float | None


@dataclasses.dataclass(frozen=True)
class Parcel:
    """An event type with every kind of field, and a struct with a field named like the start."""

    time: datetime
    shop: str
    cents: int
    box: Box | None
    paid: bool
    notes: dict[str, str]
    codes: list[str]


def test_every_function_on_every_source_equals_the_oracle(tmp_path: Path) -> None:
    """All functions and filters, over nine sources, in minute, hour and day."""
    events = every_events(7, EVERY_SOURCE, 150)
    kernel = Kernel(EVERY_FUNCTION)
    with open_store(sqlite(tmp_path), ttl_days=365) as store:
        kernel.commit(store, kernel.make(events))
        actual = stored(store)
    assert {key[0] for key in actual} == {metric.name for metric in load(EVERY_FUNCTION)}
    assert differences(actual, expected(events)) == []


def test_core_metrics_equal_the_oracle(tmp_path: Path) -> None:
    """The metrics that everybody gets, on all their sources."""
    kernel = Kernel(CORE)
    events = random_events(5, kernel.aggregators, 30, start=START)
    with open_store(sqlite(tmp_path), ttl_days=365) as store:
        kernel.commit(store, kernel.make(events))
        assert differences(stored(store), expected(events, CORE)) == []


def test_both_stores_take_the_contribution(backend: Backend) -> None:
    """In two batches; entities that differ in a layer, or beyond the limit of a name, are one."""
    events = every_events(8, TWO_SOURCES, 40, days=2)
    kernel = Kernel(EVERY_FUNCTION_OF_TWO)
    halves = [{name: rows[half::2] for name, rows in events.items()} for half in range(2)]
    store = backend.open(ttl_days=365)
    kernel.commit(store, *map(kernel.make, halves))
    assert differences(stored(store), expected(events, EVERY_FUNCTION_OF_TWO)) == []


def test_apdex_takes_the_threshold_of_the_service() -> None:
    """T by service name; 500 ms for the others."""
    oal = "apdex = from(Endpoint.latency).apdex(serviceName, status);"
    thresholds = {"gateway": 10, "支付服务": 2000}
    rows = endpoint_events(80)
    (metric,) = load(oal)
    kernel = Kernel(oal, thresholds)
    values = {
        ("apdex", grain.value, bucket, entity): metric.values(states, grain.minutes)
        for (_, grain, bucket, entity), states in kernel.states(
            kernel.make({"Endpoint": rows})
        ).items()
    }
    wanted = dict(expected_metrics(oal, {"Endpoint": rows}, thresholds))
    assert differences(values, wanted) == []
    assert wanted != dict(expected_metrics(oal, {"Endpoint": rows}))


def test_a_users_own_event_type() -> None:
    """A frozen dataclass made a source: structs, maps, lists and names of its own."""
    sources.source(entity=sources.service("shop"))(Parcel)
    parcels = [
        Parcel(
            START + timedelta(seconds=number),
            "Ökö",
            number * 100,
            Box(number, number / 8 or None) if number % 2 else None,
            number % 3 > 0,
            {"weight": str(number)},
            [str(number), "all"],
        )
        for number in range(7)
    ]
    oal = """
    takings = from(Parcel.cents).sum();
    weight = from(Parcel.box.weight).doubleAvg();
    slowest = from(Parcel.box.time).max();
    noted = from((str->long)Parcel.notes["weight"]).filter(paid == true).sum();
    coded = from(Parcel.*).filter(codes contain "3").count();
    others = from(Parcel.*).filter(codes not contain "3").count();
    """
    schema = sources.catalog().source("Parcel").arrow_schema()
    table = pa.Table.from_pylist([sources.row_of(parcel) for parcel in parcels], schema=schema)
    kernel = Kernel(oal)
    made = kernel.aggregators["Parcel"].make(table)
    assert not made.invalid
    states = kernel.states({"Parcel": made.deltas})
    days = {key[0]: value for key, value in states.items() if key[1] is Grain.DAY}
    values = {metric.name: metric.values(days[metric.name], 1440) for metric in kernel.metrics}
    assert values == {
        "takings": 2100,
        "weight": (1 + 3 + 5) / 8 / 3,
        "slowest": 5,
        "noted": 1 + 2 + 4 + 5,
        "coded": 1,
        "others": 6,
    }


def test_no_rows() -> None:
    """A batch without rows gives deltas without rows, and so does merging nothing."""
    kernel = Kernel(EVERY_FUNCTION)
    rows = every_events(1, EVERY_SOURCE, 5)
    whole = kernel.make(rows)
    nothing = kernel.make({source: [] for source in rows})
    for source, aggregator in kernel.aggregators.items():
        assert len(nothing[source]) == 0
        assert len(aggregator.merge([])) == 0
        both = aggregator.merge([nothing[source], whole[source], aggregator.merge([])])
        assert content(both) == content(whole[source])
        for grain in Grain:
            assert len(aggregator.roll_up(nothing[source], grain)) == 0
    assert kernel.states(nothing) == {}


def test_thousands_of_minutes_in_one_batch() -> None:
    """Each row in a minute of its own, over half a year."""
    (row,) = endpoint_events(1)
    rows = [{**row, "time": START + timedelta(minutes=37 * n)} for n in range(5000)]
    oal = "calls = from(Endpoint.*).count(); p = from(Endpoint.latency).percentile2(10);"
    kernel = Kernel(oal)
    deltas = kernel.make({"Endpoint": rows})
    assert len(deltas["Endpoint"]) == 5000
    states = kernel.states(deltas)
    by_grain = {grain: [key for key in states if key[1] is grain] for grain in Grain}
    assert len(by_grain[Grain.MINUTE]) == 2 * 5000
    total = sum(states[key][0] for key in by_grain[Grain.DAY] if key[0] == "calls")
    assert total == 5000


def test_more_combinations_than_64_bits_can_number() -> None:
    """Six roles with a thousand values each, over a hundred days: no two groups become one."""
    rows = [
        {
            "time": START + timedelta(days=n % 100, seconds=n),
            "sourceServiceName": f"a{n % 997}",
            "sourceServiceInstanceName": f"b{n % 991}",
            "destServiceName": f"c{n % 983}",
            "destServiceInstanceName": f"d{n % 977}",
            "sourceServiceLayer": f"e{n % 971}",
            "destServiceLayer": f"f{n % 967}",
            "latency": n,
        }
        for n in range(2000)
    ]
    kernel = Kernel("m = from(ServiceInstanceRelation.latency).max();")
    made = kernel.make({"ServiceInstanceRelation": rows * 2})["ServiceInstanceRelation"]
    assert len(made) == 2000
    assert sorted(made.totals[next(iter(made.totals))].tolist()) == list(range(2000))
    assert made.rows.tolist() == [2] * 2000


def test_grains_that_do_not_fit() -> None:
    """A day has no minutes to give back, and deltas of two grains cannot be merged."""
    kernel = Kernel("m = from(Endpoint.*).count();")
    aggregator = kernel.aggregators["Endpoint"]
    minutes = kernel.make({"Endpoint": endpoint_events(5)})["Endpoint"]
    days = aggregator.roll_up(minutes, Grain.DAY)
    calls: list[Any] = [
        lambda: aggregator.roll_up(days, Grain.HOUR),
        lambda: aggregator.merge([minutes, days]),
        lambda: kernel.states({"Endpoint": days}),
    ]
    for call in calls:
        with pytest.raises(ConfigError, match="day"):
            call()
