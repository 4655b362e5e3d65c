"""The API of traces: search, one trace, and errors that say what is wrong."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from batchmill.store import open_store
from batchmill.traces import SpanKeeper
from tests.kit.traces.segments import HOUR, NOW, kept, made_span, write_spans
from tests.web.kit import Client, serving, serving_all

EVENT = {"time": HOUR * 1_000_000 + 20_500, "name": "exception", "attributes": {"a": "b"}}
ROWS = [
    made_span(1, 1, at_ms=0, took_ms=100, name="GET /cart", http__route="/cart"),
    made_span(1, 2, 1, at_ms=10, took_ms=50, service="db", kind="CLIENT", name="SELECT"),
    made_span(2, 1, at_ms=20, took_ms=900, status="ERROR", message="no", events=[EVENT]),
]
NAMED = [
    made_span(1, 1, at_ms=1, name="GET /orders/4711"),
    made_span(2, 1, at_ms=2, name="GET /orders/4712?full=1"),
    made_span(3, 1, at_ms=3, name="GET /orders/4713", http__route="/orders/4713"),
    made_span(4, 1, at_ms=4, name="GET /orders/{id}", http__route="/orders/{id}"),
    made_span(5, 1, at_ms=5, name="GET /orders/4711/items", http__route=" "),
]
"""Spans whose names have ids; two of them have a route."""
TIME = {"from": HOUR, "to": HOUR + 3600}


def _refused(client: Client, code: int, path: str, **params: Any) -> Any:
    """The JSON of an answer with that status."""
    actual, answer = client.ask(path, **params)
    assert actual == code, answer
    return answer


@pytest.fixture(scope="module")
def filled(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    """The address of a store, and a folder of kept spans."""
    folder = tmp_path_factory.mktemp("traces")
    url = f"sqlite:///{folder}/store.db"
    open_store(url).close()
    return url, kept(folder, ROWS).folder


@pytest.fixture(scope="module")
def client(filled: tuple[str, Path]) -> Iterator[Client]:
    """A server of kept spans."""
    url, traces = filled
    with serving_all(url, traces=traces) as client:
        yield client


def _ids(answer: Any) -> list[int]:
    return [int(trace["trace_id"], 16) for trace in answer["traces"]]


@pytest.mark.parametrize(
    ("given", "ids"),
    [
        ({}, [2, 1]),
        ({"service": "db"}, [1]),
        ({"service": "shop", "name": "GET /cart"}, [1]),
        ({"status": "error"}, [2]),
        ({"status": "ok", "min_ms": "60.5"}, [1]),
        ({"max_ms": "100", "kind": "server"}, [1]),
        ({"attribute": "http.route=/cart"}, [1]),
        ({"limit": 1}, [2]),
        ({"from": HOUR + 60}, []),
    ],
)
def test_traces_are_found_by_parameters(
    client: Client, given: dict[str, Any], ids: list[int]
) -> None:
    """The newest first."""
    answer = client.get("/api/v1/traces", **{**TIME, **given})
    assert _ids(answer) == ids
    assert answer["oldest_s"] == HOUR


@pytest.mark.parametrize("waiting", [False, True], ids=["sorted", "segment"])
def test_traces_are_found_by_the_endpoint_that_a_name_becomes(
    tmp_path: Path, waiting: bool
) -> None:
    """Metrics replace ids in names, except of spans with a route; the name as it was does, too."""
    with _of_names(tmp_path, waiting=waiting) as client:
        for name, ids in (
            ("GET /orders/{id}", [4, 2, 1]),
            ("GET /orders/4711", [1]),
            ("GET /orders/4712?full=1", [2]),
            ("GET /orders/4713", [3]),
            ("GET /orders/{id}/items", [5]),
            ("GET /orders/{id}/other", []),
        ):
            answer = client.get("/api/v1/traces", service="shop", name=name, **TIME)
            assert _ids(answer) == ids, name


@pytest.mark.parametrize("normalise", [True, False])
def test_a_span_of_the_waterfall_has_its_endpoint(tmp_path: Path, normalise: bool) -> None:
    """The name that metrics have it under: of a pipeline that keeps names, the span's own."""
    with _of_names(tmp_path, normalise_names=normalise) as client:
        for trace, endpoint in (
            (1, "GET /orders/{id}"),
            (3, "GET /orders/4713"),
            (5, "GET /orders/{id}/items"),
        ):
            [span] = client.get(f"/api/v1/traces/{trace}")["spans"]
            assert span["name"] == NAMED[trace - 1]["name"]
            assert span["endpoint"] == (endpoint if normalise else span["name"])
        answer = client.get("/api/v1/traces", name="GET /orders/{id}", **TIME)
        assert _ids(answer) == ([4, 2, 1] if normalise else [4])


@contextlib.contextmanager
def _of_names(folder: Path, *, waiting: bool = False, **more: Any) -> Iterator[Client]:
    """A server of spans with ids in their names, sorted or in a segment that waits for it."""
    url = f"sqlite:///{folder}/store.db"
    open_store(url).close()
    if waiting:
        keeper = SpanKeeper(folder / "traces", clock=lambda: NOW)
        keeper.take(write_spans(folder / "spool", "named", NAMED))
    else:
        keeper = kept(folder, NAMED)
    with serving(url, traces=keeper.folder, **more) as client:
        yield client


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({"attribute": "route"}, "must be a key and a value"),
        ({"min_ms": "long"}, "must be milliseconds"),
        ({"status": "bad"}, "must be any, error, ok"),
        ({"limit": "501"}, "from 1 to 500"),
        ({"from": "now", "to": "now-1h"}, "from must lie before to"),
        ({"trace": "1"}, "no parameter here"),
    ],
)
def test_a_bad_parameter_is_explained(client: Client, given: dict[str, Any], why: str) -> None:
    """With 400."""
    answer = _refused(client, 400, "/api/v1/traces", **given)
    assert why in answer["error"]


def test_a_trace_has_all_that_the_waterfall_shows(client: Client) -> None:
    """Spans in order with depths, the critical path, and events; times since 1970."""
    answer = client.get("/api/v1/traces/1")
    assert (answer["duration_us"], answer["missing"]) == (100_000, 0)
    root, child = answer["spans"]
    start = answer["start_us"]
    assert (root["depth"], root["start_us"], root["critical"]) == (
        *(0, start),
        [[start, start + 10_000], [start + 60_000, start + 100_000]],
    )
    assert (child["parent_span_id"], child["depth"]) == (root["span_id"], 1)
    assert (child["start_us"], child["duration_us"]) == (start + 10_000, 50_000)
    assert root["attributes"] == {"http.route": "/cart"}
    assert answer["resources"][child["resource_index"]]["service.name"] == "db"
    (failed,) = client.get("/api/v1/traces/2")["spans"]
    assert (failed["status"], failed["status_message"]) == ("ERROR", "no")
    assert failed["events"] == [EVENT]


def test_a_trace_that_is_cut_says_so(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    """How many of its spans are left out; those that began first are there, the root among them."""
    assert client.get("/api/v1/traces/1")["spans_left_out"] == 0
    assert client.get("/api/traces/1")["data"][0]["warnings"] is None
    monkeypatch.setattr("batchmill.traces.reader.MOST_SPANS", 1)
    answer = client.get("/api/v1/traces/1")
    assert (answer["spans_left_out"], [span["name"] for span in answer["spans"]]) == (
        1,
        ["GET /cart"],
    )
    for path in ("/api/traces/1", "/api/traces"):
        times = {"start": HOUR * 1_000_000, "end": (HOUR + 3600) * 1_000_000}
        query = {"service": "db", **times} if path == "/api/traces" else {}
        [shown] = client.get(path, **query)["data"]
        assert shown["warnings"] == ["1 later span left out"]
        [span] = shown["spans"]
        assert (span["operationName"], span["warnings"]) == ("GET /cart", shown["warnings"])


def test_an_unknown_trace_is_not_found(client: Client) -> None:
    """With what may be the reason."""
    assert "too old, or not committed" in _refused(client, 404, "/api/v1/traces/99")["error"]


def test_services_are_suggested(client: Client) -> None:
    """With the names of their spans."""
    answer = client.get("/api/v1/traces/services")
    assert answer["services"] == {"db": ["SELECT"], "shop": ["GET /", "GET /cart"]}
    assert answer["kept"]["spans"] == 3


def test_a_server_without_kept_spans_says_so(tmp_path: Path) -> None:
    """And how to keep them."""
    url = f"sqlite:///{tmp_path}/store.db"
    open_store(url).close()
    with serving(url) as client:
        assert "keep_spans" in _refused(client, 404, "/api/v1/traces")["error"]
        assert "keep_spans" in _refused(client, 404, "/api/services")["errors"][0]["msg"]
