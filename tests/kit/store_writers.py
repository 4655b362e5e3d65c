"""Stores whose batches go through the writers in tiny pieces, and what lies staged in them."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest

from batchmill.store import RetryPolicy
from batchmill.store.postgres import PostgresStore, WriterSettings, session
from batchmill.store.postgres.writers import merge_table
from batchmill.store.sql.session import Upsert
from tests.kit.stores import MINUTE, PATIENT, Measurement

TINY = WriterSettings(writers=4, above_rows=1, piece_rows=3)
"""Every batch is cut into pieces of three rows."""


def open_writers(
    url: str, settings: WriterSettings = TINY, retry: RetryPolicy = PATIENT
) -> PostgresStore:
    """A store that writes by ``settings``."""
    return PostgresStore(url, url, retry, ttl_days=7, top_n=50, create=True, writers=settings)


def some_rows(number: int, entities: int = 12) -> list[Measurement]:
    """The rows of a batch, always the same for its number: about 40 delta rows."""
    rng = random.Random(number)
    return [
        Measurement(
            rng.randrange(1000), f"name {rng.randrange(5)}", MINUTE + rng.randrange(2), f"e{n}"
        )
        for n in range(entities)
        for _ in range(3)
    ]


def staged(store: PostgresStore) -> list[str]:
    """The staged tables that a store holds, of whichever stream."""
    rows = store._read(
        lambda session: session.rows(
            "SELECT relname FROM pg_class WHERE relkind = 'r' AND starts_with(relname, 'staged_')"
        )
    )
    return [name for (name,) in rows]


def before(function: Callable[..., Any], act: Callable[[int], object]) -> Callable[..., Any]:
    """A function that first calls ``act`` with how many calls there were before."""
    calls = iter(range(10**6))

    def both(*arguments: Any, **named: Any) -> Any:
        act(next(calls))
        return function(*arguments, **named)

    return both


def before_merges(monkeypatch: pytest.MonkeyPatch, act: Callable[[str], object]) -> None:
    """Call ``act`` with a table's name before that table's rows are merged."""

    def both(upsert: Upsert, table: str) -> str:
        act(table)
        return merge_table(upsert, table)

    monkeypatch.setattr(session, "merge_table", both)
