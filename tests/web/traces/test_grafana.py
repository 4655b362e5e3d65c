"""Grafana's Jaeger data source: the requests that it sends, byte by byte, and what it reads.

From version 12 on its back end sends them: those below were recorded from plugin 13.0.1. Before,
the browser did, through Grafana's proxy.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from batchmill.http import Access
from batchmill.store import open_store
from tests.kit.traces.segments import HOUR, kept, made_span
from tests.web.kit import START_S, Call, CallWriter, Client, serving_all

TEAM, LOCAL = "team/shop", "größe 1?"
FIRST, SECOND = 0xABC, 2
ROUTE = "GET /cart/{id}"
EVENT = {"time": HOUR * 1_000_000 + 20_500, "name": "exception", "attributes": {"a": "b"}}
FAILED: dict[str, Any] = {"status": "ERROR", "events": [EVENT], "note": 'ä b="c"'}
ROWS = [
    made_span(FIRST, 1, took_ms=100, service=TEAM, name=ROUTE, http__route="/cart/{id}"),
    made_span(FIRST, 2, 1, at_ms=10, service=LOCAL, kind="CLIENT", name="SELECT a=b & c"),
    made_span(SECOND, 7, 6, at_ms=20, took_ms=900, service=TEAM, **FAILED),
]
FROM, TO = HOUR, HOUR + 3600
TIMES = f"start={FROM}000000&end={TO}000000"
TRACE = f"/api/traces/{FIRST:032x}"

KEY_VALUE = {"key": str, "type": str, "value": object}
TRACE_READ = {
    "traceID": str,
    "warnings": [str],
    "processes": {...: {"serviceName": str, "tags": [KEY_VALUE]}},
    "spans": [
        {
            "traceID": str,
            "spanID": str,
            "processID": str,
            "operationName": str,
            "startTime": int,
            "duration": int,
            "logs": [{"timestamp": int, "fields": [KEY_VALUE]}],
            "references": [{"refType": str, "spanID": str, "traceID": str}],
            "tags": [KEY_VALUE],
            "warnings": [str],
            "flags": int,
        }
    ],
}
"""What the back end decodes: another type is an error, null is an empty list."""


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    """A server with a token, which the data source sends as a header."""
    folder = tmp_path_factory.mktemp("grafana")
    url = f"sqlite:///{folder}/store.db"
    with open_store(url) as store:
        CallWriter(store).write([Call(TEAM, START_S + 60 * n, caller="gate") for n in range(5)])
    traces = kept(folder, ROWS).folder
    access = Access(token="sesame")
    with serving_all(url, traces=traces, access=access, token="sesame") as client:
        yield client


def _decode(value: Any, shape: Any, at: str = "data") -> None:
    """Fail where Go would, which decodes into types."""
    if isinstance(shape, list):
        for number, part in enumerate(value or ()):
            _decode(part, shape[0], f"{at}[{number}]")
    elif isinstance(shape, dict):
        assert isinstance(value, dict), at
        for key, part in value.items():
            assert key in shape or ... in shape, f"{at}.{key}"
            _decode(part, shape.get(key, shape.get(...)), f"{at}.{key}")
        assert shape.keys() - {...} <= value.keys(), at
    else:
        assert isinstance(value, shape), (at, value)


def _read(client: Client, target: str, shape: Any) -> Any:
    """The data of an answer."""
    status, headers, body = client.raw(target)
    assert (status, headers["content-type"]) == (200, "application/json")
    assert "content-encoding" not in headers
    answer = client.get(target)
    assert answer["errors"] is None, body
    _decode(answer["data"], shape)
    return answer["data"]


def test_the_data_source_is_healthy(client: Client) -> None:
    """Its test asks for the services; without the token it fails."""
    assert _read(client, "/api/services", [str]) == [LOCAL, TEAM]
    assert Client(client.address).raw("/api/services")[0] == 401


@pytest.mark.parametrize(
    ("target", "names"),
    [
        # The back end joins the name as it is, and Go escapes what it must.
        ("/api/services/team/shop/operations", ["GET /", ROUTE]),
        ("/api/services/gr%C3%B6%C3%9Fe%201%3F/operations", ["SELECT a=b & c"]),
        ("/api/services/nobody/operations", []),
        # encodeURIComponent() of the browser.
        ("/api/services/team%2Fshop/operations", ["GET /", ROUTE]),
    ],
)
def test_operations_of_any_service(client: Client, target: str, names: list[str]) -> None:
    """Their names may have slashes, spaces and what else an address escapes."""
    assert _read(client, target, [str]) == names


BACK_END = (
    f"/api/traces?end={TO}000000&limit=20&maxDuration=1.2s&minDuration=100ms"
    f"&operation=GET+%2Fcart%2F%7Bid%7D&service=team%2Fshop&start={FROM}000000"
    "&tags=%7B%22http.route%22%3A%22%2Fcart%2F%7Bid%7D%22%7D"
)
SHOP = f"/api/traces?end={TO}000000&service=team%2Fshop&start={FROM}000000"
BROWSER = (
    "/api/traces?service=team%2Fshop&operation=GET%20%2Fcart%2F%7Bid%7D"
    f"&tags=%7B%22http.route%22%3A%22%2Fcart%2F%7Bid%7D%22%7D&limit=20&{TIMES}&lookback=custom"
)


@pytest.mark.parametrize(
    ("target", "ids"),
    [
        (BACK_END, [FIRST]),
        (SHOP, [SECOND, FIRST]),
        (f"/api/traces?end={TO}000000&limit=1&service=team%2Fshop&start={FROM}000000", [SECOND]),
        (f"{SHOP}&tags=%7B%22error%22%3A%22true%22%7D", [SECOND]),
        # error=true note="ä b=\"c\"", a tag without a value, and what is no tag at all
        (
            f"{SHOP}&tags=%7B%22error%22%3A%22true%22%2C"
            "%22note%22%3A%22%C3%A4+b%3D%5C%22c%5C%22%22%7D",
            [SECOND],
        ),
        (f"{SHOP}&tags=%7B%22error%22%3A%22%22%7D", []),
        (f"{SHOP}&tags=%7B%7D", [SECOND, FIRST]),
        (
            f"/api/traces?end={TO}000000&limit=20&operation=SELECT+a%3Db+%26+c"
            f"&service=gr%C3%B6%C3%9Fe+1%3F&start={FROM}000000",
            [FIRST],
        ),
        (f"/api/traces?end={TO}000000&service=nobody&start={FROM}000000", []),
        (BROWSER, [FIRST]),
        (f"/api/traces?service=team%2Fshop&{TIMES}&lookback=custom", [SECOND, FIRST]),
        (
            "/api/traces?service=team%2Fshop&tags=%7B%22error%22%3A%22true%22%7D"
            f"&{TIMES}&lookback=custom",
            [SECOND],
        ),
    ],
)
def test_traces_are_searched(client: Client, target: str, ids: list[int]) -> None:
    """By what the form of the query has; the newest first, and none without spans."""
    traces = _read(client, target, [TRACE_READ])
    assert [int(trace["traceID"], 16) for trace in traces] == ids
    assert all(trace["spans"] for trace in traces)


@pytest.mark.parametrize(
    "target",
    [
        TRACE,
        "/api/traces/abc",
        f"/api/traces/{FIRST:032X}",
        f"{TRACE}?end={TO}000&start={FROM}000",  # with its setting "Query by trace ID with time"
    ],
)
def test_a_trace_and_its_node_graph(client: Client, target: str) -> None:
    """The graph has an edge for each reference to a span, and the service of each process."""
    [trace] = _read(client, target, [TRACE_READ])
    spans = {span["spanID"]: span for span in trace["spans"]}
    names = {process: about["serviceName"] for process, about in trace["processes"].items()}
    edges = [
        (names[spans[to["spanID"]]["processID"]], names[span["processID"]])
        for span in trace["spans"]
        for to in span["references"]
        if to["refType"] == "CHILD_OF"
    ]
    assert edges == [(TEAM, LOCAL)]
    assert all(span["startTime"] and span["traceID"] == trace["traceID"] for span in trace["spans"])


@pytest.mark.parametrize(
    "target",
    ["/api/traces/99", "/api/traces/nothing+at%2Fall%3F", "/api/traces/ABC+def", f"{TRACE}0"],
)
def test_a_trace_that_is_not_there_is_an_error(client: Client, target: str) -> None:
    """The data source shows the status; an empty list would be an empty panel."""
    status, answer = client.ask(target)
    assert (status, answer["data"]) == (404, None)
    assert [error.keys() for error in answer["errors"]] == [{"code", "msg"}]


def test_the_dependency_graph(client: Client) -> None:
    """Of the range that is chosen, in milliseconds."""
    shape = [{"parent": str, "child": str, "callCount": int}]
    edges = [{"parent": "gate", "child": TEAM, "callCount": 5}]
    target = f"/api/dependencies?endTs={TO}000&lookback=3600000"
    assert _read(client, target, shape) == edges
    assert _read(client, f"/api/dependencies?endTs={FROM}000&lookback=3600000", shape) == []
