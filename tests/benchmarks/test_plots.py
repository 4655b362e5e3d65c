"""The plots in docs/img: of the committed results, and of nothing else."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from benchmarks import RESULTS
from benchmarks.kit.report import write_json
from benchmarks.plots import drawing as plots
from benchmarks.plots.model import Bars, Plot, number, of_goals

SVG = "{http://www.w3.org/2000/svg}"
DUBLIN = "{http://purl.org/dc/elements/1.1/}"
LARGEST = 100_000
GOAL = {"what": "a", "value": 2.0, "limit": 1, "at_least": True, "unit": "x"}
NAMES = sorted(path.stem for path in RESULTS.glob("*.json"))


def _results(name: str) -> dict[str, Any]:
    results: dict[str, Any] = json.loads((RESULTS / f"{name}.json").read_text("utf-8"))
    return results


def _image(name: str) -> ElementTree.Element:
    path = plots.image_of(name)
    assert path.exists(), f"python -m benchmarks.plots {name}"
    return ElementTree.parse(path).getroot()


def _metadata(image: ElementTree.Element, what: str) -> str:
    (element,) = image.iter(f"{DUBLIN}{what}")
    return element.text or ""


@pytest.mark.parametrize("name", NAMES)
def test_a_plot_is_of_the_committed_results(name: str) -> None:
    """Results that change without their plot, or a plot without its results, are noticed."""
    assert _metadata(_image(name), "source") == plots.source_of(name, _results(name))


@pytest.mark.parametrize("name", NAMES)
def test_a_plot_shows_the_numbers_of_the_results(name: str) -> None:
    """What it says in words is worked out of the results again, and each label stands on it."""
    image, plot = _image(name), plots.plot_of(name, _results(name))
    assert _metadata(image, "description").split("\n") == plot.facts()
    texts = {text for element in image.iter(f"{SVG}text") for text in element.itertext()}
    assert {*_labels(plot), plot.title, *(panel.title for panel in plot.panels)} <= texts


def _labels(plot: Plot) -> set[str]:
    panels = [panel for panel in plot.panels if isinstance(panel, Bars)]
    bars = [bar for panel in panels for bars in panel.groups.values() for bar in bars]
    return {number(bar.middle) for bar in bars}


@pytest.mark.parametrize("name", NAMES)
def test_a_plot_is_small_and_whole(name: str) -> None:
    """It is below 100 kB, has a white card of its own, and asks nobody else for anything."""
    path = plots.image_of(name)
    assert path.stat().st_size < LARGEST
    text = path.read_text("utf-8")
    assert "fill: #ffffff" in text
    assert "<image" not in text
    assert "@import" not in text
    assert "dc:date" not in text


def test_there_is_no_plot_without_results() -> None:
    """What was dropped from the results is dropped from the plots."""
    assert [path.stem for path in sorted(plots.IMAGES.glob("bench-*.svg"))] == [
        f"bench-{name}" for name in NAMES
    ]


@pytest.mark.parametrize("name", ["queue", "pressure", "flows", "aggregate", "pipeline", "ingest"])
def test_a_run_of_some_parts_has_a_plot_of_these(name: str) -> None:
    """A part that was not run (`--only`) is left out, and breaks nothing."""
    whole = _results(name)
    parts = [key for key in whole if key not in ("machine", "quick", "size", "goals")]
    for part in parts:
        some = plots.plot_of(name, {key: whole[key] for key in whole if key != part})
        assert len(some.panels) <= len(plots.plot_of(name, whole).panels)


def test_a_benchmark_without_a_plot_of_its_own_shows_its_goals() -> None:
    """A new results file is drawn by its goals: what was measured, as a part of the limit."""
    goal = {"what": "overview", "value": 150.0, "limit": 300, "at_least": False, "unit": " ms"}
    missing = {**goal, "what": "not run", "value": None}
    plot = plots.plot_of("some_query", {"goals": [goal, missing]})
    (panel,) = plot.panels
    assert isinstance(panel, Bars)
    (bar,) = panel.groups[""]
    assert (plot.title, bar.name) == ("Some query", "overview: 150 ms, goal at most 300 ms")
    assert bar.middle == 0.5
    assert plots.plot_of("nothing", {"machine": {}}).panels == []


def test_the_plot_of_queries_stands_before_their_results_do() -> None:
    """It has a bar for each who was asked and the goal's line, or the goals alone."""
    goal = {**GOAL, "what": "overview", "value": 150.0, "limit": 300, "at_least": False}
    whole = {"ms": {"batchmill, HTTP": [140.0, 160.0], "DuckDB": [900.0]}, "goals": [goal]}
    (panel,) = plots.plot_of("query", whole).panels
    assert isinstance(panel, Bars)
    assert [(bar.name, bar.middle, bar.ours) for bar in panel.groups[""]] == [
        ("batchmill, HTTP", 150.0, True),
        ("DuckDB", 900.0, False),
    ]
    assert panel.goal == 300
    assert len(plots.plot_of("query", {"goals": [goal]}).panels) == 1


def test_the_same_results_give_the_same_bytes(tmp_path: Path) -> None:
    """There is nothing in a plot of the hour it was made, nor of chance."""
    from benchmarks.plots.paint import paint

    plot = of_goals("Again", {"goals": [GOAL]})
    made = []
    for target in (tmp_path / "one.svg", tmp_path / "two.svg"):
        paint(plot, target, machine={}, source="here")
        made.append(target.read_bytes())
    assert made[0] == made[1]


def test_a_benchmark_that_writes_its_results_draws_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Results that are kept get their plot at once; those that go elsewhere get none."""
    monkeypatch.setattr(plots, "RESULTS", tmp_path / "results")
    monkeypatch.setattr(plots, "IMAGES", tmp_path / "images")
    write_json(tmp_path / "elsewhere" / "one.json", {"goals": [GOAL]})
    write_json(tmp_path / "results" / "two.json", {"goals": [GOAL]})
    assert [path.name for path in (tmp_path / "images").iterdir()] == ["bench-two.svg"]
