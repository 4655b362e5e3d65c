"""Compare aggregation in the process with its peers, on the same events, in one run.

    python -m benchmarks.aggregate [--quick] [--only throughput,growth,memory] [--json PATH]

Events are produced by one thread and merged into the states of six metrics (calls per minute,
average, percentiles, success rate, apdex, histogram) of 1,000 services: with ``batchmill.Embedded``
and with its peers. The results of each are verified. Prints tables and the goals with the measured
values, and writes all results as JSON. A missed goal is reported; the exit code is still 0.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from statistics import median

from benchmarks.aggregate import memory, throughput
from benchmarks.aggregate.peers import EMIT, EMIT_MANY, PROMETHEUS
from benchmarks.kit.command import Benchmark
from benchmarks.kit.goals import Goal, at_least, at_most
from benchmarks.kit.report import Result

FULL: Mapping[str, Callable[[], Result]] = {
    "throughput": lambda: throughput.measure(repeats=5, calls=500_000),
    "growth": lambda: throughput.measure_growth(repeats=5, calls=300_000),
    "memory": lambda: memory.measure(entities=1_000, minutes=20),
}
"""Three minutes together on a quiet machine."""

QUICK: Mapping[str, Callable[[], Result]] = {
    "throughput": lambda: throughput.measure(repeats=1, calls=50_000),
    "growth": lambda: throughput.measure_growth(repeats=1, calls=50_000),
    "memory": lambda: memory.measure(entities=1_000, minutes=3),
}
"""Half a minute together: to see that all runs, not to quote."""


def _goals(result: Result) -> list[Goal]:
    match result:
        case throughput.Throughput():
            rate = median(result.rates(EMIT_MANY)) / 1e6
            missing = PROMETHEUS in result.missing
            ratio = None if missing else median(result.ratios(EMIT, PROMETHEUS))
            return [
                at_least("emit_many to merged state", rate, 1, " million/s"),
                at_least("emit to prometheus_client, per event", ratio, 5),
            ]
        case throughput.Growth():
            what = f"time of {throughput.MORE} times the metrics"
            return [at_most(what, median(result.ratios()), 4)]
        case memory.Memory():
            what = "memory per entity and minute, to the states' own bytes"
            return [at_most(what, result.worst, 2)]
    return []


BENCHMARK = Benchmark(
    name="aggregate",
    about="compare aggregation in the process with its peers",
    full=FULL,
    quick=QUICK,
    goals=lambda results: [goal for result in results.values() for goal in _goals(result)],
    goals_caption="Medians over the repeats; ratios are taken within a repeat."
    " A missed goal does not fail the run.",
)

if __name__ == "__main__":
    raise SystemExit(BENCHMARK.run())
