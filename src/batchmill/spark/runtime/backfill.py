"""Backfills: past events added beside a pipeline's stream, each as a stream of its own."""

from __future__ import annotations

import contextlib
import hashlib
import logging
import threading
import uuid
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import TypeAlias

from pyspark.sql import DataFrame, SparkSession

from batchmill.errors import ConfigError
from batchmill.oal import MetricSet
from batchmill.spark.batch.report import BatchReport
from batchmill.spark.batch.writer import StreamWriter
from batchmill.spark.errors import PipelineError
from batchmill.spark.files.paths import AnyPath, remove_tree
from batchmill.spark.input.choice import Pace
from batchmill.spark.input.rows import SPAN
from batchmill.spark.input.spool import SpoolInput, present_segments
from batchmill.spark.runtime.checkpoint import Checkpoint
from batchmill.spark.runtime.stream import StreamRun
from batchmill.spark.settings import PipelineSettings

log = logging.getLogger("batchmill.spark")

STOPPED = "the pipeline is stopped: make a new one"

ClaimStream: TypeAlias = Callable[..., AbstractContextManager[tuple[StreamWriter, Checkpoint]]]
"""Claims a stream for as long as the context is entered."""
OnBatch: TypeAlias = Callable[[BatchReport], None]


def folder_stream(folder: AnyPath, name: str | None) -> str:
    """The stream of a folder's backfill: the same whenever it is repeated."""
    return f"backfill-folder-{name or hashlib.sha256(str(folder).encode()).hexdigest()[:12]}"


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
        max_rows: int,
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

    def add_folder(self, folder: AnyPath, name: str | None, on_batch: OnBatch) -> list[BatchReport]:
        """Add a folder that is laid out like a spool; segments that were added are skipped."""
        if not folder.is_dir():
            raise ConfigError("rows", str(folder), "a folder that exists, laid out like a spool")
        stream = folder_stream(folder, name)
        reports: list[BatchReport] = []

        def note(report: BatchReport) -> None:
            reports.append(report)
            on_batch(report)

        with (
            self._running(),
            self._claim(stream, self._checkpoint / stream, retire=False) as (writer, checkpoint),
        ):
            books = checkpoint.books(
                lambda: present_segments(folder), self._clock(), writer.parts, write=True
            )
            run = StreamRun(
                writer,
                books,
                SpoolInput(
                    folder,
                    books,
                    self._settings,
                    spark=self._session(),
                    max_rows=self._max_rows,
                ),
                note,
                self._stop_requested,
                pace=Pace(None),
                clock=self._clock,
            )
            run.start(None)
            try:
                run.wait()
            finally:
                run.end()
                self._set_cut_short(run.cut_short)
            # The folder is complete: no span in it has to wait for one that is not there.
            if not run.cut_short and (last := writer.settle(everything=True)) is not None:
                note(last)
        return reports

    def add_rows(
        self, rows: DataFrame, source: str | None, name: str | None, on_batch: OnBatch
    ) -> list[BatchReport]:
        """Add the rows of one source; with a name, once."""
        if source is None:
            raise ConfigError("source", source, "the event type that the rows are of")
        if source != SPAN.name:
            self._metrics.catalog.source(source)
            if source not in self._metrics.by_source():
                raise ConfigError("source", source, "an event type that a metric reads")
        self._set_cut_short(False)
        known = name or uuid.uuid4().hex[:12]
        stream = f"backfill-rows-{source}-{known}"
        folder = self._checkpoint / stream
        reports: list[BatchReport] = []
        with self._running():
            try:
                claim = self._claim(stream, folder, retire=False, planned=False)
                with claim as (writer, _):
                    reports.append(writer.write(0, frames={source: rows}))
                    if source == SPAN.name and (last := writer.settle(everything=True)) is not None:
                        reports.append(last)
            except BaseException:
                if reports:
                    log.error(
                        "the spans of the backfill are stored, but not paired yet: "
                        "repeat it with name=%r",
                        known,
                    )
                    name = known
                raise
            finally:
                # Without a name it cannot be repeated.
                if name is None:
                    remove_tree(folder)
        for report in reports:
            on_batch(report)
        return reports

    def stored_segments(self, stream: str, last_batch: int | None) -> int:
        """How many segments a folder's backfills have stored, up to that batch."""
        return Checkpoint(self._checkpoint / stream).segments_until(last_batch)

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
