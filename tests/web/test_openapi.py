"""The OpenAPI document is true: whatever it allows is answered as it says, whatever is asked."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis import GenerationMode, checks

from batchmill.store import open_store
from batchmill.web import make_app
from batchmill.web.openapi import document
from tests.kit.threads import WAIT_S
from tests.kit.traces.segments import kept, made_span
from tests.web.kit import START_S, Call, CallWriter, Client, FakeRun, serving_all

LIVE = "/api/v1/live"
"""Has no end, and so tests of its own."""
QUESTIONS = [
    pytest.param(path, method, mode, id=f"{method} {path} {mode.value}")
    for path, methods in document()["paths"].items()
    for method, facts in methods.items()
    for mode in (GenerationMode.POSITIVE, GenerationMode.NEGATIVE)
    # Where nothing is asked for, nothing can be wrong.
    if path != LIVE
    and (mode is GenerationMode.POSITIVE or facts.get("parameters") or "requestBody" in facts)
]
CHECKS: list[Any] = [
    checks.not_a_server_error,
    checks.status_code_conformance,
    checks.content_type_conformance,
    checks.response_schema_conformance,
]


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The address of a store with some calls."""
    folder: Path = tmp_path_factory.mktemp("openapi")
    store_url = f"sqlite:///{folder}/store.db"
    with open_store(store_url) as store:
        CallWriter(store).write(
            [Call("shop", START_S + 60 * n, 10 * n, n % 7 > 0, caller="gate") for n in range(50)]
        )
    return store_url


@pytest.fixture(scope="module")
def traces(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with some kept spans."""
    return kept(tmp_path_factory.mktemp("spans"), [made_span(1, 1), made_span(1, 2, 1)]).folder


@pytest.fixture(scope="module")
def client(url: str, traces: Path) -> Iterator[Client]:
    """A server over both."""
    with serving_all(url, run=FakeRun(lambda: {"state": "fine"}), traces=traces) as api_client:
        yield api_client


@pytest.mark.parametrize(("path", "method", "mode"), QUESTIONS)
def test_answers_are_as_the_document_says(
    client: Client, path: str, method: str, mode: GenerationMode
) -> None:
    """Status, type and content of every answer, for questions that fit and such that do not."""
    schema = schemathesis.openapi.from_dict(dict(document()))
    operation = schema[path][method.upper()]

    @settings(
        max_examples=6 if mode is GenerationMode.POSITIVE else 3,
        phases=(Phase.explicit, Phase.generate),
        suppress_health_check=list(HealthCheck),
        derandomize=True,
        database=None,
    )
    @given(operation.as_strategy(generation_mode=mode))
    def ask(case: schemathesis.Case[Any]) -> None:
        case.call_and_validate(base_url=client.address, checks=CHECKS, timeout=WAIT_S)

    ask()


def test_every_route_is_in_the_document(url: str) -> None:
    """No path under /api is left out, and none is promised that is not there."""
    paths = [getattr(route, "path", "") for route in make_app(url).routes]
    routes = {path.replace(":path}", "}") for path in paths if path.startswith("/api/")}
    assert routes | {LIVE} == document()["paths"].keys()


def test_the_document_is_served(client: Client) -> None:
    """As it is, for whoever generates a client from it."""
    assert client.get("/api/v1/openapi.json") == document()
