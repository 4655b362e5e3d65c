"""The exporter: tails an outbox, and sends what is in it to one peer.

    outbox ──► values ──► BatchQueue ──► peer
       ▲                                  │
       └─── position, in the store ◄──────┘ acknowledged

Guarantees, with a BLOCKING queue:

* *At least once*: a position is stored only after the peer has acknowledged everything up to it.
* *In order*: the values of one metric, minute and entity arrive in the order of the commits, so
  the last total that a peer has is the store's.
* *Bounded*: it holds its queue, one request and some rows of a file, however far it is behind.
* *Apart*: it has no transaction open while it waits for its peer, so no commit ever waits for that.

Two threads: the one that calls :meth:`Exporter.run`, and the queue's, which sends and tries again.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from batchmill import presets
from batchmill.errors import BatchmillError
from batchmill.export.senders import Sender, SendError
from batchmill.export.settings import ExporterSettings
from batchmill.export.stats import (
    RETRIES,
    ROWS_DROPPED,
    VALUES_DROPPED,
    ExporterStats,
    StatsRecorder,
)
from batchmill.export.values import ExportedValue, ValueReader
from batchmill.files import FileLock
from batchmill.outbox import OutboxFileError
from batchmill.queue import BatchQueue, BatchQueueSettings, BufferStrategy
from batchmill.store import OutboxFile, Store, StoreClosedError, StoreError
from batchmill.waiters import back_off_ms
from batchmill.wording import count_of

if TYPE_CHECKING:
    from batchmill.outbox import Outbox

T = TypeVar("T")

log = logging.getLogger("batchmill.export")

FULL = "queue full"
UNREADABLE = "file cannot be read"
GONE = "file is gone"
_MAX_FILES = 200
"""How many files are listed at a time."""
_PIECE = 100
"""How many values are offered at a time to a queue that may drop them."""


@dataclass(frozen=True, slots=True)
class _ExportedFile:
    """A file whose values were put on the queue."""

    seq: int
    rows: int
    """How many of its rows were there to be sent; 0: it was gone, and counted by others."""
    values: int


class ExporterInUseError(BatchmillError, RuntimeError):
    """Another process runs an exporter of that name."""

    name: str
    folder: str
    template = (
        "an exporter named {name!r} runs on {folder} already: stop that one first, "
        "or give this one a --name of its own"
    )


class _GivenUpError(Exception):
    """There is no more time to try again: what was not acknowledged is sent by the next run."""


@contextlib.contextmanager
def _exporter_lock(folder: Path, name: str) -> Iterator[None]:
    """Be the one exporter of that name; ends with the process, however that ends."""
    digest = hashlib.sha256(name.encode("utf-8", "surrogatepass")).hexdigest()[:16]
    lock = FileLock.take(folder / f"exporter-{digest}.lock")
    if lock is None:
        raise ExporterInUseError(name, str(folder))
    with lock:
        yield


def forget_exporter(store: Store, outbox: Outbox, name: str) -> None:
    """Let nothing wait for an exporter any more; what it has not sent is counted.

    Raises :class:`ExporterInUseError` while it runs: it would end with an error, and what it has in
    hand would be counted as dropped.
    """
    with _exporter_lock(outbox.folder, name):
        outbox.remove(store.leave_outbox(name, outbox.place))


class Exporter:
    """Sends what an outbox gets to one peer; :meth:`run` it in a thread or a process of its own."""

    def __init__(
        self,
        *,
        store: Store,
        outbox: Outbox,
        sender: Sender,
        name: str,
        settings: ExporterSettings | None = None,
    ) -> None:
        self.name = name
        self.settings = settings or ExporterSettings()
        self._store = store
        self._outbox = outbox
        self._sender = sender
        self._reader = ValueReader(store, outbox)
        self._recorder = StatsRecorder()
        self._position = 0
        self._stopping = threading.Event()
        self._give_up = threading.Event()
        self._incomplete = False
        """Whether something since the last flush was not delivered: it is to be sent again."""
        self._own_errors = 0
        """How many errors of its own there were in a row."""
        self._max_values = self.settings.max_batch
        """How many values are sent at a time, as far as is known what the peer takes."""
        self._queue: BatchQueue[ExportedValue] | None = None

    def run(self, *, once: bool = False) -> None:
        """Export until :meth:`stop`; with ``once``, until nothing is left.

        Its sender is closed in the end, so it runs once. Raises :class:`ExporterInUseError` if
        another process does the same.
        """
        with contextlib.closing(self._sender), _exporter_lock(self._outbox.folder, self.name):
            if not self._stopping.is_set():
                self._give_up.clear()
            self._retry_store(self._join)
            queue = self._queue = BatchQueue(self.name, self._queue_settings())
            try:
                self._tail(once)
            finally:
                # All is sent by now, or else something went wrong, and nothing more is to be sent.
                self._give_up.set()
                queue.shutdown()

    def stop(self) -> None:
        """Ask it to end: what is in hand is sent within ``drain_s``, and nothing else is begun.

        Returns at once; may be called by any thread, any number of times.
        """
        if not self._stopping.is_set():
            self._stopping.set()
            threading.Thread(target=self._drain, name="batchmill-export-drain", daemon=True).start()

    def stats(self) -> ExporterStats:
        """What it has done, and what waits; asks the store."""
        queue = self._queue
        waiting = self._store.outbox_depth(self._outbox.place, after=self._position)
        queued = 0 if queue is None else queue.stats().total_used
        return self._recorder.stats(self.name, self._position, waiting, queued)

    # The thread of run().

    def _join(self) -> None:
        self._position = self._store.join_outbox(self.name, self._outbox.place)

    def _next_files(self) -> list[OutboxFile]:
        return self._store.outbox(self._outbox.place, after=self._position, limit=_MAX_FILES)

    def _tail(self, once: bool) -> None:
        while not self._stopping.is_set():
            files = self._retry_store(self._next_files)
            for group in self._export(files or ()):
                self._advance(group)
            if not files and once:
                return
            if not files:
                self._stopping.wait(self.settings.poll_s)

    def _export(self, files: Sequence[OutboxFile]) -> Iterator[list[_ExportedFile]]:
        """Send files; yields those that are acknowledged, about one queue of values at a time."""
        group: list[_ExportedFile] = []
        for file in files:
            if self._stopping.is_set():
                break
            group.append(self._export_file(file))
            if sum(exported.values for exported in group) >= self.settings.buffer_size:
                if not self._flush():
                    return
                yield group
                group = []
        if group and self._flush():
            yield group

    def _export_file(self, file: OutboxFile) -> _ExportedFile:
        """Put the values of a file on the queue."""
        rows, count = file.rows, 0
        left_out: Counter[str] = Counter()
        gone = False
        try:
            for values in self._reader.read(file, left_out):
                count += len(values)
                self._produce(values)
                if self._give_up.is_set():
                    self._incomplete = True
                    break
        except FileNotFoundError:
            gone = True
        except OutboxFileError as error:
            self._skip(file, UNREADABLE, str(error))
        except StoreError as error:
            self._incomplete = True
            self._store_failed(error)
            self._give_up.wait(self._delay_s(1))
        if gone:
            listed = self._retry_store(lambda: self._is_listed(file))
            if listed:
                self._skip(file, GONE, "somebody removed it")
            elif listed is None:
                self._incomplete = True
            else:
                rows = 0  # the store let it go for want of room, and counted it as dropped
        for reason, dropped in left_out.items():
            self._recorder.add(VALUES_DROPPED, reason, dropped)
        return _ExportedFile(file.seq, rows, count)

    def _produce(self, values: list[ExportedValue]) -> None:
        assert self._queue is not None
        if self.settings.strategy is BufferStrategy.BLOCKING:
            if self._queue.produce_many(values) < len(values):
                self._incomplete = True
            return
        for start in range(0, len(values), _PIECE):
            piece = values[start : start + _PIECE]
            dropped = len(piece) - self._queue.produce_many(piece)
            self._recorder.add(VALUES_DROPPED, FULL, dropped)

    def _flush(self) -> bool:
        """Wait until the peer has all that was put on the queue; False: it has not, start over."""
        assert self._queue is not None
        self._queue.flush()
        incomplete, self._incomplete = self._incomplete, False
        if incomplete:
            self._recorder.take_back_drops()  # they come again, and may well be sent then
        return not incomplete

    def _advance(self, files: Sequence[_ExportedFile]) -> None:
        """Store the position behind some files, and remove those that nobody waits for."""
        taken = self._recorder.take_new()
        counters = {(name, self.name, reason): n for (name, reason), n in taken.items()}
        sent = [(file.seq, file.rows) for file in files]
        free = self._retry_store(
            lambda: self._store.pass_outbox(self.name, self._outbox.place, sent, counters)
        )
        if free is None:
            self._recorder.put_back(taken)
            return
        self._position = files[-1].seq
        self._outbox.remove(free)

    def _is_listed(self, file: OutboxFile) -> bool:
        files = self._store.outbox(self._outbox.place, after=file.seq - 1, limit=1)
        return bool(files) and files[0].seq == file.seq

    def _skip(self, file: OutboxFile, reason: str, why: str) -> None:
        rows = count_of(file.rows, "row")
        log.error("%s: %s of %s not exported: %s", self.name, rows, file.path, why)
        self._recorder.add(ROWS_DROPPED, reason, file.rows)

    def _retry_store(self, work: Callable[[], T]) -> T | None:
        """Do something with the store until it works; None: there is no more time."""
        attempt = 0
        while True:
            try:
                return work()
            except StoreError as error:
                self._store_failed(error)
            attempt += 1
            if self._give_up.wait(self._delay_s(attempt)):
                return None

    def _store_failed(self, error: StoreError) -> None:
        if isinstance(error, StoreClosedError):
            raise error
        log.warning("%s: %s", self.name, error)
        self._recorder.add(RETRIES, "store unavailable")

    # The queue's thread.

    def _queue_settings(self) -> BatchQueueSettings:
        settings = self.settings
        return presets.grpc_exporter(
            self._deliver,
            buffer_size=settings.buffer_size,
            max_batch=settings.max_batch,
            strategy=settings.strategy,
            error_handler=self._not_delivered,
            # run() has waited before it comes to that.
            shutdown_timeout_ms=(settings.timeout_s + settings.drain_s) * 1000,
        )

    def _deliver(self, batch: list[ExportedValue]) -> None:
        start = 0
        while start < len(batch):
            values = batch[start : start + self._max_values]
            refusal = self._send(values)
            if refusal is not None and refusal.too_large and len(values) > 1:
                self._max_values = len(values) // 2
                self._recorder.add(RETRIES, refusal.reason)
                continue
            start += len(values)
            if refusal is None:
                # Slowly back to more: it was one large value, maybe.
                self._max_values = min(self.settings.max_batch, self._max_values + 1)
                continue
            log.error("%s: %s refused: %s", self.name, count_of(len(values), "value"), refusal)
            self._recorder.add(VALUES_DROPPED, f"refused: {refusal.reason}", len(values))

    def _send(self, values: Sequence[ExportedValue]) -> SendError | None:
        """Send until the peer accepts the values; the reason if it refuses them for good."""
        attempt = 0
        while True:
            if self._give_up.is_set():
                raise _GivenUpError
            try:
                refused_points = self._sender.send(values)
            except SendError as error:
                if not error.retry:
                    return error
                attempt += 1
                if attempt == 1:
                    log.warning("%s: %s; trying again", self.name, error)
                self._recorder.request_failed(error.reason, str(error))
                # A peer that asks for no pause at all is not asked all the time.
                if self._give_up.wait(max(self._delay_s(attempt), error.after_s or 0.0)):
                    raise _GivenUpError from error
            else:
                self._own_errors = 0
                self._recorder.request_taken(len(values), refused_points)
                return None

    def _not_delivered(self, batch: list[ExportedValue], error: BaseException) -> None:
        """Neither this batch nor what follows may be passed: it is sent again."""
        self._incomplete = True
        if not isinstance(error, _GivenUpError):
            self._own_errors += 1
            if self._own_errors == 1:
                log.error("%s: an error of its own; trying again", self.name, exc_info=error)
            self._recorder.request_failed("error of its own", repr(error))
            self._give_up.wait(self._delay_s(self._own_errors))

    def _delay_s(self, attempt: int) -> float:
        return back_off_ms(self.settings.initial_ms, self.settings.max_ms, 2.0, attempt) / 1000

    def _drain(self) -> None:
        """In a thread of its own: the others may wait for the peer, which has its own time."""
        if not self._give_up.wait(self.settings.drain_s):
            self._give_up.set()
            self._sender.interrupt()
