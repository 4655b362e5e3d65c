"""Micro-batches by phase, as ``batchmill top`` draws them."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence

from rich.text import Text

from batchmill.run.top.history import Told
from batchmill.run.top.marks import (
    DIM,
    Sheet,
    columns,
    cut_line,
    heading,
    past,
    seconds,
    short,
    stacked,
)

PHASE_STYLES = {
    "read": "blue",
    "spans": "cyan",
    "l1": "green",
    "deltas": "yellow",
    "outbox": "magenta",
    "commit": "red",
    "upkeep": "white",
}
"""In the order of the road."""


def batches(told: Told, sheet: Sheet, *, titled: bool = True) -> list[Text]:
    """Where the time of micro-batches goes."""
    found = [each for each in told.get("batches", ()) if each.get("seconds") is not None]
    lines = [heading("micro-batches")] if titled else []
    if not found:
        none = "none yet" if told.get("last_batch") is None else "none since the pipeline started"
        if titled:
            lines[0].append(none, DIM)
            return lines
        return [Text(none, DIM)]
    newest, all_s = found[-1], [float(each["seconds"]) for each in found]
    median = f"newest {seconds(all_s[-1])}, median {seconds(statistics.median(all_s))}"
    summary = f"{median}, worst {seconds(max(all_s))} of {len(found)}; {short(newest['rows'])} rows"
    if titled:
        lines[0].append(summary)
    else:
        lines.append(Text(summary))
    phases = _phases(found)
    if not titled:
        return [*lines, Text(), *_phase_table(found, phases, sheet)]
    drawn = past(all_s, sheet.width // 2 - 14, ascii_only=sheet.ascii_only)
    parts = [
        (float(newest.get("phases", {}).get(name, 0.0)), PHASE_STYLES.get(name, "white"))
        for name in phases
    ]
    letters = "".join(name[0].upper() for name in phases)
    line = Text("  past ").append_text(drawn).append("  newest ")
    bar = stacked(parts, sheet.width - len(line), ascii_only=sheet.ascii_only, letters=letters)
    lines.append(line.append_text(bar))
    legend = Text("  ")
    for name, (value, style) in zip(phases, parts, strict=True):
        legend.append(name, style).append(f" {seconds(value)}  ")
    lines.append(cut_line(legend, sheet.width))
    return lines


def _phases(found: Iterable[Told]) -> list[str]:
    """All phases, in the order of the road."""
    seen = {name for each in found for name in each.get("phases", {})}
    known = [name for name in PHASE_STYLES if name in seen]
    return known + sorted(seen.difference(known))


def _phase_style(name: str) -> str:
    return PHASE_STYLES.get(name, "white")


def _phase_table(found: Sequence[Told], phases: Sequence[str], sheet: Sheet) -> list[Text]:
    """A line for each phase: the newest, the median, the share of the whole, and the past."""
    lines = []
    whole = sum(float(each["seconds"]) for each in found) or 1.0
    for name in [*phases, "all"]:
        if name == "all":
            values, style = [float(each["seconds"]) for each in found], "bold"
        else:
            values = [float(each.get("phases", {}).get(name, 0.0)) for each in found]
            style = _phase_style(name)
        line = Text(f"{name:<7}", style)
        line.append(f"{seconds(values[-1]):>8}{seconds(statistics.median(values)):>8} median")
        line.append(f"{sum(values) / whole:>6.0%}  ")
        room = max(0, min(60, sheet.width - len(line)))
        mark = "cyan" if name == "all" else style
        lines.append(line.append_text(past(values, room, ascii_only=sheet.ascii_only, style=mark)))
    return lines


def chart(told: Told, sheet: Sheet, height: int = 10) -> list[Text]:
    """A column for each micro-batch, the newest at the right."""
    found = told.get("batches", ())
    phases = _phases(found)
    bars = [
        [(float(each.get("phases", {}).get(name, 0.0)), _phase_style(name)) for name in phases]
        for each in found
    ]
    most = max(float(each.get("seconds") or 0.0) for each in found)
    wide = columns(bars, sheet.width - 9, height, ascii_only=sheet.ascii_only)
    marks = {0: seconds(most), height // 2: seconds(most / 2), height - 1: "0 s"}
    return [Text(f"{marks.get(n, ''):>8} ", DIM).append_text(row) for n, row in enumerate(wide)]
