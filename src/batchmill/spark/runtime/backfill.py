"""Backfills: past events added beside a pipeline's stream, each as a stream of its own."""

from __future__ import annotations

import contextlib
import hashlib
import logging
import threading
import uuid
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TypeAlias

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.types import NullType

from batchmill.errors import ConfigError
from batchmill.files import sync
from batchmill.oal import MetricSet
from batchmill.sources import TIME_COLUMN
from batchmill.spark.batch.report import BatchReport
from batchmill.spark.batch.writer import StreamWriter, aggregators_for
from batchmill.spark.errors import PipelineError
from batchmill.spark.failures import explain_full_disk
from batchmill.spark.files.paths import (
    AnyPath,
    Entry,
    entries_in,
    local_only,
    remove_tree,
    write_whole,
)
from batchmill.spark.input.books import Account, Books
from batchmill.spark.input.choice import Pace
from batchmill.spark.input.rows import END_COLUMN, SPAN, ColumnTypeError, check_schema
from batchmill.spark.input.segments import spark_path
from batchmill.spark.input.spool import SpoolInput, present_segments
from batchmill.spark.runtime.checkpoint import Checkpoint
from batchmill.spark.runtime.session import copy_of
from batchmill.spark.runtime.stream import StreamRun
from batchmill.spark.settings import PipelineSettings

log = logging.getLogger("batchmill.spark")

STOPPED = "the pipeline is stopped: make a new one"
_STAGING = {
    "spark.sql.caseSensitive": "true",
    # Times as they are, whatever the year: those that are not valid are sorted out later.
    "spark.sql.parquet.outputTimestampType": "TIMESTAMP_MICROS",
    "spark.sql.parquet.datetimeRebaseModeInWrite": "CORRECTED",
}
"""Settings of the session that writes rows to segments."""
_MAX_STAGED_ROWS = 500_000
"""Of a segment: one is read whole."""

FORGOTTEN_DAYS = 30
"""A backfill that was not run for so long, or for ``ttl_days`` if that is more, is forgotten."""
_LOOK_S = 3600.0
_PREFIX = "backfill-"

ClaimStream: TypeAlias = Callable[..., AbstractContextManager[tuple[StreamWriter, Checkpoint]]]
"""Claims a stream for as long as the context is entered."""
OnBatch: TypeAlias = Callable[[BatchReport], None]


def _sync_all(folder: AnyPath) -> None:
    """Wait until the files of a folder are on this machine's disk, if they are to be there."""
    if isinstance(folder, Path):
        for path in (*folder.rglob("*"), folder):
            sync(path)


def folder_stream(folder: AnyPath, name: str | None) -> str:
    """The stream of a folder's backfill: the same whenever it is repeated."""
    return f"{_PREFIX}folder-{name or hashlib.sha256(str(folder).encode()).hexdigest()[:12]}"


def _newest_s(folder: Entry) -> float:
    """When something in a folder was last written; of folders not all file systems know it."""
    inside = entries_in(folder.path)
    times = [_newest_s(entry) if entry.is_dir else entry.mtime for entry in inside]
    if isinstance(folder.path, Path) or not times:
        times.append(folder.mtime)
    return max(times)


class Backfills:
    """The backfills of one pipeline; several threads may each run one.

    ``stop_requested`` says whether the pipeline is to stop: then none begins, and a folder's
    backfill ends after its current batch. ``set_cut_short`` is called with whether that happened.
    """

    def __init__(
        self,
        settings: PipelineSettings,
        metrics: MetricSet,
        checkpoint: AnyPath,
        *,
        max_rows: Callable[[], int],
        claim: ClaimStream,
        session: Callable[[], SparkSession],
        clock: Callable[[], float],
        stop_requested: Callable[[], bool],
        set_cut_short: Callable[[bool], None],
    ) -> None:
        self._settings = settings
        self._metrics = metrics
        self._checkpoint = checkpoint
        self._max_rows = max_rows
        self._claim = claim
        self._session = session
        self._clock = clock
        self._stop_requested = stop_requested
        self._set_cut_short = set_cut_short
        self._threads: list[int] = []
        """The threads that run a backfill."""
        self._changed = threading.Condition()
        self._looked_s = 0.0

    def add_folder(self, folder: AnyPath, name: str | None, on_batch: OnBatch) -> list[BatchReport]:
        """Add a folder that is laid out like a spool; segments that were added are skipped."""
        if not folder.is_dir():
            raise ConfigError("rows", str(folder), "a folder that exists, laid out like a spool")
        stream = folder_stream(folder, name)
        with (
            self._running(),
            self._claim(stream, self._checkpoint / stream, retire=False) as (writer, checkpoint),
        ):
            books = checkpoint.books(
                lambda: present_segments(folder), self._clock(), writer.divide(), write=True
            )
            return self._add(folder, writer, books, on_batch)[0]

    def _add(
        self, folder: AnyPath, writer: StreamWriter, books: Books, on_batch: OnBatch
    ) -> tuple[list[BatchReport], bool]:
        """Add the segments of a folder that is complete; and whether that came to its end."""
        reports: list[BatchReport] = []

        def note(report: BatchReport) -> None:
            reports.append(report)
            on_batch(report)

        source = SpoolInput(
            folder, books, self._settings, spark=self._session(), max_rows=self._max_rows
        )
        stop = self._stop_requested
        run = StreamRun(writer, books, source, note, stop, pace=Pace(None), clock=self._clock)
        run.start(None)
        try:
            run.wait()
        finally:
            run.end()
            self._set_cut_short(run.cut_short)
        if not run.cut_short:
            # No span has to wait for one that is not there.
            run.settle(everything=True)
        return reports, not run.cut_short

    def add_rows(
        self, rows: DataFrame, source: str | None, name: str | None, on_batch: OnBatch
    ) -> list[BatchReport]:
        """Add the rows of one source; with a name, once.

        They are written to segments first, so that whatever is repeated has the same rows.
        """
        if source is None:
            raise ConfigError("source", source, "the event type that the rows are of")
        if source != SPAN.name:
            self._metrics.catalog.source(source)
            if source not in self._metrics.by_source():
                raise ConfigError("source", source, "an event type that a metric reads")
        known = name or uuid.uuid4().hex[:12]
        stream = f"{_PREFIX}rows-{source}-{known}"
        folder = self._checkpoint / stream
        spool, staged = folder / "rows", folder / "staged"
        complete = False
        with self._running():
            try:
                claim = self._claim(stream, folder, retire=False, planned=False)
                with claim as (writer, checkpoint):
                    last = writer.last
                    if last is None and not staged.exists():
                        remove_tree(spool)
                        self._stage(rows, source, spool)
                        _sync_all(spool)
                        write_whole(staged, b"")
                    spool.mkdir(exist_ok=True)
                    books = checkpoint.books(frozenset, self._clock(), writer.divide(), write=True)
                    planned = books.done is not None or books.open_plan is not None
                    if not staged.exists() and not planned:
                        # An earlier version has added it, without books.
                        books = Books(folder, Account(done=last))
                        books.open()
                    reports, complete = self._add(spool, writer, books, on_batch)
                    if last is not None and not reports:
                        reports = [writer.made_before(last)]
                        on_batch(reports[0])
            finally:
                if complete:
                    remove_tree(spool)
                if name is None and (complete or not staged.exists()):
                    remove_tree(folder)  # it cannot be repeated
                elif not complete and staged.exists():
                    log.error("the backfill is not complete: repeat it with name=%r", known)
        return reports

    def _stage(self, rows: DataFrame, source: str, spool: AnyPath) -> None:
        """Write the columns of an event type to segments."""
        kind, needed = SPAN, frozenset(SPAN.fields)
        if source != SPAN.name:
            plan = aggregators_for(self._metrics, self._settings)[source].plan
            kind, needed = plan.source, plan.columns
        wanted = {TIME_COLUMN, END_COLUMN, *(field.column for field in kind.fields.values())}
        # By their place: the session of the rows may take "a" and "A" for one name.
        numbered = rows.toDF(*(f"c{place}" for place in range(len(rows.columns))))
        own = numbered.select(
            *(
                F.col(f"c{place}").alias(field.name)
                for place, field in enumerate(rows.schema)
                if field.name in wanted and not isinstance(field.dataType, NullType)
            )
        )
        try:
            check_schema(kind, needed, own.limit(0).toArrow().schema)
        except ColumnTypeError as error:
            raise ConfigError("rows", error, f"a DataFrame with the columns of {source}") from error
        session = copy_of(self._session())
        for key, value in _STAGING.items():
            session.conf.set(key, value)
        # The first is of this session: the job has its settings, not those of the rows' own.
        staged = session.createDataFrame([], own.schema).unionAll(own)
        with explain_full_disk(*local_only(spool)):
            writer = staged.write.option(
                "maxRecordsPerFile", min(self._max_rows(), _MAX_STAGED_ROWS)
            )
            writer.parquet(spark_path(spool / source))

    def stored_segments(self, stream: str, last_batch: int | None) -> int:
        """How many segments a folder's backfills have stored, up to that batch."""
        return Checkpoint(self._checkpoint / stream).segments_until(last_batch)

    def remove_forgotten(self, now_s: float) -> None:
        """Remove from the checkpoint the backfills that nobody has run for :data:`FORGOTTEN_DAYS`.

        The store still knows their names: none can be repeated, and count twice. On another file
        system than this machine's they are looked at once an hour.
        """
        if not isinstance(self._checkpoint, Path):
            if now_s < self._looked_s + _LOOK_S:
                return
            self._looked_s = now_s
        days = max(FORGOTTEN_DAYS, self._settings.ttl_days)
        for entry in entries_in(self._checkpoint):
            folder = entry.path
            if folder.name.startswith(_PREFIX) and _newest_s(entry) < now_s - days * 86_400:
                log.warning(
                    "%s was not run for %d days, and is removed from the checkpoint%s",
                    *(folder.name, days),
                    ": not all of its rows were added" if (folder / "rows").exists() else "",
                )
                remove_tree(folder)

    def runs_here(self) -> bool:
        """Whether the calling thread runs a backfill."""
        return threading.get_ident() in self._threads

    def wait(self) -> None:
        """Wait until none runs."""
        with self._changed:
            while self._threads:
                self._changed.wait()

    @contextlib.contextmanager
    def _running(self) -> Iterator[None]:
        """While this is entered, the pipeline keeps its store and its session."""
        with self._changed:
            if self._stop_requested():
                raise PipelineError(STOPPED)
            self._threads.append(threading.get_ident())
        try:
            yield
        finally:
            with self._changed:
                self._threads.remove(threading.get_ident())
                self._changed.notify_all()
