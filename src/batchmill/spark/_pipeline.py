"""The pipeline: a spool of segments in, metrics in a store out."""

from __future__ import annotations

import contextlib
import hashlib
import logging
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Self

from pyspark.errors import StreamingQueryException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming.query import StreamingQuery

from batchmill._errors import ConfigError
from batchmill.oal import MetricSet, load
from batchmill.sources import Catalog
from batchmill.spark._checkpoint import Checkpoint, open_checkpoint
from batchmill.spark._engine import BatchReport, StreamWriter, plans_for
from batchmill.spark._errors import PipelineError
from batchmill.spark._quarantine import Quarantine
from batchmill.spark._segments import spark_path
from batchmill.spark._session import build_session, prepare
from batchmill.spark._settings import PipelineSettings
from batchmill.store import RetryPolicy, Store, open_store

log = logging.getLogger("batchmill.spark")

_FILES = "path string, modificationTime timestamp, length bigint, content binary"
_MAX_FILE_AGE = "36500d"
"""Spark forgets files that are older than the newest by more than this, and then ignores them."""
_HOUSEKEEPING_S = 10.0
_REPORTS = 1000
"""How many reports of a run are kept."""


class Pipeline:
    """Turns the events in a spool into metrics in a store, each event exactly once.

    ``oal`` are scripts: files, folders, texts. ``spool`` is a folder with one sub-folder for each
    event type and Parquet segments in them. ``store`` is ``sqlite:///file`` or ``postgresql://…``.
    ``checkpoint`` is a folder that remembers how far the stream has come; it belongs to that store
    from then on. What does not fit goes to ``quarantine``, by default a folder beside the spool.

    Start it and leave it running, or call :meth:`run_available` from time to time. One thread at a
    time may use a pipeline, but for :meth:`backfill`, which may run beside the stream.

    A session of one's own can be passed as ``spark``; otherwise one is made on ``master``, and
    stopped with the pipeline.
    """

    def __init__(
        self,
        *,
        oal: str | Path | Iterable[str | Path] | MetricSet,
        spool: str | Path,
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
        on_batch: Callable[[BatchReport], None] | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        # Everything that can be wrong in what was passed is found before Spark starts.
        self.metrics = oal if isinstance(oal, MetricSet) else load(oal, catalog)
        if not len(self.metrics):
            raise ConfigError("oal", oal, "scripts that define at least one metric")
        self.settings = settings or PipelineSettings()
        self.name = _checked(name)
        self.spool = Path(spool).resolve()
        self.checkpoint = Path(checkpoint).resolve()
        self.quarantine = (
            Path(quarantine).resolve()
            if quarantine
            else self.spool.with_name(f"{self.spool.name}-quarantine")
        )
        _apart(self.spool, self.checkpoint, self.quarantine)
        self.spool.mkdir(parents=True, exist_ok=True)
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
        self._own_spark = spark is None
        self._clock = clock
        self.on_batch = on_batch
        self._reports: list[BatchReport] = []
        self._failures: list[BaseException] = []
        self._query: StreamingQuery | None = None
        self._writer: StreamWriter | None = None
        self._closed = False
        self._stopping = threading.Event()
        self._housekeeper: threading.Thread | None = None
        try:
            self.spark = build_session(master, conf=spark_conf) if spark is None else prepare(spark)
        except BaseException:
            self._close_store()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()

    def start(self, trigger: float | str = 5.0) -> None:
        """Run until :meth:`stop`: a micro-batch every ``trigger`` seconds, if there is anything.

        A string is Spark's notation, such as ``"10 seconds"``.
        """
        every = f"{trigger} seconds" if isinstance(trigger, int | float) else trigger
        self._begin(processingTime=every)
        self._stopping.clear()
        self._housekeeper = threading.Thread(
            target=self._keep_house, name="batchmill-housekeeper", daemon=True
        )
        self._housekeeper.start()

    def run_available(self) -> list[BatchReport]:
        """Process what the spool holds now, in as many batches as it takes, and return."""
        self._reports = []
        self._begin(availableNow=True)
        try:
            self.await_end()
        finally:
            self._end()
        return self._reports

    def settle(self, *, everything: bool = False) -> BatchReport | None:
        """Let go of spans whose partner did not come in time; with ``everything``, of all.

        A running stream does so by itself. None if no span waited long enough.
        """
        writer = self._writer
        if writer is not None:
            return writer.settle(everything=everything)
        with self._claimed(self.name, self.checkpoint) as (writer, _):
            return writer.settle(everything=everything)

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
        repeated or cut short: what is in already is skipped. A DataFrame counts once for each
        ``name``; without a name it counts each time.
        """
        if name is not None:
            _checked(name)
        if isinstance(rows, str | Path):
            return self._backfill_folder(Path(rows).resolve(), name, on_batch)
        if source is None:
            raise ConfigError("source", source, "the event type that the rows are of")
        self.metrics.catalog.source(source)
        if source not in self.metrics.by_source():
            raise ConfigError("source", source, "an event type that a metric reads")
        return self._backfill_rows(rows, source, name or uuid.uuid4().hex[:12], on_batch)

    def await_end(self, timeout: float | None = None) -> bool:
        """Wait until the stream ends, which it does only by :meth:`stop` or a failure.

        Raises what made it fail. False if it still runs after ``timeout`` seconds.
        """
        query = self._query
        if query is None:
            raise PipelineError("the pipeline was not started: call start() first")
        try:
            if timeout is None:
                query.awaitTermination()
                ended = True
            else:  # Spark takes no zero
                ended = bool(query.awaitTermination(max(timeout, 0.001)))  # type: ignore[arg-type]
        except StreamingQueryException as error:
            raise _cause(self._failures, error) from error
        if not query.isActive and (failed := query.exception()) is not None:
            raise _cause(self._failures, failed)
        return ended

    def stop(self) -> None:
        """Finish the batch that runs, and let go of everything; may be called twice."""
        self._stopping.set()
        try:
            self._end()
        finally:
            self._closed = True
            self._close_store()
            if self._own_spark:
                self.spark.stop()

    def _begin(self, **trigger: str | bool) -> None:
        if self._closed:
            raise PipelineError("the pipeline is stopped: make a new one")
        if self._query is not None:
            raise PipelineError("the pipeline runs already: stop() it first")
        self._failures = []
        stack = contextlib.ExitStack()
        writer, checkpoint = stack.enter_context(self._claimed(self.name, self.checkpoint))
        try:
            self._query = self._stream(
                writer, self.spool, checkpoint, self._note, self._failures, trigger
            )
        except BaseException:
            stack.close()
            raise
        self._writer = writer
        self._release = stack

    def _end(self) -> None:
        query, self._query = self._query, None
        if query is None:
            return
        if self._housekeeper is not None:
            self._housekeeper.join()
            self._housekeeper = None
        try:
            _stop_between_batches(query)
        finally:
            self._writer = None
            self._release.close()

    @contextlib.contextmanager
    def _claimed(
        self, stream: str, folder: Path, *, retire: bool = True
    ) -> Iterator[tuple[StreamWriter, Checkpoint]]:
        """The right to write a stream, and what it takes to use it."""
        checkpoint = open_checkpoint(folder, stream, self.store.id)
        claim = self.store.claim(
            stream, checkpoint.id, fresh=checkpoint.fresh, committed=checkpoint.committed
        )
        try:
            layout = self.store.register(self.metrics, retire=retire)
            writer = StreamWriter(
                spark=self.spark,
                metrics=self.metrics,
                plans=plans_for(self.metrics, layout, self.settings),
                store=self.store,
                stream=stream,
                claim=claim,
                checkpoint=checkpoint,
                quarantine=Quarantine(self.quarantine),
                settings=self.settings,
                clock=self._clock,
            )
            yield writer, checkpoint
        finally:
            self.store.release(stream)

    def _stream(
        self,
        writer: StreamWriter,
        folder: Path,
        checkpoint: Checkpoint,
        on_batch: Callable[[BatchReport], None],
        failures: list[BaseException],
        trigger: Mapping[str, str | bool],
    ) -> StreamingQuery:
        """A query whose rows are the names of new segments; what is in them is read per batch.

        Spark keeps the books on which file belongs to which batch. Each source is read with its own
        schema, and a file that cannot be read does not stop the stream.
        """
        files, size = self.settings.max_batch_files, self.settings.max_batch_bytes
        limit = {"maxBytesPerTrigger": size} if files is None else {"maxFilesPerTrigger": files}
        names = (
            self.spark.readStream.format("binaryFile")
            .schema(_FILES)
            .options(
                pathGlobFilter="*.parquet",
                recursiveFileLookup="true",
                maxFileAge=_MAX_FILE_AGE,
                **limit,
            )
            .load(spark_path(folder, glob=True))
            .select("path")
        )

        def write(batch: DataFrame, number: int) -> None:
            def paths() -> list[str]:
                known = checkpoint.files_of(number)
                return [row.path for row in batch.collect()] if known is None else known

            try:
                report = writer.write(number, paths=paths)
                on_batch(report)
            except BaseException as error:
                failures.append(error)
                raise

        return (
            names.writeStream.foreachBatch(write)
            .queryName(f"batchmill-{writer.stream}")
            .option("checkpointLocation", spark_path(checkpoint.spark))
            .trigger(**trigger)  # type: ignore[arg-type]
            .start()
        )

    def _backfill_folder(
        self, folder: Path, name: str | None, on_batch: Callable[[BatchReport], None] | None
    ) -> list[BatchReport]:
        if not folder.is_dir():
            raise ConfigError("rows", str(folder), "a folder that exists, laid out like a spool")
        digest = hashlib.sha256(str(folder).encode()).hexdigest()[:12]
        stream = f"backfill-{name or digest}"
        reports: list[BatchReport] = []
        failures: list[BaseException] = []

        def note(report: BatchReport) -> None:
            reports.append(report)
            if on_batch is not None:
                on_batch(report)

        with self._claimed(stream, self.checkpoint / stream, retire=False) as (writer, checkpoint):
            trigger = {"availableNow": True}
            query = self._stream(writer, folder, checkpoint, note, failures, trigger)
            try:
                query.awaitTermination()
            except StreamingQueryException as error:
                raise _cause(failures, error) from error
            finally:
                _stop_between_batches(query)
            # The folder is whole: no span in it has to wait for one that is not there.
            if (last := writer.settle(everything=True)) is not None:
                note(last)
        return reports

    def _backfill_rows(
        self,
        rows: DataFrame,
        source: str,
        name: str,
        on_batch: Callable[[BatchReport], None] | None,
    ) -> list[BatchReport]:
        stream = f"backfill-{name}"
        with self._claimed(stream, self.checkpoint / stream, retire=False) as (writer, _):
            report = writer.write(0, frames={source: rows})
        if on_batch is not None:
            on_batch(report)
        return [report]

    def _note(self, report: BatchReport) -> None:
        self._reports.append(report)
        del self._reports[:-_REPORTS]
        if self.on_batch is not None:
            self.on_batch(report)

    def _keep_house(self) -> None:
        """Let go of spans that waited long enough while no batch came."""
        every = min(_HOUSEKEEPING_S, max(0.1, self.settings.span_wait_s / 4))
        while not self._stopping.wait(every):
            writer = self._writer
            if writer is None:
                continue
            try:
                writer.settle()
            except Exception:
                log.exception("spans that waited too long could not be let go of; trying again")

    def _close_store(self) -> None:
        if self._own_store:
            self.store.close()


def _cause(failures: list[BaseException], error: BaseException | None) -> BaseException:
    """What made a stream fail: our own error rather than Spark's word for it."""
    return failures[-1] if failures else PipelineError(f"Spark ended the stream: {error}")


def _stop_between_batches(query: StreamingQuery) -> None:
    """Stop a query when it is idle: a batch that has begun is let finish."""
    while query.isActive and query.status.get("isTriggerActive"):
        if query.awaitTermination(1):
            break
    query.stop()


def _checked(name: str) -> str:
    if not name or not all(each.isalnum() or each in "-_" for each in name):
        raise ConfigError("name", name, "letters, digits, - and _")
    return name


def _apart(*folders: Path) -> None:
    """None of the folders may lie in another: each is listed or cleaned as a whole."""
    for one in folders:
        for other in folders:
            if one is not other and (one == other or other in one.parents):
                raise ConfigError("folder", str(one), f"outside {other}")
