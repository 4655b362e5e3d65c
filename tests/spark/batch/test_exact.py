"""The pipeline's results against the oracle: every function, every source, spans, both stores."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyspark.sql import SparkSession

from batchmill import sources
from batchmill.oal import core_script, load
from batchmill.sources import Grain
from batchmill.spark import Pipeline, PipelineSettings
from batchmill.store import open_store
from tests.kit.pipelines import (
    EVERY_FUNCTION,
    EVERY_FUNCTION_OF_TWO,
    EVERY_SOURCE,
    SMALL,
    START,
    TWO_SOURCES,
    counted,
    differences,
    endpoint_events,
    every_events,
    expected,
    expected_of,
    pipeline,
    sqlite,
    stored,
    top_expected,
    top_of,
    write_segment,
    write_spool,
)
from tests.oracle.catalog import Row
from tests.oracle.generate import random_events, random_spans
from tests.oracle.spans import spans_to_events
from tests.oracle.topn import expected_topn

pytestmark = pytest.mark.slow

CORE = core_script().read_text("utf-8")


@dataclasses.dataclass(frozen=True)
class Receipt:
    time: datetime
    shop: str
    cents: int
    weight: float | None
    paid: bool


@dataclasses.dataclass(frozen=True)
class Odd:
    """Its fields have names that the plan uses for its own columns."""

    time: datetime
    m: str
    n: int
    w0: int
    s0: bool


@pytest.fixture(scope="module")
def every_run(
    spark: SparkSession, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Pipeline, dict[str, list[Row]]]]:
    """Random rows of nine sources, in."""
    folder = tmp_path_factory.mktemp("every")
    events = every_events(7, EVERY_SOURCE, 150)
    write_spool(events, folder / "spool", 3)
    with pipeline(spark, folder) as running:
        running.run_available()
        yield running, events


@pytest.fixture(scope="module")
def span_run(
    spark: SparkSession, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Pipeline, list[Row]]]:
    """Random spans with the core metrics, in, and every wait over."""
    folder = tmp_path_factory.mktemp("spans")
    spans = random_spans(7, 250, start=START, days=2)
    write_spool({"Span": spans}, folder / "spool", 3)
    with pipeline(spark, folder, oal=CORE) as running:
        running.run_available()
        running.settle(everything=True)
        yield running, spans


def test_every_function_on_every_source_equals_the_oracle(
    every_run: tuple[Pipeline, dict[str, list[Row]]],
) -> None:
    """All functions and filters, over nine sources, in minute, hour and day."""
    running, events = every_run
    actual = stored(running.store)
    assert {key[0] for key in actual} == {metric.name for metric in load(EVERY_FUNCTION)}
    assert differences(actual, expected(events)) == []


def test_every_row_is_counted_under_its_source(
    every_run: tuple[Pipeline, dict[str, list[Row]]],
) -> None:
    """What was read is counted, and nothing else is: no row was late, quarantined or unused."""
    running, events = every_run
    rows = {("rows", source, ""): len(rows_of_source) for source, rows_of_source in events.items()}
    assert running.store.counters() == rows


def test_entities_have_names_layers_and_roles(
    every_run: tuple[Pipeline, dict[str, list[Row]]],
) -> None:
    """An endpoint is stored with its name as it came, its service and the layers of its rows."""
    running, events = every_run
    row = next(event for event in events["Endpoint"] if event["serviceName"] == "orders")
    alike = [
        event["serviceLayer"]
        for event in events["Endpoint"]
        if (event["serviceName"], event["name"][:150]) == ("orders", row["name"][:150])
        and sources.is_normal(event["serviceLayer"]) == sources.is_normal(row["serviceLayer"])
    ]
    id_ = sources.entity_id(sources.catalog().source("Endpoint"), row)
    (stored_entity,) = [entity for entity in running.store.entities("endpoint") if entity.id == id_]
    assert stored_entity.name == row["name"][:150]
    assert stored_entity.roles == {"service": "orders", "name": row["name"][:150]}
    assert stored_entity.layers == set(alike)


def test_core_metrics_of_spans_equal_the_oracle(span_run: tuple[Pipeline, list[Row]]) -> None:
    """Spans become rows of twelve sources, relations included, and those the right values."""
    running, spans = span_run
    wanted = expected(spans_to_events(spans).events, CORE)
    assert differences(stored(running.store), wanted) == []


def test_top_n_of_spans_equals_the_oracle(span_run: tuple[Pipeline, list[Row]]) -> None:
    """The slowest statements in their order, with how often each ran and how long altogether."""
    running, spans = span_run
    wanted = top_expected(expected_topn(spans))
    assert {key[0] for key in wanted} == set(running.store.top_streams())
    assert top_of(running.store) == wanted


def test_spans_without_a_partner_are_counted(span_run: tuple[Pipeline, list[Row]]) -> None:
    """Unresolved: those whose parent never came, and calls without a known destination."""
    running, spans = span_run
    wanted = spans_to_events(spans).counters
    assert counted(running.store, "unresolved") == {
        ("Span", "parent never came"): wanted["unresolved_parent"],
        ("Span", "no destination"): wanted["unresolved_destination"],
    }
    assert counted(running.store, "rows")["Span", ""] == len(spans)


def test_top_n_keeps_no_more_than_n(spark: SparkSession, tmp_path: Path) -> None:
    """With more slow statements than fit, split over batches, the N slowest are kept exactly."""
    spans = random_spans(3, 500, ["gateway", "orders"], start=START, days=1)
    spans = [span for span in spans if "db.system" in span["attributes"]]
    for number in range(2):
        rows = spans[number::2]
        write_segment(tmp_path / "spool", "Span", rows, str(number), number)
    settings = PipelineSettings(ttl_days=365, top_n=2, max_batch_files=1)
    oal = "cpm = from(DatabaseAccess.*).cpm();"
    with pipeline(spark, tmp_path, oal=oal, settings=settings) as running:
        assert len(running.run_available()) == 2
        top = top_of(running.store)
    assert max(len(result) for result in top.values()) == 2
    assert top == top_expected(expected_topn(spans, n=2))


def test_events_and_spans_on_postgresql_equal_the_oracle(
    spark: SparkSession, tmp_path: Path, postgres_url: str
) -> None:
    """The same on PostgreSQL, every function and TopN, in several batches."""
    events = every_events(8, TWO_SOURCES, 120, days=2)
    spans = random_spans(8, 120, start=START, days=1)
    write_spool({**events, "Span": spans}, tmp_path / "spool", 2)
    oal = EVERY_FUNCTION_OF_TWO + "db = from(DatabaseAccess.latency).percentile2(10);"
    settings = PipelineSettings(ttl_days=365, max_batch_files=3)
    with pipeline(spark, tmp_path, oal=oal, store=postgres_url, settings=settings) as running:
        assert len(running.run_available()) == 2
        assert running.settle(everything=True) is not None
        made = spans_to_events(spans).events
        both = {**events, "DatabaseAccess": made["DatabaseAccess"]}
        both["Endpoint"] = events["Endpoint"] + made["Endpoint"]
        assert differences(stored(running.store), expected(both, oal)) == []
        assert top_of(running.store) == top_expected(expected_topn(spans))


def test_a_users_own_event_type_goes_all_the_way(spark: SparkSession, tmp_path: Path) -> None:
    """A frozen dataclass made a source: its rows come out as metrics of its entities.

    Its fields may have any name, also those that the plan uses for its own columns.
    """
    sources.source(entity=sources.service("shop"))(Receipt)
    sources.source(entity=sources.service("m"))(Odd)
    sales = [
        Receipt(
            START + timedelta(seconds=number),
            "Ökö",
            number * 100,
            number / 8 or None,
            number % 3 > 0,
        )
        for number in range(7)
    ]
    odd = [Odd(START, "one", number, number * 2, number > 1) for number in range(4)]
    for name, events in (("Receipt", sales), ("Odd", odd)):
        schema = sources.catalog().source(name).arrow_schema()
        rows: list[dict[str, Any]] = [sources.row_of(event) for event in events]
        folder = tmp_path / "spool" / name
        folder.mkdir(parents=True)
        pq.write_table(pa.Table.from_pylist(rows, schema=schema), folder / "0.parquet")
    oal = """
    odd_sum = from(Odd.n).filter(s0 == true).sum();
    odd_max = from(Odd.w0).max();
    takings = from(Receipt.cents).sum();
    weight = from(Receipt.weight).doubleAvg();
    paid = from(Receipt.*).percent(paid == true);
    """
    with pipeline(spark, tmp_path, oal=oal) as running:
        running.run_available()
        values = {
            metric.name: [value.value for value in running.store.values(metric, grain=Grain.DAY)]
            for metric in running.store.metrics()
        }
        (entity,) = [one for one in running.store.entities("service") if one.name != "one"]
    assert values == {
        "odd_sum": [5],
        "odd_max": [6],
        "takings": [2100],
        "weight": [(1 + 2 + 3 + 4 + 5 + 6) / 8 / 6],
        "paid": [5714],
    }
    assert (entity.name, entity.id) == ("Ökö", sources.service_id("Ökö", normal=True))


def test_late_and_unused_rows_are_counted(spark: SparkSession, tmp_path: Path) -> None:
    """A row more than five minutes behind an earlier batch is late, and still in its own bucket."""
    new = endpoint_events(20, 1, days=1, start=START + timedelta(days=2))
    newest = max(row["time"] for row in new).replace(second=0, microsecond=0)
    old = [{**row, "time": newest - timedelta(minutes=6)} for row in new[:3]]
    tolerated = [{**row, "time": newest - timedelta(minutes=5)} for row in new[:4]]
    write_segment(tmp_path / "spool", "Endpoint", new, "0")
    write_segment(tmp_path / "spool", "Service", random_events(1, ["Service"], 5)["Service"])
    with pipeline(spark, tmp_path, oal=SMALL) as running:
        running.run_available()
        assert counted(running.store, "late") == {}
        write_segment(tmp_path / "spool", "Endpoint", old + tolerated, "1")
        (report,) = running.run_available()
        assert report.stats.late == 3
        assert counted(running.store, "late") == {("Endpoint", ""): 3}
        assert counted(running.store, "rows") == {("Endpoint", ""): 27}
        assert counted(running.store, "unused") == {("Service", "no metric reads it"): 5}
        actual = stored(running.store)
    assert differences(actual, expected_of(new + old + tolerated)) == []


def test_apdex_takes_the_threshold_of_the_service(spark: SparkSession, tmp_path: Path) -> None:
    """T by service name; 500 ms for the others."""
    from tests.oracle.metrics import expected_metrics

    rows = endpoint_events(80)
    write_segment(tmp_path / "spool", "Endpoint", rows)
    thresholds = {"gateway": 10, "支付服务": 2000}
    oal = "apdex = from(Endpoint.latency).apdex(serviceName, status);"
    settings = PipelineSettings(ttl_days=365, apdex_ms=thresholds)
    with pipeline(spark, tmp_path, oal=oal, settings=settings) as running:
        running.run_available()
        actual = stored(running.store)
    wanted: dict[Any, Any] = dict(expected_metrics(oal, {"Endpoint": rows}, thresholds))
    assert differences(actual, wanted) == []
    assert wanted != expected_of(rows, oal)


def test_seventy_filters_of_one_source(spark: SparkSession, tmp_path: Path) -> None:
    """Ten of them on tallies of one value, each with its own answer."""
    rows = endpoint_events(60)
    limits = range(0, 70 * 40, 40)
    functions = ["percentile2(10)"] * 10 + ["sum()"] * 60
    oal = "\n".join(
        f"m{n} = from(Endpoint.latency).filter(latency > {limit}).{function};"
        for n, (limit, function) in enumerate(zip(limits, functions, strict=True))
    )
    for number in range(2):
        write_segment(tmp_path / "spool", "Endpoint", rows[number::2], f"{number}")
    with pipeline(spark, tmp_path, oal=oal) as running:
        running.run_available()
        actual = stored(running.store)
    wanted = expected_of(rows, oal)
    assert len({str(value) for value in wanted.values()}) > 10
    assert differences(actual, wanted) == []


WIDE = """
total = from((str->long)Endpoint.tag["n"]).sum();
mean = from((str->long)Endpoint.tag["n"]).longAvg();
by_name = from(Endpoint.*).labelAvg(serviceName, sideCar.internalRequestLatencyNanos);
cpu = from(ServiceInstanceJVMCPU.usePercent).sumDouble();
"""
GREATEST, LEAST = 2**63 - 1, -(2**63)
LARGEST_DOUBLE = 2.0**61


def test_sums_outgrow_64_bits(spark: SparkSession, tmp_path: Path) -> None:
    """In one batch and over batches, in one minute and rolled up: exact, above and below zero."""
    (one,) = endpoint_events(1)
    start = one["time"].replace(minute=0, second=0, microsecond=0)
    rows = [
        {
            **one,
            "time": start + timedelta(minutes=minute),
            "tag": {"n": str(LEAST if minute == 2 else GREATEST)},
            "sideCar": {**(one["sideCar"] or {}), "internalRequestLatencyNanos": GREATEST},
        }
        for minute in (0, 0, 0, 1, 2, 2)
    ]
    cpu = [
        {"time": start, "id": "i", "name": "i", "serviceName": "s", "usePercent": LARGEST_DOUBLE}
        for _ in range(8)
    ]
    for number in range(2):
        write_segment(tmp_path / "spool", "Endpoint", rows, str(number), number)
        write_segment(tmp_path / "spool", "ServiceInstanceJVMCPU", cpu, str(number), number)
        with pipeline(spark, tmp_path, oal=WIDE) as running:
            running.run_available()
    with open_store(sqlite(tmp_path)) as store:
        assert [value.value for value in store.values("total")] == [
            6 * GREATEST,
            2 * GREATEST,
            4 * LEAST,
        ]
        (day,) = store.values("total", grain=Grain.DAY)
        assert day.value == 8 * GREATEST + 4 * LEAST
        assert [value.value for value in store.values("mean")] == [GREATEST, GREATEST, LEAST]
        (averages,) = store.values("by_name", grain=Grain.HOUR)
        assert averages.value == {f"{{n={one['serviceName']}}}": GREATEST}
        assert [value.value for value in store.values("cpu")] == [16 * LARGEST_DOUBLE]
