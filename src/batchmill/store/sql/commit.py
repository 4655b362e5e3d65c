"""Commits a batch to a stream.

A commit runs in a transaction that no other batch's overlaps (SQLite has one writer; in PostgreSQL
the row that holds the newest minute is locked first), so what it reads stays true until its end.
Parts of batches may be committed meanwhile: see :mod:`~batchmill.store.sql.parts`.
"""

from __future__ import annotations

import time
import uuid
from collections import Counter
from collections.abc import Mapping

from batchmill.sources import Grain
from batchmill.store.batch import EXPIRED, TOO_OLD, Batch, CommitResult, CounterKey, Layout
from batchmill.store.buckets import cutoff_day, day_of, day_start, newer
from batchmill.store.errors import StaleCarryError
from batchmill.store.sql import outbox, parts
from batchmill.store.sql.columns import as_lists
from batchmill.store.sql.entities import EntityCache, EntityId, Known, store_entities
from batchmill.store.sql.merge import last_days, merge_deltas, store_slow_calls
from batchmill.store.sql.session import (
    COMPACT_EVERY,
    Session,
    Upsert,
    quote,
    read_meta,
    sum_expressions,
    table_name,
    write_meta,
)
from batchmill.store.sql.stream import is_replay, read_newest_minute, stream_state


class Commit:
    """The commit of a batch, tried once or several times.

    A try may succeed and yet fail for the caller, when the connection breaks before the answer
    comes. The token that is committed with it shows that to the next try.
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
        self.entities: dict[EntityId, Known] = {}
        """Entities to cache after the transaction."""

    def run(self, session: Session, cache: EntityCache) -> CommitResult:
        """Write everything that the batch changes, in the transaction that is open."""
        batch = self._batch
        number = None if batch.settle else batch.number
        # With parts, no task may record one meanwhile.
        lock = "" if batch.parts is None else session.dialect.for_update
        known = stream_state(session, batch.stream, lock)
        if is_replay(batch.stream, known, batch.epoch, number, self._token):
            if known is not None and known.token == self._token:  # of an earlier try of this commit
                return self._result
            self.entities = {}
            return CommitResult(applied=False)
        before = read_newest_minute(session)
        newest = newer(before, batch.newest_minute)
        cutoff = cutoff_day(newest, self._ttl_days)
        # Stored, not computed from the newest minute: ttl_days may have been lowered.
        last_cutoff = int(read_meta(session, "cutoff"))
        # First, so that new rows can use the space of removed ones.
        removed = _remove_before(session, cutoff) if cutoff > last_cutoff else 0
        since = max(cutoff, last_cutoff)
        days = last_days(batch, newest)
        stored = store_entities(session, batch.entities, days, cache, cutoff=cutoff, since=since)
        self.entities = stored.known
        counters = Counter(batch.counters)
        merged = 0
        kept_since = cutoff
        if batch.parts is not None and known is not None:
            closed = parts.close(session, batch)
            merged, kept_since = closed.merged, known.part_cutoff
            counters.update(closed.counters)
        expired = _expired_rows(batch, kept_since)
        for source, rows in expired.items():
            counters[EXPIRED, source, TOO_OLD] += rows
        turn = (known.last_batch or 0 if known and batch.settle else batch.number) % COMPACT_EVERY
        merged += merge_deltas(session, batch, self._layout, stored.keys, cutoff, turn)
        counters.update(store_slow_calls(session, batch, stored.keys, cutoff, self._top_n))
        self._update_carry(session)
        if newest is not None and newest != before:
            write_meta(session, "newest_minute", newest)
        dropped = tuple(
            path
            for file in batch.outgoing
            for path in outbox.add_file(session, batch.stream, file, counters)
        )
        add_counters(session, counters)
        self._record(session, number)
        total = sum(expired.values())
        self._result = CommitResult(True, merged, total, removed, dict(counters), dropped)
        return self._result

    def _update_carry(self, session: Session) -> None:
        stream = self._batch.stream
        for path in dict.fromkeys(self._batch.drop_carry):
            # A settling commit has no number: a file that is gone shows that it came before.
            dropped = session.run("DELETE FROM carry WHERE stream = ? AND path = ?", (stream, path))
            if dropped != 1:
                raise StaleCarryError(stream, path)
        session.run_many(
            "INSERT INTO carry (stream, path, batch, arrived_ms, n_rows) VALUES (?, ?, ?, ?, ?) "
            "ON CONFLICT (stream, path) DO UPDATE SET batch = excluded.batch, "
            "arrived_ms = excluded.arrived_ms, n_rows = excluded.n_rows",
            [
                (stream, file.path, file.batch, file.arrived_ms, file.rows)
                for file in self._batch.add_carry
            ],
        )

    def _record(self, session: Session, number: int | None) -> None:
        """Record the commit in its stream; the last write of the transaction."""
        session.run(
            "UPDATE stream SET token = ?, committed_at = ?, last_batch = coalesce(?, last_batch) "
            "WHERE name = ?",
            (self._token, time.time_ns() // 1_000_000, number, self._batch.stream),
        )


def _remove_before(session: Session, cutoff: int) -> int:
    """Remove everything of days before ``cutoff``; how many rows of metrics and TopN that was.

    Entities are removed with their last row: their last day is never before that of a row.
    """
    session.run("DELETE FROM entity WHERE last_day < ?", (cutoff,))
    # After that: a part that is being committed may just have kept one of them.
    session.run(
        "DELETE FROM entity_layer WHERE NOT EXISTS "
        "(SELECT 1 FROM entity WHERE key = entity_layer.entity)"
    )
    removed = 0
    for grain in Grain:
        first = day_start(grain, cutoff)
        for (source,) in session.rows("SELECT DISTINCT source FROM metric_column"):
            table = quote(table_name(grain, source))
            removed += session.run(f"DELETE FROM {table} WHERE bucket < ?", (first,))
        for table in ("topn", "statement"):
            removed += session.run(
                f"DELETE FROM {table} WHERE grain = ? AND bucket < ?", (grain.value, first)
            )
    write_meta(session, "cutoff", cutoff)
    return removed


def add_counters(session: Session, counters: Mapping[CounterKey, int]) -> None:
    """Add to the store's counters."""
    nonzero = sorted((key, n) for key, n in counters.items() if n)
    if nonzero:
        text, whole = session.dialect.text, session.dialect.whole
        key = {"what": text, "source": text, "reason": text}
        upsert = Upsert.merging("counter", key, {"n": whole}, sum_expressions("n"))
        keys = zip(*(key for key, _ in nonzero), strict=True)
        session.upsert(upsert, (*keys, [n for _, n in nonzero]))


def _expired_rows(batch: Batch, cutoff: int) -> Counter[str]:
    """How many rows of each source are too old; delta rows where the batch counts no rows."""
    expired: Counter[str] = Counter()
    counted = {source for source, _ in batch.rows}
    for (source, day), rows in batch.rows.items():
        if day < cutoff:
            expired[source] += rows
    for deltas in batch.deltas:
        if deltas.source not in counted and deltas.grain is Grain.MINUTE:
            (buckets,) = as_lists([deltas.buckets])
            rows = sum(day_of(deltas.grain, bucket) < cutoff for bucket in buckets)
            if rows:
                expired[deltas.source] += rows
    return expired
