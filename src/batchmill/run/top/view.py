"""The screen of ``batchmill top``, drawn from the JSON that the web UI's pipeline page has."""

from __future__ import annotations

import contextlib
import os
import select
import sys
import textwrap
import time
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from rich import box
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from batchmill.run.home import Home
from batchmill.run.screen import STATE_STYLES, size
from batchmill.run.status import alerts_text, export_text, read_status
from batchmill.run.top.history import History, StatusJson
from batchmill.run.top.marks import DIM, Sheet, cut_line, heading, seconds, short, short_count
from batchmill.run.top.panels import (
    LEVEL_STYLES,
    draw_batch_chart,
    draw_batches,
    draw_pressure,
    draw_queues,
    level_text,
)
from batchmill.wording import count_of

NARROW = 72
"""Below this width the stages are drawn one below the other."""
WIDE = 120
"""From this width on there are two columns."""
HEALTH_STYLES = {"healthy": "bold green", "degraded": "bold yellow", "down": "bold red"}


def draw(status: StatusJson, history: History, sheet: Sheet) -> RenderableType:
    """The whole screen, in one column or in two."""
    top = [
        _head(status, sheet),
        *_reasons(status, sheet),
        Text(),
        *_draw_stages(status, history, sheet),
    ]
    if sheet.width < WIDE:
        below = [
            *draw_queues(status, sheet),
            *draw_pressure(status, sheet),
            *draw_batches(status, sheet),
            *_drops(status, sheet),
            *_exports(status, sheet),
            *_processes(status, sheet),
        ]
        return _cut([*top, *below], sheet)
    side = sheet.narrower(sheet.width // 2 - 5)
    left = [
        _panel("queues", draw_queues(status, side, titled=False)),
        _panel(level_text(status), draw_pressure(status, side, titled=False)),
        _panel("processes", _process_table(status, side)),
    ]
    right = [
        _panel("micro-batches", draw_batches(status, side, titled=False)),
        _panel(
            "not counted, by reason", _drops(status, side, titled=False) or [Text("nothing", DIM)]
        ),
    ]
    if exports := _exports(status, side):
        left.append(_panel("exports", exports))
    if len(history.samples) > 1:
        left.append(_panel("the last minutes", _last_minutes(history, side)))
    if status.get("batches"):
        right.append(_panel("seconds by micro-batch", draw_batch_chart(status, side)))
    both = Table.grid(expand=True, padding=(0, 1, 0, 0))
    both.add_column(ratio=1)
    both.add_column(ratio=1)
    both.add_row(Group(*left), Group(*right))
    return Group(*top, Text(), both)


def _head(status: StatusJson, sheet: Sheet) -> Text:
    """Health, folder, time."""
    health = str(status.get("health", ""))
    style = HEALTH_STYLES.get(health, "bold")
    text = Text.assemble(("batchmill top ", "bold"), (health.upper(), style))
    at = time.strftime("%H:%M:%S", time.localtime(float(status.get("at", 0.0))))
    where = f"  {status.get('home', '')}"
    if status.get("web") and status.get("supervisor"):
        where = f"  {status['web']}{where}"
    room = sheet.width - len(text) - len(at) - 2
    text.append(where[:room] if len(where) <= room else f"  …{where[3 - room :]}", DIM)
    text.append(" " * max(1, sheet.width - len(text) - len(at)))
    return text.append(at, DIM)


def _reasons(status: StatusJson, sheet: Sheet) -> list[Text]:
    """Why the run is not healthy."""
    lines = [Text(f"! {reason}", "yellow") for reason in status.get("reasons", ())]
    if status.get("health") == "down" and status.get("supervisor") is None:
        lines = [Text(f"! nothing runs in {status.get('home')}: start `batchmill run`", "bold red")]
        if committed := status.get("committed_at"):
            ago = seconds(max(0.0, _now(status) - committed))
            lines.append(Text(f"  below is its last state; it last committed {ago} ago", DIM))
    return [part for line in lines[:4] for part in _wrapped(line, sheet.width)]


def _wrapped(line: Text, width: int) -> list[Text]:
    parts = textwrap.wrap(
        line.plain, width, subsequent_indent="  ", break_on_hyphens=False, drop_whitespace=True
    )
    return [Text(part, line.style) for part in parts]


class _Stage(NamedTuple):
    """A place that spans pass, with three short texts about it."""

    name: str
    style: str
    texts: tuple[str, str, str]


def _draw_stages(status: StatusJson, history: History, sheet: Sheet) -> list[Text]:
    """The stages that a span passes, with their numbers below them."""
    stages = _stages(status, history)
    if sheet.width < NARROW:
        lines = [
            Text.assemble((f"{stage.name:<8}", stage.style), ", ".join(filter(None, stage.texts)))
            for stage in stages
        ]
        return [cut_line(line, sheet.width) for line in lines]
    width = sheet.width // len(stages)
    line, tip = ("-", ">") if sheet.ascii_only else ("─", "►")
    title = Text()
    rows = [Text() for _ in range(3)]
    for number, (name, style, texts) in enumerate(stages):
        title.append(f"{name} ", style)
        left = width - len(name) - 1
        title.append(f"{line * (left - 2)}{tip} " if number + 1 < len(stages) else "", DIM)
        for row, text in zip(rows, texts, strict=True):
            row.append(f"{text[: width - 1]:<{width}}")
    return [title, *rows]


def _stages(status: StatusJson, history: History) -> list[_Stage]:
    ingest, pipeline = status.get("ingest", {}), status.get("pipeline", {})
    received, counted = history.received_per_s(), history.counted_per_s()
    runs = status.get("health") != "down"
    refused = sum(ingest.get("refused_requests", {}).values())
    requests = sum(ingest.get("requests", {}).values())
    last = status.get("last_batch")
    newest = (status.get("batches") or [{}])[-1]
    took = f"{seconds(newest['seconds'])} last" if newest.get("seconds") else "no batch yet"
    if long := status.get("long_batch"):
        took = f"{seconds(long['seconds'])} so far"
    committed = status.get("committed_at")
    level = str((status.get("thresholds") or {}).get("level", ""))
    queue: StatusJson = next(
        (queue for queue in status.get("queues", ()) if queue.get("process") == "ingest"), {}
    )
    full = 100 * queue.get("depth", 0) / queue["capacity"] if queue.get("capacity") else 0.0
    return [
        _Stage(
            "senders",
            "bold",
            (
                f"{short(received)}/s" if runs and received is not None else "",
                short_count(ingest.get("received_spans", 0), "span"),
                f"{ingest.get('connections', {}).get('open', 0):,} open",
            ),
        ),
        _Stage(
            "ingest",
            _style(status, "ingest"),
            (_state(status, "ingest"), f"{short(requests)} req", f"{short(refused)} refused"),
        ),
        _Stage(
            "queue",
            LEVEL_STYLES.get(level, "") + " bold",
            (short_count(status.get("queue_rows", 0), "span"), f"{full:.1f} % full", level.lower()),
        ),
        _backlog_stage(status),
        _Stage(
            "Spark",
            _style(status, "pipeline"),
            (
                _state(status, "pipeline"),
                took,
                f"{short(counted)}/s" if runs and counted is not None else "",
            ),
        ),
        _Stage(
            "store",
            "bold",
            (
                "nothing yet" if last is None else f"batch {last:,}",
                "" if committed is None else f"{seconds(max(0.0, _now(status) - committed))} ago",
                short_count(pipeline.get("spans", 0), "span"),
            ),
        ),
    ]


def _backlog_stage(status: StatusJson) -> _Stage:
    """What lies between ingest and pipeline: a spool, or a topic."""
    lag = f"lag {seconds(status.get('lag_s', 0.0))}"
    if "topic" in status:
        messages = status["topic"].get("messages")
        known = "not known" if messages is None else short(messages)
        return _Stage("topic", "bold", (known, "unread", lag))
    spool = status.get("spool", {})
    files = short_count(spool.get("segments", 0), "file")
    if behind := status.get("behind"):
        files = short_count(behind["rows"], behind["unit"])
    return _Stage("spool", "bold", (files, size(spool.get("bytes", 0)), lag))


def _last_minutes(history: History, sheet: Sheet) -> list[Text]:
    """A sparkline for each number that changes."""
    samples = list(history.samples)
    last = samples[-1]
    rows = [
        ("spans/s", history.received_rates(), short(history.received_per_s() or 0)),
        ("queue", [float(sample.queue) for sample in samples], short_count(last.queue, "span")),
    ]
    if history.has_spool:
        spool = [float(sample.spool_bytes) for sample in samples]
        rows.append(("spool", spool, size(last.spool_bytes)))
    rows.append(("lag", [sample.lag_s for sample in samples], seconds(last.lag_s)))
    lines = []
    for name, values, now in rows:
        line = Text(f"{name:<8}", "bold").append(f"{now:>12}  ")
        room = sheet.width - len(line)
        lines.append(line.append_text(sheet.sparkline(values, room)))
    return lines


def _drops(status: StatusJson, sheet: Sheet, *, titled: bool = True) -> list[Text]:
    """What was dropped, refused or left out, and why."""
    rows = [
        cut_line(Text.assemble("  ", (f"{n:,}", "yellow"), f" {what}: {reason}"), sheet.width)
        for what, reasons in status.get("drops", {}).items()
        for reason, n in reasons.items()
    ]
    if not titled:
        return rows
    title = heading("not counted")
    return [title, *rows] if rows else [title.append("nothing", DIM)]


def _exports(status: StatusJson, sheet: Sheet) -> list[Text]:
    """A line for each exporter, and one for alerts."""
    texts = {
        name: export_text(report, _now(status))
        for name, report in status.get("exports", {}).items()
    }
    if status.get("alerts") is not None:
        texts["alerts"] = alerts_text(status["alerts"])
    return [
        cut_line(Text(f"{name:<10} {text or 'no report yet'}"), sheet.width)
        for name, text in texts.items()
    ]


def _processes(status: StatusJson, sheet: Sheet) -> list[Text]:
    """All processes, as many on a line as fit."""
    lines = [heading("processes")]
    if not status.get("processes"):
        lines[0].append("none", DIM)
    for name, process in status.get("processes", {}).items():
        state = str(process.get("state", ""))
        part = Text.assemble((name, "bold"), " ", (state, STATE_STYLES.get(state, "")))
        if process.get("pid"):
            part.append(f" {_running_for(status, process)}", DIM)
        if process.get("restarts"):
            part.append(f" restarts {process['restarts']}", "yellow")
        if len(lines[-1]) + len(part) + 3 > sheet.width:
            lines.append(Text("  "))
        lines[-1].append_text(part).append("   ")
    return lines


def _process_table(status: StatusJson, sheet: Sheet) -> list[Text]:
    """A line for each process."""
    lines = []
    for name, process in status.get("processes", {}).items():
        state = str(process.get("state", ""))
        line = Text(f"{name:<10} ", "bold").append(f"{state:<11}", STATE_STYLES.get(state, ""))
        if process.get("pid"):
            line.append(f"process {process['pid']} for {_running_for(status, process)}", DIM)
        if restarts := process.get("restarts"):
            text = f"; {count_of(restarts, 'restart')}, last ended with {process.get('exit')}"
            line.append(text, "yellow")
        if name == "web" and state == "running" and status.get("web"):
            line.append(f"  {status['web']}")
        lines.append(cut_line(line, sheet.width))
    return lines or [Text("none", DIM)]


def _panel(title: str | Text, lines: Sequence[Text]) -> Panel:
    shown = Text(title, "bold cyan") if isinstance(title, str) else title
    return Panel(Group(*lines), title=shown, title_align="left", box=box.ROUNDED, border_style=DIM)


def _now(status: StatusJson) -> float:
    return float(status.get("at", 0.0))


def _running_for(status: StatusJson, process: StatusJson) -> str:
    now = _now(status)
    return seconds(max(0.0, now - float(process.get("started") or now)))


def _state(status: StatusJson, name: str) -> str:
    state = status.get("processes", {}).get(name, {}).get("state")
    return str(state or ("down" if status.get("health") == "down" else ""))


def _style(status: StatusJson, name: str) -> str:
    return f"{STATE_STYLES.get(_state(status, name), 'red')} bold"


def _cut(lines: list[Text], sheet: Sheet) -> Group:
    """As many lines, and as much of each, as fit."""
    lines = [cut_line(line, sheet.width) for line in lines]
    if sheet.height is not None and len(lines) > sheet.height:
        left_out = len(lines) - sheet.height + 1
        more = Text(f"… {count_of(left_out, 'more line')}: a larger window shows them", DIM)
        lines = [*lines[: sheet.height - 1], more]
    return Group(*lines)


EVERY_S = 1.0
PLAIN_WIDTH = 100
QUIT = frozenset("qQ\x03\x04")
"""q, Ctrl-C and Ctrl-D."""


def show_run(home: Home, *, once: bool = False) -> int:
    """Watch a run until a key ends it; the exit code.

    With ``once``, and where there is no terminal, print its status and return its health.
    """
    console = Console()
    if not sys.stdout.isatty():
        # No colours in a pipe or a file, whatever FORCE_COLOR says.
        console = Console(force_terminal=False, color_system=None, width=PLAIN_WIDTH)
    if once or not console.is_terminal or console.is_dumb_terminal:
        status = read_status(home)
        console.print(draw(status.as_json(), History(), _sheet(console, None)))
        return status.health
    _watch(home, console)
    return 0


def _watch(home: Home, console: Console) -> None:
    history = History()
    with (
        _keys() as keys,
        contextlib.suppress(KeyboardInterrupt),
        Live(console=console, screen=True, auto_refresh=False) as live,
    ):
        while True:
            due_s = time.monotonic() + EVERY_S
            status = read_status(home).as_json()
            history.add(status)
            live.update(draw(status, history, _sheet(console, console.size.height)), refresh=True)
            if _quit_pressed(keys, due_s):
                return


def _sheet(console: Console, height: int | None) -> Sheet:
    return Sheet(console.size.width, height, console.options.ascii_only)


def _quit_pressed(keys: int | None, until_s: float) -> bool:
    """Wait until then; True as soon as a key asks to quit."""
    while (left_s := until_s - time.monotonic()) > 0:
        if keys is None:
            time.sleep(left_s)
            return False
        readable, _, _ = select.select([keys], [], [], left_s)
        if readable:
            pressed = os.read(keys, 64)
            # Nothing to read: the terminal was closed.
            if not pressed or QUIT.intersection(pressed.decode("utf-8", "replace")):
                return True
    return False


@contextlib.contextmanager
def _keys() -> Iterator[int | None]:
    """A handle to read keys from as they are pressed; None: there is none, only Ctrl-C works."""
    try:
        import termios
        import tty
    except ImportError:  # not on this system
        yield None
        return
    if not sys.stdin.isatty():
        yield None
        return
    handle = sys.stdin.fileno()
    before = termios.tcgetattr(handle)
    try:
        tty.setcbreak(handle)
        yield handle
    finally:
        termios.tcsetattr(handle, termios.TCSADRAIN, before)
