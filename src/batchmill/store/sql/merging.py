"""The SQL that merges rows, made of the cells of its columns."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

from batchmill.sources import Grain
from batchmill.store.cell import Cell
from batchmill.store.sql.session import Dialect, Statement

COMPACT_ABOVE = 256
"""A tally is not worth compacting while its text is no longer than this."""
COMPACT_EVERY = 16
"""Of the rows that a batch touches, one in so many is compacted (a power of 2)."""
COMPACT = {
    Cell.NUMBERS: "batchmill_compact_numbers",
    Cell.LABELS: "batchmill_compact_labels",
    Cell.LABEL_SUMS: "batchmill_compact_label_sums",
}
"""The functions that compact a tally; each backend has its own."""


def quoted(name: str) -> str:
    """A name as SQL writes it."""
    return '"' + name.replace('"', '""') + '"'


def table_name(grain: Grain, source: str) -> str:
    """The table of a source and a grain."""
    return f"{grain.value}_{source}"


def cell_type(dialect: Dialect, cell: Cell) -> str:
    """The type of a cell's column."""
    if cell in COMPACT:
        return dialect.text
    return dialect.floating if cell in (Cell.MAX_FLOAT, Cell.MIN_FLOAT) else dialect.whole


@lru_cache(maxsize=4096)
def merge_cells(
    dialect: Dialect, table: str, columns: tuple[str, ...], kinds: tuple[Cell, ...], turn: int
) -> Statement:
    """The statement that merges deltas into a wide table.

    ``turn`` picks the rows whose tallies are compacted this time: from 0 up to
    ``COMPACT_EVERY - 1``; a row's turn comes once in that many batches.
    """
    updates = [
        f"{name} = {merged(dialect, name, kind, turn)}"
        for name, kind in zip(columns, kinds, strict=True)
    ]
    action = f"UPDATE SET {', '.join(updates)}" if updates else "NOTHING"
    return Statement(
        table,
        ("bucket", "entity", *columns),
        (dialect.whole, dialect.whole, *(cell_type(dialect, kind) for kind in kinds)),
        ("bucket", "entity"),
        f"ON CONFLICT (bucket, entity) DO {action}",
    )


def merged(dialect: Dialect, name: str, kind: Cell, turn: int) -> str:
    """The expression for a column's value after merging."""
    old, new = f"kept.{name}", f"excluded.{name}"
    if kind in (Cell.MAX_INT, Cell.MAX_FLOAT):
        return dialect.greatest(old, new)
    if kind in (Cell.MIN_INT, Cell.MIN_FLOAT):
        return dialect.least(old, new)
    if kind is Cell.SUM:
        return f"coalesce({old} + {new}, {old}, {new})"
    joined = f"{old} || ',' || {new}"
    return (
        f"CASE WHEN length({old}) + length({new}) > {COMPACT_ABOVE} "
        f"AND ((excluded.entity + {turn}) & {COMPACT_EVERY - 1}) = 0 "
        f"THEN {COMPACT[kind]}({joined}) ELSE coalesce({joined}, {old}, {new}) END"
    )


def added(
    dialect: Dialect, table: str, key: Sequence[str], types: Sequence[str], sums: Sequence[str]
) -> Statement:
    """The statement that adds up ``sums`` by ``key``; ``types`` are those of the key."""
    updates = ", ".join(f"{name} = kept.{name} + excluded.{name}" for name in sums)
    return Statement(
        table,
        (*key, *sums),
        (*types, *(dialect.whole for _ in sums)),
        tuple(key),
        f"ON CONFLICT ({', '.join(key)}) DO UPDATE SET {updates}",
    )
