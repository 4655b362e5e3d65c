"""``batchmill pipeline`` and ``batchmill backfill``: compute metrics on Spark."""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from batchmill.cli.options import (
    OTHER_RUN,
    Options,
    add_home_options,
    add_kafka_option,
    add_metrics_options,
    add_sources_option,
    import_sources,
    kafka_options,
    metrics_page,
    mib,
    number,
    only_given,
    pair,
    whole,
)
from batchmill.errors import BatchmillError, ConfigError
from batchmill.files import own_folder
from batchmill.logs import configure_logs
from batchmill.run import Home, load_settings
from batchmill.store import DOUBTFUL, StoreMissingError
from batchmill.wording import count_of

if TYPE_CHECKING:
    from batchmill.spark import BatchReport, Pipeline

log = logging.getLogger("batchmill.spark")

_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86_400}
_LONGEST_DEDUP_S = 7 * 86_400
_LONGEST_TRIGGER_S = 86_400.0
_LONGEST_ERROR = 300
_POLL_S = 0.5
_SHOW_CURSOR = b"\x1b[?25h"


def add_parser(commands: Any) -> None:
    """Add both commands."""
    pipeline = commands.add_parser(
        "pipeline",
        help="compute metrics from the events in a spool",
        description="Read segments from a spool as they come, compute metrics on Spark, and merge "
        "them into a store, each event exactly once. Ctrl-C or SIGTERM ends it after the running "
        "batch, a second Ctrl-C at once; the next run continues from there.",
    )
    _add_stream_options(pipeline)
    backfill = commands.add_parser(
        "backfill",
        help="add past events to a store",
        description="Add the segments of a folder that is laid out like a spool to the store of a "
        "run, or to that of --store. It may run beside a live pipeline on the same store. "
        "Repeated, it adds only what is not in yet. Ctrl-C or SIGTERM ends it after the running "
        "batch, a second Ctrl-C at once.",
    )
    backfill.add_argument("folder", help="with one sub-folder for each event type")
    add_pipeline_options(backfill, of_home=True)


def _add_stream_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``batchmill pipeline``."""
    add_pipeline_options(parser)
    add = Options(parser)
    text = "look for segments every S seconds (default: %(default)g)"
    add.value("--trigger", "S", text, type=number(_LONGEST_TRIGGER_S, zero=True), default=5.0)
    add.switch("--once", "process what is there, then end; for cron jobs")
    text = "remove segments once they are in the store; not if others read the spool, too"
    add.switch("--remove-read", text)
    text = "keep the spans of segments that were read in this folder, to look at traces; "
    text += "needs --remove-read"
    add.value("--keep-spans", "DIR", text)
    add.value("--keep-spans-hours", "N", "for so long (default: 24)", type=whole())
    text = "drop the oldest of them beyond so many MiB (default: 2048)"
    add.value("--keep-spans-mb", "N", text, type=mib)
    add_metrics_options(parser)


def add_pipeline_options(parser: argparse.ArgumentParser, *, of_home: bool = False) -> None:
    """Add the options of both commands; ``of_home``: places are those of a run, unless named."""
    group = parser.add_argument_group("input and output")
    add = Options(group)

    def place(flag: str, metavar: str, text: str, default: str, home: str) -> None:
        shown = home if of_home else default
        add.value(flag, metavar, f"{text} (default: {shown})", default=None if of_home else default)

    text = "a script, or a folder of *.oal; may be repeated (default: the core metrics)"
    add.values("--oal", "PATH", text)
    add_sources_option(group)
    beside = "that of --home; with --store, ./"
    place("--spool", "DIR", "a folder, or its URI: hdfs://…, s3a://…", "spool", f"{beside}spool")
    add.value("--source", "URL", "read spans from kafka://HOST:PORT[,HOST:PORT]/TOPIC, not a spool")
    add_kafka_option(group)
    add.switch("--skip-lost", "continue when the topic no longer has messages that were not read")
    text = "sqlite:///FILE or postgresql://…"
    place("--store", "URL", text, "sqlite:///metrics.db", "that of --home")
    text = "a folder, or its URI"
    place("--checkpoint", "DIR", text, "checkpoint", f"{beside}checkpoint")
    if of_home:
        add_home_options(group)
    text = "for unusable rows and segments (default: beside the spool)"
    add.value("--quarantine", "DIR", text)
    text = "for temporary files of this process; those of killed ones are removed (default: TMPDIR)"
    add.value("--temporary", "DIR", text)
    add.value("--name", "NAME", "of the stream (default: %(default)s)", default="main")
    add.switch("--outbox", "write what each commit changes to an outbox, for batchmill export")
    text = "drop the oldest of it beyond so many MiB (default: 1024)"
    add.value("--outbox-mb", "N", text, type=mib)
    add = Options(parser.add_argument_group("Spark"))
    text = "such as spark://host:7077 (default: %(default)s)"
    add.value("--master", "MASTER", text, default="local[*]")
    add.values("--conf", "KEY=VALUE", "a Spark setting; may be repeated", type=pair)
    add.value("--batch-mb", "N", "the most MiB in one micro-batch (default: 128)", type=mib)
    add.value("--batch-files", "N", "the most segments in one micro-batch", type=whole())
    add = Options(parser.add_argument_group("metrics"))
    text = "the apdex threshold of a service (default: 500); may be repeated"
    add.values("--apdex", "SERVICE=MS", text, type=pair)
    add.value("--ttl-days", "N", "keep metrics for so long (default: 7)", type=whole())
    add.value("--top-n", "N", "keep so many slow statements (default: 50)", type=whole())
    text = "new entities of an event type a minute, the rest under `overflow`; 0: no limit "
    add.value("--max-new-entities", "N", f"{text}(default: 5000)", type=whole(0))
    text = "entities of a kind in the store, new ones beyond it under `overflow`; 0: no limit "
    add.value("--max-entities", "N", f"{text}(default: 1000000)", type=whole(0))
    text = "leave ids in span names that look like URLs (default: GET /orders/{id})"
    add.switch("--keep-names", text)
    text = "how long a span waits for its parent or child (default: 300)"
    add.value("--span-wait", "S", text, type=whole(0))
    text = "count a span once that is delivered again within that time, such as 10m"
    add.value("--dedup", "TIME", text, type=_duration)
    add.value("--slow-database", "MS", "default:200,mongodb:100")
    add.value("--slow-cache", "MS", "default:20,redis:10")
    Options(parser).switch("--verbose", "log more; print stack traces")


def pipeline_arguments(arguments: argparse.Namespace) -> dict[str, Any]:
    """The arguments of :class:`batchmill.spark.Pipeline`; imports the event types."""
    from batchmill.oal import core_script
    from batchmill.outbox import OutboxSettings
    from batchmill.spark import PipelineSettings
    from batchmill.traces import KeepSettings

    import_sources(arguments.sources)
    settings = only_given(
        max_batch_bytes=arguments.batch_mb,
        max_batch_files=arguments.batch_files,
        ttl_days=arguments.ttl_days,
        top_n=arguments.top_n,
        max_new_entities=arguments.max_new_entities,
        max_entities=arguments.max_entities,
        normalise_names=not arguments.keep_names,
        span_wait_s=arguments.span_wait,
        slow_database_ms=arguments.slow_database,
        slow_cache_ms=arguments.slow_cache,
        skip_lost=arguments.skip_lost,
    )
    apdex = {service: _milliseconds(service, text) for service, text in arguments.apdex}
    keep = only_given(
        max_age_h=getattr(arguments, "keep_spans_hours", None),
        max_bytes=getattr(arguments, "keep_spans_mb", None),
    )
    outbox = OutboxSettings(**only_given(max_bytes=arguments.outbox_mb))
    return {
        "oal": arguments.oal or core_script(),
        "spool": None if arguments.source else arguments.spool,
        "source": arguments.source,
        "kafka_options": kafka_options(arguments),
        "store": arguments.store,
        "checkpoint": arguments.checkpoint,
        "quarantine": arguments.quarantine,
        "name": arguments.name,
        "master": arguments.master,
        "spark_conf": dict(arguments.conf),
        "dedup_s": arguments.dedup,
        "outbox": arguments.outbox and outbox,
        "keep_spans": getattr(arguments, "keep_spans", None),
        "keep": KeepSettings(**keep),
        "remove_read": getattr(arguments, "remove_read", False),
        "settings": PipelineSettings(apdex_ms=apdex, **settings),
    }


def check_pipeline(command: str, arguments: Sequence[str]) -> None:
    """Raise if ``batchmill pipeline`` could not run with these arguments: scripts, types, values.

    Wrong values end the process as argparse does, with a message of ``command``.
    """
    from batchmill.oal import load

    parser = argparse.ArgumentParser(prog=command, usage=argparse.SUPPRESS)
    parser.add_argument("command")
    _add_stream_options(parser)
    oal = pipeline_arguments(parser.parse_args(arguments))["oal"]
    if not len(load(oal)):
        raise ConfigError("oal", oal, "scripts that define at least one metric")


def run(arguments: argparse.Namespace) -> int:
    """Run either command; the exit code."""
    configure_logs(verbose=arguments.verbose, form="%(levelname)s %(message)s")
    try:
        if arguments.command == "backfill":
            _find_run(arguments)
        from batchmill.spark import Pipeline

        if arguments.temporary:
            _keep_temporary_files_in(Path(arguments.temporary))
        started = time.perf_counter()
        pipeline = Pipeline(**pipeline_arguments(arguments))
        # Only now: starting Spark installs a signal handler of its own.
        with _interruptible(pipeline) as stop, pipeline:
            _introduce(pipeline, time.perf_counter() - started)
            if arguments.command == "backfill":
                return _backfill(pipeline, arguments.folder, stop)
            return _pipeline(pipeline, arguments, stop)
    except BrokenPipeError:
        raise
    except StoreMissingError as error:
        print(f"{error_line(arguments.command, error)}{OTHER_RUN}", file=sys.stderr)
        return 1
    except Exception as error:  # noqa: BLE001 - nobody else can report it
        if arguments.verbose and not isinstance(error, BatchmillError):
            traceback.print_exc()
        print(error_line(arguments.command, error), file=sys.stderr)
        return 1


def _find_run(arguments: argparse.Namespace) -> None:
    """Fill in the places of a run, unless a store was named.

    And how long the run keeps metrics: with less, a backfill would remove some of them.
    """
    places: dict[str, Any] = {"spool": "spool", "checkpoint": "checkpoint"}
    if arguments.store is None:
        settings = load_settings({"home": arguments.home}, arguments.config)
        home = Home(Path(settings["home"]).absolute())
        if not home.database.exists():
            raise StoreMissingError(home.store_url)
        places = {"spool": str(home.spool), "checkpoint": str(home.checkpoint)}
        places |= {"store": home.store_url, "ttl_days": settings["ttl_days"]}
    for name, value in places.items():
        if getattr(arguments, name) is None:
            setattr(arguments, name, value)


def _keep_temporary_files_in(parent: Path) -> None:
    """Let this process, Spark's JVM and its tasks have their temporary files in a folder there."""
    folder = own_folder(parent.absolute())
    noexec = getattr(os, "ST_NOEXEC", 0)  # not every system has it
    if noexec and os.statvfs(folder).f_flag & noexec:
        # The JVM loads compiled libraries from there.
        text = "%s allows no programs (noexec), so temporary files stay in %s"
        log.warning(text, parent, tempfile.gettempdir())
        return
    os.environ["TMPDIR"] = tempfile.tempdir = str(folder)


class _Stop:
    """The signal that has asked for the end, if any has."""

    signal: signal.Signals | None = None


def _pipeline(pipeline: Pipeline, arguments: argparse.Namespace, stop: _Stop) -> int:
    pipeline.on_batch = lambda report: print(batch_line(report), flush=True)
    with metrics_page(arguments):
        return _process(pipeline, arguments, stop)


def _process(pipeline: Pipeline, arguments: argparse.Namespace, stop: _Stop) -> int:
    if arguments.once:
        reports = pipeline.run_available()
        if pipeline.cut_short:
            return _cut_short(stop)
        if not reports:
            print("nothing new to read")
        return 0
    if not _await_source(pipeline, stop):
        print("ended before it began: the broker was not reachable", flush=True)
        return 0
    pipeline.start(arguments.trigger)
    what = "messages" if pipeline.reads.startswith("kafka:") else "segments"
    print(f"waiting for {what}; Ctrl-C ends it", flush=True)
    pipeline.await_end()
    print("ended; the next run continues from here", flush=True)
    return 0


def _await_source(pipeline: Pipeline, stop: _Stop) -> bool:
    """Wait until the broker can be reached; False: a signal came first."""
    from batchmill.kafka import KafkaReadError

    reported = False
    while stop.signal is None:
        try:
            pipeline.check_source()
        except KafkaReadError as error:
            if not reported:
                print(f"the stream begins when the broker is there: {error}", flush=True)
            reported = True
        else:
            return True
        time.sleep(_POLL_S)
    return False


def _backfill(pipeline: Pipeline, folder: str, stop: _Stop) -> int:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeRemainingColumn

    total = pipeline.count_segments(folder)
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
    return _cut_short(stop) if pipeline.cut_short else 0


def _cut_short(stop: _Stop) -> int:
    """The exit code when a signal left something to do."""
    by = stop.signal or signal.SIGTERM
    print(f"ended early by {by.name}: run the same command again to continue", flush=True)
    return 128 + by


def _introduce(pipeline: Pipeline, seconds: float) -> None:
    sources = pipeline.metrics.by_source()
    print(
        f"{count_of(len(pipeline.metrics), 'metric')} of {count_of(len(sources), 'event type')}: "
        f"{pipeline.reads} -> {pipeline.store.url} "
        f"(Spark {pipeline.spark.version}, {pipeline.spark.sparkContext.master}, "
        f"started in {seconds:.1f} s)",
        flush=True,
    )


@contextlib.contextmanager
def _interruptible(pipeline: Pipeline) -> Iterator[_Stop]:
    """Ctrl-C and SIGTERM ask the pipeline to stop; a second Ctrl-C ends the process.

    The next run repeats what was not committed, so that is safe at any moment.
    """
    stop = _Stop()

    def handle(number: int, frame: object) -> None:
        # It may have interrupted a print: only plain writes are safe here.
        if stop.signal is not None:
            if number == signal.SIGINT:
                if os.isatty(1):
                    os.write(1, _SHOW_CURSOR)
                os.write(2, b"stopped at once: the next run repeats the running batch\n")
                os._exit(130)
            return
        stop.signal = signal.Signals(number)
        pipeline.ask_to_stop()
        os.write(2, b"ending after the running batch; Ctrl-C stops at once\n")

    before = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def batch_line(report: BatchReport) -> str:
    """A batch in one line."""
    if not report.applied:
        return f"batch {report.number}: in the store already"
    stats, result = report.stats, report.result
    parts = [
        f"batch {report.number}: {count_of(stats.rows, 'row')} from "
        f"{count_of(stats.segments, 'segment')}, {count_of(result.merged, 'delta')}, "
        f"{report.spark_s + report.store_s:.2f} s "
        f"(Spark {report.spark_s:.2f}, store {report.store_s:.2f})"
    ]
    unused = sum(_unused([report]).values())
    doubtful = sum(n for (what, *_), n in result.counters.items() if what == DOUBTFUL)
    overflow = stats.overflow.rows.total()
    for count, text in (
        (overflow, f"{count_of(overflow, 'row')} of too many new entities"),
        (stats.late, f"{stats.late:,} late"),
        (stats.duplicates, f"{count_of(stats.duplicates, 'span')} delivered before"),
        (result.expired, f"{result.expired:,} older than the TTL"),
        (doubtful, f"{count_of(doubtful, 'row')} with a doubtful time"),
        (unused, f"{count_of(unused, 'row')} that no metric reads"),
        (stats.quarantined_rows, f"{count_of(stats.quarantined_rows, 'row')} quarantined"),
        (
            stats.quarantined_segments,
            f"{count_of(stats.quarantined_segments, 'segment')} quarantined",
        ),
    ):
        if count:
            parts.append(text)
    return "; ".join(parts)


def summary(reports: Sequence[BatchReport], total: int, before: int, quarantine: object) -> str:
    """The result of a backfill of ``total`` segments, ``before`` of them added earlier."""
    if not total:
        return "nothing to add: the folder has no segments (*.parquet)"
    applied = [report for report in reports if report.applied]
    if not applied and before < total:
        return "nothing was added"
    if not applied:
        return f"nothing to add: the folder's segments ({total:,}) are in the store already"
    rows = sum(report.stats.rows for report in applied)
    segments = sum(report.given for report in applied)
    added = count_of(rows, "row") if rows else "no rows"
    parts = [f"{added} added from {count_of(segments, 'segment')}"]
    if expired := sum(report.result.expired for report in applied):
        parts.append(f"{expired:,} of them left out: older than the TTL")
    if unused := _unused(applied):
        names = ", ".join(sorted(unused))
        parts.append(f"{count_of(sum(unused.values()), 'row')} of {names}, which no metric reads")
    bad_rows = sum(report.stats.quarantined_rows for report in applied)
    bad_segments = sum(report.stats.quarantined_segments for report in applied)
    if bad_rows or bad_segments:
        what = [count_of(bad_rows, "row")] if bad_rows else []
        what += [count_of(bad_segments, "segment")] if bad_segments else []
        parts.append(f"{' and '.join(what)} quarantined in {quarantine}, with the reasons")
    return "; ".join(parts)


def error_line(command: str, error: BaseException) -> str:
    """An error and what to do about it in one line; our own errors have both."""
    if isinstance(error, BatchmillError):
        return f"batchmill {command}: {error}"
    first = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
    text = f"{type(error).__name__}: {first}" if first else type(error).__name__
    if len(text) > _LONGEST_ERROR:
        text = f"{text[:_LONGEST_ERROR]}…"
    return (
        f"batchmill {command}: failed ({text}). The next run repeats what is not committed: "
        "correct the cause and start again; --verbose shows the details"
    )


def _unused(reports: Sequence[BatchReport]) -> Counter[str]:
    """Rows that no metric reads, by event type."""
    unused: Counter[str] = Counter()
    for report in reports:
        for (what, source, _), rows in report.result.counters.items():
            if what == "unused":
                unused[source] += rows
    return unused


def _milliseconds(service: str, text: str) -> Any:
    # What is not a number is refused by the settings, whose error says what is allowed.
    return int(text) if text.isdecimal() else f"{service}={text}"


def _duration(text: str) -> float:
    """Seconds, from a number with a unit; without one it is seconds."""
    digits, unit = (text[:-1], text[-1]) if text[-1:] in _UNITS else (text, "s")
    seconds = int(digits) * _UNITS[unit] if digits.isascii() and digits.isdecimal() else 0
    if not 1 <= seconds <= _LONGEST_DEDUP_S:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not valid: it must be a time from 1s up to 7d, such as 90s, 10m or 1h"
        )
    return float(seconds)
