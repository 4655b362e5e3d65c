"""The API of traces: search, one trace, and errors that say what is wrong."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from batchmill.store import open_store
from tests.kit.traces.segments import HOUR, kept, made_span
from tests.web.kit import Client, serving, serving_all

EVENT = {"time": HOUR * 1_000_000 + 20_500, "name": "exception", "attributes": {"a": "b"}}
ROWS = [
    made_span(1, 1, at_ms=0, took_ms=100, name="GET /cart", http__route="/cart"),
    made_span(1, 2, 1, at_ms=10, took_ms=50, service="db", kind="CLIENT", name="SELECT"),
    made_span(2, 1, at_ms=20, took_ms=900, status="ERROR", message="no", events=[EVENT]),
]
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
        ({"service": "shop", "endpoint": "GET /cart"}, [1]),
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
    assert answer["oldest"] == HOUR


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
    """Spans in order with depths, times from the start on, the critical path, and events."""
    answer = client.get("/api/v1/traces/1")
    assert (answer["duration_us"], answer["missing"]) == (100_000, 0)
    root, child = answer["spans"]
    assert (root["depth"], root["start"], root["critical"]) == (
        0,
        0,
        [[0, 10_000], [60_000, 100_000]],
    )
    assert (child["parent"], child["depth"], child["start"], child["duration"]) == (
        root["id"], 1, 10_000, 50_000,
    )  # fmt: skip
    assert root["attributes"] == {"http.route": "/cart"}
    assert answer["resources"][child["resource"]]["service.name"] == "db"
    (failed,) = client.get("/api/v1/traces/2")["spans"]
    assert (failed["status"], failed["message"]) == ("ERROR", "no")
    assert failed["events"] == [{"at": 500, "name": "exception", "attributes": {"a": "b"}}]


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
