"""Compare flow-ordered dispatch with its peers, in one process and on the same work.

    python -m benchmarks.flows [--quick] [--only throughput,wait] [--json PATH]

Prints tables and the goals with the measured values, and writes all results as JSON. A missed goal
is reported; the exit code is still 0.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from benchmarks.flows import throughput, wait
from benchmarks.kit.command import Benchmark
from benchmarks.kit.goals import Goal, at_least
from benchmarks.kit.report import Result

FULL: Mapping[str, Callable[[], Result]] = {
    "throughput": lambda: throughput.measure(repeats=7, flows=10_000),
    "wait": lambda: wait.measure(turns=11, seconds=0.5, simulated_seconds=60),
}
"""Two minutes together on a quiet machine."""

QUICK: Mapping[str, Callable[[], Result]] = {
    "throughput": lambda: throughput.measure(repeats=1, flows=2_000),
    "wait": lambda: wait.measure(turns=2, seconds=0.3, simulated_seconds=10),
}
"""Under half a minute together: to see that all runs, not to quote."""


def _goals(results: Mapping[str, Result]) -> list[Goal]:
    goals = []
    for result in results.values():
        match result:
            case throughput.Throughput():
                ratio = result.worst_ratio(throughput.EXECUTORS)
                what = "throughput to an executor per worker, keyed by hash"
                goals.append(at_least(what, ratio, 1))
            case wait.Waits():
                real, simulated = wait.GOAL_CASE, wait.SIMULATED_GOAL_CASE
                for where, value in (
                    (f"{real}", result.seed_to_ours(real)),
                    (f"{simulated}, simulated", result.seed_to_ours_simulated(simulated)),
                ):
                    what = f"p99 wait of the seed's rule to ours, {where}"
                    goals.append(at_least(what, value, 2))
    return goals


BENCHMARK = Benchmark(
    name="flows",
    about="compare flow-ordered dispatch with its peers",
    full=FULL,
    quick=QUICK,
    goals=_goals,
    goals_caption="Throughput: the smallest of the medians over all handlers and producer counts."
    " Wait: the median over the turns. A missed goal does not fail the run.",
)

if __name__ == "__main__":
    raise SystemExit(BENCHMARK.run())
