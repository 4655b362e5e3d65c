"""Latency from produce to consume, at a rate that leaves every queue idle between two items.

The producer sleeps from one item to the next against a fixed schedule. It does not spin for the
last microseconds: a spinning thread would hold the GIL that the consumer needs to wake up, and so
measure itself.
"""

from __future__ import annotations

import gc
import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from statistics import median, quantiles
from time import perf_counter
from typing import Any

from benchmarks.kit.report import Table, say, spread
from benchmarks.queue import peers
from benchmarks.queue.mill import MillPeer, roomy_config
from benchmarks.queue.peers import Handlers, Peer
from benchmarks.queue.work import SEED, STAMPED_CLASSES, Feed, Item, StampedItem, skewed_weights

QUEUE = "queue.Queue"
MILL = "batchmill"
FAST_RATE = 1_000
SLOW_RATE = 20

CONTENDERS: dict[str, Callable[[Handlers], Peer]] = {
    MILL: lambda handlers: MillPeer(handlers, roomy_config(), Feed.SINGLE),
    QUEUE: peers.plain_queue,
    "SimpleQueue, no bound": peers.simple_queue,
    "deque + Condition": peers.DequePeer,
    "polling, 1..50 ms back-off": peers.PollingPeer,
}


class Stopwatch:
    """A handler that notes how old its items are when they reach it."""

    def __init__(self) -> None:
        self.ages_s: list[float] = []

    def consume(self, batch: list[Item]) -> None:
        """Note the age of each item."""
        now = perf_counter()
        self.ages_s.extend([now - item.sent for item in batch if isinstance(item, StampedItem)])


@dataclass(frozen=True)
class Turn:
    """The two percentiles of one contender's turn, in microseconds."""

    p50_us: float
    p99_us: float


@dataclass(kw_only=True)
class Latency:
    """All turns of all contenders, by rate and name."""

    turns: dict[int, dict[str, list[Turn]]] = field(default_factory=dict)

    def p99_ratio(self, rate: int = FAST_RATE, name: str = MILL) -> float:
        """The p99 over ``queue.Queue``'s, taken turn by turn: the median over the turns."""
        both = zip(self.turns[rate][name], self.turns[rate][QUEUE], strict=True)
        return median(mine.p99_us / theirs.p99_us for mine, theirs in both)

    def tables(self) -> list[Table]:
        """One table a rate."""
        return [self._table(rate) for rate in self.turns]

    def _table(self, rate: int) -> Table:
        per_name = self.turns[rate]
        rows = [
            [
                name,
                f"{median(turn.p50_us for turn in turns):,.0f}",
                f"{median(turn.p99_us for turn in turns):,.0f}",
                spread((turn.p99_us for turn in turns), digits=0),
                f"{self.p99_ratio(rate, name):.2f}x",
            ]
            for name, turns in per_name.items()
        ]
        return Table(
            f"Latency from produce to consume at {rate:,} items/s, microseconds",
            f"Medians over {len(per_name[QUEUE])} interleaved turns of each turn's p50 and p99, and"
            " of the ratio within a turn. One producer, the 100 classes and skewed rates of the"
            " throughput table, two consumer threads.",
            ["contender", "p50", "p99", "p99 min..max", f"p99 to {QUEUE}"],
            rows,
        )

    def as_json(self) -> dict[str, Any]:
        """Every turn."""
        return {
            f"{rate}_items_per_s": {
                name: [{"p50_us": t.p50_us, "p99_us": t.p99_us} for t in turns]
                for name, turns in per_name.items()
            }
            for rate, per_name in self.turns.items()
        }


def measure(*, turns: int, fast_items: int, slow_items: int, seed: int) -> Latency:
    """Let the contenders take turns at both rates; the slow one, mostly waiting, gets fewer."""
    result = Latency()
    rng = random.Random(seed)
    for rate, items, count in (
        (FAST_RATE, fast_items, turns),
        (SLOW_RATE, slow_items, max(1, turns // 4)),
    ):
        say(f"latency: {rate:,} items/s")
        per_name: dict[str, list[Turn]] = {name: [] for name in CONTENDERS}
        for _ in range(count):
            for name in rng.sample(list(CONTENDERS), len(CONTENDERS)):
                per_name[name].append(_turn(CONTENDERS[name], items, rate))
        result.turns[rate] = per_name
    return result


def _turn(build: Callable[[Handlers], Peer], count: int, rate: int) -> Turn:
    stopwatch = Stopwatch()
    rng = random.Random(SEED)
    classes = rng.choices(STAMPED_CLASSES, skewed_weights(), k=count)
    items = [cls(0, number) for number, cls in enumerate(classes)]
    gc.collect()
    peer = build(dict.fromkeys(STAMPED_CLASSES, stopwatch))
    try:
        _produce_paced(peer, items, rate)
        peer.finish()
    finally:
        peer.close()
    if len(stopwatch.ages_s) != count:
        raise RuntimeError(f"{len(stopwatch.ages_s)} items arrived, {count} were produced")
    cuts = quantiles(stopwatch.ages_s, n=100)
    return Turn(p50_us=cuts[49] * 1e6, p99_us=cuts[98] * 1e6)


def _produce_paced(peer: Peer, items: list[Any], rate: int) -> None:
    put = peer.put
    due = perf_counter() + 0.05  # consumers come to rest first
    for item in items:
        ahead = due - perf_counter()
        if ahead > 0:
            time.sleep(ahead)
        item.sent = perf_counter()
        put(item)
        due += 1 / rate
