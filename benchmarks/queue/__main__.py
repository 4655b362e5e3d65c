"""Compare batchmill's queue with its peers, in one process and on the same work.

    python -m benchmarks.queue [--quick] [--only throughput,latency,...] [--cores N] [--json PATH]

Prints tables and the goals with the measured values, and writes all results as JSON. A missed goal
is reported; the exit code is still 0. On one core, lock hand-overs between cores no longer slow
down peers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from statistics import median

from benchmarks.kit.command import Benchmark
from benchmarks.kit.goals import Goal, at_least, at_most
from benchmarks.kit.report import Result
from benchmarks.queue import contenders, idle, latency, memory, rebalance, throughput
from benchmarks.queue.idle import Idle
from benchmarks.queue.latency import Latency
from benchmarks.queue.memory import Memory
from benchmarks.queue.rebalance import REBALANCED, STATIC, Rebalance
from benchmarks.queue.standings import Throughput
from benchmarks.queue.work import SEED

FULL: Mapping[str, Callable[[], Result]] = {
    "throughput": lambda: throughput.measure(repeats=5, seconds_per_run=0.3, seed=SEED),
    "latency": lambda: latency.measure(turns=9, fast_items=800, slow_items=30, seed=SEED),
    "idle": lambda: idle.measure(repeats=2, seconds=2),
    "memory": lambda: memory.measure(items=1_000_000),
    "rebalance": lambda: rebalance.measure(repeats=3, settle_s=1.5, seconds=1.5),
}
"""Under five minutes together."""

QUICK: Mapping[str, Callable[[], Result]] = {
    "throughput": lambda: throughput.measure(repeats=1, seconds_per_run=0.1, seed=SEED),
    "latency": lambda: latency.measure(turns=3, fast_items=300, slow_items=20, seed=SEED),
    "idle": lambda: idle.measure(repeats=1, seconds=0.8),
    "memory": lambda: memory.measure(items=100_000),
    "rebalance": lambda: rebalance.measure(repeats=1, settle_s=1.5, seconds=1.0),
}
"""Under a minute together: to see that all runs, not to quote."""


def goals_of(results: Mapping[str, Result]) -> list[Goal]:
    """The goals that these results say something about."""
    goals: list[Goal] = []
    for result in results.values():
        match result:
            case Throughput():
                goals += _throughput_goals(result)
            case Latency():
                p99 = result.p99_ratio()
                goals.append(at_most("p99 latency to queue.Queue's, 1,000 items/s", p99, 1))
            case Idle():
                percent = result.worst_of_fifty()
                goals.append(at_most("50 idle queues, of a core", percent, 0.5, " %"))
            case Memory():
                size = result.worst_of_mill()
                goals.append(at_most("memory per queued item, beyond it", size, 24, " B"))
            case Rebalance():
                goals += _rebalance_goals(result)
    return goals


def _throughput_goals(result: Throughput) -> Iterator[Goal]:
    for name, peer, limit in (
        (contenders.MILL, contenders.QUEUE, 12.0),
        (contenders.MILL_TIGHT, contenders.QUEUE, 12.0),
        (contenders.MILL, contenders.OPENTELEMETRY, 3.0),
        (contenders.MILL, contenders.SIMPLE_QUEUE_PLAIN, 1.3),
        (contenders.MILL, contenders.SIMPLE_QUEUE, 1.3),
        (contenders.MILL_BULK, contenders.QUEUE, 60.0),
        (contenders.MILL_BULK_TIGHT, contenders.QUEUE, 60.0),
        (contenders.MILL_MIXED, contenders.MILL_LOOP, 2.0),
    ):
        ratio = result.ratio(name, peer)
        value = None if ratio is None else ratio.median
        yield at_least(f"{name} to {peer}", value, limit, "x")


def _rebalance_goals(result: Rebalance) -> list[Goal]:
    static, rebalanced = result.load_ratio(STATIC), result.load_ratio(REBALANCED)
    return [
        at_least("max/min load, static (or there is no case)", static, 1.25),
        at_most("max/min load, rebalanced", rebalanced, 1.1),
        at_least("throughput, rebalanced to static", median(result.gains()), 1.15),
    ]


BENCHMARK = Benchmark(
    name="queue",
    about="compare batchmill's queue with its peers",
    full=FULL,
    quick=QUICK,
    goals=goals_of,
    goals_caption="Throughput: the median over 1, 4 and 16 producers. 'tight' has the peer's bound"
    " in all; without it batchmill has that bound in each partition."
    " A missed goal does not fail the run.",
)

if __name__ == "__main__":
    raise SystemExit(BENCHMARK.run())
