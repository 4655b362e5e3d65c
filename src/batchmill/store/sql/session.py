"""A transaction as the store's SQL sees it: session, dialect, conditions, and merging inserts."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, TypeAlias, TypeVar

from batchmill.sources import Grain
from batchmill.store.columns import Columns
from batchmill.store.states import Cell

T = TypeVar("T")
Row: TypeAlias = tuple[Any, ...]
Params: TypeAlias = Sequence[Any]

CHUNK = 500
"""How many ids or keys one query lists."""
MAX_LISTED_BUCKETS = 2_000
"""How many buckets one query lists."""
MAX_ROWS = 2**63 - 1
"""The greatest limit that a database accepts."""
COMPACT_ABOVE = 256
"""A tally is not worth compacting while its text is no longer than this."""
COMPACT_EVERY = 16
"""Of the rows that a batch touches, one in so many is compacted (a power of 2)."""
COMPACT = {
    Cell.NUMBERS: "batchmill_compact_numbers",
    Cell.LABELS: "batchmill_compact_labels",
    Cell.LABEL_SUMS: "batchmill_compact_label_sums",
}
"""The SQL functions that compact a tally; each database has its own."""
LABEL_CELLS = frozenset((Cell.LABELS, Cell.LABEL_SUMS))
"""Cells of which compacting may move some under the label ``overflow``."""


@dataclass(frozen=True, slots=True)
class Dialect:
    """What SQLite and PostgreSQL write differently."""

    name: str
    """``sqlite`` or ``postgresql``."""
    whole: str
    """The type of 64-bit whole numbers."""
    floating: str
    text: str
    """The type of text that is compared byte by byte."""
    identity: str
    """The type of a key that the database numbers."""
    greatest: Callable[[str, str], str]
    """The greater of two expressions; where one is null, the other."""
    least: Callable[[str, str], str]
    row_id: str
    """The column that distinguishes equal rows."""
    row_id_in: Callable[[str], str]
    """The condition that a row's id is in the result of a query."""
    all_rows: str
    """Stands for "no limit" before an OFFSET."""
    wide_table: Callable[[Grain], str]
    """Follows the columns of a wide table."""
    text_size: str
    """The function that is quickest to say how long a text is, about."""
    for_share: str
    """Follows a query: until the end of the transaction nobody changes the rows."""
    for_update: str
    """Likewise, and nobody else reads them with a lock either."""
    max_columns: int
    max_name_bytes: int | None
    """How long a table's name may be; None: there is no limit."""

    def cell_type(self, cell: Cell) -> str:
        """The type of a cell's column."""
        if cell in COMPACT:
            return self.text
        return self.floating if cell in (Cell.MAX_FLOAT, Cell.MIN_FLOAT) else self.whole


@dataclass(frozen=True, slots=True)
class Condition:
    """A condition in SQL, and its parameters; joined by ``&``."""

    sql: str = "1 = 1"
    params: tuple[Any, ...] = ()

    def __and__(self, other: Condition) -> Condition:
        return Condition(f"{self.sql} AND {other.sql}", (*self.params, *other.params))

    @classmethod
    def one_of(cls, column: str, values: Sequence[Any]) -> Condition:
        """The condition that a column has one of the values."""
        return cls(f"{column} IN ({marks(values)})", tuple(values))


@dataclass(frozen=True, slots=True)
class Upsert:
    """An insert of many rows that merges where the key exists already.

    In ``changes``, the row in the table is called ``kept``, the new one ``excluded``.
    """

    table: str
    columns: tuple[str, ...]
    types: tuple[str, ...]
    """The type of each column."""
    key: tuple[str, ...]
    changes: str
    """What is set where the key exists: ``column = expression, …``, or nothing."""
    sources: tuple[int, ...] = ()
    """For each column, which of the given lists fills it; empty: each its own."""

    @classmethod
    def merging(
        cls,
        table: str,
        key: Mapping[str, str],
        values: Mapping[str, str],
        updates: Mapping[str, str],
        sources: tuple[int, ...] = (),
    ) -> Upsert:
        """An upsert into columns given with their types; ``updates`` are expressions by column."""
        columns = {**key, **values}
        changed = ", ".join(f"{name} = {expression}" for name, expression in updates.items())
        return cls(table, tuple(columns), tuple(columns.values()), tuple(key), changed, sources)

    @property
    def tail(self) -> str:
        """``ON CONFLICT …``, or nothing."""
        if not self.key:
            return ""
        action = f"UPDATE SET {self.changes}" if self.changes else "NOTHING"
        return f"ON CONFLICT ({', '.join(self.key)}) DO {action}"

    def spread(self, columns: Columns) -> Columns:
        """One list for each column of the table."""
        return [columns[source] for source in self.sources] if self.sources else columns


@dataclass(frozen=True, slots=True)
class UpsertRows:
    """The rows for an upsert."""

    upsert: Upsert
    columns: Columns
    fresh: bool = False
    """Probably none of them is in the table yet."""

    def __len__(self) -> int:
        return len(self.columns[0])


class Session(ABC):
    """An open transaction. Parameters are marked by ``?``, and no SQL text has another ``?``."""

    dialect: Dialect

    @abstractmethod
    def rows(self, sql: str, params: Params = ()) -> list[Row]:
        """All rows of a query."""

    @abstractmethod
    def run(self, sql: str, params: Params = ()) -> int:
        """Run a statement; how many rows it changed."""

    @abstractmethod
    def run_many(self, sql: str, params: Iterable[Params]) -> None:
        """Run a statement once for each set of parameters."""

    @abstractmethod
    def upsert(self, upsert: Upsert, columns: Columns) -> None:
        """Insert or merge many rows; each key once."""

    def upsert_all(self, parts: Sequence[UpsertRows]) -> None:
        """Upsert into several tables."""
        for part in parts:
            self.upsert(part.upsert, part.columns)

    def upsert_reading(
        self, upsert: Upsert, columns: Columns, read: Sequence[str], differs: str
    ) -> Iterable[Row]:
        """Upsert rows, and read columns of them; maybe of others with the same last key, too.

        ``read`` are columns that are never null. ``differs`` is the condition that a row that is
        there would change.
        """
        self.upsert(upsert, columns)
        last = len(upsert.key) - 1
        query = f"SELECT {', '.join(read)} FROM {quote(upsert.table)}"
        return rows_in(self, query, upsert.key[last], columns[last])

    def lock_slots(self, numbers: Iterable[int]) -> None:  # noqa: B027 - where writers take turns
        """Wait until no other transaction holds one of the slots of these numbers."""

    def lock_overflow(self) -> None:  # noqa: B027 - where writers take turns
        """Wait until no other transaction writes overflow entities, which parts share."""

    @abstractmethod
    def take_moved_labels(self) -> int:
        """How much compacting has moved under the label ``overflow`` since the last call."""

    @abstractmethod
    def has_table(self, name: str) -> bool:
        """Whether there is a table of that name."""

    def drop_view(self, name: str) -> bool:
        """Remove a view, if it is there; False if others depend on it."""
        self.run(f"DROP VIEW IF EXISTS {quote(name)}")
        return True

    def install(self) -> None:  # noqa: B027 - not every database needs any
        """Create the functions that the schema needs in this database."""


def quote(name: str) -> str:
    """A name as SQL writes it."""
    return '"' + name.replace('"', '""') + '"'


def table_name(grain: Grain, source: str) -> str:
    """The table of a source and a grain."""
    return f"{grain.value}_{source}"


def marks(values: Sequence[Any]) -> str:
    """Parameter marks for a list: ``?, ?, ?``."""
    return ", ".join("?" * len(values))


def chunks(values: Iterable[T], size: int = CHUNK) -> Iterator[list[T]]:
    """The values, so many at a time."""
    listed = list(values)
    for start in range(0, len(listed), size):
        yield listed[start : start + size]


def read_meta(session: Session, key: str) -> str:
    """A value of the table ``meta``."""
    ((value,),) = session.rows("SELECT value FROM meta WHERE key = ?", (key,))
    return str(value)


def write_meta(session: Session, key: str, value: int) -> None:
    """Change a value of the table ``meta``."""
    session.run("UPDATE meta SET value = ? WHERE key = ?", (str(value), key))


def rows_in(session: Session, query: str, column: str, values: Iterable[Any]) -> Iterator[Row]:
    """The rows of a query without WHERE for which a column has one of the values."""
    for chunk in chunks(values):
        yield from session.rows(f"{query} WHERE {column} IN ({marks(chunk)})", chunk)


@lru_cache(maxsize=4096)
def merge_cells(
    dialect: Dialect,
    table: str,
    columns: tuple[str, ...],
    cells: tuple[Cell, ...],
    turn: int,
    sources: tuple[int, ...] = (),
) -> Upsert:
    """The upsert that merges deltas into a wide table.

    ``turn`` selects the rows whose tallies are compacted this time: from 0 up to
    ``COMPACT_EVERY - 1``; a row's turn comes once in that many batches.
    """
    kinds = dict(zip(columns, cells, strict=True))
    return Upsert.merging(
        table,
        {"bucket": dialect.whole, "entity": dialect.whole},
        {name: dialect.cell_type(cell) for name, cell in kinds.items()},
        {name: merge_expression(dialect, name, cell, turn) for name, cell in kinds.items()},
        sources,
    )


def merge_expression(dialect: Dialect, name: str, cell: Cell, turn: int) -> str:
    """The value of a column after merging, in SQL."""
    old, new = f"kept.{name}", f"excluded.{name}"
    if cell in (Cell.MAX_INT, Cell.MAX_FLOAT):
        return dialect.greatest(old, new)
    if cell in (Cell.MIN_INT, Cell.MIN_FLOAT):
        return dialect.least(old, new)
    if cell is Cell.SUM:
        return f"coalesce({old} + {new}, {old}, {new})"
    joined = f"{old} || ',' || {new}"
    return (
        f"CASE WHEN {dialect.text_size}({old}) + {dialect.text_size}({new}) > {COMPACT_ABOVE} "
        f"AND ((excluded.entity + {turn}) & {COMPACT_EVERY - 1}) = 0 "
        f"THEN {COMPACT[cell]}({joined}) ELSE coalesce({joined}, {old}, {new}) END"
    )


def sum_expressions(*names: str) -> dict[str, str]:
    """For the updates of an upsert: add to these columns."""
    return {name: f"kept.{name} + excluded.{name}" for name in names}
