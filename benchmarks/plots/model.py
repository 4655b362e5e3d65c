"""The content of a plot, independent of drawing: panels of bars with their spread, and curves.

This module does not need matplotlib, so a test can compare a drawn plot with its numbers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Bar:
    """One contestant: the median of its values, from the least to the greatest."""

    name: str
    values: Sequence[float]
    ours: bool = False
    goal: float | None = None
    """Where this bar is to end: there, or beyond it on the good side."""

    @property
    def middle(self) -> float:
        """The median."""
        return median(self.values)


@dataclass(frozen=True, kw_only=True)
class Bars:
    """A panel of bars; several groups of the same contestants, or one group without a name."""

    title: str
    unit: str
    groups: Mapping[str, Sequence[Bar]]
    goal: float | None = None
    """A line through all of them."""
    goal_text: str = ""
    better: str = ""
    """``more`` or ``less``."""
    log: bool = False

    def facts(self) -> list[str]:
        """What it shows, in words."""
        goal = f"; {self.goal_text}" if self.goal_text else ""
        facts = [f"{self.title} ({self.unit}){goal}"]
        for group, bars in self.groups.items():
            for bar in bars:
                name = f"{group}: {bar.name}" if group else bar.name
                low, high = number(min(bar.values)), number(max(bar.values))
                facts.append(f"{name}: {number(bar.middle)} ({low} to {high})")
        return facts


@dataclass(frozen=True, kw_only=True)
class Curve:
    """A panel with values over time."""

    title: str
    across: str
    unit: str
    points: Sequence[tuple[float, float]]

    def facts(self) -> list[str]:
        """What it shows, in words."""
        values = [value for _, value in self.points]
        return [
            f"{self.title} ({self.unit}): median {number(median(values))}, from "
            f"{number(min(values))} to {number(max(values))} over {number(self.points[-1][0])} s"
        ]


@dataclass(frozen=True, kw_only=True)
class Curves:
    """A panel with several lines over time, such as one for each process."""

    title: str
    across: str
    unit: str
    lines: Mapping[str, Sequence[tuple[float, float]]]
    marks: Sequence[float] = ()
    """Moments at which something happened."""

    def facts(self) -> list[str]:
        """What it shows, in words."""
        unit = f" ({self.unit})" if self.unit else ""
        facts = [f"{self.title}{unit}"]
        for name, points in self.lines.items():
            values = [value for _, value in points]
            facts.append(
                f"{name}: median {number(median(values))}, "
                f"from {number(min(values))} to {number(max(values))}"
            )
        return facts


@dataclass(frozen=True, kw_only=True)
class Plot:
    """A plot of one benchmark's results."""

    title: str
    panels: Sequence[Bars | Curve | Curves]

    def facts(self) -> list[str]:
        """What it shows, in words: the figures as the labels have them."""
        return [self.title, *(fact for panel in self.panels for fact in panel.facts())]


def number(value: float) -> str:
    """A number with three digits that count.

    >>> number(0.0123), number(1.234), number(45242.2), number(1234567)
    ('0.0123', '1.23', '45,200', '1,230,000')
    """
    if value == 0:
        return "0"
    text = f"{value:.3g}"
    if "e" in text or abs(value) >= 1000:
        rounded = float(text)
        return f"{rounded:,.0f}" if abs(rounded) >= 100 else f"{rounded:f}".rstrip("0").rstrip(".")
    return text


def goal_of(document: Mapping[str, Any], what: str) -> float | None:
    """The limit of a goal in a results file, by what it is about."""
    limits = [goal["limit"] for goal in document.get("goals", []) if goal["what"] == what]
    return float(limits[0]) if limits else None


def ranked(bars: Sequence[Bar], *, most_first: bool = True) -> list[Bar]:
    """Bars by their medians."""
    return sorted(bars, key=lambda bar: bar.middle, reverse=most_first)


def of_goals(title: str, document: Mapping[str, Any]) -> Plot:
    """A plot for any results with goals: each value beside its limit."""
    bars = []
    for goal in document.get("goals", []):
        if goal["value"] is None:
            continue
        sign = "at least" if goal["at_least"] else "at most"
        limit = f"{number(goal['limit'])}{goal['unit']}"
        name = f"{goal['what']}: {number(goal['value'])}{goal['unit']}, goal {sign} {limit}"
        bars.append(Bar(name=name, values=[goal["value"] / goal["limit"]], ours=True))
    panel = Bars(
        title="Goals: measured value relative to the limit",
        unit="measured / limit",
        groups={"": bars},
        goal=1.0,
        goal_text="line: the limit",
        log=True,
    )
    return Plot(title=title, panels=[panel] if bars else [])
