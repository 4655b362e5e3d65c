"""A backlog beside live traffic: how long it takes, and how old the newest data is meanwhile."""

from __future__ import annotations

import contextlib
import itertools
import json
import subprocess
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from batchmill.ingest.decode import PROTOBUF, Limits, decode_traces
from batchmill.spool import SPAN_SOURCE, Spool
from benchmarks.ingest.bodies import bodies, random_of
from benchmarks.ingest.receiver import scratch
from benchmarks.ingest.road import StoreView, pipeline_of
from benchmarks.kit.machine import cpu_s, tree_cpu_s, tree_rss_mib
from benchmarks.kit.report import Table, say
from benchmarks.road.cost import DISTINCT, MILLION, REQUEST_SPANS
from benchmarks.road.flood import fill

TARGET_S = 10.0
"""The default of ``target_batch_s``."""
LIVE_RATE = 2_000
HEAP = "1g"
_POLL_S = 0.1
_LIVE_IDS = 1_000_000
"""So that live spans have ids of their own."""


@dataclass(kw_only=True)
class Backlog:
    """What the backlog took, and what became of the live spans."""

    spans: int
    rate: int
    """Live spans a second."""
    live: int = 0
    """Live spans that were sent until the backlog was worked off."""
    seconds: float = 0.0
    """From the first start of the process until the backlog was worked off."""
    starts: int = 0
    """How often the process was started: again, if it ended too early."""
    cpu_s: float = 0.0
    """Processor seconds of the last process, its start included."""
    memory_mib: float = 0.0
    """The most memory of the processes below the pipeline's: JVM and tasks."""
    counted: int = 0
    """All spans in the store, in the end."""
    batches: list[float] = field(default_factory=list)
    """How long each batch took."""
    ages: list[float] = field(default_factory=list)
    """The age of the newest data in the store just before each commit but the first, in seconds."""

    def tables(self) -> list[Table]:
        return [
            Table(
                "A backlog beside live traffic",
                f"{self.spans:,} spans wait in the spool and {self.rate:,} more arrive each second;"
                f" batchmill pipeline with default settings, local[2] and a heap of {HEAP}. The age"
                " is that of the newest data in the store, just before each commit.",
                [
                    "worked off in",
                    "starts",
                    "cpu, s a million",
                    "memory",
                    "longest batch",
                    "oldest age",
                ],
                [
                    [
                        f"{self.seconds:.0f} s",
                        f"{self.starts}",
                        f"{self.cpu_s * MILLION / max(1, self.counted):.1f}",
                        f"{self.memory_mib:,.0f} MiB",
                        f"{max(self.batches, default=0.0):.1f} s",
                        f"{max(self.ages, default=0.0):.1f} s",
                    ]
                ],
            )
        ]

    def as_json(self) -> dict[str, Any]:
        return vars(self)


def measure(
    *, spans: int, rate: int = LIVE_RATE, options: Sequence[str] = (), patience_s: float = 3600.0
) -> Backlog:
    """Fill a spool, start a pipeline, send on, and wait until the store has all.

    ``options`` are those of the pipeline, beside its heap.
    """
    result = Backlog(spans=spans, rate=rate)
    with scratch() as home:
        say(f"backlog: writing {spans:,} spans")
        fill(home / "spool", spans)
        spark = ("--master", "local[2]", "--conf", f"spark.driver.memory={HEAP}")
        began = time.monotonic()
        watch = _Watch(home, result, began, began + patience_s)
        with sending(home / "spool", rate) as sent:
            is_done = False
            while not is_done:
                result.starts += 1
                with pipeline_of(home, *spark, *options) as pipeline:
                    is_done = watch.follow(pipeline, sent)
    return result


class _Watch:
    """Reads the progress of a pipeline after each of its commits."""

    def __init__(self, home: Path, result: Backlog, began: float, deadline: float) -> None:
        self._progress = home / "checkpoint" / "progress.json"
        self._log = home / "pipeline.log"
        self._store = StoreView(home / "metrics.db")
        self._result = result
        self._began = began
        self._deadline = deadline
        self._last: dict[str, Any] = {}
        self._newest_at: float | None = None
        """When the newest data in the store was written."""

    def follow(self, pipeline: subprocess.Popen[str], sent: Sending) -> bool:
        """Until all spans are counted, of which none is sent any more once only live ones wait.

        False if the process has ended before: then it has to be started again.
        """
        result = self._result
        while not (sent.stopped or self._is_worked_off()):
            if not self._runs(pipeline):
                return False
            result.memory_mib = max(result.memory_mib, tree_rss_mib(pipeline.pid))
            time.sleep(_POLL_S)
        if not sent.stopped:
            result.seconds = time.monotonic() - self._began
            sent.stop()
            result.live = sent.spans
        while (counted := self._store.counted()) < result.spans + result.live:
            if not self._runs(pipeline):
                return False
            time.sleep(_POLL_S)
        result.counted = counted
        result.cpu_s = cpu_s(pipeline.pid) + tree_cpu_s(pipeline.pid)
        return True

    def _runs(self, pipeline: subprocess.Popen[str]) -> bool:
        if time.monotonic() > self._deadline:
            raise RuntimeError(f"not worked off: {self._result}\n{self._log.read_text()}")
        if pipeline.poll() is not None:
            say(f"the pipeline ended, and is started again:\n{self._log.read_text()[-2000:]}")
            return False
        return True

    def _is_worked_off(self) -> bool:
        """Note a commit, if there was one; whether only live spans wait."""
        try:
            progress = json.loads(self._progress.read_text())
        except (OSError, ValueError):
            return False
        if not progress["batches"]:
            return False
        batch = progress["batches"][-1]
        if batch != self._last:
            self._last = batch
            self._result.batches.append(batch["seconds"])
            if self._newest_at is not None:
                self._result.ages.append(round(batch["at"] - self._newest_at, 3))
            self._newest_at = progress["written_at"] - progress["new_lag_s"]
        return bool(progress["lag_s"] <= progress["new_lag_s"])


class Sending:
    """Live spans on their way into a spool."""

    def __init__(self, spool: Spool, rate: int) -> None:
        self.spans = 0
        self._spool = spool
        self._pause_s = REQUEST_SPANS / rate
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        rng, limits = random_of(_LIVE_IDS), Limits()
        due = time.monotonic()
        for template in itertools.cycle(bodies(DISTINCT, REQUEST_SPANS)):
            due += self._pause_s
            if self._end.wait(max(0.0, due - time.monotonic())):
                return
            body = template.fresh(rng, time.time_ns())
            self._spool.submit(SPAN_SOURCE, decode_traces(body, PROTOBUF, limits).batch).result()
            self.spans += REQUEST_SPANS

    @property
    def stopped(self) -> bool:
        """Whether no more are sent."""
        return self._end.is_set()

    def stop(self) -> None:
        """Send no more."""
        self._end.set()
        self._thread.join()


@contextlib.contextmanager
def sending(folder: Path, rate: int) -> Iterator[Sending]:
    """Send so many spans a second to a spool, meanwhile."""
    with contextlib.closing(Spool(folder)) as spool:
        sent = Sending(spool, rate)
        try:
            yield sent
        finally:
            sent.stop()
