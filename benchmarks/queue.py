"""Compare batchmill's queue with its peers, in one process and on the same work.

    python -m benchmarks.queue [--quick] [--only throughput,latency,...] [--json PATH]

Prints tables and the goals with the measured values, and writes all results as JSON. A missed goal
is reported; the exit code is still 0.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path
from time import perf_counter

from benchmarks import goals, idle, latency, memory, rebalance, throughput
from benchmarks.machine import machine, machine_line, use_cores
from benchmarks.report import Result, say, write_json
from benchmarks.work import SEED

DEFAULT_JSON = Path(__file__).parent / "results" / "queue.json"

FULL: dict[str, Callable[[], Result]] = {
    "throughput": lambda: throughput.measure(repeats=5, seconds_per_run=0.3, seed=SEED),
    "latency": lambda: latency.measure(turns=9, fast_items=800, slow_items=30, seed=SEED),
    "idle": lambda: idle.measure(repeats=2, seconds=2),
    "memory": lambda: memory.measure(items=1_000_000),
    "rebalance": lambda: rebalance.measure(repeats=3, settle_s=1.5, seconds=1.5),
}
"""Under five minutes together."""

QUICK: dict[str, Callable[[], Result]] = {
    "throughput": lambda: throughput.measure(repeats=1, seconds_per_run=0.1, seed=SEED),
    "latency": lambda: latency.measure(turns=3, fast_items=300, slow_items=20, seed=SEED),
    "idle": lambda: idle.measure(repeats=1, seconds=0.8),
    "memory": lambda: memory.measure(items=100_000),
    "rebalance": lambda: rebalance.measure(repeats=1, settle_s=1.5, seconds=1.0),
}
"""Under a minute together: to see that all runs, not to quote."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what was asked for, print it, write it down."""
    options = _parser().parse_args(arguments)
    benchmarks = QUICK if options.quick else FULL
    if options.cores:
        use_cores(options.cores)
    started = perf_counter()
    print(machine_line())
    results: dict[str, Result] = {}
    for name in options.only:
        results[name] = benchmarks[name]()
        for table in results[name].tables():
            print("\n" + table.render(), flush=True)
    reached = goals.goals_of(results)
    print("\n" + goals.table_of(reached).render())
    document = {
        "machine": machine(),
        "quick": options.quick,
        "goals": [goal.as_json() for goal in reached],
        **{name: result.as_json() for name, result in results.items()},
    }
    write_json(options.json, document)
    say(f"took {perf_counter() - started:.0f} s; results are in {options.json}")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.queue", description="compare batchmill's queue with its peers"
    )
    parser.add_argument(
        "--quick", action="store_true", help="less than a minute, too short to quote"
    )
    parser.add_argument(
        "--only",
        type=_names,
        default=list(FULL),
        metavar="NAME,NAME",
        help=f"some of: {', '.join(FULL)}",
    )
    parser.add_argument(
        "--cores",
        type=int,
        metavar="N",
        help="run on N cores only: on one, lock hand-overs between cores no longer slow down peers",
    )
    parser.add_argument("--json", type=Path, default=DEFAULT_JSON, help="file for the results")
    return parser


def _names(text: str) -> list[str]:
    names = text.split(",")
    for name in names:
        if name not in FULL:
            raise argparse.ArgumentTypeError(f"{name!r} is none of {', '.join(FULL)}")
    return names


if __name__ == "__main__":
    raise SystemExit(main())
