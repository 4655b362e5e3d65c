"""The commit: everything a batch changes, in the order in which it is safe to change it.

Runs in a transaction that no other writer's overlaps (SQLite has one writer; in PostgreSQL the row
that holds the newest minute is locked first), so what it reads stays true until it is through.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from itertools import compress
from typing import Any

from batchmill.sources import Grain, UnknownNameError
from batchmill.store.errors import LayoutChangedError, StaleCarryError
from batchmill.store.sql import outbox, streams, topn
from batchmill.store.sql.allot import Column
from batchmill.store.sql.checkpoint import is_replay
from batchmill.store.sql.entities import EntityCache, EntityId, Known, store_entities
from batchmill.store.sql.merging import COMPACT_EVERY, added, merge_cells, quoted, table_name
from batchmill.store.sql.register import all_columns
from batchmill.store.sql.session import Dialect, Part, Session
from batchmill.store.ttl import cutoff_day, day_of, first_of, newer
from batchmill.store.types import EXPIRED, TOO_OLD, Batch, CommitResult, CounterKey, Deltas, Layout


class Commit:
    """The committing of a batch, tried once or several times.

    A try may get in and yet fail, when the connection breaks before the answer comes. The token
    that goes in with it tells the next try so.
    """

    def __init__(
        self, batch: Batch, layout: Layout | None = None, *, ttl_days: int, top_n: int
    ) -> None:
        """``layout`` is what the stream has registered, as far as it is known."""
        self._batch = batch
        self._layout = layout
        self._token = str(uuid.uuid4())
        self._result = CommitResult(applied=False)
        self._ttl_days = ttl_days
        self._top_n = top_n
        self.learnt: dict[EntityId, Known] = {}
        """Entities to remember once the transaction is through."""

    def run(self, session: Session, before: int | None, cache: EntityCache) -> CommitResult:
        """Do it; ``before`` is the store's newest minute, which is locked."""
        batch = self._batch
        number = None if batch.settle else batch.number
        known = streams.stream_state(session, batch.stream)
        if is_replay(batch.stream, known, batch.epoch, number, self._token):
            # Of this commit's own earlier try, or else of one long before.
            got_in = known is not None and known.token == self._token
            if not got_in:
                self.learnt = {}
            return self._result if got_in else CommitResult(applied=False)
        newest = newer(before, batch.newest_minute)
        cutoff = cutoff_day(newest, self._ttl_days)
        # First, so that what comes finds the room of what goes.
        removed, since = _remove_expired(session, cutoff)
        days = last_days(batch, newest)
        keys, self.learnt = store_entities(
            session, batch.entities, days, cache, cutoff=cutoff, since=since
        )
        counters = dict(batch.counters)
        expired = _expired_rows(batch, cutoff)
        for source, rows in expired.items():
            _count(counters, (EXPIRED, source, TOO_OLD), rows)
        turn = (known.last_batch or 0 if known and batch.settle else batch.number) % COMPACT_EVERY
        merged = merge_deltas(session, batch, self._layout, keys, cutoff, turn)
        self._slow_calls(session, keys, cutoff, counters)
        self._carry(session)
        if newest != before:
            session.run("UPDATE meta SET value = ? WHERE key = 'newest_minute'", (str(newest),))
        dropped: tuple[str, ...] = ()
        if batch.outgoing is not None:
            dropped = outbox.put(session, batch.stream, batch.outgoing, counters)
        add_counters(session, counters)
        streams.record(session, batch.stream, number, self._token)
        self._result = CommitResult(True, merged, sum(expired.values()), removed, counters, dropped)
        return self._result

    def _slow_calls(
        self,
        session: Session,
        keys: Sequence[int],
        cutoff: int,
        counters: dict[CounterKey, int],
    ) -> None:
        kept, expired = topn.keep_slowest(self._batch.topn, keys, self._top_n, cutoff)
        topn.store_topn(session, kept, self._top_n)
        for stream, rows in expired.items():
            _count(counters, (topn.EXPIRED_TOPN, stream, TOO_OLD), rows)
        expired = topn.store_statements(session, self._batch.statements, keys, cutoff)
        for stream, rows in expired.items():
            _count(counters, (topn.EXPIRED_STATEMENTS, stream, TOO_OLD), rows)

    def _carry(self, session: Session) -> None:
        stream = self._batch.stream
        for path in dict.fromkeys(self._batch.drop_carry):
            # A settling commit has no number to be known by: this tells it from its double.
            dropped = session.run("DELETE FROM carry WHERE stream = ? AND path = ?", (stream, path))
            if dropped != 1:
                raise StaleCarryError(stream, path)
        session.run_many(
            "INSERT INTO carry (stream, path, batch, arrived_ms, n_rows) VALUES (?, ?, ?, ?, ?) "
            "ON CONFLICT (stream, path) DO UPDATE SET batch = excluded.batch, "
            "arrived_ms = excluded.arrived_ms, n_rows = excluded.n_rows",
            [
                (stream, each.path, each.batch, each.arrived_ms, each.rows)
                for each in self._batch.add_carry
            ],
        )


def last_days(batch: Batch, newest: int | None) -> list[int]:
    """The last day that each entity is seen on; where no row speaks of it, the newest day."""
    found: dict[int, int] = {}

    def see(entity: int, day: int) -> None:
        if day > found.get(entity, -1):
            found[entity] = day

    for each in batch.deltas:
        if not each.buckets:
            continue
        last = day_of(each.grain, max(each.buckets))
        if day_of(each.grain, min(each.buckets)) == last:  # as nearly always
            for entity in set(each.entities):
                see(entity, last)
        else:
            for bucket, entity in zip(each.buckets, each.entities, strict=True):
                see(entity, day_of(each.grain, bucket))
    for call in batch.topn:
        see(call.entity, day_of(Grain.MINUTE, call.minute))
    for run in batch.statements:
        see(run.entity, day_of(Grain.MINUTE, run.minute))
    today = day_of(Grain.MINUTE, newest or 0)
    return [found.get(number, today) for number in range(len(batch.entities))]


def merge_deltas(
    session: Session,
    batch: Batch,
    layout: Layout | None,
    keys: Sequence[int],
    cutoff: int,
    turn: int,
) -> int:
    """Merge what is not too old; how many rows that was."""
    if not batch.deltas:
        return 0
    kinds = {
        source: {each.name: each for each in columns}
        for source, columns in all_columns(session).items()
    }
    parts: list[Part] = []
    for each in sorted(batch.deltas, key=lambda delta: (delta.source, delta.grain.minutes)):
        known = kinds.get(each.source)
        if known is None:
            raise UnknownNameError("registered source", each.source, tuple(kinds))
        _check_columns(each, known, layout)
        part = _part(session.dialect, each, known, keys, cutoff, turn)
        if part[1][0]:
            parts.append(part)
    session.upsert_all(parts, (batch.stream, batch.epoch))
    return sum(len(columns[0]) for _, columns in parts)


def _check_columns(deltas: Deltas, known: Mapping[str, Column], layout: Layout | None) -> None:
    """Raise unless every column is there, and still the metric's that it was registered for."""
    for name in deltas.cells:
        column = known.get(name)
        if column is None:
            raise UnknownNameError(f"column of {deltas.source}", name, tuple(known))
        if layout is not None:
            owner = layout.owners.get((deltas.source, name))
            if owner != (column.metric, column.version):
                raise LayoutChangedError(deltas.source, name, column.metric)


def _part(
    dialect: Dialect,
    deltas: Deltas,
    known: Mapping[str, Column],
    keys: Sequence[int],
    cutoff: int,
    turn: int,
) -> Part:
    """The rows that are not too old, and the statement that merges them."""
    names = tuple(deltas.cells)
    entities = [keys[index] for index in deltas.entities]
    columns: list[Sequence[Any]] = [deltas.buckets, entities, *deltas.cells.values()]
    first = first_of(deltas.grain, cutoff)
    if deltas.buckets and min(deltas.buckets) < first:
        kept = [bucket >= first for bucket in deltas.buckets]
        columns = [list(compress(column, kept)) for column in columns]
    table = table_name(deltas.grain, deltas.source)
    cells = tuple(known[name].cell for name in names)
    return merge_cells(dialect, table, names, cells, turn), columns


def _remove_expired(session: Session, cutoff: int) -> tuple[int, int]:
    """Remove what is before ``cutoff``, unless that was done; how many rows, and the last cutoff.

    The cutoff is kept, not worked out from the newest minute: ``ttl_days`` may have been lowered.
    """
    ((value,),) = session.rows("SELECT value FROM meta WHERE key = 'cutoff'")
    if cutoff <= int(value):
        return 0, int(value)
    session.run("UPDATE meta SET value = ? WHERE key = 'cutoff'", (str(cutoff),))
    return remove_before(session, cutoff), cutoff


def remove_before(session: Session, cutoff: int) -> int:
    """Remove everything of days before ``cutoff``; how many rows of metrics and TopN that was.

    Entities go with their last row: their last day is never before that of a row.
    """
    session.run(
        "DELETE FROM entity_layer WHERE entity IN (SELECT key FROM entity WHERE last_day < ?)",
        (cutoff,),
    )
    session.run("DELETE FROM entity WHERE last_day < ?", (cutoff,))
    removed = 0
    for grain in Grain:
        first = first_of(grain, cutoff)
        for (source,) in session.rows("SELECT DISTINCT source FROM metric_column"):
            table = quoted(table_name(grain, source))
            removed += session.run(f"DELETE FROM {table} WHERE bucket < ?", (first,))
        for table in ("topn", "statement"):
            removed += session.run(
                f"DELETE FROM {table} WHERE grain = ? AND bucket < ?", (grain.value, first)
            )
    return removed


def add_counters(session: Session, counters: Mapping[CounterKey, int]) -> None:
    """Add to the store's counters."""
    some = sorted((key, n) for key, n in counters.items() if n)
    if some:
        text = session.dialect.text
        statement = added(
            session.dialect, "counter", ("what", "source", "reason"), (text,) * 3, ("n",)
        )
        keyed = list(zip(*(key for key, _ in some), strict=True))
        session.upsert(statement, (*keyed, [n for _, n in some]))


def _expired_rows(batch: Batch, cutoff: int) -> dict[str, int]:
    """How many rows of each source are too old; delta rows where the batch tells no rows."""
    expired: dict[str, int] = {}
    told = {source for source, _ in batch.rows}
    for (source, day), rows in batch.rows.items():
        if day < cutoff:
            expired[source] = expired.get(source, 0) + rows
    for each in batch.deltas:
        if each.source not in told and each.grain is Grain.MINUTE:
            rows = sum(day_of(each.grain, bucket) < cutoff for bucket in each.buckets)
            if rows:
                expired[each.source] = expired.get(each.source, 0) + rows
    return expired


def _count(counters: dict[CounterKey, int], key: CounterKey, n: int) -> None:
    counters[key] = counters.get(key, 0) + n
