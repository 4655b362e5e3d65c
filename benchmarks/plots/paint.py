"""Draws a plot with matplotlib, as an SVG that is readable on light and dark pages.

Text is kept as text. Without dates and random ids, the same plot gives the same bytes.
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Mapping
from itertools import cycle
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from benchmarks.plots.model import Bar, Bars, Curve, Curves, Plot, number

STYLE: dict[Any, Any] = {
    "svg.hashsalt": "batchmill",
    "svg.fonttype": "none",
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans", "Verdana", "Helvetica", "Arial", "sans-serif"],
    "font.size": 9,
    "axes.titlesize": 10,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": "#8a929c",
    "axes.labelcolor": "#333b45",
    "text.color": "#1c2229",
    "xtick.color": "#333b45",
    "ytick.color": "#1c2229",
}
OURS, PEER, GOAL, GRID = "#1f6feb", "#a9b3bf", "#c8341e", "#e4e8ec"
SHADES = {True: ("#1f6feb", "#79b0ff"), False: ("#8d99a6", "#c3cbd4", "#dfe4e9")}
PAIR = ("#1f6feb", "#e0912f")
"""Two roads, both ours."""

WIDTH = 9.0
BAR, GAP, AROUND = 0.235, 0.16, 0.95
"""Inches: a bar, between groups, and a panel's title and axis."""
CURVE = 1.9
LINE = 0.17
"""Inches: a name in the legend of several lines."""
LINES = (
    *("#1f6feb", "#e0912f", "#2da44e", "#c8341e", "#8250df", "#0e7c86", "#bf3989", "#6e7781"),
    *("#79b0ff", "#f0c27b", "#7fd39b", "#e58d7f", "#c2a5f0", "#7cc4cb"),
)


def paint(plot: Plot, target: Path, *, machine: Mapping[str, Any], source: str) -> None:
    """Write the plot."""
    with mpl.rc_context(STYLE):
        heights = list(map(_height, plot.panels))
        total = sum(heights) + 0.75
        figure = Figure(figsize=(WIDTH, total), facecolor="white")
        figure.text(0.02, 1 - 0.17 / total, plot.title, size=13, weight="bold", va="top")
        figure.text(
            0.02, 1 - 0.44 / total, _small_print(plot, machine), size=8, va="top", color="#59636e"
        )
        top = total - 0.75
        for panel, height in zip(plot.panels, heights, strict=True):
            inner = height - AROUND - _legend_height(panel)
            axes = figure.add_axes((0.335, (top - 0.38 - inner) / total, 0.605, inner / total))
            if isinstance(panel, Bars):
                _bars(axes, panel)
            elif isinstance(panel, Curves):
                _curves(axes, panel)
            else:
                _curve(axes, panel)
            top -= height
        target.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(
            target,
            format="svg",
            facecolor="white",
            metadata={
                "Date": None,
                "Creator": None,
                "Title": plot.title,
                "Source": source,
                "Description": "\n".join(plot.facts()),
            },
        )
    text = target.read_text(encoding="utf-8")
    target.write_text("\n".join(line.rstrip() for line in text.splitlines()) + "\n", "utf-8")


def _small_print(plot: Plot, machine: Mapping[str, Any]) -> str:
    where = f"{machine.get('cores_used', '?')} shared cores, Python {machine.get('python', '?')}"
    if not any(isinstance(panel, Bars) for panel in plot.panels):
        return f"{where}."
    return (
        f"Bars: medians; lines on them: from the least to the greatest. {where}: read the ratios."
    )


def _height(panel: Bars | Curve | Curves) -> float:
    if isinstance(panel, Curve):
        return CURVE + AROUND
    if isinstance(panel, Curves):
        return max(CURVE, LINE * len(panel.lines)) + AROUND
    bars = sum(len(group) for group in panel.groups.values())
    return bars * _pitch(panel) + (len(panel.groups) - 1) * GAP + AROUND + _legend_height(panel)


def _pitch(panel: Bars) -> float:
    """From bar to bar, in inches: labels of several lines need more room."""
    if _is_grouped(panel):
        return BAR
    lines = max(_short(bar.name).count("\n") + 1 for bar in panel.groups[""])
    return max(BAR, 0.15 * lines + 0.08)


def _legend_height(panel: Bars | Curve | Curves) -> float:
    return 0.32 if isinstance(panel, Bars) and _is_grouped(panel) else 0.0


def _is_grouped(panel: Bars) -> bool:
    return list(panel.groups) != [""]


def _bars(axes: Axes, panel: Bars) -> None:
    colors, pitch = _colors(panel), _pitch(panel)
    place, ticks, labels = 0.0, [], []
    right = max(max(bar.values) for bars in panel.groups.values() for bar in bars)
    left = min(min(bar.values) for bars in panel.groups.values() for bar in bars)
    if panel.log:
        axes.set_xscale("log")
        axes.set_xlim(min(left, panel.goal or left) / 1.6, right * (right / left) ** 0.12 * 1.15)
    else:
        axes.set_xlim(0, max(right, panel.goal or 0.0, *_goals(panel)) * 1.14)
    for group, bars in panel.groups.items():
        first = place
        for bar in bars:
            _bar(axes, place, bar, colors[bar.name])
            if not _is_grouped(panel):
                ticks.append(place)
                labels.append(bar.name)
            place += pitch
        if _is_grouped(panel):
            ticks.append((first + place - pitch) / 2)
            labels.append(group)
        place += GAP
    axes.set_ylim(place - GAP - pitch / 2 + 0.05, -pitch / 2 - 0.05)
    axes.set_yticks(ticks, list(map(_short, labels)))
    axes.tick_params(axis="y", length=0)
    if not _is_grouped(panel):
        every = [bar for bars in panel.groups.values() for bar in bars]
        for label, bar in zip(axes.get_yticklabels(), every, strict=True):
            label.set_fontweight(
                "bold" if bar.ours and len({b.ours for b in every}) > 1 else "normal"
            )
    if panel.goal is not None:
        axes.axvline(panel.goal, color=GOAL, linewidth=1.2, linestyle=(0, (4, 2)), zorder=4)
    _finish(axes, panel, colors)


def _goals(panel: Bars) -> list[float]:
    return [bar.goal or 0.0 for bars in panel.groups.values() for bar in bars]


def _bar(axes: Axes, place: float, bar: Bar, color: str) -> None:
    axes.barh(place, bar.middle, height=BAR * 0.74, color=color, zorder=2)
    low, high = min(bar.values), max(bar.values)
    if len(bar.values) > 1:
        up, down = place - BAR * 0.17, place + BAR * 0.17
        across = [low, low, low, high, high, high]
        axes.plot(across, [up, down, place, place, up, down], color="#1c2229", lw=1.0, zorder=3)
    if bar.goal is not None:
        half = BAR * 0.5
        axes.plot([bar.goal] * 2, [place - half, place + half], color=GOAL, linewidth=2.2, zorder=4)
    axes.annotate(
        number(bar.middle),
        (_label_at(axes, high, bar.goal), place),
        xytext=(5, 0),
        textcoords="offset points",
        va="center",
        size=8,
        weight="bold" if bar.ours else "normal",
        bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.4, "alpha": 0.8},
        zorder=5,
    )


def _label_at(axes: Axes, high: float, goal: float | None) -> float:
    """Where a label begins: behind the bar, or behind its mark if that would go through it."""
    if goal is None or goal < high:
        return high
    ends = axes.transData.transform([(high, 0), (goal, 0)])[:, 0]
    return goal if ends[1] - ends[0] < 0.5 * axes.figure.dpi else high


def _colors(panel: Bars) -> dict[str, str]:
    names: dict[str, bool] = {}
    for bars in panel.groups.values():
        for bar in bars:
            names.setdefault(bar.name, bar.ours)
    if not _is_grouped(panel):
        return {name: OURS if ours else PEER for name, ours in names.items()}
    if not any(names.values()):
        return dict(zip(names, PAIR, strict=False))
    used = {True: 0, False: 0}
    colors = {}
    for name, ours in names.items():
        shades = SHADES[ours]
        colors[name] = shades[min(used[ours], len(shades) - 1)]
        used[ours] += 1
    return colors


def _short(name: str) -> str:
    """A long name on several lines."""
    return "\n".join(textwrap.wrap(name, 39))


def _finish(axes: Axes, panel: Bars, colors: Mapping[str, str]) -> None:
    better = f"; {panel.better} is better" if panel.better else ""
    axes.set_title(panel.title, x=-0.52, pad=7)
    scale = ", logarithmic" if panel.log else ""
    axes.set_xlabel(f"{panel.unit}{scale}{better}", size=8, labelpad=2)
    axes.grid(axis="x", color=GRID, linewidth=0.8, zorder=0)
    axes.set_axisbelow(True)
    if panel.log:
        axes.xaxis.set_major_locator(LogLocator(base=10, subs=_subs(axes)))
        axes.xaxis.set_minor_formatter(NullFormatter())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: number(value)))
    options: dict[str, Any] = {"fontsize": 8, "frameon": False, "borderpad": 0}
    inches = axes.get_window_extent().height / axes.figure.dpi
    if _is_grouped(panel):
        patches = [Patch(color=color, label=name) for name, color in colors.items()]
        below = (-0.51, -0.46 / inches)
        names = axes.legend(
            handles=patches, loc="upper left", bbox_to_anchor=below, ncols=4, **options
        )
        if panel.goal_text:  # the next legend takes the place of this one
            axes.add_artist(names)
    if panel.goal_text:
        style: Any = (0, (4, 2)) if panel.goal is not None else "-"
        what = panel.goal_text.partition(": ")[2]
        mark = Line2D([], [], color=GOAL, linestyle=style, lw=1.8, label=what)
        above = (1.02, 1 + 0.01 / inches)
        axes.legend(handles=[mark], loc="lower right", bbox_to_anchor=above, **options)


def _subs(axes: Axes) -> tuple[float, ...]:
    low, high = axes.get_xlim()
    return (1.0,) if high / low > 200 else (1.0, 2.0, 5.0)


def _curve(axes: Axes, panel: Curve) -> None:
    axes.plot(
        [round(x, 2) for x, _ in panel.points],
        [round(y, 3) for _, y in panel.points],
        color=OURS,
        linewidth=1.0,
    )
    axes.set_xlim(0, panel.points[-1][0])
    axes.set_ylim(0, None)
    axes.set_title(panel.title, x=-0.52, pad=7)
    axes.set_xlabel(panel.across, size=8, labelpad=2)
    axes.set_ylabel(panel.unit, size=8)
    axes.grid(color=GRID, linewidth=0.8)


def _curves(axes: Axes, panel: Curves) -> None:
    """Lines of one colour each, with their names to the left, and ticks where things happened."""
    for (name, points), color in zip(panel.lines.items(), cycle(LINES), strict=False):
        axes.plot(
            [round(x, 2) for x, _ in points],
            [round(y, 3) for _, y in points],
            color=color,
            linewidth=0.9,
            label=name,
        )
    axes.set_xlim(0, max(points[-1][0] for points in panel.lines.values()))
    axes.set_ylim(0, None)
    # One path with gaps for all marks, not a path for each.
    across = [x for mark in panel.marks for x in (mark, mark, math.nan)]
    upwards = [0.0, 0.025, math.nan] * len(panel.marks)
    axes.plot(across, upwards, transform=axes.get_xaxis_transform(), color=GOAL, lw=0.6)
    axes.set_title(f"{panel.title}, {panel.unit}" if panel.unit else panel.title, x=-0.52, pad=7)
    axes.set_xlabel(panel.across, size=8, labelpad=2)
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: number(value)))
    axes.grid(color=GRID, linewidth=0.8)
    axes.legend(
        loc="upper left", bbox_to_anchor=(-0.53, 1.0), fontsize=7, frameon=False, borderpad=0
    )
