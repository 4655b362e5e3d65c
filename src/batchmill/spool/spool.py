"""The spool: batches in, segments on the disk, and an answer once they are durable.

One micro-batcher for each event type gathers batches for a segment, so that many senders share
one fsync. It also provides the futures, the drain at the end and the handling of a fork.

Guarantees
    * A future gets the segment's path only after the segment is synced and in its place.
      Everything that was accepted is written, or its future fails.
    * A batch is never split between segments.
    * A batch that cannot be converted fails alone.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import pyarrow as pa

from batchmill import lifecycle
from batchmill.batcher import BatcherClosedError, BatcherSettings, ItemResult, MicroBatcher
from batchmill.sources import catalog
from batchmill.spool import rows as arrow_rows
from batchmill.spool.gauge import Gauge, GaugedSink, SegmentBacklog
from batchmill.spool.rows import Convert, DeltaTable, SpanTable
from batchmill.spool.segment import Disk, remove_leftovers, write_error, write_segment
from batchmill.spool.sink import (
    BadRowsError,
    SinkStats,
    SpoolClosedError,
    SpoolSettings,
)
from batchmill.spool.span import SPAN_SOURCE, EventBatch, PackedSpans, SpanBatch
from batchmill.wording import count_of

Waiting: TypeAlias = SpanTable | PackedSpans | DeltaTable | EventBatch
"""A batch that waits for its segment."""

log = logging.getLogger("batchmill.spool")

_DELTAS = "deltas"
_STATEMENTS = "Statement"
"""What slow statements are written as; not an event type."""


@dataclass(frozen=True, kw_only=True)
class SpoolStats(SinkStats):
    """A spool at one moment, and its counters since the start; see :class:`SinkStats`."""

    kind = "spool"
    segments: int
    """Segments written."""
    written_bytes: int
    """Their size."""
    unread_segments: int
    """Segments in the folder; the pipeline removes those that it has committed."""
    unread_bytes: int
    """Their size."""
    oldest_unread_s: float
    """The age of the oldest of them."""

    def unread(self) -> dict[str, int]:
        """Segments in the folder and their size."""
        return {"unread_bytes": self.unread_bytes, "unread_segments": self.unread_segments}


class Spool(GaugedSink, lifecycle.Tracked):
    """Makes batches durable, as Parquet segments in ``folder``: a folder for each event type.

    Any thread may submit. Several processes may write to one folder.

    >>> with Spool(folder) as spool:  # doctest: +SKIP
    ...     spool.submit("Span", batch).result()
    PosixPath('spool/Span/1763222400000000-9f86d081-500.parquet')
    """

    takes_packed = True
    fork_order = 3  # after its batchers

    def __init__(
        self,
        folder: str | os.PathLike[str],
        settings: SpoolSettings | None = None,
        *,
        disk: Disk | None = None,
        **changes: Any,
    ) -> None:
        """``changes`` are settings by name: ``Spool(folder, linger_s=0.05)``."""
        self.settings = dataclasses.replace(settings or SpoolSettings(), **changes)
        self.folder = Path(folder).absolute()
        self._disk = disk or Disk()
        self._backlog = SegmentBacklog(self.folder, self.settings, log)
        self._gauge = Gauge(
            "spool",
            str(self.folder),
            self.settings,
            self._backlog,
            unit="row",
            waiting="to be written",
            log=log,
        )
        self._batchers: dict[str, MicroBatcher[Waiting]] = {}
        self._lock = threading.Lock()
        self._open_folder()
        arrow_rows.warm_up()
        lifecycle.track(self)

    def submit(
        self,
        source: str,
        batch: SpanBatch | PackedSpans | EventBatch | Sequence[Mapping[str, Any]],
    ) -> Future[Path]:
        """Accept a batch; the future gets the segment's path once that is durable.

        ``source`` is ``"Span"`` for a SpanBatch or PackedSpans, else the name of an event type,
        whose rows map columns to values. Never waits. Raises :class:`Overloaded` from CRITICAL on;
        the future fails with SpoolWriteError, BadRowsError or SpoolClosedError. It cannot be
        cancelled.
        """
        if not isinstance(batch, (SpanBatch, PackedSpans, EventBatch)):
            batch = EventBatch(batch)
        batcher = self._batchers.get(source) or self._batcher(source)
        if isinstance(batch, (SpanBatch, PackedSpans)) is not (source == SPAN_SOURCE):
            raise TypeError(f"{SPAN_SOURCE} takes a SpanBatch, any other type rows; not {source!r}")
        batch.check()
        answer: Future[Path] = Future()
        answer.set_running_or_notify_cancel()
        rows, weight = len(batch), batch.weight
        if self.closed:
            raise SpoolClosedError(str(self.folder))
        if not rows:  # nothing to write
            answer.set_result(self.folder / source)
            return answer
        try:
            waiting = SpanTable(batch) if isinstance(batch, SpanBatch) else batch
        except BadRowsError as error:
            log.warning("spool: a batch of %s failed: %s", count_of(rows, "row"), error)
            self._gauge.admit(rows, weight)
            self._gauge.settle(rows, weight, stored=False)
            answer.set_exception(error)
            return answer
        weight = waiting.weight  # what is held from now on
        self._gauge.admit(rows, weight)
        try:
            written = batcher.submit(waiting)
        except BaseException:  # out of memory, or of threads
            self._gauge.settle(rows, weight, stored=False)
            raise
        finish = functools.partial(_finish, self._gauge, str(self.folder), answer, rows, weight)
        written.add_done_callback(finish)
        return answer

    def submit_deltas(self, source: str, deltas: pa.Table) -> Future[Path]:
        """Write deltas of an event type as a segment; the future gets its path once it is durable.

        ``deltas`` is a table of :func:`batchmill.aggregate.to_arrow` or ``statements_to_arrow``,
        whose source is ``Statement``. Their events were accepted before, so they are refused at no
        level. The future fails with SpoolWriteError or
        SpoolClosedError.
        """
        batcher = self._batchers.get(f"{source} {_DELTAS}") or self._batcher(source, deltas=True)
        waiting = DeltaTable(deltas)
        rows, weight = len(waiting), waiting.weight
        answer: Future[Path] = Future()
        answer.set_running_or_notify_cancel()
        self._gauge.admit(rows, weight, accepted=True)
        try:
            written = batcher.submit(waiting)
        except BaseException:
            self._gauge.settle(rows, weight, stored=False)
            raise
        finish = functools.partial(_finish, self._gauge, str(self.folder), answer, rows, weight)
        written.add_done_callback(finish)
        return answer

    def stats(self) -> SpoolStats:
        """A snapshot of what waits, and of the counters since the start."""
        backlog = self._backlog
        stats = dataclasses.replace(self._gauge.stats(), free_bytes=backlog.free)
        return SpoolStats(
            **vars(stats),
            segments=backlog.segments,
            written_bytes=backlog.written_bytes,
            unread_segments=backlog.unread.segments,
            unread_bytes=backlog.unread.bytes,
            oldest_unread_s=backlog.unread.oldest_s,
        )

    def flush(self, timeout: float | None = None) -> bool:
        """Write what waits now; True when all that was submitted before the call is answered."""
        until = None if timeout is None else time.monotonic() + timeout
        flushed = [batcher.flush(_left(until)) for batcher in self._all_batchers()]
        return all(flushed)

    def hurry(self, source: str = SPAN_SOURCE, *, alone: bool = False) -> bool:
        """Write what waits of a type without lingering, if it is ``hurry_rows`` at least; whether.

        For a receiver all of whose senders wait for answers: none of them sends more before it has
        one, so lingering would only cost time. ``alone`` says that they are one sender: then any
        number of rows is enough, unless a segment is being written, during which they gather.
        """
        batcher = self._batchers.get(source)
        if batcher is None:
            return False
        enough = float(self.settings.hurry_rows * self.settings.max_bytes)
        return (alone and batcher.hurry(when_idle=True)) or batcher.hurry(enough)

    def close(self, timeout: float | None = None) -> bool:
        """Accept no more, write what waits, answer everything; True when that was in time.

        After ``timeout`` seconds (default: ``close_timeout_s``) the futures of what is not being
        written yet fail with SpoolClosedError.
        """
        with self._lock:
            self._gauge.close()
        until = time.monotonic() + (self.settings.close_timeout_s if timeout is None else timeout)
        closed = [batcher.close(_left(until)) for batcher in self._all_batchers()]
        self._gauge.end()
        return all(closed)

    def __repr__(self) -> str:
        return f"<Spool {str(self.folder)!r} {'closed' if self.closed else 'open'}>"

    def after_fork_in_child(self) -> None:
        """A thread that does not exist here may hold the lock; what waits is the parent's."""
        self._lock = threading.Lock()
        self._gauge.reset()

    def _open_folder(self) -> None:
        try:
            self.folder.parent.mkdir(parents=True, exist_ok=True)
            self._disk.make_folder(str(self.folder))
            remove_leftovers(self.folder)
        except OSError as error:
            raise write_error(self.folder, error) from error

    def _all_batchers(self) -> list[MicroBatcher[Waiting]]:
        with self._lock:
            return list(self._batchers.values())

    def _batcher(self, source: str, *, deltas: bool = False) -> MicroBatcher[Waiting]:
        # The name becomes a folder's name: only one that the catalog knows gets through.
        others = _STATEMENTS if deltas else SPAN_SOURCE
        kind = None if source == others else catalog().source(source)
        convert, encode = arrow_rows.converter(source, kind), arrow_rows.encode
        if source == SPAN_SOURCE and not self.settings.span_events:
            encode = arrow_rows.encode_metrics_only
        if deltas:
            convert, encode = arrow_rows.joined, arrow_rows.delta_file
        writer = SegmentWriter(
            self.folder, source, convert, encode, self._gauge, self._backlog, self._disk
        )
        settings = self.settings
        name = f"{source} {_DELTAS}" if deltas else source
        with self._lock:
            if self.closed:
                raise SpoolClosedError(str(self.folder))
            batcher = self._batchers.get(name)
            if batcher is None:
                batching = BatcherSettings(
                    # Deltas have been merged for as long as they may wait.
                    batch_size=1 if deltas else settings.max_rows,
                    linger_ms=0 if deltas else settings.linger_s * 1000,
                    max_in_flight=settings.writers,
                    max_weight=settings.max_rows * settings.max_bytes,
                    weigh=functools.partial(_share, settings.max_rows, settings.max_bytes),
                    close_timeout_s=settings.close_timeout_s,
                )
                batcher = MicroBatcher(writer, batching, name=f"spool-{name}")
                self._batchers[name] = batcher
            return batcher


class SegmentWriter:
    """Writes batches of one event type as a segment; the backend of its micro-batcher."""

    def __init__(
        self,
        root: Path,
        source: str,
        convert: Convert,
        encode: Callable[[pa.Table], memoryview],
        gauge: Gauge,
        backlog: SegmentBacklog,
        disk: Disk,
    ) -> None:
        self._folder = root / source
        self._source = source
        self._convert = convert
        self._encode = encode
        self._gauge = gauge
        self._backlog = backlog
        self._disk = disk

    def __call__(self, batches: list[Waiting]) -> list[Path | Exception]:
        """For each batch the segment that holds it, or why none does."""
        converted = arrow_rows.table_of(self._source, batches, self._convert)
        errors, numbers = converted.errors, range(len(batches))
        if errors:
            failed = count_of(len(errors), "batch", "batches")
            log.warning("spool: %s failed; first: %s", failed, next(iter(errors.values())))
        if converted.table is None:
            return [errors[number] for number in numbers]
        try:
            data, rows = self._encode(converted.table), converted.table.num_rows
            written = write_segment(self._folder, data, rows, self._disk)
        except OSError as error:
            self._gauge.fail(str(write_error(self._folder, error)))
            # An error for each: they are raised on different threads.
            return [errors.get(number) or write_error(self._folder, error) for number in numbers]
        self._backlog.wrote(written.bytes)
        return [errors.get(number) or written.path for number in numbers]


def _share(max_rows: int, max_bytes: int, batch: Waiting) -> int:
    """How much of a segment a batch takes, of ``max_rows * max_bytes``: by rows or by bytes."""
    size = batch.table_bytes if isinstance(batch, (SpanTable, PackedSpans)) else batch.weight
    return max(len(batch) * max_bytes, size * max_rows)


def _finish(
    gauge: Gauge,
    folder: str,
    answer: Future[Path],
    rows: int,
    weight: int,
    written: Future[ItemResult[Waiting]],
) -> None:
    """Answer the submitter; what became of the batch is counted before that."""
    result = written.result()
    gauge.settle(rows, weight, stored=result.is_success)
    if result.is_success:
        answer.set_result(result.value)
    elif isinstance(result.error, BatcherClosedError):
        answer.set_exception(SpoolClosedError(folder))
    else:
        answer.set_exception(result.error)


def _left(until: float | None) -> float | None:
    return None if until is None else max(0.0, until - time.monotonic())
