"""Goals: a figure, the limit that it has to reach or to keep, and whether it does."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Goal:
    """A figure that has to be at least, or at most, a limit."""

    what: str
    value: float | None
    """None where a peer was missing."""
    limit: float
    at_least: bool
    unit: str

    @property
    def verdict(self) -> str:
        """In a word."""
        if self.value is None:
            return "not measured"
        met = self.value >= self.limit if self.at_least else self.value <= self.limit
        return "met" if met else "MISSED"

    def row(self) -> list[str]:
        """A line of the table."""
        measured = "-" if self.value is None else f"{_figure(self.value)}{self.unit}"
        bound = f"{'>=' if self.at_least else '<='} {_figure(self.limit)}{self.unit}"
        return [self.what, bound, measured, self.verdict]

    def as_json(self) -> dict[str, Any]:
        """What to keep."""
        return {**vars(self), "verdict": self.verdict}


def _figure(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"


def at_least(what: str, value: float | None, limit: float, unit: str = "x") -> Goal:
    """A goal that is met from the limit on."""
    return Goal(what=what, value=value, limit=limit, at_least=True, unit=unit)


def at_most(what: str, value: float | None, limit: float, unit: str = "x") -> Goal:
    """A goal that is met up to the limit."""
    return Goal(what=what, value=value, limit=limit, at_least=False, unit=unit)
