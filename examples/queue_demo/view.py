"""What the demo shows: rates and thread loads between two snapshots, and how they are drawn."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rich import box
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.measure import Measurement
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from batchmill.queue import BatchQueueStats

EXPLANATION = (
    "Four queues of a metrics pipeline, live: samples are merged by class in L1, again in L2, then "
    "written by JDBC; slow statements are ranked in TOPN. For this demo, L1 has 4 drain threads "
    "on any machine, and buffers are small."
)

RATE_WINDOW_S = 1.0
LOAD_WINDOW_S = 3.0


@dataclass(frozen=True, slots=True)
class Snapshot:
    """All queues at one moment."""

    at_s: float
    """Seconds since the start."""
    stats: tuple[BatchQueueStats, ...]
    """One per queue; the first is the queue whose thread load is shown."""


@dataclass(frozen=True, slots=True)
class Rate:
    """What a queue did per second."""

    accepted: float
    consumed: float


@dataclass(frozen=True, slots=True)
class Loads:
    """How busy each drain thread of a queue was between two snapshots."""

    shares: tuple[float, ...]
    """Per thread: the share of the time that it spent in handlers."""
    partitions: tuple[int, ...]
    """Per thread: how many partitions it had at the end."""

    @property
    def ratio(self) -> float | None:
        """Share of the busiest thread over that of the least busy; None while one had nothing."""
        return max(self.shares) / min(self.shares) if min(self.shares) > 0 else None


class Meter:
    """Computes rates and loads from snapshots, which are added in order of time."""

    def __init__(self, first: Snapshot) -> None:
        self._first = first
        self._recent: deque[Snapshot] = deque([first])
        self._last_static = first
        self._rebalanced: Snapshot | None = None

    def add(self, snapshot: Snapshot) -> None:
        """Add the next snapshot."""
        if snapshot.stats[0].rebalances == 0:
            self._last_static = snapshot
        elif snapshot.stats[0].rebalances != self.last.stats[0].rebalances:
            self._rebalanced = snapshot
        self._recent.append(snapshot)
        # Keeps one snapshot older than the window, so that a window is never shorter than it says.
        while snapshot.at_s - self._recent[1].at_s >= LOAD_WINDOW_S:
            self._recent.popleft()

    @property
    def last(self) -> Snapshot:
        """The newest snapshot."""
        return self._recent[-1]

    def rates(self) -> tuple[Rate, ...]:
        """Rates per queue over the last second, or over less at the start."""
        new = self.last
        old = self._at_least_back(RATE_WINDOW_S)
        passed_s = new.at_s - old.at_s
        if passed_s <= 0:
            return tuple(Rate(0.0, 0.0) for _ in new.stats)
        return tuple(
            Rate((b.accepted - a.accepted) / passed_s, (b.consumed - a.consumed) / passed_s)
            for a, b in zip(old.stats, new.stats, strict=True)
        )

    def loads_before(self) -> Loads | None:
        """From the start up to the first rebalance; up to now while there was none."""
        return _loads(self._first, self._last_static)

    def loads_after(self) -> Loads | None:
        """Since the latest rebalance, the last few seconds at most; None before the first."""
        if self._rebalanced is None:
            return None
        old = self._at_least_back(LOAD_WINDOW_S)
        return _loads(max(old, self._rebalanced, key=lambda snapshot: snapshot.at_s), self.last)

    def _at_least_back(self, window_s: float) -> Snapshot:
        for snapshot in reversed(self._recent):
            if self.last.at_s - snapshot.at_s >= window_s:
                return snapshot
        return self._recent[0]


def _loads(old: Snapshot, new: Snapshot) -> Loads | None:
    passed_s = new.at_s - old.at_s
    if passed_s <= 0:
        return None
    threads = list(zip(old.stats[0].threads, new.stats[0].threads, strict=True))
    return Loads(
        shares=tuple((b.busy_seconds - a.busy_seconds) / passed_s for a, b in threads),
        partitions=tuple(b.partitions for _, b in threads),
    )


def balances(stats: BatchQueueStats) -> bool:
    """Whether the queue consumed everything it accepted: nothing failed, nothing is left."""
    return stats.accepted == stats.consumed and not (
        stats.pending or stats.failed or stats.dropped["unregistered"]
    )


class Bar:
    """A bar as wide as its column; block characters, or ASCII where the output has no others."""

    NARROWEST = 6
    WIDEST = 48
    _EIGHTHS = " ▏▎▍▌▋▊▉"

    def __init__(self, share: float, style: str) -> None:
        self._share = min(1.0, max(0.0, share))
        self._style = style

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        return Measurement(self.NARROWEST, self.WIDEST)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield self.draw(min(options.max_width, self.WIDEST), ascii_only=options.ascii_only)

    def draw(self, width: int, *, ascii_only: bool = False) -> Text:
        """The bar in ``width`` characters; a share above 0 never looks like 0."""
        if ascii_only:
            full = min(width, round(self._share * width + 0.49))
            return Text("#" * full, self._style).append("." * (width - full), "bright_black")
        eighths = round(self._share * width * 8)
        if self._share > 0:
            eighths = max(1, eighths)
        full, rest = divmod(eighths, 8)
        blocks = "█" * full + (self._EIGHTHS[rest] if rest else "")
        return Text(blocks, self._style).append("░" * (width - len(blocks)), "bright_black")


def frame(meter: Meter, *, seconds: float, phase: str) -> RenderableType:
    """The live view: one row per queue, and L1's thread load before and after a rebalance."""
    title = Table.grid(expand=True)
    title.add_column(no_wrap=True)
    title.add_column(justify="right", no_wrap=True)
    clock = f"{min(meter.last.at_s, seconds):.1f} of {seconds:g} s"
    if meter.last.at_s < seconds:
        clock += ", Ctrl-C ends it"
    title.add_row(Text("batchmill: four queues", "bold"), Text(clock, "bright_black"))
    loads = Table.grid(expand=True, padding=(0, 1, 0, 0), pad_edge=False)
    loads.add_column(ratio=1)
    loads.add_column(ratio=1)
    after = meter.loads_after()
    loads.add_row(
        load_panel("L1 load before" if after else "L1 load now", meter.loads_before()),
        load_panel("L1 load after", after),
    )
    return Group(
        title,
        Text(EXPLANATION, "bright_black"),
        Text(),
        queue_table(meter),
        Text(),
        Text(phase, "bold"),
        loads,
        Text(),  # an empty line for the cursor and the ^C that a terminal echoes
    )


def queue_table(meter: Meter) -> Table:
    """One row per queue: depth, rates, drops, threads and partitions."""
    table = _table()
    table.add_column("queue", no_wrap=True)
    table.add_column("depth", ratio=1, min_width=Bar.NARROWEST)
    table.add_column("items", justify="right", min_width=5)
    table.add_column("in/s", justify="right", min_width=6)
    table.add_column("out/s", justify="right", min_width=6)
    table.add_column("dropped", justify="right", min_width=11)
    table.add_column("thr.", justify="right")
    table.add_column("part.", justify="right")
    table.add_column("moved", justify="right", min_width=7)
    for stats, rate in zip(meter.last.stats, meter.rates(), strict=True):
        used = stats.total_used / stats.capacity
        drops = drop_text(stats.dropped)
        table.add_row(
            Text(stats.name, "cyan"),
            Bar(used, "red" if used > 0.5 else "yellow" if used > 0.2 else "green"),
            f"{stats.total_used:,}",
            f"{rate.accepted:,.0f}",
            f"{rate.consumed:,.0f}",
            Text(drops, "red" if drops != "0" else "bright_black"),
            str(len(stats.threads)),
            str(len(stats.partitions)),
            moves_text(stats),
        )
    return table


def load_panel(title: str, loads: Loads | None) -> Panel:
    """How busy each drain thread is: one bar per thread, and the ratio of busiest to least busy."""
    if loads is None:
        return Panel(
            Text("\nthe balancer has not moved\nanything yet\n", "bright_black"),
            title=Text(title, "bright_black"),
            title_align="left",
            border_style="bright_black",
        )
    rows = Table.grid(expand=True, padding=(0, 1, 0, 0), pad_edge=False)
    rows.add_column(no_wrap=True)
    rows.add_column(ratio=1)
    rows.add_column(justify="right", no_wrap=True, min_width=5)
    rows.add_column(justify="right", no_wrap=True)
    for index, (share, partitions) in enumerate(zip(loads.shares, loads.partitions, strict=True)):
        rows.add_row(f"{index}", Bar(share, "blue"), f"{share:.0%}", f"{partitions} part.")
    uneven = loads.ratio is None or loads.ratio > 1.15
    style = "yellow" if uneven else "green"
    heading = Text(f"{title}: max/min {ratio_text(loads)}", f"bold {style}")
    return Panel(rows, title=heading, title_align="left", border_style=style)


def summary(
    stats: Sequence[BatchQueueStats],
    *,
    rows: int,
    samples: int,
    before: Loads | None,
    after: Loads | None,
) -> RenderableType:
    """The table and checks at the end: whether everything accepted was consumed.

    ``rows`` and ``samples`` are counted by the database.
    """
    table = _table()
    table.add_column("queue", no_wrap=True)
    for heading in (
        "accepted",
        "consumed",
        "failed",
        "dropped:\nfull",
        "\nstopped",
        "no\nhandler",
        "pending",
    ):
        table.add_column(heading, justify="right", no_wrap=True)
    for queue in stats:
        dropped = queue.dropped
        outcomes = (queue.accepted, queue.consumed, queue.failed)
        reasons = (dropped["full"], dropped["stopped"], dropped["unregistered"])
        table.add_row(
            Text(queue.name, "cyan"),
            *[f"{count:,}" for count in (*outcomes, *reasons, queue.pending)],
        )
    checks = [_Check(balances(queue), _balance_line(queue)) for queue in stats]
    merged = stats[0].consumed
    checks.append(
        _Check(
            samples == merged,
            f"end to end: the {rows:,} rows written stand for {samples:,} samples,\n"
            f"and L1 consumed {merged:,}",
        )
    )
    lines: list[RenderableType] = [Text(), *checks]
    if any(queue.dropped["full"] or queue.dropped["stopped"] for queue in stats):
        lines.append(Text("What was dropped as full or stopped was never accepted."))
    if before is not None:
        lines += [Text(), Text(_rebalance_line(stats[0], before, after))]
    return Group(table, *lines)


def plain_line(meter: Meter) -> str:
    """The live view as one line of text, for output that is no terminal."""
    parts = []
    for stats, rate in zip(meter.last.stats, meter.rates(), strict=True):
        part = f"{short_name(stats.name)} {rate.accepted:,.0f}/s in, {rate.consumed:,.0f}/s out"
        drops = drop_text(stats.dropped)
        parts.append(part + (f", dropped {drops}" if drops != "0" else ""))
    loads = meter.loads_after() or meter.loads_before()
    if loads is not None:
        parts.append(f"L1 threads max/min {ratio_text(loads)}")
    return f"{meter.last.at_s:4.1f} s  " + "; ".join(parts)


def drop_text(dropped: Mapping[str, int]) -> str:
    """The reasons that occurred with their counts, or 0."""
    return ", ".join(f"{reason} {count:,}" for reason, count in dropped.items() if count) or "0"


def moves_text(stats: BatchQueueStats) -> str:
    """Partitions moved, and in how many rebalances; a dash for a queue with one thread."""
    if len(stats.threads) < 2:
        return "-"
    return f"{stats.moved_partitions} in {stats.rebalances}" if stats.rebalances else "0"


def ratio_text(loads: Loads) -> str:
    """Max/min with two decimals."""
    return "-" if loads.ratio is None else f"{loads.ratio:.2f}"


def short_name(name: str) -> str:
    """The distinct part of a queue's name: L1 for METRICS_L1_AGGREGATION."""
    return name.removeprefix("METRICS_").partition("_")[0]


class _Check:
    """A line with a mark in front of it."""

    def __init__(self, holds: bool, text: str) -> None:
        self._holds = holds
        self._text = text

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        good, bad = ("ok ", "BAD") if options.ascii_only else ("✓", "✗")
        mark = Text(good, "bold green") if self._holds else Text(bad, "bold red")
        grid = Table.grid(padding=(0, 1, 0, 0))
        grid.add_row(mark, self._text)
        yield grid


def _balance_line(stats: BatchQueueStats) -> str:
    sign = "=" if stats.accepted == stats.consumed else "is not"
    return f"{stats.name}: accepted {stats.accepted:,} {sign} consumed {stats.consumed:,}"


def _rebalance_line(l1: BatchQueueStats, before: Loads, after: Loads | None) -> str:
    text = f"L1's busiest thread had {ratio_text(before)} times the load of its least busy one"
    if after is None:
        return f"{text}; nothing was rebalanced."
    return (
        f"{text}\nbefore the rebalance, and {ratio_text(after)} times after it "
        f"({l1.moved_partitions} of {len(l1.partitions)} partitions moved)."
    )


def _table() -> Table:
    return Table(
        box=box.SIMPLE_HEAD,
        show_edge=False,
        pad_edge=False,
        padding=(0, 0),
        expand=True,
        header_style="bold",
    )
