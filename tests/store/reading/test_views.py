"""Views for SQL: their names, their values, and that they follow the metrics."""

from __future__ import annotations

import itertools
import logging
import math
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from batchmill.oal import FUNCTIONS, RANKS, load
from batchmill.sources import Grain
from batchmill.store import Deltas, EntityRow, Store
from batchmill.store.reading.views import view_name
from batchmill.store.sql.session import Session
from batchmill.store.states import Plan, Shape
from tests.kit.stores import MINUTE, Backend, Measurement, Writer, entity_row

CALLS = "calls = from(Endpoint.*).count();"
SCRIPTS = {
    "Endpoint": """
        m_count = from(Endpoint.*).count();
        m_cpm = from(Endpoint.*).cpm();
        m_sum = from(Endpoint.latency).sum();
        m_avg = from(Endpoint.latency).longAvg();
        m_max = from(Endpoint.latency).max();
        m_min = from(Endpoint.latency).min();
        m_percent = from(Endpoint.*).percent(status == true);
        m_rate = from(Endpoint.*).rate(status == true, rpcStatusCode == "x");
        m_apdex = from(Endpoint.latency).apdex(name, status);
        m_p2 = from(Endpoint.latency).percentile2(10);
        m_p1 = from(Endpoint.latency).percentile(5);
        m_log = from(Endpoint.latency).percentileLog();
    """,
    "ServiceInstanceJVMCPU": """
        m_sum = from(ServiceInstanceJVMCPU.usePercent).sumDouble();
        m_avg = from(ServiceInstanceJVMCPU.usePercent).doubleAvg();
        m_max = from(ServiceInstanceJVMCPU.usePercent).maxDouble();
        m_min = from(ServiceInstanceJVMCPU.usePercent).minDouble();
    """,
    "ServiceInstanceJVMMemory": """
        m_sum = from(ServiceInstanceJVMMemory.used).sum();
        m_avg = from(ServiceInstanceJVMMemory.used).longAvg();
    """,
}
SUMS = (0, 3, -5, 2**31)
CELLS: dict[str, tuple[Any, ...]] = {
    "count": (0, 3, 2**31),
    "numbers": ("12:3,14,12", "7", "0:1,200:99", "3500:3,3:2"),
    "max_float": (-2.5, 0.25),
    "min_float": (-2.5, 0.25),
    "max_int": (-7, 9),
    "min_int": (-7, 9),
}
MOST_ROWS = 400


def query(store: Store, sql: str) -> list[tuple[Any, ...]]:
    """What the database answers."""
    return [tuple(row) for row in store._read(lambda session: session.rows(sql))]


def columns_of(store: Store, view: str) -> list[str]:
    """The columns of a view, in order."""

    def work(session: Session) -> list[str]:
        if session.dialect.name == "sqlite":
            return [row[1] for row in session.rows(f"PRAGMA table_info({view})")]
        names = "SELECT attname FROM pg_attribute WHERE attrelid = ?::regclass AND attnum > 0"
        return [row[0] for row in session.rows(f"{names} ORDER BY attnum", (view,))]

    return store._read(work)


def views(store: Store) -> list[str]:
    """The names of all views."""
    rows = query(store, "SELECT key FROM meta WHERE substr(key, 1, 5) = 'view ' ORDER BY key")
    return [row[0].removeprefix("view ") for row in rows]


def cell_rows(plan: Plan) -> list[tuple[Any, ...]]:
    """Combinations of what the cells of a metric may hold."""
    options = [
        (None, *CELLS.get("count" if shape is Shape.COUNT else cell.value, SUMS))
        for shape in plan.shapes
        for cell in shape.cells
    ]
    rows = list(itertools.product(*options))
    step = max(1, len(rows) // MOST_ROWS)
    return rows[::step]


def is_near(shown: Any, value: Any) -> bool:
    """Whether a number of SQL is that of Python; doubles to the 9th digit.

    SQLite turns whole numbers beyond 64 bits into doubles.
    """
    if value is None or shown is None:
        return shown is value
    if isinstance(value, float) or isinstance(shown, float):
        return math.isclose(float(shown), value, rel_tol=1e-9)
    return bool(shown == value)


LABELLED = {"histogram", "labelAvg", "labelCount"}
"""Functions whose values are no numbers; views leave them out."""


def test_scripts_have_every_function() -> None:
    """A new one is either compared below, or known to have no column."""
    tested = {metric.function for script in SCRIPTS.values() for metric in load(script)}
    assert tested == set(FUNCTIONS) - LABELLED


@pytest.mark.parametrize("source", SCRIPTS)
def test_views_have_the_values_of_python(backend: Backend, source: str) -> None:
    """Of every function that has a plain value, for combinations of its cells, in each grain."""
    metrics = list(load(SCRIPTS[source]))
    store = backend.open()
    writer = Writer(store, script=SCRIPTS[source])
    moment = datetime(2024, 3, 1, tzinfo=UTC)
    for metric in metrics:
        rows = cell_rows(Plan.of(metric))
        columns = map(list, zip(*rows, strict=True))
        cells = dict(zip(writer.layout.columns[metric.name], columns, strict=True))
        deltas = []
        for grain in Grain:
            steps = [timedelta(minutes=grain.minutes * number) for number in range(len(rows))]
            buckets = [grain.bucket(moment + step) for step in steps]
            deltas.append(Deltas(source, grain, buckets, [0] * len(rows), cells))
        writer.write(entities=[entity_row("one")], deltas=deltas, newest_minute=None)
        for grain in Grain:
            check_values(store, metric, grain, view_name(source, grain))


def check_values(store: Store, metric: Any, grain: Grain, view: str) -> None:
    """Compare the columns of a metric with what the store returns for it."""
    values = {value.bucket: value.value for value in store.values(metric.name, grain=grain)}
    names = [f"{metric.name}_p{rank}" for rank in RANKS] if metric.labelled else [metric.name]
    for bucket, *shown in query(store, f"SELECT bucket, {', '.join(names)} FROM {view}"):
        value = values.get(bucket)
        expected: Sequence[Any] = [value]
        if metric.labelled:
            expected = list(value.values()) if isinstance(value, dict) else [None] * len(names)
        near = [is_near(one, other) for one, other in zip(shown, expected, strict=True)]
        assert all(near), (metric.name, grain, bucket, shown, expected)


def test_view_has_time_and_entity_by_name(backend: Backend) -> None:
    """A row can be read without another table."""
    store = backend.open()
    Writer(store, script=CALLS).write(Measurement(1), Measurement(1, minute=MINUTE + 5))
    rows = query(store, "SELECT * FROM endpoint_minute ORDER BY time")
    shown = [(str(row[0])[:16], *row[1:]) for row in rows]
    assert shown == [
        ("2024-03-01 12:00", 202403011200, "id-one", "one", 1),
        ("2024-03-01 12:05", 202403011205, "id-one", "one", 1),
    ]
    for grain, text in (("hour", "2024-03-01 12:00"), ("day", "2024-03-01 00:00")):
        ((time, calls),) = query(store, f"SELECT time, calls FROM endpoint_{grain}")
        assert (str(time)[:16], calls) == (text, 2)


def test_view_of_a_relation_has_both_ends(backend: Backend) -> None:
    """The caller has a column of its own; the entity's name is the callee's."""
    store = backend.open()
    script = "c = from(ServiceRelation.*).count(); i = from(ServiceInstanceRelation.*).count();"
    writer = Writer(store, script=script)
    roles = {"source_service": "gateway", "dest_service": "shop"}
    entities = [
        EntityRow("service_relation", "a-b", "shop", frozenset(), roles),
        EntityRow("instance_relation", "c-d", "pod-2", frozenset(), {"source_name": "pod-1"}),
    ]
    deltas = [
        Deltas(source, Grain.MINUTE, [MINUTE], [entity], {writer.layout.columns[name][0]: [5]})
        for entity, (source, name) in enumerate(
            [("ServiceRelation", "c"), ("ServiceInstanceRelation", "i")]
        )
    ]
    writer.write(entities=entities, deltas=deltas, newest_minute=MINUTE)
    shown = "SELECT source_name, entity_name, {} FROM {}"
    assert query(store, shown.format("c", "service_relation_minute")) == [("gateway", "shop", 5)]
    view = "service_instance_relation_minute"
    assert query(store, shown.format("i", view)) == [("pod-1", "pod-2", 5)]


def test_views_follow_the_metrics(backend: Backend) -> None:
    """A new metric gets a column, a retired one loses it, and a source without any its views."""
    store = backend.open()
    store.register(load(CALLS))
    assert columns_of(store, "endpoint_hour")[4:] == ["calls"]
    store.register(load(f"{CALLS} slowest = from(Endpoint.latency).max();"))
    assert columns_of(store, "endpoint_hour")[4:] == ["calls", "slowest"]
    store.register(load("all_calls = from(Service.*).count();"))
    assert views(store) == ["service_day", "service_hour", "service_minute"]


def test_view_that_did_not_change_is_left_alone(backend: Backend) -> None:
    """So that a start of the pipeline does not disturb who reads it."""
    store = backend.open()
    store.register(load(CALLS))
    store._write(lambda session: session.run("UPDATE meta SET value = value || ' -- '"))
    store._write(lambda session: session.drop_view("endpoint_day"))
    sql = "UPDATE meta SET value = substr(value, 1, length(value) - 4)"
    store._write(lambda session: session.run(sql))
    store.register(load(CALLS))
    assert not store._read(lambda session: session.has_table("endpoint_day"))


def test_name_that_is_in_use_is_left_alone(
    backend: Backend, caplog: pytest.LogCaptureFixture
) -> None:
    """A table or view of somebody else is not replaced; the log says so."""
    store = backend.open()
    store._write(lambda session: session.run("CREATE VIEW endpoint_hour AS SELECT 7 AS seven"))
    with caplog.at_level(logging.WARNING):
        store.register(load(CALLS))
    assert query(store, "SELECT * FROM endpoint_hour") == [(7,)]
    assert "there is no view endpoint_hour: the name is in use" in caplog.text


@pytest.mark.parametrize("backend", ["postgresql"], indirect=True)
def test_view_that_others_use_is_left_alone(
    backend: Backend, caplog: pytest.LogCaptureFixture
) -> None:
    """PostgreSQL refuses to drop it; metrics are registered all the same, and the log says so."""
    store = backend.open()  # SQLite's views know their tables by name only
    store.register(load(CALLS))
    sql = "CREATE VIEW mine AS SELECT calls FROM endpoint_hour"
    store._write(lambda session: session.run(sql))
    with caplog.at_level(logging.WARNING):
        store.register(load(f"{CALLS} slowest = from(Endpoint.latency).max();"))
    assert columns_of(store, "endpoint_hour")[4:] == ["calls"]
    assert columns_of(store, "endpoint_day")[4:] == ["calls", "slowest"]
    assert "the view endpoint_hour cannot be brought up to date" in caplog.text
