"""The demo's second part: a burst that crosses all three thresholds of a micro-batcher."""

from __future__ import annotations

import time
from dataclasses import dataclass

from rich import box
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from batchmill.batcher import BatcherSettings, BatcherStats, MicroBatcher
from batchmill.pressure import QueueAction, QueueThresholdSettings, ThresholdLevel, strategies
from examples.queue_demo.view import Bar

BATCH = 20
BATCH_S = 0.02
BURST = 800
MAX_QUEUE_SIZE = 200
REFRESH_S = 0.1
EXPLANATION = (
    f"Pressure: {BURST} orders at once for a backend that takes {BATCH} every "
    f"{BATCH_S * 1000:.0f} ms. Express orders are accepted to the hard capacity; the others are "
    "accepted at WARNING, rejected at CRITICAL and dropped at CRITICAL_PLUS."
)


@dataclass(frozen=True, slots=True)
class Order:
    """An order to send; every second one is express."""

    number: int

    @property
    def express(self) -> bool:
        return self.number % 2 == 0


def thresholds() -> QueueThresholdSettings:
    """Levels at 100, 200 and 300 waiting orders; the hard capacity is 400."""
    by_kind = strategies.by_priority(
        lambda order: order.express,
        {True: strategies.accept()},
        default=strategies.graceful_degradation(),
    )
    return QueueThresholdSettings(
        max_queue_size=MAX_QUEUE_SIZE, critical_handler=by_kind, retry_after_s=BATCH_S
    )


def run(console: Console) -> bool:
    """Show the burst; returns whether every order was answered exactly once."""
    console.print(Text(EXPLANATION))
    console.print()
    batcher: MicroBatcher[Order] = MicroBatcher(
        _send, BatcherSettings(batch_size=BATCH), thresholds(), name="orders"
    )
    with batcher:
        answers = batcher.submit_many(map(Order, range(BURST)))
        if console.is_terminal and not console.is_dumb_terminal:
            _watch(batcher, console)
    stats = batcher.stats()
    console.print(decisions(stats))
    outcomes = (stats.succeeded, stats.rejected, stats.dropped)
    balanced = stats.submitted == sum(outcomes) and all(answer.done() for answer in answers)
    mark = "✓" if balanced and not console.options.ascii_only else "ok" if balanced else "WRONG"
    console.print(
        f"{mark} submitted {stats.submitted:,} = sent {stats.succeeded:,} + "
        f"rejected {stats.rejected:,} + dropped {stats.dropped:,}; all answered"
    )
    return balanced


def _send(orders: list[Order]) -> list[int]:
    time.sleep(BATCH_S)
    return [order.number for order in orders]


def _watch(batcher: MicroBatcher[Order], console: Console) -> None:
    with Live(console=console, auto_refresh=False, transient=True) as live:
        while batcher.queue_depth:
            live.update(_frame(batcher.stats()), refresh=True)
            time.sleep(REFRESH_S)


def _frame(stats: BatcherStats) -> RenderableType:
    row = Table.grid(padding=(0, 1))
    row.add_column(width=14)
    row.add_column(width=5, justify="right")
    row.add_column(ratio=1)
    level = stats.thresholds.level if stats.thresholds is not None else None
    most = thresholds().hard_capacity
    style = {None: "green", 1: "yellow", 2: "red", 3: "bold red"}[level]
    name = level.name if level is not None else "no pressure"
    row.add_row(Text(name, style), f"{stats.queue_depth}", Bar(stats.queue_depth / most, style))
    return Group(row, decisions(stats))


def decisions(stats: BatcherStats) -> Table:
    """How often each action was decided at each level."""
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1))
    table.add_column("level", no_wrap=True)
    table.add_column("from depth", justify="right")
    for action in QueueAction:
        table.add_column(action.name.lower(), justify="right")
    counts = stats.thresholds.decisions if stats.thresholds is not None else {}
    depths = thresholds().thresholds
    for level in ThresholdLevel:
        row = [f"{counts.get((level, action), 0):,}" for action in QueueAction]
        table.add_row(level.name, f"{depths.of(level)}", *row)
    return table
