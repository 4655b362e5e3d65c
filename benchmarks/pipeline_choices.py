"""The effect of each optimisation: the same work with and without it, in turn."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any
from unittest import mock

import pyarrow.parquet as pq
from batchmill.spark.l2 import batch
from pyspark.sql import SparkSession

from batchmill.oal import core_script
from benchmarks.pipeline_data import SEGMENTS, events_folder, part_of, spans_table
from benchmarks.pipeline_ours import alternating, run_ours, scratch
from benchmarks.pipeline_peers import BatchQuery
from benchmarks.report import Table, say, spread

AS_IT_IS = "as it is"


@dataclass(frozen=True)
class Change:
    """The pipeline, but for one thing."""

    conf: Mapping[str, str] = field(default_factory=dict)
    partitions: int | None = None
    """Shuffle partitions, whatever the batch's size."""
    adaptive: bool | None = None
    """Whether plans adapt, whatever the batch's size."""
    sliced: bool = True
    """Whether large batches are cut into slices, and rows that are alike added up first."""
    at_once: int | None = None
    """How many sources are aggregated at the same time."""
    files: int | None = None
    """Segments a batch; None as many as there are."""


LARGE: Mapping[str, Change] = {
    AS_IT_IS: Change(),
    "shuffled instead of sliced": Change(sliced=False),
    **{f"shuffled, {n} partitions": Change(sliced=False, partitions=n) for n in (1, 2, 8)},
    "shuffled, AQE off": Change(sliced=False, adaptive=False),
    "shuffled, sorting past 128 groups (Spark's default)": Change(
        sliced=False, conf={"spark.sql.objectHashAggregate.sortBased.fallbackThreshold": "128"}
    ),
    "20 micro-batches": Change(files=1),
}
SMALL: Mapping[str, Change] = {
    AS_IT_IS: Change(),
    "AQE on": Change(adaptive=True),
    **{f"{n} shuffle partitions": Change(partitions=n) for n in (2, 8)},
    "no generated code": Change(conf={"spark.sql.codegen.wholeStage": "false"}),
}


@dataclass
class Choices:
    """Seconds by case and choice."""

    cases: dict[str, dict[str, list[float]]]
    captions: dict[str, str]

    def tables(self) -> list[Table]:
        """What to print."""
        return [
            Table(
                f"Effect of each optimisation: {case}",
                self.captions[case],
                ["choice", "s", "range", f"to '{next(iter(seconds))}'"],
                [self._row(seconds, name) for name in seconds],
            )
            for case, seconds in self.cases.items()
        ]

    def as_json(self) -> dict[str, Any]:
        """What to keep."""
        return {"cases": self.cases}

    @staticmethod
    def _row(seconds: Mapping[str, list[float]], name: str) -> list[str]:
        first = next(iter(seconds.values()))
        ratio = median(a / b for a, b in zip(seconds[name], first, strict=True))
        return [name, f"{median(seconds[name]):.2f}", spread(seconds[name]), f"{ratio:.2f}x"]


def measure(
    spark: SparkSession, *, events: int, spans: int, small_batches: int, rounds: int
) -> Choices:
    """A large batch of events, a small one of spans, and the two ways to count."""
    spool = events_folder(events)
    result = Choices({}, {})
    large = f"{events:,} events"
    result.captions[large] = "Six metrics of one source; the whole run."
    with scratch() as work:
        run_ours(spark, part_of(spool, SEGMENTS // 10), work)
    result.cases[large] = alternating(
        {name: _large(spark, spool, change) for name, change in LARGE.items()}, rounds
    )
    small = f"{spans:,} spans"
    result.captions[small] = (
        "The core metrics of small batches, one segment each: seconds per batch, the median of"
        f" {small_batches} in a row after the first."
    )
    with scratch() as folder:
        (folder / "Span").mkdir()
        for number in range(small_batches + 1):
            pq.write_table(spans_table(spans, number), folder / "Span" / f"{number:05d}.parquet")
        with scratch() as work:
            run_ours(spark, folder, work, oal=core_script(), files=1)
        result.cases[small] = alternating(
            {name: _small(spark, folder, change) for name, change in SMALL.items()}, rounds
        )
    counting = "counting latency buckets"
    result.captions[counting] = (
        f"{events:,} events, as a batch query of three grains: collect lists and count after"
        " grouping, or group by bucket too and group again; each way has its shuffles."
    )
    ways = {
        "lists, counted afterwards": BatchQuery(spark, "lists", cached=False, to_arrow=True),
        "grouped by bucket first": BatchQuery(spark, "buckets", cached=False, to_arrow=True),
    }
    result.cases[counting] = alternating(
        {name: _on(query, spool) for name, query in ways.items()}, rounds
    )
    return result


def _on(query: BatchQuery, spool: Path) -> Callable[[Path], float]:
    return lambda work: query.run(spool, work)


def _large(spark: SparkSession, spool: Path, change: Change) -> Callable[[Path], float]:
    def run(work: Path) -> float:
        with changed(change):
            made = run_ours(spark, spool, work, files=change.files, conf=change.conf)
        say(f"{change}: {made.seconds:.2f} s")
        return made.seconds

    return run


def _small(spark: SparkSession, spool: Path, change: Change) -> Callable[[Path], float]:
    def run(work: Path) -> float:
        with changed(change):
            made = run_ours(
                spark, spool, work,
                oal=core_script(), files=1, conf=change.conf,
            )  # fmt: skip
        # Carrying spans over makes the first batch another one than those after it.
        seconds = median(report.spark_s + report.store_s for report in made.reports[1:])
        say(f"{change}: {seconds:.2f} s")
        return seconds

    return run


@contextlib.contextmanager
def changed(change: Change) -> Iterator[None]:
    """The pipeline with the change."""

    spread = batch.BatchMaker._tune

    def spread_so(maker: Any, *given: Any) -> None:
        spread(maker, *given)
        if change.partitions is not None:
            maker._spark.conf.set("spark.sql.shuffle.partitions", str(change.partitions))
        if change.adaptive is not None:
            maker._spark.conf.set("spark.sql.adaptive.enabled", str(change.adaptive).lower())

    with contextlib.ExitStack() as undo:
        undo.enter_context(mock.patch.object(batch.BatchMaker, "_tune", spread_so))
        if not change.sliced:
            undo.enter_context(mock.patch.object(batch, "cut", return_value=[]))
        if change.at_once is not None:
            undo.enter_context(mock.patch.object(batch, "_AT_ONCE", change.at_once))
        yield
