"""Measure traces by id and searches of kept spans beside DuckDB, and what keeping costs a batch.

    python -m benchmarks.traces [--quick] [--only queries,batch] [--json PATH]

``queries``: ten million spans of ten hours are decoded from requests, written as segments, and kept
by the real keeper, whose processor time is measured. Queries are sent over HTTP to a real server
process, then to DuckDB over the same files, in turn. ``batch``: a running pipeline on Spark and
SQLite works off a full spool, with and without keeping, in turn; the thread that sorts the kept
spans runs beside the batches. A missed goal is reported; the exit code is still 0. ``batch`` needs
Java.
"""

from __future__ import annotations

from collections.abc import Mapping

from benchmarks.kit.command import Benchmark
from benchmarks.kit.goals import Goal, at_most
from benchmarks.kit.report import Result
from benchmarks.traces import batch, search

BY_ID_MS, SEARCH_MS = 100.0, 500.0
"""Goals, in the median."""
SHARE = 0.1
"""What keeping may cost: a part of the batches."""


def goals_of(results: Mapping[str, Result]) -> list[Goal]:
    """The goals that these results say something about."""
    goals: list[Goal] = []
    for result in results.values():
        match result:
            case search.Queries():
                for query in result.queries:
                    limit = BY_ID_MS if query.name == search.BY_ID else SEARCH_MS
                    goals.append(at_most(f"{query.name}, median", query.median_ms, limit, " ms"))
            case batch.Batches():
                ratio, share = result.elapsed_ratio(), result.sorting_share() * 100
                what = "time of batches with keeping to without"
                goals.append(at_most(what, ratio, 1 + SHARE, "x"))
                what = "processor time of the thread that sorts, to that of the batches"
                goals.append(at_most(what, share, SHARE * 100, " %"))
    return goals


BENCHMARK = Benchmark(
    name="traces",
    about="measure queries of kept spans beside DuckDB, and what keeping costs a batch",
    full={
        "queries": lambda: search.measure(spans=10_000_000, hours=10.0, rounds=100),
        "batch": lambda: batch.measure(spans=2_000_000, rounds=3),
    },
    quick={
        "queries": lambda: search.measure(spans=500_000, hours=0.5, rounds=10),
        "batch": lambda: batch.measure(spans=500_000, rounds=1),
    },
    goals=goals_of,
    goals_caption="Medians. A missed goal does not fail the run.",
)

if __name__ == "__main__":
    raise SystemExit(BENCHMARK.run())
