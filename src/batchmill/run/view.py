"""How a run looks: live on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import contextlib
import sys
import time
from collections import deque
from collections.abc import Callable
from typing import Any, Self

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from batchmill.run.figures import Picture, Tables, Waiting, exported

DRAW_S = 0.5
PLAIN_S = 5.0
SHOWN_SERVICES = 12
WORRYING = {"restarting": "yellow", "failed": "red", "starting": "cyan", "running": "green"}


class Screen:
    """Where a run is shown. A terminal that has gone away stops nothing."""

    def __init__(self, console: Console | None = None) -> None:
        self._console = console or make_console()
        self._live: Live | None = None
        self._due_s = 0.0
        self._rates = Rates()

    def say(self, text: str) -> None:
        """A line that stays."""
        self.print(Text(text))

    def print(self, what: RenderableType) -> None:
        """Something that stays."""
        self._safely(lambda: self._console.print(what))

    def is_due(self, now_s: float) -> bool:
        """Whether it is time for another picture."""
        return now_s >= self._due_s

    def show(self, picture: Picture) -> None:
        """Draw it."""
        self._rates.add(picture)
        if self._live is None:
            self._due_s = time.monotonic() + PLAIN_S
            self.print(Text(plain_line(picture, self._rates)))
            return
        self._due_s = time.monotonic() + DRAW_S
        frame = draw(picture, self._rates)
        live = self._live
        self._safely(lambda: live.update(frame, refresh=True))

    def end_live(self) -> None:
        """What comes now is said in lines."""
        if self._live is not None:
            self._safely(self._live.stop)
            self._live = None

    def _safely(self, what: Callable[[], Any]) -> None:
        with contextlib.suppress(OSError):  # the terminal was closed, or nobody reads the pipe
            what()

    def __enter__(self) -> Self:
        if self._console.is_terminal and not self._console.is_dumb_terminal:
            self._live = Live(console=self._console, auto_refresh=False, transient=True)
            self._safely(self._live.start)
        return self

    def __exit__(self, *_: object) -> None:
        self.end_live()


def make_console() -> Console:
    """Where to draw. A pipe or a file gets text alone, whatever FORCE_COLOR says."""
    if sys.stdout.isatty():
        return Console()
    return Console(
        force_terminal=False, color_system=None, force_interactive=False, width=200, soft_wrap=True
    )


class Rates:
    """How many spans come in a second, over the last few seconds."""

    def __init__(self, seconds: float = 5.0) -> None:
        self._seconds = seconds
        self._seen: deque[tuple[float, int, int]] = deque()

    def add(self, picture: Picture) -> None:
        """Note a picture."""
        pid = picture.ingest.get("pid", 0)
        if self._seen and self._seen[-1][1] != pid:  # another life counts from 0
            self._seen.clear()
        self._seen.append((picture.now, pid, picture.ingest.get("received_spans", 0)))
        while len(self._seen) > 2 and self._seen[1][0] <= picture.now - self._seconds:
            self._seen.popleft()

    def spans_per_s(self) -> float:
        """The rate; 0 as long as nothing is known."""
        if len(self._seen) < 2:
            return 0.0
        (first_s, _, first), (last_s, _, last) = self._seen[0], self._seen[-1]
        return max(0.0, (last - first) / (last_s - first_s)) if last_s > first_s else 0.0


def plain_line(picture: Picture, rates: Rates) -> str:
    """A run in one line."""
    ingest, progress, waiting = picture.ingest, picture.progress, picture.waiting
    states = ", ".join(f"{name} {each['state']}" for name, each in picture.processes.items())
    batch = progress.get("last_batch")
    return (
        f"{states} | in {ingest.get('received_spans', 0):,} spans ({rates.spans_per_s():,.0f}/s), "
        f"{ingest.get('acknowledged_spans', 0):,} acknowledged | "
        f"queue {ingest.get('queue_rows', 0):,} | "
        f"{'topic' if waiting.topic else 'spool'} {waiting.text}{_bytes(waiting)} | "
        f"{'no batch yet' if batch is None else f'batch {batch}'}, "
        f"{progress.get('spans', 0):,} spans counted"
    )


def draw(picture: Picture, rates: Rates) -> RenderableType:
    """A run as a frame."""
    return Group(Text(), road(picture, rates), Text(), tables(picture.tables))


def road(picture: Picture, rates: Rates) -> Table:
    """The road that spans take, a line for each part of it."""
    ingest, progress, waiting = picture.ingest, picture.progress, picture.waiting
    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column(style="bold")
    table.add_column()
    table.add_column()

    def add(name: str, state: str, text: str) -> None:
        table.add_row(Text(name), Text(state, style=WORRYING.get(state, "")), Text(text))

    refused = sum(ingest.get("refused_requests", {}).values())
    rejected = sum(ingest.get("rejected", {}).values())
    came = (
        f"{ingest.get('received_spans', 0):,} spans in, {rates.spans_per_s():,.0f}/s; "
        f"{ingest.get('acknowledged_spans', 0):,} acknowledged"
    )
    came += f"; {refused:,} requests refused" if refused else ""
    came += f"; {rejected:,} spans rejected" if rejected else ""
    add("ingest", _state(picture, "ingest"), came if ingest else "not there yet")
    level = str(ingest.get("level", "NORMAL"))
    pressure = "" if level == "NORMAL" else f"; pressure {level}"
    add("queue", "", f"{ingest.get('queue_rows', 0):,} spans{pressure}")
    add(
        "topic" if waiting.topic else "spool",
        "",
        f"{waiting.text}{_bytes(waiting)}"
        + (f", the oldest {waiting.oldest_s:.1f} s old" if waiting.segments else ""),
    )
    add("pipeline", _state(picture, "pipeline"), _committed(picture.now, progress))
    for name in picture.processes:
        if name not in ("ingest", "pipeline"):
            add(name, _state(picture, name), _beside(picture, name))
    return table


def tables(found: Tables) -> RenderableType:
    """Services and slowest statements."""
    if found.minute is None:
        return Text("no metrics yet", style="dim")
    services = Table(box=None, pad_edge=False, header_style="bold")
    services.add_column(Text(f"service, {minute_text(found.minute)}"))
    for each in ("cpm", "average ms", "p99 ms", "success", "apdex"):
        services.add_column(each, justify="right")
    for row in found.services[:SHOWN_SERVICES]:
        services.add_row(
            Text(row.name),
            f"{row.cpm:,}",
            _number(row.average_ms),
            _number(row.p99_ms),
            "" if row.success is None else f"{row.success:.2%}",
            "" if row.apdex is None else f"{row.apdex:.3f}",
        )
    left_out = len(found.services) - SHOWN_SERVICES
    parts: list[RenderableType] = [services]
    if left_out > 0:
        parts.append(Text(f"and {left_out} more: batchmill query service_cpm", style="dim"))
    if found.statements:
        slow = Table(box=None, pad_edge=False, header_style="bold")
        slow.add_column("database")
        slow.add_column("ms", justify="right")
        slow.add_column("slowest statements of this hour", no_wrap=True, overflow="ellipsis")
        for call in found.statements:
            slow.add_row(Text(call.entity_name), f"{call.latency:,}", Text(call.statement))
        parts += [Text(), slow]
    return Group(*parts)


def size(count: float) -> str:
    """Bytes as people write them.

    >>> size(0), size(1536), size(7 * 2**30)
    ('0 B', '1.5 KiB', '7.0 GiB')
    """
    unit = "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if count < 1024:
            break
        count, unit = count / 1024, larger
    return f"{count:.0f} B" if unit == "B" else f"{count:.1f} {unit}"


def _bytes(waiting: Waiting) -> str:
    return "" if waiting.topic else f", {size(waiting.bytes)}"


def minute_text(minute: int) -> str:
    """The time of day of a minute's bucket."""
    return f"{minute // 100 % 100:02}:{minute % 100:02} UTC so far"


def _committed(now: float, progress: Any) -> str:
    if not progress or progress.get("last_batch") is None:
        return "nothing committed yet"
    at = progress.get("committed_at")
    text = f"batch {progress['last_batch']:,}"
    text += "" if at is None else f", committed {max(0.0, now - at):.0f} s ago"
    text += f"; {progress.get('spans', 0):,} spans counted"
    duplicates = progress.get("duplicates", 0)
    return text + (f", {duplicates:,} duplicates dropped" if duplicates else "")


def _beside(picture: Picture, name: str) -> str:
    """What a process beside the road tells."""
    if name == "web":
        return str(picture.web.get("address", "")) if _state(picture, name) == "running" else ""
    return exported(picture.now, picture.exports.get(name))


def _state(picture: Picture, name: str) -> str:
    return str(picture.processes.get(name, {}).get("state", ""))


def _number(value: int | None) -> str:
    return "" if value is None else f"{value:,}"
