"""Commits a batch to a stream.

A stream is claimed by one writer at a time, under a checkpoint. The checkpoint says which input was
read, the store what came of it. A batch is committed first and marked done in the checkpoint after
that, so the store may be one batch ahead: that batch comes again, and is known by its number. It
must have been planned, though: only then does the same number stand for the same input. Any other
distance means that one of the two was restored from an older copy, or swapped; going on would lose
rows or count them twice.

A commit runs in a transaction that no other writer's overlaps (SQLite has one writer; in PostgreSQL
the row that holds the newest minute is locked first), so what it reads stays true until its end.
"""

from __future__ import annotations

import enum
import json
import os
import socket
import time
import uuid
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import compress
from typing import Any

from batchmill.sources import Grain, UnknownNameError
from batchmill.store.batch import (
    EXPIRED,
    TOO_OLD,
    Batch,
    Carry,
    Claim,
    CommitResult,
    CounterKey,
    Deltas,
    Layout,
)
from batchmill.store.buckets import cutoff_day, day_of, day_start, newer
from batchmill.store.errors import (
    BatchGapError,
    CheckpointMismatchError,
    FencedError,
    LayoutChangedError,
    StaleCarryError,
)
from batchmill.store.results import StreamInfo
from batchmill.store.sql import outbox, topn
from batchmill.store.sql.entities import EntityCache, EntityId, Known, store_entities
from batchmill.store.sql.registry import all_columns
from batchmill.store.sql.schema import Column
from batchmill.store.sql.session import (
    COMPACT_EVERY,
    Dialect,
    Session,
    StreamEpoch,
    Upsert,
    UpsertRows,
    merge_cells,
    quote,
    read_meta,
    sum_expressions,
    table_name,
    write_meta,
)


class Exempt(enum.Enum):
    """Instead of the newest planned batch, for a stream that plans none."""

    NO_LOG = "no log"
    """There is no log of plans: the input of batch 0 is given by hand and is always the same."""


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A checkpoint as its stream's writer found it."""

    id: str
    fresh: bool
    """Whether it was made just now."""
    committed: int | None
    """The last batch that it has marked done; None: none."""
    planned: int | Exempt | None = Exempt.NO_LOG
    """The newest batch whose input it has planned; None: none."""


@dataclass(frozen=True, slots=True)
class StreamState:
    """What the store knows of a stream."""

    checkpoint_id: str
    epoch: int
    last_batch: int | None
    token: str | None
    """Identifies the last commit: it shows whether that succeeded though its answer was lost."""


def claim(session: Session, stream: str, checkpoint: Checkpoint) -> Claim:
    """Start a new epoch of a stream, whose lock is held; in the transaction that is open."""
    known = stream_state(session, stream)
    check_claim(stream, known, checkpoint)
    epoch = known.epoch + 1 if known else 1
    since = datetime.now(UTC).isoformat(timespec="seconds")
    holder = json.dumps({"host": socket.gethostname(), "pid": os.getpid(), "since": since})
    if known:
        session.run(
            "UPDATE stream SET epoch = ?, holder = ? WHERE name = ?", (epoch, holder, stream)
        )
    else:
        session.run(
            "INSERT INTO stream (name, checkpoint_id, epoch, holder) VALUES (?, ?, ?, ?)",
            (stream, checkpoint.id, epoch, holder),
        )
    carry = session.rows(
        "SELECT path, batch, arrived_ms, n_rows FROM carry WHERE stream = ? "
        "ORDER BY arrived_ms, path",
        (stream,),
    )
    last = known.last_batch if known else None
    return Claim(epoch, last, tuple(Carry(*row) for row in carry))


def check_claim(stream: str, known: StreamState | None, checkpoint: Checkpoint) -> None:
    """Raise :class:`CheckpointMismatchError` unless the checkpoint matches what the store knows."""
    if known is None:
        if checkpoint.fresh:
            return
        raise CheckpointMismatchError(
            stream,
            "unknown",
            f"the checkpoint {checkpoint.id} was used before, but the store has never seen it, so "
            "the store was deleted or is another one",
            "use the store that was written with this checkpoint; or, to start again from nothing, "
            "use an empty folder as the checkpoint, and all input that is still there is read "
            "again",
        )
    if known.checkpoint_id != checkpoint.id:
        raise CheckpointMismatchError(
            stream,
            "other",
            f"the store has data of another checkpoint ({known.checkpoint_id}), and reading the "
            f"input again with {checkpoint.id} would count it twice",
            "run with that checkpoint; or use a new store; or give this run another stream name, "
            "if it reads other input",
        )
    ahead = _ordinal(known.last_batch) - _ordinal(checkpoint.committed)
    if ahead == 0 or (ahead == 1 and checkpoint.planned in (known.last_batch, Exempt.NO_LOG)):
        return
    where = (
        f"the store is at batch {_number(known.last_batch)}, "
        f"the checkpoint at {_number(checkpoint.committed)}"
    )
    start_again = "or start again with an empty store and an empty checkpoint folder"
    if ahead == 1:
        raise CheckpointMismatchError(
            stream,
            "unplanned",
            f"{where}, and the newest batch that it has planned is {_number(checkpoint.planned)}: "
            "the checkpoint was restored from an older copy or emptied, and new input would be "
            f"taken for batch {known.last_batch}, which is in the store, and skipped",
            f"restore the store's copy of the same time, too; {start_again}",
        )
    if ahead < 0:
        raise CheckpointMismatchError(
            stream,
            "behind",
            f"{where}: the store was restored from an older copy, and batches are missing in it",
            f"restore the checkpoint's copy of the same time, too; {start_again}",
        )
    raise CheckpointMismatchError(
        stream,
        "ahead",
        f"{where}: the checkpoint was restored from an older copy, and what came since would be "
        "cut into other batches",
        f"restore the store's copy of the same time, too; {start_again}",
    )


def is_replay(
    stream: str, known: StreamState | None, epoch: int, number: int | None, token: str
) -> bool:
    """Whether that commit is in the store already.

    ``number`` is None for a commit without one. Raises :class:`FencedError` if the stream belongs
    to another writer, :class:`BatchGapError` if a batch in between is missing.
    """
    if known is None or known.epoch != epoch:
        raise FencedError(stream, epoch, None if known is None else known.epoch)
    if known.token == token:
        return True
    if number is None:
        return False
    expected = _ordinal(known.last_batch) + 1
    if number > expected:
        raise BatchGapError(stream, number, expected)
    return number < expected


def _ordinal(number: int | None) -> int:
    return -1 if number is None else number


def _number(number: int | Exempt | None) -> str:
    return "none" if number is None else str(number)


def stream_state(session: Session, stream: str) -> StreamState | None:
    """What is known of a stream."""
    rows = session.rows(
        "SELECT checkpoint_id, epoch, last_batch, token FROM stream WHERE name = ?", (stream,)
    )
    return StreamState(*rows[0]) if rows else None


def stream_holder(session: Session, stream: str) -> dict[str, Any]:
    """The process that claimed a stream last, as far as it is known."""
    rows = session.rows("SELECT holder FROM stream WHERE name = ?", (stream,))
    holder: dict[str, Any] = json.loads(rows[0][0]) if rows and rows[0][0] else {}
    return holder


def all_streams(session: Session) -> list[StreamInfo]:
    """The progress of each stream, by name."""
    rows = session.rows(
        "SELECT name, checkpoint_id, epoch, last_batch, committed_at FROM stream ORDER BY name"
    )
    return [StreamInfo(*row) for row in rows]


def read_newest_minute(session: Session) -> int | None:
    """The newest minute that was ever committed."""
    value = read_meta(session, "newest_minute")
    return int(value) if value else None


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
        known = stream_state(session, batch.stream)
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
        expired = _expired_rows(batch, cutoff)
        for source, rows in expired.items():
            counters[EXPIRED, source, TOO_OLD] += rows
        turn = (known.last_batch or 0 if known and batch.settle else batch.number) % COMPACT_EVERY
        merged = merge_deltas(session, batch, self._layout, stored.keys, cutoff, turn)
        self._store_slow_calls(session, stored.keys, cutoff, counters)
        self._update_carry(session)
        if newest is not None and newest != before:
            write_meta(session, "newest_minute", newest)
        dropped: tuple[str, ...] = ()
        if batch.outgoing is not None:
            dropped = outbox.add_file(session, batch.stream, batch.outgoing, counters)
        add_counters(session, counters)
        self._record(session, number)
        total = sum(expired.values())
        self._result = CommitResult(True, merged, total, removed, dict(counters), dropped)
        return self._result

    def _store_slow_calls(
        self, session: Session, keys: Sequence[int], cutoff: int, counters: Counter[CounterKey]
    ) -> None:
        slowest = topn.select_slowest(self._batch.topn, keys, self._top_n, cutoff)
        topn.store_topn(session, slowest.records, self._top_n)
        for stream, rows in slowest.expired.items():
            counters[topn.EXPIRED_TOPN, stream, TOO_OLD] += rows
        expired = topn.store_statements(session, self._batch.statements, keys, cutoff)
        for stream, rows in expired.items():
            counters[topn.EXPIRED_STATEMENTS, stream, TOO_OLD] += rows

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


def last_days(batch: Batch, newest: int | None) -> list[int]:
    """The last day that each entity is seen on; the newest day where no row mentions it."""
    days: dict[int, int] = {}

    def see(entity: int, day: int) -> None:
        if day > days.get(entity, -1):
            days[entity] = day

    for deltas in batch.deltas:
        if not deltas.buckets:
            continue
        last = day_of(deltas.grain, max(deltas.buckets))
        if day_of(deltas.grain, min(deltas.buckets)) == last:  # as nearly always
            for entity in set(deltas.entities):
                see(entity, last)
        else:
            for bucket, entity in zip(deltas.buckets, deltas.entities, strict=True):
                see(entity, day_of(deltas.grain, bucket))
    for call in batch.topn:
        see(call.entity, day_of(Grain.MINUTE, call.minute))
    for run in batch.statements:
        see(run.entity, day_of(Grain.MINUTE, run.minute))
    today = day_of(Grain.MINUTE, newest or 0)
    return [days.get(number, today) for number in range(len(batch.entities))]


def merge_deltas(
    session: Session,
    batch: Batch,
    layout: Layout | None,
    keys: Sequence[int],
    cutoff: int,
    turn: int,
) -> int:
    """Merge the rows that are not too old; how many those were."""
    if not batch.deltas:
        return 0
    columns = {
        source: {column.name: column for column in listed}
        for source, listed in all_columns(session).items()
    }
    parts: list[UpsertRows] = []
    for deltas in sorted(batch.deltas, key=lambda deltas: (deltas.source, deltas.grain.minutes)):
        known = columns.get(deltas.source)
        if known is None:
            raise UnknownNameError("registered source", deltas.source, tuple(columns))
        _check_columns(deltas, known, layout)
        part = _upsert_of(session.dialect, deltas, known, keys, cutoff, turn)
        if len(part):
            parts.append(part)
    session.upsert_all(parts, StreamEpoch(batch.stream, batch.epoch))
    return sum(map(len, parts))


def _check_columns(deltas: Deltas, known: Mapping[str, Column], layout: Layout | None) -> None:
    """Raise unless every column exists, and still belongs to the metric it was registered for."""
    for name in deltas.columns:
        column = known.get(name)
        if column is None:
            raise UnknownNameError(f"column of {deltas.source}", name, tuple(known))
        if layout is not None:
            owner = layout.owners.get((deltas.source, name))
            if owner != (column.metric, column.version):
                raise LayoutChangedError(deltas.source, name, column.metric)


def _upsert_of(
    dialect: Dialect,
    deltas: Deltas,
    known: Mapping[str, Column],
    keys: Sequence[int],
    cutoff: int,
    turn: int,
) -> UpsertRows:
    """The rows that are not too old, and the upsert that merges them."""
    entities = [keys[index] for index in deltas.entities]
    lists: list[Sequence[Any]] = [deltas.buckets, entities, *deltas.cells.values()]
    first = day_start(deltas.grain, cutoff)
    if deltas.buckets and min(deltas.buckets) < first:
        kept = [bucket >= first for bucket in deltas.buckets]
        lists = [list(compress(values, kept)) for values in lists]
    sources: tuple[int, ...] = ()
    if deltas.shared:
        places = {name: place for place, name in enumerate(deltas.cells, 2)}
        sources = (*range(len(lists)), *(places[name] for name in deltas.shared.values()))
    table = table_name(deltas.grain, deltas.source)
    cells = tuple(known[name].cell for name in deltas.columns)
    return UpsertRows(merge_cells(dialect, table, deltas.columns, cells, turn, sources), lists)


def _remove_before(session: Session, cutoff: int) -> int:
    """Remove everything of days before ``cutoff``; how many rows of metrics and TopN that was.

    Entities are removed with their last row: their last day is never before that of a row.
    """
    session.run(
        "DELETE FROM entity_layer WHERE entity IN (SELECT key FROM entity WHERE last_day < ?)",
        (cutoff,),
    )
    session.run("DELETE FROM entity WHERE last_day < ?", (cutoff,))
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
            rows = sum(day_of(deltas.grain, bucket) < cutoff for bucket in deltas.buckets)
            if rows:
                expired[deltas.source] += rows
    return expired
