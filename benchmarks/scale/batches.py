"""Batches with a given number of groups, run through the pipeline on a cluster."""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from batchmill.spark import BatchReport, Pipeline, PipelineSettings
from benchmarks.kit.report import say
from benchmarks.pipeline.data import ENDPOINTS, SEED, SIX, SOURCE, START, made_once, sixty, texts
from benchmarks.pipeline.ours import scratch
from benchmarks.scale.cluster import (
    DRIVER_JVM,
    DRIVER_PYTHON,
    WORK,
    Memory,
    Session,
    spent,
)

MINUTES = 10
"""Of a batch; the next has the minutes that follow."""
SEGMENTS = 20
WARM_UPS = 1


@dataclass(frozen=True)
class Case:
    """What a batch has."""

    events: int
    groups: int
    """Pairs of an entity and a minute."""
    metrics: int = 6
    again: bool = False
    """Whether all batches have the same groups, so that the store updates rows."""
    segments: int = SEGMENTS

    @property
    def name(self) -> str:
        again = ", again" if self.again else ""
        return f"{self.groups:,} groups, {self.metrics} metrics{again}"


@dataclass(frozen=True)
class Turn:
    """A batch, and what it took."""

    cpu_s: Mapping[str, float]
    """Processor seconds, by role."""
    seconds: float
    """By the clock."""
    memory: Memory
    merged: int
    """Rows of deltas."""

    @property
    def driver(self) -> float:
        """Processor seconds of the driver."""
        return self.cpu_s[DRIVER_PYTHON] + self.cpu_s[DRIVER_JVM]

    @property
    def share(self) -> float:
        """The driver's part of all."""
        return self.driver / sum(self.cpu_s[role] for role in WORK)


@dataclass
class Turns:
    """The batches of one kind, without those that warmed up."""

    case: Case
    idle: Mapping[str, float]
    """Processor seconds of a second in which nothing was to be done, by role: a part of all."""
    turns: list[Turn] = field(default_factory=list)

    def cpu(self, role: str) -> float:
        """Processor seconds of a role: the median."""
        return median(turn.cpu_s[role] for turn in self.turns)

    @property
    def driver(self) -> float:
        """The same of the driver."""
        return median(turn.driver for turn in self.turns)

    @property
    def busy_driver(self) -> float:
        """The driver's, less what it takes in as many seconds when nothing is to be done.

        Timers and heartbeats go by the clock, and so by what else the machine does.
        """
        rate = self.idle[DRIVER_PYTHON] + self.idle[DRIVER_JVM]
        return median(turn.driver - rate * turn.seconds for turn in self.turns)

    @property
    def memory(self) -> Memory:
        """The driver's memory: medians."""
        looks = [turn.memory for turn in self.turns]
        return Memory(
            median(look.python for look in looks),
            median(look.heap for look in looks),
            median(look.live for look in looks),
        )

    def as_json(self) -> dict[str, Any]:
        """What to keep."""
        return {**asdict(self), "name": self.case.name, "driver_s": self.driver}


def warm_up(session: Session, url: str, *, batches: int) -> None:
    """Small batches, so that the driver's JVM has compiled what every batch does."""
    run_case(session, url, Case(10_000, 1_000), batches=batches)
    session.measure_idle()
    say(", ".join(f"{role} {rate * 1000:.1f} ms/s idle" for role, rate in session.idle.items()))


def run_case(session: Session, url: str, case: Case, *, batches: int) -> Turns:
    """So many batches into an empty store, after one that warms up."""
    result = Turns(case, session.idle)
    looks: list[tuple[float, Mapping[str, float]]] = []

    def look(report: BatchReport) -> None:
        after, now = session.cpu(), time.perf_counter()
        if report.number >= WARM_UPS:
            began, before = looks[-1]
            cost = spent(before, after)
            memory = session.memory()
            result.turns.append(Turn(cost, now - began, memory, report.result.merged))
        rows = report.stats.rows
        if rows != case.events:
            raise RuntimeError(f"{rows:,} of {case.events:,} events in batch {report.number}")
        if report.result.merged < case.groups:
            merged = report.result.merged
            raise RuntimeError(f"{merged:,} rows of {case.groups:,} groups in {report.number}")
        session.reset_memory()
        looks.append((time.perf_counter(), session.cpu()))
        if result.turns:
            say(f"{case.name}: {_summary(result.turns[-1])}")

    with (
        scratch() as work,
        Pipeline(
            oal=SIX if case.metrics == 6 else sixty(),
            spool=spool_of(case, batches + WARM_UPS),
            store=url,
            checkpoint=work / "checkpoint",
            quarantine=work / "quarantine",
            spark=session.spark,
            # All groups are to be merged, though all their entities are new in one minute.
            settings=PipelineSettings(
                max_batch_files=case.segments, max_new_entities=0, max_entities=0
            ),
            on_batch=look,
        ) as pipeline,
    ):
        pipeline.run_available()
    return result


def _summary(turn: Turn) -> str:
    roles = "; ".join(f"{role} {seconds:.2f}" for role, seconds in turn.cpu_s.items())
    memory = turn.memory
    return (
        f"{roles}; {turn.merged:,} rows; "
        f"{memory.python:.0f}, {memory.heap:.0f}, {memory.live:.0f} MiB"
    )


def spool_of(case: Case, batches: int) -> Path:
    """A spool with the segments of so many batches."""
    again = "-again" if case.again else ""
    name = f"scale-{case.events}-{case.groups}-{case.segments}{again}-{batches}"

    def write(folder: Path) -> None:
        (folder / SOURCE).mkdir()
        # By another process, so that what they take of memory is not the driver's.
        with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as writer:
            for number in range(batches):
                writer.submit(write_batch, folder / SOURCE, case, number).result()

    return made_once(name, write)


def write_batch(folder: Path, case: Case, number: int) -> None:
    """The segments of a batch."""
    rng = np.random.default_rng([SEED, case.groups, number])
    entities = case.groups // MINUTES
    # Every group has as many events as the others, and they come by time.
    minute, entity = np.divmod(np.arange(case.events) % case.groups, entities)
    times = minute * 60_000_000 + rng.integers(0, 60_000_000, case.events)
    order = np.argsort(times)
    times, entity = times[order], entity[order]
    start = START + (0 if case.again else number) * timedelta(minutes=MINUTES)
    times += int(start.timestamp()) * 1_000_000
    names = [f"/service-{n // ENDPOINTS}/endpoint-{n % ENDPOINTS}" for n in range(entities)]
    services = [f"service-{n}" for n in range(entities // ENDPOINTS + 1)]
    latency = np.minimum(rng.lognormal(3.5, 0.9, case.events), 60_000).astype(np.int32)
    codes = rng.choice(np.array([200, 201, 404, 500], np.int32), case.events)
    status = rng.random(case.events) < 0.97
    kinds = rng.integers(0, 4, case.events)
    table = pa.table(
        {
            "time": pa.array(times).cast(pa.timestamp("us", tz="UTC")),
            "name": texts(entity, names),
            "serviceName": texts(entity // ENDPOINTS, services),
            "serviceLayer": texts(np.zeros(case.events, np.int32), ["GENERAL"]),
            "latency": pa.array(latency),
            "status": pa.array(status),
            "httpResponseStatusCode": pa.array(codes),
            "type": texts(kinds, ["HTTP", "RPC", "gRPC", "MQ"]),
        }
    )
    rows = -(-case.events // case.segments)
    for place in range(case.segments):
        file = folder / f"{number:03d}-{place:03d}.parquet"
        pq.write_table(table.slice(place * rows, rows), file)
