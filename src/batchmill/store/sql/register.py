"""Registering metrics: reads what is known, lets :mod:`.allot` decide, and does it."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable

from batchmill.oal import Metric
from batchmill.sources import UnknownNameError
from batchmill.store.cell import Cell
from batchmill.store.plan import Plan
from batchmill.store.sql.allot import Column, allot, column_name
from batchmill.store.sql.schema import add_columns, check_source_name, create_tables, empty_columns
from batchmill.store.sql.session import Row, Session
from batchmill.store.ttl import cutoff_day
from batchmill.store.types import Layout
from batchmill.store.views import StoredMetric

METRIC_COLUMNS = (
    "name, version, source, definition, function, decorator, labelled, plan, cells, "
    "since_minute, active"
)


def register(
    session: Session,
    metrics: Iterable[Metric],
    newest_minute: int | None,
    *,
    ttl_days: int,
    retire: bool,
    stream: str,
    alive: Callable[[str], bool],
) -> Layout:
    """Give each metric its columns, in the transaction that is open.

    ``alive`` tells whether a stream has a writer at this moment.
    """
    columns = all_columns(session)
    gone = _gone(session, stream, alive)
    result = allot(
        metrics,
        all_metrics(session),
        columns,
        _retired_minutes(session),
        cutoff=cutoff_day(newest_minute, ttl_days),
        most_columns=session.dialect.most_columns,
        retire=retire,
        stream=stream,
        owners=_owners(session, gone),
    )
    sources = {each.metric.source for each in result.added} | set(columns)
    for source in sorted(sources):
        check_source_name(session.dialect, source, sources)
    for source, created in result.created.items():
        if source in columns:
            add_columns(session, source, created)
        else:
            create_tables(session, source, created)
        session.run_many(
            "INSERT INTO metric_column (source, number, cell, metric, version) "
            "VALUES (?, ?, ?, ?, ?)",
            [(source, each.number, each.cell.value, each.metric, each.version) for each in created],
        )
    for source, reused in result.reused.items():
        empty_columns(session, source, reused)
        session.run_many(
            "UPDATE metric_column SET metric = ?, version = ? WHERE source = ? AND number = ?",
            [(each.metric, each.version, source, each.number) for each in reused],
        )
    # A metric whose columns went, even one of several, cannot be read any more.
    session.run_many(
        "UPDATE metric SET cells = '[]' WHERE name = ? AND version = ?", sorted(result.emptied)
    )
    session.run_many(
        "UPDATE metric SET active = 0, retired_minute = ? WHERE name = ? AND version = ?",
        [(newest_minute or 0, each.name, each.version) for each in result.retired],
    )
    session.run_many(
        f"INSERT INTO metric ({METRIC_COLUMNS}) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
        [
            (
                *(each.metric.name, each.version, each.metric.source, each.metric.text),
                *(each.metric.function, each.metric.decorator, int(each.metric.labelled)),
                *(each.plan.dump(), json.dumps(each.columns), newest_minute, 1),
            )
            for each in result.added
        ],
    )
    layout = {name: known.columns for name, known in result.kept.items()}
    versions = {name: (known.source, known.version) for name, known in result.kept.items()}
    for each in result.added:
        layout[each.metric.name] = tuple(map(column_name, each.columns))
        versions[each.metric.name] = (each.metric.source, each.version)
    _own(session, stream, {name: version for name, (_, version) in versions.items()}, retire)
    if retire:
        session.run_many(
            "DELETE FROM metric_owner WHERE stream = ? AND lasting = 0",
            [(each,) for each in sorted(gone)],
        )
    session.run_many(
        "DELETE FROM metric_owner WHERE name = ? AND version = ?",
        [(each.name, each.version) for each in result.retired],
    )
    owners = {
        (source, column): (name, version)
        for name, (source, version) in versions.items()
        for column in layout[name]
    }
    return Layout(layout, owners)


def _gone(session: Session, stream: str, alive: Callable[[str], bool]) -> set[str]:
    """The streams that were to write for a while, as a backfill does, and do so no more."""
    rows = session.rows(
        "SELECT DISTINCT stream FROM metric_owner WHERE lasting = 0 AND stream <> ?", (stream,)
    )
    return {each for (each,) in rows if not alive(each)}


def _owners(session: Session, gone: set[str]) -> dict[tuple[str, int], frozenset[str]]:
    found: dict[tuple[str, int], frozenset[str]] = {}
    for name, version, stream, lasting in session.rows(
        "SELECT name, version, stream, lasting FROM metric_owner"
    ):
        if lasting or stream not in gone:
            found[name, version] = found.get((name, version), frozenset()) | {stream}
    return found


def _own(session: Session, stream: str, versions: dict[str, int], retire: bool) -> None:
    """Note what a stream computes; whoever retires nothing is there for a while only."""
    if retire:
        session.run("DELETE FROM metric_owner WHERE stream = ?", (stream,))
    session.run_many(
        "INSERT INTO metric_owner (name, version, stream, lasting) VALUES (?, ?, ?, ?) "
        "ON CONFLICT (name, version, stream) DO NOTHING",
        [(name, version, stream, int(retire)) for name, version in sorted(versions.items())],
    )


def looked_up(session: Session, metric: StoredMetric) -> StoredMetric:
    """A metric as it is now: its columns may have gone to another one since it was read."""
    known = all_metrics(session)
    for each in known:
        if (each.name, each.version) == (metric.name, metric.version):
            return each
    raise UnknownNameError("metric", metric.name, tuple(dict.fromkeys(e.name for e in known)))


def all_metrics(session: Session) -> list[StoredMetric]:
    """Every version of every metric, by name and version."""
    return [
        _stored(row)
        for row in session.rows(f"SELECT {METRIC_COLUMNS} FROM metric ORDER BY name, version")
    ]


def all_columns(session: Session) -> dict[str, list[Column]]:
    """Every column of every source's tables."""
    found: dict[str, list[Column]] = {}
    for source, number, cell, metric, version in session.rows(
        "SELECT source, number, cell, metric, version FROM metric_column ORDER BY source, number"
    ):
        found.setdefault(source, []).append(Column(number, Cell(cell), metric, version))
    return found


def _retired_minutes(session: Session) -> dict[tuple[str, int], int]:
    rows = session.rows("SELECT name, version, retired_minute FROM metric WHERE active = 0")
    return {(name, version): minute for name, version, minute in rows}


def _stored(row: Row) -> StoredMetric:
    name, version, source, definition, function, decorator, labelled, plan, cells, since, on = row
    return StoredMetric(
        name,
        version,
        source,
        definition,
        function,
        decorator,
        tuple(column_name(number) for number in json.loads(cells)),
        since,
        bool(on),
        bool(labelled),
        Plan.load(plan),
    )
