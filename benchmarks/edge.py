"""Measure what aggregating in the client saves: bytes in the spool, and Spark's processor time.

    python -m benchmarks.edge [--quick]

The same hour of events, 1,000 a minute of each entity and six metrics, as rows and as deltas. Both
spools are written by what a client calls: one segment of deltas a minute, which is the default, and
segments of rows as large as they get. That is the best case of rows: a client writes a segment of
them every 0.2 s, which is measured for one of the minutes. A pipeline in a warm session reads each
spool into a store of its own; the stores must be equal.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import pyarrow as pa
from pyspark.sql import SparkSession

from batchmill.aggregate import Aggregator, to_arrow
from batchmill.oal import load
from batchmill.sources import Grain
from batchmill.spark import Pipeline
from batchmill.spool import SpoolSettings, delta_file
from batchmill.spool.rows import encode
from batchmill.store import open_store
from benchmarks.kit.command import Benchmark
from benchmarks.kit.goals import Goal, at_least
from benchmarks.kit.report import Result, Table, say, spread
from benchmarks.pipeline.check import Disagreement
from benchmarks.pipeline.ours import cpu_seconds, scratch, start_spark

SOURCE = "Endpoint"
METRICS = load(
    """
    ep_cpm = from(Endpoint.*).cpm();
    ep_avg = from(Endpoint.latency).longAvg();
    ep_percentile = from(Endpoint.latency).percentile2(10);
    ep_sla = from(Endpoint.*).percent(status == true);
    ep_apdex = from(Endpoint.latency).apdex(serviceName, status);
    ep_histogram = from(Endpoint.latency).histogram(100, 20);
    """
)
EVENTS = 1_000
"""Of each entity, in a minute."""
START_US = 29_000_000 * 60_000_000
MINUTE_US = 60_000_000
MAX_ROWS = SpoolSettings().max_rows
LINGER_US = int(SpoolSettings().linger_s * 1_000_000)


@dataclass
class Saved:
    """Bytes and processor seconds of both spools."""

    entities: int
    minutes: int
    bytes: dict[str, int] = field(default_factory=dict)
    cpu: dict[str, list[float]] = field(default_factory=lambda: {"rows": [], "deltas": []})
    values: int = 0
    """Values that both stores have, all equal."""

    @property
    def events(self) -> int:
        return self.entities * self.minutes * EVENTS

    def fewer_bytes(self, rows: str) -> float:
        return self.bytes[rows] / self.bytes["deltas"]

    @property
    def less_cpu(self) -> float:
        return median(self.cpu["rows"]) / median(self.cpu["deltas"])

    def tables(self) -> list[Table]:
        caption = (
            f"{self.events:,} events: {self.entities} entities, {self.minutes} minutes, {EVENTS:,}"
            " a minute of each; six metrics. Processor seconds of the pipeline, its JVM, its tasks"
            " and the commits to SQLite included, in a warm session."
            f" {self.values:,} values of both stores were compared, and are equal."
        )
        rows = [
            [name, f"{self.bytes[key]:,}", f"{self.bytes[key] / self.events:.2f}", ratio]
            for name, key, ratio in (
                ("rows, every 0.2 s", "rows every 0.2 s", self._times("rows every 0.2 s")),
                (f"rows, {MAX_ROWS:,} a segment", "rows", self._times("rows")),
                ("deltas, every minute", "deltas", ""),
            )
        ]
        cpu = [
            [name, f"{median(self.cpu[name]):.2f}", spread(self.cpu[name])]
            for name in ("rows", "deltas")
        ]
        return [
            Table("Bytes in the spool", caption, ["segments", "bytes", "an event", "ratio"], rows),
            Table("Processor time of the pipeline", "", ["segments", "median", "range"], cpu),
        ]

    def _times(self, rows: str) -> str:
        return f"{self.fewer_bytes(rows):.0f}x"

    def as_json(self) -> dict[str, Any]:
        return {**vars(self), "events": self.events}


def measure(*, entities: int, minutes: int, rounds: int) -> Saved:
    saved = Saved(entities, minutes)
    spark = start_spark()
    spark.sparkContext.setLogLevel("ERROR")
    with scratch() as work:
        saved.bytes = _write(work, entities, minutes)
        small = work / "small"
        _write(small, 5, 3)
        for kind in saved.cpu:  # Spark compiles its plans, Java its code
            _run(spark, small / kind, work / f"warm-{kind}")
        for number in range(rounds):
            for kind, seconds in saved.cpu.items():
                used, place = _run(spark, work / kind, work / f"{kind}-{number}")
                seconds.append(used)
                say(f"{kind}: {used:.2f} s of the processor")
                saved.values = _compare(place, work / f"rows-{number}")
    spark.stop()
    return saved


def _write(work: Path, entities: int, minutes: int) -> dict[str, int]:
    """Write both spools; how many bytes each has."""
    aggregator = Aggregator(METRICS.catalog.source(SOURCE), tuple(METRICS))
    sizes = {"rows": 0, "deltas": 0, "rows every 0.2 s": 0}
    for kind in ("rows", "deltas"):
        (work / kind / SOURCE).mkdir(parents=True)
    for number, table in enumerate(_minutes(entities, minutes)):
        deltas = to_arrow(aggregator.make(table).deltas, aggregator.plan)
        sizes["deltas"] += _put(work / "deltas", f"{number:04}", delta_file(deltas))
        for first in range(0, table.num_rows, MAX_ROWS):
            rows = encode(table.slice(first, MAX_ROWS))
            sizes["rows"] += _put(work / "rows", f"{number:04}-{first}", rows)
        if number == 0:
            sizes["rows every 0.2 s"] = minutes * sum(len(encode(part)) for part in _cut(table))
    return sizes


def _put(folder: Path, name: str, data: memoryview) -> int:
    (folder / SOURCE / f"{name}.parquet").write_bytes(data)
    return len(data)


def _minutes(entities: int, minutes: int) -> Iterator[pa.Table]:
    """The events of each minute, by their start."""
    rng = np.random.default_rng(1)
    schema = METRICS.catalog.source(SOURCE).arrow_schema()
    services = pa.array([f"service-{number // 10}" for number in range(entities)])
    names = pa.array([f"GET /api/v1/resource/{number}" for number in range(entities)])
    size = entities * EVENTS
    for minute in range(minutes):
        starts = np.sort(rng.integers(0, MINUTE_US, size)) + START_US + minute * MINUTE_US
        entity = pa.array(rng.permutation(np.repeat(np.arange(entities), EVENTS)))
        columns = {column.name: pa.nulls(size, column.type) for column in schema}
        columns |= {
            "time": pa.array(starts, schema.field("time").type),
            "serviceName": services.take(entity),
            "name": names.take(entity),
            "latency": pa.array(np.minimum(rng.lognormal(4.3, 0.8, size), 20_000).astype(np.int32)),
            "status": pa.array(rng.random(size) > 0.01),
        }
        yield pa.table([columns[column.name] for column in schema], schema=schema)


def _cut(minute: pa.Table) -> Iterator[pa.Table]:
    """A minute in the segments that a client would write of it: one after each linger."""
    starts = minute["time"].cast(pa.int64()).to_numpy()
    bounds = np.searchsorted(starts, np.arange(START_US, START_US + MINUTE_US, LINGER_US))
    for first, last in zip(bounds, [*bounds[1:], len(starts)], strict=True):
        yield minute.slice(first, last - first)


def _run(spark: SparkSession, spool: Path, place: Path) -> tuple[float, Path]:
    """Processor seconds of a pipeline that reads a spool, and where its store is."""
    place.mkdir()
    with Pipeline(
        oal=METRICS,
        spool=spool,
        store=f"sqlite:///{place / 'metrics.db'}",
        checkpoint=place / "checkpoint",
        spark=spark,
    ) as pipeline:
        before = cpu_seconds(spark)
        reports = pipeline.run_available()
        used = cpu_seconds(spark) - before
    if sum(report.stats.quarantined_rows for report in reports):
        raise Disagreement(f"rows of {spool} went to the quarantine")
    return used, place


def _compare(place: Path, other: Path) -> int:
    """How many values both stores have; raises Disagreement if they are not equal."""
    values = [_values(folder / "metrics.db") for folder in (place, other)]
    if values[0] != values[1] or not values[0]:
        raise Disagreement(f"the stores of {place.name} and {other.name} differ")
    return len(values[0])


def _values(path: Path) -> dict[Any, Any]:
    with open_store(f"sqlite:///{path}", create=False) as store:
        return {
            (metric.name, grain.value, value.bucket, value.entity_id): value.value
            for metric in store.metrics()
            for grain in Grain
            for value in store.values(metric, grain=grain)
        }


def _goals(results: Mapping[str, Result]) -> list[Goal]:
    (saved,) = results.values()
    assert isinstance(saved, Saved)
    fewer = saved.fewer_bytes
    return [
        at_least("bytes in the spool, rows every 0.2 s to deltas", fewer("rows every 0.2 s"), 50),
        at_least("bytes in the spool, rows in full segments to deltas", fewer("rows"), 50),
        at_least("the pipeline's processor time, rows to deltas", saved.less_cpu, 10),
    ]


BENCHMARK = Benchmark(
    name="edge",
    about="Bytes in the spool and Spark's processor time: events as rows, and as deltas.",
    full={"hour": lambda: measure(entities=200, minutes=60, rounds=2)},
    quick={"hour": lambda: measure(entities=20, minutes=5, rounds=1)},
    goals=_goals,
    goals_caption="An hour of events at 1,000 a minute of each entity.",
)

if __name__ == "__main__":
    raise SystemExit(BENCHMARK.run())
