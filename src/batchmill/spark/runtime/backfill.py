"""Backfills: past events added beside a pipeline's stream, each under a stream of its own."""

from __future__ import annotations

import contextlib
import logging
import shutil
import threading
import uuid
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TypeAlias

from pyspark.sql import DataFrame, SparkSession

from batchmill.errors import ConfigError
from batchmill.oal import MetricSet
from batchmill.spark.errors import PipelineError
from batchmill.spark.input.schema import SPAN
from batchmill.spark.input.spool import SpoolInput
from batchmill.spark.l2.engine import BatchReport, StreamWriter
from batchmill.spark.runtime.checkpoint import Checkpoint
from batchmill.spark.runtime.places import folder_stream
from batchmill.spark.runtime.running import Run
from batchmill.spark.settings import PipelineSettings

log = logging.getLogger("batchmill.spark")

STOPPED = "the pipeline is stopped: make a new one"

Claimed: TypeAlias = Callable[..., AbstractContextManager[tuple[StreamWriter, Checkpoint]]]
"""The right to write a stream, for as long as it is entered."""
Tell: TypeAlias = Callable[[BatchReport], None]


class Backfills:
    """The backfills of one pipeline; several threads may each run one.

    ``asked`` says whether the pipeline is to stop: then none begins, and a folder's ends with the
    batch that it is at. ``note_cut`` is told whether that was so.
    """

    def __init__(
        self,
        spark: SparkSession,
        settings: PipelineSettings,
        metrics: MetricSet,
        checkpoint: Path,
        *,
        claimed: Claimed,
        asked: Callable[[], bool],
        note_cut: Callable[[bool], None],
    ) -> None:
        self._spark = spark
        self._settings = settings
        self._metrics = metrics
        self._checkpoint = checkpoint
        self._claimed = claimed
        self._asked = asked
        self._note_cut = note_cut
        self._running: list[int] = []
        """The threads that run one."""
        self._changed = threading.Condition()

    def folder(self, folder: Path, name: str | None, tell: Tell) -> list[BatchReport]:
        """Add a folder that is laid out like a spool; its segments that are in are skipped."""
        if not folder.is_dir():
            raise ConfigError("rows", str(folder), "a folder that exists, laid out like a spool")
        stream = folder_stream(folder, name)
        reports: list[BatchReport] = []

        def note(report: BatchReport) -> None:
            reports.append(report)
            tell(report)

        with (
            self._one_more(),
            self._claimed(stream, self._checkpoint / stream, retire=False) as (writer, checkpoint),
        ):
            run = Run(writer, checkpoint, SpoolInput(folder, checkpoint), note, self._asked)
            run.start(self._spark, self._settings, {"availableNow": True})
            try:
                run.wait()
            finally:
                run.end()
                self._note_cut(run.cut_short)
            # The folder is whole: no span in it has to wait for one that is not there.
            if not run.cut_short and (last := writer.settle(everything=True)) is not None:
                note(last)
        return reports

    def rows(
        self, rows: DataFrame, source: str | None, name: str | None, tell: Tell
    ) -> list[BatchReport]:
        """Add the rows of one source; with a name, once."""
        if source is None:
            raise ConfigError("source", source, "the event type that the rows are of")
        if source != SPAN.name:
            self._metrics.catalog.source(source)
            if source not in self._metrics.by_source():
                raise ConfigError("source", source, "an event type that a metric reads")
        self._note_cut(False)
        known = name or uuid.uuid4().hex[:12]
        stream = f"backfill-rows-{source}-{known}"
        folder = self._checkpoint / stream
        reports: list[BatchReport] = []
        with self._one_more():
            try:
                claim = self._claimed(stream, folder, retire=False, spark_log=False)
                with claim as (writer, _):
                    reports.append(writer.write(0, frames={source: rows}))
                    if source == SPAN.name and (last := writer.settle(everything=True)) is not None:
                        reports.append(last)
            except BaseException:
                if reports:
                    log.error("its spans are in, but wait for partners: repeat it as %r", known)
                    name = known
                raise
            finally:
                # Without a name nobody can repeat it.
                if name is None:
                    shutil.rmtree(folder, ignore_errors=True)
        for report in reports:
            tell(report)
        return reports

    def segments(self, stream: str, last_batch: int | None) -> int:
        """How many segments a folder's backfills have put into the store, up to that batch."""
        checkpoint = Checkpoint(self._checkpoint / stream, "", "")
        return 0 if last_batch is None else checkpoint.segments_until(last_batch)

    def is_inside(self) -> bool:
        """Whether this thread runs one."""
        return threading.get_ident() in self._running

    def wait(self) -> None:
        """Wait until none runs."""
        with self._changed:
            while self._running:
                self._changed.wait()

    @contextlib.contextmanager
    def _one_more(self) -> Iterator[None]:
        """As long as it lasts, the pipeline lets go of nothing."""
        with self._changed:
            if self._asked():
                raise PipelineError(STOPPED)
            self._running.append(threading.get_ident())
        try:
            yield
        finally:
            with self._changed:
                self._running.remove(threading.get_ident())
                self._changed.notify_all()
