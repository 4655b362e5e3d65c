"""``batchmill pipeline`` and ``batchmill backfill``: the pipeline, run from the command line."""

from __future__ import annotations

import argparse
import contextlib
import logging
import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from batchmill._errors import BatchmillError
from batchmill.cli._options import add_pipeline_options, pipeline_arguments

if TYPE_CHECKING:
    from batchmill.spark import BatchReport, Pipeline


def add_parsers(commands: Any) -> None:
    """Add both commands."""
    pipeline = commands.add_parser(
        "pipeline",
        help="turn the events in a spool into metrics in a store",
        description="Read segments from a spool as they come, compute metrics on Spark, and merge "
        "them into a store, each event exactly once. Ctrl-C ends it after the running batch; "
        "started again, it goes on where it was.",
    )
    add_pipeline_options(pipeline)
    pipeline.add_argument(
        "--trigger", type=float, default=5.0, metavar="S", help="look for segments every S seconds"
    )
    pipeline.add_argument(
        "--once", action="store_true", help="process what is there, then end; as a cron job would"
    )
    backfill = commands.add_parser(
        "backfill",
        help="add past events to a store",
        description="Add the segments of a folder that is laid out like a spool. It may run beside "
        "a live pipeline on the same store. Repeated, it adds only what is not in yet.",
    )
    backfill.add_argument("folder", help="with one sub-folder for each event type")
    add_pipeline_options(backfill)


def run(given: argparse.Namespace) -> int:
    """Run either command; the exit code."""
    logging.basicConfig(format="%(levelname)s %(message)s", level=logging.WARNING)
    try:
        from batchmill.spark import Pipeline

        started = time.perf_counter()
        with Pipeline(**pipeline_arguments(given)) as pipeline, _interruptible() as interrupted:
            _introduce(pipeline, time.perf_counter() - started)
            if given.command == "backfill":
                return _backfill(pipeline, Path(given.folder))
            return _pipeline(pipeline, given, interrupted)
    except BatchmillError as error:
        print(f"batchmill {given.command}: {error}", file=sys.stderr)
        return 1


def _pipeline(pipeline: Pipeline, given: argparse.Namespace, interrupted: threading.Event) -> int:
    pipeline.on_batch = _show
    if given.once:
        reports = pipeline.run_available()
        if not reports:
            print("nothing new in the spool")
        return 0
    pipeline.start(given.trigger)
    print("waiting for segments; Ctrl-C ends it", flush=True)
    while not interrupted.is_set():
        if pipeline.await_end(1):
            return 0
    print("ending after the running batch", flush=True)
    return 0


def _backfill(pipeline: Pipeline, folder: Path) -> int:
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeRemainingColumn

    total = sum(1 for _ in folder.rglob("*.parquet")) if folder.is_dir() else 0
    columns = ("[progress.description]{task.description}", BarColumn(), MofNCompleteColumn())
    with Progress(*columns, TimeRemainingColumn()) as progress:
        task = progress.add_task("segments", total=total)

        def show(report: BatchReport) -> None:
            done = report.stats.segments + report.stats.quarantined_segments
            progress.update(task, advance=done)
            progress.console.print(_line(report), highlight=False)

        reports = pipeline.backfill(folder, on_batch=show)
        if sum(each.applied for each in reports) == 0:
            progress.update(task, completed=total)
    rows = sum(each.stats.rows for each in reports)
    print(
        f"{rows:,} rows added"
        if rows
        else "nothing to add: every segment in that folder is in the store already, or it has none"
    )
    return 0


def _introduce(pipeline: Pipeline, seconds: float) -> None:
    sources = pipeline.metrics.by_source()
    print(
        f"{len(pipeline.metrics)} metrics of {len(sources)} event types: "
        f"{pipeline.spool} -> {pipeline.store.url} "
        f"(Spark {pipeline.spark.version}, {pipeline.spark.sparkContext.master}, "
        f"started in {seconds:.1f} s)",
        flush=True,
    )


def _show(report: BatchReport) -> None:
    print(_line(report), flush=True)


def _line(report: BatchReport) -> str:
    if not report.applied:
        return f"batch {report.number}: in the store already"
    stats, result = report.stats, report.result
    parts = [
        f"batch {report.number}: {stats.rows:,} rows from {stats.segments:,} segments, "
        f"{result.merged:,} deltas, {report.spark_s + report.store_s:.2f} s "
        f"(Spark {report.spark_s:.2f}, store {report.store_s:.2f})"
    ]
    for count, what in (
        (stats.late, "late"),
        (result.expired, "older than the TTL"),
        (stats.quarantined_rows, "rows set aside"),
        (stats.quarantined_segments, "segments set aside"),
    ):
        if count:
            parts.append(f"{count:,} {what}")
    return "; ".join(parts)


@contextlib.contextmanager
def _interruptible() -> Iterator[threading.Event]:
    """An event that Ctrl-C or SIGTERM sets; a second Ctrl-C interrupts for good.

    Set up once Spark has started: it puts a handler of its own in place.
    """
    interrupted = threading.Event()

    def note(number: int, frame: object) -> None:
        if interrupted.is_set() and number == signal.SIGINT:
            raise KeyboardInterrupt
        interrupted.set()

    before = {each: signal.signal(each, note) for each in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield interrupted
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)
