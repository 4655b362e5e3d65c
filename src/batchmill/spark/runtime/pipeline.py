"""The pipeline: a spool or a Kafka topic in, metrics in a store out."""

from __future__ import annotations

import contextlib
import functools
import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Self

from pyspark.sql import DataFrame, SparkSession

from batchmill.errors import ConfigError
from batchmill.oal import MetricSet, load
from batchmill.outbox import Outbox, OutboxSettings
from batchmill.sources import Catalog
from batchmill.spark.batch.report import BatchReport
from batchmill.spark.batch.writer import StreamWriter, aggregators_for
from batchmill.spark.errors import PipelineError
from batchmill.spark.failures import explain_full_disk
from batchmill.spark.files.paths import (
    AnyPath,
    check_apart,
    is_uri,
    local_only,
    parse_path,
    segments_in,
)
from batchmill.spark.files.quarantine import Quarantine
from batchmill.spark.input.base import Input
from batchmill.spark.input.books import Books
from batchmill.spark.input.choice import Pace
from batchmill.spark.input.spool import SpoolInput, present_segments
from batchmill.spark.runtime.backfill import STOPPED, Backfills, folder_stream
from batchmill.spark.runtime.checkpoint import Checkpoint, open_checkpoint
from batchmill.spark.runtime.progress import Progress, Upkeep, read_progress
from batchmill.spark.runtime.session import lease, rows_for
from batchmill.spark.runtime.stream import SETTLE_EVERY_S, StreamRun
from batchmill.spark.settings import (
    PipelineSettings,
    check_dedup_s,
    check_name,
    trigger_seconds,
)
from batchmill.store import Claim, Exempt, RetryPolicy, Store, TrustedTime, open_store
from batchmill.traces import KeepSettings, SpanKeeper

if TYPE_CHECKING:
    from batchmill.kafka import KafkaAddress

log = logging.getLogger("batchmill.spark")

_REPORTS = 1000
"""How many reports of a run are kept."""


class Pipeline:
    """Turns the events in a spool into metrics in a store, each event exactly once.

    ``oal`` are scripts: files, folders, texts. ``spool`` is a folder with one sub-folder for each
    event type and Parquet segments in them; in its place ``source`` may name a topic of spans,
    ``kafka://host:port/topic``, and ``kafka_options`` TLS and a login as librdkafka takes them.
    ``store`` is ``sqlite:///file`` or ``postgresql://…``. ``checkpoint`` is a folder that records
    how far the stream has come; it belongs to that store from then on. Segments and rows that
    cannot be used go to ``quarantine``, by default a folder beside the spool or the checkpoint.
    Each of these folders is a local path, or a URI that Spark can open: ``hdfs://…``, ``s3a://…``.

    With ``dedup_s``, a span that is delivered again (same trace and span id) within so many seconds
    counts once. With ``remove_read``, the spool's segments are removed once they are in the store:
    not for a spool that another pipeline reads, too. With ``outbox``, the changes of each commit,
    including those of backfills, are written beside the checkpoint for exporters; see
    :mod:`batchmill.outbox` and ``batchmill export``.

    With ``keep_spans``, a local folder, the spans of committed segments stay there for people who
    look at traces, within the limits of ``keep``; see :mod:`batchmill.traces`. The spool must be
    local, and its segments removed (``remove_read``). What a backfill adds is not kept.

    ``on_rows(source, rows)`` is called in each batch before its commit, for each event type that
    has rows in it, with these rows as a DataFrame: events, and what spans were turned into. It is
    called at least once for each batch: again, with the same rows, if the batch is repeated. An
    error in it ends the stream before the commit.

    Start it and leave it running, or call :meth:`run_available` from time to time. One thread at a
    time may use a pipeline, except for :meth:`backfill`, which may run beside the stream.

    A session of your own can be passed as ``spark``, and is not stopped with the pipeline. Nor is
    one that runs in this process already, which is used if none is passed. Otherwise one is started
    on ``master``, and stopped with the last pipeline that uses it.
    """

    def __init__(
        self,
        *,
        oal: str | Path | Iterable[str | Path] | MetricSet,
        spool: str | Path | None = None,
        source: str | None = None,
        kafka_options: Mapping[str, str] | None = None,
        store: str | Store,
        checkpoint: str | Path,
        quarantine: str | Path | None = None,
        name: str = "main",
        master: str = "local[*]",
        spark: SparkSession | None = None,
        spark_conf: Mapping[str, str] | None = None,
        catalog: Catalog | None = None,
        settings: PipelineSettings | None = None,
        retry: RetryPolicy | None = None,
        dedup_s: float | None = None,
        remove_read: bool = False,
        outbox: bool | OutboxSettings = False,
        keep_spans: str | Path | None = None,
        keep: KeepSettings | None = None,
        on_batch: Callable[[BatchReport], None] | None = None,
        on_rows: Callable[[str, DataFrame], None] | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        # All arguments are checked before Spark starts.
        self.metrics = oal if isinstance(oal, MetricSet) else load(oal, catalog)
        if not len(self.metrics):
            raise ConfigError("oal", oal, "scripts that define at least one metric")
        self.settings = settings or PipelineSettings()
        self.dedup_s = check_dedup_s(dedup_s)
        self.remove_read = remove_read
        self.outbox = OutboxSettings() if outbox is True else outbox or None
        """The settings of the outbox; None: there is none."""
        self.name = check_name(name)
        if (spool is None) is (source is None):
            raise ConfigError("spool", spool, "given, or else a source, but not both")
        if source is not None and is_uri(source) and not source.startswith("kafka:"):
            spool, source = source, None
        if source is None and kafka_options:
            raise ConfigError("kafka_options", "…", "left out where there is no topic to read")
        self._topic: KafkaAddress | None = None
        self._kafka_options: dict[str, str] = {}
        if source is not None:
            self._topic, self._kafka_options = _topic(source, kafka_options or {})
        self.spool = None if spool is None else self._path(spool)
        self.checkpoint = self._path(checkpoint)
        beside = self.spool or self.checkpoint
        self.quarantine = (
            self._path(quarantine) if quarantine else beside.with_name(f"{beside.name}-quarantine")
        )
        check_apart(*([self.spool] if self.spool else []), self.checkpoint, self.quarantine)
        if self.outbox is not None and not isinstance(self.checkpoint, Path):
            raise ConfigError(
                "checkpoint",
                str(self.checkpoint),
                "a local folder where there is an outbox: exporters read it there",
            )
        self.keep_spans = None if keep_spans is None else self._keep_folder(keep_spans)
        """Where spans are kept; None: they are not."""
        self._keep = keep
        self._keeper: SpanKeeper | None = None
        self._own_store = isinstance(store, str)
        self.store: Store = (
            open_store(
                store,
                retry=retry or RetryPolicy(),
                ttl_days=self.settings.ttl_days,
                top_n=self.settings.top_n,
            )
            if isinstance(store, str)
            else store
        )
        self._clock = clock
        self.on_batch = on_batch
        self._on_rows = on_rows
        self._reports: list[BatchReport] = []
        self.cut_short = False
        """Whether the last run or backfill was stopped before all of its input was read."""
        self._run: StreamRun | None = None
        self._stop_requested = False
        self._closing = threading.RLock()
        self._callbacks: set[int] = set()
        self._upkeep: Upkeep | None = None
        try:
            self._lease = lease(master, spark=spark, conf=spark_conf)
            self.spark = self._lease.session
        except BaseException:
            self._close_store()
            raise
        try:
            self._resolve()
        except BaseException:
            self._lease.release()
            self._close_store()
            raise
        self._quarantine = Quarantine(self.quarantine, self.spark)
        self._backfills = Backfills(
            self.settings,
            self.metrics,
            self.checkpoint,
            max_rows=self._max_rows,
            claim=self._claimed,
            session=lambda: self.spark,
            clock=self._clock,
            stop_requested=lambda: self._stop_requested,
            set_cut_short=self._set_cut_short,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    @property
    def reads(self) -> str:
        """Where its events come from, for messages."""
        return str(self._topic or self.spool)

    def start(self, trigger: float | str = 5.0) -> None:
        """Run until :meth:`stop`: look for input every ``trigger`` seconds, and process it.

        A string has a unit, such as ``"10 seconds"``. Input that is more than one micro-batch may
        take is processed in several, one right after the other.
        """
        with self._closing:  # a callback may stop it before this returns
            self._begin(trigger_seconds(trigger))
            assert self._upkeep is not None
            self._upkeep.start()
            if self._keeper is not None:
                self._keeper.start()

    def run_available(self) -> list[BatchReport]:
        """Process what the spool holds now, in as many batches as it takes, and return."""
        self._reports = []
        with self._closing:
            run = self._begin(None)
        try:
            run.wait()
        finally:
            self._end()
            self.cut_short = run.cut_short
        return list(self._reports)

    def check_source(self) -> None:
        """Raise an error if the topic cannot be read now; see :mod:`batchmill.kafka`.

        A spool can always be read. Starting the stream does the same check; call this to wait for a
        broker.
        """
        if self._topic is not None:
            from batchmill.kafka import check_readable

            check_readable(self._topic, self._kafka_options)

    def settle(self, *, everything: bool = False) -> BatchReport | None:
        """Give up on spans whose partner did not arrive in time; with ``everything``, on all.

        A running stream does so by itself. None if no span waited long enough.
        """
        if self._is_inside():
            raise PipelineError("a batch's callback cannot settle the spans of its own stream")
        with self._closing:
            if self._run is not None:
                return self._run.settle(everything=everything)
            run = self._begin(None, start=False)
            try:
                return run.settle(everything=everything)
            finally:
                self._end()

    def progress(self) -> Progress:
        """How far the stream has come; a running one also writes it to ``progress.json``."""
        upkeep = self._upkeep
        if upkeep is not None:
            return upkeep.progress()
        last = self._last_batch(self.name)
        source = self._input(self._books(Checkpoint(self.checkpoint), write=False))
        return read_progress(self.name, last, self.store, source, self._clock())

    def backfill(
        self,
        rows: DataFrame | str | Path,
        *,
        source: str | None = None,
        name: str | None = None,
        on_batch: Callable[[BatchReport], None] | None = None,
    ) -> list[BatchReport]:
        """Add past events: a folder laid out like the spool, or a DataFrame of one source's rows.

        May run beside the stream. A folder's segments count once, however often the call is
        repeated or cut short: those that were added are skipped. A DataFrame (of spans, too:
        ``Span``) counts once for each source and ``name``; without a name it counts each time.
        """
        self._check_open()
        if name is not None:
            check_name(name)
        call = functools.partial(self._call, on_batch)
        if isinstance(rows, str | Path):
            return self._backfills.add_folder(self._path(rows).resolve(), name, call)
        return self._backfills.add_rows(rows, source, name, call)

    def backfilled(self, folder: str | Path, *, name: str | None = None) -> int:
        """How many segments of a folder earlier backfills have added to the store."""
        stream = folder_stream(self._path(folder).resolve(), name)
        return self._backfills.stored_segments(stream, self._last_batch(stream))

    def count_segments(self, folder: str | Path) -> int:
        """How many segments are in a folder that is laid out like a spool."""
        return len(segments_in(self._path(folder).resolve())[0])

    def await_end(self, timeout: float | None = None) -> bool:
        """Wait until the stream ends, which it does only by :meth:`stop` or a failure.

        Raises the error that made it fail. False if it still runs after ``timeout`` seconds.
        """
        run = self._run
        if self._is_inside():
            raise PipelineError("a batch's callback cannot wait for its own stream to end")
        if run is None:
            if self._stop_requested:
                return True
            raise PipelineError("the pipeline was not started: call start() first")
        return run.wait(timeout)

    def ask_to_stop(self) -> None:
        """Let no new batch begin, of the stream or a backfill; current ones are finished.

        Returns at once, and may be called in a signal handler. A wait for the stream or a backfill
        then returns; :meth:`stop` must still be called.
        """
        self._stop_requested = True

    def stop(self) -> None:
        """Finish the current batches and free everything; may be called twice.

        Called by a batch's own callback it returns at once, and stops after that batch.
        """
        self._stop_requested = True
        if self._is_inside():
            threading.Thread(target=self.stop, name="batchmill-stop").start()
            return
        with self._closing:
            try:
                self._end()
                self._backfills.wait()
            finally:
                self._close_store()
                self._lease.release()

    def _is_inside(self) -> bool:
        """Whether this thread runs a batch's callback or a backfill, and so cannot wait for it."""
        return threading.get_ident() in self._callbacks or self._backfills.runs_here()

    def _begin(self, interval_s: float | None, *, start: bool = True) -> StreamRun:
        self._check_open()
        if self._run is not None:
            raise PipelineError("the pipeline runs already: stop() it first")
        stack = contextlib.ExitStack()
        writer, checkpoint = stack.enter_context(self._claimed(self.name, self.checkpoint))
        try:
            with explain_full_disk(*local_only(self.checkpoint)):
                books = self._books(checkpoint, write=True, parts=writer.divide())
            trusted = TrustedTime()
            keeper = self._open_keeper(trusted)
            source = self._input(books, keeper)
            pace = Pace(self.settings.target_batch_s)
            trim = functools.partial(self._trim, trusted)
            upkeep = Upkeep(
                *(writer, checkpoint, self.store, source, pace, self._clock, trim, keeper, trusted)
            )
            run = StreamRun(
                writer,
                books,
                source,
                self._note,
                lambda: self._stop_requested,
                pace=pace,
                clock=self._clock,
                settle_every_s=min(SETTLE_EVERY_S, max(0.1, self.settings.span_wait_s / 4)),
                before_batch=upkeep.remove_read,
                after_batch=upkeep.remove_read if keeper else lambda: None,
            )
            self._keeper = keeper
            self._upkeep = upkeep
            upkeep.write_progress(committed=True)
            if start:
                run.start(interval_s)
        except BaseException:
            self._upkeep = None
            stack.close()
            raise
        self._run, self._release = run, stack
        return run

    def _end(self) -> None:
        with self._closing:
            run, upkeep = self._run, self._upkeep
            if run is None or upkeep is None:
                return
            upkeep.stop()
            try:
                run.end()
                if (failure := run.unraised_failure()) is not None:
                    log.error("the stream %s had failed: %s", self.name, failure)
                upkeep.remove_read()
                upkeep.trim()
                self._close_keeper()
                upkeep.write_progress()
            finally:
                self._run = self._upkeep = self._keeper = None
                self._release.close()

    def _trim(self, trusted: TrustedTime) -> None:
        """Remove the oldest of the quarantine beyond its limit, and forgotten backfills."""
        self._quarantine.trim(self.settings.max_quarantine_bytes)
        if (now_s := trusted.now_s()) is not None:
            self._backfills.remove_forgotten(min(now_s, self._clock()))

    def _path(self, path: str | Path) -> AnyPath:
        return parse_path(path, lambda: self.spark)

    def _resolve(self) -> None:
        """Name the folders as Spark names what is in them; now that there is a session."""
        folders = [self.checkpoint.resolve(), self.quarantine.resolve()]
        self.checkpoint, self.quarantine = folders
        if self.spool is not None:
            self.spool = self.spool.resolve()
            folders.append(self.spool)
        check_apart(*folders)
        if self.spool is not None:
            self.spool.mkdir(parents=True, exist_ok=True)

    def _books(self, checkpoint: Checkpoint, *, write: bool, parts: int = 0) -> Books:
        def present() -> set[str]:
            return set() if self.spool is None else present_segments(self.spool)

        return checkpoint.books(present, self._clock(), parts, write=write)

    def _keep_folder(self, folder: str | Path) -> Path:
        """The folder of kept spans, if spans can be kept."""
        path = self._path(folder)
        if not isinstance(path, Path):
            raise ConfigError("keep_spans", folder, "a local folder: leave it out for a URI")
        source = self.checkpoint if self.spool is None else self.spool
        if not isinstance(source, Path):
            raise ConfigError(
                "keep_spans",
                folder,
                f"left out where segments are not on this machine ({source}): spans are kept by "
                "moving the segments that were read",
            )
        if self.spool is not None and not self.remove_read:
            raise ConfigError(
                "keep_spans",
                folder,
                "used with remove_read: spans are kept by moving the segments that were read",
            )
        check_apart(*([self.spool] if self.spool else []), self.checkpoint, self.quarantine, path)
        return path.resolve()

    def _open_keeper(self, trusted: TrustedTime) -> SpanKeeper | None:
        if self.keep_spans is None:
            return None
        with explain_full_disk(self.keep_spans):
            return SpanKeeper(self.keep_spans, self._keep, self._clock, trusted.now_s)

    def _close_keeper(self) -> None:
        """Stop keeping spans; without a thread of its own, the keeper does its work now."""
        if self._keeper is None:
            return
        try:
            if not self._keeper.stop():
                self._keeper.tend(everything=True)
        except Exception as error:  # noqa: BLE001 - the metrics are committed
            log.warning("kept spans cannot be sorted now, the next run does it: %s", error)

    def _input(self, books: Books, keeper: SpanKeeper | None = None) -> Input:
        if self._topic is not None:
            from batchmill.spark.input.kafka import KafkaInput

            return KafkaInput(
                *(self._topic, books, self.settings, self.spark, self._kafka_options, keeper),
                max_rows=self._max_rows,
            )
        assert self.spool is not None
        remove_from = self.quarantine if self.remove_read else None
        return SpoolInput(
            *(self.spool, books, self.settings, remove_from, self.spark),
            max_rows=self._max_rows,
            keeper=keeper,
        )

    def _max_rows(self) -> int:
        """The most rows of a batch, unless the settings say it; executors may come and go."""
        return rows_for(self.spark)

    def _check_open(self) -> None:
        if self._stop_requested:
            raise PipelineError(STOPPED)

    def _last_batch(self, stream: str) -> int | None:
        return {info.name: info.last_batch for info in self.store.streams()}.get(stream)

    def _set_cut_short(self, cut_short: bool) -> None:
        self.cut_short = cut_short

    @contextlib.contextmanager
    def _claimed(
        self, stream: str, folder: AnyPath, *, retire: bool = True, planned: bool = True
    ) -> Iterator[tuple[StreamWriter, Checkpoint]]:
        """Claim a stream, and make its writer.

        ``planned``: whether its batches are planned in the books.
        """
        with explain_full_disk(*local_only(folder)):
            checkpoint = open_checkpoint(folder, stream, self.store.id)
            outbox = None
            if self.outbox is not None:
                # One for all streams: exporters know it by the pipeline's checkpoint.
                assert isinstance(self.checkpoint, Path)
                outbox = Outbox.open(self.checkpoint, self.outbox)

        def claim() -> Claim:
            marks = checkpoint.marks()
            return self.store.claim(
                stream,
                checkpoint.id,
                fresh=marks.planned is None,
                committed=marks.done,
                planned=marks.planned if planned else Exempt.NO_LOG,
            )

        claimed = claim()
        try:
            layout = self.store.register(self.metrics, retire=retire, stream=stream)
            writer = StreamWriter(
                spark=self.spark,
                metrics=self.metrics,
                aggregators=aggregators_for(self.metrics, self.settings),
                store=self.store,
                stream=stream,
                claimed=claimed,
                claim=claim,
                checkpoint=checkpoint,
                quarantine=self._quarantine,
                settings=self.settings,
                clock=self._clock,
                # A backfill is complete: how long it takes must not decide which spans are paired.
                expire=retire,
                dedup_s=self.dedup_s,
                outbox=outbox,
                layout=layout,
                on_rows=None if self._on_rows is None else self._give_rows,
            )
            yield writer, checkpoint
        finally:
            self.store.release(stream)

    def _note(self, report: BatchReport) -> None:
        self._reports.append(report)
        del self._reports[:-_REPORTS]
        if self._upkeep is not None:
            self._upkeep.note(report)
        self._call(self.on_batch, report)

    def _call(self, on_batch: Callable[[BatchReport], None] | None, report: BatchReport) -> None:
        if on_batch is not None:
            with self._inside():
                on_batch(report)

    def _give_rows(self, source: str, rows: DataFrame) -> None:
        assert self._on_rows is not None
        with self._inside():
            self._on_rows(source, rows)

    @contextlib.contextmanager
    def _inside(self) -> Iterator[None]:
        """While this is entered, a callback of the application runs in this thread."""
        self._callbacks.add(threading.get_ident())
        try:
            yield
        finally:
            self._callbacks.discard(threading.get_ident())

    def _close_store(self) -> None:
        if self._own_store:
            self.store.close()


def _topic(address: str, options: Mapping[str, str]) -> tuple[KafkaAddress, dict[str, str]]:
    """The topic at an address, and librdkafka's options for it.

    The import raises an error if an extra is missing.
    """
    from batchmill.kafka import KafkaAddress, check_accepted, with_certificates

    topic, own = KafkaAddress.parse(address), with_certificates(options)
    if own:
        check_accepted(own)
    return topic, own
