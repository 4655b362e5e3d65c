"""SQLite's dialect, and its side of a transaction."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Sequence
from typing import Any

from batchmill.store.sql.merging import quoted
from batchmill.store.sql.session import Dialect, Owner, Params, Part, Row, Statement

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
    row_among=lambda query: f"rowid IN ({query})",
    all_rows="-1",
    # The rows lie in the primary key's tree: no second one to keep up.
    wide_table="WITHOUT ROWID",
    most_columns=2000,
    most_name_bytes=None,
)


class SqliteSession:
    """A transaction on a connection."""

    dialect = SQLITE

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._connection = connection

    def rows(self, sql: str, params: Params = ()) -> list[Row]:
        """See :class:`Session`."""
        return self._connection.execute(sql, params).fetchall()

    def run(self, sql: str, params: Params = ()) -> int:
        """See :class:`Session`."""
        return self._connection.execute(sql, params).rowcount

    def run_many(self, sql: str, params: Iterable[Params]) -> None:
        """See :class:`Session`."""
        self._connection.executemany(sql, params)

    def upsert(self, statement: Statement, columns: Sequence[Sequence[Any]]) -> None:
        """See :class:`Session`."""
        # A list that fills several columns, as a state does that metrics share, is bound once.
        bound = {id(column): column for column in columns}
        numbers = {each: number for number, each in enumerate(bound, 1)}
        marks = ", ".join(f"?{numbers[id(column)]}" for column in columns)
        names = ", ".join(statement.columns)
        # executemany() compiles the statement once, and zip() makes one tuple at a time.
        self._connection.executemany(
            f"INSERT INTO {quoted(statement.table)} AS kept ({names}) VALUES ({marks}) "
            f"{statement.tail}",
            zip(*bound.values(), strict=True),
        )

    def upsert_all(self, parts: Sequence[Part], owner: Owner) -> None:
        """See :class:`Session`."""
        for statement, columns in parts:
            self.upsert(statement, columns)

    def has_table(self, name: str) -> bool:
        """See :class:`Session`."""
        return bool(
            self.rows("SELECT 1 FROM sqlite_master WHERE type = 'table' AND name = ?", (name,))
        )

    def install(self) -> None:
        """Nothing: SQLite's functions belong to the connection."""
