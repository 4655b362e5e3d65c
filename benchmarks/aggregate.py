"""Compare aggregation in the process with its peers, on the same events, in one run.

    python -m benchmarks.aggregate [--quick] [--only throughput,growth,memory] [--json PATH]

Events are produced by one thread and merged into the states of six metrics (calls per minute,
average, percentiles, success rate, apdex, histogram) of 1,000 services: with ``batchmill.Embedded``
and with its peers. The results of each are verified. Prints tables and the goals with the measured
values, and writes all results as JSON. A missed goal is reported; the exit code is still 0.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from time import perf_counter

from benchmarks import aggregate_memory, aggregate_throughput
from benchmarks.aggregate_peers import EMIT, EMIT_MANY, PROMETHEUS
from benchmarks.goals import Goal
from benchmarks.machine import machine, machine_line
from benchmarks.report import Result, Table, say, write_json

DEFAULT_JSON = Path(__file__).parent / "results" / "aggregate.json"

FULL: dict[str, Callable[[], Result]] = {
    "throughput": lambda: aggregate_throughput.measure(repeats=5, calls=500_000),
    "growth": lambda: aggregate_throughput.measure_growth(repeats=5, calls=300_000),
    "memory": lambda: aggregate_memory.measure(entities=1_000, minutes=20),
}
"""Three minutes together on a quiet machine."""

QUICK: dict[str, Callable[[], Result]] = {
    "throughput": lambda: aggregate_throughput.measure(repeats=1, calls=50_000),
    "growth": lambda: aggregate_throughput.measure_growth(repeats=1, calls=50_000),
    "memory": lambda: aggregate_memory.measure(entities=1_000, minutes=3),
}
"""Half a minute together: to see that all runs, not to quote."""


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
    goals = [goal for result in results.values() for goal in _goals(result)]
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


def _goals(result: Result) -> list[Goal]:
    match result:
        case aggregate_throughput.Throughput():
            missing = PROMETHEUS in result.missing
            return [
                Goal(
                    what="emit_many to merged state",
                    value=median(result.rates(EMIT_MANY)) / 1e6,
                    limit=1,
                    at_least=True,
                    unit=" million/s",
                ),
                Goal(
                    what="emit to prometheus_client, per event",
                    value=None if missing else median(result.ratios(EMIT, PROMETHEUS)),
                    limit=5,
                    at_least=True,
                    unit="x",
                ),
            ]
        case aggregate_throughput.Growth():
            what = f"time of {aggregate_throughput.MORE} times the metrics"
            value = median(result.ratios())
            return [Goal(what=what, value=value, limit=4, at_least=False, unit="x")]
        case aggregate_memory.Memory():
            what = "memory per entity and minute, to the states' own bytes"
            return [Goal(what=what, value=result.worst, limit=2, at_least=False, unit="x")]
    return []


def _table_of(goals: list[Goal]) -> Table:
    return Table(
        "Goals",
        "Medians over the repeats; ratios are taken within a repeat. A missed goal does not fail"
        " the run.",
        ["goal", "limit", "measured", ""],
        [goal.row() for goal in goals],
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.aggregate",
        description="compare aggregation in the process with its peers",
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
