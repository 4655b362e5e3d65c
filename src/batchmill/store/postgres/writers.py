"""Rows to PostgreSQL over several connections at once: the queue of the JDBC writer.

The rows of a large batch are cut into pieces, which go through a queue to as many threads as there
are writers. Each has a connection of its own and copies its pieces into staged tables, while the
one transaction that commits the batch merges those that are there already.

Guarantees
    What a commit takes is what its own pieces were, each once, or the commit is tried again: a
    piece that failed or was lost never makes it smaller. Pieces of a try that came to nothing are
    removed after it, by the next commit, or when the stream is claimed.

    These connections are a shorter way, never a condition: the try after one in which a piece
    failed goes over the one connection, and says by itself what is wrong with the database.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

from batchmill import lifecycle, presets
from batchmill.queue import BatchQueue, BatchQueueStats
from batchmill.store.errors import StoreReadOnlyError
from batchmill.store.postgres.faults import translated
from batchmill.store.postgres.settings import WriterSettings
from batchmill.store.postgres.staging import Piece, pieces_of, tells_rows, write_piece
from batchmill.store.retry import TransientError
from batchmill.store.sql.session import Owner, Part, Row

if TYPE_CHECKING:
    import psycopg

log = logging.getLogger("batchmill.store")

FAILED = "a piece could not be written"
LOST = "a piece was not whole any more"
Connect: TypeAlias = "Callable[[], psycopg.Connection[Row]]"


@dataclass(frozen=True, slots=True)
class WriterStats:
    """What became of pieces."""

    queue: BatchQueueStats | None
    """The queue's own counters; None while no batch was large enough."""
    retried: int
    """Pieces that were written once more, over a new connection."""
    fallbacks: Mapping[str, int]
    """Tries that came to nothing because of a piece, by reason."""


class PieceError(Exception):
    """A piece did not arrive; its cause says why. Never gets out of the store."""


class Staging:
    """The pieces of one try on their way; iterating gives each with its table, as they come."""

    def __init__(self, pieces: Sequence[Piece], writers: BatchQueue[Order]) -> None:
        self._pieces = pieces
        self._writers = writers
        self._answers: queue.SimpleQueue[tuple[Piece, str | BaseException]] = queue.SimpleQueue()
        self.over = False
        """Whether the try has ended: what is not written yet need not be."""

    def send(self) -> None:
        """Hand the pieces to the writers; waits where their queue is full."""
        for piece in self._pieces:
            if not self._writers.produce(Order(self, piece)):
                raise PieceError("the writers were shut down")

    def answer(self, piece: Piece, outcome: str | BaseException) -> None:
        """Say what became of a piece: the table that it is in, or an error."""
        self._answers.put((piece, outcome))

    def __iter__(self) -> Iterator[tuple[Piece, str]]:
        for _ in self._pieces:
            piece, outcome = self._answers.get()
            if isinstance(outcome, BaseException):
                raise PieceError(str(outcome)) from outcome
            yield piece, outcome

    def end(self) -> None:
        """Have the rest left out, and wait until nobody writes any more."""
        self.over = True
        self._writers.flush()


@dataclass(frozen=True, slots=True)
class Order:
    """An item of the queue: a piece, and whom to tell what became of it."""

    staging: Staging
    piece: Piece


class Copier:
    """What the threads of the queue do: each copies over a connection of its own.

    Does not know the queue, so that a store that nobody has any more takes its threads with it.
    """

    def __init__(self, connect: Connect, url: str) -> None:
        self._connect = connect
        self._url = url
        self.renew()

    def renew(self) -> None:
        """Start without connections; after a fork those that there were are the parent's."""
        self._lock = threading.Lock()
        self._connections: dict[int, psycopg.Connection[Row]] = {}
        self.retried = 0

    def consume(self, orders: list[Order]) -> None:
        """Write the pieces; the error handler is told of one that could not be."""
        for order in orders:
            if not order.staging.over:
                order.staging.answer(order.piece, self._write(order.piece))

    def on_shutdown(self) -> None:
        """Close the connections."""
        with self._lock:
            some, self._connections = self._connections, {}
        for connection in some.values():
            with contextlib.suppress(Exception):
                connection.close()

    def _write(self, piece: Piece) -> str:
        try:
            return self._try(piece)
        except TransientError:  # it may have been idle for too long, or since before a restart
            with self._lock:
                self.retried += 1
            return self._try(piece)

    def _try(self, piece: Piece) -> str:
        me = threading.get_ident()
        connection = self._connections.get(me)
        if connection is None or connection.closed:
            connection = self._connect()
            with self._lock:
                self._connections[me] = connection
        try:
            with translated(self._url):
                return write_piece(connection, piece)
        except BaseException:
            connection.close()
            raise


class Writers:
    """The writers of one store; there are no threads before the first large batch."""

    fork_order = 5  # after the queue

    def __init__(self, settings: WriterSettings, connect: Connect, url: str) -> None:
        self.settings = settings
        self._copier = Copier(connect, url)
        self._queue: BatchQueue[Order] | None = None
        self._reset()
        lifecycle.track(self)

    def _reset(self) -> None:
        self._fallbacks: Counter[str] = Counter()
        self._one_by_one = False
        self._not_allowed = False
        self.left: Owner | None = None
        """Whose staged tables are to be removed."""

    def split(self, parts: Sequence[Part]) -> tuple[list[Part], list[Part]]:
        """Which parts go through the writers, and which over the one connection."""
        settings = self.settings
        rows = sum(len(columns[0]) for _, columns in parts)
        if (
            settings.writers == 1
            or rows < settings.above_rows
            or self._one_by_one
            or self._not_allowed
        ):
            return [], list(parts)
        large: list[Part] = []
        small: list[Part] = []
        for part in parts:
            statement, columns = part
            # A part that is hardly a piece is copied as quickly as its table is made.
            worth = len(columns[0]) * 4 >= settings.piece_rows and tells_rows(statement)
            (large if worth else small).append(part)
        return large, small

    @contextlib.contextmanager
    def staging(self, parts: Sequence[Part], owner: Owner) -> Iterator[Staging]:
        """The parts' pieces, sent to the writers; all of them are done with at the end."""
        self.left = owner
        pieces = list(pieces_of(parts, owner, self.settings.piece_rows))
        staging = Staging(pieces, self._started())
        try:
            staging.send()
            yield staging
        finally:
            staging.end()

    def give_up(self, reason: str, error: BaseException) -> TransientError:
        """What to raise where a piece failed: the next try goes over the one connection."""
        self._one_by_one = True
        self._not_allowed |= isinstance(error, StoreReadOnlyError)
        self._fallbacks[reason] += 1
        why = " ".join(str(error).split())
        log.warning("batchmill store: %s (%s); the next try goes over one connection", reason, why)
        return TransientError(why)

    def settled(self) -> None:
        """A transaction is through: the next one may come by several ways again."""
        self._one_by_one = False

    def stats(self) -> WriterStats:
        """What became of the pieces so far."""
        counted = self._queue.stats() if self._queue is not None else None
        return WriterStats(counted, self._copier.retried, dict(self._fallbacks))

    def close(self) -> None:
        """End the threads and their connections."""
        if self._queue is not None:
            self._queue.shutdown()

    def _started(self) -> BatchQueue[Order]:
        if self._queue is None:
            config = presets.jdbc_batch(
                self._copier,
                pool_size=self.settings.writers,
                buffer_size=self.settings.buffer_size,
                max_batch=1,  # each piece is answered, and counted, by itself
                error_handler=_failed,
            )
            self._queue = BatchQueue(presets.JDBC_BATCH_PERSISTENCE, config)
        return self._queue

    def begin_close(self) -> None:
        """At exit the queue closes itself."""

    def await_close(self) -> None:
        """At exit the queue is waited for by itself."""

    def after_fork_in_child(self) -> None:
        """The connections, and what was on its way, are the parent's."""
        self._copier.renew()
        self._reset()


def _failed(orders: list[Order], error: BaseException) -> None:
    for order in orders:
        order.staging.answer(order.piece, error)
