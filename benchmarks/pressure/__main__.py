"""Compare thresholds and the micro-batcher with their peers, in one process on the same work.

    python -m benchmarks.pressure [--quick] [--only cost,threads,asyncio] [--json PATH]

Prints tables and the goals with the measured values, and writes all results as JSON. A missed goal
is reported; the exit code is still 0.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from benchmarks.kit.command import Benchmark
from benchmarks.kit.goals import Goal, at_least, at_most
from benchmarks.kit.report import Result
from benchmarks.pressure import coroutines, threads
from benchmarks.pressure import cost as pressure_cost
from benchmarks.pressure.peers import ASYNC_BATCHER, EXECUTOR_LOOP, MILL, MILL_THRESHOLDS
from benchmarks.pressure.rates import Rates


def _goals(results: Mapping[str, Result]) -> list[Goal]:
    return [goal for name, result in results.items() for goal in _goals_of(name, result)]


def _goals_of(name: str, result: Result) -> Iterator[Goal]:
    match result:
        case pressure_cost.Cost():
            ratio = result.ratio(pressure_cost.BELOW)
            yield at_most("submit with thresholds, below WARNING, to without", ratio, 1.3)
        case Rates():
            if name == "threads":
                cost = result.best_ratio(MILL_THRESHOLDS)
                yield at_most("items/s without thresholds to with, worst case", cost, 1.3)
            peers = [EXECUTOR_LOOP] if name == "threads" else [ASYNC_BATCHER, EXECUTOR_LOOP]
            for peer in peers:
                what = f"{MILL} to {peer}, {name}, worst case"
                yield at_least(what, result.worst_ratio(peer), 1)


BENCHMARK = Benchmark(
    name="pressure",
    about="compare thresholds and the micro-batcher with their peers",
    full={
        "cost": lambda: pressure_cost.measure(repeats=15, submits=20_000),
        "threads": lambda: threads.measure(repeats=7, items=20_000),
        "asyncio": lambda: coroutines.measure(repeats=7, items_per_task=20),
    },
    quick={
        "cost": lambda: pressure_cost.measure(repeats=3, submits=5_000),
        "threads": lambda: threads.measure(repeats=2, items=5_000),
        "asyncio": lambda: coroutines.measure(repeats=2, items_per_task=4),
    },
    goals=_goals,
    goals_caption=(
        "Ratios are taken within a repeat, and a case's ratio is the median over its repeats."
        " 'Worst case' is the case with batchmill's lowest ratio."
        " A missed goal does not fail the run."
    ),
)
"""The full run takes about two minutes; the quick one shows that all runs, and is not to quote."""


if __name__ == "__main__":
    raise SystemExit(BENCHMARK.run())
