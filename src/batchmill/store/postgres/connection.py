"""Connections to PostgreSQL: opening them, what their errors mean, and copying rows over them."""

from __future__ import annotations

import contextlib
import math
import socket
import sys
from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from typing import TYPE_CHECKING, Any, TypeAlias

from batchmill.errors import ConfigError, MissingExtraError
from batchmill.store.address import ENCODED
from batchmill.store.columns import Columns, is_arrow
from batchmill.store.errors import (
    StatementFailedError,
    StoreFullError,
    StoreReadOnlyError,
    StoreRefusedError,
)
from batchmill.store.retry import TransientError
from batchmill.store.sql.session import Row, Upsert

if TYPE_CHECKING:
    import psycopg

Connection: TypeAlias = "psycopg.Connection[Row]"

TEXT = 'TEXT COLLATE "C"'
"""Compared byte by byte, whatever the database's locale: the order is the same everywhere."""
BLOCK_ROWS = 20_000
"""How many rows go into one message of a copy."""
SHORTEST_CONNECT_S, LONGEST_CONNECT_S = 3, 10
"""For how long one try waits for an answer: a slow network needs some, a reader has only few."""
CONNECTING: dict[str, Any] = {
    # A server that vanished without a word is noticed within a minute: while the connection is
    # idle, and while rows are on their way, which keepalives do not cover.
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
TRANSIENT_CLASSES = ("08", "40")
"""Connection lost; transaction rolled back: a deadlock, a conflict of two transactions."""
TRANSIENT = {
    "53300",  # too many connections
    "55P03",  # a lock was not available
    "57P01",  # shut down by the administrator
    "57P02",  # the server crashed
    "57P03",  # it is starting up
    "57P05",  # idle for too long
    "25P03",
}
DISK_FULL = "53100"
READ_ONLY = {"25006", "42501"}
REFUSED = ("authentication failed", "no pg_hba.conf entry", "does not exist", "no password")
"""Errors of a server that another try would meet again; they have no code."""


def connect(
    conninfo: str | Mapping[str, str], url: str, patience_s: float, *settings: str
) -> Connection:
    """A connection with the store's settings, and more; ``url`` is the address as it is shown.

    A host that does not answer is given up after ``patience_s`` or a few seconds, unless the
    address has a ``connect_timeout``.
    """
    with translate_errors(url):
        import psycopg
        from psycopg.conninfo import conninfo_to_dict

        try:
            given = conninfo_to_dict(conninfo) if isinstance(conninfo, str) else conninfo
        except psycopg.ProgrammingError:  # not shown: it quotes what it could not read
            raise ConfigError("url", url, ENCODED) from None
        timeout_s = min(LONGEST_CONNECT_S, max(SHORTEST_CONNECT_S, math.ceil(patience_s)))
        options: dict[str, Any] = {**CONNECTING, "connect_timeout": timeout_s, **given}
        connection = psycopg.connect(**options, autocommit=True)
        try:
            for setting in (*SETTINGS, *settings):
                connection.execute(to_bytes(setting))
        except BaseException:
            connection.close()
            raise
        return connection


@contextlib.contextmanager
def translate_errors(url: str) -> Iterator[None]:
    """Raise the store's errors instead of PostgreSQL's."""
    try:
        import psycopg
    except ImportError as error:
        # Of an executor, perhaps, whose Python is not the driver's.
        why = f"{error}, in {sys.executable} on {socket.gethostname()}"
        raise MissingExtraError("a PostgreSQL store", "postgres", why) from error
    try:
        yield
    except psycopg.Error as fault:
        raise store_error(fault, url) from fault


def store_error(fault: psycopg.Error, url: str) -> Exception:
    """The store's error for one of PostgreSQL."""
    import psycopg

    why = " ".join(str(fault).split())
    code = fault.sqlstate
    if code is None:
        if not isinstance(fault, psycopg.OperationalError):
            return StatementFailedError(url, why)
        if "FATAL" in why and any(text in why for text in REFUSED):
            return StoreRefusedError(url, why)
        return TransientError(why)
    if code.startswith("28"):
        return StoreRefusedError(url, why)
    if code in TRANSIENT or code[:2] in TRANSIENT_CLASSES:
        return TransientError(why)
    if code == DISK_FULL:
        return StoreFullError(url, None, why)
    if code in READ_ONLY:
        return StoreReadOnlyError(url, why)
    return StatementFailedError(url, why)


def to_bytes(sql: str) -> bytes:
    """SQL as psycopg takes it, with its marks for parameters."""
    # As bytes: psycopg's types accept a str only if it is a literal.
    return sql.replace("?", "%s").encode()


def column_definitions(upsert: Upsert) -> str:
    """The columns of an upsert with their types, as CREATE TABLE takes them."""
    return ", ".join(
        f"{column} {kind}" for column, kind in zip(upsert.columns, upsert.types, strict=True)
    )


def copy_rows(
    connection: Connection,
    table: str,
    upsert: Upsert,
    columns: Columns,
    options: str = "",
) -> None:
    """Copy the rows of an upsert into a table that has its columns."""
    spread = upsert.spread(columns)
    if is_arrow(spread):
        options += "FORMAT csv, NULL ''"
        blocks = csv_blocks(spread)
    else:
        options += "NULL 'None'"
        blocks = copy_blocks(upsert.types, spread)
    copied = f"COPY {table} ({', '.join(upsert.columns)}) FROM STDIN ({options})"
    with connection.cursor() as cursor, cursor.copy(to_bytes(copied)) as copy:
        for block in blocks:
            copy.write(block)


def csv_blocks(columns: Columns) -> Iterator[bytes]:
    """Arrow arrays in the CSV format of COPY, in blocks; a text is quoted, a null is not."""
    import pyarrow as pa
    from pyarrow import csv

    rows = pa.RecordBatch.from_arrays(list(columns), list(map(str, range(len(columns)))))
    options = csv.WriteOptions(include_header=False)
    for start in range(0, len(rows), BLOCK_ROWS):
        sink = pa.BufferOutputStream()
        csv.write_csv(rows.slice(start, BLOCK_ROWS), sink, options)
        yield sink.getvalue().to_pybytes()


def copy_blocks(types: Iterable[str], columns: Columns) -> Iterator[bytes]:
    """Rows in the text format of COPY, in blocks; None is written ``None``.

    Column by column, because a number needs no escaping: ``str()`` makes what COPY reads.
    """
    texts = [
        map(_escape, column) if kind == TEXT else map(str, column)
        for kind, column in zip(types, columns, strict=True)
    ]
    lines = map("\t".join, zip(*texts, strict=True))
    while block := list(islice(lines, BLOCK_ROWS)):
        block.append("")
        yield "\n".join(block).encode()


def _escape(value: str | None) -> str:
    if value is None:
        return "None"
    if value == "None":  # the text, not null: COPY looks for null before it unescapes
        return "Non\\e"
    if "\\" in value:
        value = value.replace("\\", "\\\\")
    if value.isprintable():
        return value
    return value.replace("\n", "\\n").replace("\r", "\\r").replace("\t", "\\t")
