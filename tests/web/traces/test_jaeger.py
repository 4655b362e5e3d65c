"""Jaeger's query API, as Grafana's Jaeger data source uses it: its paths and its JSON."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from batchmill.store import open_store
from batchmill.web.openapi import document
from tests.kit.traces.segments import HOUR, kept, made_span
from tests.web.kit import START_S, Call, CallWriter, Client, serving_all

EVENT = {"time": HOUR * 1_000_000 + 20_500, "name": "exception", "attributes": {"a": "b"}}
ROWS = [
    made_span(1, 1, at_ms=0, took_ms=100, name="GET /cart", http__route="/cart"),
    made_span(1, 2, 1, at_ms=10, took_ms=50, service="db", kind="CLIENT", name="SELECT"),
    made_span(2, 7, 6, at_ms=20, took_ms=900, status="ERROR", message="no", events=[EVENT]),
]
TIME = {"start": HOUR * 1_000_000, "end": (HOUR + 60) * 1_000_000}


def _refused(client: Client, code: int, path: str, **params: Any) -> Any:
    """The JSON of an answer with that status."""
    actual, answer = client.ask(path, **params)
    assert actual == code, answer
    return answer


@pytest.fixture(scope="module")
def filled(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    """The address of a store with calls from gate to shop, and a folder of kept spans."""
    folder = tmp_path_factory.mktemp("jaeger")
    url = f"sqlite:///{folder}/store.db"
    with open_store(url) as store:
        CallWriter(store).write([Call("shop", START_S + 60 * n, caller="gate") for n in range(5)])
    return url, kept(folder, ROWS).folder


@pytest.fixture(scope="module")
def client(filled: tuple[str, Path]) -> Iterator[Client]:
    """A server of kept spans."""
    url, traces = filled
    with serving_all(url, traces=traces) as client:
        yield client


def _data(client: Client, path: str, **params: Any) -> Any:
    answer = client.get(path, **params)
    assert answer.keys() == {"data", "total", "limit", "offset", "errors"}
    assert answer["errors"] is None
    assert answer["total"] == len(answer["data"])
    return answer["data"]


def test_services_and_operations_are_listed(client: Client) -> None:
    """As names, and with kinds in small letters."""
    assert _data(client, "/api/services") == ["db", "shop"]
    assert _data(client, "/api/services/shop/operations") == ["GET /", "GET /cart"]
    assert _data(client, "/api/operations", service="db") == [
        {"name": "SELECT", "spanKind": "client"}
    ]
    assert _data(client, "/api/operations", service="db", spanKind="server") == []


def test_a_trace_has_the_shape_of_jaegers(client: Client) -> None:
    """Spans with references, tags and logs, and processes that they name."""
    (trace,) = _data(client, f"/api/traces/{1:032x}")
    assert trace.keys() == {"traceID", "spans", "processes", "warnings"}
    root, child = trace["spans"]
    assert root == {
        "traceID": f"{1:032x}",
        "spanID": f"{1:016x}",
        "flags": 1,
        "operationName": "GET /cart",
        "references": [],
        "startTime": HOUR * 1_000_000,
        "duration": 100_000,
        "tags": [
            {"key": "span.kind", "type": "string", "value": "server"},
            {"key": "http.route", "type": "string", "value": "/cart"},
        ],
        "logs": [],
        "processID": "p1",
        "warnings": None,
    }
    assert child["references"] == [
        {"refType": "CHILD_OF", "traceID": f"{1:032x}", "spanID": f"{1:016x}"}
    ]
    assert trace["processes"] == {
        name: {
            "serviceName": service,
            "tags": [{"key": "service.instance.id", "type": "string", "value": f"{service}-1"}],
        }
        for name, service in (("p1", "shop"), ("p2", "db"))
    }


def test_errors_and_events_are_tags_and_logs(client: Client) -> None:
    """As Jaeger shows those of OpenTelemetry; a missing parent is a warning."""
    ((trace,)) = _data(client, "/api/traces", traceID=f"{2:032x}")
    (span,) = trace["spans"]
    tags = {tag["key"]: (tag["type"], tag["value"]) for tag in span["tags"]}
    assert tags["error"] == ("bool", True)
    assert tags["otel.status_code"] == ("string", "ERROR")
    assert tags["otel.status_description"] == ("string", "no")
    (log,) = span["logs"]
    assert log["timestamp"] == EVENT["time"]
    assert [(field["key"], field["value"]) for field in log["fields"]] == [
        ("event", "exception"), ("a", "b"),
    ]  # fmt: skip
    assert span["warnings"] == ["the parent of this span is not kept"]


@pytest.mark.parametrize(
    ("given", "ids"),
    [
        ({}, [2, 1]),
        ({"operation": "GET /cart"}, [1]),
        ({"minDuration": "0.5s"}, [2]),
        ({"maxDuration": "100ms"}, [1]),
        ({"minDuration": "1m30s"}, []),
        ({"tags": json.dumps({"http.route": "/cart"})}, [1]),
        ({"tag": "http.route:/cart"}, [1]),
        ({"tags": json.dumps({"error": "true"})}, [2]),
        ({"tags": json.dumps({"span.kind": "client"})}, []),
        # As Go reads durations.
        ({"minDuration": ".5s"}, [2]),
        ({"minDuration": "+500.ms", "maxDuration": "900000\u03bcs"}, [2]),
        ({"minDuration": "0"}, [2, 1]),
        # Tags that a trace shows.
        ({"tags": json.dumps({"otel.status_code": "ERROR"})}, [2]),
        ({"tags": json.dumps({"otel.status_code": "OK"})}, []),
        ({"tags": json.dumps({"otel.status_description": "no"})}, [2]),
        # What Grafana makes of a tag without a value: no span has an empty one.
        ({"tags": json.dumps({"error": ""})}, []),
        ({"tags": json.dumps({"error": "false"})}, [1]),
        ({"limit": 1}, [2]),
        ({"end": HOUR * 1_000_000 + 1}, [1]),
    ],
)
def test_traces_are_searched(client: Client, given: dict[str, Any], ids: list[int]) -> None:
    """With the parameters of Jaeger's own page."""
    traces = _data(client, "/api/traces", service="shop", **{**TIME, **given})
    assert [int(trace["traceID"], 16) for trace in traces] == ids


@pytest.mark.parametrize(
    ("path", "params", "status"),
    [
        ("/api/traces", {}, 400),
        ("/api/traces", {"service": "shop", "minDuration": "soon"}, 400),
        ("/api/traces", {"service": "shop", "tags": "a=b"}, 400),
        ("/api/traces", {"service": "shop", "tag": "a"}, 400),
        ("/api/traces", {"service": "shop", "start": "yesterday"}, 400),
        ("/api/operations", {}, 400),
        ("/api/traces/99", {}, 404),
    ],
)
def test_errors_have_the_shape_of_jaegers(
    client: Client, path: str, params: dict[str, Any], status: int
) -> None:
    """A list of codes and messages."""
    answer = _refused(client, status, path, **params)
    assert answer["data"] is None
    ((error,)) = answer["errors"]
    assert error["code"] == status
    assert error["msg"]


def test_dependencies_are_calls_between_services(client: Client) -> None:
    """Within the time before ``endTs``, both in milliseconds."""
    data = _data(client, "/api/dependencies", endTs=(START_S + 300) * 1000, lookback=3_600_000)
    assert data == [{"parent": "gate", "child": "shop", "callCount": 5}]
    assert _data(client, "/api/dependencies", endTs=START_S * 1000, lookback=3_600_000) == []


def test_dependencies_of_a_long_time_are_those_that_are_there(client: Client) -> None:
    """Grafana offers the last five years, and ranges that end in the future."""
    years = 5 * 366 * 86_400_000
    calls = [{"parent": "gate", "child": "shop", "callCount": 5}]
    assert _data(client, "/api/dependencies", lookback=years) == calls
    end = (START_S + 300) * 1000 + years
    assert _data(client, "/api/dependencies", endTs=end, lookback=2 * years) == calls
    assert _data(client, "/api/dependencies", endTs=end, lookback=1000) == []


def test_a_search_without_a_limit_gives_100_traces(tmp_path: Path) -> None:
    """As Jaeger does, and as the OpenAPI document says.

    A span that is its own parent has no reference, as no page could show it.
    """
    rows = [made_span(trace, 1, 1, at_ms=trace, took_ms=1) for trace in range(1, 131)]
    url = f"sqlite:///{tmp_path}/store.db"
    with open_store(url):
        pass
    with serving_all(url, traces=kept(tmp_path, rows).folder) as client:
        traces = _data(client, "/api/traces", service="shop", **TIME)
        assert len(traces) == 100
        assert [span["references"] for trace in traces for span in trace["spans"]] == [[]] * 100
        assert len(_data(client, "/api/traces", service="shop", limit=120, **TIME)) == 120
    parameters = document()["paths"]["/api/traces"]["get"]["parameters"]
    [limit] = [one["schema"] for one in parameters if one["name"] == "limit"]
    assert limit["default"] == 100
