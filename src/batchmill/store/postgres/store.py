"""The store in a PostgreSQL database.

Four kinds of connection: one to write, one to read, one for each claimed stream that does nothing
but hold its lock, which the server lets go of when the process is gone, and those of the writers,
which bring the rows of large batches. A connection that breaks is made anew at the next try.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

from batchmill.errors import ConfigError
from batchmill.store.address import ENCODED
from batchmill.store.errors import StoreMissingError
from batchmill.store.postgres.copy import marked
from batchmill.store.postgres.faults import translated
from batchmill.store.postgres.session import PostgresSession
from batchmill.store.postgres.settings import WriterSettings
from batchmill.store.postgres.staging import clear_staged
from batchmill.store.postgres.writers import Writers
from batchmill.store.retry import RetryPolicy
from batchmill.store.sql.schema import MIGRATIONS, Found, inspect, migrate
from batchmill.store.sql.session import Owner, Row, Session
from batchmill.store.store import SqlStore

if TYPE_CHECKING:
    import psycopg

T = TypeVar("T")

LOCK_WAIT = "2s"
"""How long a claim waits for the server to notice that the former holder is gone."""
SCHEMA_LOCK = 0x62_61_74_63_68_6D_69_6C
"""Held while the schema is made or migrated, so that two processes do not do it at once."""
CONNECTING: dict[str, Any] = {
    "connect_timeout": 10,
    # A server that vanished without a word is noticed within a minute: while nothing is under way,
    # and while rows are, of which keepalives know nothing.
    "keepalives_idle": 30,
    "keepalives_interval": 10,
    "keepalives_count": 3,
    "tcp_user_timeout": 60_000,
    "application_name": "batchmill",
}
SETTINGS = (
    "SET client_min_messages = warning",
    "SET temp_buffers = '64MB'",
    "SET work_mem = '64MB'",
    # Compiling a statement that runs once costs more than it saves.
    "SET jit = off",
)


class PostgresStore(SqlStore):
    """A store in the default schema of a database."""

    def __init__(
        self,
        conninfo: str,
        shown: str,
        policy: RetryPolicy,
        *,
        ttl_days: int,
        top_n: int,
        create: bool,
        writers: WriterSettings | None = None,
    ) -> None:
        super().__init__(shown, policy, ttl_days=ttl_days, top_n=top_n)
        self._connect = functools.partial(connected, conninfo, shown)
        # A staged table that a crash takes away is written again, so nobody waits for the disk.
        hurried = functools.partial(connected, conninfo, shown, "SET synchronous_commit = off")
        self.writers = Writers(writers or WriterSettings(), hurried, shown)
        """Bring the rows of large batches."""
        self._open: dict[str, psycopg.Connection[Row]] = {}
        self._locks: dict[str, psycopg.Connection[Row]] = {}
        self._reading = threading.Lock()
        try:
            self.id = self.retrier.run(lambda: self._prepare(create)).store_id
        except BaseException:
            self._disconnect()
            raise

    def _prepare(self, create: bool) -> Found:
        found = self._in_transaction("reader", "BEGIN", lambda each: inspect(each, self.url))
        if not found.version and not create:
            raise StoreMissingError(self.url)
        if found.version == len(MIGRATIONS):
            return found

        def work(session: Session) -> Found:
            session.run("SELECT pg_advisory_xact_lock(?)", (SCHEMA_LOCK,))
            return migrate(session, self.url)

        return self._in_transaction("writer", "BEGIN", work)

    def _write_once(self, work: Callable[[Session], T]) -> T:
        def locked(session: Session) -> T:
            # One writer at a time: what this transaction reads stays true until it is through.
            session.rows("SELECT value FROM meta WHERE key = 'newest_minute' FOR UPDATE")
            return work(session)

        try:
            answer = self._in_transaction("writer", "BEGIN", locked)
        except BaseException:
            self._tidy_up(self.writers.left)
            raise
        self.writers.settled()
        self._tidy_up(self.writers.left)
        return answer

    def _tidy_up(self, owner: Owner | None) -> None:
        """Remove staged tables, if the connection works; else the next commit or claim does."""
        connection = self._open.get("writer")
        if owner is None or connection is None:
            return
        with contextlib.suppress(Exception):
            clear_staged(connection, owner)
            self.writers.left = None

    def _read_once(self, work: Callable[[Session], T]) -> T:
        with self._reading:
            self.retrier.check_open()
            snapshot = "BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY"
            return self._in_transaction("reader", snapshot, work)

    def _in_transaction(self, name: str, begin: str, work: Callable[[Session], T]) -> T:
        connection = self._open.get(name)
        if connection is None or connection.closed:
            connection = self._open[name] = self._connect()
        with translated(self.url):
            try:
                connection.execute(marked(begin))
                answer = work(PostgresSession(connection, self.writers))
                connection.execute("COMMIT")
            except BaseException:
                self._roll_back(name, connection)
                raise
        return answer

    def _roll_back(self, name: str, connection: psycopg.Connection[Row]) -> None:
        import psycopg

        try:
            connection.execute("ROLLBACK")
        except psycopg.Error:  # it is broken: the server rolls back, and the next try has a new one
            connection.close()
            self._open.pop(name, None)

    def _lock(self, stream: str) -> bool:
        return self._take_lock(stream, LOCK_WAIT)

    def _take_lock(self, stream: str, wait: str) -> bool:
        import psycopg

        connection = self._connect()
        try:
            with translated(self.url):
                connection.execute(marked(f"SET lock_timeout = '{wait}'"))
                connection.execute(marked("SELECT pg_advisory_lock(?)"), (self._lock_key(stream),))
        except BaseException as error:
            connection.close()
            if isinstance(error.__cause__, psycopg.errors.LockNotAvailable):
                return False
            raise
        self._locks[stream] = connection
        return True

    def _lock_key(self, stream: str) -> int:
        # Locks belong to the database, which may hold several stores in several schemas.
        mark = hashlib.sha256(f"{self.id}\0{stream}".encode("utf-8", "surrogatepass")).digest()
        return int.from_bytes(mark[:8], "big", signed=True)

    def _alive(self, session: Session, stream: str) -> bool:
        key = self._lock_key(stream) & (2**64 - 1)
        return bool(
            session.rows(
                "SELECT 1 FROM pg_locks WHERE locktype = 'advisory' AND granted AND objsubid = 1 "
                "AND classid::bigint = ? AND objid::bigint = ? AND database = "
                "(SELECT oid FROM pg_database WHERE datname = current_database())",
                (key >> 32, key & 0xFFFFFFFF),
            )
        )

    def _before_commit(self, stream: str) -> None:
        """Take the lock again if its connection broke; the epoch tells if another was faster."""
        import psycopg

        connection = self._locks.get(stream)
        if connection is None:
            return
        try:
            connection.execute("SELECT 1")
        except psycopg.Error:
            connection.close()
            self._take_lock(stream, "100ms")

    def _unlock(self, stream: str) -> None:
        connection = self._locks.pop(stream, None)
        if connection is not None:
            connection.close()

    def _held(self) -> list[str]:
        return list(self._locks)

    def _disconnect(self) -> None:
        self.writers.close()
        for connection in (*self._open.values(), *self._locks.values()):
            with contextlib.suppress(Exception):
                connection.close()


def connected(conninfo: str, url: str, *more: str) -> psycopg.Connection[Row]:
    """A connection with the store's settings, and ``more`` of them."""
    with translated(url):
        import psycopg
        from psycopg.conninfo import conninfo_to_dict

        try:
            given = conninfo_to_dict(conninfo)
        except psycopg.ProgrammingError:  # not shown: it quotes what it could not read
            raise ConfigError("url", url, ENCODED) from None
        wanted: dict[str, Any] = {**CONNECTING, **given}
        connection = psycopg.connect(**wanted, autocommit=True)
        try:
            for setting in (*SETTINGS, *more):
                connection.execute(marked(setting))
        except BaseException:
            connection.close()
            raise
        return connection
