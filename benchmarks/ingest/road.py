"""The whole path in real processes: senders, ``batchmill ingest``, ``batchmill pipeline``, SQLite.

A rate is sustained if the lag does not grow. Markers measure the time from the sender to the store:
single spans of services that occur nowhere else, which the benchmark polls for in the store.
"""

from __future__ import annotations

import contextlib
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from batchmill.run.settings import SETTINGS
from batchmill.spool import unread
from benchmarks.ingest.bodies import marker, random_of
from benchmarks.ingest.receive import checked
from benchmarks.ingest.receiver import Running, rss_mib, running, scratch
from benchmarks.ingest.road_result import Lag, Mark, Road, Step
from benchmarks.ingest.senders import HTTP, Load, Senders, connected
from benchmarks.kit.machine import tree_rss_mib
from benchmarks.kit.report import say

SPANS, CONNECTIONS = 500, 16
TRIGGER_S: float = next(setting.default for setting in SETTINGS if setting.name == "trigger")
"""As ``batchmill run`` has it, and so is the dedup."""
FIRST_RATE, FACTOR = 4_000.0, 1.3
"""Rates are tried from here on, each that much higher, until the lag grows."""
_POLL_S = 0.05
_PATIENCE_S = 240.0


def measure(
    *,
    seconds: float,
    warm_up_s: float,
    step_s: float,
    steps: int,
    rate: float | None,
    spans: int = SPANS,
) -> Road:
    """Find a rate that is sustained, unless one is given, and sustain it; ``spans`` a request."""
    with scratch() as home, pipeline_of(home) as pipeline, ingest_of(home) as ingest:
        senders = Senders()
        try:
            drive = Drive(home, senders, ingest, pipeline, spans)
            # The first micro-batches are those of a JVM that has just started.
            drive.step(rate or FIRST_RATE / 2, warm_up_s, "warm-up")
            chosen, tried = rate, []
            if chosen is None:
                tried = list(_climb(drive, step_s, steps))
                fit = [step.target for step in tried if step.sustained]
                chosen = max(fit, default=FIRST_RATE / FACTOR)
                drive.await_read()
            whole = drive.step(chosen, seconds, "the run")
            drive.await_read()
            acknowledged, counted = drive.acknowledged, drive.store.counted()
            memory = (ingest.rss(), rss_mib(pipeline.pid) + tree_rss_mib(pipeline.pid))
        finally:
            senders.close()
    return Road(whole, tried, acknowledged, counted, TRIGGER_S, *memory)


def _climb(drive: Drive, step_s: float, steps: int) -> Iterator[Step]:
    rate = FIRST_RATE
    for _ in range(steps):
        step = drive.step(rate, step_s, "how much is sustained")
        yield step
        if not step.sustained:
            break
        rate *= FACTOR


class Drive:
    """Sends at a rate for some time, and watches."""

    def __init__(
        self,
        home: Path,
        senders: Senders,
        ingest: Running,
        pipeline: subprocess.Popen[str],
        spans: int = SPANS,
    ) -> None:
        self._home = home
        self._senders = senders
        self._ingest = ingest
        self._pipeline = pipeline
        self._spans = spans
        self._marks = 0
        self.store = StoreView(home / "metrics.db")
        self.acknowledged = 0

    def step(self, rate: float, seconds: float, what: str) -> Step:
        say(f"road: {what}, {rate:,.0f} spans/s for {seconds:g} s")
        load = Load(
            protocol=HTTP, address=self._ingest.http, spans=self._spans, connections=CONNECTIONS,
            seconds=seconds, rate=rate, distinct=8,
        )  # fmt: skip
        before = self.store.counted()
        began, end = time.monotonic(), time.monotonic() + seconds
        marks: list[Mark] = []
        over = threading.Event()
        marking = threading.Thread(target=self._mark, args=(marks, end), daemon=True)
        looking = threading.Thread(target=self._look_for, args=(marks, over), daemon=True)
        self._senders.start(load)
        for thread in (marking, looking):
            thread.start()
        lags = []
        while (now := time.monotonic()) < end:
            self._alive()
            waiting = unread(self._home / "spool")
            lags.append(Lag(now - began, waiting.segments, waiting.bytes, waiting.oldest_s))
            time.sleep(min(0.5, max(0.0, end - now)))
        committed = self.store.counted() - before
        sent = checked(self._senders.result())
        marking.join()
        deadline = time.monotonic() + _PATIENCE_S
        while any(mark.committed is None for mark in marks) and time.monotonic() < deadline:
            self._alive()
            time.sleep(_POLL_S)
        over.set()
        looking.join()
        self.acknowledged += sent.spans() + len(marks)
        return Step(
            target=rate,
            seconds=seconds,
            rate=sent.spans() / seconds,
            committed_rate=committed / seconds,
            refused=sent.refused,
            answers=sent.waits(0.0),
            lags=lags,
            marks=marks,
        )

    def await_read(self) -> None:
        """Until the store has all that was acknowledged."""
        deadline = time.monotonic() + _PATIENCE_S
        while self.store.counted() < self.acknowledged and time.monotonic() < deadline:
            self._alive()
            time.sleep(0.2)

    def flood(self, seconds: float) -> tuple[int, float]:
        """Send as much as is taken; how many spans, and after how long the store had them all."""
        say(f"road: full load for {seconds:g} s")
        load = Load(
            protocol=HTTP, address=self._ingest.http, spans=self._spans, connections=CONNECTIONS,
            seconds=seconds, distinct=8,
        )  # fmt: skip
        began = time.monotonic()
        sent = checked(self._senders.run(load))
        self.acknowledged += sent.spans()
        self.await_read()
        return sent.spans(), time.monotonic() - began

    def _mark(self, marks: list[Mark], end: float) -> None:
        """About a marker each second, without the rhythm of the pipeline's trigger."""
        rng = random_of(time.time_ns())
        with connected(HTTP, self._ingest.http) as send:
            while time.monotonic() < end - 1:
                name = f"marker-{self._marks}"
                self._marks += 1
                data = marker(name, time.time_ns(), rng)
                sent = time.monotonic()
                while (pause := send(data)) is not None:
                    time.sleep(pause)
                marks.append(Mark(name, sent, time.monotonic()))
                time.sleep(max(0.0, sent + 0.5 + float(rng.random()) - time.monotonic()))

    def _look_for(self, marks: list[Mark], over: threading.Event) -> None:
        while not over.wait(_POLL_S):
            waiting = [mark for mark in marks if mark.committed is None]
            there = self.store.markers() if waiting else set()
            now = time.monotonic()
            for mark in waiting:
                if mark.name in there:
                    mark.committed = now

    def _alive(self) -> None:
        if self._pipeline.poll() is not None:
            raise RuntimeError(f"the pipeline ended:\n{(self._home / 'pipeline.log').read_text()}")


class StoreView:
    """Looks into the store, as anybody may; each thread with a connection for each look."""

    def __init__(self, path: Path) -> None:
        self._address = f"file:{path}?mode=ro"

    def counted(self) -> int:
        """Spans that a commit has."""
        sums = "SELECT sum(n) FROM counter WHERE what = 'rows' AND source = 'Span'"
        return int((self._rows(sums) or [(0,)])[0][0] or 0)

    def markers(self) -> set[str]:
        """The names that markers have given to services, and some others."""
        like = "SELECT name FROM entity WHERE name >= 'marker-' AND name < 'marker.'"
        return {name for (name,) in self._rows(like)}

    def _rows(self, query: str) -> list[tuple[Any, ...]]:
        try:
            with contextlib.closing(sqlite3.connect(self._address, uri=True, timeout=10)) as link:
                return link.execute(query).fetchall()
        except sqlite3.OperationalError:  # not there yet
            return []


@contextlib.contextmanager
def ingest_of(home: Path, *options: str) -> Iterator[Running]:
    """``batchmill ingest``, on free ports."""
    command = [sys.executable, "-m", "batchmill", "ingest", "--home", str(home), *options]
    with running([*command, "--http-port", "0", "--grpc-port", "0"], home) as process:
        yield process


@contextlib.contextmanager
def pipeline_of(home: Path, *options: str) -> Iterator[subprocess.Popen[str]]:
    """``batchmill pipeline``, ready; it reads the spool unless ``options`` say otherwise."""
    command = [
        *(sys.executable, "-m", "batchmill", "pipeline"),
        *("--spool", str(home / "spool"), "--store", f"sqlite:///{home / 'metrics.db'}"),
        *("--checkpoint", str(home / "checkpoint"), "--trigger", str(TRIGGER_S)),
        *("--dedup", "10m", "--remove-read", *options),
    ]
    (home / "spool").mkdir(exist_ok=True)
    log = home / "pipeline.log"
    with (
        log.open("w") as out,
        subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, text=True) as process,
    ):
        try:
            deadline = time.monotonic() + _PATIENCE_S
            while "waiting for segments" not in log.read_text():
                if process.poll() is not None or time.monotonic() > deadline:
                    raise RuntimeError(f"the pipeline did not start:\n{log.read_text()}")
                time.sleep(0.2)
            yield process
            process.send_signal(signal.SIGTERM)
            process.wait(60)
        finally:
            process.kill()
