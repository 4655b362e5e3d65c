"""Compare the metrics pipeline with its peers, on the same files in one run.

    python -m benchmarks.pipeline [--events N] [--quick] [--only versus,small,...] [--json PATH]

Prints tables and the goals with the measured values, and writes all results as JSON. A missed goal
is reported; the exit code is still 0. Different
results of the contenders end the run with an error. Needs Java and the dependency group ``bench``.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter

from pyspark.sql import SparkSession

from benchmarks import pipeline_growth, pipeline_small, pipeline_versus
from benchmarks.goals import Goal
from benchmarks.machine import machine, machine_line
from benchmarks.pipeline_ours import start_spark
from benchmarks.report import Result, Table, say, write_json

DEFAULT_JSON = Path(__file__).parent / "results" / "pipeline.json"


@dataclass(frozen=True, kw_only=True)
class Size:
    """How much is done."""

    events: int
    rounds: int
    small_spans: int
    small_batches: int
    memory_batches: int
    memory_spans: int


FULL = Size(
    events=10_000_000,
    rounds=3,
    small_spans=10_000,
    small_batches=20,
    memory_batches=100,
    memory_spans=2_000,
)
"""Half an hour or more on two cores."""
QUICK = Size(
    events=200_000,
    rounds=1,
    small_spans=1_000,
    small_batches=3,
    memory_batches=9,
    memory_spans=200,
)
"""Minutes: to see that all runs, not to quote."""

Part = Callable[[SparkSession, Size], Result]
PARTS: Mapping[str, Part] = {
    "versus": lambda spark, size: pipeline_versus.measure(
        spark, events=size.events, rounds=size.rounds
    ),
    "events": lambda spark, size: pipeline_growth.measure_events(
        spark, events=size.events, rounds=size.rounds
    ),
    "metrics": lambda spark, size: pipeline_growth.measure_metrics(
        spark, events=size.events, rounds=size.rounds
    ),
    "entities": lambda spark, size: pipeline_growth.measure_entities(
        spark, events=size.events, rounds=size.rounds
    ),
    "small": lambda spark, size: pipeline_small.measure(
        spark, spans=size.small_spans, batches=size.small_batches, trigger_s=0.1
    ),
    "memory": lambda spark, size: pipeline_growth.measure_memory(
        spark,
        batches=size.memory_batches,
        spans=size.memory_spans,
        every=max(1, size.memory_batches // 20),
    ),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what was asked for, print it, write it down."""
    options = _parser().parse_args(arguments)
    size = QUICK if options.quick else FULL
    if options.events:
        size = Size(**{**vars(size), "events": options.events})
    started = perf_counter()
    print(machine_line())
    spark = start_spark()
    spark.sparkContext.setLogLevel("ERROR")
    say(f"Spark started in {perf_counter() - started:.1f} s")
    results: dict[str, Result] = {}
    for name in options.only:
        results[name] = PARTS[name](spark, size)
        for table in results[name].tables():
            print("\n" + table.render(), flush=True)
    spark.stop()
    goals = list(_goals(results))
    print("\n" + _table_of(goals).render())
    document = {
        "machine": machine(),
        "quick": options.quick,
        "size": vars(size),
        "goals": [goal.as_json() for goal in goals],
        **{name: result.as_json() for name, result in results.items()},
    }
    write_json(options.json, document)
    say(f"took {perf_counter() - started:.0f} s; results are in {options.json}")
    return 0


def _goals(results: Mapping[str, Result]) -> Iterator[Goal]:
    for name, result in results.items():
        match result:
            case pipeline_versus.Versus():
                ours, ours_20 = pipeline_versus.OURS, pipeline_versus.OURS_20
                textbook, textbook_20 = pipeline_versus.TEXTBOOK, pipeline_versus.TEXTBOOK_20
                for one, other, limit in (
                    (ours, textbook, 2.0),
                    (ours_20, textbook_20, 2.0),
                    (ours, pipeline_versus.TUNED, 2.0),
                    (ours, pipeline_versus.BATCH, 1.0),
                ):
                    ratio = result.ratio(one, other)
                    yield _at_least(f"events/s of {one} to {other}", ratio, limit)
            case pipeline_growth.Growth():
                limit = {"events": 11.0, "metrics": 2.5, "entities": 3.0}[name]
                for larger, smaller in result.steps.items():
                    if "mild" not in larger:  # for the record
                        yield _at_most(
                            f"time of {larger} to {smaller}", result.ratio(larger), limit
                        )
            case pipeline_growth.Memory():
                yield _at_most(
                    "Python's memory, last third to middle", result.growth("python"), 1.05
                )
                yield _at_most("the JVM's heap, last third to middle", result.growth("heap"), 1.05)
            case pipeline_small.Small():
                median = result.as_json()["median"]
                yield _at_most(f"{result.spans:,} spans, visible to committed", median, 3, " s")


def _at_least(what: str, value: float | None, limit: float, unit: str = "x") -> Goal:
    return Goal(what=what, value=value, limit=limit, at_least=True, unit=unit)


def _at_most(what: str, value: float | None, limit: float, unit: str = "x") -> Goal:
    return Goal(what=what, value=value, limit=limit, at_least=False, unit=unit)


def _table_of(goals: list[Goal]) -> Table:
    return Table(
        "Goals",
        "Medians over the rounds. A missed goal does not fail the run.",
        ["goal", "limit", "measured", ""],
        [goal.row() for goal in goals],
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.pipeline",
        description="compare the metrics pipeline with its peers",
    )
    parser.add_argument(
        "--events", type=int, metavar="N", help="number of events; default 10 million"
    )
    parser.add_argument("--quick", action="store_true", help="a run of minutes, too short to quote")
    parser.add_argument(
        "--only",
        type=_names,
        default=list(PARTS),
        metavar="NAME,NAME",
        help=f"some of: {', '.join(PARTS)}",
    )
    parser.add_argument("--json", type=Path, default=DEFAULT_JSON, help="file for the results")
    return parser


def _names(text: str) -> list[str]:
    names = text.split(",")
    for name in names:
        if name not in PARTS:
            raise argparse.ArgumentTypeError(f"{name!r} is none of {', '.join(PARTS)}")
    return names


if __name__ == "__main__":
    raise SystemExit(main())
