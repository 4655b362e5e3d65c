"""What spans cost on the whole path, and the same spans in a Collector with spanmetrics."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from statistics import median
from typing import Any

from batchmill.spool import SPAN_SOURCE
from benchmarks.ingest.bodies import bodies, random_of
from benchmarks.ingest.receive import MANY
from benchmarks.ingest.receiver import COLLECTOR, Running, receivers, scratch
from benchmarks.ingest.road import ingest_of
from benchmarks.ingest.senders import HTTP, connected
from benchmarks.kit.machine import cpu_s, tree_cpu_s
from benchmarks.kit.report import Table, say, spread

REQUEST_SPANS, DISTINCT = 500, 64
"""Spans of a request, and how many different requests are sent again and again, with new ids."""
RATE = 10_000
"""Spans a second: how far the starts of a batch's spans lie apart."""
MILLION = 1_000_000
DEDUP_S = 600.0
RECEIVER = "receiver"
_SETTLE_S = 1.0
"""The Collector's batch processor waits 0.2 s at most before it hands spans on."""


@dataclass(frozen=True, kw_only=True)
class Turn:
    """One batch: its spans, and what they took."""

    spans: int
    seconds: float
    """Of the pipeline."""
    cpu_s: Mapping[str, float]
    """Processor seconds of the pipeline, by process."""
    phases: Mapping[str, float]
    """Seconds by phase of the batch."""
    receivers: Mapping[str, float]
    """Processor seconds of batchmill's receiver and of the Collector, if that is there."""

    @property
    def pipeline(self) -> float:
        """Processor seconds of the pipeline for a million spans."""
        return sum(self.cpu_s.values()) * MILLION / self.spans

    def receiver(self, name: str) -> float:
        """The same of a receiver."""
        return self.receivers[name] * MILLION / self.spans

    @property
    def road(self) -> float:
        """The same of the whole path, from the request to the store."""
        return self.pipeline + self.receiver(RECEIVER)


@dataclass
class Cost:
    """The batches of one process, the first of which loads and compiles what all others use."""

    turns: list[Turn] = field(default_factory=list)

    @property
    def first(self) -> Turn:
        return self.turns[0]

    @property
    def warm(self) -> list[Turn]:
        return self.turns[1:]

    def tables(self) -> list[Table]:
        warm = self.warm
        rows = {
            RECEIVER: [turn.receiver(RECEIVER) for turn in warm],
            "pipeline, warm": [turn.pipeline for turn in warm],
            "pipeline, first batch of a process": [self.first.pipeline],
            "receiver and pipeline, warm": [turn.road for turn in warm],
        }
        peer = None
        if COLLECTOR in self.first.receivers:
            rows[f"{COLLECTOR} with spanmetrics"] = [turn.receiver(COLLECTOR) for turn in warm]
            peer = median(turn.receiver(COLLECTOR) for turn in warm)
        return [
            Table(
                "Processor seconds for a million spans",
                f"Batches of {self.first.spans:,} spans, {REQUEST_SPANS} in a request, over HTTP to"
                " batchmill ingest, from the spool through a pipeline on two local cores (core"
                " metrics, dedup 10m) to SQLite; the same requests to a Collector that aggregates"
                " and keeps nothing durable. Medians and ranges of the batches after the first.",
                ["part", "s a million", "range", "to the Collector's"],
                [
                    [
                        name,
                        f"{median(costs):.2f}",
                        spread(costs),
                        f"{median(costs) / peer:.2f}x" if peer else "-",
                    ]
                    for name, costs in rows.items()
                ],
            ),
            Table(
                "The pipeline's batches",
                "Processor seconds by process, and seconds by the clock.",
                ["batch", "by process", "took"],
                [
                    [
                        "warm" if number else "first",
                        ", ".join(f"{name} {spent:.1f}" for name, spent in turn.cpu_s.items()),
                        f"{turn.seconds:.1f} s",
                    ]
                    for number, turn in enumerate(self.turns)
                ],
            ),
        ]

    def as_json(self) -> dict[str, Any]:
        return {"turns": [asdict(turn) for turn in self.turns]}


def requests(spans: int, number: int, end_ns: int) -> Iterator[bytes]:
    """Requests with so many spans in all, at RATE up to a time; ids differ by ``number``."""
    rng = random_of(number)
    begin_ns = end_ns - spans * 10**9 // RATE
    templates = itertools.cycle(bodies(DISTINCT, REQUEST_SPANS))
    for place in range(0, spans, REQUEST_SPANS):
        yield next(templates).fresh(rng, begin_ns + place * 10**9 // RATE)


def measure(*, spans: int, batches: int) -> Cost:
    """Send, read, and send the same to the Collector; one batch after the other."""
    from batchmill.oal import core_script
    from batchmill.spark import Pipeline, PipelineSettings
    from benchmarks.pipeline.ours import jvm_process

    cost = Cost()
    with (
        scratch() as home,
        receivers(home, (COLLECTOR,)) as collectors,
        ingest_of(home) as ingest,
        Pipeline(
            oal=core_script(),
            spool=home / "spool",
            store=f"sqlite:///{home / 'metrics.db'}",
            checkpoint=home / "checkpoint",
            master="local[2]",
            # All that is there is one batch.
            settings=PipelineSettings(max_batch_files=MILLION, max_batch_bytes=2**40),
            dedup_s=DEDUP_S,
            remove_read=True,
        ) as pipeline,
    ):
        jvm = jvm_process(pipeline.spark)
        contenders = {RECEIVER: ingest, **collectors}
        for number in range(batches):
            end_ns = time.time_ns()
            spent = {
                name: _send(contender, requests(spans, number, end_ns))
                for name, contender in contenders.items()
            }
            before, began = _pipeline_cpu_s(jvm), time.perf_counter()
            reports = pipeline.run_available()
            seconds, after = time.perf_counter() - began, _pipeline_cpu_s(jvm)
            (report,) = [report for report in reports if report.stats.segments]
            counted = pipeline.store.counters()["rows", SPAN_SOURCE, ""]
            if counted != (number + 1) * spans:
                raise RuntimeError(f"{counted:,} of {(number + 1) * spans:,} spans counted")
            turn = Turn(
                spans=spans,
                seconds=seconds,
                cpu_s={name: after[name] - before[name] for name in after},
                phases=dict(report.phases),
                receivers=spent,
            )
            phases = ", ".join(f"{phase} {took:.1f}" for phase, took in turn.phases.items())
            say(f"batch {number}: {turn.pipeline:.1f} s a million; by the clock: {phases}")
            cost.turns.append(turn)
    return cost


def _send(receiver: Running, bodies: Iterable[bytes]) -> float:
    """Send all over many connections; the processor seconds of the receiver."""
    waiting, lock = iter(bodies), threading.Lock()

    def send_some(_: int) -> None:
        with connected(HTTP, receiver.http) as send:
            while True:
                with lock:
                    body = next(waiting, None)
                if body is None:
                    return
                while (pause := send(body)) is not None:
                    time.sleep(pause)

    before = receiver.cpu_s()
    with ThreadPoolExecutor(MANY) as connections:
        list(connections.map(send_some, range(MANY)))
    time.sleep(_SETTLE_S)
    return receiver.cpu_s() - before


def _pipeline_cpu_s(jvm: int) -> dict[str, float]:
    return {"driver": time.process_time(), "JVM": cpu_s(jvm), "tasks": tree_cpu_s(jvm)}
