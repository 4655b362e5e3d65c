"""Queues and pressure, as ``batchmill top`` draws them."""

from __future__ import annotations

from collections.abc import Sequence

from rich.text import Text

from batchmill.run.top.history import Told
from batchmill.run.top.marks import (
    BURNING,
    CALM,
    DIM,
    HOT,
    WARM,
    Sheet,
    cut_line,
    heading,
    heat_row,
    heat_style,
    scale,
    short,
)
from batchmill.run.view import size

LEVELS = {"NORMAL": CALM, "WARNING": WARM, "CRITICAL": HOT, "CRITICAL_PLUS": BURNING}
_MEASURE_END = 40
"""What the numbers behind a measure's bar take."""


def queues(told: Told, sheet: Sheet, *, titled: bool = True) -> list[Text]:
    """A heat row for each queue, the load of its threads, and what the balancer moved."""
    lines = [heading("queues", "depth by partition")] if titled else []
    found = told.get("queues", ())
    if not found:
        return [*lines, Text("no process tells of one", DIM)]
    for each in found:
        lines.append(_queue_line(each, sheet))
        if each.get("threads"):
            lines.append(_threads_line(each["threads"], sheet))
        if each.get("moves"):
            newest = "; ".join(each.get("last_moves", ())[:2])
            text = f"  balancer  {each['moves']:,} moves: {newest}"
            lines.append(cut_line(Text(text, DIM), sheet.width))
        if turned_away := each.get("rejected"):
            text = ", ".join(f"{n:,} {reason}" for reason, n in turned_away.items())
            lines.append(cut_line(Text(f"  turned away  {text}", "yellow"), sheet.width))
    return lines


def _queue_line(told: Told, sheet: Sheet) -> Text:
    depth, capacity = told.get("depth", 0), told.get("capacity")
    unit = f" {told['unit']}" if told.get("unit") else ""
    bound = f" of {short(capacity)}{unit}" if capacity else f"{unit}, no bound"
    full = f"  {100 * depth / capacity:.1f} %" if capacity else ""
    end = f" {short(depth)}{bound}{full}"
    name = f"{told.get('process', '')}/{told.get('name', '')}"
    line = Text(f"{name[:24]:<16} ", "bold")
    room = sheet.width - len(line) - len(end) - 2
    row = heat_row(told.get("partitions", ()), room, ascii_only=sheet.ascii_only)
    if len(told.get("partitions", ())) == 1 and capacity:
        # One partition alone would be one character: as a bar it says more.
        row = scale(
            depth,
            (capacity,),
            min(room, 32),
            heat_style(depth / capacity),
            ascii_only=sheet.ascii_only,
        )
    return line.append_text(row).append(end)


def _threads_line(threads: Sequence[Told], sheet: Sheet) -> Text:
    line = Text("  threads  ")
    for number, each in enumerate(threads):
        load = float(each.get("load", 0.0))
        part = Text(f"{number} ", DIM)
        part.append_text(scale(load, (1.0,), 8, heat_style(load), ascii_only=sheet.ascii_only))
        part.append(f" {load:>4.0%}  ")
        if len(line) + len(part) > sheet.width:
            break
        line.append_text(part)
    return line


def level_text(told: Told) -> Text:
    """The level in force."""
    level = str((told.get("thresholds") or {}).get("level", "unknown"))
    return Text.assemble("pressure ", (level, LEVELS.get(level, DIM)))


def thresholds(told: Told, sheet: Sheet, *, titled: bool = True) -> list[Text]:
    """Each measure against its thresholds."""
    found = told.get("thresholds") or {}
    level = str(found.get("level", "unknown"))
    lines = []
    if titled:
        line = heading("pressure")
        line.append(level, LEVELS.get(level, DIM))
        lines.append(line)
    for each in found.get("measures", ()):
        lines.append(_measure_line(each, sheet))
    if not found:
        lines.append(Text("ingest has told nothing", DIM))
    elif found.get("why"):
        lines.append(cut_line(Text(f"  {found['why']}", "yellow"), sheet.width))
    if titled:
        return lines
    if found.get("free_bytes") is not None:
        lines.append(Text(f"{size(found['free_bytes'])} left on the disk", DIM))
    return lines


def _measure_line(told: Told, sheet: Sheet) -> Text:
    name, value = str(told.get("name", "")), float(told.get("value") or 0)
    marks = [float(told.get(each) or 0) for each in ("warning", "critical", "critical_plus")]
    shown = _size if name.endswith("bytes") else short
    reached = sum(value >= each > 0 for each in marks)
    style = (CALM, WARM, HOT, BURNING)[reached]
    line = Text(f"  {name:<13} ")
    room = min(28, sheet.width - len(line) - _MEASURE_END)
    if room >= 8:
        line.append_text(scale(value, marks, room, style, ascii_only=sheet.ascii_only))
    line.append(f" {shown(value)}; warning {shown(marks[0])}, critical {shown(marks[1])}")
    return cut_line(line, sheet.width)


def _size(count: float) -> str:
    return size(count).replace(".0 ", " ")
