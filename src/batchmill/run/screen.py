"""How ``batchmill run`` shows a run: live on a terminal, one line every 5 s elsewhere."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable
from typing import Any, Self

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from batchmill.run.status import Backlog, Report, RunState, export_text
from batchmill.run.tables import Tables
from batchmill.run.top.history import History
from batchmill.wording import count_of

DRAW_S = 0.5
PLAIN_S = 5.0
SHOWN_SERVICES = 12
STATE_STYLES = {"restarting": "yellow", "failed": "red", "starting": "cyan", "running": "green"}


class Screen:
    """Prints the state of a run; a terminal that was closed does not stop the run."""

    def __init__(self, console: Console | None = None) -> None:
        self._console = console or make_console()
        self._live: Live | None = None
        self._due_s = 0.0
        self._history = History(rate_s=5.0)

    def say(self, text: str) -> None:
        """Print a line, above the live part."""
        self.print(Text(text))

    def print(self, what: RenderableType) -> None:
        """Print something, above the live part."""
        self._safely(lambda: self._console.print(what))

    def is_due(self, now_s: float) -> bool:
        """Whether it is time to show the state again."""
        return now_s >= self._due_s

    def show(self, state: RunState, tables: Tables) -> None:
        """Show the state of the run."""
        self._history.add({"at": state.now, "ingest": state.ingest})
        spans_per_s = self._history.received_per_s() or 0.0
        if self._live is None:
            self._due_s = time.monotonic() + PLAIN_S
            self.print(Text(plain_line(state, spans_per_s)))
            return
        self._due_s = time.monotonic() + DRAW_S
        frame = draw(state, tables, spans_per_s)
        live = self._live
        self._safely(lambda: live.update(frame, refresh=True))

    def end_live(self) -> None:
        """Remove the live part; from now on there are only lines."""
        if self._live is not None:
            self._safely(self._live.stop)
            self._live = None

    def _safely(self, call: Callable[[], Any]) -> None:
        with contextlib.suppress(OSError):  # the terminal was closed, or nobody reads the pipe
            call()

    def __enter__(self) -> Self:
        if self._console.is_terminal and not self._console.is_dumb_terminal:
            self._live = Live(console=self._console, auto_refresh=False, transient=True)
            self._safely(self._live.start)
        return self

    def __exit__(self, *_: object) -> None:
        self.end_live()


def make_console() -> Console:
    """The console; for a pipe or a file without colours, whatever FORCE_COLOR says."""
    if sys.stdout.isatty():
        return Console()
    return Console(
        force_terminal=False, color_system=None, force_interactive=False, width=200, soft_wrap=True
    )


def plain_line(state: RunState, spans_per_s: float) -> str:
    """A run in one line."""
    ingest, progress, backlog = state.ingest, state.progress, state.backlog
    states = ", ".join(f"{name} {process['state']}" for name, process in state.processes.items())
    batch = progress.get("last_batch")
    return (
        f"{states} | in {count_of(ingest.get('received_spans', 0), 'span')} "
        f"({spans_per_s:,.0f}/s), {ingest.get('acknowledged_spans', 0):,} acknowledged | "
        f"queue {ingest.get('queue_rows', 0):,} | "
        f"{'topic' if backlog.topic else 'spool'} {backlog.text}{_bytes(backlog)} | "
        f"{'no batch yet' if batch is None else f'batch {batch}'}, "
        f"{count_of(progress.get('spans', 0), 'span')} counted"
    )


def draw(state: RunState, tables: Tables, spans_per_s: float) -> RenderableType:
    """A run as a frame."""
    return Group(Text(), draw_stages(state, spans_per_s), Text(), draw_tables(tables))


def draw_stages(state: RunState, spans_per_s: float) -> Table:
    """A row for each stage that spans pass, and for each process beside them."""
    ingest, backlog = state.ingest, state.backlog
    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column(style="bold")
    table.add_column()
    table.add_column()

    def add(name: str, is_in: str, text: str) -> None:
        table.add_row(Text(name), Text(is_in, style=STATE_STYLES.get(is_in, "")), Text(text))

    add("ingest", state.state_of("ingest"), _ingest_text(ingest, spans_per_s))
    level = str(ingest.get("level", "NORMAL"))
    pressure = "" if level == "NORMAL" else f"; pressure {level}"
    add("queue", "", f"{count_of(ingest.get('queue_rows', 0), 'span')}{pressure}")
    add(
        "topic" if backlog.topic else "spool",
        "",
        f"{backlog.text}{_bytes(backlog)}"
        + (f", the oldest {backlog.oldest_s:.1f} s old" if backlog.count else ""),
    )
    add("pipeline", state.state_of("pipeline"), _pipeline_text(state.progress, state.now))
    for name in state.processes:
        if name == "web":
            is_in = state.state_of(name)
            add(name, is_in, str(state.web.get("address", "")) if is_in == "running" else "")
        elif name not in ("ingest", "pipeline"):
            add(name, state.state_of(name), export_text(state.exports.get(name), state.now))
    return table


def draw_tables(tables: Tables) -> RenderableType:
    """Services and slowest statements."""
    if tables.minute is None:
        return Text("no metrics yet", style="dim")
    services = Table(box=None, pad_edge=False, header_style="bold")
    services.add_column(Text(f"service, {_time_of_day(tables.minute)}"))
    for name in ("cpm", "average ms", "p99 ms", "success", "apdex"):
        services.add_column(name, justify="right")
    for row in tables.services[:SHOWN_SERVICES]:
        services.add_row(
            Text(row.name),
            f"{row.cpm:,}",
            _number(row.average_ms),
            _number(row.p99_ms),
            "" if row.success is None else f"{row.success:.2%}",
            "" if row.apdex is None else f"{row.apdex:.3f}",
        )
    left_out = len(tables.services) - SHOWN_SERVICES
    parts: list[RenderableType] = [services]
    if left_out > 0:
        parts.append(Text(f"and {left_out} more: batchmill query service_cpm", style="dim"))
    if tables.statements:
        slow = Table(box=None, pad_edge=False, header_style="bold")
        slow.add_column("database")
        slow.add_column("ms", justify="right")
        slow.add_column("slowest statements of this hour", no_wrap=True, overflow="ellipsis")
        for record in tables.statements:
            slow.add_row(Text(record.entity_name), f"{record.latency:,}", Text(record.statement))
        parts += [Text(), slow]
    return Group(*parts)


def size(count: float) -> str:
    """Bytes in their largest useful unit.

    >>> size(0), size(1536), size(7 * 2**30)
    ('0 B', '1.5 KiB', '7.0 GiB')
    """
    unit = "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if count < 1024:
            break
        count, unit = count / 1024, larger
    return f"{count:.0f} B" if unit == "B" else f"{count:.1f} {unit}"


def _bytes(backlog: Backlog) -> str:
    return "" if backlog.topic else f", {size(backlog.bytes)}"


def _time_of_day(minute: int) -> str:
    return f"{minute // 100 % 100:02}:{minute % 100:02} UTC so far"


def _ingest_text(ingest: Report, spans_per_s: float) -> str:
    if not ingest:
        return "no report yet"
    refused = sum(ingest.get("refused_requests", {}).values())
    rejected = sum(ingest.get("rejected", {}).values())
    text = (
        f"{count_of(ingest.get('received_spans', 0), 'span')} in, {spans_per_s:,.0f}/s; "
        f"{ingest.get('acknowledged_spans', 0):,} acknowledged"
    )
    text += f"; {count_of(refused, 'request')} refused" if refused else ""
    return text + (f"; {count_of(rejected, 'span')} rejected" if rejected else "")


def _pipeline_text(progress: Report, now: float) -> str:
    if progress.get("last_batch") is None:
        return "nothing committed yet"
    at = progress.get("committed_at")
    text = f"batch {progress['last_batch']:,}"
    text += "" if at is None else f", committed {max(0.0, now - at):.0f} s ago"
    text += f"; {count_of(progress.get('spans', 0), 'span')} counted"
    duplicates = progress.get("duplicates", 0)
    return text + (f", {count_of(duplicates, 'duplicate')} dropped" if duplicates else "")


def _number(value: int | None) -> str:
    return "" if value is None else f"{value:,}"
