"""The same thing has the same name in Python, in JSON and in SQL (docs/api.md, Names)."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterator, Mapping
from dataclasses import fields
from typing import Any

import pytest

from batchmill.cli import main
from batchmill.sources import bucket_start
from batchmill.store import (
    AlertChange,
    AlertEpisode,
    AlertPhase,
    Store,
    StoredAlert,
    StoredEntity,
    StoredMetric,
    TopNRow,
    TopRecord,
    Value,
    open_store,
)
from batchmill.store.reading.frames import frame_schema
from batchmill.traces import SCHEMA as SPAN_TABLE
from batchmill.traces import Trace, TraceSpan
from batchmill.web.api import alerts, listing
from batchmill.web.api.parameters import TimeRange, read_range
from batchmill.web.api.traces import waterfall
from batchmill.web.meaning import MetricNames
from batchmill.web.openapi import document
from tests.docs.kit import code_in, tables
from tests.kit.files import ROOT
from tests.kit.stores import MINUTE, Measurement, Writer

START_S = int(bucket_start(MINUTE).timestamp())
ABOUT = {"entity_id", "entity_name"}
"""In every record that is about an entity."""


def in_python(kind: type) -> set[str]:
    """The names of an object's fields."""
    return {field.name for field in fields(kind)}


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Store]:
    """A store with a value, a slow call, and an alert that fires."""
    path = tmp_path_factory.mktemp("names") / "store.db"
    with open_store(f"sqlite:///{path}") as store:
        top = TopNRow("db", 0, MINUTE, 300, 1, "abc", "s", "select 1", "select ?")
        Writer(store).write(Measurement(5, entity="cart"), topn=[top])
        about: dict[str, Any] = {"rule": "slow", "entity_id": "id-cart", "entity_name": "cart"}
        firing = StoredAlert(**about, phase=AlertPhase.FIRING, since_s=START_S)
        episode = AlertEpisode(
            **about, starts_s=START_S, ends_s=START_S + 60, severity="", value=1, message=""
        )
        store.change_alerts(AlertChange(saved=[firing], episodes=[episode]))
        yield store


@pytest.fixture(scope="module")
def time_range() -> TimeRange:
    """The hour of the data."""
    return read_range({"from": str(START_S), "to": str(START_S + 3599)}, START_S)


@pytest.fixture
def lines(store: Store, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Any:
    """Prints with a command, and returns the names in each line of JSON."""

    def names(*arguments: str) -> list[set[str]]:
        given = ["batchmill", *arguments, "--json", "--store", store.url]
        monkeypatch.setattr("sys.argv", given)
        assert main() == 0
        return [set(json.loads(line)) for line in capsys.readouterr().out.splitlines()]

    return names


def columns(store: Store, name: str) -> set[str]:
    """The names of the columns of a table or view."""
    with sqlite3.connect(store.url.removeprefix("sqlite:///")) as connection:
        described = connection.execute(f'SELECT * FROM "{name}" LIMIT 0').description
    connection.close()
    return {column[0] for column in described}


def test_a_value(store: Store, time_range: TimeRange, lines: Any) -> None:
    """In Python, in a frame, printed, in a view, in the API."""
    python = in_python(Value)
    assert python >= {*ABOUT, "bucket", "layers"}
    assert lines("query", "calls") == [python | {"time", "complete"}]
    # A frame has a row for each label; a view, a column for each metric.
    assert set(frame_schema().names) == (python | {"time", "source", "label"}) - {"bucket"}
    assert columns(store, "endpoint_minute") >= {*ABOUT, "bucket", "time", "calls"}
    (series,) = store.read(lambda read: listing.values(read, "calls", time_range, {}))["series"]
    assert series.keys() == {*ABOUT, "entity_kind", "layers", "over", "values"}


def test_a_slow_call(store: Store, time_range: TimeRange, lines: Any) -> None:
    """In Python, printed, in the API; and the tables have the same, with a key for the entity."""
    python = in_python(TopRecord)
    assert python > ABOUT
    assert lines("query", "--top", "db") == [python]
    (record,) = store.read(lambda read: listing.topn(read, time_range, {}))["records"]
    assert record.keys() == python
    assert record["bucket"] == MINUTE
    tables = columns(store, "topn") | columns(store, "statement")
    assert python - tables == {*ABOUT, "rank"}


def test_a_metric(store: Store, lines: Any) -> None:
    """In Python, printed, in its table, in the API, which adds what it is about and its unit."""
    python = in_python(StoredMetric) - {"columns", "plan"}
    assert all(line == python for line in lines("query", "--list"))
    assert columns(store, "metric") > python
    (*_, metric) = store.read(listing.metrics)["metrics"]
    assert metric.keys() == python | {"entity_kind", "unit", "factor", "least", "series"}
    known = {metric.name: metric for metric in store.metrics()}[metric["name"]]
    assert {name: metric[name] for name in python} == {
        name: getattr(known, name) for name in python
    }


def test_an_entity(store: Store) -> None:
    """In Python, in its table, in the API."""
    python = in_python(StoredEntity)
    (entity,) = store.read(lambda read: listing.entities(read, {}))["entities"]
    assert entity.keys() == python
    assert columns(store, "entity") >= python - {"layers"}


def test_an_alert(store: Store, time_range: TimeRange, lines: Any) -> None:
    """That fires, and that fired: in Python, printed, in the tables, in the API."""
    state, episode = in_python(StoredAlert), in_python(AlertEpisode)
    assert state > ABOUT < episode
    assert lines("alerts", "list") == [state, episode | {"phase"}]
    assert columns(store, "alert_state") == state
    assert columns(store, "alert_episode") == episode
    answer = store.read(lambda read: alerts.alerts(read, time_range, {}))
    known = {"entity_kind", "service_id"}
    assert answer["alerts"][0].keys() == state | known | {"severity", "is_notified"}
    assert answer["history"][0].keys() == episode | known


def test_a_span() -> None:
    """In Python, in the table of kept spans, in the API."""
    python = in_python(TraceSpan)
    # The table has a timestamp; the API, each resource once, and the trace's id once.
    assert python - set(SPAN_TABLE.names) == {"start_us"}
    assert set(SPAN_TABLE.names) - python == {"time"}
    trace = Trace.of([TraceSpan("t", "s", None, 7, 5, "shop", "GET /", "SERVER", "OK")])
    assert trace is not None
    (span,) = waterfall(trace, MetricNames())["spans"]
    assert python - span.keys() == {"trace_id", "resource"}
    assert span.keys() - python == {"depth", "endpoint", "backend", "resource_index", "critical"}
    assert (span["start_us"], span["critical"]) == (7, ((7, 12),))


def properties(schema: Any) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """The names and schemas of all properties in a schema."""
    if isinstance(schema, Mapping):
        yield from schema.get("properties", {}).items()
        for inner in schema.values():
            yield from properties(inner)
    elif isinstance(schema, list):
        for inner in schema:
            yield from properties(inner)


def test_names_of_the_api_say_what_they_are() -> None:
    """A moment has its unit in its name; whoever is about an entity says entity_id, not entity."""
    schemas = document()["components"]["schemas"]
    for title, schema in schemas.items():
        names = dict(properties(schema))
        # The subject of the page of an entity is one.
        assert ("entity" in names) == (title == "Entity"), title
        assert not names.keys() & {"since", "newest_minute", "start", "duration"}, title
        for name, described in names.items():
            if name.endswith(("_s", "_us", "_ms", "_minute")) or name == "bucket":
                assert "integer" in described["type"], (title, name)


def test_the_table_of_names_has_no_others() -> None:
    """Every name in it is one of the API, and of Python."""
    kinds = (Value, TopRecord, StoredMetric, StoredEntity, StoredAlert, AlertEpisode, TraceSpan)
    python = {name for kind in kinds for name in in_python(kind)}
    api = {name for name, _ in properties(document()["components"]["schemas"])}
    rows = tables(ROOT / "docs" / "api.md", "Names")
    names = {name for row in rows for name in code_in(row["name"]) if name.isidentifier()}
    assert names - api == set()
    only_api = {"entity_kind", "database_id", "relation_id", "service_id"}
    axis = {"from", "to", "times", "incomplete"}
    assert names - python == only_api | axis | {"time"}
