"""Compare the metrics pipeline with its peers, on the same files in one run.

    python -m benchmarks.pipeline [--quick] [--only versus,small,...] [--json PATH]

Prints tables and the goals with the measured values, and writes all results as JSON; the results of
parts that are not run stay in the file. A missed goal is reported; the exit code is still 0.
Different results of the contenders end the run with an error. All parts take half an hour or more
on two cores. Needs Java and the dependency group ``bench``.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from time import perf_counter

from pyspark.sql import SparkSession

from benchmarks.kit.command import Benchmark
from benchmarks.kit.goals import Goal, at_least, at_most
from benchmarks.kit.report import Result, say
from benchmarks.pipeline import growth, small, versus
from benchmarks.pipeline.ours import start_spark


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
QUICK = Size(
    events=200_000,
    rounds=1,
    small_spans=1_000,
    small_batches=3,
    memory_batches=9,
    memory_spans=200,
)
"""To see that all runs, not to quote."""


@functools.cache
def _spark() -> SparkSession:
    """One session for all parts."""
    started = perf_counter()
    spark = start_spark()
    spark.sparkContext.setLogLevel("ERROR")
    say(f"Spark started in {perf_counter() - started:.1f} s")
    return spark


def _parts(size: Size) -> Mapping[str, Callable[[], Result]]:
    events, rounds = size.events, size.rounds
    return {
        "versus": lambda: versus.measure(_spark(), events=events, rounds=rounds),
        "events": lambda: growth.measure_events(_spark(), events=events, rounds=rounds),
        "metrics": lambda: growth.measure_metrics(_spark(), events=events, rounds=rounds),
        "entities": lambda: growth.measure_entities(_spark(), events=events, rounds=rounds),
        "small": lambda: small.measure(
            _spark(), spans=size.small_spans, batches=size.small_batches, trigger_s=0.1
        ),
        "memory": lambda: growth.measure_memory(
            _spark(),
            batches=size.memory_batches,
            spans=size.memory_spans,
            every=max(1, size.memory_batches // 20),
        ),
    }


def _goals(results: Mapping[str, Result]) -> Iterator[Goal]:
    """The goals that these results say something about."""
    for name, result in results.items():
        match result:
            case versus.Versus():
                ours, ours_20 = versus.OURS, versus.OURS_20
                textbook, textbook_20 = versus.TEXTBOOK, versus.TEXTBOOK_20
                for one, other, limit in (
                    (ours, textbook, 2.0),
                    (ours_20, textbook_20, 2.0),
                    (ours, versus.TUNED, 2.0),
                    (ours, versus.BATCH, 1.0),
                ):
                    ratio = result.ratio(one, other)
                    yield at_least(f"events/s of {one} to {other}", ratio, limit)
            case growth.Growth():
                limit = {"events": 11.0, "metrics": 2.5, "entities": 3.0}[name]
                for larger, smaller in result.steps.items():
                    if "mild" not in larger:  # for the record
                        yield at_most(f"time of {larger} to {smaller}", result.ratio(larger), limit)
            case growth.Memory():
                yield at_most(
                    "Python's memory, last third to middle", result.growth("python"), 1.05
                )
                yield at_most("the JVM's heap, last third to middle", result.growth("heap"), 1.05)
            case small.Small():
                median = result.as_json()["median"]
                yield at_most(f"{result.spans:,} spans, visible to committed", median, 3, " s")


BENCHMARK = Benchmark(
    name="pipeline",
    about="compare the metrics pipeline with its peers",
    full=_parts(FULL),
    quick=_parts(QUICK),
    goals=lambda results: list(_goals(results)),
    goals_caption="Medians over the rounds. A missed goal does not fail the run.",
)

if __name__ == "__main__":
    raise SystemExit(BENCHMARK.run())
