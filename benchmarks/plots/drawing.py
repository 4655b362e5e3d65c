"""Draws plots of results, as SVG for the documentation.

A benchmark that writes its results to ``benchmarks/results`` draws its own. The same results and
matplotlib version give the same file, byte by byte. A results file without a plot function gets a
plot of its goals.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from benchmarks import RESULTS
from benchmarks.plots import parts, road, runs
from benchmarks.plots.model import Plot, of_goals

IMAGES = Path(__file__).parents[2] / "docs" / "img"

PLOTS: Mapping[str, Callable[[Mapping[str, Any]], Plot]] = {
    "queue": parts.queue,
    "pressure": parts.pressure,
    "flows": parts.flows,
    "aggregate": parts.aggregate,
    "pipeline": road.pipeline,
    "ingest": road.ingest,
    "kafka": road.kafka,
    "export": road.export,
    "commits": road.commits,
    "query": road.query,
    "traces": runs.traces,
    "cardinality": runs.cardinality,
    "checkpoint": runs.checkpoint,
}


def plot_of(name: str, document: Mapping[str, Any]) -> Plot:
    """What the plot of a benchmark's results shows."""
    if name in PLOTS:
        return PLOTS[name](document)
    return of_goals(name.replace("_", " ").capitalize(), document)


def image_of(name: str) -> Path:
    """Where a plot lies."""
    return IMAGES / f"bench-{name}.svg"


def source_of(name: str, document: Mapping[str, Any]) -> str:
    """Which results a plot is of, as the image says it."""
    content = json.dumps(document, sort_keys=True, separators=(",", ":"))
    return f"benchmarks/results/{name}.json sha256:{hashlib.sha256(content.encode()).hexdigest()}"


def draw(path: Path) -> Path | None:
    """Draw the plot of a results file; None: there is nothing in it to draw."""
    from benchmarks.plots.paint import paint

    document = json.loads(path.read_text(encoding="utf-8"))
    plot = plot_of(path.stem, document)
    if not plot.panels:
        return None
    target = image_of(path.stem)
    target.parent.mkdir(parents=True, exist_ok=True)
    paint(plot, target, machine=document.get("machine", {}), source=source_of(path.stem, document))
    return target


def draw_results(path: Path) -> None:
    """Draw what a benchmark has just written, if it is among the results that are kept."""
    if path.resolve().parent != RESULTS.resolve():
        return
    if importlib.util.find_spec("matplotlib") is None:
        print(f"no plot of {path.name}: matplotlib is not installed", file=sys.stderr)
        return
    print(f"plot: {draw(path)}", file=sys.stderr)
