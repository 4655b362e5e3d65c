"""Registering metrics: which metric gets which columns.

Every version of a metric has columns of its own, so adding or removing a metric never disturbs
another. A metric belongs to the streams that compute it, and is retired with the last of them: no
stream retires or changes what another one computes. The column of a metric that was retired so long
ago that all its values have expired is given to the next metric with the same kind of cell.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

from batchmill.oal import Metric
from batchmill.sources import Grain, UnknownNameError
from batchmill.store.batch import Layout
from batchmill.store.buckets import day_of
from batchmill.store.errors import MetricConflictError, TooManyColumnsError
from batchmill.store.results import StoredMetric
from batchmill.store.sql.retention import Retention
from batchmill.store.sql.schema import (
    Column,
    add_columns,
    check_source_name,
    clear_columns,
    column_name,
    create_tables,
)
from batchmill.store.sql.session import Session
from batchmill.store.states import Cell, Plan

Version: TypeAlias = tuple[str, int]
"""A metric's name, and the version of it."""

KEY_COLUMNS = 2
"""Every table has a bucket and an entity beside its cells."""
METRIC_COLUMNS = (
    "name, version, source, definition, function, decorator, labelled, plan, cells, "
    "since_minute, active"
)


@dataclass(frozen=True, slots=True)
class Registry:
    """What is registered in a store."""

    metrics: list[StoredMetric] = field(default_factory=list)
    """All versions of all metrics."""
    columns: Mapping[str, list[Column]] = field(default_factory=dict)
    """All columns by source."""
    retired_minutes: Mapping[Version, int] = field(default_factory=dict)
    """The newest minute at each retirement."""
    owners: Mapping[Version, frozenset[str]] = field(default_factory=dict)
    """The streams that compute each metric."""


@dataclass(frozen=True, slots=True)
class NewVersion:
    """A metric that gets columns."""

    metric: Metric
    version: int
    plan: Plan
    columns: tuple[int, ...]


@dataclass(slots=True)
class Allotment:
    """What registering a set of metrics changes."""

    kept: dict[str, StoredMetric] = field(default_factory=dict)
    """Versions that go on as they are, by name."""
    added: list[NewVersion] = field(default_factory=list)
    retired: list[StoredMetric] = field(default_factory=list)
    created: dict[str, list[Column]] = field(default_factory=dict)
    """By source: columns to add to its tables."""
    reused: dict[str, list[Column]] = field(default_factory=dict)
    """By source: columns that exist and get a new owner."""
    emptied: set[Version] = field(default_factory=set)
    """Metrics that lost their columns."""

    def layout(self) -> Layout:
        """Where the cells of each metric go from now on."""
        columns = {name: metric.columns for name, metric in self.kept.items()}
        owners = {
            (metric.source, column): (name, metric.version)
            for name, metric in self.kept.items()
            for column in metric.columns
        }
        for new in self.added:
            name = new.metric.name
            columns[name] = tuple(map(column_name, new.columns))
            owners |= {(new.metric.source, column): (name, new.version) for column in columns[name]}
        return Layout(columns, owners)

    def versions(self) -> list[Version]:
        """The metrics that the stream computes from now on, by name."""
        return sorted(
            [(name, metric.version) for name, metric in self.kept.items()]
            + [(new.metric.name, new.version) for new in self.added]
        )


def allot(
    metrics: Iterable[Metric],
    registry: Registry,
    *,
    cutoff: int,
    max_columns: int,
    retire: bool,
    stream: str = "",
) -> Allotment:
    """Decide what registering ``metrics`` for a stream changes; ``cutoff`` is the oldest day kept.

    A pure function: :func:`register` applies the result.
    """
    wanted = list(metrics)
    last_versions: dict[str, int] = {}
    active: dict[str, StoredMetric] = {}
    for known in registry.metrics:
        last_versions[known.name] = max(known.version, last_versions.get(known.name, 0))
        if known.active:
            active[known.name] = known
    result = Allotment()
    new: list[Metric] = []

    def owners(metric: StoredMetric) -> frozenset[str]:
        return registry.owners.get((metric.name, metric.version), frozenset())

    for metric in wanted:
        before = active.get(metric.name)
        if before and before.definition == metric.text and before.plan == Plan.of(metric):
            result.kept[metric.name] = before
            continue
        new.append(metric)
        if before:
            others = owners(before) - {stream}
            conflict = bool(others) or not (retire or stream in owners(before))
            # An older batchmill may have kept the same definition in other cells.
            if conflict and before.definition != metric.text:
                raise MetricConflictError(
                    before.name, tuple(sorted(others)), before.definition, metric.text, retire
                )
            result.retired.append(before)
    if retire:
        names = {metric.name for metric in wanted}
        result.retired += [
            known
            for name, known in active.items()
            if name not in names and not owners(known) - {stream}
        ]
    _allot_columns(result, new, last_versions, registry, cutoff, max_columns)
    return result


def _allot_columns(
    result: Allotment,
    new: Iterable[Metric],
    last_versions: Mapping[str, int],
    registry: Registry,
    cutoff: int,
    max_columns: int,
) -> None:
    free = _free_columns(registry, cutoff)
    highest = {
        source: max((column.number for column in columns), default=0)
        for source, columns in registry.columns.items()
    }
    for metric in new:
        version = last_versions.get(metric.name, 0) + 1
        plan = Plan.of(metric)
        numbers = []
        for cell in plan.cells:
            spare = free.get((metric.source, cell))
            if spare:
                old = spare.pop(0)
                result.emptied.add((old.metric, old.version))
                number = old.number
                changed = result.reused
            else:
                number = highest[metric.source] = highest.get(metric.source, 0) + 1
                changed = result.created
            changed.setdefault(metric.source, []).append(Column(number, cell, metric.name, version))
            numbers.append(number)
        result.added.append(NewVersion(metric, version, plan, tuple(numbers)))
    for source, number in highest.items():
        if number + KEY_COLUMNS > max_columns:
            raise TooManyColumnsError(source, number + KEY_COLUMNS, max_columns)


def _free_columns(registry: Registry, cutoff: int) -> dict[tuple[str, Cell], list[Column]]:
    free: dict[tuple[str, Cell], list[Column]] = {}
    for source, columns in registry.columns.items():
        for column in sorted(columns, key=lambda column: column.number):
            minute = registry.retired_minutes.get((column.metric, column.version))
            # Nothing was written to it after the day on which its metric was retired.
            if minute is not None and day_of(Grain.MINUTE, minute) < cutoff:
                free.setdefault((source, column.cell), []).append(column)
    return free


def register(
    session: Session,
    metrics: Iterable[Metric],
    *,
    retire: bool,
    stream: str,
    has_writer: Callable[[str], bool],
) -> Layout:
    """Give each metric its columns, in the transaction that is open.

    ``has_writer`` says whether a stream has a live writer now.
    """
    # Waits for parts that are being committed; later ones see what is changed here.
    session.rows(f"SELECT value FROM meta WHERE key = 'columns' {session.dialect.for_update}")
    gone = _gone_streams(session, stream, has_writer)
    registry = _read_registry(session, gone)
    kept = Retention.read(session)
    result = allot(
        metrics,
        registry,
        cutoff=kept.removed,
        max_columns=session.dialect.max_columns,
        retire=retire,
        stream=stream,
    )
    sources = {new.metric.source for new in result.added} | set(registry.columns)
    for source in sorted(sources):
        check_source_name(session.dialect, source, sources)
    for source, created in result.created.items():
        if source in registry.columns:
            add_columns(session, source, created)
        else:
            create_tables(session, source, created)
        session.run_many(
            "INSERT INTO metric_column (source, number, cell, metric, version) "
            "VALUES (?, ?, ?, ?, ?)",
            [(source, new.number, new.cell.value, new.metric, new.version) for new in created],
        )
    for source, reused in result.reused.items():
        clear_columns(session, source, reused)
        session.run_many(
            "UPDATE metric_column SET metric = ?, version = ? WHERE source = ? AND number = ?",
            [(column.metric, column.version, source, column.number) for column in reused],
        )
    # A metric that lost its columns, even one of several, cannot be read any more.
    session.run_many(
        "UPDATE metric SET cells = '[]' WHERE name = ? AND version = ?", sorted(result.emptied)
    )
    session.run_many(
        "UPDATE metric SET active = 0, retired_minute = ? WHERE name = ? AND version = ?",
        [(kept.last_minute or 0, metric.name, metric.version) for metric in result.retired],
    )
    session.run_many(
        f"INSERT INTO metric ({METRIC_COLUMNS}) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
        [
            (
                *(new.metric.name, new.version, new.metric.source, new.metric.text),
                *(new.metric.function, new.metric.decorator, int(new.metric.labelled)),
                *(new.plan.dump(), json.dumps(new.columns), kept.newest, 1),
            )
            for new in result.added
        ],
    )
    _write_owners(session, stream, result.versions(), retire)
    if retire:
        session.run_many(
            "DELETE FROM metric_owner WHERE stream = ? AND lasting = 0",
            [(name,) for name in sorted(gone)],
        )
    session.run_many(
        "DELETE FROM metric_owner WHERE name = ? AND version = ?",
        [(metric.name, metric.version) for metric in result.retired],
    )
    return result.layout()


def _gone_streams(session: Session, stream: str, has_writer: Callable[[str], bool]) -> set[str]:
    """The streams that wrote for a while only, as a backfill does, and have ended."""
    rows = session.rows(
        "SELECT DISTINCT stream FROM metric_owner WHERE lasting = 0 AND stream <> ?", (stream,)
    )
    return {name for (name,) in rows if not has_writer(name)}


def _read_registry(session: Session, gone: set[str]) -> Registry:
    owners: dict[Version, frozenset[str]] = {}
    for name, version, stream, lasting in session.rows(
        "SELECT name, version, stream, lasting FROM metric_owner"
    ):
        if lasting or stream not in gone:
            owners[name, version] = owners.get((name, version), frozenset()) | {stream}
    retired = session.rows("SELECT name, version, retired_minute FROM metric WHERE active = 0")
    return Registry(
        all_metrics(session),
        all_columns(session),
        {(name, version): minute for name, version, minute in retired},
        owners,
    )


def _write_owners(session: Session, stream: str, versions: list[Version], retire: bool) -> None:
    """Record what a stream computes; one that retires nothing writes for a while only."""
    if retire:
        session.run("DELETE FROM metric_owner WHERE stream = ?", (stream,))
    session.run_many(
        "INSERT INTO metric_owner (name, version, stream, lasting) VALUES (?, ?, ?, ?) "
        "ON CONFLICT (name, version, stream) DO NOTHING",
        [(*version, stream, int(retire)) for version in versions],
    )


def find_metric(session: Session, metric: str | StoredMetric) -> StoredMetric:
    """A metric as it is now.

    Of a name, the active version, else the last one that can be read. Of a metric, that version:
    its columns may have been given to another metric since it was read.
    """
    stored = all_metrics(session)
    if isinstance(metric, StoredMetric):
        version = (metric.name, metric.version)
        versions = [known for known in stored if (known.name, known.version) == version]
    else:
        stored = [known for known in stored if known.columns]
        versions = [known for known in stored if known.name == metric]
    if not versions:
        name = metric if isinstance(metric, str) else metric.name
        raise UnknownNameError("metric", name, tuple(dict.fromkeys(known.name for known in stored)))
    return max(versions, key=lambda known: (known.active, known.version))


def all_metrics(session: Session) -> list[StoredMetric]:
    """Every version of every metric, by name and version."""
    rows = session.rows(f"SELECT {METRIC_COLUMNS} FROM metric ORDER BY name, version")
    return [
        StoredMetric(
            *(name, version, source, text, function, decorator),
            tuple(map(column_name, json.loads(cells))),
            *(since, bool(on), bool(labels), Plan.load(plan)),
        )
        for name, version, source, text, function, decorator, labels, plan, cells, since, on in rows
    ]


def all_columns(session: Session) -> dict[str, list[Column]]:
    """Every column of every source's tables."""
    columns: dict[str, list[Column]] = {}
    for source, number, cell, metric, version in session.rows(
        "SELECT source, number, cell, metric, version FROM metric_column ORDER BY source, number"
    ):
        columns.setdefault(source, []).append(Column(number, Cell(cell), metric, version))
    return columns
