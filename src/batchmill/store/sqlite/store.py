"""The store in an SQLite file.

Write-ahead logging, so that readers, here and in other processes, go on while a batch is written.
``synchronous=FULL``, so that a committed batch survives a power cut: the checkpoint marks the batch
done right after the commit, and a batch that is marked but lost would never come again.
"""

from __future__ import annotations

import contextlib
import sqlite3
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from batchmill.store.errors import StoreMissingError
from batchmill.store.retry import RetryPolicy
from batchmill.store.sql.schema import MIGRATIONS, inspect, migrate
from batchmill.store.sql.session import Owner, Session
from batchmill.store.sqlite.faults import translated
from batchmill.store.sqlite.lock import WriterLock
from batchmill.store.sqlite.session import SqliteSession
from batchmill.store.store import SqlStore
from batchmill.store.tallies import compact_label_sums, compact_labels, compact_numbers

T = TypeVar("T")

BUSY_MS = 2_000
"""How long SQLite itself waits for another writer, before the retry policy takes over."""
LOCK_PAUSES_S = (0.01, 0.05, 0.0)
"""Waits after each look at a lock: another process may be about to see whether it is held."""
CACHE_KIB = 65_536
WAL_BYTES = 256 * 1024 * 1024
"""The log is cut back to this much once it has grown longer."""
PAGE_BYTES = 8_192


class SqliteStore(SqlStore):
    """A store in one file: one connection to write, one to read."""

    def __init__(
        self, path: str, policy: RetryPolicy, *, ttl_days: int, top_n: int, create: bool
    ) -> None:
        super().__init__(f"sqlite:///{path}", policy, ttl_days=ttl_days, top_n=top_n)
        self.path = Path(path)
        if not self.path.exists() and not create:
            raise StoreMissingError(self.url)
        self._locks: dict[str, WriterLock] = {}
        self._reading = threading.Lock()
        self._opened: list[sqlite3.Connection] = []
        try:
            with translated(self.url, self.path):
                self._writer = self._connect()
                self._reader = self._connect()
            self.retrier.run(lambda: self._prepare(create))
        except BaseException:
            self._disconnect()
            raise

    def _prepare(self, create: bool) -> None:
        with translated(self.url, self.path):
            found = inspect(SqliteSession(self._reader), self.url)
            if not found.version and not create:
                raise StoreMissingError(self.url)
            if found.version < len(MIGRATIONS):
                self._writer.execute(f"PRAGMA page_size = {PAGE_BYTES}")
                self._writer.execute("PRAGMA journal_mode = WAL")
                found = self._in_transaction(lambda session: migrate(session, self.url))
        self.id = found.store_id

    def _connect(self) -> sqlite3.Connection:
        connection = sqlite3.connect(
            self.path, isolation_level=None, check_same_thread=False, timeout=BUSY_MS / 1000
        )
        self._opened.append(connection)
        connection.execute("PRAGMA synchronous = FULL")
        connection.execute(f"PRAGMA cache_size = -{CACHE_KIB}")
        connection.execute("PRAGMA temp_store = MEMORY")
        connection.execute(f"PRAGMA journal_size_limit = {WAL_BYTES}")
        for function in (compact_numbers, compact_labels, compact_label_sums):
            name = f"batchmill_{function.__name__}"
            connection.create_function(name, 1, function, deterministic=True)
        return connection

    def _write_once(self, work: Callable[[Session], T]) -> T:
        with translated(self.url, self.path):
            return self._in_transaction(work)

    def _in_transaction(self, work: Callable[[Session], T]) -> T:
        connection = self._writer
        connection.execute("BEGIN IMMEDIATE")
        try:
            answer = work(SqliteSession(connection))
            connection.execute("COMMIT")
        except BaseException:
            # Where SQLite has rolled back by itself, as on a full disk, there is nothing to do.
            if connection.in_transaction:
                connection.execute("ROLLBACK")
            raise
        return answer

    def _read_once(self, work: Callable[[Session], T]) -> T:
        with self._reading, translated(self.url, self.path):
            self.retrier.check_open()
            # One snapshot for all queries of one answer.
            self._reader.execute("BEGIN")
            try:
                return work(SqliteSession(self._reader))
            finally:
                if self._reader.in_transaction:
                    self._reader.execute("ROLLBACK")

    def _lock(self, stream: str) -> bool:
        for pause_s in LOCK_PAUSES_S:
            lock = WriterLock.take(self.path, stream, self.url)
            if lock is not None:
                self._locks[stream] = lock
                return True
            time.sleep(pause_s)
        return False

    def _alive(self, session: Session, stream: str) -> bool:
        return stream in self._locks or WriterLock.is_held(self.path, stream)

    def _tidy_up(self, owner: Owner | None) -> None:
        """Nothing: rows are brought and merged at once."""

    def _before_commit(self, stream: str) -> None:
        """Nothing: the lock cannot get lost while the process lives."""

    def _unlock(self, stream: str) -> None:
        lock = self._locks.pop(stream, None)
        if lock is not None:
            lock.release()

    def _held(self) -> list[str]:
        return list(self._locks)

    def _disconnect(self) -> None:
        with self._reading:
            for connection in self._opened:
                with contextlib.suppress(sqlite3.Error):
                    connection.close()
