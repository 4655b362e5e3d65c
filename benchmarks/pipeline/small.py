"""A small micro-batch of a running pipeline: from the segment in the spool to the commit."""

from __future__ import annotations

import queue
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import pyarrow.parquet as pq
from pyspark.sql import SparkSession

from batchmill.oal import core_script
from batchmill.spark import BatchReport, Pipeline
from benchmarks.kit.report import Table, say, spread
from benchmarks.pipeline.data import spans_table
from benchmarks.pipeline.ours import cpu_seconds, scratch

WARM_UP = 5
"""Batches before the first that counts."""


@dataclass
class Small:
    """The seconds of each batch, and of its phases."""

    spans: int
    trigger_s: float
    seconds: list[float] = field(default_factory=list)
    parts: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    cpu: list[float] = field(default_factory=list)
    """Processor seconds of each batch, the JVM's and its tasks' included."""
    cold: float = 0.0
    """The first batch of all, without starting the session."""

    @property
    def p95(self) -> float:
        """All but one in twenty are at most that."""
        return sorted(self.seconds)[max(0, -(-len(self.seconds) * 19 // 20) - 1)]

    def tables(self) -> list[Table]:
        """What to print."""
        whole = median(self.seconds)
        rows = [["visible to committed", f"{whole:.2f}", spread(self.seconds), "100 %"]]
        rows.append(["… 95th percentile", f"{self.p95:.2f}", "", ""])
        rows.append(["… processor time", f"{median(self.cpu):.2f}", spread(self.cpu), ""])
        rows += [
            [name, f"{median(values):.2f}", spread(values), f"{median(values) / whole:.0%}"]
            for name, values in self.parts.items()
        ]
        return [
            Table(
                "A small micro-batch",
                f"{self.spans:,} spans, the core metrics, SQLite, a warm session, a stream with"
                f" a trigger of {self.trigger_s:g} s; {len(self.seconds)} batches, seconds. The"
                f" first batch took {self.cold:.1f} s.",
                ["part", "median", "range", "share"],
                rows,
            )
        ]

    def as_json(self) -> dict[str, Any]:
        """What to keep."""
        return {**vars(self), "median": median(self.seconds), "p95": self.p95}


def measure(spark: SparkSession, *, spans: int, batches: int, trigger_s: float) -> Small:
    """Drop a segment, wait for its commit, and again."""
    result = Small(spans, trigger_s)
    done: queue.Queue[tuple[float, BatchReport]] = queue.Queue()
    with scratch() as work:
        spool = work / "spool"
        (spool / "Span").mkdir(parents=True)
        with Pipeline(
            oal=core_script(),
            spool=spool,
            store=f"sqlite:///{work / 'store.db'}",
            checkpoint=work / "checkpoint",
            spark=spark,
            on_batch=lambda report: done.put((perf_counter(), report)),
        ) as pipeline:
            pipeline.start(trigger_s)
            for number in range(WARM_UP + batches):
                _drop(work, spool, spans, number)
                before, dropped = cpu_seconds(spark), perf_counter()
                committed, report = _next(pipeline, done)
                seconds = committed - dropped
                if number == 0:
                    result.cold = seconds
                if number >= WARM_UP:
                    result.seconds.append(seconds)
                    result.cpu.append(cpu_seconds(spark) - before)
                    result.parts["until it is seen"].append(seconds - sum(report.phases.values()))
                    for phase, took in report.phases.items():
                        result.parts[phase].append(took)
                say(f"batch {number}: {seconds:.2f} s")
    return result


def _drop(work: Path, spool: Path, spans: int, number: int) -> None:
    """Write a segment elsewhere, then rename it into the spool."""
    fresh = work / f"{number:05d}.parquet"
    pq.write_table(spans_table(spans, number), fresh)
    # Spark orders and forgets files by the second of their change.
    fresh.rename(spool / "Span" / fresh.name)


def _next(
    pipeline: Pipeline, done: queue.Queue[tuple[float, BatchReport]]
) -> tuple[float, BatchReport]:
    while True:
        try:
            return done.get(timeout=1)
        except queue.Empty:
            pipeline.await_end(0.001)  # raises what went wrong
