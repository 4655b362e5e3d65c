"""Plain-text tables, and their results as JSON."""

from __future__ import annotations

import json
import sys
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from benchmarks.plots.drawing import draw_results

WIDTH = 110


@dataclass(frozen=True)
class Table:
    """A title, a caption that says what was measured and how, and rows of text."""

    title: str
    caption: str
    headers: Sequence[str]
    rows: Sequence[Sequence[str]]

    def render(self) -> str:
        """The table as text: first column to the left, the others to the right."""
        lines = [list(self.headers), *[list(row) for row in self.rows]]
        widths = [max(len(line[column]) for line in lines) for column in range(len(self.headers))]
        body = ["  ".join(_align(line, widths)).rstrip() for line in lines]
        body.insert(1, "  ".join("-" * width for width in widths))
        caption = textwrap.wrap(self.caption, WIDTH)
        return "\n".join([self.title, "=" * len(self.title), *caption, "", *body])


def _align(line: Sequence[str], widths: Sequence[int]) -> list[str]:
    first, *others = zip(line, widths, strict=True)
    return [first[0].ljust(first[1]), *(text.rjust(width) for text, width in others)]


class Result(Protocol):
    """What a benchmark hands back."""

    def tables(self) -> list[Table]:
        """What to print."""

    def as_json(self) -> dict[str, Any]:
        """What to keep."""


def write_json(path: Path, document: dict[str, Any]) -> None:
    """Write ``document``, making the folder where it is missing, and draw its plot."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
    draw_results(path)


def say(text: str) -> None:
    """Tell how far the run has come, aside from the report."""
    print(text, file=sys.stderr, flush=True)


def said(missing: Mapping[str, str]) -> str:
    """Who is missing and why, as a sentence; nothing where nobody is."""
    if not missing:
        return ""
    return "Missing: " + "; ".join(f"{name}: {reason}" for name, reason in missing.items()) + "."


def spread(values: Iterable[float], digits: int = 2) -> str:
    """The range of some values, as text."""
    sorted_values = sorted(values)
    return f"{sorted_values[0]:.{digits}f}..{sorted_values[-1]:.{digits}f}"
