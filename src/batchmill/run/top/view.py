"""How ``batchmill top`` looks: the pipeline page in characters, from the same JSON."""

from __future__ import annotations

import textwrap
import time
from collections.abc import Sequence

from rich import box
from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from batchmill.run.figures import exported
from batchmill.run.top.batches import batches, chart
from batchmill.run.top.history import History, Told
from batchmill.run.top.marks import DIM, Sheet, cut_line, heading, past, seconds, short
from batchmill.run.top.queues import LEVELS, level_text, queues, thresholds
from batchmill.run.view import WORRYING, size

NARROW = 72
"""Up to here the road does not fit across."""
WIDE = 120
"""From here on there are two columns."""
HEALTH = {"healthy": "bold green", "degraded": "bold yellow", "down": "bold red"}


def draw(told: Told, history: History, sheet: Sheet) -> RenderableType:
    """All of it, in one column or in two."""
    top = [head(told, sheet), *reasons(told, sheet), Text(), *road(told, history, sheet)]
    if sheet.width < WIDE:
        below = [
            *queues(told, sheet),
            *thresholds(told, sheet),
            *batches(told, sheet),
            *drops(told, sheet),
            *exports(told, sheet),
            *processes(told, sheet),
        ]
        return _cut([*top, *below], sheet)
    side = sheet.narrower(sheet.width // 2 - 5)
    left = [
        _panel("queues", queues(told, side, titled=False)),
        _panel(level_text(told), thresholds(told, side, titled=False)),
        _panel("processes", process_table(told, side)),
    ]
    right = [_panel("micro-batches", batches(told, side, titled=False))]
    lost = drops(told, side, titled=False)
    right.append(_panel("not counted, by reason", lost or [Text("nothing", DIM)]))
    if sent := exports(told, side):
        left.append(_panel("exports", sent))
    if len(history.moments) > 1:
        left.append(_panel("the last minutes", minutes(history, side)))
    if told.get("batches"):
        right.append(_panel("seconds by micro-batch", chart(told, side)))
    both = Table.grid(expand=True, padding=(0, 1, 0, 0))
    both.add_column(ratio=1)
    both.add_column(ratio=1)
    both.add_row(Group(*left), Group(*right))
    return Group(*top, Text(), both)


def head(told: Told, sheet: Sheet) -> Text:
    """Health, folder, time."""
    health = str(told.get("health", ""))
    text = Text.assemble(("batchmill top ", "bold"), (health.upper(), HEALTH.get(health, "bold")))
    at = time.strftime("%H:%M:%S", time.localtime(float(told.get("at", 0.0))))
    where = f"  {told.get('home', '')}"
    if told.get("web") and told.get("supervisor"):
        where = f"  {told['web']}{where}"
    room = sheet.width - len(text) - len(at) - 2
    text.append(where[:room] if len(where) <= room else f"  …{where[3 - room :]}", DIM)
    text.append(" " * max(1, sheet.width - len(text) - len(at)))
    return text.append(at, DIM)


def reasons(told: Told, sheet: Sheet) -> list[Text]:
    """What speaks against health."""
    lines = [Text(f"! {each}", "yellow") for each in told.get("reasons", ())]
    if told.get("health") == "down" and told.get("supervisor") is None:
        told_at = told.get("committed_at")
        lines = [Text(f"! nothing runs in {told.get('home')}: start `batchmill run`", "bold red")]
        if told_at:
            ago = seconds(max(0.0, float(told.get("at", 0.0)) - told_at))
            lines.append(Text(f"  what follows is what it left; it last committed {ago} ago", DIM))
    return [part for line in lines[:4] for part in _wrapped(line, sheet.width)]


def _wrapped(line: Text, width: int) -> list[Text]:
    found = textwrap.wrap(
        line.plain, width, subsequent_indent="  ", break_on_hyphens=False, drop_whitespace=True
    )
    return [Text(each, line.style) for each in found]


def road(told: Told, history: History, sheet: Sheet) -> list[Text]:
    """The road that an event takes, with its numbers below it."""
    stops = _stops(told, history)
    if sheet.width < NARROW:  # from top to bottom then
        lines = [
            Text.assemble((f"{name:<8}", style), ", ".join(filter(None, texts)))
            for name, style, texts in stops
        ]
        return [cut_line(line, sheet.width) for line in lines]
    width = sheet.width // len(stops)
    line, tip = ("-", ">") if sheet.ascii_only else ("─", "►")
    title = Text()
    rows = [Text() for _ in range(3)]
    for number, (name, style, texts) in enumerate(stops):
        title.append(f"{name} ", style)
        left = width - len(name) - 1
        title.append(f"{line * (left - 2)}{tip} " if number + 1 < len(stops) else "", DIM)
        for row, text in zip(rows, texts, strict=True):
            row.append(f"{text[: width - 1]:<{width}}")
    return [title, *rows]


def _stops(told: Told, history: History) -> list[tuple[str, str, tuple[str, str, str]]]:
    ingest, pipeline = told.get("ingest", {}), told.get("pipeline", {})
    now = float(told.get("at", 0.0))
    came, counted = history.came_per_s(), history.counted_per_s()
    runs = told.get("health") != "down"
    refused = sum(ingest.get("refused_requests", {}).values())
    requests = sum(ingest.get("requests", {}).values())
    last = told.get("last_batch")
    newest = (told.get("batches") or [{}])[-1]
    committed = told.get("committed_at")
    level = str((told.get("thresholds") or {}).get("level", ""))
    rows: Told = next((q for q in told.get("queues", ()) if q.get("process") == "ingest"), {})
    full = 100 * rows.get("depth", 0) / rows["capacity"] if rows.get("capacity") else 0.0
    return [
        (
            "senders",
            "bold",
            (
                f"{short(came)}/s" if runs and came is not None else "",
                f"{short(ingest.get('received_spans', 0))} spans",
                f"{ingest.get('connections', {}).get('open', 0):,} open",
            ),
        ),
        (
            "ingest",
            _style(told, "ingest"),
            (
                _state(told, "ingest"),
                f"{short(requests)} req",
                f"{short(refused)} refused",
            ),
        ),
        (
            "queue",
            LEVELS.get(level, "") + " bold",
            (f"{short(told.get('queue_rows', 0))} spans", f"{full:.1f} % full", level.lower()),
        ),
        _between(told),
        (
            "Spark",
            _style(told, "pipeline"),
            (
                _state(told, "pipeline"),
                f"{seconds(newest['seconds'])} last" if newest.get("seconds") else "no batch yet",
                f"{short(counted)}/s" if runs and counted is not None else "",
            ),
        ),
        (
            "store",
            "bold",
            (
                "nothing yet" if last is None else f"batch {last:,}",
                "" if committed is None else f"{seconds(max(0.0, now - committed))} ago",
                f"{short(pipeline.get('spans', 0))} spans",
            ),
        ),
    ]


def _between(told: Told) -> tuple[str, str, tuple[str, str, str]]:
    """What lies between ingest and pipeline: a spool, or a topic."""
    lag = f"lag {seconds(told.get('lag_s', 0.0))}"
    if "topic" in told:
        messages = told["topic"].get("messages")
        known = "not known" if messages is None else short(messages)
        return "topic", "bold", (known, "unread", lag)
    spool = told.get("spool", {})
    files = f"{short(spool.get('segments', 0))} files"
    return "spool", "bold", (files, size(spool.get("bytes", 0)), lag)


def minutes(history: History, sheet: Sheet) -> list[Text]:
    """What changes, as lines of the past."""
    seen = list(history.moments)
    rows: list[tuple[str, list[float], str]] = [
        ("spans/s", history.came(), short(history.came_per_s() or 0)),
        ("queue", [float(each.queue) for each in seen], f"{short(seen[-1].queue)} spans"),
        *(
            [("spool", [float(each.spool_bytes) for each in seen], size(seen[-1].spool_bytes))]
            if history.has_spool
            else []
        ),
        ("lag", [each.lag_s for each in seen], seconds(seen[-1].lag_s)),
    ]
    lines = []
    for name, values, now in rows:
        line = Text(f"{name:<8}", "bold").append(f"{now:>12}  ")
        room = sheet.width - len(line)
        lines.append(line.append_text(past(values, room, ascii_only=sheet.ascii_only)))
    return lines


def drops(told: Told, sheet: Sheet, *, titled: bool = True) -> list[Text]:
    """What was not counted or not taken, and why."""
    rows = [
        Text.assemble("  ", (f"{n:,}", "yellow"), f" {what}: {reason}")
        for what, reasons in told.get("drops", {}).items()
        for reason, n in reasons.items()
    ]
    if not titled:
        return [cut_line(row, sheet.width) for row in rows]
    line = heading("not counted")
    if not rows:
        return [line.append("nothing", DIM)]
    return [line, *(cut_line(row, sheet.width) for row in rows)]


def exports(told: Told, sheet: Sheet) -> list[Text]:
    """A line for each exporter."""
    now = float(told.get("at", 0.0))
    return [
        cut_line(Text(f"{name:<10} {exported(now, each) or 'has said nothing yet'}"), sheet.width)
        for name, each in told.get("exports", {}).items()
    ]


def processes(told: Told, sheet: Sheet) -> list[Text]:
    """All processes, as many on a line as it has room for."""
    lines = [heading("processes")]
    now = float(told.get("at", 0.0))
    if not told.get("processes"):
        lines[0].append("none", DIM)
    for name, each in told.get("processes", {}).items():
        state = str(each.get("state", ""))
        part = Text.assemble((name, "bold"), " ", (state, WORRYING.get(state, "")))
        if each.get("pid"):
            part.append(f" {seconds(max(0.0, now - float(each.get('started') or now)))}", DIM)
        if each.get("restarts"):
            part.append(f" restarts {each['restarts']}", "yellow")
        if len(lines[-1]) + len(part) + 3 > sheet.width:
            lines.append(Text("  "))
        lines[-1].append_text(part).append("   ")
    return lines


def process_table(told: Told, sheet: Sheet) -> list[Text]:
    """A line for each process."""
    now = float(told.get("at", 0.0))
    lines = []
    for name, each in told.get("processes", {}).items():
        state = str(each.get("state", ""))
        line = Text(f"{name:<10} ", "bold").append(f"{state:<11}", WORRYING.get(state, ""))
        if each.get("pid"):
            ran = seconds(max(0.0, now - float(each.get("started") or now)))
            line.append(f"process {each['pid']} for {ran}", DIM)
        if each.get("restarts"):
            line.append(
                f"; started again {each['restarts']} times, last {each.get('exit')}", "yellow"
            )
        if name == "web" and state == "running" and told.get("web"):
            line.append(f"  {told['web']}")
        lines.append(cut_line(line, sheet.width))
    return lines or [Text("none", DIM)]


def _panel(title: str | Text, lines: Sequence[Text]) -> Panel:
    shown = Text(title, "bold cyan") if isinstance(title, str) else title
    return Panel(Group(*lines), title=shown, title_align="left", box=box.ROUNDED, border_style=DIM)


def _state(told: Told, name: str) -> str:
    found = told.get("processes", {}).get(name, {}).get("state")
    return str(found or ("down" if told.get("health") == "down" else ""))


def _style(told: Told, name: str) -> str:
    return f"{WORRYING.get(_state(told, name), 'red')} bold"


def _cut(lines: list[Text], sheet: Sheet) -> Group:
    """As many lines, and as much of each, as there is room for."""
    lines = [cut_line(line, sheet.width) for line in lines]
    if sheet.height is not None and len(lines) > sheet.height:
        left_out = len(lines) - sheet.height + 1
        more = Text(f"… {left_out} more lines: a larger window shows them", DIM)
        lines = [*lines[: sheet.height - 1], more]
    return Group(*lines)
