"""The results on the page of the metric language are those of the pipeline, and of the oracle."""

from __future__ import annotations

import re
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from batchmill.oal import FUNCTIONS, core_script, load, parse
from tests.docs.kit import DOCS, metric_examples, tables
from tests.kit.files import ROOT
from tests.oracle.catalog import Row

pytest.importorskip("pyspark")

from tests.kit.pipelines import Stored, expected, pipeline, stored, write_spool

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

PAGE = DOCS / "oal.md"
SHOWN = {"10:00": ("minute", 202603011000), "10:01": ("minute", 202603011001)} | {
    "hour": ("hour", 2026030110)
}
COMPARISONS = ("==", "!=", ">", "<", ">=", "<=", "like", "in", "contain", "not contain")
NUMBERS = ("latency", "httpResponseStatusCode")


def script() -> str:
    """All metrics with a result, as one script."""
    return "\n".join(block.text for block, _ in metric_examples(PAGE))


def events() -> dict[str, list[Row]]:
    """The rows of the page's two tables."""
    rows: dict[str, list[Row]] = {"Endpoint": [], "ServiceInstanceJVMCPU": []}
    for row in tables(PAGE, "Example rows"):
        hour, minute, second = map(int, row["time"].split(":"))
        at = {"time": datetime(2026, 3, 1, hour, minute, second, tzinfo=UTC)}
        if "usePercent" in row:
            cpu = {"id": "shop-1", "usePercent": float(row["usePercent"])}
            rows["ServiceInstanceJVMCPU"].append(at | cpu)
        else:
            rows["Endpoint"].append(at | endpoint(row))
    return rows


def endpoint(cells: dict[str, str]) -> Row:
    """A row of Endpoint, of what its line in the table says."""
    row: dict[str, Any] = {name: text or None for name, text in cells.items() if name != "time"}
    row |= {name: int(row[name]) for name in NUMBERS}
    row["status"] = row["status"] == "true"
    row["tags"] = row["tags"].split(", ") if row["tags"] else None
    row["tag"] = dict([row["tag"].split("=")]) if row["tag"] else None
    return row | {"serviceName": "shop", "serviceLayer": "GENERAL", "name": "/cart"}


def shown_values(name: str, values: Stored) -> Iterator[str]:
    """A metric's values, as the page shows them."""
    yield name
    for when, (grain, bucket) in SHOWN.items():
        candidates = [v for key, v in values.items() if key[:3] == (name, grain, bucket)]
        assert len(candidates) <= 1, name
        value = candidates[0] if candidates else "-"
        yield when
        if isinstance(value, dict):
            # Ranks and edges stand in the order of numbers, labels in that of their names.
            named = any(label.startswith("{n=") for label in value)
            for label in sorted(value) if named else value:
                yield f"{label} {value[label]}"
        else:
            yield str(value)


def differing(values: Stored) -> list[str]:
    """Blocks that show something else, with what they should."""
    wrong = []
    for block, shown in metric_examples(PAGE):
        names = [metric.name for metric in parse(block.text).metrics]
        right = " ".join(" ".join(shown_values(name, values)) for name in names)
        if shown.text.split() != right.split():
            wrong.append(f"{shown.place}: {right}")
    return wrong


def test_every_function_and_comparison_has_an_example() -> None:
    """Nothing of the language goes without a result that a reader can check by hand."""
    metrics = parse(script()).metrics
    assert {metric.function for metric in metrics} == set(FUNCTIONS)
    compared = {condition.op for metric in metrics for condition in metric.filters}
    assert compared == set(COMPARISONS)
    assert {f"### {name}" for name in FUNCTIONS} <= set(PAGE.read_text("utf-8").splitlines())


def test_the_readme_has_the_number_of_the_core_metrics() -> None:
    """Those that everybody gets without a script."""
    text = (ROOT / "README.md").read_text("utf-8")
    assert re.findall(r"(\d+) ready-made", text) == [str(len(load(core_script()).metrics))]


def test_the_examples_come_to_what_the_oracle_says() -> None:
    """An independent implementation finds the same values."""
    assert differing(expected(events(), script())) == []


def test_the_examples_come_to_what_the_pipeline_says(spark: SparkSession, tmp_path: Path) -> None:
    """The pipeline itself, from segments to the store, finds the same values."""
    write_spool(events(), tmp_path / "spool", files=1)
    with pipeline(spark, tmp_path, oal=script()) as running:
        running.run_available()
        assert differing(stored(running.store)) == []
