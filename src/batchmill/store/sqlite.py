"""The store in an SQLite file.

Write-ahead logging, so that readers, here and in other processes, go on while a batch is written.
``synchronous=FULL``, so that a committed batch survives a power cut: the checkpoint marks the batch
done right after the commit, and a batch that is marked but lost would never come again.
"""

from __future__ import annotations

import contextlib
import glob
import hashlib
import re
import sqlite3
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TypeVar

from batchmill.files import FileLock, free_bytes, remove_free_locks
from batchmill.store.columns import Columns, as_lists
from batchmill.store.errors import (
    NotAStoreError,
    StoreClosedError,
    StoreFullError,
    StoreMissingError,
    StoreReadOnlyError,
)
from batchmill.store.retry import RetryPolicy, TransientError
from batchmill.store.sql.schema import Schema, inspect, migrate
from batchmill.store.sql.session import (
    COMPACT,
    Dialect,
    Params,
    Row,
    Session,
    Upsert,
    quote,
)
from batchmill.store.states import Cell, compact_label_sums, compact_labels, compact_numbers
from batchmill.store.store import Store

T = TypeVar("T")

BUSY_MS = 2_000
"""How long SQLite itself waits for another writer, before the retry policy takes over."""
LOCK_PAUSES_S = (0.01, 0.05, 0.0)
"""Waits between tries to lock a stream: another process may be testing whether it is locked."""
CACHE_KIB = 65_536
WAL_BYTES = 256 * 1024 * 1024
"""The log is cut back to this size once it has grown longer."""
PAGE_BYTES = 8_192
NULL = float("nan")
"""SQLite stores NaN as null. Python's module takes ten times as long for None: it looks for an
adapter of its type, for each value."""
NO_ROOM_BYTES = 1024 * 1024
"""With less than this free, a failed write is a full disk, whatever SQLite calls it."""

SQLITE = Dialect(
    name="sqlite",
    whole="INTEGER",
    floating="REAL",
    text="TEXT",
    identity="INTEGER PRIMARY KEY",
    # SQLite's max() of two is null if either is.
    greatest=lambda one, two: f"max(coalesce({one}, {two}), coalesce({two}, {one}))",
    least=lambda one, two: f"min(coalesce({one}, {two}), coalesce({two}, {one}))",
    row_id="rowid",
    row_id_in=lambda query: f"rowid IN ({query})",
    all_rows="-1",
    # The rows lie in the primary key's tree: there is no second tree to update.
    for_share="",
    for_update="",
    wide_table=lambda grain: "WITHOUT ROWID",
    text_size="length",
    max_columns=2000,
    max_name_bytes=None,
)


class MovedLabels:
    """Counts what the functions of a connection move under the label ``overflow``."""

    def __init__(self) -> None:
        self.count = 0

    def counting(
        self, compact: Callable[[str], tuple[str | None, int]]
    ) -> Callable[[str], str | None]:
        """A function that compacts a tally, and counts what it moves."""

        def compacted(text: str) -> str | None:
            shorter, moved = compact(text)
            self.count += moved
            return shorter

        return compacted


class Connection(sqlite3.Connection):
    """A connection with the functions that compact tallies."""

    moved_labels: MovedLabels

    def add_functions(self) -> None:
        """Define the functions; to be called once."""
        # An object of its own: SQLite holds the functions, and they must not hold the connection.
        moved = self.moved_labels = MovedLabels()
        self.create_function(COMPACT[Cell.NUMBERS], 1, compact_numbers, deterministic=True)
        self.create_function(COMPACT[Cell.LABELS], 1, moved.counting(compact_labels))
        self.create_function(COMPACT[Cell.LABEL_SUMS], 1, moved.counting(compact_label_sums))


class SqliteSession(Session):
    """A transaction on a connection."""

    dialect = SQLITE

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def rows(self, sql: str, params: Params = ()) -> list[Row]:
        return self._connection.execute(sql, params).fetchall()

    def run(self, sql: str, params: Params = ()) -> int:
        return self._connection.execute(sql, params).rowcount

    def run_many(self, sql: str, params: Iterable[Params]) -> None:
        self._connection.executemany(sql, params)

    def upsert(self, upsert: Upsert, columns: Columns) -> None:
        sources = upsert.sources or range(len(columns))
        # A list that fills several columns is bound once.
        marks = ", ".join(f"?{source + 1}" for source in sources)
        names = ", ".join(upsert.columns)
        # executemany() compiles the statement once, and zip() makes one tuple at a time.
        self._connection.executemany(
            f"INSERT INTO {quote(upsert.table)} AS kept ({names}) VALUES ({marks}) {upsert.tail}",
            zip(*as_lists(columns, NULL), strict=True),
        )

    def take_moved_labels(self) -> int:
        moved = self._connection.moved_labels
        count, moved.count = moved.count, 0
        return count

    def has_table(self, name: str) -> bool:
        return bool(
            self.rows(
                "SELECT 1 FROM sqlite_master WHERE type IN ('table', 'view') AND name = ?", (name,)
            )
        )


class SqliteStore(Store):
    """A store in one file: one connection to write, one to read."""

    def __init__(
        self, path: str, policy: RetryPolicy, *, ttl_days: int, top_n: int, create: bool
    ) -> None:
        super().__init__(f"sqlite:///{path}", policy, ttl_days=ttl_days, top_n=top_n)
        self.path = Path(path)
        if not self.path.exists() and not create:
            raise StoreMissingError(self.url)
        self._locks: dict[str, FileLock] = {}
        self._reading = threading.Lock()
        self._connecting = threading.Lock()
        self._connections: list[Connection] = []
        try:
            self.id = self.retrier.run(lambda: self._prepare(create)).store_id
        except BaseException:
            self._disconnect()
            raise

    def _prepare(self, create: bool) -> Schema:
        with translate_errors(self.url, self.path):
            self._open_connections()
            schema = inspect(SqliteSession(self._reader), self.url)
            if not schema.version and not create:
                raise StoreMissingError(self.url)
            if schema.is_current:
                return schema
            self._writer.execute(f"PRAGMA page_size = {PAGE_BYTES}")
            self._writer.execute("PRAGMA journal_mode = WAL")
            return self._in_transaction(lambda session: migrate(session, self.url))

    def _open_connections(self) -> None:
        """Open both connections, unless they are."""
        with self._connecting:
            while len(self._connections) < 2:
                self._connections.append(self._connect())
            self._writer, self._reader = self._connections

    def _connect(self) -> Connection:
        connection = sqlite3.connect(
            self.path,
            isolation_level=None,
            check_same_thread=False,
            timeout=BUSY_MS / 1000,
            factory=Connection,
        )
        try:
            connection.execute("PRAGMA synchronous = FULL")
            connection.execute(f"PRAGMA cache_size = -{CACHE_KIB}")
            connection.execute("PRAGMA temp_store = MEMORY")
            connection.execute(f"PRAGMA journal_size_limit = {WAL_BYTES}")
        except BaseException:
            connection.close()
            raise
        connection.add_functions()
        return connection

    def _write_once(self, work: Callable[[Session], T]) -> T:
        with translate_errors(self.url, self.path):
            self._open_connections()
            return self._in_transaction(work)

    def _in_transaction(self, work: Callable[[Session], T]) -> T:
        connection = self._writer
        connection.execute("BEGIN IMMEDIATE")
        connection.moved_labels.count = 0  # there may be some of a transaction that failed
        try:
            result = work(SqliteSession(connection))
            connection.execute("COMMIT")
        except BaseException:
            # Where SQLite has rolled back by itself, as on a full disk, there is nothing to do.
            if connection.in_transaction:
                connection.execute("ROLLBACK")
            raise
        return result

    def _read_once(self, work: Callable[[Session], T]) -> T:
        with self._reading, translate_errors(self.url, self.path):
            self.retrier.check_open()
            self._open_connections()
            # One snapshot for all queries of one call.
            self._reader.execute("BEGIN")
            try:
                return work(SqliteSession(self._reader))
            finally:
                if self._reader.in_transaction:
                    self._reader.execute("ROLLBACK")

    def _lock(self, stream: str, *, wait: bool) -> bool:
        path = lock_path(self.path, stream)
        for pause_s in LOCK_PAUSES_S if wait else (0.0,):
            try:
                lock = FileLock.take(path, mode=0o644)
            except OSError as error:
                raise StoreReadOnlyError(self.url, f"{path}: {error.strerror}") from error
            if lock is not None:
                self._locks[stream] = lock
                # A backfill has a name of its own: its lock file would stay for ever.
                remove_free_locks(path.parent, f"{glob.escape(self.path.name)}.*.lock")
                return True
            time.sleep(pause_s)
        return False

    def _unlock(self, stream: str) -> None:
        lock = self._locks.pop(stream, None)
        if lock is not None:
            lock.release()

    def _has_writer(self, session: Session, stream: str) -> bool:
        try:
            return stream in self._locks or FileLock.is_taken(lock_path(self.path, stream))
        except OSError:  # not known, so it may have one
            return True

    def prepare_fork(self) -> None:
        """Before a fork: close the connections; the next use opens them again.

        SQLite keeps the locks of a process in its memory. A child would inherit them with the
        connections, take them for its own, and could damage the file.
        """
        with self._writing:
            self._disconnect()
            self._connections.clear()

    def abandon(self) -> None:
        """In a forked child: leave the connections and locks to the parent. Do not use it again."""
        super().abandon()
        for lock in self._locks.values():
            lock.release()  # closes this process's handle; the parent's still holds the lock
        self._locks.clear()

    def _disconnect(self) -> None:
        with self._reading:
            for connection in self._connections:
                with contextlib.suppress(sqlite3.Error):
                    connection.close()


def lock_path(database: Path, stream: str) -> Path:
    """The lock file of a stream; different for different streams, whatever their names."""
    plain = re.sub(r"[^A-Za-z0-9_-]", "_", stream)[:40]
    mark = hashlib.sha256(stream.encode("utf-8", "surrogatepass")).hexdigest()[:8]
    return database.with_name(f"{database.name}.{plain}-{mark}.lock")


@contextlib.contextmanager
def translate_errors(url: str, path: Path) -> Iterator[None]:
    """Raise the store's errors instead of SQLite's."""
    try:
        yield
    except sqlite3.Error as fault:
        raise store_error(fault, url, path) from fault


def store_error(fault: sqlite3.Error, url: str, path: Path) -> Exception:
    """The store's error for one of SQLite; the same error if it is a mistake of ours."""
    code = getattr(fault, "sqlite_errorcode", None)
    why = str(fault)
    if code is None:
        return StoreClosedError(url) if "closed database" in why else fault
    # The lower byte is the kind, what is above it gives details.
    kind = code & 0xFF
    if kind in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
        return TransientError(why)
    free = free_bytes(path.parent)
    if kind == sqlite3.SQLITE_FULL or (kind == sqlite3.SQLITE_IOERR and is_full(free)):
        return StoreFullError(str(path), free, why)
    if kind in (sqlite3.SQLITE_READONLY, sqlite3.SQLITE_PERM):
        return StoreReadOnlyError(url, why)
    if kind in (sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_CORRUPT):
        return NotAStoreError(url, why)
    if kind == sqlite3.SQLITE_CANTOPEN:
        if path.is_dir():
            return NotAStoreError(url, "it is a folder")
        return StoreReadOnlyError(url, why) if path.parent.is_dir() else StoreMissingError(url)
    return fault


def is_full(free: int | None) -> bool:
    """Whether so little space explains a failed write; None: the free space is unknown.

    >>> is_full(0), is_full(None)
    (True, False)
    """
    return free is not None and free < NO_ROOM_BYTES
