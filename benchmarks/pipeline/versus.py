"""The pipeline compared with its peers: the same files and results, in turn in one run."""

from __future__ import annotations

import subprocess
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any, Protocol

from pyspark.sql import SparkSession

from benchmarks.kit.report import Table, say, spread
from benchmarks.pipeline.check import Results, compare
from benchmarks.pipeline.data import SEGMENTS, events_folder, part_of
from benchmarks.pipeline.ours import Ours, alternating, cpu_seconds, scratch, start_spark
from benchmarks.pipeline.peers import BatchQuery, DuckDb, Textbook, flavours

OURS, TEXTBOOK, TUNED, BATCH, ARROW, DUCKDB = (
    "batchmill", "textbook job", "textbook job, tuned", "batch query", "batch query, to Arrow",
    "DuckDB",
)  # fmt: skip
OURS_20, TEXTBOOK_20, TUNED_20 = (
    f"{contestant}, 20 batches" for contestant in (OURS, TEXTBOOK, TUNED)
)
COLD = (OURS, TEXTBOOK, BATCH, DUCKDB)


class Contestant(Protocol):
    """Who turns a spool into results."""

    def run(self, spool: Path, work: Path) -> float:
        """The seconds it took."""

    def results(self, work: Path) -> Results:
        """What came of it."""


@dataclass
class Versus:
    """What each of them took."""

    events: int
    groups: int
    seconds: dict[str, list[float]] = field(default_factory=dict)
    cold: dict[str, float] = field(default_factory=dict)
    cpu: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    """Processor seconds of each run, the JVM's and its tasks' included."""
    tuning: dict[str, float] = field(default_factory=dict)
    spark_s: float = 0.0
    store_s: float = 0.0
    compared: int = 0

    def ratios(self, one: str, other: str) -> list[float] | None:
        """How many times the events per second of the other, round by round; None: not measured."""
        if one not in self.seconds or other not in self.seconds:
            return None
        pairs = zip(self.seconds[one], self.seconds[other], strict=True)
        return [theirs / ours for ours, theirs in pairs]

    def ratio(self, one: str, other: str) -> float | None:
        """The median of those."""
        ratios = self.ratios(one, other)
        return None if ratios is None else median(ratios)

    def cpu_ratios(self, one: str, other: str) -> list[float]:
        """How many times the processor seconds of the other one's, round by round."""
        return [theirs / ours for ours, theirs in zip(self.cpu[one], self.cpu[other], strict=True)]

    def tables(self) -> list[Table]:
        """What to print."""
        rows = []
        for name, seconds in self.seconds.items():
            mine = OURS_20 if name.endswith("20 batches") else OURS
            ratios = self.ratios(mine, name) or [1.0]
            cold = self.cold.get(name)
            rows.append(
                [
                    name,
                    f"{median(seconds):.2f}",
                    spread(seconds),
                    f"{self.events / median(seconds) / 1000:,.0f}",
                    f"{median(ratios):.2f}x",
                    spread(ratios),
                    f"{median(self.cpu[name]):.1f}",
                    f"{median(self.cpu_ratios(mine, name)):.2f}x",
                    "-" if cold is None else f"{cold:.1f}",
                ]
            )
        tuned = [[name, f"{seconds:.2f}"] for name, seconds in self.tuning.items()]
        return [
            Table(
                "The pipeline compared with its peers",
                f"{self.events:,} events, {self.groups:,} rows of (entity, bucket) in three"
                f" grains, six metrics. Seconds: median and range of the rounds. Ours to it: its"
                f" seconds over batchmill's of the same round (of 20 batches over 20 batches)."
                f" CPU: the process's, its JVM's and its tasks', and how many times ours. Cold: a"
                f" process of its own, from starting Spark to the end. batchmill's median is"
                f" {self.spark_s:.2f} s until the deltas are in the driver, and {self.store_s:.2f}"
                f" s for the commit."
                f" {self.compared:,} rows of each were compared with DuckDB's: all equal.",
                [
                    "contestant",
                    "s",
                    "range",
                    "k events/s",
                    "ours to it",
                    "range",
                    "CPU s",
                    "to ours",
                    "cold s",
                ],
                rows,
            ),
            Table(
                "Ways to write the peers",
                "One warm run each; the rounds have the fastest of each kind.",
                ["way", "s"],
                tuned,
            ),
        ]

    def as_json(self) -> dict[str, Any]:
        """What to keep."""
        return vars(self)


def measure(spark: SparkSession, *, events: int, rounds: int) -> Versus:
    """Warm all up on a tenth, choose the fastest way of each peer, check, take turns, then cold."""
    spool = events_folder(events)
    few = part_of(spool, SEGMENTS // 10)
    ours, ours_20 = Ours(spark), Ours(spark, files=1)
    warmed: list[Any] = [ours, *_textbooks(spark, False, 2), *_textbooks(spark, True, 2)]
    warmed += flavours(spark)
    for contender in warmed:
        with scratch() as work:
            seconds = contender.run(few, work)
        say(f"warm-up, {contender.name}: {seconds:.1f} s")
    result = Versus(events, 0)
    textbook, tuned = (
        _fastest(result, _textbooks(spark, with_tuning, 1, 2, 4), spool)
        for with_tuning in (False, True)
    )
    batch = _fastest(result, flavours(spark), spool)
    batch = _fastest(
        result, (replace(batch, partitions=partitions) for partitions in (1, 2, 4)), spool
    )
    contestants: dict[str, Contestant] = {
        OURS: ours,
        TEXTBOOK: textbook,
        TUNED: tuned,
        BATCH: batch,
        ARROW: replace(batch, to_arrow=True),
        DUCKDB: DuckDb(),
        OURS_20: ours_20,
        TEXTBOOK_20: replace(textbook, files=1),
        TUNED_20: replace(tuned, files=1),
    }
    result.compared = _check(contestants, spool)
    ours.runs.clear()
    runs: dict[str, Callable[[Path], float]] = {
        name: _on(contestant, spool, spark, result.cpu[name])
        for name, contestant in contestants.items()
    }
    result.seconds = alternating(runs, rounds)
    result.groups = ours.runs[-1].merged
    result.spark_s = median(run.spark_s for run in ours.runs)
    result.store_s = median(run.store_s for run in ours.runs)
    for name in COLD:
        say(f"cold: {name}")
        result.cold[name] = _cold(name, events, contestants[name])
    return result


def _textbooks(spark: SparkSession, tuned: bool, *partitions: int) -> list[Textbook]:
    return [
        Textbook(spark, tally, partition_count, tuned=tuned)
        for tally in ("list", "key")
        for partition_count in partitions
    ]


def _on(
    contestant: Contestant, spool: Path, spark: SparkSession, cpu: list[float]
) -> Callable[[Path], float]:
    def run(work: Path) -> float:
        before = cpu_seconds(spark)
        seconds = contestant.run(spool, work)
        cpu.append(cpu_seconds(spark) - before)
        return seconds

    return run


def _fastest(result: Versus, ways: Iterable[Any], spool: Path) -> Any:
    timed = []
    for way in ways:
        label = f"{way.name}: {way.tally}, {way.partitions} partitions"
        if isinstance(way, BatchQuery) and way.cached:
            label += ", minutes cached"
        if label not in result.tuning:
            with scratch() as work:
                result.tuning[label] = way.run(spool, work)
            say(f"{label}: {result.tuning[label]:.2f} s")
        timed.append((result.tuning[label], way))
    return min(timed, key=lambda pair: pair[0])[1]


def _check(contestants: dict[str, Contestant], spool: Path) -> int:
    """Run each once more and compare; how many rows there were."""
    with scratch() as work:
        contestants[DUCKDB].run(spool, work)
        expected = contestants[DUCKDB].results(work)
    for name, contestant in contestants.items():
        if name not in (DUCKDB, BATCH):  # the batch query's results are those that go to Arrow
            with scratch() as work:
                contestant.run(spool, work)
                compare(name, contestant.results(work), expected)
            say(f"{name} agrees with DuckDB")
    return len(expected)


def _cold(name: str, events: int, contestant: Any) -> float:
    """The seconds of a process that does nothing else, Python's own start left out."""
    way = [getattr(contestant, "tally", "-"), str(getattr(contestant, "partitions", 1))]
    way.append("cached" if getattr(contestant, "cached", False) else "-")
    command = [sys.executable, "-m", "benchmarks.pipeline.versus", name, str(events), *way]
    process = subprocess.run(command, capture_output=True, text=True, check=True, timeout=1800)
    return float(process.stdout.split()[-1])


def _run_cold(name: str, events: int, tally: str, partitions: int, cached: bool) -> float:
    spool = events_folder(events)
    started = perf_counter()
    contestant: Contestant
    if name == DUCKDB:
        contestant = DuckDb()
    else:
        spark = start_spark()
        if name == OURS:
            contestant = Ours(spark)
        elif name == TEXTBOOK:
            contestant = Textbook(spark, tally, partitions)
        else:
            contestant = BatchQuery(spark, tally, cached, partitions)
    with scratch() as work:
        contestant.run(spool, work)
        return perf_counter() - started


if __name__ == "__main__":
    print(
        _run_cold(
            sys.argv[1], int(sys.argv[2]), sys.argv[3], int(sys.argv[4]), "cached" in sys.argv
        )
    )
