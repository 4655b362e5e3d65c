"""The spool: batches in, segments on the disk, and an answer once they are safe there.

One micro-batcher for each event type gathers batches for a segment, so that many senders share
one fsync. It also brings the futures, the drain at the end and what a fork needs.

Guarantees
    * A future is answered with the segment's path only after the segment is synced and in its
      place. Everything that was taken is written, or its future fails: nothing in between.
    * A batch is in one segment as a whole.
    * A batch that cannot be converted fails alone.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import os
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeAlias

from batchmill import lifecycle
from batchmill.batcher import BatcherClosedError, BatcherSettings, ItemResult, MicroBatcher
from batchmill.sources import SourceType, catalog
from batchmill.spool import rows as rows_module
from batchmill.spool import segment
from batchmill.spool.batches import SPAN_SOURCE, EventBatch, SpanBatch
from batchmill.spool.errors import BadRowsError, SpoolClosedError, SpoolWriteError
from batchmill.spool.gauge import Gauge
from batchmill.spool.level import Level
from batchmill.spool.rows import SpanTable
from batchmill.spool.segment import Disk
from batchmill.spool.settings import SpoolSettings
from batchmill.spool.thresholds import Judgement, Measure

Waiting: TypeAlias = SpanTable | EventBatch

log = logging.getLogger("batchmill.spool")


@dataclass(frozen=True, slots=True)
class SpoolStats:
    """A spool at one moment, and its counters since the start.

    While no submit is under way, ``submitted_rows == written_rows + failed_rows + queue_rows``.
    Refused rows are none of those.
    """

    level: Level
    submitted_rows: int
    """Rows that were taken."""
    written_rows: int
    """Rows that are safe on the disk."""
    failed_rows: int
    """Rows whose future failed."""
    refused_rows: int
    """Rows that were not taken, since too much waited already."""
    refused: Mapping[Level, int]
    """Batches that were not taken, by level."""
    queue_rows: int
    """Rows that wait to be written, or are just being written."""
    queue_bytes: int
    """What those weigh."""
    segments: int
    """Segments written."""
    written_bytes: int
    """Their size."""
    unread_segments: int
    """Segments in the folder: the pipeline removes what it has committed."""
    unread_bytes: int
    """Their size."""
    oldest_unread_s: float
    """The age of the oldest of them."""
    free_bytes: int | None
    """What is left on the disk."""


class Spool:
    """Makes batches durable: Parquet segments in ``folder``, one folder in it for each event type.

    Any thread may submit. Several processes may write to one folder.

    >>> with Spool(folder) as spool:  # doctest: +SKIP
    ...     spool.submit("Span", batch).result()
    PosixPath('spool/Span/1763222400000000-9f86d081.parquet')
    """

    fork_order = 3  # after its batchers and its gauge

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
        self._gauge = Gauge(self.folder, self.settings)
        self._batchers: dict[str, MicroBatcher[Waiting]] = {}
        self._lock = threading.Lock()
        self._closed = False
        self._open_folder()
        rows_module.warm_up()
        lifecycle.track(self)

    def submit(
        self, source: str, batch: SpanBatch | EventBatch | Sequence[Mapping[str, Any]]
    ) -> Future[Path]:
        """Hand over a batch; the future has the segment's path once that is safe on the disk.

        ``source`` is ``"Span"`` for a SpanBatch, else the name of an event type, whose rows map
        columns to values. Never waits. Raises :class:`Overloaded` from CRITICAL on; the future
        fails with SpoolWriteError, BadRowsError or SpoolClosedError. It cannot be cancelled: what
        was taken is written.
        """
        if not isinstance(batch, (SpanBatch, EventBatch)):
            batch = EventBatch(batch)
        batcher = self._batchers.get(source) or self._batcher(source)
        if isinstance(batch, SpanBatch) is not (source == SPAN_SOURCE):
            raise TypeError(f"{SPAN_SOURCE} takes a SpanBatch, any other type rows; not {source!r}")
        batch.check()
        answer: Future[Path] = Future()
        answer.set_running_or_notify_cancel()
        rows, weight = len(batch), batch.weight
        if self._closed:
            raise SpoolClosedError(str(self.folder))
        if not rows:  # it is as safe as it will ever be
            answer.set_result(self.folder / source)
            return answer
        self._gauge.admit(rows, weight)
        try:
            waits = SpanTable(batch) if isinstance(batch, SpanBatch) else batch
            taken = batcher.submit(waits)
        except BadRowsError as error:
            log.warning("batchmill spool: a batch of %d rows failed: %s", rows, error)
            self._gauge.settle(rows, weight, written=False)
            answer.set_exception(error)
            return answer
        except BaseException:  # no memory, or no thread to be had
            self._gauge.settle(rows, weight, written=False)
            raise
        finish = functools.partial(_finish, self._gauge, str(self.folder), answer, rows, weight)
        taken.add_done_callback(finish)
        return answer

    def level(self) -> Level:
        """The level of this moment; cheap: the folder is looked at every 100 ms at most."""
        return self._gauge.level()

    def judge(self) -> Judgement:
        """The level of this moment; from CRITICAL on also why, and when to try again."""
        return self._gauge.judge()

    def measures(self) -> tuple[Measure, ...]:
        """What makes the level of this moment: each depth, and where its levels begin."""
        return self._gauge.measures()

    def stats(self) -> SpoolStats:
        """A snapshot of what waits, and of the counters since the start."""
        level = self._gauge.level()
        counts, refused, rows, weight, unread, free = self._gauge.snapshot()
        return SpoolStats(
            level=level,
            submitted_rows=counts.submitted_rows,
            written_rows=counts.written_rows,
            failed_rows=counts.failed_rows,
            refused_rows=counts.refused_rows,
            refused=refused,
            queue_rows=rows,
            queue_bytes=weight,
            segments=counts.segments,
            written_bytes=counts.written_bytes,
            unread_segments=unread.segments,
            unread_bytes=unread.bytes,
            oldest_unread_s=unread.oldest_s,
            free_bytes=free,
        )

    def flush(self, timeout: float | None = None) -> bool:
        """Write what waits now; True when all that was taken before the call is answered."""
        until = None if timeout is None else time.monotonic() + timeout
        flushed = [each.flush(_left(until)) for each in self._all()]
        return all(flushed)

    def hurry(self, source: str = SPAN_SOURCE) -> bool:
        """Write what waits of a type without lingering, if it is ``hurry_rows`` at least; whether.

        For a receiver all of whose senders wait for their answers: nothing comes before they have
        them, so the linger would only keep everybody waiting.
        """
        batcher = self._batchers.get(source)
        return batcher is not None and batcher.hurry(
            float(self.settings.hurry_rows * self.settings.max_bytes)
        )

    def close(self, timeout: float | None = None) -> bool:
        """Take no more, write what waits, answer everything; True when that was in time.

        After ``timeout`` seconds (default: ``close_timeout_s``) the futures of what is not being
        written yet fail with SpoolClosedError.
        """
        with self._lock:
            self._closed = True
        until = time.monotonic() + (self.settings.close_timeout_s if timeout is None else timeout)
        closed = [each.close(_left(until)) for each in self._all()]
        self._gauge.close()
        return all(closed)

    @property
    def closed(self) -> bool:
        """Whether it takes no more batches."""
        return self._closed

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        state = "closed" if self._closed else "open"
        return f"<Spool {str(self.folder)!r} {state}>"

    def begin_close(self) -> None:
        """At exit the batchers close themselves."""

    def await_close(self) -> None:
        """At exit the batchers are waited for by themselves."""

    def after_fork_in_child(self) -> None:
        """The lock may be held by a thread that is not here; what waits is the parent's."""
        self._lock = threading.Lock()

    def _open_folder(self) -> None:
        try:
            self.folder.parent.mkdir(parents=True, exist_ok=True)
            self._disk.make_folder(str(self.folder))
            segment.remove_leftovers(self.folder)
        except OSError as error:
            raise _write_error(self.folder, error) from error

    def _all(self) -> list[MicroBatcher[Waiting]]:
        with self._lock:
            return list(self._batchers.values())

    def _batcher(self, source: str) -> MicroBatcher[Waiting]:
        # The name becomes a folder's: only one that the catalog has gets through.
        kind = None if source == SPAN_SOURCE else catalog().source(source)
        writer = SegmentWriter(self.folder, source, kind, self._gauge, self._disk)
        settings = self.settings
        with self._lock:
            if self._closed:
                raise SpoolClosedError(str(self.folder))
            known = self._batchers.get(source)
            if known is None:
                config = BatcherSettings(
                    batch_size=settings.max_rows,
                    linger_ms=settings.linger_s * 1000,
                    max_in_flight=settings.writers,
                    max_weight=settings.max_rows * settings.max_bytes,
                    weigh=functools.partial(_share, settings.max_rows, settings.max_bytes),
                    close_timeout_s=settings.close_timeout_s,
                )
                known = MicroBatcher(writer, config, name=f"spool-{source}")
                self._batchers[source] = known
            return known


class SegmentWriter:
    """Writes batches of one event type as a segment; the backend of its micro-batcher."""

    def __init__(
        self, root: Path, source: str, kind: SourceType | None, gauge: Gauge, disk: Disk
    ) -> None:
        self._folder = root / source
        self._source = source
        self._convert = rows_module.converter(source, kind)
        self._gauge = gauge
        self._disk = disk

    def __call__(self, batches: list[Waiting]) -> list[Path | Exception]:
        """For each batch the segment that it is safe in, or why it is in none."""
        table, bad = rows_module.table_of(self._source, batches, self._convert)
        if bad:
            first = next(iter(bad.values()))
            log.warning("batchmill spool: %d batches failed, the first: %s", len(bad), first)
        if table is None:
            return [bad[number] for number in range(len(batches))]
        try:
            written = segment.write_segment(self._folder, rows_module.encode(table), self._disk)
        except OSError as error:
            self._gauge.failed(str(_write_error(self._folder, error)))
            # An error for each: they are raised on different threads.
            return [
                bad.get(number) or _write_error(self._folder, error)
                for number in range(len(batches))
            ]
        self._gauge.wrote(written.bytes)
        return [bad.get(number) or written.path for number in range(len(batches))]


def _share(max_rows: int, max_bytes: int, batch: Waiting) -> int:
    """How much of a segment a batch takes, of ``max_rows * max_bytes``: by rows or by bytes."""
    return max(len(batch) * max_bytes, batch.weight * max_rows)


def _finish(
    gauge: Gauge,
    folder: str,
    answer: Future[Path],
    rows: int,
    weight: int,
    taken: Future[ItemResult[Waiting]],
) -> None:
    """Tell the submitter what became of the batch; it is counted before he hears of it."""
    result = taken.result()
    gauge.settle(rows, weight, written=result.is_success)
    if result.is_success:
        answer.set_result(result.value)
    elif isinstance(result.error, BatcherClosedError):
        answer.set_exception(SpoolClosedError(folder))
    else:
        answer.set_exception(result.error)


def _write_error(folder: Path, error: OSError) -> SpoolWriteError:
    made = SpoolWriteError(str(folder), error.errno, error.strerror or str(error))
    made.__cause__ = error
    return made


def _left(until: float | None) -> float | None:
    return None if until is None else max(0.0, until - time.monotonic())
