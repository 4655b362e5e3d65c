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
from batchmill.store.batch import (
    DOUBTFUL,
    EXPIRED,
    REMOVED_DAY,
    TOO_OLD,
    UNCONFIRMED,
    Batch,
    CommitResult,
    CounterKey,
    Layout,
)
from batchmill.store.buckets import day_of
from batchmill.store.clock import AHEAD_S, ClockReading, WriterClock, minute_of
from batchmill.store.columns import as_lists
from batchmill.store.errors import StaleStateError
from batchmill.store.sql import outbox, parts
from batchmill.store.sql.entities import EntityCache, EntityId, KnownEntity, store_entities
from batchmill.store.sql.merge import last_days, merge_deltas, store_slow_calls
from batchmill.store.sql.retention import Retention, remove_expired
from batchmill.store.sql.session import COMPACT_EVERY, Session, Upsert, sum_expressions
from batchmill.store.sql.stream import StreamState, is_replay, stream_state


class Commit:
    """The commit of a batch, tried once or several times.

    A try may succeed and yet fail for the caller, when the connection breaks before the answer
    comes. The token that is committed with it shows that to the next try.
    """

    def __init__(
        self,
        batch: Batch,
        layout: Layout | None = None,
        *,
        ttl_days: int,
        top_n: int,
        reading: ClockReading,
        last: ClockReading | None = None,
    ) -> None:
        """``layout`` is what the stream has registered, as far as it is known.

        ``reading`` is what the clocks say; ``last`` what they said when this process last committed
        to the stream.
        """
        self._reading = reading
        self._last = last
        self._batch = batch
        self._layout = layout
        self._token = str(uuid.uuid4())
        self._result = CommitResult(applied=False)
        self._ttl_days = ttl_days
        self._top_n = top_n
        self.entities: dict[EntityId, KnownEntity] = {}
        """Entities to cache after the transaction."""

    def run(self, session: Session, cache: EntityCache) -> CommitResult:
        """Write everything that the batch changes, in the transaction that is open."""
        batch = self._batch
        # With parts, no task may record one meanwhile.
        lock = "" if batch.parts is None else session.dialect.for_update
        known = stream_state(session, batch.stream, lock)
        if is_replay(batch.stream, known, batch.epoch, batch.number, self._token):
            if known is not None and known.token == self._token:  # of an earlier try of this commit
                return self._result
            self.entities = {}
            return CommitResult(applied=False)
        before = Retention.read(session)
        clock = None if known is None else known.clock
        after, observed = before.after(
            batch.newest_minute, self._reading, clock, self._elapsed_s(known)
        )
        after = after.turned_back()
        cutoff = after.cutoff(self._ttl_days)
        rows = _rows_by_day(batch)
        removed = 0
        # The day that was reached is stored: ttl_days may have been lowered.
        if cutoff > after.removed:
            # First, so that new rows can use the space of removed ones.
            days = {day for _, day in rows}
            removed, reached = remove_expired(session, cutoff, len(days) + 1)
            after = after.when_removed(max(after.removed, reached))
        cache.enter(after.turns)
        since = max(cutoff, after.removed)
        last_seen = last_days(batch, after.newest)
        stored = store_entities(
            session, batch.entities, last_seen, cache, cutoff=cutoff, since=since
        )
        self.entities = stored.known
        counters = Counter(batch.counters)
        merged = 0
        kept_since = cutoff
        if batch.parts is not None and known is not None:
            closed = parts.close(session, batch)
            merged, kept_since = closed.merged, known.part_cutoff
            counters.update(closed.counters)
        counted = _counted(rows, kept_since, before, after)
        counters.update(counted)
        turn = batch.number % COMPACT_EVERY
        merged += merge_deltas(session, batch, self._layout, stored.keys, cutoff, turn, counters)
        counters.update(store_slow_calls(session, batch, stored.keys, cutoff, self._top_n))
        self._update_carry(session)
        after.write(session, before)
        dropped = tuple(
            path
            for file in batch.outgoing
            for path in outbox.add_file(session, batch.stream, file, counters)
        )
        add_counters(session, counters)
        self._record(session, observed.writer)
        expired = sum(count for (what, *_), count in counted.items() if what == EXPIRED)
        self._result = CommitResult(
            True, merged, expired, removed, dict(counters), dropped, observed.step_s
        )
        return self._result

    def _elapsed_s(self, known: StreamState | None) -> float | None:
        """The time since the stream's last commit, if that was this writer's; else not known."""
        last = self._last
        if last is None or known is None or known.clock_ms != _ms(last.wall_s):
            return None
        return self._reading.steady_s - last.steady_s

    def _update_carry(self, session: Session) -> None:
        stream = self._batch.stream
        for path in dict.fromkeys(self._batch.drop_files):
            # A file that is gone was dropped by a commit that this writer does not know of.
            dropped = session.run("DELETE FROM carry WHERE stream = ? AND path = ?", (stream, path))
            if dropped != 1:
                raise StaleStateError(stream, path)
        session.run_many(
            "INSERT INTO carry (stream, path, batch, arrived_ms, n_rows) VALUES (?, ?, ?, ?, ?) "
            "ON CONFLICT (stream, path) DO UPDATE SET batch = excluded.batch, "
            "arrived_ms = excluded.arrived_ms, n_rows = excluded.n_rows",
            [
                (stream, file.path, file.batch, file.arrived_ms, file.rows)
                for file in self._batch.add_files
            ],
        )

    def _record(self, session: Session, clock: WriterClock) -> None:
        """Record the commit in its stream; the last write of the transaction."""
        batch = self._batch
        session.run(
            "UPDATE stream SET token = ?, committed_at = ?, clock_ms = ?, steady_ms = ?, "
            "last_batch = ? WHERE name = ?",
            (
                *(self._token, time.time_ns() // 1_000_000),
                *(_ms(clock.seen_s), _ms(clock.steady_s), batch.number, batch.stream),
            ),
        )


def _ms(seconds: float) -> int:
    return round(seconds * 1000)


def add_counters(session: Session, counters: Mapping[CounterKey, int]) -> None:
    """Add to the store's counters."""
    nonzero = sorted((key, n) for key, n in counters.items() if n)
    if nonzero:
        text, whole = session.dialect.text, session.dialect.whole
        key = {"what": text, "source": text, "reason": text}
        upsert = Upsert.merging("counter", key, {"n": whole}, sum_expressions("n"))
        keys = zip(*(key for key, _ in nonzero), strict=True)
        session.upsert(upsert, (*keys, [n for _, n in nonzero]))


def _rows_by_day(batch: Batch) -> Counter[tuple[str, int]]:
    """How many rows there are by source and day; delta rows where the batch counts no rows."""
    rows = Counter(batch.rows)
    counted = {source for source, _ in batch.rows}
    for deltas in batch.deltas:
        if deltas.source not in counted and deltas.grain is Grain.MINUTE:
            (buckets,) = as_lists([deltas.buckets])
            rows.update((deltas.source, day_of(deltas.grain, bucket)) for bucket in buckets)
    return rows


def _counted(
    rows: Mapping[tuple[str, int], int], kept_since: int, before: Retention, after: Retention
) -> Counter[CounterKey]:
    """Count rows that are too old, and those that a wrong clock may have given their day."""
    counters: Counter[CounterKey] = Counter()
    trusted_s = after.trusted_s
    latest = None if trusted_s is None else minute_of(trusted_s + AHEAD_S) // 10_000
    for (source, day), count in rows.items():
        if day < kept_since:
            counters[EXPIRED, source, TOO_OLD] += count
        elif day < before.highest:
            counters[DOUBTFUL, source, REMOVED_DAY] += count
        elif latest is not None and day > latest:
            counters[DOUBTFUL, source, UNCONFIRMED] += count
    return counters
