"""What the shared procedures ask of a database: a few differences, and a handful of calls."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

Row: TypeAlias = tuple[Any, ...]
Params: TypeAlias = Sequence[Any]


@dataclass(frozen=True, slots=True)
class Dialect:
    """How one database spells what the other spells differently."""

    name: str
    whole: str
    """The type of whole numbers of 64 bits."""
    floating: str
    text: str
    """The type of text that is compared byte by byte."""
    identity: str
    """The type of a key that numbers itself."""
    greatest: Callable[[str, str], str]
    """The greater of two expressions; of one if the other is null."""
    least: Callable[[str, str], str]
    row_id: str
    """The column that tells apart rows that look the same."""
    row_among: Callable[[str], str]
    """The condition that a row's id is among those a query answers."""
    all_rows: str
    """What stands for "no limit" before an OFFSET."""
    wide_table: str
    """What follows the columns of a wide table."""
    most_columns: int
    most_name_bytes: int | None
    """How long a table's name may be; None: as long as it likes."""


@dataclass(frozen=True, slots=True)
class Statement:
    """An insert of many rows, which merges where the key is there already.

    The row that is there goes by ``kept`` in ``tail``, the new one by ``excluded``.
    """

    table: str
    columns: tuple[str, ...]
    types: tuple[str, ...]
    """The type of each column."""
    key: tuple[str, ...]
    tail: str
    """``ON CONFLICT …``, or nothing."""


Part: TypeAlias = tuple[Statement, Sequence[Sequence[Any]]]
"""A statement, and the rows for it, column by column."""
Owner: TypeAlias = tuple[str, int]
"""Whose rows they are: stream and epoch."""


class Session(Protocol):
    """An open transaction. Parameters are marked by ``?``, and no text holds another ``?``."""

    dialect: Dialect

    def rows(self, sql: str, params: Params = ()) -> list[Row]:
        """All rows that a query answers."""
        ...

    def run(self, sql: str, params: Params = ()) -> int:
        """Run a statement; how many rows it changed."""
        ...

    def run_many(self, sql: str, params: Iterable[Params]) -> None:
        """Run a statement once for each set of parameters."""
        ...

    def upsert(self, statement: Statement, columns: Sequence[Sequence[Any]]) -> None:
        """Insert or merge many rows, given column by column; each key once."""
        ...

    def upsert_all(self, parts: Sequence[Part], owner: Owner) -> None:
        """The same for several tables; where rows are many, they may come by several ways."""
        ...

    def has_table(self, name: str) -> bool:
        """Whether there is a table of that name."""
        ...

    def install(self) -> None:
        """Make what else the schema needs in this database: functions."""
        ...
