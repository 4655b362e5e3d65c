"""What keeping spans costs the batches of a running pipeline: their time, and processor time."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any, Self
from unittest import mock

from batchmill.traces import SpanKeeper
from benchmarks.ingest.receiver import scratch
from benchmarks.kit.machine import tree_cpu_s
from benchmarks.kit.report import Table, say, spread
from benchmarks.traces.search import SEGMENT, make_segments

FILES = 5
"""Segments in a batch: what one has kept is sorted beside the next ones."""
_PATIENCE_S = 1_800.0
_TRIGGER_S = 0.1


@dataclass(frozen=True, kw_only=True)
class Turn:
    """All batches of a full spool."""

    batches: int
    seconds: float
    """Of the batches, from the first look at their segments until they are committed."""
    cpu_s: float
    """Processor seconds of this process, its JVM and tasks meanwhile, without the sorting."""
    beside_s: float
    """Processor seconds of the thread that sorts, until the last batch was committed."""
    sorting_s: float
    """The same until all spans were sorted."""


@dataclass
class Batches:
    """The same spans with and without keeping, round by round."""

    spans: int
    off: list[Turn] = field(default_factory=list)
    on: list[Turn] = field(default_factory=list)

    def elapsed_ratio(self) -> float:
        """How long batches take with keeping, to those without in the same round: the median."""
        return median(on.seconds / off.seconds for on, off in zip(self.on, self.off, strict=True))

    def sorting_share(self) -> float:
        """The processor time of the sorting to that of batches without keeping: the median."""
        return median(on.sorting_s / off.cpu_s for on, off in zip(self.on, self.off, strict=True))

    def tables(self) -> list[Table]:
        """What to print."""
        rows = [
            [
                name,
                f"{median(turn.seconds for turn in turns):.2f}",
                spread(turn.seconds for turn in turns),
                f"{median(turn.cpu_s for turn in turns):.2f}",
                f"{median(turn.beside_s for turn in turns):.2f}",
                f"{median(turn.sorting_s for turn in turns):.2f}",
            ]
            for name, turns in (("not kept", self.off), ("kept", self.on))
        ]
        return [
            Table(
                "The cost of keeping spans",
                f"{self.spans:,} spans in the spool of a running pipeline, {FILES * SEGMENT:,} a"
                " batch. Sorting has a thread of low priority; it is not in the processor time of"
                " the batches.",
                ["spans", "batches, s", "range", "cpu, s", "sorting beside, cpu s", "all sorting"],
                rows,
            )
        ]

    def as_json(self) -> dict[str, Any]:
        """What to keep."""
        return {
            "spans": self.spans,
            "off": [asdict(turn) for turn in self.off],
            "on": [asdict(turn) for turn in self.on],
            "elapsed_ratio": self.elapsed_ratio(),
            "sorting_share": self.sorting_share(),
        }


def measure(*, spans: int, rounds: int) -> Batches:
    """Work off a full spool with and without keeping, in turn."""
    result = Batches(spans)
    names = ["off", "on"] * rounds
    with scratch() as folder:
        run(folder / "warm-up", spans=spans, keeps=True)
        for number, name in enumerate(names):
            turn = run(folder / str(number), spans=spans, keeps=name == "on")
            getattr(result, name).append(turn)
    return result


def run(folder: Path, *, spans: int, keeps: bool) -> Turn:
    """The batches of a full spool."""
    from batchmill.oal import core_script
    from batchmill.spark import BatchReport, Pipeline, PipelineSettings

    make_segments(folder / "spool" / "Span", spans, time.time() - 600, 300)
    reports: list[BatchReport] = []
    all_read = threading.Event()

    def note(report: BatchReport) -> None:
        reports.append(report)
        if sum(report.stats.rows for report in reports) >= spans:
            all_read.set()

    with Sorting() as sorting:
        with Pipeline(
            oal=core_script(),
            spool=folder / "spool",
            store=f"sqlite:///{folder}/metrics.db",
            checkpoint=folder / "checkpoint",
            master="local[2]",
            dedup_s=600,
            settings=PipelineSettings(max_batch_files=FILES),
            remove_read=True,
            keep_spans=folder / "traces" if keeps else None,
            on_batch=note,
        ) as pipeline:
            before_s = _cpu_s()
            pipeline.start(_TRIGGER_S)
            if not all_read.wait(_PATIENCE_S):
                raise RuntimeError(f"not all of {spans:,} spans were read: {reports}")
            beside_s = sorting.seconds
            used_s = _cpu_s() - before_s - beside_s
        if keeps:
            SpanKeeper(folder / "traces").tend(everything=True)
        turn = Turn(
            batches=len(reports),
            seconds=round(sum(sum(report.phases.values()) for report in reports), 3),
            cpu_s=round(used_s, 3),
            beside_s=round(beside_s, 3),
            sorting_s=round(sorting.seconds, 3),
        )
    say(f"batch: {'with' if keeps else 'without'} keeping, {turn}")
    return turn


def _cpu_s() -> float:
    """The processor time of this process and of those below it."""
    return time.process_time() + tree_cpu_s(os.getpid())


class Sorting:
    """Processor seconds of all calls of keepers while it is entered, also of one under way."""

    def __init__(self) -> None:
        self.calls = 0
        self._done_s = 0.0
        self._began_s: dict[int, float] = {}
        self._patch = mock.patch.object(SpanKeeper, "tend", self._wrapped(SpanKeeper.tend))

    def __enter__(self) -> Self:
        self._patch.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._patch.stop()

    @property
    def seconds(self) -> float:
        """Those so far."""
        running = self._began_s.copy().items()
        return self._done_s + sum(_thread_cpu_s(ident) - began_s for ident, began_s in running)

    def _wrapped(self, original: Callable[..., None]) -> Callable[..., None]:
        def tend(keeper: SpanKeeper, *, everything: bool = False) -> None:
            ident = threading.get_ident()
            self.calls += 1
            self._began_s[ident] = _thread_cpu_s(ident)
            try:
                original(keeper, everything=everything)
            finally:
                self._done_s += _thread_cpu_s(ident) - self._began_s.pop(ident)

        return tend


def _thread_cpu_s(ident: int) -> float:
    return time.clock_gettime(time.pthread_getcpuclockid(ident))
