"""A run of some parts of a benchmark leaves the others as they are."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from benchmarks.kit.command import Benchmark, OtherParts
from benchmarks.kit.goals import Goal
from benchmarks.kit.report import Result, Table


@dataclass
class Number:
    """A result."""

    name: str
    value: float

    def tables(self) -> list[Table]:
        """None."""
        return []

    def as_json(self) -> dict[str, Any]:
        """What to keep."""
        return {"value": self.value}


def goals_of(results: Mapping[str, Result]) -> list[Goal]:
    """At least and at most 1, for each part."""
    return [
        Goal(what=name, value=result.as_json()["value"], limit=1, at_least=at_least, unit="")
        for name, result in results.items()
        for at_least in (True, False)
    ]


def run(path: Path, first: float, second: float, *options: str) -> dict[str, Any]:
    """Run a benchmark with these results; what the file has then."""
    parts = {"first": lambda: Number("first", first), "second": lambda: Number("second", second)}
    benchmark = Benchmark(
        name="example", about="", full=parts, quick=parts, goals=goals_of, goals_caption=""
    )
    assert benchmark.run(["--json", str(path), *options]) == 0
    document: dict[str, Any] = json.loads(path.read_text("utf-8"))
    return document


def test_other_parts_stay(tmp_path: Path) -> None:
    """With their goals; those of the part that was run are new."""
    path = tmp_path / "example.json"
    run(path, 1.0, 1.0)
    document = run(path, 2.0, 2.0, "--only", "second")
    assert (document["first"], document["second"]) == ({"value": 1.0}, {"value": 2.0})
    assert [(goal["what"], goal["at_least"], goal["value"]) for goal in document["goals"]] == [
        ("first", True, 1.0),
        ("first", False, 1.0),
        ("second", True, 2.0),
        ("second", False, 2.0),
    ]


def test_a_part_that_fails_leaves_the_results_of_those_before_it(tmp_path: Path) -> None:
    """They may have taken an hour."""

    def fails() -> Result:
        raise RuntimeError("the peer is not here")

    path = tmp_path / "example.json"
    parts = {"first": lambda: Number("first", 1.0), "second": fails}
    benchmark = Benchmark(
        name="example", about="", full=parts, quick=parts, goals=goals_of, goals_caption=""
    )
    with pytest.raises(RuntimeError, match="the peer"):
        benchmark.run(["--json", str(path)])
    document = json.loads(path.read_text("utf-8"))
    assert document["first"] == {"value": 1.0}
    assert [goal["what"] for goal in document["goals"]] == ["first", "first"]


def test_a_part_that_is_no_more_goes_with_a_run_of_all(tmp_path: Path) -> None:
    """All of the file is replaced then."""
    path = tmp_path / "example.json"
    path.write_text(json.dumps({"quick": False, "third": {"value": 3.0}, "goals": []}), "utf-8")
    assert "third" in run(path, 1.0, 1.0, "--only", "first")
    assert "third" not in run(path, 1.0, 1.0)


def test_quick_and_full_parts_are_not_mixed(tmp_path: Path) -> None:
    """Before anything is measured."""
    path = tmp_path / "example.json"
    run(path, 1.0, 1.0)
    before = path.read_text("utf-8")
    with pytest.raises(SystemExit, match="is of a full run: give another file with --json"):
        run(path, 2.0, 2.0, "--only", "first", "--quick")
    assert path.read_text("utf-8") == before


def test_sizes_of_other_parts_stay() -> None:
    """A part that was run has the sizes of this run."""
    known = {"quick": False, "size": {"spans": 10, "events": 5}, "spans": {}, "events": {}}
    merged = OtherParts(known).with_results({"quick": False, "size": {"spans": 20}, "goals": []})
    assert merged["size"] == {"spans": 20, "events": 5}
