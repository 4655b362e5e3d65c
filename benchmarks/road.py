"""Measure what spans cost on their way to the store, in processor seconds for a million of them.

    python -m benchmarks.road [--quick] [--spans N] [--batches N] [--json FILE]

Segments as the receiver writes them (of the requests of ``benchmarks.ingest_bodies``) are read in
batches by a pipeline on two local cores, with the core metrics, deduplication and SQLite. The first
batch of a process is measured apart: it loads and compiles what all others use. Processor time
hardly depends on what else the machine does; seconds do.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from batchmill.ingest.decode import PROTOBUF, Limits, decode_traces
from batchmill.spool import SPAN_SOURCE, Spool
from benchmarks.ingest_bodies import bodies, random_of
from benchmarks.ingest_receiver import scratch
from benchmarks.machine import cpu_s, machine, machine_line, tree_cpu_s
from benchmarks.report import Table, say, write_json

REQUEST_SPANS, DISTINCT = 500, 64
"""Spans of a request, and how many different requests are sent again and again, with new ids."""
RATE = 10_000
"""Spans a second: how far the starts of a batch's spans lie apart."""
MILLION = 1_000_000
DEDUP_S = 600.0


@dataclass(frozen=True, kw_only=True)
class Size:
    """How much is done."""

    spans: int
    """The spans of a batch."""
    batches: int


FULL = Size(spans=MILLION, batches=3)
QUICK = Size(spans=50_000, batches=2)
"""A minute: to see that all runs, not to quote."""


@dataclass(frozen=True, kw_only=True)
class Turn:
    """One batch: its spans, and what they took."""

    turn: str
    spans: int
    seconds: float
    cpu_s: Mapping[str, float]
    """Processor seconds by process."""
    phases: Mapping[str, float]
    """Seconds by phase of the batch."""

    @property
    def per_million(self) -> float:
        """Processor seconds of all processes for a million spans."""
        return sum(self.cpu_s.values()) * MILLION / self.spans


def requests(spans: int, number: int) -> Iterator[bytes]:
    """Requests with so many spans in all, at RATE up to now; ids differ by ``number``."""
    rng = random_of(number)
    begin_ns = time.time_ns() - spans * 10**9 // RATE
    templates = itertools.cycle(bodies(DISTINCT, REQUEST_SPANS))
    for place in range(0, spans, REQUEST_SPANS):
        yield next(templates).fresh(rng, begin_ns + place * 10**9 // RATE)


def fill(folder: Path, spans: int, number: int) -> None:
    """Write so many spans to a spool, as the receiver does."""
    with contextlib.closing(Spool(folder)) as spool:
        limits = Limits()
        waiting = []
        for body in requests(spans, number):
            decoded = decode_traces(body, PROTOBUF, limits)
            waiting.append(spool.submit(SPAN_SOURCE, decoded.batch))
            if len(waiting) == DISTINCT:
                waiting.pop(0).result()
        spool.flush()
        for future in waiting:
            future.result()


def measure(size: Size) -> Iterator[Turn]:
    """One batch after the other in one process."""
    from batchmill.oal import core_script
    from batchmill.spark import Pipeline, PipelineSettings
    from benchmarks.pipeline_ours import jvm_process

    with (
        scratch() as home,
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
        for number in range(size.batches):
            fill(home / "spool", size.spans, number)
            before, began = _pipeline_cpu_s(jvm), time.perf_counter()
            reports = pipeline.run_available()
            seconds, after = time.perf_counter() - began, _pipeline_cpu_s(jvm)
            (report,) = [report for report in reports if report.stats.segments]
            counted = pipeline.store.counters()["rows", SPAN_SOURCE, ""]
            if counted != (number + 1) * size.spans:
                raise RuntimeError(f"{counted:,} of {(number + 1) * size.spans:,} spans counted")
            yield Turn(
                turn="first" if number == 0 else "warm",
                spans=size.spans,
                seconds=seconds,
                cpu_s={name: after[name] - before[name] for name in after},
                phases=dict(report.phases),
            )


def _pipeline_cpu_s(jvm: int) -> dict[str, float]:
    return {"driver": time.process_time(), "JVM": cpu_s(jvm), "tasks": tree_cpu_s(jvm)}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run it, print the results, and write them to ``--json``."""
    options = _parser().parse_args(arguments)
    size = QUICK if options.quick else FULL
    size = Size(spans=options.spans or size.spans, batches=options.batches or size.batches)
    print(machine_line(), flush=True)
    turns: list[Turn] = []
    for turn in measure(size):
        phases = ", ".join(f"{phase} {seconds:.1f}" for phase, seconds in turn.phases.items())
        say(f"{turn.turn}: {turn.per_million:.1f} s a million; by the clock: {phases}")
        turns.append(turn)
    print("\n" + table(turns).render(), flush=True)
    if options.json:
        document = {"machine": machine(), "quick": options.quick, "size": vars(size)}
        write_json(options.json, document | {"turns": [asdict(turn) for turn in turns]})
    return 0


def table(turns: Sequence[Turn]) -> Table:
    """A row for each turn."""
    return Table(
        "Spans to the store",
        "Processor seconds of all processes for a million spans, and by process; and the seconds"
        " that the batch took.",
        ["batch", "spans", "s a million", "by process", "took"],
        [
            [
                turn.turn,
                f"{turn.spans:,}",
                f"{turn.per_million:.1f}",
                ", ".join(f"{name} {seconds:.1f}" for name, seconds in turn.cpu_s.items()),
                f"{turn.seconds:.1f} s",
            ]
            for turn in turns
        ],
    )


def _whole_requests(text: str) -> int:
    if not text.isdecimal() or not int(text) or int(text) % REQUEST_SPANS:
        raise argparse.ArgumentTypeError(f"{text!r} is not a multiple of {REQUEST_SPANS}")
    return int(text)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.road",
        description="measure what a million spans cost on their way to the store",
    )
    parser.add_argument("--quick", action="store_true", help="a run of a minute, not to quote")
    parser.add_argument(
        "--spans",
        type=_whole_requests,
        metavar="N",
        help=f"of a batch, a multiple of {REQUEST_SPANS}; default {FULL.spans}",
    )
    parser.add_argument("--batches", type=int, metavar="N", help=f"default {FULL.batches}")
    parser.add_argument("--json", type=Path, help="file for the results; default: none")
    return parser


if __name__ == "__main__":
    raise SystemExit(main())
