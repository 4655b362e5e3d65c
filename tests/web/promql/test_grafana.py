"""The dashboard for Grafana: each of its questions is one that our API answers."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from batchmill.store import open_store
from batchmill.web.promql.parser import parse_selector
from tests.kit.files import ROOT
from tests.web.kit import START_S, Call, CallWriter, serving

DASHBOARD = ROOT / "deploy" / "grafana" / "batchmill.json"


def _dashboard() -> dict[str, Any]:
    dashboard: dict[str, Any] = json.loads(DASHBOARD.read_text(encoding="utf-8"))
    return dashboard


def _targets() -> list[tuple[str, bool]]:
    """Each expression, and whether it is asked of one moment."""
    return [
        (target["expr"], target["instant"])
        for panel in _dashboard()["panels"]
        for target in panel["targets"]
    ]


def test_each_expression_is_answered(tmp_path: Path) -> None:
    """With series, for all services and for some, as Grafana writes them into the expression."""
    url = f"sqlite:///{tmp_path}/store.db"
    with open_store(url) as store:
        calls = [Call("shop", START_S + 60 * n, caller="gate") for n in range(5)]
        CallWriter(store).write(calls)
    with serving(url) as client:
        for expression, instant in _targets():
            for chosen in (".+", "(shop|ca\\\\.rt)"):
                query = expression.replace("$service", chosen)
                if instant:
                    params = {"query": query, "time": START_S + 240}
                    answer = client.get("/api/v1/query", **params)
                else:
                    params = {"query": query, "start": START_S, "end": START_S + 240, "step": 15}
                    answer = client.get("/api/v1/query_range", **params)
                # Nobody called a database here.
                assert bool(answer["data"]["result"]) is ("database" not in query), query


def test_the_variable_has_the_names_of_services(tmp_path: Path) -> None:
    """label_values(metric, label) becomes a question for the values of a label."""
    (variable,) = (
        entry for entry in _dashboard()["templating"]["list"] if entry["name"] == "service"
    )
    match = re.fullmatch(r"label_values\((\w+), (\w+)\)", variable["query"]["query"])
    assert match is not None
    url = f"sqlite:///{tmp_path}/store.db"
    with open_store(url) as store:
        CallWriter(store).write([Call("shop", START_S)])
    with serving(url) as client:
        path = f"/api/v1/label/{match[2]}/values"
        params = {"match[]": match[1], "start": START_S - 60, "end": START_S + 60}
        assert client.get(path, **params)["data"] == ["shop"]


def test_only_variables_that_there_are() -> None:
    """No expression names a variable that the dashboard lacks, and none is more than a selector."""
    known = {variable["name"] for variable in _dashboard()["templating"]["list"]}
    for expression, _ in _targets():
        assert set(re.findall(r"\$\{?(\w+)", expression)) <= known
        parse_selector(expression.replace("$service", ".+"))
