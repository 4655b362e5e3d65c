"""How ``batchmill run`` shows a run and its store: live on a terminal, else a line every 5 s."""

from __future__ import annotations

import contextlib
import re
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any, Self

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from batchmill.errors import BatchmillError
from batchmill.run.state import Backlog, Report, RunState
from batchmill.run.status import alerts_text, export_text
from batchmill.run.top.history import History
from batchmill.sources import Grain, bucket_end, bucket_start
from batchmill.store import (
    CoveredTime,
    RetryPolicy,
    Snapshot,
    Store,
    StoredMetric,
    TopRecord,
    Value,
    minute_of,
    open_store,
)
from batchmill.wording import count_of

READ_S = 1.0
MINUTE_S = 60
STATEMENTS = "top_n_database_statement"
SHOWN_STATEMENTS = 5
_PATIENCE = RetryPolicy(give_up_after_s=1.0)
_P99 = re.compile(r"\D*99\D*")


@dataclass(frozen=True)
class ServiceRow:
    """A service in one minute; None: the store has no such value."""

    name: str
    cpm: int
    average_ms: float | None = None
    p99_ms: float | None = None
    success: float | None = None
    """From 0 to 1, like apdex."""
    apdex: float | None = None


@dataclass(frozen=True)
class Tables:
    """The services in the newest complete minute, and the slowest statements of its hour."""

    minute: int | None = None
    services: tuple[ServiceRow, ...] = ()
    statements: tuple[TopRecord, ...] = ()
    filling: bool = False
    """Whether the minute is not complete."""


def read_tables(store: Store, now_s: float | None = None) -> Tables:
    """The tables of the newest complete minute in a store; ``now_s``: if not the time now.

    Of the minute that is still filling only if the hour before it has no services.
    """
    metrics, covered = store.read(_metrics_and_time)
    if covered.newest is None:
        return Tables()
    known = {metric.name for metric in metrics if metric.active}
    complete_s = covered.complete_s(time.time() if now_s is None else now_s)
    minute, last = covered.newest, minute_of(complete_s - MINUTE_S)
    if minute > last and "service_cpm" in known:
        hour_before = bucket_start(minute) - timedelta(hours=1)
        for value in store.values("service_cpm", start=hour_before, end=last, limit=1):
            minute = value.bucket

    def values(metric: str) -> dict[str, Value]:
        if metric not in known:
            return {}
        minute_values = store.values(metric, grain=Grain.MINUTE, start=minute, end=minute)
        return {value.entity_id: value for value in minute_values}

    def latencies(metric: str) -> dict[str, Value]:
        """In milliseconds; from the metric in microseconds, where the store has that."""
        return {**values(metric), **_in_ms(values(f"{metric}_micros"))}

    statements: list[TopRecord] = []
    if STATEMENTS in store.top_streams():
        statements = store.top(STATEMENTS, grain=Grain.HOUR, bucket=minute // 100, n=5)
        statements.sort(key=lambda record: (-record.latency, record.time_us))
    services = service_rows(
        values("service_cpm"),
        latencies("service_resp_time"),
        latencies("service_percentile"),
        values("service_sla"),
        values("service_apdex"),
    )
    filling = bucket_end(minute).timestamp() > complete_s
    return Tables(minute, services, tuple(statements[:SHOWN_STATEMENTS]), filling)


def _metrics_and_time(snapshot: Snapshot) -> tuple[list[StoredMetric], CoveredTime]:
    metrics = snapshot.metrics()
    return metrics, snapshot.covered(metrics)


def _in_ms(values: Mapping[str, Value]) -> dict[str, Value]:
    def ms(micros: Any) -> Any:
        if isinstance(micros, dict):
            return {label: ms(number) for label, number in micros.items()}
        return micros / 1000

    return {entity: replace(value, value=ms(value.value)) for entity, value in values.items()}


def service_rows(
    cpm: Mapping[str, Value],
    average: Mapping[str, Value],
    percentile: Mapping[str, Value],
    sla: Mapping[str, Value],
    apdex: Mapping[str, Value],
) -> tuple[ServiceRow, ...]:
    """A row for each service, the busiest first."""

    def number(values: Mapping[str, Value], entity: str) -> Any:
        value = values.get(entity)
        if value is None:
            return None
        if isinstance(value.value, dict):
            return next((n for label, n in value.value.items() if _P99.fullmatch(label)), None)
        return value.value

    def share(values: Mapping[str, Value], entity: str) -> float | None:
        value = number(values, entity)
        return None if value is None else value / 10_000

    rows = [
        ServiceRow(
            value.entity_name,
            int(number(cpm, entity)),
            number(average, entity),
            number(percentile, entity),
            share(sla, entity),
            share(apdex, entity),
        )
        for entity, value in cpm.items()
    ]
    return tuple(sorted(rows, key=lambda row: (-row.cpm, row.name)))


class TableReader(threading.Thread):
    """Reads the tables once a second, on its own thread; ``tables`` has the newest."""

    def __init__(self, url: str) -> None:
        super().__init__(name="batchmill-tables", daemon=True)
        self.tables = Tables()
        self._url = url
        self._end = threading.Event()

    def run(self) -> None:
        """Read until the context ends; a store that is missing or busy is tried again."""
        store: Store | None = None
        while not self._end.wait(READ_S):
            try:
                if store is None:
                    store = open_store(self._url, retry=_PATIENCE, create=False)
                self.tables = read_tables(store)
            except BatchmillError:
                continue
        if store is not None:
            store.close()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        self.join(5.0)


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

    add("ingest", state.shown_state("ingest"), _ingest_text(ingest, spans_per_s))
    level = str(ingest.get("level", "NORMAL"))
    pressure = "" if level == "NORMAL" else f"; pressure {level}"
    add("queue", "", f"{count_of(ingest.get('queue_rows', 0), 'span')}{pressure}")
    add(
        "topic" if backlog.topic else "spool",
        "",
        f"{backlog.text}{_bytes(backlog)}"
        + (f", the oldest {backlog.oldest_s:.1f} s old" if backlog.count else ""),
    )
    add("pipeline", state.shown_state("pipeline"), _pipeline_text(state))
    for name in state.processes:
        if name == "web":
            is_in = state.state_of(name)
            add(name, is_in, str(state.web.get("address", "")) if is_in == "running" else "")
        elif name == "alerts":
            add(name, state.state_of(name), alerts_text(state.alerts))
        elif name not in ("ingest", "pipeline"):
            add(name, state.shown_state(name), export_text(state.exports.get(name), state.now))
    return table


def draw_tables(tables: Tables) -> RenderableType:
    """Services and slowest statements."""
    if tables.minute is None:
        return Text("no metrics yet", style="dim")
    services = Table(box=None, pad_edge=False, header_style="bold")
    services.add_column(Text(f"service, {_time_of_day(tables.minute, tables.filling)}"))
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


def _time_of_day(minute: int, filling: bool) -> str:
    return f"{minute // 100 % 100:02}:{minute % 100:02} UTC{' so far' if filling else ''}"


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


def _pipeline_text(state: RunState) -> str:
    progress, now, long = state.progress, state.now, state.long_batch
    runs = "" if long is None else f"; {long.text}"
    if progress.get("last_batch") is None:
        return f"nothing committed yet{runs}"
    at = progress.get("committed_at")
    text = f"batch {progress['last_batch']:,}"
    text += "" if at is None else f", committed {max(0.0, now - at):.0f} s ago"
    text += f"; {count_of(progress.get('spans', 0), 'span')} counted"
    duplicates = progress.get("duplicates", 0)
    return text + (f", {count_of(duplicates, 'duplicate')} dropped" if duplicates else "") + runs


def _number(value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:,.2f}" if value < 10 and value % 1 else f"{value:,.0f}"
