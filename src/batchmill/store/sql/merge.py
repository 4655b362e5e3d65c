"""Merges what a batch, or some parts of one, adds to the tables.

In orders that are the same in every transaction, so that two cannot wait for each other: entities,
their layers, the tables by source and grain, statements, slow calls; inside each by key.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from batchmill.sources import Grain, UnknownNameError
from batchmill.store.batch import (
    OVERFLOW_LABELS,
    TOO_MANY_LABELS,
    TOO_OLD,
    Batch,
    CounterKey,
    Deltas,
    Layout,
)
from batchmill.store.buckets import bucket_of, day_of, day_start
from batchmill.store.columns import as_lists, bounds, distinct, place_rows, split_rows
from batchmill.store.errors import LayoutChangedError
from batchmill.store.sql import topn
from batchmill.store.sql.registry import all_columns
from batchmill.store.sql.schema import Column
from batchmill.store.sql.session import (
    LABEL_CELLS,
    Dialect,
    Session,
    UpsertRows,
    merge_cells,
    table_name,
)


def last_days(batch: Batch, newest: int | None) -> list[int]:
    """The last day that each entity is seen on; the newest day where no row mentions it."""
    days: dict[int, int] = {}

    def see(entity: int, day: int) -> None:
        if day > days.get(entity, -1):
            days[entity] = day

    for deltas in batch.deltas:
        if not len(deltas.buckets):
            continue
        first, last = (day_of(deltas.grain, bucket) for bucket in bounds(deltas.buckets))
        if first == last:  # as nearly always
            for entity in distinct(deltas.entities):
                see(entity, last)
        else:
            for bucket, entity in zip(*as_lists([deltas.buckets, deltas.entities]), strict=True):
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
    counters: Counter[CounterKey],
    newest: int | None = None,
) -> int:
    """Merge the rows that are not too old; how many those were.

    Rows after ``newest``, the newest minute in the store, are probably not there yet. What goes
    under the label ``overflow`` is added to ``counters``.
    """
    if not batch.deltas:
        return 0
    columns = {
        source: {column.name: column for column in listed}
        for source, listed in all_columns(session).items()
    }
    merged = 0
    parts: dict[str, list[UpsertRows]] = {}
    labelled = set()
    for deltas in sorted(batch.deltas, key=lambda deltas: (deltas.source, deltas.grain.minutes)):
        known = columns.get(deltas.source)
        if known is None:
            raise UnknownNameError("registered source", deltas.source, tuple(columns))
        _check_columns(deltas, known, layout)
        rows = _upsert_of(session.dialect, deltas, known, keys, cutoff, turn)
        of_source = parts.setdefault(deltas.source, [])
        if newest is not None:
            last = bucket_of(deltas.grain, newest)
            there, fresh = split_rows(rows.columns, last + 1)
            of_source.append(UpsertRows(rows.upsert, fresh, fresh=True))
            rows = UpsertRows(rows.upsert, there)
        of_source.append(rows)
        if any(known[name].cell in LABEL_CELLS for name in deltas.columns):
            labelled.add(deltas.source)
    for source, listed in parts.items():
        filled = [part for part in listed if len(part)]
        session.upsert_all(filled)
        merged += sum(map(len, filled))
        if source in labelled and (moved := session.take_moved_labels()):
            counters[OVERFLOW_LABELS, source, TOO_MANY_LABELS] += moved
    return merged


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
    columns = place_rows([deltas.buckets, deltas.entities, *deltas.cells.values()], keys)
    _, kept = split_rows(columns, day_start(deltas.grain, cutoff))
    sources: tuple[int, ...] = ()
    if deltas.shared:
        places = {name: place for place, name in enumerate(deltas.cells, 2)}
        sources = (*range(len(kept)), *(places[name] for name in deltas.shared.values()))
    table = table_name(deltas.grain, deltas.source)
    cells = tuple(known[name].cell for name in deltas.columns)
    return UpsertRows(merge_cells(dialect, table, deltas.columns, cells, turn, sources), kept)


def store_slow_calls(
    session: Session, batch: Batch, keys: Sequence[int], cutoff: int, top_n: int
) -> Counter[CounterKey]:
    """Store slow calls and statements; counts those that are too old."""
    counters: Counter[CounterKey] = Counter()
    expired = topn.store_statements(session, batch.statements, keys, cutoff)
    for stream, rows in expired.items():
        counters[topn.EXPIRED_STATEMENTS, stream, TOO_OLD] += rows
    slowest = topn.select_slowest(batch.topn, keys, top_n, cutoff)
    for stream, rows in slowest.expired.items():
        counters[topn.EXPIRED_TOPN, stream, TOO_OLD] += rows
    # Last: it takes locks that many transactions want.
    topn.store_topn(session, slowest.records, top_n)
    return counters
