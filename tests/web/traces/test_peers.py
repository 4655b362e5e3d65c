"""Traces by what their spans call: databases, caches, brokers, hosts, by their names in metrics.

Spans of real clients name the other end of a call in many ways, from `db.namespace` to a URL.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from batchmill.sources import service_id
from batchmill.store import open_store
from tests.kit.otlp import real_spans
from tests.kit.traces.segments import HOUR, NOW, kept, made_span
from tests.oracle.spans import (
    EXIT_KINDS,
    GEN_AI_KEYS,
    attributes_of,
    destination_of,
    has_any,
    is_cache,
    is_database_call,
    is_message,
    kind_of,
)
from tests.web.kit import Client, serving_all

SPANS = real_spans()
FIRST_S, LAST_S = (pick(span["time"].timestamp() for span in SPANS) for pick in (min, max))
REAL = {"from": FIRST_S - 60, "to": LAST_S + 60}
MADE = {"from": HOUR, "to": HOUR + 3600}
MODEL: dict[str, Any] = {
    "gen_ai__system": "openai",
    "server__address": "llm.corp",
    "server__port": "443",
}
QUEUE: dict[str, Any] = {"messaging__system": "kafka", "server__address": "queue"}
ROWS = [
    made_span(1, 1, kind="PRODUCER", service="shop", **QUEUE),
    made_span(2, 1, kind="CONSUMER", service="mail", **QUEUE),
    made_span(3, 1, kind="CLIENT", **MODEL),
    made_span(4, 1, kind="CLIENT", db__system="postgresql", server__address="orders"),
    made_span(5, 1, kind="CLIENT", db__system="postgresql", db__namespace="orders"),
    made_span(6, 1, kind="CLIENT", server__address="orders", server__port="80"),
    made_span(7, 1, kind="SERVER", server__address="orders", server__port="80"),
    made_span(8, 1, kind="CLIENT", http__url="https://[2001:db8::1]/a", name="GET"),
]


def called() -> dict[str, set[str]]:
    """The traces of each destination of calls, and of messages, by the oracle."""
    traces: dict[str, set[str]] = {}
    for span in SPANS:
        attributes = attributes_of(span)
        is_message = kind_of(span) == "CONSUMER" and "messaging.system" in attributes
        place = destination_of(attributes)
        if place is not None and (kind_of(span) in EXIT_KINDS or is_message):
            traces.setdefault(place, set()).add(span["trace_id"])
    return traces


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    """A server of the spans of real clients."""
    with _serving(tmp_path_factory.mktemp("real"), SPANS, LAST_S + 60) as client:
        yield client


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    """A server of spans with like names."""
    with _serving(tmp_path_factory.mktemp("made"), ROWS, NOW) as client:
        yield client


@contextlib.contextmanager
def _serving(folder: Path, spans: Sequence[Mapping[str, Any]], now: float) -> Iterator[Client]:
    url = f"sqlite:///{folder}/store.db"
    open_store(url).close()
    with serving_all(url, traces=kept(folder, spans, now=now).folder) as client:
        yield client


def _ids(client: Client, **given: object) -> set[str]:
    answer = client.get("/api/v1/traces", **{"limit": 500, **given})
    return {trace["trace_id"] for trace in answer["traces"]}


@pytest.mark.parametrize("place", sorted(called()))
def test_what_real_clients_call_has_its_traces_and_no_others(real: Client, place: str) -> None:
    """Whatever attributes name it, with a port or without."""
    assert _ids(real, peer=place, **REAL) == called()[place]


@pytest.mark.parametrize(
    ("given", "traces"),
    [
        ({"peer": "orders:5432"}, {4}),
        ({"peer": "orders"}, {5}),
        ({"peer": "orders:80"}, {6}),
        ({"peer": "[2001:db8::1]:443"}, {8}),
        ({"peer": "openai"}, {3}),
        ({"peer": "llm.corp:443"}, {3}),
        ({"peer": "queue:9092"}, {1, 2}),
        ({"peer": "queue:9092", "kind": "consumer"}, {2}),
        ({"peer": "queue:9092", "service": "shop"}, {1}),
        ({"peer": "queue:9092", "service": "mail"}, set()),
        ({"peer": "queue:9092", "service": "mail", "kind": "consumer"}, {2}),
        ({"peer": "nobody"}, set()),
    ],
)
def test_a_peer_is_one_place(made: Client, given: dict[str, str], traces: set[int]) -> None:
    """Not another with a like name or port; of a service, what it calls, not what it consumes."""
    assert {int(trace, 16) for trace in _ids(made, **given, **MADE)} == traces


def used(span: dict[str, Any]) -> tuple[str, str] | None:
    """The role and the name of what a span uses that sends no spans, by the oracle."""
    attributes = attributes_of(span)
    place = destination_of(attributes) or ""
    if is_database_call(span):
        return ("Cache" if is_cache(attributes) else "Database"), place
    if is_message(span):
        return "Message queue", place
    if kind_of(span) == "CLIENT" and has_any(attributes, *GEN_AI_KEYS):
        return "Language model provider", attributes["gen_ai.provider.name"]
    return None


def test_spans_of_real_clients_name_what_they_use(real: Client) -> None:
    """Each database, cache, broker and model provider, by the id and the name that metrics have."""
    seen = set()
    for trace in {span["trace_id"] for span in SPANS}:
        for shown in real.get(f"/api/v1/traces/{trace}")["spans"]:
            [span] = [
                one
                for one in SPANS
                if (one["trace_id"], one["span_id"]) == (trace, shown["span_id"])
            ]
            backend, expected = shown["backend"], used(span)
            assert (backend and (backend["role"], backend["name"])) == expected
            if backend:
                assert backend["id"] == service_id(backend["name"], normal=False)
                seen.add(backend["role"])
    assert seen >= {"Cache", "Database", "Message queue"}


@pytest.mark.parametrize(
    ("trace", "expected"),
    [
        (1, ("Message queue", "queue:9092")),
        (2, ("Message queue", "queue:9092")),
        (3, ("Language model provider", "openai")),
        (4, ("Database", "orders:5432")),
        (6, None),
        (7, None),
    ],
)
def test_a_span_names_what_it_uses(
    made: Client, trace: int, expected: tuple[str, str] | None
) -> None:
    """A broker of what it sends and processes; no host that may answer, and nothing that serves."""
    [span] = made.get(f"/api/v1/traces/{trace}")["spans"]
    backend = span["backend"]
    assert (backend and (backend["role"], backend["name"])) == expected
