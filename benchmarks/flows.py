"""Compare flow-ordered dispatch with its peers, in one process and on the same work.

    python -m benchmarks.flows [--quick] [--only throughput,wait] [--json PATH]

Prints tables and the goals with the measured values, and writes all results as JSON. A missed goal
is reported; the exit code is still 0.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path
from time import perf_counter

from benchmarks import flows_throughput, flows_wait
from benchmarks.goals import Goal
from benchmarks.machine import machine, machine_line
from benchmarks.report import Result, Table, say, write_json

DEFAULT_JSON = Path(__file__).parent / "results" / "flows.json"

FULL: dict[str, Callable[[], Result]] = {
    "throughput": lambda: flows_throughput.measure(repeats=7, flows=10_000),
    "wait": lambda: flows_wait.measure(turns=11, seconds=0.5, simulated_seconds=60),
}
"""Two minutes together on a quiet machine."""

QUICK: dict[str, Callable[[], Result]] = {
    "throughput": lambda: flows_throughput.measure(repeats=1, flows=2_000),
    "wait": lambda: flows_wait.measure(turns=2, seconds=0.3, simulated_seconds=10),
}
"""Under half a minute together: to see that all runs, not to quote."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what was asked for, print it, write it down."""
    options = _parser().parse_args(arguments)
    benchmarks = QUICK if options.quick else FULL
    started = perf_counter()
    print(machine_line())
    results: dict[str, Result] = {}
    for name in options.only:
        results[name] = benchmarks[name]()
        for table in results[name].tables():
            print("\n" + table.render(), flush=True)
    goals = list(_goals(results))
    print("\n" + _table_of(goals).render())
    document = {
        "machine": machine(),
        "quick": options.quick,
        "goals": [goal.as_json() for goal in goals],
        **{name: result.as_json() for name, result in results.items()},
    }
    write_json(options.json, document)
    say(f"took {perf_counter() - started:.0f} s; results are in {options.json}")
    return 0


def _goals(results: dict[str, Result]) -> list[Goal]:
    goals = []
    for result in results.values():
        match result:
            case flows_throughput.Throughput():
                goals.append(
                    Goal(
                        what="throughput to an executor per worker, keyed by hash",
                        value=result.worst_ratio(flows_throughput.EXECUTORS),
                        limit=1,
                        at_least=True,
                        unit="x",
                    )
                )
            case flows_wait.Waits():
                real, simulated = flows_wait.GOAL_CASE, flows_wait.SIMULATED_GOAL_CASE
                for where, value in (
                    (f"{real}", result.seed_to_ours(real)),
                    (f"{simulated}, simulated", result.seed_to_ours_simulated(simulated)),
                ):
                    goals.append(
                        Goal(
                            what=f"p99 wait of the seed's rule to ours, {where}",
                            value=value,
                            limit=2,
                            at_least=True,
                            unit="x",
                        )
                    )
    return goals


def _table_of(goals: list[Goal]) -> Table:
    return Table(
        "Goals",
        "Throughput: the smallest of the medians over all handlers and producer counts. Wait: the"
        " median over the turns. A missed goal does not fail the run.",
        ["goal", "limit", "measured", ""],
        [goal.row() for goal in goals],
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.flows",
        description="compare flow-ordered dispatch with its peers",
    )
    parser.add_argument("--quick", action="store_true", help="a run of seconds, too short to quote")
    parser.add_argument(
        "--only",
        type=_names,
        default=list(FULL),
        metavar="NAME,NAME",
        help=f"some of: {', '.join(FULL)}",
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
