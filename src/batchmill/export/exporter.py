"""The exporter: tails an outbox, and sends what it finds to one peer.

    outbox ──► values ──► BatchQueue ──► peer
       ▲                                  │
       └─── position, in the store ◄──────┘ acknowledged

Guarantees, with a BLOCKING queue:

* *At least once*: a position is stored only after the peer has acknowledged everything up to it.
* *In order*: the values of one metric, minute and entity arrive in the order of the commits, so
  the last total that a peer has is the store's.
* *Bounded*: it holds its queue, one request and some rows of a file, however far it is behind.
* *Apart*: it opens no transaction while it waits for its peer, so no commit ever waits for that.

Two threads: the one that calls :meth:`Exporter.run`, and the queue's, which sends and tries again.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, TypeAlias, TypeVar

from batchmill import presets
from batchmill.backoff import back_off_ms
from batchmill.export.errors import SendError
from batchmill.export.figures import (
    EXPORTED,
    POINTS_REFUSED,
    RETRIES,
    ROWS_DROPPED,
    VALUES_DROPPED,
    ExporterStats,
    Figures,
)
from batchmill.export.lock import only_one
from batchmill.export.settings import ExporterSettings
from batchmill.export.target import Sender
from batchmill.export.values import ExportedValue, ValueReader
from batchmill.outbox import OutboxFileError
from batchmill.queue import BatchQueue, BatchQueueSettings, BufferStrategy
from batchmill.store import OutboxFile, Store, StoreClosedError, StoreError

if TYPE_CHECKING:
    from batchmill.outbox import Outbox

T = TypeVar("T")
Through: TypeAlias = tuple[int, int]
"""A file that was dealt with: its number, and how many of its rows were there to be sent."""

log = logging.getLogger("batchmill.export")

FULL = "queue full"
UNREADABLE = "file cannot be read"
GONE = "file is gone"
_FILES = 200
"""How many files are asked for at a time."""
_PIECE = 100
"""How many values are offered at a time to a queue that may drop them."""


class GivenUpError(Exception):
    """There is no more time to try again: what was not acknowledged is sent by the next run."""


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
        self._figures = Figures()
        self._position = 0
        self._stopping = threading.Event()
        self._give_up = threading.Event()
        self._lost = False
        self._own_errors = 0
        """How many errors of its own there were in a row."""
        self._at_most = self.settings.max_batch
        """How many values are sent at a time, as far as is known what the peer takes."""
        self._queue: BatchQueue[ExportedValue] | None = None

    def run(self, *, once: bool = False) -> None:
        """Export until :meth:`stop`; with ``once``, until nothing is left.

        Its sender is closed in the end, so it runs once. Raises :class:`ExporterInUseError` if
        another process does the same.
        """
        with contextlib.closing(self._sender), only_one(self._outbox.folder, self.name):
            if not self._stopping.is_set():
                self._give_up.clear()
            self._patiently(self._join)
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
        figures, queue = self._figures, self._queue
        return ExporterStats(
            self.name,
            self._position,
            self._store.outbox_depth(self._outbox.place, after=self._position),
            0 if queue is None else queue.stats().total_used,
            sum(figures.of(EXPORTED).values()),
            figures.requests,
            figures.of(RETRIES),
            {**figures.of(VALUES_DROPPED), **figures.of(ROWS_DROPPED)},
            sum(figures.of(POINTS_REFUSED).values()),
            figures.failing,
            figures.failing_s(),
        )

    # The thread of run().

    def _join(self) -> None:
        self._position = self._store.join_outbox(self.name, self._outbox.place)

    def _look(self) -> list[OutboxFile]:
        return self._store.outbox(self._outbox.place, after=self._position, limit=_FILES)

    def _tail(self, once: bool) -> None:
        while not self._stopping.is_set():
            found = self._patiently(self._look)
            for group in self._groups(found or ()):
                self._pass(group)
            if not found and once:
                return
            if not found:
                self._stopping.wait(self.settings.poll_s)

    def _groups(self, files: Sequence[OutboxFile]) -> Iterator[list[Through]]:
        """Files that were sent, as many together as one queue holds of their values."""
        group: list[Through] = []
        values = 0
        for each in files:
            if self._stopping.is_set():
                break
            made, rows = self._export(each)
            values += made
            group.append((each.seq, rows))
            if values >= self.settings.buffer_size:
                if not self._flush():
                    return
                yield group
                group, values = [], 0
        if group and self._flush():
            yield group

    def _export(self, file: OutboxFile) -> tuple[int, int]:
        """Put the values of a file on the queue; how many, and of how many rows."""
        rows = file.rows
        left_out: Counter[str] = Counter()
        made, gone = 0, False
        try:
            for values in self._reader.read(file, left_out):
                made += len(values)
                self._produce(values)
                if self._give_up.is_set():
                    self._lost = True
                    break
        except FileNotFoundError:
            gone = True
        except OutboxFileError as error:
            self._skip(file, UNREADABLE, str(error))
        except StoreError as error:
            self._lost = True
            self._store_failed(error)
            self._ends_within(self._delay_s(1))
        if gone:
            named = self._patiently(lambda: self._is_named(file))
            if named:
                self._skip(file, GONE, "somebody removed it")
            elif named is None:
                self._lost = True
            else:
                # It had to go, and was counted as dropped by whoever let it go: so it stays.
                rows = 0
        for reason, n in left_out.items():
            self._figures.add(VALUES_DROPPED, reason, n)
        return made, rows

    def _produce(self, values: list[ExportedValue]) -> None:
        assert self._queue is not None
        if self.settings.strategy is BufferStrategy.BLOCKING:
            if self._queue.produce_many(values) < len(values):
                self._lost = True
            return
        for start in range(0, len(values), _PIECE):
            some = values[start : start + _PIECE]
            self._figures.add(VALUES_DROPPED, FULL, len(some) - self._queue.produce_many(some))

    def _flush(self) -> bool:
        """Wait until the peer has all that was put on the queue; False: it has not, start over."""
        assert self._queue is not None
        self._queue.flush()
        lost, self._lost = self._lost, False
        if lost:
            self._figures.take_back_drops()  # they come again, and may well be sent then
        return not lost

    def _pass(self, files: Sequence[Through]) -> None:
        """Store the position behind some files, and remove those that nobody waits for."""
        taken = self._figures.take()
        counters = {(what, self.name, reason): n for (what, reason), n in taken.items()}
        free = self._patiently(
            lambda: self._store.pass_outbox(self.name, self._outbox.place, files, counters)
        )
        if free is None:
            self._figures.put_back(taken)
            return
        self._position = files[-1][0]
        self._outbox.remove(free)

    def _is_named(self, file: OutboxFile) -> bool:
        found = self._store.outbox(self._outbox.place, after=file.seq - 1, limit=1)
        return bool(found) and found[0].seq == file.seq

    def _skip(self, file: OutboxFile, reason: str, why: str) -> None:
        log.error("%s: %d rows of %s are not exported: %s", self.name, file.rows, file.path, why)
        self._figures.add(ROWS_DROPPED, reason, file.rows)

    def _patiently(self, work: Callable[[], T]) -> T | None:
        """Do something with the store until it works; None: there is no more time."""
        attempt = 0
        while True:
            try:
                return work()
            except StoreError as error:
                self._store_failed(error)
            attempt += 1
            if self._ends_within(self._delay_s(attempt)):
                return None

    def _store_failed(self, error: StoreError) -> None:
        if isinstance(error, StoreClosedError):
            raise error
        log.warning("%s: %s", self.name, error)
        self._figures.add(RETRIES, "store unavailable")

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
            some = batch[start : start + self._at_most]
            error = self._send(some)
            if error is not None and error.too_large and len(some) > 1:
                self._at_most = len(some) // 2
                self._figures.add(RETRIES, error.reason)
                continue
            start += len(some)
            if error is None:
                # Slowly back to more: it was one large value, maybe.
                self._at_most = min(self.settings.max_batch, self._at_most + 1)
                continue
            log.error("%s: %d values refused: %s", self.name, len(some), error)
            self._figures.add(VALUES_DROPPED, f"refused: {error.reason}", len(some))

    def _send(self, values: Sequence[ExportedValue]) -> SendError | None:
        """Send until the peer has taken it, or has refused it for good: then why."""
        attempt = 0
        while True:
            if self._give_up.is_set():
                raise GivenUpError
            try:
                refused = self._sender.send(values)
            except SendError as error:
                if not error.retry:
                    return error
                attempt += 1
                if attempt == 1:
                    log.warning("%s: %s; trying again", self.name, error)
                self._figures.failed(error.reason, str(error))
                # A peer that asks for no pause at all is not asked all the time.
                if self._ends_within(max(self._delay_s(attempt), error.after_s or 0.0)):
                    raise GivenUpError from error
            else:
                self._own_errors = 0
                self._figures.sent(len(values), refused)
                return None

    def _not_delivered(self, batch: list[ExportedValue], error: BaseException) -> None:
        """Nothing of this, nor of what follows, may be passed: it is sent again."""
        self._lost = True
        if not isinstance(error, GivenUpError):
            self._own_errors += 1
            if self._own_errors == 1:
                log.error("%s: an error of its own; trying again", self.name, exc_info=error)
            self._figures.failed("error of its own", repr(error))
            self._ends_within(self._delay_s(self._own_errors))

    def _delay_s(self, attempt: int) -> float:
        return back_off_ms(self.settings.initial_ms, self.settings.max_ms, 2.0, attempt) / 1000

    def _ends_within(self, seconds: float) -> bool:
        """Wait; True: there is no more time at all."""
        return self._give_up.wait(seconds)

    def _drain(self) -> None:
        """In a thread of its own: the others may wait for the peer, which has its own time."""
        if not self._give_up.wait(self.settings.drain_s):
            self._give_up.set()
            self._sender.interrupt()
