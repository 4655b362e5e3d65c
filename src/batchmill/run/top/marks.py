"""Small charts in characters: bars, heat rows, sparklines; in ASCII for old terminals."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.text import Text

DIM = "bright_black"
NORMAL, WARNING, CRITICAL, CRITICAL_PLUS = "green", "yellow", "red", "bold red"
_LEVELS = "▁▂▃▄▅▆▇█"
_ASCII_LEVELS = ".:-=+*#@"


@dataclass(frozen=True)
class Sheet:
    """The room to draw on."""

    width: int
    height: int | None = None
    """None: any number of lines."""
    ascii_only: bool = False

    def narrower(self, width: int) -> Sheet:
        """A part of it, of any height."""
        return Sheet(width, None, self.ascii_only)

    def heat_row(self, partitions: Sequence[Mapping[str, Any]], width: int) -> Text:
        """A character for each partition, the fuller the higher.

        With more partitions than ``width``, each character is the fullest of several neighbours.
        """
        shares = [
            float(part.get("depth") or 0) / part["capacity"] if part.get("capacity") else 0.0
            for part in partitions
        ]
        used = [bool(part.get("depth")) for part in partitions]
        step = max(1, -(-len(shares) // max(1, width)))
        row = Text()
        levels = _ASCII_LEVELS if self.ascii_only else _LEVELS
        for start in range(0, len(shares), step):
            share = max(shares[start : start + step])
            if not any(used[start : start + step]):
                row.append("_" if self.ascii_only else "·", DIM)
            else:
                row.append(levels[min(7, int(share * 8))], heat_style(share))
        return row

    def sparkline(self, values: Sequence[float], width: int, *, style: str = "cyan") -> Text:
        """The newest values as a row of blocks, the largest at full height."""
        shown = list(values)[-width:] if width > 0 else []
        most = max(shown, default=0.0)
        levels = _ASCII_LEVELS if self.ascii_only else _LEVELS
        return Text(
            "".join(levels[min(7, int(v / most * 7.999))] if most else levels[0] for v in shown),
            style,
        )

    def scale(self, value: float, marks: Sequence[float], width: int, style: str) -> Text:
        """A bar that ends at the last of ``marks``, with a notch at each of the others."""
        end = marks[-1] if marks and marks[-1] > 0 else 1.0
        full = min(width, round(value / end * width))
        if value > 0:
            full = max(1, full)
        notches = {min(width - 1, int(mark / end * width)) for mark in marks[:-1]}
        bar = Text()
        for place in range(width):
            if place < full:
                bar.append("#" if self.ascii_only else "█", style)
            elif place in notches:
                bar.append("|" if self.ascii_only else "┊", "default")
            else:
                bar.append("." if self.ascii_only else "░", DIM)
        return bar

    def stacked(self, parts: Sequence[tuple[float, str]], width: int, *, letters: str = "") -> Text:
        """Parts of a whole side by side in one bar; in ASCII each part has its letter."""
        whole = sum(value for value, _ in parts)
        bar, drawn, before = Text(), 0, 0.0
        for number, (value, style) in enumerate(parts):
            before += value
            upto = round(before / whole * width) if whole > 0 else 0
            mark = letters[number] if self.ascii_only and number < len(letters) else "█"
            bar.append(mark * (upto - drawn), style)
            drawn = upto
        return bar

    def columns(
        self, bars: Sequence[Sequence[tuple[float, str]]], width: int, height: int
    ) -> list[Text]:
        """The newest bars side by side, their parts from the bottom up; the highest fills it.

        A part that is larger than half a line is always visible.
        """
        shown = list(bars)[-width:] if width > 0 else []
        most = max((sum(value for value, _ in bar) for bar in shown), default=0.0)
        mark = "#" if self.ascii_only else "█"
        lines = []
        for line in range(height, 0, -1):
            at = (line - 0.5) / height * most
            text = Text()
            for bar in shown:
                before, style = 0.0, ""
                for value, part_style in bar:
                    before += value
                    if before >= at:
                        style = part_style
                        break
                text.append(mark if style else " ", style)
            lines.append(text)
        return lines


def heading(name: str, more: str = "") -> Text:
    """The title of a part; more may be appended to its line."""
    return Text.assemble((f"{name:<14}", "bold cyan"), (more, DIM))


def cut_line(line: Text, width: int) -> Text:
    """The line, cut to that width."""
    line.truncate(width, overflow="ellipsis")
    return line


def short(count: float) -> str:
    """A number in few characters.

    >>> short(0), short(99_999), short(123_456), short(2_500_000), short(7.2e9)
    ('0', '99,999', '123k', '2.5M', '7.2G')
    """
    if count < 100_000:
        return f"{count:,.0f}"
    for unit, size in (("G", 1e9), ("M", 1e6)):
        if count >= size:
            return f"{count / size:.1f}{unit}"
    return f"{count / 1e3:.0f}k"


def short_count(count: int, noun: str) -> str:
    """The same with its noun: "1 span", "2 spans"."""
    return f"{short(count)} {noun if count == 1 else noun + 's'}"


def seconds(value: float) -> str:
    """A duration in few characters.

    >>> seconds(0.0042), seconds(1.234), seconds(75), seconds(7500), seconds(200_000)
    ('4 ms', '1.23 s', '75 s', '125 min', '56 h')
    """
    if value < 0.9995:
        return f"{value * 1000:.0f} ms"
    if value < 9.995:
        return f"{value:.2f} s"
    if value < 120:
        return f"{value:.0f} s"
    return f"{value / 60:.0f} min" if value < 7600 else f"{value / 3600:.0f} h"


def heat_style(share: float) -> str:
    """The colour of a fill level from 0 to 1."""
    return NORMAL if share < 0.5 else WARNING if share < 0.8 else CRITICAL
