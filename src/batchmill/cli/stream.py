"""``batchmill pipeline`` and ``batchmill backfill``: the pipeline, run from the command line."""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import signal
import sys
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from batchmill.cli.options import add_pipeline_options, pipeline_arguments
from batchmill.cli.stream_view import batch_line, error_line, summary
from batchmill.errors import BatchmillError

if TYPE_CHECKING:
    from batchmill.spark import BatchReport, Pipeline

_LONGEST_TRIGGER_S = 86_400.0
_LOOK_S = 0.5
_SHOW_CURSOR = b"\x1b[?25h"


def add_parsers(commands: Any) -> None:
    """Add both commands."""
    pipeline = commands.add_parser(
        "pipeline",
        help="turn the events in a spool into metrics in a store",
        description="Read segments from a spool as they come, compute metrics on Spark, and merge "
        "them into a store, each event exactly once. Ctrl-C or SIGTERM ends it after the running "
        "batch, a second Ctrl-C at once; started again, it goes on where it was.",
    )
    add_pipeline_options(pipeline)
    pipeline.add_argument(
        "--trigger",
        type=_trigger,
        default=5.0,
        metavar="S",
        help="look for segments every S seconds",
    )
    pipeline.add_argument(
        "--once", action="store_true", help="process what is there, then end; as a cron job would"
    )
    pipeline.add_argument(
        "--remove-read",
        action="store_true",
        help="remove segments from the spool once they are in the store; not for a spool that "
        "another pipeline reads, too",
    )
    backfill = commands.add_parser(
        "backfill",
        help="add past events to a store",
        description="Add the segments of a folder that is laid out like a spool. It may run beside "
        "a live pipeline on the same store. Repeated, it adds only what is not in yet. Ctrl-C or "
        "SIGTERM ends it after the running batch, a second Ctrl-C at once.",
    )
    backfill.add_argument("folder", help="with one sub-folder for each event type")
    add_pipeline_options(backfill)
    for each in (pipeline, backfill):
        each.add_argument(
            "--verbose", action="store_true", help="say more, and what exactly went wrong"
        )


def run(given: argparse.Namespace) -> int:
    """Run either command; the exit code."""
    level = logging.INFO if given.verbose else logging.WARNING
    logging.basicConfig(format="%(levelname)s %(message)s", level=level)
    try:
        from batchmill.spark import Pipeline

        started = time.perf_counter()
        pipeline = Pipeline(**pipeline_arguments(given))
        # Only now: starting Spark puts a handler of its own in place.
        with _interruptible(pipeline) as asked, pipeline:
            _introduce(pipeline, time.perf_counter() - started)
            if given.command == "backfill":
                return _backfill(pipeline, Path(given.folder), asked)
            return _pipeline(pipeline, given, asked)
    except BrokenPipeError:  # nobody reads any more: not this command's affair
        raise
    except Exception as error:  # noqa: BLE001 - the last who can say what happened
        if given.verbose and not isinstance(error, BatchmillError):
            traceback.print_exc()
        print(error_line(given.command, error), file=sys.stderr)
        return 1


class _Asked:
    """Which signal has asked for the end, if any has."""

    signal: signal.Signals | None = None


def _pipeline(pipeline: Pipeline, given: argparse.Namespace, asked: _Asked) -> int:
    pipeline.on_batch = _show
    if given.once:
        reports = pipeline.run_available()
        if pipeline.cut_short:
            return _cut_short(asked)
        if not reports:
            print("nothing new to read")
        return 0
    if not _await_source(pipeline, asked):
        print("ended before it began: the broker was not there", flush=True)
        return 0
    pipeline.start(given.trigger)
    what = "messages" if given.source else "segments"
    print(f"waiting for {what}; Ctrl-C ends it", flush=True)
    pipeline.await_end()
    print("ended; started again, it goes on where it was", flush=True)
    return 0


def _await_source(pipeline: Pipeline, asked: _Asked) -> bool:
    """Wait for a broker that is not there yet; False: somebody asked for the end before."""
    from batchmill.kafka import KafkaReadError

    told = False
    while asked.signal is None:
        try:
            pipeline.check_source()
        except KafkaReadError as error:
            if not told:
                print(f"the stream begins when the broker is there: {error}", flush=True)
            told = True
        else:
            return True
        time.sleep(_LOOK_S)
    return False


def _backfill(pipeline: Pipeline, folder: Path, asked: _Asked) -> int:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeRemainingColumn

    total = _segments(folder)
    columns = ("[progress.description]{task.description}", BarColumn(), MofNCompleteColumn())
    with Progress(*columns, TimeRemainingColumn(), console=Console()) as progress:
        before = min(total, pipeline.backfilled(folder))
        task = progress.add_task("segments", total=total, completed=before)

        def show(report: BatchReport) -> None:
            progress.update(task, advance=report.given)
            progress.console.print(batch_line(report), highlight=False)

        reports = pipeline.backfill(folder, on_batch=show)
        if not pipeline.cut_short:
            progress.update(task, completed=total)
    print(summary(reports, total, before, pipeline.quarantine), flush=True)
    return _cut_short(asked) if pipeline.cut_short else 0


def _segments(folder: Path) -> int:
    """How many there are; Spark leaves out names that begin with a dot or an underscore."""
    paths = (each.relative_to(folder) for each in folder.rglob("*.parquet"))
    return sum(not any(part[0] in "._" for part in path.parts) for path in paths)


def _cut_short(asked: _Asked) -> int:
    """There is more to do: whoever asked must not take it for done."""
    what = asked.signal or signal.SIGTERM
    print(f"ended early by {what.name}: run the same command again to go on", flush=True)
    return 128 + what


def _introduce(pipeline: Pipeline, seconds: float) -> None:
    sources = pipeline.metrics.by_source()
    print(
        f"{len(pipeline.metrics)} metrics of {len(sources)} event types: "
        f"{pipeline.reads} -> {pipeline.store.url} "
        f"(Spark {pipeline.spark.version}, {pipeline.spark.sparkContext.master}, "
        f"started in {seconds:.1f} s)",
        flush=True,
    )


def _show(report: BatchReport) -> None:
    print(batch_line(report), flush=True)


@contextlib.contextmanager
def _interruptible(pipeline: Pipeline) -> Iterator[_Asked]:
    """Ctrl-C and SIGTERM ask the pipeline to stop; a second Ctrl-C ends the process.

    What was not committed is done again by the next run, so that is safe at any moment.
    """
    asked = _Asked()

    def note(number: int, frame: object) -> None:
        # It may have interrupted a print: only plain writes are safe here.
        if asked.signal is not None:
            if number == signal.SIGINT:
                if os.isatty(1):
                    os.write(1, _SHOW_CURSOR)
                os.write(2, b"stopped at once: the batch that ran is done again by the next run\n")
                os._exit(130)
            return
        asked.signal = signal.Signals(number)
        pipeline.ask_to_stop()
        os.write(2, b"ending after the running batch; Ctrl-C stops at once\n")

    before = {each: signal.signal(each, note) for each in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield asked
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)


def _trigger(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value <= _LONGEST_TRIGGER_S:  # also refuses nan
        raise argparse.ArgumentTypeError(
            f"{text!r} is not valid: it must be a number of seconds, 0 to {_LONGEST_TRIGGER_S:g}"
        )
    return value
