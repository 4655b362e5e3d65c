"""The outbox: which files of changes wait for exporters, and how far each exporter has come.

A file is named by the commit whose changes it holds, in the same transaction. It goes when every
exporter of its place has passed it. Where they do not keep up, the oldest go, and what an exporter
has not sent of them is counted. While no exporter has ever come, files wait for the first.

A *place* is a folder of files; a store that several pipelines write has several.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator, Mapping, Sequence

from batchmill.oal import Value
from batchmill.sources import Grain, UnknownNameError
from batchmill.store.sql.entities import CHUNK, fitted
from batchmill.store.sql.merging import quoted, table_name
from batchmill.store.sql.register import all_metrics
from batchmill.store.sql.session import Session
from batchmill.store.types import CounterKey, Outgoing
from batchmill.store.views import ExportPosition, OutboxDepth, OutboxFile, StoredMetric

DROPPED = "export dropped"
"""The counter of rows that an exporter never sent; its source is the exporter."""
FULL = "outbox full"
LEFT = "exporter forgotten"
NOBODY = "(no exporter)"
"""Stands for the exporter where there is none."""
BUCKETS = 200
"""How many buckets are asked for at a time, of :data:`CHUNK` entities."""


def put(
    session: Session, stream: str, new: Outgoing, counters: dict[CounterKey, int]
) -> tuple[str, ...]:
    """Name a file, and make room for it; the paths of files that had to go.

    What is dropped by that is added to ``counters``, which the caller stores.
    """
    ((last,),) = session.rows("SELECT value FROM meta WHERE key = 'outbox_seq'")
    seq = int(last) + 1
    # Counted here, not by the table: a number must not come back when the last file has gone.
    session.run("UPDATE meta SET value = ? WHERE key = 'outbox_seq'", (str(seq),))
    session.run(
        "INSERT INTO outbox (seq, place, stream, path, n_rows, bytes, committed_ms) "
        "VALUES (?, ?, ?, ?, ?, ?, ?)",
        (seq, new.place, stream, new.path, new.rows, new.bytes, time.time_ns() // 1_000_000),
    )
    ((files, size),) = session.rows(
        "SELECT count(*), sum(bytes) FROM outbox WHERE place = ?", (new.place,)
    )
    if files <= new.max_files and size <= new.max_bytes:
        return ()
    return _make_room(session, new, seq, int(files), int(size), counters)


def _make_room(
    session: Session,
    new: Outgoing,
    newest: int,
    files: int,
    size: int,
    counters: dict[CounterKey, int],
) -> tuple[str, ...]:
    positions = session.rows(
        "SELECT exporter, seq FROM export_position WHERE place = ?", (new.place,)
    )
    gone: list[str] = []
    until = 0
    for seq, path, rows, file_bytes in session.rows(
        "SELECT seq, path, n_rows, bytes FROM outbox WHERE place = ? AND seq < ? ORDER BY seq",
        (new.place, newest),
    ):
        if files <= new.max_files and size <= new.max_bytes:
            break
        files, size, until = files - 1, size - file_bytes, seq
        gone.append(path)
        behind = [exporter for exporter, position in positions if position < seq]
        for exporter in behind if positions else [NOBODY]:
            _count(counters, (DROPPED, exporter, FULL), rows)
    session.run("DELETE FROM outbox WHERE place = ? AND seq <= ?", (new.place, until))
    return tuple(gone)


def files_after(session: Session, place: str, after: int, limit: int) -> list[OutboxFile]:
    """The files behind a position, oldest first."""
    rows = session.rows(
        "SELECT seq, stream, path, n_rows, bytes, committed_ms FROM outbox "
        "WHERE place = ? AND seq > ? ORDER BY seq LIMIT ?",
        (place, after, limit),
    )
    return [OutboxFile(*row) for row in rows]


def depth_after(session: Session, place: str, after: int) -> OutboxDepth:
    """How much waits behind a position."""
    ((files, rows, size, oldest),) = session.rows(
        "SELECT count(*), sum(n_rows), sum(bytes), min(committed_ms) FROM outbox "
        "WHERE place = ? AND seq > ?",
        (place, after),
    )
    return OutboxDepth(files, int(rows or 0), int(size or 0), oldest)


def positions(session: Session, place: str | None) -> list[ExportPosition]:
    """How far exporters have come, by name."""
    rows = session.rows("SELECT exporter, place, seq FROM export_position ORDER BY exporter, place")
    return [ExportPosition(*row) for row in rows if place in (None, row[1])]


def join(session: Session, exporter: str, place: str) -> int:
    """Have files wait for an exporter from now on; the position it goes on from."""
    session.run(
        "INSERT INTO export_position (exporter, place, seq) VALUES (?, ?, 0) "
        "ON CONFLICT (exporter, place) DO NOTHING",
        (exporter, place),
    )
    return _position(session, exporter, place)


def advance(
    session: Session,
    exporter: str,
    place: str,
    sent: Sequence[tuple[int, int]],
    counters: dict[CounterKey, int],
) -> list[str]:
    """Note that an exporter is through with files, given as (seq, rows); the paths that are free.

    ``counters`` are added once, however often the call is repeated for the same files: they are
    emptied if the position is there already.
    """
    before = _position(session, exporter, place)
    news = [each for each in sent if each[0] > before]
    if not news:
        counters.clear()
        return []
    session.run(
        "UPDATE export_position SET seq = ? WHERE exporter = ? AND place = ?",
        (max(seq for seq, _ in news), exporter, place),
    )
    there = {
        seq
        for (seq,) in session.rows(
            "SELECT seq FROM outbox WHERE place = ? AND seq > ?", (place, before)
        )
    }
    for seq, rows in news:
        if seq not in there:  # it had to go while it was being sent, and was counted as dropped
            _count(counters, (DROPPED, exporter, FULL), -rows)
    return _free(session, place)


def leave(
    session: Session, exporter: str, place: str, counters: dict[CounterKey, int]
) -> list[str]:
    """Let no file wait for an exporter any more; the paths that are free."""
    position = _position(session, exporter, place)
    rows = depth_after(session, place, position).rows
    if rows:
        _count(counters, (DROPPED, exporter, LEFT), rows)
    session.run("DELETE FROM export_position WHERE exporter = ? AND place = ?", (exporter, place))
    if positions(session, place):
        return _free(session, place)
    return _remove(session, place, None)


def totals(
    session: Session, metrics: Sequence[StoredMetric], wanted: Mapping[int, Collection[str]]
) -> dict[tuple[int, str], list[Value]]:
    """The values of metrics of one source, by minute and entity id; see :meth:`Store.totals`."""
    known = {(each.name, each.version): each.columns for each in all_metrics(session)}
    # Its columns may have gone to another metric since it was read.
    there = [known.get((each.name, each.version)) == each.columns for each in metrics]
    columns = list(
        dict.fromkeys(
            name
            for each, usable in zip(metrics, there, strict=True)
            if usable
            for name in each.columns
        )
    )
    if not columns:
        return {}
    places = {name: number for number, name in enumerate(columns)}
    taken = [
        [places[name] for name in each.columns] if usable else None
        for each, usable in zip(metrics, there, strict=True)
    ]
    table = quoted(table_name(Grain.MINUTE, metrics[0].source))
    # As the store keeps them: a very long id is cut there.
    asked = {bucket: {fitted(id_): id_ for id_ in ids} for bucket, ids in wanted.items()}
    known_ids = _ids(session, {id_ for ids in asked.values() for id_ in ids})
    found: dict[tuple[int, str], list[Value]] = {}
    for buckets, keys in _portions(sorted(asked), sorted(known_ids)):
        # Both are in the primary key, in this order: a row is looked up, no bucket is read through.
        for bucket, key, *values in session.rows(
            f"SELECT bucket, entity{''.join(f', {name}' for name in columns)} FROM {table} "
            f"WHERE bucket IN ({_marks(buckets)}) AND entity IN ({_marks(keys)})",
            [*buckets, *keys],
        ):
            id_ = asked[bucket].get(known_ids[key])
            if id_ is not None:
                found[bucket, id_] = [
                    None if own is None else _value(metric, [values[place] for place in own])
                    for metric, own in zip(metrics, taken, strict=True)
                ]
    return found


def _ids(session: Session, ids: set[str]) -> dict[int, str]:
    """The ids of entities by key, those of other kinds included."""
    found: dict[int, str] = {}
    some = sorted(ids)
    for start in range(0, len(some), CHUNK):
        chunk = some[start : start + CHUNK]
        found |= dict(
            session.rows(f"SELECT key, id FROM entity WHERE id IN ({_marks(chunk)})", chunk)
        )
    return found


def _portions(
    buckets: Sequence[int], keys: Sequence[int]
) -> Iterator[tuple[Sequence[int], Sequence[int]]]:
    for first in range(0, len(buckets), BUCKETS):
        for start in range(0, len(keys), CHUNK):
            yield buckets[first : first + BUCKETS], keys[start : start + CHUNK]


def _marks(values: Sequence[object]) -> str:
    return ", ".join("?" * len(values))


def _value(metric: StoredMetric, cells: Sequence[object]) -> Value:
    return metric.plan.value(metric.plan.states(cells), Grain.MINUTE.minutes)


def _position(session: Session, exporter: str, place: str) -> int:
    rows = session.rows(
        "SELECT seq FROM export_position WHERE exporter = ? AND place = ?", (exporter, place)
    )
    if not rows:
        known = tuple(each.exporter for each in positions(session, place))
        raise UnknownNameError("exporter", exporter, known)
    return int(rows[0][0])


def _free(session: Session, place: str) -> list[str]:
    """Remove what every exporter has passed; there is at least one."""
    ((least,),) = session.rows("SELECT min(seq) FROM export_position WHERE place = ?", (place,))
    return _remove(session, place, least)


def _remove(session: Session, place: str, until: int | None) -> list[str]:
    where = "place = ?" if until is None else "place = ? AND seq <= ?"
    params = [place] if until is None else [place, until]
    paths = [path for (path,) in session.rows(f"SELECT path FROM outbox WHERE {where}", params)]
    if paths:
        session.run(f"DELETE FROM outbox WHERE {where}", params)
    return paths


def _count(counters: dict[CounterKey, int], key: CounterKey, n: int) -> None:
    counters[key] = counters.get(key, 0) + n
