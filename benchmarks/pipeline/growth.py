"""How the pipeline's time grows with events, metrics and entities; and its memory over time."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import pyarrow.parquet as pq
from pyspark.sql import SparkSession

from batchmill.oal import core_script
from batchmill.spark import BatchReport
from benchmarks.ingest.receiver import rss_mib
from benchmarks.kit.machine import tree_rss_mib
from benchmarks.kit.report import Table, say, spread
from benchmarks.pipeline.data import (
    ENDPOINTS,
    MILD_SKEW,
    SEGMENTS,
    SIX,
    SKEW,
    events_folder,
    part_of,
    sixty,
    spans_table,
)
from benchmarks.pipeline.ours import Run, alternating, cpu_seconds, jvm_process, run_ours, scratch

_WARM_UPS = 2


@dataclass
class Growth:
    """Cases by name, each with the seconds of its rounds; and which is held against which."""

    title: str
    caption: str
    seconds: Mapping[str, list[float]]
    steps: Mapping[str, str]
    """A larger case to the smaller one that it is held against."""
    rows: Mapping[str, int]
    """What each case comes to in rows of (entity, bucket)."""
    cpu: Mapping[str, list[float]]
    """The processor seconds of the rounds."""

    def ratio(self, larger: str) -> float:
        """How many times as long the larger case takes: the median over the rounds."""
        return median(self.ratios(larger))

    def ratios(self, larger: str) -> list[float]:
        """The same round by round."""
        return self._ratios(self.seconds, larger)

    def cpu_ratio(self, larger: str) -> float:
        """How many times the processor time the larger case takes."""
        return median(self._ratios(self.cpu, larger))

    def _ratios(self, measured: Mapping[str, list[float]], larger: str) -> list[float]:
        pairs = zip(measured[larger], measured[self.steps[larger]], strict=True)
        return [one / other for one, other in pairs]

    def tables(self) -> list[Table]:
        """What to print."""
        lines = []
        for name, seconds in self.seconds.items():
            line = [name, f"{self.rows[name]:,}", f"{median(seconds):.2f}", spread(seconds)]
            line.append(f"{median(self.cpu[name]):.2f}")
            if name in self.steps:
                line += [f"{self.ratio(name):.2f}x", spread(self.ratios(name))]
                line.append(f"{self.cpu_ratio(name):.2f}x")
            lines.append(line + ["-"] * (8 - len(line)))
        headers = ["case", "rows", "s", "range", "CPU s", "to the smaller", "range", "CPU"]
        return [Table(self.title, self.caption, headers, lines)]

    def as_json(self) -> dict[str, Any]:
        """What to keep."""
        return {
            **vars(self),
            "ratios": {larger: self.ratio(larger) for larger in self.steps},
            "cpu_ratios": {larger: self.cpu_ratio(larger) for larger in self.steps},
        }


def measure_events(spark: SparkSession, *, events: int, rounds: int) -> Growth:
    """A tenth of the segments, and all of them."""
    spool = events_folder(events)
    few, all_of_them = f"{events // 10:,} events", f"{events:,} events"
    cases = {few: (part_of(spool, SEGMENTS // 10), SIX), all_of_them: (spool, SIX)}
    return _measure(
        spark, "Ten times the events", "The first tenth of the segments; all of them.",
        cases, {all_of_them: few}, rounds,
    )  # fmt: skip


def measure_metrics(spark: SparkSession, *, events: int, rounds: int) -> Growth:
    """Six metrics of a source, and sixty."""
    spool = events_folder(events)
    cases = {"6 metrics": (spool, SIX), "60 metrics": (spool, sixty())}
    return _measure(
        spark, "Ten times the metrics",
        f"{events:,} events. The sixty have nine filters, four percentiles, two histograms.",
        cases, {"60 metrics": "6 metrics"}, rounds,
    )  # fmt: skip


def measure_entities(spark: SparkSession, *, events: int, rounds: int) -> Growth:
    """1,000, 10,000 and 100,000 entities share the same number of events."""
    cases: dict[str, tuple[Path, str]] = {}
    steps: dict[str, str] = {}
    for skew, note in ((SKEW, ""), (MILD_SKEW, ", mild skew")):
        before = None
        for services in (20, 200, 2000):
            name = f"{services * ENDPOINTS:,} entities{note}"
            cases[name] = (events_folder(events, services=services, skew=skew), SIX)
            if before is not None:
                steps[name] = before
            before = name
    return _measure(
        spark, "Ten times the entities",
        f"{events:,} events in one hour. Skewed as in the comparison; and mildly, for the record:"
        " then nearly every entity is there every minute, and the rows to store grow with them.",
        cases, steps, rounds,
    )  # fmt: skip


def _measure(
    spark: SparkSession,
    title: str,
    caption: str,
    cases: Mapping[str, tuple[Path, str]],
    steps: Mapping[str, str],
    rounds: int,
) -> Growth:
    last: dict[str, Run] = {}
    cpu: dict[str, list[float]] = {name: [] for name in cases}

    def run(name: str, spool: Path, oal: str) -> Callable[[Path], float]:
        def once(work: Path) -> float:
            before = cpu_seconds(spark)
            last[name] = run_ours(spark, spool, work, oal=oal)
            cpu[name].append(cpu_seconds(spark) - before)
            say(f"{name}: {last[name].seconds:.2f} s, {cpu[name][-1]:.2f} s of the processor")
            return last[name].seconds

        return once

    runs = {name: run(name, spool, oal) for name, (spool, oal) in cases.items()}
    # What the JVM has not compiled yet takes longer, and the more of it the longer. So each set of
    # metrics first runs whole, and twice: a stream that has been going for a while is what counts.
    for oal in dict.fromkeys(oal for _, oal in cases.values()):
        spool = next(folder for folder, script in cases.values() if script == oal)
        for _ in range(_WARM_UPS):
            with scratch() as work:
                say(f"warm-up: {run_ours(spark, spool, work, oal=oal).seconds:.2f} s")
    seconds = alternating(runs, rounds)
    rows = {name: last[name].merged for name in cases}
    return Growth(title, caption, seconds, steps, rows, cpu)


@dataclass
class Memory:
    """The driver's memory while batches come and go, in MiB: of Python, and of its JVM's heap."""

    spans: int
    batches: list[int] = field(default_factory=list)
    python: list[float] = field(default_factory=list)
    heap: list[float] = field(default_factory=list)
    jvm: list[float] = field(default_factory=list)
    """The resident size of the JVM's process."""
    tasks: list[float] = field(default_factory=list)
    """The same of the Python processes below it; what they share counts for each of them."""

    def growth(self, which: str) -> float:
        """The last third of the looks to the middle one: 1 is flat. The first third warms up."""
        values: list[float] = getattr(self, which)
        third = max(1, len(values) // 3)
        return median(values[-third:]) / median(values[-2 * third : -third] or values)

    def tables(self) -> list[Table]:
        """What to print."""
        looks = zip(self.batches, self.python, self.heap, self.jvm, self.tasks, strict=True)
        return [
            Table(
                f"Memory of the driver over {self.batches[-1]} micro-batches",
                f"{self.spans:,} spans each, the core metrics, SQLite. After a garbage collection"
                " in both; MiB.",
                ["batches", "Python, resident", "JVM, heap used", "JVM, resident", "tasks"],
                [[f"{number:.0f}" for number in look] for look in looks],
            )
        ]

    def as_json(self) -> dict[str, Any]:
        """What to keep."""
        growth = {which: self.growth(which) for which in ("python", "heap", "jvm", "tasks")}
        return {**vars(self), "growth": growth}


def measure_memory(spark: SparkSession, *, batches: int, spans: int, every: int) -> Memory:
    """Look at the memory every few batches."""
    result = Memory(spans)
    jvm: Any = spark.sparkContext._jvm
    pid = jvm_process(spark)

    def look(report: BatchReport) -> None:
        if (report.number + 1) % every:
            return
        gc.collect()
        jvm.System.gc()
        runtime = jvm.Runtime.getRuntime()
        result.batches.append(report.number + 1)
        result.python.append(rss_mib(os.getpid()))
        result.heap.append((runtime.totalMemory() - runtime.freeMemory()) / 2**20)
        result.jvm.append(rss_mib(pid))
        result.tasks.append(tree_rss_mib(pid))
        say(f"{report.number + 1} batches: {result.python[-1]:.0f}, {result.heap[-1]:.0f} MiB")

    with scratch() as work:
        folder = work / "spool" / "Span"
        folder.mkdir(parents=True)
        for number in range(batches):
            pq.write_table(spans_table(spans, number), folder / f"{number:05d}.parquet")
        run_ours(spark, work / "spool", work, oal=core_script(), files=1, on_batch=look)
    return result
