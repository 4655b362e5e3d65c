"""The cost of exporting for a pipeline, with a collector that is up and with one that is down.

    python -m benchmarks.export [--quick] [--json PATH]

Three streams in one Spark session, each with its own spool and store: without an outbox, with an
exporter to a collector that accepts everything, and with one to a closed port. They get the same
segments, one at a time, in turn, so that other load on the machine affects all three equally.
Exporters and the collector are separate processes on the same cores.
"""

from __future__ import annotations

import argparse
import contextlib
import queue
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import pyarrow.parquet as pq
from pyspark.sql import SparkSession

from batchmill.oal import core_script
from batchmill.outbox import Outbox
from batchmill.spark import BatchReport, Pipeline
from benchmarks import RESULTS
from benchmarks.kit.goals import at_most
from benchmarks.kit.machine import machine, machine_line
from benchmarks.kit.report import Table, say, spread, write_json
from benchmarks.pipeline.data import spans_table
from benchmarks.pipeline.ours import scratch, start_spark

DEFAULT_JSON = RESULTS / "export.json"
NONE, WELL, DEAD = "no outbox", "collector well", "collector dead"
WARM_UP = 4
LIMIT = 0.03


@dataclass
class Cost:
    """The seconds of each batch, and of putting its changes down, by stream."""

    spans: int
    seconds: dict[str, list[float]] = field(default_factory=dict)
    outbox: dict[str, list[float]] = field(default_factory=dict)
    points: int = 0
    """What the collector got."""

    def share(self, name: str) -> float:
        """What part of a batch's time putting its changes down takes."""
        pairs = zip(self.outbox[name], self.seconds[name], strict=True)
        return median(put / whole for put, whole in pairs)

    def ratio(self, name: str) -> float:
        """The time of a batch, to that of the same batch without an outbox."""
        pairs = zip(self.seconds[name], self.seconds[NONE], strict=True)
        return median(one / other for one, other in pairs)

    def tables(self) -> list[Table]:
        rows = [
            [
                name,
                f"{median(seconds):.2f}",
                spread(seconds),
                f"{1000 * median(self.outbox[name]):.1f}",
                f"{self.share(name):.2%}",
                f"{self.ratio(name):.3f}",
            ]
            for name, seconds in self.seconds.items()
        ]
        count = len(self.seconds[NONE])
        return [
            Table(
                "Cost of exporting for a micro-batch",
                f"{self.spans:,} spans, the core metrics, SQLite, a warm session; {count} batches"
                f" of each in turn; made and committed. The collector got {self.points:,} points.",
                ["", "seconds", "range", "outbox ms", "of the batch", "to no outbox"],
                rows,
            )
        ]

    def as_json(self) -> dict[str, Any]:
        return vars(self)


def measure(spark: SparkSession, *, spans: int, batches: int) -> Cost:
    """The same segments for each stream, in turn."""
    cost = Cost(spans, {n: [] for n in (NONE, WELL, DEAD)}, {n: [] for n in (NONE, WELL, DEAD)})
    with scratch() as work, contextlib.ExitStack() as stack:
        collector = stack.enter_context(_process("benchmarks.export.receiver"))
        assert collector.stdout is not None
        targets = {WELL: int(collector.stdout.readline()), DEAD: _free_port()}
        done: queue.Queue[BatchReport] = queue.Queue()
        pipelines = {}
        for number, name in enumerate(cost.seconds):
            home = work / str(number)
            (home / "spool" / "Span").mkdir(parents=True)
            made = Pipeline(
                oal=core_script(),
                spool=home / "spool",
                store=f"sqlite:///{home / 'store.db'}",
                checkpoint=home / "checkpoint",
                name=f"stream-{number}",
                spark=spark,
                outbox=name in targets,
                on_batch=done.put,
            )
            pipelines[name] = stack.enter_context(made)
            if name in targets:
                Outbox.open(home / "checkpoint")
                stack.enter_context(_exporter(home, targets[name]))
            made.start(0.1)
        for number in range(WARM_UP + batches):
            fresh = work / "fresh.parquet"
            pq.write_table(spans_table(spans, number), fresh)
            names = list(pipelines)
            # Not always the same first: what one leaves to the system, the next may pay for.
            for name in names[number % 3 :] + names[: number % 3]:
                report = _run(pipelines[name], fresh, number, done)
                if number >= WARM_UP:
                    whole = report.spark_s + report.outbox_s + report.store_s
                    cost.seconds[name].append(whole)
                    cost.outbox[name].append(report.outbox_s)
                say(f"batch {number}, {name}: {report.spark_s:.2f} s made")
        assert collector.stdin is not None
        collector.stdin.close()
        cost.points = int(collector.stdout.readline())
    return cost


def _run(
    pipeline: Pipeline, segment: Path, number: int, done: queue.Queue[BatchReport]
) -> BatchReport:
    assert isinstance(pipeline.spool, Path)
    copied = pipeline.spool / f".{number}.parquet"
    copied.write_bytes(segment.read_bytes())
    copied.rename(pipeline.spool / "Span" / f"{number:05d}.parquet")
    while True:
        try:
            return done.get(timeout=1)
        except queue.Empty:
            pipeline.await_end(0.001)  # raises what went wrong


@contextlib.contextmanager
def _process(module: str, *given: str) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-m", module, *given]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def _exporter(home: Path, port: int) -> contextlib.AbstractContextManager[Any]:
    return _process(
        *("batchmill", "export", "--to", f"otlp+grpc://127.0.0.1:{port}"),
        *("--store", f"sqlite:///{home / 'store.db'}", "--checkpoint", str(home / "checkpoint")),
    )


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.export", description=__doc__)
    parser.add_argument(
        "--quick", action="store_true", help="a run of a minute, too short to quote"
    )
    parser.add_argument("--json", type=Path, default=DEFAULT_JSON, help="file for the results")
    options = parser.parse_args(arguments)
    started = perf_counter()
    print(machine_line())
    spark = start_spark()
    spark.sparkContext.setLogLevel("ERROR")
    cost = measure(
        spark, spans=2_000 if options.quick else 10_000, batches=4 if options.quick else 20
    )
    spark.stop()
    goals = [
        at_most(f"share of a micro-batch, {name}", 100 * cost.share(name), 100 * LIMIT, " %")
        for name in (WELL, DEAD)
    ]
    for table in cost.tables():
        print("\n" + table.render())
    caption = "The outbox, as a share of a batch. A missed goal does not fail the run."
    rows = [goal.row() for goal in goals]
    print("\n" + Table("Goals", caption, ["goal", "limit", "measured", ""], rows).render())
    document = {
        "machine": machine(),
        "quick": options.quick,
        "goals": [goal.as_json() for goal in goals],
        "cost": cost.as_json(),
    }
    write_json(options.json, document)
    say(f"took {perf_counter() - started:.0f} s; results are in {options.json}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
