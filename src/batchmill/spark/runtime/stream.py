"""Runs a streaming query, and ends it between two batches.

Spark can only stop a query at once, in the middle of a batch. So when a stop is requested, no new
batch begins, the current one is finished, and then the query is stopped.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import threading
import time
from collections.abc import Callable, Mapping

from pyspark.errors import PySparkException, StreamingQueryException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming.query import StreamingQuery

from batchmill.errors import ConfigError
from batchmill.spark.batch.report import BatchReport
from batchmill.spark.batch.writer import StreamWriter
from batchmill.spark.errors import PipelineError
from batchmill.spark.failures import disk_full_error, explain_full_disk
from batchmill.spark.input.base import Input
from batchmill.spark.input.segments import spark_path
from batchmill.spark.runtime.checkpoint import Checkpoint
from batchmill.spark.settings import TRIGGER, PipelineSettings, trigger_interval

_POLL_S = 0.5
"""How often a wait checks whether a stop was requested."""
_SETTLE_S = 10.0
"""How long Spark may take to log a finished batch, and to see that no new one may begin."""


def processing_time(spark: SparkSession, trigger: float | str) -> str:
    """Convert a trigger to Spark's notation, and check that Spark accepts it."""
    text = trigger_interval(trigger)
    jvm = spark.sparkContext._jvm
    assert jvm is not None
    try:
        jvm.org.apache.spark.sql.streaming.Trigger.ProcessingTime(text)
    except PySparkException as error:
        raise ConfigError("trigger", trigger, TRIGGER) from error
    return text


def _is_not_ours(record: logging.LogRecord) -> bool:
    """Whether py4j may log an error: errors of our batches are raised by :meth:`StreamRun.wait`."""
    trace = record.exc_info[2] if record.exc_info else None
    while trace is not None:
        if trace.tb_frame.f_code is StreamRun._write.__code__:
            return False
        trace = trace.tb_next
    return True


class StopRequested(Exception):
    """Not a failure: a batch was not begun, since a stop was requested."""


class StreamRun:
    """A streaming query whose batches are segments; these are read per batch.

    Spark logs what belongs to which batch. Each event type is read with its own schema, and a file
    that cannot be read does not stop the stream.

    ``stop_requested`` says whether the run is to end; it may read a plain flag, which a signal
    handler can set. :meth:`wait` then ends the query, even if it is idle.
    """

    def __init__(
        self,
        writer: StreamWriter,
        checkpoint: Checkpoint,
        source: Input,
        on_batch: Callable[[BatchReport], None],
        stop_requested: Callable[[], bool],
        before_batch: Callable[[], None] = lambda: None,
    ) -> None:
        self.cut_short = False
        """Whether it was ended before all input was read."""
        self._writer = writer
        self._checkpoint = checkpoint
        self._source = source
        self._on_batch = on_batch
        self._stop_requested = stop_requested
        self._before_batch = before_batch
        self._ending = False
        self._batch = threading.Lock()
        self._failure: BaseException | None = None
        self._raised = False
        self._query: StreamingQuery | None = None
        self._endless = False

    def start(
        self,
        spark: SparkSession,
        settings: PipelineSettings,
        trigger: Mapping[str, str | bool],
    ) -> None:
        """Start the query."""
        events = self._source.stream(spark, settings)
        # Adding the filter a second time has no effect.
        logging.getLogger("py4j.clientserver").addFilter(_is_not_ours)
        self._endless = "processingTime" in trigger
        query = (
            events.writeStream.foreachBatch(self._write)
            .queryName(f"batchmill-{self._writer.stream}")
            .option("checkpointLocation", spark_path(self._checkpoint.spark))
            .trigger(**trigger)  # type: ignore[arg-type]
        )
        with explain_full_disk(self._checkpoint.folder):
            self._query = query.start()

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until the query ends; False if it still runs after ``timeout`` seconds.

        Raises the error that made it fail.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        while not self._stop_requested():
            left = _POLL_S if deadline is None else deadline - time.monotonic()
            if self._has_ended(min(left, _POLL_S)):
                return True
            if deadline is not None and time.monotonic() >= deadline:
                return False
        self.end()
        self._has_ended(0)
        return True

    def end(self) -> None:
        """End the query after the current batch; not to be called by that batch's own callback."""
        query = self._query
        if query is None:
            return
        self._ending = True
        with self._batch:
            pass
        deadline = time.monotonic() + _SETTLE_S
        while query.isActive and time.monotonic() < deadline:
            if self._endless and not query.status.get("isTriggerActive"):
                break
            with contextlib.suppress(StreamingQueryException):
                query.awaitTermination(0.05)  # type: ignore[arg-type]
        if query.isActive:
            self.cut_short = True
            query.stop()

    def unraised_failure(self) -> BaseException | None:
        """The error that made it fail, if :meth:`wait` did not raise it."""
        return None if self._raised or isinstance(self._failure, StopRequested) else self._failure

    def _has_ended(self, seconds: float) -> bool:
        """Wait up to ``seconds`` for the end of the query; raises the error that made it fail."""
        query = self._query
        assert query is not None
        try:
            # Spark does not accept zero.
            ended = bool(query.awaitTermination(max(seconds, 0.001)))  # type: ignore[arg-type]
        except StreamingQueryException as error:
            failure: BaseException | None = error
            ended = True
        else:
            failure = None if query.isActive else query.exception()
        if failure is not None and not isinstance(self._failure, StopRequested):
            self._raised = True
            if self._failure is not None:
                if (why := self._source.explain(self._failure)) is not None:
                    raise PipelineError(why) from self._failure
                raise self._failure from failure
            raise disk_full_error(failure, [self._checkpoint.folder]) or PipelineError(
                self._source.explain(failure) or f"Spark ended the stream: {failure}"
            ) from failure
        return ended

    def _write(self, batch: DataFrame, number: int) -> None:
        with self._batch:
            try:
                if self._ending or self._stop_requested():
                    self.cut_short = True
                    raise StopRequested
                # By now Spark has logged the batch before it as done.
                began = time.perf_counter()
                self._before_batch()
                upkeep_s = time.perf_counter() - began
                paths = functools.partial(self._source.segments, batch, number)
                report = self._writer.write(number, paths=paths)
                self._on_batch(report.with_upkeep(upkeep_s))
            except BaseException as error:
                self._failure = error
                raise
