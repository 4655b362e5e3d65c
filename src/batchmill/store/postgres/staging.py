"""Staged rows: pieces of a batch that lie in tables of their own until the batch is merged.

A piece's table is made and filled in one transaction, under a name that no try had before. So it is
there as a whole or not at all, and a piece that is written again, because its answer was lost, is
another table: the commit merges the one that it was told of. What nobody was told of is never
merged, and is removed with all that the stream has staged, after a try and when it is claimed.

UNLOGGED, so that staging costs no log; a server that crashed empties them. The merge counts rows,
and takes fewer than were sent for what it is: a piece that was lost.
"""

from __future__ import annotations

import hashlib
import itertools
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

from batchmill.store.postgres.copy import columns_of, copy_rows, marked
from batchmill.store.sql.merging import quoted
from batchmill.store.sql.session import Owner, Part, Row, Statement

if TYPE_CHECKING:
    import psycopg

MOST_PIECES = 100
"""Of one commit, about: every table takes room in the server's table of locks."""
LOCK_WAIT = "200ms"
"""How long a staged table waits to be removed: a backup that reads it may take hours."""
STAGED = """
SELECT relname FROM pg_class JOIN pg_namespace ON pg_namespace.oid = relnamespace
WHERE relkind = 'r' AND nspname = current_schema() AND starts_with(relname, ?)
"""
Columns: TypeAlias = Sequence[Sequence[Any]]


@dataclass(frozen=True, slots=True)
class Piece:
    """Some rows of a part; they are cut out of its columns only when they are written."""

    owner: Owner
    statement: Statement
    columns: Columns
    start: int
    stop: int

    @property
    def rows(self) -> int:
        """How many."""
        return self.stop - self.start


def pieces_of(parts: Sequence[Part], owner: Owner, piece_rows: int) -> Iterator[Piece]:
    """Parts cut into pieces of about ``piece_rows`` rows, and each part's about equally large."""
    total = sum(len(columns[0]) for _, columns in parts)
    most = max(piece_rows, -(-total // MOST_PIECES))
    for statement, columns in parts:
        rows = len(columns[0])
        count = -(-rows // most)
        bounds = [number * rows // count for number in range(count + 1)]
        for start, stop in itertools.pairwise(bounds):
            yield Piece(owner, statement, columns, start, stop)


def prefix_of(stream: str) -> str:
    """How the names of a stream's staged tables begin, and no others."""
    mark = hashlib.sha256(stream.encode("utf-8", "surrogatepass")).hexdigest()
    return f"staged_{mark[:16]}_"


def write_piece(connection: psycopg.Connection[Row], piece: Piece) -> str:
    """Write a piece to a table of its own, in a transaction of its own; the table's name."""
    stream, epoch = piece.owner
    table = f"{prefix_of(stream)}{epoch}_{uuid.uuid4().hex[:16]}"
    columns = [column[piece.start : piece.stop] for column in piece.columns]
    connection.execute("BEGIN")
    # Nothing to vacuum: it is written once, read once and dropped.
    connection.execute(
        marked(
            f"CREATE UNLOGGED TABLE {table} ({columns_of(piece.statement)}) "
            "WITH (autovacuum_enabled = false)"
        )
    )
    # Frozen: nobody else sees the table yet, and whoever reads it later need not mark its rows.
    copy_rows(connection, table, piece.statement, columns, "FREEZE, NULL 'None'")
    connection.execute("COMMIT")
    return table


def merging(statement: Statement, table: str) -> str:
    """The statement that merges what lies in a table."""
    names = ", ".join(statement.columns)
    # In key order, a row's neighbours in the index come one after the other.
    order = f"ORDER BY {', '.join(statement.key)}" if statement.key else ""
    return (
        f"INSERT INTO {quoted(statement.table)} AS kept ({names}) "
        f"SELECT {names} FROM {table} {order} {statement.tail}"
    )


def tells_rows(statement: Statement) -> bool:
    """Whether its merge tells how many rows there were: it inserts or updates every one."""
    return "DO UPDATE" in statement.tail


def clear_staged(connection: psycopg.Connection[Row], owner: Owner) -> None:
    """Remove what the owner, and who had the stream before, has staged.

    Not in the transaction that merges it: that one would wait for whoever reads such a table. Here
    it is left for the next time.
    """
    import psycopg

    stream, epoch = owner
    prefix = prefix_of(stream)
    found = connection.execute(marked(STAGED), (prefix,)).fetchall()
    # Those of a later epoch are somebody else's, who goes on with them.
    tables = [name for (name,) in found if int(name[len(prefix) :].split("_")[0]) <= epoch]
    if not tables:
        return
    connection.execute(marked(f"SET lock_timeout = '{LOCK_WAIT}'"))
    try:
        for some in (", ".join(tables), *tables):
            try:
                connection.execute(marked(f"DROP TABLE IF EXISTS {some}"))
            except psycopg.errors.LockNotAvailable:
                continue  # all at once, or else one by one, and what cannot go now goes later
            if some not in tables:
                break
    finally:
        connection.execute("RESET lock_timeout")
