"""Commits a batch by parts, from several processes at once.

A batch is divided into parts by the hash of the entity. Tasks commit the parts, some in one
transaction each; the driver commits the books at the end: counters, files, the batch's number. The
counters of what a task has decided, such as which entities are too many, are recorded with its
parts, so that a batch that is run again need not decide again.

Every transaction of a task takes a share lock on its stream's row first, and holds it to its end.
Whoever changes that row (a claim, a new run of the batch, the books) waits for the transactions
that are in flight, and those that come later see what was changed. In the row:

``epoch``
    Another one: the stream was claimed by another writer. :class:`FencedError`.
``last_batch``
    Not smaller than the task's batch: the books are closed. Nothing is done.
``part_run``
    Another one: the batch was begun again. :class:`StaleTaskError`. So what :func:`begin` finds
    recorded is all that was and will be committed of earlier runs.

Exactly once
    Each part is merged in the transaction that inserts its row into ``part_commit``, whose key is
    (stream, batch, part). Of two attempts, the second waits for the first one's end; then it finds
    the row, and does nothing, or the first was rolled back, and it goes on. A row is only deleted
    together with the books, which move ``last_batch``: from then on attempts end at the row of the
    stream. The books are committed only if every part has its row, so no part is left out; and
    the rows that the tasks counted must add up to those that were read.

    An answer to COMMIT that is lost looks like a second attempt to the next try.

Overflow entities (:mod:`batchmill.aggregate.overflow`) belong to no part: several tasks may write
the same one. Those tasks take turns.

Beside the parts of one stream, those of other streams and whole batches are committed. All go
through the tables in one order (see :mod:`~batchmill.store.sql.merge`). A deadlock is still
possible while expired rows are removed; PostgreSQL ends one of the two, and it is tried again.
Columns keep their owners while a part is committed: it holds a share lock on the row ``columns`` of
the table ``meta``, which registering metrics locks for itself.
"""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass

from batchmill.errors import ConfigError
from batchmill.sources import Grain
from batchmill.store.batch import Batch, CounterKey, OpenParts, PartShare, PartsResult
from batchmill.store.buckets import newer
from batchmill.store.columns import bounds
from batchmill.store.errors import (
    FencedError,
    PartConflictError,
    PartsMissingError,
    RowsMismatchError,
    StaleTaskError,
)
from batchmill.store.sql.entities import EntityCache, EntityId, KnownEntity, store_entities
from batchmill.store.sql.merge import last_days, merge_deltas, store_slow_calls
from batchmill.store.sql.retention import Retention
from batchmill.store.sql.session import COMPACT_EVERY, Session
from batchmill.store.sql.stream import is_replay, stream_state


def begin(
    session: Session, stream: str, epoch: int, number: int, *, ttl_days: int, wall_s: float
) -> OpenParts:
    """Start a run of a batch's tasks: those of earlier runs cannot commit from now on.

    ``wall_s`` is what the writer's clock says, in seconds since 1970.
    """
    known = stream_state(session, stream, session.dialect.for_update)
    if is_replay(stream, known, epoch, number):
        return OpenParts(0, 0, committed=True)
    assert known is not None  # else it is fenced
    run, cutoff = known.part_run + 1, known.part_cutoff
    if known.part_batch != number:
        cutoff = Retention.read(session).cutoff(ttl_days, wall_s)
    session.run(
        "UPDATE stream SET part_batch = ?, part_cutoff = ?, part_run = ? WHERE name = ?",
        (number, cutoff, run, stream),
    )
    rows = session.rows(
        "SELECT part FROM part_commit WHERE stream = ? AND batch = ?", (stream, number)
    )
    return OpenParts(run, cutoff, frozenset(part for (part,) in rows))


class PartsCommit:
    """The commit of a task's parts, tried once or several times."""

    def __init__(self, batch: Batch, share: PartShare, *, top_n: int) -> None:
        if not share.parts or len(set(share.parts)) < len(share.parts) or min(share.parts) < 0:
            raise ConfigError("parts", share.parts, "one or more numbers from 0 up, each once")
        self._batch = batch
        self._share = share
        self._top_n = top_n
        self.entities: dict[EntityId, KnownEntity] = {}
        """Entities to cache after the transaction."""

    def run(self, session: Session, cache: EntityCache) -> PartsResult:
        """Write what the parts change and record them, in the transaction that is open."""
        batch, share = self._batch, self._share
        self.entities = {}
        if share.overflows:
            session.lock_overflow()
        session.rows(f"SELECT value FROM meta WHERE key = 'columns' {session.dialect.for_share}")
        known = stream_state(session, batch.stream, session.dialect.for_share)
        if known is None or known.epoch != batch.epoch:
            raise FencedError(batch.stream, batch.epoch, None if known is None else known.epoch)
        if known.last_batch is not None and known.last_batch >= batch.number:
            return PartsResult(applied=False)
        if (known.part_batch, known.part_run) != (batch.number, share.opened.run):
            raise StaleTaskError(batch.stream, batch.number)
        if not self._record(session):
            return PartsResult(applied=False)
        cutoff = share.opened.cutoff
        kept = Retention.read(session)
        before = kept.newest
        since = max(cutoff, kept.removed)
        cache.enter(kept.turns)
        days = last_days(batch, newer(before, _newest_minute(batch)))
        stored = store_entities(session, batch.entities, days, cache, cutoff=cutoff, since=since)
        self.entities = stored.known
        turn = batch.number % COMPACT_EVERY
        keys, counters = stored.keys, Counter(batch.counters)
        merged = merge_deltas(
            session, batch, share.layout, keys, cutoff, turn, counters, before or 0
        )
        counters.update(store_slow_calls(session, batch, keys, cutoff, self._top_n))
        # What was counted belongs to all of them together, and is kept with the first.
        counted = [[*key, n] for key, n in sorted(counters.items()) if n]
        session.run(
            "UPDATE part_commit SET merged = ?, n_rows = ?, counters = ? "
            "WHERE stream = ? AND batch = ? AND part = ?",
            (
                *(merged, json.dumps(dict(share.rows)), json.dumps(counted)),
                *(batch.stream, batch.number, min(share.parts)),
            ),
        )
        return PartsResult(True, merged)

    def _record(self, session: Session) -> bool:
        """Record the parts; False if they are recorded already."""
        batch, parts = self._batch, sorted(self._share.parts)
        values = ", ".join(["(?, ?, ?, 0, '{}', '[]')"] * len(parts))
        # In order, and waiting for another attempt of the same task to end.
        rows = session.rows(
            "INSERT INTO part_commit (stream, batch, part, merged, n_rows, counters) "
            f"VALUES {values} ON CONFLICT (stream, batch, part) DO NOTHING RETURNING part",
            [value for part in parts for value in (batch.stream, batch.number, part)],
        )
        recorded = {part for (part,) in rows}
        if recorded and len(recorded) < len(parts):
            before = tuple(part for part in parts if part not in recorded)
            raise PartConflictError(batch.stream, batch.number, before, tuple(sorted(recorded)))
        return bool(recorded)


def _newest_minute(batch: Batch) -> int | None:
    minutes = [
        bounds(deltas.buckets)[1]
        for deltas in batch.deltas
        if deltas.grain is Grain.MINUTE and len(deltas.buckets)
    ]
    minutes += [call.minute for call in batch.topn]
    return max(minutes, default=None)


@dataclass(frozen=True, slots=True)
class ClosedParts:
    """What the parts of a batch have changed altogether."""

    merged: int
    counters: Counter[CounterKey]


def close(session: Session, batch: Batch) -> ClosedParts:
    """Check that all parts of a batch are committed, and forget them; the stream is locked."""
    parts = batch.parts or 0
    rows = session.rows(
        "SELECT part, merged, n_rows, counters FROM part_commit WHERE stream = ? AND batch = ?",
        (batch.stream, batch.number),
    )
    recorded = {part for part, *_ in rows}
    every = set(range(parts))
    if recorded != every:
        missing, unknown = sorted(every - recorded), sorted(recorded - every)
        raise PartsMissingError(batch.stream, batch.number, parts, tuple(missing), tuple(unknown))
    counted: Counter[str] = Counter()
    counters: Counter[CounterKey] = Counter()
    for _, _, row_counts, expired in rows:
        counted.update(json.loads(row_counts))
        for what, source, reason, n in json.loads(expired):
            counters[what, source, reason] += n
    expected = Counter(batch.expected_rows)
    if +counted != +expected:
        raise RowsMismatchError(batch.stream, batch.number, dict(expected), dict(counted))
    session.run("DELETE FROM part_commit WHERE stream = ?", (batch.stream,))
    return ClosedParts(sum(merged for _, merged, *_ in rows), counters)
