"""The result of a soak: samples as CSV, the verdict as JSON, curves as SVG."""

from __future__ import annotations

import csv
import hashlib
import json
import math
import re
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.kit.machine import machine
from benchmarks.plots.model import Curves, Plot
from tests.soak.schedule import Plan
from tests.soak.verdict import Series, Share

_MOST_POINTS = 120


@dataclass(kw_only=True)
class Result:
    """All that a soak has found."""

    plan: Plan
    seconds: float
    balances: Sequence[str]
    problems: Sequence[str]
    series: Mapping[str, Series]
    events: Sequence[tuple[float, str]]
    missed: Sequence[str]
    notes: Sequence[str]
    counts: Mapping[str, Mapping[str, int]]
    starts: Mapping[str, int]
    pages: Share
    """Those that were answered while the web UI was not killed or stopped."""
    shares: Mapping[str, Share]
    """By attack: honest clients that were answered meanwhile."""
    load_average: float
    machine: Mapping[str, Any] = field(default_factory=machine)

    def bursts(self) -> dict[str, dict[str, float]]:
        """By road that has bursts: spans a second, as planned and as acknowledged meanwhile."""
        seconds = self.plan.traffic.bursting_s(self.seconds)
        return {
            road: {
                "planned_spans_per_s": round(counts["burst_due"] / seconds),
                "reached_spans_per_s": round(counts.get("burst_acknowledged", 0) / seconds),
            }
            for road, counts in self.counts.items()
            if seconds and counts.get("burst_due")
        }

    def summary(self) -> dict[str, Any]:
        """Everything but the samples, of which it has a few figures each."""
        traffic = self.plan.traffic
        return {
            "minutes": round(self.seconds / 60, 1),
            "seed": self.plan.seed,
            "spans_per_s": traffic.spans_per_s,
            "burst": traffic.burst,
            "without": sorted(self.plan.without),
            "balances": list(self.balances),
            "problems": list(self.problems),
            "notes": list(self.notes),
            "events": [{"at_s": round(at_s, 1), "event": text} for at_s, text in self.events],
            "missed": list(self.missed),
            "senders": {road: dict(counts) for road, counts in self.counts.items()},
            "bursts": self.bursts(),
            "starts": dict(self.starts),
            "pages": str(self.pages),
            "answered_under_attack": {what: str(share) for what, share in self.shares.items()},
            "load_average": round(self.load_average, 1),
            "machine": dict(self.machine),
            "series": {name: _figures(series) for name, series in self.series.items()},
        }

    def lines(self) -> list[str]:
        """For the terminal."""
        plan = self.plan
        kinds = {text.partition(":")[0] for _, text in self.events}
        lines = [
            f"soak of {self.seconds / 60:.1f} minutes, seed {plan.seed}: "
            f"{len(self.events)} disturbances of {len(kinds)} kinds, load {self.load_average:.1f}",
            *(f"  note: {note}" for note in self.notes),
            *(f"  {line}" for line in self.balances),
            *(
                f"  {road}: {counts.get('missed', 0):,} of {counts['due']:,} spans were not sent, "
                f"{counts.get('burst_missed', 0):,} of {counts.get('burst_due', 0):,} in bursts"
                for road, counts in self.counts.items()
            ),
            *(
                f"  {road}: bursts of {burst['planned_spans_per_s']:,} spans/s were planned, "
                f"{burst['reached_spans_per_s']:,} were acknowledged while they lasted"
                for road, burst in self.bursts().items()
            ),
            f"  pages answered: {self.pages}",
            *(f"  answered, {attack}: {share}" for attack, share in self.shares.items()),
            *(f"  did not happen: {event}" for event in self.missed),
            *(
                ["  growth is not judged: a run of less than 15 minutes is all warm-up"]
                if math.isinf(plan.judged_from_s)
                else []
            ),
        ]
        lines += [f"  FAILED: {problem}" for problem in self.problems]
        return [*lines, "failed" if self.problems else "passed"]


def write(result: Result, folder: Path) -> None:
    """Write ``samples.csv`` and ``result.json``."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "samples.csv").open("w", newline="", encoding="utf-8") as file:
        rows = csv.writer(file)
        rows.writerow(("name", "at_s", "value"))
        for name, series in result.series.items():
            rows.writerows((name, at_s, value) for at_s, value in series)
    (folder / "result.json").write_text(json.dumps(result.summary(), indent=2) + "\n", "utf-8")


def draw(folder: Path, target: Path) -> None:
    """Draw the curves of a result that was written to a folder."""
    from benchmarks.plots.paint import paint

    summary = json.loads((folder / "result.json").read_text("utf-8"))
    content = (folder / "samples.csv").read_bytes()
    source = f"samples.csv sha256:{hashlib.sha256(content).hexdigest()}"
    paint(plot(summary, read_samples(folder)), target, machine=summary["machine"], source=source)
    # A tenth of a point is enough, and a third of the bytes. Versions (3.11.7) stay.
    text = re.sub(r"(?<![\d.])(\d+\.\d)\d+(?![\d.])", r"\1", target.read_text("utf-8"))
    target.write_text(text, "utf-8")


def read_samples(folder: Path) -> dict[str, list[tuple[float, float]]]:
    """The samples that were written to a folder."""
    series: dict[str, list[tuple[float, float]]] = {}
    with (folder / "samples.csv").open(newline="", encoding="utf-8") as file:
        for row in csv.DictReader(file):
            point = float(row["at_s"]), float(row["value"])
            series.setdefault(row["name"], []).append(point)
    return series


def plot(summary: Mapping[str, Any], series: Mapping[str, Series]) -> Plot:
    """The curves: memory, descriptors, threads, files, bytes, lag and pages over time."""
    panels = [
        ("rate: ", "Acknowledged spans a second", "", 1.0),
        ("memory: ", "Memory", "MiB", 1.0),
        ("descriptors: ", "Open descriptors", "", 1.0),
        ("threads: ", "Threads", "", 1.0),
        ("files: ", "Files", "", 1.0),
        ("bytes: ", "Bytes", "MiB", 2.0**-20),
        ("lag: ", "Age of the oldest unread segment", "s", 1.0),
        ("pending: ", "Spans sent, not yet acknowledged", "", 1.0),
        ("page: ", "Pages", "s", 1.0),
    ]
    marks = [event["at_s"] / 60 for event in summary["events"]]
    curves = [
        Curves(
            title=title,
            across="minutes; marks: disturbances",
            unit=unit,
            lines={
                name.removeprefix(prefix): [
                    (at_s / 60, value * scale) for at_s, value in _thinned(points)
                ]
                for name, points in series.items()
                if name.startswith(prefix)
            },
            marks=marks,
        )
        for prefix, title, unit, scale in panels
    ]
    title = (
        f"A soak of {summary['minutes']:g} minutes at {summary['spans_per_s']:,.0f} spans/s, "
        f"bursts of {summary['burst']:g} times"
    )
    return Plot(title=title, panels=[panel for panel in curves if panel.lines])


def _thinned(points: Series) -> Series:
    """At most 120 points for a plot: of neighbours, the one with the largest value."""
    step = -(-len(points) // _MOST_POINTS)
    groups = [points[at : at + step] for at in range(0, len(points), step)]
    return [max(group, key=lambda point: point[1]) for group in groups]


def _figures(series: Series) -> dict[str, float]:
    values = [value for _, value in series]
    return {
        "samples": len(values),
        "median": round(statistics.median(values), 3),
        "most": round(max(values), 3),
        "last": round(values[-1], 3),
    }
