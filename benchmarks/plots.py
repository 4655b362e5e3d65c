"""Plots of the committed results, as SVG for the documentation.

``python -m benchmarks.plots`` draws all of them; a benchmark that writes its results to
``benchmarks/results`` draws its own. The same results and matplotlib version give the same file,
byte by byte. A results file without a plot function gets a plot of its goals.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks import plots_parts, plots_road, plots_runs
from benchmarks.plots_model import Plot, of_goals

RESULTS = Path(__file__).parent / "results"
IMAGES = Path(__file__).parents[1] / "docs" / "img"

PLOTS: Mapping[str, Callable[[Mapping[str, Any]], Plot]] = {
    "queue": plots_parts.queue,
    "pressure": plots_parts.pressure,
    "flows": plots_parts.flows,
    "aggregate": plots_parts.aggregate,
    "pipeline": plots_road.pipeline,
    "ingest": plots_road.ingest,
    "kafka": plots_road.kafka,
    "export": plots_road.export,
    "commits": plots_road.commits,
    "query": plots_road.query,
    "traces": plots_runs.traces,
    "cardinality": plots_runs.cardinality,
    "checkpoint": plots_runs.checkpoint,
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
    from benchmarks.plots_paint import paint

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


def main(arguments: Sequence[str] | None = None) -> int:
    """Make the plots of all results, or of some."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.plots", description=__doc__)
    parser.add_argument("names", nargs="*", help="names of benchmarks (default: all with results)")
    names = parser.parse_args(arguments).names
    for path in sorted(RESULTS.glob("*.json")):
        if not names or path.stem in names:
            print(draw(path) or f"{path}: nothing to draw")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
