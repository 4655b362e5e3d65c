"""A streaming query that runs: watched, asked to end, and ended between two batches.

Spark can only stop a query as a whole, whatever it is at. So ending is our own affair: once asked,
no batch begins any more, the one that runs is let finish, and then the query is stopped.
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
from batchmill.spark.errors import PipelineError
from batchmill.spark.input.inputs import Input
from batchmill.spark.input.segments import spark_path
from batchmill.spark.l2.engine import BatchReport, StreamWriter, with_upkeep
from batchmill.spark.runtime.checkpoint import Checkpoint
from batchmill.spark.runtime.faults import no_room, telling_full_disks
from batchmill.spark.settings import TRIGGER, PipelineSettings, every

_LOOK_S = 0.5
"""How often a wait looks whether it was asked to end."""
_SETTLE_S = 10.0
"""How long Spark may take to note a batch that is through, and to find that it may not go on."""


def processing_time(spark: SparkSession, trigger: float | str) -> str:
    """A trigger in Spark's notation, and understood by it."""
    text = every(trigger)
    jvm = spark.sparkContext._jvm
    assert jvm is not None
    try:
        jvm.org.apache.spark.sql.streaming.Trigger.ProcessingTime(text)
    except PySparkException as error:
        raise ConfigError("trigger", trigger, TRIGGER) from error
    return text


def _not_ours(record: logging.LogRecord) -> bool:
    """Whether py4j may tell of an error: what a batch of ours raised, :meth:`Run.wait` tells."""
    trace = record.exc_info[2] if record.exc_info else None
    while trace is not None:
        if trace.tb_frame.f_code is Run._write.__code__:
            return False
        trace = trace.tb_next
    return True


class StopAsked(Exception):
    """No failure: a batch was not begun, since the stream was asked to end."""


class Run:
    """A query whose batches become segments, in one way or another; they are read per batch.

    Spark keeps the books on what belongs to which batch. Each event type is read with its own
    schema, and a file that cannot be read does not stop the stream.

    ``asked`` tells whether it is to end; it may be a plain flag, so that a signal handler can set
    it. :meth:`wait` ends the query then, however idle it is.
    """

    def __init__(
        self,
        writer: StreamWriter,
        checkpoint: Checkpoint,
        source: Input,
        on_batch: Callable[[BatchReport], None],
        asked: Callable[[], bool],
        before_batch: Callable[[], None] = lambda: None,
    ) -> None:
        self.cut_short = False
        """Whether it was ended before it was through."""
        self._writer = writer
        self._checkpoint = checkpoint
        self._source = source
        self._on_batch = on_batch
        self._asked = asked
        self._before_batch = before_batch
        self._ending = False
        self._batch = threading.Lock()
        self._failure: BaseException | None = None
        self._told = False
        self._query: StreamingQuery | None = None
        self._endless = False

    def start(
        self,
        spark: SparkSession,
        settings: PipelineSettings,
        trigger: Mapping[str, str | bool],
    ) -> None:
        """Begin to read."""
        events = self._source.stream(spark, settings)
        # A second time changes nothing.
        logging.getLogger("py4j.clientserver").addFilter(_not_ours)
        self._endless = "processingTime" in trigger
        query = (
            events.writeStream.foreachBatch(self._write)
            .queryName(f"batchmill-{self._writer.stream}")
            .option("checkpointLocation", spark_path(self._checkpoint.spark))
            .trigger(**trigger)  # type: ignore[arg-type]
        )
        with telling_full_disks(self._checkpoint.folder):
            self._query = query.start()

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until it is over; False if it still runs after ``timeout`` seconds.

        Raises what made it fail.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        while not self._asked():
            left = _LOOK_S if deadline is None else deadline - time.monotonic()
            if self._over(min(left, _LOOK_S)):
                return True
            if deadline is not None and time.monotonic() >= deadline:
                return False
        self.end()
        self._over(0)
        return True

    def end(self) -> None:
        """End it after the batch that runs; not from that batch's own callback."""
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

    def _over(self, seconds: float) -> bool:
        """Wait so long; whether it has ended, and well."""
        query = self._query
        assert query is not None
        try:
            # Spark takes no zero.
            ended = bool(query.awaitTermination(max(seconds, 0.001)))  # type: ignore[arg-type]
        except StreamingQueryException as error:
            failed: BaseException | None = error
            ended = True
        else:
            failed = None if query.isActive else query.exception()
        if failed is not None and not isinstance(self._failure, StopAsked):
            self._told = True
            if self._failure is not None:
                if (why := self._source.explain(self._failure)) is not None:
                    raise PipelineError(why) from self._failure
                raise self._failure from failed
            raise no_room(failed, [self._checkpoint.folder]) or PipelineError(
                self._source.explain(failed) or f"Spark ended the stream: {failed}"
            ) from failed
        return ended

    def untold(self) -> BaseException | None:
        """What made it fail, if nobody has waited for it."""
        return None if self._told or isinstance(self._failure, StopAsked) else self._failure

    def _write(self, batch: DataFrame, number: int) -> None:
        with self._batch:
            try:
                if self._ending or self._asked():
                    self.cut_short = True
                    raise StopAsked
                # By now Spark has noted the batch before it as done.
                began = time.perf_counter()
                self._before_batch()
                tidied_s = time.perf_counter() - began
                paths = functools.partial(self._source.segments, batch, number)
                report = self._writer.write(number, paths=paths)
                self._on_batch(with_upkeep(report, tidied_s))
            except BaseException as error:
                self._failure = error
                raise
