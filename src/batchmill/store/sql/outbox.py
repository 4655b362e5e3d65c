"""The outbox: which files of changes wait for exporters, and the position of each exporter.

A file is listed by the commit whose changes it holds, in the same transaction. It is removed when
every exporter of its place has passed it. Where exporters do not keep up, the oldest files are
dropped, and the rows that an exporter has not sent are counted. Until the first exporter joins,
files wait for it.

A *place* is an outbox folder; a store that several pipelines write has several.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence

from batchmill.sources import UnknownNameError
from batchmill.store.batch import ChangeFile, CounterKey
from batchmill.store.results import ExportPosition, OutboxDepth, OutboxFile
from batchmill.store.sql.session import Condition, Session, read_meta, write_meta

DROPPED = "export dropped"
"""The counter of rows that an exporter never sent; its source is the exporter."""
FULL = "outbox full"
LEFT = "exporter forgotten"
NOBODY = "(no exporter)"
"""Stands for the exporter where there is none."""


def add_file(
    session: Session, stream: str, new: ChangeFile, counters: Counter[CounterKey]
) -> tuple[str, ...]:
    """List a file, and make room for it; the paths of the files that were dropped.

    Rows that are dropped are added to ``counters``, which the caller stores.
    """
    # Counted here, not by the table: a number must not come back when the last file was removed.
    seq = int(read_meta(session, "outbox_seq")) + 1
    write_meta(session, "outbox_seq", seq)
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
    positions = exporter_positions(session, new.place)
    dropped: list[str] = []
    until = 0
    for old, path, rows, file_bytes in session.rows(
        "SELECT seq, path, n_rows, bytes FROM outbox WHERE place = ? AND seq < ? ORDER BY seq",
        (new.place, seq),
    ):
        if files <= new.max_files and size <= new.max_bytes:
            break
        files, size, until = files - 1, size - file_bytes, old
        dropped.append(path)
        behind = [position.exporter for position in positions if position.seq < old]
        for exporter in behind if positions else [NOBODY]:
            counters[DROPPED, exporter, FULL] += rows
    session.run("DELETE FROM outbox WHERE place = ? AND seq <= ?", (new.place, until))
    return tuple(dropped)


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


def exporter_positions(session: Session, place: str | None) -> list[ExportPosition]:
    """The positions of exporters, by name; of one place, or of all."""
    rows = session.rows("SELECT exporter, place, seq FROM export_position ORDER BY exporter, place")
    positions = [ExportPosition(*row) for row in rows]
    return [position for position in positions if place in (None, position.place)]


def join(session: Session, exporter: str, place: str) -> int:
    """Let files wait for an exporter from now on; its position."""
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
    counters: Counter[CounterKey],
) -> list[str]:
    """Record that an exporter has passed files, given as (seq, rows); the paths to remove.

    ``counters`` are added once, however often the call is repeated for the same files: they are
    emptied if the exporter was there already.
    """
    before = _position(session, exporter, place)
    passed = {seq: rows for seq, rows in sent if seq > before}
    if not passed:
        counters.clear()
        return []
    session.run(
        "UPDATE export_position SET seq = ? WHERE exporter = ? AND place = ?",
        (max(passed), exporter, place),
    )
    listed = {
        seq
        for (seq,) in session.rows(
            "SELECT seq FROM outbox WHERE place = ? AND seq > ?", (place, before)
        )
    }
    for seq, rows in passed.items():
        if seq not in listed:  # dropped while it was being sent, and counted so: take that back
            counters[DROPPED, exporter, FULL] -= rows
    return _remove_passed(session, place)


def leave(session: Session, exporter: str, place: str, counters: Counter[CounterKey]) -> list[str]:
    """Let no file wait for an exporter any more; the paths to remove."""
    position = _position(session, exporter, place)
    rows = depth_after(session, place, position).rows
    if rows:
        counters[DROPPED, exporter, LEFT] += rows
    session.run("DELETE FROM export_position WHERE exporter = ? AND place = ?", (exporter, place))
    if exporter_positions(session, place):
        return _remove_passed(session, place)
    return _remove(session, Condition("place = ?", (place,)))


def _position(session: Session, exporter: str, place: str) -> int:
    positions = exporter_positions(session, place)
    for position in positions:
        if position.exporter == exporter:
            return position.seq
    raise UnknownNameError("exporter", exporter, tuple(known.exporter for known in positions))


def _remove_passed(session: Session, place: str) -> list[str]:
    """Remove what every exporter has passed; there is at least one."""
    ((least,),) = session.rows("SELECT min(seq) FROM export_position WHERE place = ?", (place,))
    return _remove(session, Condition("place = ? AND seq <= ?", (place, least)))


def _remove(session: Session, where: Condition) -> list[str]:
    rows = session.rows(f"SELECT path FROM outbox WHERE {where.sql}", where.params)
    if rows:
        session.run(f"DELETE FROM outbox WHERE {where.sql}", where.params)
    return [path for (path,) in rows]
