"""How fast a pipeline with default settings reads a spool that is full when it starts."""

from __future__ import annotations

import contextlib
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from batchmill.ingest.decode import PROTOBUF, Limits, decode_traces
from batchmill.spool import SPAN_SOURCE, Spool
from benchmarks.ingest.receiver import scratch
from benchmarks.ingest.road import StoreView, pipeline_of
from benchmarks.kit.machine import cpu_s, tree_cpu_s
from benchmarks.kit.report import Table, say
from benchmarks.road.cost import DISTINCT, MILLION, requests

_POLL_S = 0.1


@dataclass(frozen=True, kw_only=True)
class Flood:
    """What the waiting spans took."""

    spans: int
    start_s: float
    """Until the process was ready to read."""
    seconds: float
    """From then on, until all spans were committed."""
    cpu_s: float
    """Processor seconds of all processes of the pipeline, its start included."""

    @property
    def rate(self) -> float:
        """Spans a second, once the pipeline has started."""
        return self.spans / self.seconds

    def tables(self) -> list[Table]:
        return [
            Table(
                "A full spool",
                f"{self.spans:,} spans wait in the spool, then batchmill pipeline starts with"
                " default settings (core metrics, dedup 10m, SQLite): seconds until it is ready,"
                " then until all are committed. Processor seconds include its start.",
                ["spans/s", "start", "then", "with the start, spans/s", "cpu, s a million"],
                [
                    [
                        f"{self.rate:,.0f}",
                        f"{self.start_s:.1f} s",
                        f"{self.seconds:.1f} s",
                        f"{self.spans / (self.start_s + self.seconds):,.0f}",
                        f"{self.cpu_s * MILLION / self.spans:.1f}",
                    ]
                ],
            )
        ]

    def as_json(self) -> dict[str, Any]:
        return {**vars(self), "rate": self.rate}


def measure(*, spans: int) -> Flood:
    """Fill a spool, start a pipeline, and wait until the store has all."""
    with scratch() as home:
        say(f"flood: writing {spans:,} spans")
        fill(home / "spool", spans)
        store = StoreView(home / "metrics.db")
        began = time.monotonic()
        with pipeline_of(home) as pipeline:
            ready = time.monotonic()
            while (counted := store.counted()) < spans:
                if pipeline.poll() is not None:
                    log = (home / "pipeline.log").read_text()
                    raise RuntimeError(f"the pipeline ended at {counted:,} spans:\n{log}")
                time.sleep(_POLL_S)
            ended = time.monotonic()
            spent = cpu_s(pipeline.pid) + tree_cpu_s(pipeline.pid)
        if counted != spans:
            raise RuntimeError(f"{counted:,} spans counted where {spans:,} were written")
    return Flood(spans=spans, start_s=ready - began, seconds=ended - ready, cpu_s=spent)


def fill(folder: Path, spans: int, number: int = 0) -> None:
    """Write so many spans to a spool, as the receiver does; ids differ by ``number``."""
    with contextlib.closing(Spool(folder)) as spool:
        limits = Limits()
        waiting = []
        for body in requests(spans, number, time.time_ns()):
            decoded = decode_traces(body, PROTOBUF, limits)
            waiting.append(spool.submit(SPAN_SOURCE, decoded.batch))
            if len(waiting) == DISTINCT:
                waiting.pop(0).result()
        spool.flush()
        for future in waiting:
            future.result()
