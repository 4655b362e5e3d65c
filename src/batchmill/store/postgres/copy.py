"""Rows in the text that PostgreSQL's COPY reads."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import islice
from typing import TYPE_CHECKING, Any

from batchmill.store.sql.session import Row, Statement

if TYPE_CHECKING:
    import psycopg

TEXT = 'TEXT COLLATE "C"'
"""Compared byte by byte, whatever the database's locale: the order is the same everywhere."""
BLOCK_ROWS = 20_000
"""How many rows go into one message of a copy."""


def marked(sql: str) -> bytes:
    """The text with psycopg's marks for parameters."""
    # As bytes, which psycopg takes from anybody: a str would have to be a literal to its types.
    return sql.replace("?", "%s").encode()


def columns_of(statement: Statement) -> str:
    """A statement's columns with their types, as a table is made of them."""
    return ", ".join(
        f"{column} {kind}" for column, kind in zip(statement.columns, statement.types, strict=True)
    )


def copy_rows(
    connection: psycopg.Connection[Row],
    table: str,
    statement: Statement,
    columns: Sequence[Sequence[Any]],
    options: str = "NULL 'None'",
) -> None:
    """Copy rows, given column by column, into a table with the statement's columns."""
    copied = f"COPY {table} ({', '.join(statement.columns)}) FROM STDIN ({options})"
    with connection.cursor() as cursor, cursor.copy(marked(copied)) as copy:
        for block in copy_blocks(statement.types, columns):
            copy.write(block)


def copy_blocks(types: Sequence[str], columns: Sequence[Sequence[Any]]) -> Iterable[bytes]:
    """Rows in the text format of COPY, in blocks; None is written ``None``.

    Column by column, because a number needs no look at: ``str()`` makes what COPY reads.
    """
    shown = [
        map(_escaped, column) if kind == TEXT else map(str, column)
        for kind, column in zip(types, columns, strict=True)
    ]
    lines = map("\t".join, zip(*shown, strict=True))
    while block := list(islice(lines, BLOCK_ROWS)):
        block.append("")
        yield "\n".join(block).encode()


def _escaped(value: str | None) -> str:
    if value is None:
        return "None"
    if value == "None":  # the text, not the nothing: COPY looks for that before it unescapes
        return "Non\\e"
    if "\\" in value:
        value = value.replace("\\", "\\\\")
    if value.isprintable():
        return value
    return value.replace("\n", "\\n").replace("\r", "\\r").replace("\t", "\\t")
