"""Writers: rows of large batches to PostgreSQL over several connections at once.

The rows of a large batch are cut into pieces, which go through a queue to as many threads as there
are writers. Each has a connection of its own and copies its pieces into staged tables, while the
one transaction that commits the batch merges those that are complete.

A piece's table is created and filled in one transaction, under a name that was never used before.
So it is there as a whole or not at all, and a piece that is written again, because its answer was
lost, is another table: the commit merges the one that it was told of. All others are never merged,
and are removed with everything that the stream has staged, after a try and when it is claimed.
Staged tables are UNLOGGED, so that they cost no log; a server that crashed empties them. The merge
counts rows, and treats a piece with fewer rows than were sent as lost.

Guarantees
    A commit merges exactly its own pieces, each once, or it is tried again: a piece that failed or
    was lost never makes it smaller. Pieces of a try that failed are removed after it, by the next
    commit, or when the stream is claimed.

    The writers are only a faster way: the try after one in which a piece failed goes over the one
    connection that commits, and raises by itself what is wrong with the database.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import logging
import queue
import threading
import uuid
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from batchmill import lifecycle, presets
from batchmill.errors import ConfigError, check_ints
from batchmill.queue import BatchQueue, BatchQueueStats
from batchmill.store.errors import StoreReadOnlyError
from batchmill.store.postgres.connection import (
    Connection,
    column_definitions,
    copy_rows,
    to_bytes,
    translate_errors,
)
from batchmill.store.retry import TransientError
from batchmill.store.sql.columns import Columns
from batchmill.store.sql.session import StreamEpoch, Upsert, UpsertRows, quote

log = logging.getLogger("batchmill.store")

MAX_WRITERS = 64
MAX_PIECES = 100
"""Of one commit, about: every table takes room in the server's table of locks."""
LOCK_WAIT = "200ms"
"""How long removing a staged table waits: a backup that reads it may take hours."""
STAGED = """
SELECT relname FROM pg_class JOIN pg_namespace ON pg_namespace.oid = relnamespace
WHERE relkind = 'r' AND nspname = current_schema() AND starts_with(relname, ?)
"""
FAILED = "a piece could not be written"
LOST = "a piece was not whole any more"
Connect: TypeAlias = Callable[[], Connection]


@dataclass(frozen=True, kw_only=True, slots=True)
class WriterSettings:
    """How a batch's rows are copied to PostgreSQL.

    >>> WriterSettings(writers=1).writers
    1
    """

    writers: int = 4
    """Threads, and connections, that copy at once; 1: only the one connection that commits."""
    above_rows: int = 100_000
    """Batches of fewer delta rows than this go over the one connection.

    Up to 50,000 there was no difference on two cores; at 100,000 it was a sixth.
    """
    piece_rows: int = 20_000
    """Delta rows in a piece, about."""
    buffer_size: int = 10_000
    """Pieces that each writer's queue holds."""

    def __post_init__(self) -> None:
        check_ints(self, 1, "writers", "above_rows", "piece_rows", "buffer_size")
        if self.writers > MAX_WRITERS:
            raise ConfigError("writers", self.writers, f"{MAX_WRITERS} at most")

    @classmethod
    def of_parameter(cls, writers: str | None) -> WriterSettings:
        """The settings of an address with ``writers=…``, or without."""
        if writers is None:
            return cls()
        if not (writers.isascii() and writers.isdigit() and 1 <= int(writers) <= MAX_WRITERS):
            raise ConfigError("writers", writers, f"a whole number from 1 to {MAX_WRITERS}")
        return cls(writers=int(writers))


@dataclass(frozen=True, slots=True)
class WriterStats:
    """What became of pieces."""

    queue: BatchQueueStats | None
    """The counters of the writers' queue; None until a batch was large enough."""
    retried: int
    """Pieces that were written again, over a new connection."""
    fallbacks: Mapping[str, int]
    """Attempts that failed because of a piece, by reason."""


@dataclass(frozen=True, slots=True)
class Piece:
    """Some rows of an upsert; they are cut out of its columns only when they are written."""

    owner: StreamEpoch
    upsert: Upsert
    columns: Columns
    start: int
    stop: int

    def __len__(self) -> int:
        return self.stop - self.start


def cut(parts: Sequence[UpsertRows], owner: StreamEpoch, piece_rows: int) -> Iterator[Piece]:
    """Cut rows into pieces of about ``piece_rows``, those of one part about equally large."""
    size = max(piece_rows, -(-sum(map(len, parts)) // MAX_PIECES))
    for part in parts:
        count = -(-len(part) // size)
        bounds = [number * len(part) // count for number in range(count + 1)]
        for start, stop in itertools.pairwise(bounds):
            yield Piece(owner, part.upsert, part.columns, start, stop)


def staged_prefix(stream: str) -> str:
    """How the names of a stream's staged tables begin, and no others."""
    mark = hashlib.sha256(stream.encode("utf-8", "surrogatepass")).hexdigest()
    return f"staged_{mark[:16]}_"


def write_piece(connection: Connection, piece: Piece) -> str:
    """Write a piece to a table of its own, in a transaction of its own; the table's name."""
    owner = piece.owner
    table = f"{staged_prefix(owner.stream)}{owner.epoch}_{uuid.uuid4().hex[:16]}"
    columns = [column[piece.start : piece.stop] for column in piece.columns]
    connection.execute("BEGIN")
    # Nothing to vacuum: it is written once, read once and dropped.
    connection.execute(
        to_bytes(
            f"CREATE UNLOGGED TABLE {table} ({column_definitions(piece.upsert)}) "
            "WITH (autovacuum_enabled = false)"
        )
    )
    # Frozen: nobody else sees the table yet, and later readers need not mark its rows.
    copy_rows(connection, table, piece.upsert, columns, "FREEZE, ")
    connection.execute("COMMIT")
    return table


def merge_table(upsert: Upsert, table: str, where: str = "") -> str:
    """The statement that merges the rows of a table, all or some."""
    names = ", ".join(upsert.columns)
    # In key order, a row's neighbours in the index come one after the other.
    order = f"ORDER BY {', '.join(upsert.key)}" if upsert.key else ""
    return (
        f"INSERT INTO {quote(upsert.table)} AS kept ({names}) "
        f"SELECT {names} FROM {table} {where} {order} {upsert.tail}"
    )


def remove_staged(connection: Connection, owner: StreamEpoch) -> None:
    """Remove what this writer of a stream, and earlier ones, have staged.

    Not in the transaction that merges it: that one would wait for readers of such a table. Here the
    table is left for the next time.
    """
    import psycopg

    prefix = staged_prefix(owner.stream)
    rows = connection.execute(to_bytes(STAGED), (prefix,)).fetchall()
    # Those of a later epoch belong to the stream's present writer.
    tables = [name for (name,) in rows if int(name[len(prefix) :].split("_")[0]) <= owner.epoch]
    if not tables:
        return
    connection.execute(to_bytes(f"SET lock_timeout = '{LOCK_WAIT}'"))
    try:
        for some in (", ".join(tables), *tables):
            try:
                connection.execute(to_bytes(f"DROP TABLE IF EXISTS {some}"))
            except psycopg.errors.LockNotAvailable:
                continue  # all at once, else one by one, and what is locked is removed later
            if some not in tables:
                break
    finally:
        connection.execute("RESET lock_timeout")


class PieceError(Exception):
    """A piece was not written; its cause says why. Internal."""


@dataclass(frozen=True, slots=True)
class Written:
    """The outcome of a piece: the table that it is in, or why it is in none."""

    piece: Piece
    table: str = ""
    error: BaseException | None = None


class Staging:
    """The pieces of one try; iterating gives each one as soon as it is written."""

    def __init__(self, pieces: Sequence[Piece], writers: BatchQueue[Order]) -> None:
        self._pieces = pieces
        self._writers = writers
        self._outcomes: queue.SimpleQueue[Written] = queue.SimpleQueue()
        self.over = False
        """Whether the try has ended: what is not written yet need not be."""

    def send(self) -> None:
        """Hand the pieces to the writers; waits where their queue is full."""
        for piece in self._pieces:
            if not self._writers.produce(Order(self, piece)):
                raise PieceError("the writers were shut down")

    def report(self, outcome: Written) -> None:
        """Say what became of a piece."""
        self._outcomes.put(outcome)

    def __iter__(self) -> Iterator[Written]:
        for _ in self._pieces:
            outcome = self._outcomes.get()
            if outcome.error is not None:
                raise PieceError(str(outcome.error)) from outcome.error
            yield outcome

    def end(self) -> None:
        """Skip the pieces that are left, and wait until no writer writes any more."""
        self.over = True
        self._writers.flush()


@dataclass(frozen=True, slots=True)
class Order:
    """An item of the queue: a piece, and where to report its outcome."""

    staging: Staging
    piece: Piece


class Copier:
    """The consumer of the queue: each of its threads copies over a connection of its own.

    Does not know the queue, so that a store that is garbage collected ends its threads.
    """

    def __init__(self, connect: Connect, url: str) -> None:
        self._connect = connect
        self._url = url
        self.reset()

    def reset(self) -> None:
        """Start without connections; after a fork the former ones are the parent's."""
        self._lock = threading.Lock()
        self._connections: dict[int, Connection] = {}
        self.retried = 0

    def consume(self, orders: list[Order]) -> None:
        """Write the pieces; the error handler gets those that failed."""
        for order in orders:
            if not order.staging.over:
                order.staging.report(Written(order.piece, self._write(order.piece)))

    def on_shutdown(self) -> None:
        """Close the connections."""
        with self._lock:
            connections, self._connections = self._connections, {}
        for connection in connections.values():
            with contextlib.suppress(Exception):
                connection.close()

    def _write(self, piece: Piece) -> str:
        try:
            return self._write_once(piece)
        except TransientError:  # it may have been idle for too long, or since before a restart
            with self._lock:
                self.retried += 1
            return self._write_once(piece)

    def _write_once(self, piece: Piece) -> str:
        thread = threading.get_ident()
        connection = self._connections.get(thread)
        if connection is None or connection.closed:
            connection = self._connect()
            with self._lock:
                self._connections[thread] = connection
        try:
            with translate_errors(self._url):
                return write_piece(connection, piece)
        except BaseException:
            connection.close()
            raise


class Writers(lifecycle.Tracked):
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
        self._one_connection = False
        """After a failed piece, until the next commit succeeds."""
        self._not_allowed = False
        """This user may not create tables."""
        self.staged_by: StreamEpoch | None = None
        """Whose staged tables are to be removed."""

    def split(self, parts: Sequence[UpsertRows]) -> tuple[list[UpsertRows], list[UpsertRows]]:
        """Which parts go through the writers, and which over the one connection."""
        settings = self.settings
        if (
            settings.writers == 1
            or sum(map(len, parts)) < settings.above_rows
            or self._one_connection
            or self._not_allowed
        ):
            return [], list(parts)
        large: list[UpsertRows] = []
        small: list[UpsertRows] = []
        for part in parts:
            # A part that is hardly a piece is copied as quickly as its table is made.
            worth = len(part) * 4 >= settings.piece_rows and part.upsert.counts_rows
            (large if worth else small).append(part)
        return large, small

    @contextlib.contextmanager
    def staging(self, parts: Sequence[UpsertRows], owner: StreamEpoch) -> Iterator[Staging]:
        """Send the parts' pieces to the writers; at the end none of them is being written."""
        self.staged_by = owner
        pieces = list(cut(parts, owner, self.settings.piece_rows))
        staging = Staging(pieces, self._start())
        try:
            staging.send()
            yield staging
        finally:
            staging.end()

    def fall_back(self, reason: str, error: BaseException) -> TransientError:
        """What to raise where a piece failed: the next try goes over the one connection."""
        self._one_connection = True
        self._not_allowed |= isinstance(error, StoreReadOnlyError)
        self._fallbacks[reason] += 1
        why = " ".join(str(error).split())
        log.warning("batchmill store: %s (%s); the next try goes over one connection", reason, why)
        return TransientError(why)

    def committed(self) -> None:
        """A transaction was committed: the next one may use the writers again."""
        self._one_connection = False

    def stats(self) -> WriterStats:
        """What became of the pieces so far."""
        queue_stats = self._queue.stats() if self._queue is not None else None
        return WriterStats(queue_stats, self._copier.retried, dict(self._fallbacks))

    def close(self) -> None:
        """End the threads and their connections."""
        if self._queue is not None:
            self._queue.shutdown()

    def _start(self) -> BatchQueue[Order]:
        if self._queue is None:
            settings = presets.jdbc_batch(
                self._copier,
                pool_size=self.settings.writers,
                buffer_size=self.settings.buffer_size,
                max_batch=1,  # each piece is reported, and counted, by itself
                error_handler=_report_failure,
            )
            self._queue = BatchQueue(presets.JDBC_BATCH_PERSISTENCE, settings)
        return self._queue

    def after_fork_in_child(self) -> None:
        """The connections, and the pieces being written, are the parent's."""
        self._copier.reset()
        self._reset()


def _report_failure(orders: list[Order], error: BaseException) -> None:
    for order in orders:
        order.staging.report(Written(order.piece, error=error))
