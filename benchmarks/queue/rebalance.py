"""Rebalancing: 4 drain threads, 16 producers, 100 classes, skewed rates.

Static assignment against the throughput-weighted balancer, on the same work. A handler waits a
fixed time for each item, as one that writes to a disk or a socket would, so that drain threads run
side by side even under the GIL. Producers always have more: the busiest thread sets the pace of
all, and evening out the load shows as throughput.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from batchmill import (
    BatchQueue,
    BatchQueueSettings,
    BatchQueueStats,
    DrainBalancer,
    PartitionPolicy,
    ThreadPolicy,
)
from benchmarks.kit.report import Table, say, spread
from benchmarks.queue.mill import unique_name
from benchmarks.queue.peers import JOIN_TIMEOUT_S
from benchmarks.queue.work import ITEM_CLASSES, Feed, Item, Work, build_work

DRAIN_THREADS = 4
PRODUCERS = 16
BUFFER_SIZE = 500
MAX_BATCH = 100
ITEM_COST_US = 40
REBALANCE_INTERVAL_MS = 250
STATIC, REBALANCED = "static", "rebalanced"


class WaitingHandler:
    """Waits ITEM_COST_US for each item, on average exactly.

    A sleep takes longer than it is told; what it takes too long is taken off the next ones. One
    handler is never called by two threads at once, so the debt needs no lock.
    """

    SHORTEST_SLEEP_S = 0.001

    def __init__(self, hurry: threading.Event) -> None:
        self._hurry = hurry
        self._debt_s = 0.0

    def consume(self, batch: list[Item]) -> None:
        """Take the time that the batch costs."""
        self._debt_s += len(batch) * ITEM_COST_US / 1e6
        if self._debt_s < self.SHORTEST_SLEEP_S or self._hurry.is_set():
            return
        started = time.perf_counter()
        time.sleep(self._debt_s)
        self._debt_s -= time.perf_counter() - started


@dataclass(frozen=True, kw_only=True)
class Phase:
    """What was seen between two looks at the queue's statistics."""

    items_per_s: float
    items: list[int]
    busy_s: list[float]
    rebalances: int
    moved: int

    @property
    def item_ratio(self) -> float:
        """Items of the busiest thread over those of the least busy one."""
        return max(self.items) / max(1, min(self.items))

    @property
    def busy_ratio(self) -> float:
        """The same for time spent in handlers."""
        return max(self.busy_s) / max(1e-9, min(self.busy_s))


@dataclass(kw_only=True)
class Rebalance:
    """One phase a repeat, static and rebalanced."""

    phases: dict[str, list[Phase]] = field(
        default_factory=lambda: {STATIC: [], REBALANCED: []},
    )

    def load_ratio(self, mode: str) -> float:
        """Max/min load of the drain threads, in items; the median over repeats."""
        return median(phase.item_ratio for phase in self.phases[mode])

    def gains(self) -> list[float]:
        """Throughput of rebalanced over static, repeat by repeat."""
        both = zip(self.phases[REBALANCED], self.phases[STATIC], strict=True)
        return [mine.items_per_s / static.items_per_s for mine, static in both]

    def tables(self) -> list[Table]:
        """One table."""
        rows = [
            [
                mode,
                f"{median(p.items_per_s for p in phases):,.0f}",
                f"{median(p.item_ratio for p in phases):.2f}x",
                spread(p.item_ratio for p in phases),
                f"{median(p.busy_ratio for p in phases):.2f}x",
                f"{median(p.rebalances for p in phases):.0f}",
                f"{median(p.moved for p in phases):.0f}",
            ]
            for mode, phases in self.phases.items()
        ]
        gain = f"{median(self.gains()):.2f}x ({spread(self.gains())})"
        return [
            Table(
                "Rebalancing: static against throughput_weighted()",
                f"{DRAIN_THREADS} drain threads, {PRODUCERS} producers, {len(ITEM_CLASSES)} classes"
                f" with Zipf rates, registered in that order; a handler waits {ITEM_COST_US} us an"
                " item. Load is max/min over the drain threads once the balancer has settled."
                f" Throughput, rebalanced to static: {gain}.",
                ["", "items/s", "load, items", "min..max", "load, time", "rebalances", "moved"],
                rows,
            )
        ]

    def as_json(self) -> dict[str, Any]:
        """Every phase."""
        return {
            "throughput_gains": self.gains(),
            **{
                mode: [
                    {
                        **vars(phase),
                        "item_ratio": phase.item_ratio,
                        "busy_ratio": phase.busy_ratio,
                    }
                    for phase in phases
                ]
                for mode, phases in self.phases.items()
            },
        }


def measure(*, repeats: int, settle_s: float, seconds: float) -> Rebalance:
    """Static and rebalanced in turn: settle, then look for ``seconds``."""
    result = Rebalance()
    work = build_work(Feed.SINGLE, PRODUCERS)
    for repeat in range(repeats):
        say(f"rebalance: repeat {repeat + 1} of {repeats}")
        for mode, phases in result.phases.items():
            phases.append(_phase(_config(mode), work, settle_s, seconds))
    return result


def _config(mode: str) -> BatchQueueSettings:
    return BatchQueueSettings(
        threads=ThreadPolicy.fixed(DRAIN_THREADS),
        partitions=PartitionPolicy.adaptive(),
        buffer_size=BUFFER_SIZE,
        max_batch=MAX_BATCH,
        balancer=DrainBalancer.throughput_weighted() if mode == REBALANCED else None,
        rebalance_interval_ms=REBALANCE_INTERVAL_MS,
    )


def _phase(config: BatchQueueSettings, work: Work, settle_s: float, seconds: float) -> Phase:
    hurry = threading.Event()
    queue: BatchQueue[Item] = BatchQueue(unique_name(), config)
    for cls in ITEM_CLASSES:  # the most frequent one first; partitions are dealt out in turn
        queue.add_handler(cls, WaitingHandler(hurry))
    producers = [
        threading.Thread(target=_produce, args=(queue, mine), daemon=True) for mine in work.helpings
    ]
    for thread in producers:
        thread.start()
    try:
        time.sleep(settle_s)
        before, started = queue.stats(), time.perf_counter()
        time.sleep(seconds)
        after, elapsed = queue.stats(), time.perf_counter() - started
    finally:
        hurry.set()  # what is still queued need not be waited for
        queue.shutdown()
    for thread in producers:
        thread.join(JOIN_TIMEOUT_S)
    _check_balance(queue.stats())
    return _compare(before, after, elapsed)


def _produce(queue: BatchQueue[Item], items: Sequence[Item]) -> None:
    """Produce round after round until the queue is shut down."""
    produce = queue.produce
    while all(produce(item) for item in items):
        pass


def _compare(before: BatchQueueStats, after: BatchQueueStats, elapsed: float) -> Phase:
    both = list(zip(before.threads, after.threads, strict=True))
    return Phase(
        items_per_s=(after.consumed - before.consumed) / elapsed,
        items=[late.items - early.items for early, late in both],
        busy_s=[late.busy_seconds - early.busy_seconds for early, late in both],
        rebalances=after.rebalances,
        moved=after.moved_partitions,
    )


def _check_balance(stats: BatchQueueStats) -> None:
    if stats.accepted != stats.consumed or stats.failed or stats.pending:
        raise RuntimeError(f"{stats.accepted} items were accepted, {stats.consumed} consumed")
