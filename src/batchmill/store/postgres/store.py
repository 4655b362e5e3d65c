"""The store in a PostgreSQL database.

Three kinds of connection: one to write, one to read, and one for each claimed stream that only
holds its lock, which the server releases when the process ends. A connection that breaks is
replaced at the next try.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import threading
from collections.abc import Callable, Mapping
from typing import TypeVar

from batchmill.store.address import TaskAddress
from batchmill.store.errors import StoreMissingError
from batchmill.store.postgres.connection import Connection, connect, to_bytes, translate_errors
from batchmill.store.postgres.session import PostgresSession
from batchmill.store.retry import RetryPolicy
from batchmill.store.sql.schema import Schema, inspect, migrate
from batchmill.store.sql.session import Session
from batchmill.store.store import Store

T = TypeVar("T")

LOCK_WAIT = "2s"
"""How long a claim waits for the server to notice that the former holder is gone."""
SCHEMA_LOCK = 0x62_61_74_63_68_6D_69_6C
"""Held during a migration, so that two processes do not run it at once."""


FOUND_OUT = ("service", "servicefile", "passfile")
"""Parameters that only say where others are found."""
TASK_SETTINGS = (
    # A task that hangs, or whose machine is gone, must not hold its locks for long: the stream's
    # next writer waits for them.
    "SET idle_in_transaction_session_timeout = '120s'",
    "SET tcp_keepalives_idle = 30",
    "SET tcp_keepalives_interval = 10",
    "SET tcp_keepalives_count = 3",
)


class PostgresStore(Store):
    """A store in the default schema of a database."""

    commits_by_part = True

    def __init__(
        self,
        conninfo: str | Mapping[str, str],
        shown: str,
        policy: RetryPolicy,
        *,
        ttl_days: int,
        top_n: int,
        create: bool,
        for_task_of: str | None = None,
    ) -> None:
        """``for_task_of``: the id of this store, which the driver has prepared."""
        super().__init__(shown, policy, ttl_days=ttl_days, top_n=top_n)
        self._policy = policy
        settings = TASK_SETTINGS if for_task_of else ()
        patience_s = policy.give_up_after_s
        self._connect = functools.partial(connect, conninfo, shown, patience_s, *settings)
        self._open: dict[str, Connection] = {}
        self._locks: dict[str, Connection] = {}
        self._reading = threading.Lock()
        if for_task_of:
            self.id = for_task_of
            return
        try:
            self.id = self.retrier.run(lambda: self._prepare(create)).store_id
        except BaseException:
            self._disconnect()
            raise

    def _prepare(self, create: bool) -> Schema:
        schema = self._in_transaction("reader", "BEGIN", lambda session: inspect(session, self.url))
        if not schema.version and not create:
            raise StoreMissingError(self.url)
        if schema.is_current:
            return schema

        def work(session: Session) -> Schema:
            session.run("SELECT pg_advisory_xact_lock(?)", (SCHEMA_LOCK,))
            return migrate(session, self.url)

        return self._in_transaction("writer", "BEGIN", work)

    def _write_once(self, work: Callable[[Session], T]) -> T:
        def locked(session: Session) -> T:
            # One writer at a time: what this transaction reads stays true until its end.
            session.rows("SELECT value FROM meta WHERE key = 'newest_minute' FOR UPDATE")
            return work(session)

        return self._in_transaction("writer", "BEGIN", locked)

    def _write_beside_once(self, work: Callable[[Session], T]) -> T:
        return self._in_transaction("writer", "BEGIN ISOLATION LEVEL READ COMMITTED", work)

    def task_address(self) -> TaskAddress:
        """How a task on another machine reaches this store, with everything found out here."""

        def read(session: Session) -> dict[str, str]:
            info = self._open["reader"].info
            given = {**info.get_parameters(), "password": info.password}
            return {name: value for name, value in given.items() if name not in FOUND_OUT}

        parameters = tuple(self._read(read).items())
        return TaskAddress(self.url, self.id, self._ttl_days, self._top_n, self._policy, parameters)

    def _read_once(self, work: Callable[[Session], T]) -> T:
        with self._reading:
            self.retrier.check_open()
            snapshot = "BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY"
            return self._in_transaction("reader", snapshot, work)

    def _in_transaction(self, name: str, begin: str, work: Callable[[Session], T]) -> T:
        connection = self._open.get(name)
        if connection is None or connection.closed:
            connection = self._open[name] = self._connect()
        with translate_errors(self.url):
            try:
                connection.execute(to_bytes(begin))
                result = work(PostgresSession(connection))
                connection.execute("COMMIT")
            except BaseException:
                self._roll_back(name, connection)
                raise
        return result

    def _roll_back(self, name: str, connection: Connection) -> None:
        import psycopg

        try:
            connection.execute("ROLLBACK")
        except psycopg.Error:  # broken: the server rolls back, and the next try connects again
            connection.close()
            self._open.pop(name, None)

    def _lock(self, stream: str, *, wait: bool) -> bool:
        return self._take_lock(stream, LOCK_WAIT if wait else "1ms")

    def _take_lock(self, stream: str, wait: str) -> bool:
        import psycopg

        connection = self._connect()
        try:
            with translate_errors(self.url):
                connection.execute(to_bytes(f"SET lock_timeout = '{wait}'"))
                connection.execute(
                    to_bytes("SELECT pg_advisory_lock(?)"), (self._lock_key(stream),)
                )
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

    def _has_writer(self, session: Session, stream: str) -> bool:
        key = self._lock_key(stream) & (2**64 - 1)
        return bool(
            session.rows(
                "SELECT 1 FROM pg_locks WHERE locktype = 'advisory' AND granted AND objsubid = 1 "
                "AND classid::bigint = ? AND objid::bigint = ? AND database = "
                "(SELECT oid FROM pg_database WHERE datname = current_database())",
                (key >> 32, key & 0xFFFFFFFF),
            )
        )

    def _check_lock(self, stream: str) -> None:
        """Take the lock again if its connection broke; the epoch shows if another was faster."""
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

    def _disconnect(self) -> None:
        for connection in (*self._open.values(), *self._locks.values()):
            with contextlib.suppress(Exception):
                connection.close()
