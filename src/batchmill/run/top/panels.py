"""The panels of ``batchmill top``: queues, pressure, micro-batches by phase."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence

from rich.text import Text

from batchmill.run.screen import size
from batchmill.run.top.history import StatusJson
from batchmill.run.top.marks import (
    CRITICAL,
    CRITICAL_PLUS,
    DIM,
    NORMAL,
    WARNING,
    Sheet,
    cut_line,
    heading,
    heat_style,
    seconds,
    short,
    short_count,
)
from batchmill.wording import count_of

LEVEL_STYLES = {
    "NORMAL": NORMAL,
    "WARNING": WARNING,
    "CRITICAL": CRITICAL,
    "CRITICAL_PLUS": CRITICAL_PLUS,
}
PHASE_STYLES = {
    "read": "blue",
    "hook": "cyan",
    "spark": "green",
    "deltas": "yellow",
    "outbox": "magenta",
    "commit": "red",
    "upkeep": "white",
}
"""In the order in which they happen."""
_MEASURE_TEXT = 40
"""The room that the numbers behind a measure's bar take."""


def draw_queues(status: StatusJson, sheet: Sheet, *, titled: bool = True) -> list[Text]:
    """A heat row for each queue, the load of its threads, and what the balancer moved."""
    lines = [heading("queues", "depth by partition")] if titled else []
    queues = status.get("queues", ())
    if not queues:
        return [*lines, Text("no process reports one", DIM)]
    for queue in queues:
        lines.append(_queue_line(queue, sheet))
        if queue.get("threads"):
            lines.append(_threads_line(queue["threads"], sheet))
        if flows := queue.get("flows"):
            text = f"  flows     {flows.get('active', 0):,} active, {flows.get('assigned', 0):,} "
            text += f"assigned, {flows.get('completed', 0):,} completed"
            lines.append(cut_line(Text(text), sheet.width))
        if queue.get("moves"):
            newest = "; ".join(queue.get("last_moves", ())[:2])
            text = f"  balancer  {count_of(queue['moves'], 'move')}: {newest}"
            lines.append(cut_line(Text(text, DIM), sheet.width))
        if rejected := queue.get("rejected"):
            text = ", ".join(f"{n:,} {reason}" for reason, n in rejected.items())
            lines.append(cut_line(Text(f"  rejected  {text}", "yellow"), sheet.width))
    return lines


def _queue_line(queue: StatusJson, sheet: Sheet) -> Text:
    depth, capacity = queue.get("depth", 0), queue.get("capacity")
    partitions = queue.get("partitions", ())
    unit = f" {queue['unit']}" if queue.get("unit") else ""
    bound = f" of {short(capacity)}{unit}" if capacity else f"{unit}, no bound"
    full = f"  {100 * depth / capacity:.1f} %" if capacity else ""
    end = f" {short(depth)}{bound}{full}"
    name = f"{queue.get('process', '')}/{queue.get('name', '')}"
    line = Text(f"{name[:24]:<16} ", "bold")
    room = sheet.width - len(line) - len(end) - 2
    if len(partitions) == 1 and capacity:
        # A heat row of one partition would be one character: a bar says more.
        style = heat_style(depth / capacity)
        row = sheet.scale(depth, (capacity,), min(room, 32), style)
    else:
        row = sheet.heat_row(partitions, room)
    return line.append_text(row).append(end)


def _threads_line(threads: Sequence[StatusJson], sheet: Sheet) -> Text:
    line = Text("  threads  ")
    for number, thread in enumerate(threads):
        load = float(thread.get("load", 0.0))
        part = Text(f"{number} ", DIM)
        part.append_text(sheet.scale(load, (1.0,), 8, heat_style(load)))
        part.append(f" {load:>4.0%}  ")
        if len(line) + len(part) > sheet.width:
            break
        line.append_text(part)
    return line


def level_text(status: StatusJson) -> Text:
    """The pressure level."""
    level = str((status.get("thresholds") or {}).get("level", "unknown"))
    return Text.assemble("pressure ", (level, LEVEL_STYLES.get(level, DIM)))


def draw_pressure(status: StatusJson, sheet: Sheet, *, titled: bool = True) -> list[Text]:
    """Each measure of ingest, and each other depth that has thresholds, against them."""
    thresholds = status.get("thresholds") or {}
    level = str(thresholds.get("level", "unknown"))
    lines = []
    if titled:
        lines.append(heading("pressure").append(level, LEVEL_STYLES.get(level, DIM)))
    lines += [_measure_line(measure, sheet) for measure in thresholds.get("measures", ())]
    lines += [
        _measure_line({**other, "name": f"{other.get('process')}/{other.get('name')}"}, sheet)
        for other in status.get("levels", ())
    ]
    if not thresholds:
        lines.append(Text("no report of ingest", DIM))
    elif thresholds.get("why"):
        lines.append(cut_line(Text(f"  {thresholds['why']}", "yellow"), sheet.width))
    if not titled and thresholds.get("free_bytes") is not None:
        lines.append(Text(f"{size(thresholds['free_bytes'])} free on the disk", DIM))
    return lines


def _measure_line(measure: StatusJson, sheet: Sheet) -> Text:
    name, value = str(measure.get("name", "")), float(measure.get("value") or 0)
    marks = [float(measure.get(key) or 0) for key in ("warning", "critical", "critical_plus")]
    shown = _size if name.endswith("bytes") else short
    reached = sum(value >= mark > 0 for mark in marks)
    style = (NORMAL, WARNING, CRITICAL, CRITICAL_PLUS)[reached]
    line = Text(f"  {name:<13} ")
    room = min(28, sheet.width - len(line) - _MEASURE_TEXT)
    if room >= 8:
        line.append_text(sheet.scale(value, marks, room, style))
    line.append(f" {shown(value)}; warning {shown(marks[0])}, critical {shown(marks[1])}")
    return cut_line(line, sheet.width)


def _size(count: float) -> str:
    return size(count).replace(".0 ", " ")


def draw_batches(status: StatusJson, sheet: Sheet, *, titled: bool = True) -> list[Text]:
    """How long micro-batches take, by phase."""
    batches = [batch for batch in status.get("batches", ()) if batch.get("seconds") is not None]
    if not batches:
        none = "none yet" if status.get("last_batch") is None else "none since the pipeline started"
        return [heading("micro-batches").append(none, DIM) if titled else Text(none, DIM)]
    newest, all_s = batches[-1], [float(batch["seconds"]) for batch in batches]
    summary = (
        f"newest {seconds(all_s[-1])}, median {seconds(statistics.median(all_s))}, "
        f"worst {seconds(max(all_s))} of {len(batches)}; {short_count(newest['rows'], 'row')}"
    )
    phases = _phases(batches)
    if not titled:
        return [Text(summary), Text(), *_phase_table(batches, phases, sheet)]
    past = sheet.sparkline(all_s, sheet.width // 2 - 14)
    parts = [(_phase_s(newest, name), _phase_style(name)) for name in phases]
    letters = "".join(name[0].upper() for name in phases)
    line = Text("  past ").append_text(past).append("  newest ")
    bar = sheet.stacked(parts, sheet.width - len(line), letters=letters)
    legend = Text("  ")
    for name, (value, style) in zip(phases, parts, strict=True):
        legend.append(name, style).append(f" {seconds(value)}  ")
    return [
        heading("micro-batches").append(summary),
        line.append_text(bar),
        cut_line(legend, sheet.width),
    ]


def draw_batch_chart(status: StatusJson, sheet: Sheet, height: int = 10) -> list[Text]:
    """A column for each micro-batch, the newest at the right."""
    batches = status.get("batches", ())
    phases = _phases(batches)
    bars = [[(_phase_s(batch, name), _phase_style(name)) for name in phases] for batch in batches]
    most = max(float(batch.get("seconds") or 0.0) for batch in batches)
    rows = sheet.columns(bars, sheet.width - 9, height)
    marks = {0: seconds(most), height // 2: seconds(most / 2), height - 1: "0 s"}
    return [Text(f"{marks.get(n, ''):>8} ", DIM).append_text(row) for n, row in enumerate(rows)]


def _phase_table(batches: Sequence[StatusJson], phases: Sequence[str], sheet: Sheet) -> list[Text]:
    """A line for each phase: the newest, the median, the share of the whole, and the past."""
    all_s = [float(batch["seconds"]) for batch in batches]
    rows = [(name, [_phase_s(batch, name) for batch in batches]) for name in phases]
    lines = []
    for name, values in [*rows, ("all", all_s)]:
        style, mark = ("bold", "cyan") if name == "all" else (_phase_style(name),) * 2
        line = Text(f"{name:<7}", style)
        line.append(f"{seconds(values[-1]):>8}{seconds(statistics.median(values)):>8} median")
        line.append(f"{sum(values) / (sum(all_s) or 1.0):>6.0%}  ")
        room = max(0, min(60, sheet.width - len(line)))
        past = sheet.sparkline(values, room, style=mark)
        lines.append(line.append_text(past))
    return lines


def _phases(batches: Iterable[StatusJson]) -> list[str]:
    """All phases, in the order in which they happen."""
    names = {name for batch in batches for name in batch.get("phases", {})}
    known = [name for name in PHASE_STYLES if name in names]
    return known + sorted(names.difference(known))


def _phase_s(batch: StatusJson, name: str) -> float:
    return float(batch.get("phases", {}).get(name, 0.0))


def _phase_style(name: str) -> str:
    return PHASE_STYLES.get(name, "white")
