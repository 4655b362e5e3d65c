"""Reads the values and states of metrics."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypedDict, cast

from batchmill.errors import ConfigError
from batchmill.oal import Value as Final
from batchmill.sources import Grain
from batchmill.store.buckets import Moment, first_bucket, last_bucket, to_grain
from batchmill.store.reading.coverage import CoveredTime, per_minute
from batchmill.store.results import BucketValues, EntityValues, StateRow, StoredMetric, Value
from batchmill.store.sql.entities import fit_text, id_or_name, in_layer, read_layers
from batchmill.store.sql.registry import all_metrics, find_metric
from batchmill.store.sql.session import (
    MAX_ROWS,
    Condition,
    Row,
    Session,
    chunks,
    quote,
    rows_in,
    table_name,
)
from batchmill.store.sql.snapshot import Snapshot
from batchmill.store.states import Shape

PAGE = 10_000
"""How many values a page has."""
BUCKETS = 200
"""How many buckets one query of :func:`read_totals` lists."""
MAX_COUNTS = 100
"""How many counts of a source are added up: databases limit the depth of an expression."""
_CALENDAR = "a moment that the calendar has in UTC: between the years 1 and 9999"
_ORDER = ("t.bucket", "e.id", "t.entity")


class SelectionFields(TypedDict, total=False):
    """The fields of a :class:`Selection`, as keyword arguments."""

    grain: Grain | str
    entity: str | None
    start: Moment | None
    end: Moment | None
    layer: str | None
    limit: int | None
    covered: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """Which values of a metric to read."""

    grain: Grain = Grain.MINUTE
    """Also by its word, such as ``"hour"``."""
    entity: str | None = None
    """The id or the name of an entity; None: all."""
    start: Moment | None = None
    """The first bucket, of any grain, or a moment in it; None: from the oldest on."""
    end: Moment | None = None
    """The last bucket, included: the end of a day is its last minute. None: up to the newest."""
    layer: str | None = None
    limit: int | None = None
    """How many values at most: the newest."""
    covered: bool = False
    """Divide ``cpm()`` of an hour or a day by its minutes that have data, with three decimals.

    As the web UI and ``batchmill query`` do. Else by all its minutes, in whole numbers.
    """

    def __post_init__(self) -> None:
        object.__setattr__(self, "grain", to_grain(self.grain))
        if self.limit is not None and self.limit < 0:
            raise ConfigError("limit", self.limit, "a whole number of at least 0, or None for all")

    def condition(self) -> Condition:
        """As SQL over a table ``t``."""
        condition = Condition()
        if self.start is not None:
            start = _bound("start", first_bucket, self.grain, self.start)
            condition &= Condition("t.bucket >= ?", (start,))
        if self.end is not None:
            end = _bound("end", last_bucket, self.grain, self.end)
            condition &= Condition("t.bucket <= ?", (end,))
        if self.entity is not None:
            # By keys: they are in the primary key, names are not.
            named = id_or_name(self.entity)
            condition &= Condition(
                f"t.entity IN (SELECT key FROM entity WHERE {named.sql})", named.params
            )
        if self.layer is not None:
            condition &= in_layer("t.entity", self.layer)
        return condition


def narrowed(selection: Selection, fields: SelectionFields) -> Selection:
    """The selection with some of its fields changed."""
    return replace(selection, **cast("dict[str, Any]", fields))


def _bound(
    name: str, bucket_of: Callable[[Grain, Moment], int], grain: Grain, moment: Moment
) -> int:
    try:
        return bucket_of(grain, moment)
    except OverflowError:  # of another time zone, and beyond the calendar in UTC
        raise ConfigError(name, moment, _CALENDAR) from None


def read_states(
    session: Session, metric: str | StoredMetric, selection: Selection
) -> list[StateRow]:
    """The merged states by bucket and entity id; rows without any are left out."""
    stored = find_metric(session, metric)
    return _states(
        session, stored, selection, _newest(session, stored, selection, _has_state(stored))
    )


def read_values(session: Session, metric: str | StoredMetric, selection: Selection) -> list[Value]:
    """The final values by bucket and entity id; rows without one are left out."""
    stored = find_metric(session, metric)
    return _values(
        session, stored, selection, _newest(session, stored, selection, has_value(stored))
    )


@dataclass(frozen=True, slots=True)
class Position:
    """Where a row is in the order of reading."""

    bucket: int
    entity_id: str
    key: int


@dataclass(frozen=True, slots=True)
class Page:
    """Some values, oldest first."""

    values: list[Value]
    end: Position | None
    """Where the next page starts; None: this is the last one."""


def read_page(
    session: Session, metric: StoredMetric, selection: Selection, after: Position | None
) -> Page:
    """The next :data:`PAGE` values."""
    # Its columns may have been given to another metric since the page before.
    metric = find_metric(session, metric)
    where = Condition(has_value(metric)) & selection.condition()
    if after is not None:
        # The bucket alone as well: that is what there is an index for.
        where &= Condition(
            f"t.bucket >= ? AND ({', '.join(_ORDER)}) > (?, ?, ?)",
            (after.bucket, after.bucket, after.entity_id, after.key),
        )
    rows = _rows(session, metric, selection.grain, where, PAGE)
    end = Position(*rows[-1][: len(_ORDER)]) if len(rows) == PAGE else None
    return Page(_values(session, metric, selection, rows), end)


def by_pages(read: Callable[[Position | None], Page]) -> Iterator[Value]:
    """The values of one page after the other; a page is read when it is needed."""
    page = read(None)
    yield from page.values
    while page.end is not None:
        page = read(page.end)
        yield from page.values


def count_values(session: Session, metric: str | StoredMetric, selection: Selection) -> int:
    """How many values there are."""
    stored = find_metric(session, metric)
    where = Condition(has_value(stored)) & selection.condition()
    table = quote(table_name(selection.grain, stored.source))
    ((count,),) = session.rows(f"SELECT count(*) FROM {table} AS t WHERE {where.sql}", where.params)
    return int(count) if selection.limit is None else min(int(count), selection.limit)


def has_value(metric: StoredMetric) -> str:
    """The condition, as SQL over a table ``t``, that a row of a metric has a value.

    A function that divides by a number of rows has it as its last state, and no value without one.
    So the database can count values, and stop after the newest ones, without computing them here.
    """
    if metric.columns and metric.plan.shapes[-1] is Shape.COUNT:
        return f"t.{metric.columns[-1]} > 0"
    return _has_state(metric)


def _has_state(metric: StoredMetric) -> str:
    columns = " OR ".join(f"t.{name} IS NOT NULL" for name in metric.columns)
    return f"({columns})" if columns else "1 = 0"


def _newest(
    session: Session, metric: StoredMetric, selection: Selection, present: str
) -> list[Row]:
    """The newest rows up to the limit, oldest first; ``present``: there is something in a row."""
    where = Condition(present) & selection.condition()
    if selection.limit is None:
        return _rows(session, metric, selection.grain, where)
    return _rows(session, metric, selection.grain, where, selection.limit, "DESC")[::-1]


def _rows(
    session: Session,
    metric: StoredMetric,
    grain: Grain,
    where: Condition,
    limit: int | None = None,
    direction: str = "",
) -> list[Row]:
    """Rows of a metric: what :data:`_ORDER` lists, the entity's name, and the cells."""
    return session.rows(
        f"SELECT {', '.join(_ORDER)}, e.name{''.join(f', t.{name}' for name in metric.columns)} "
        f"FROM {quote(table_name(grain, metric.source))} AS t "
        f"JOIN entity AS e ON e.key = t.entity WHERE {where.sql} "
        f"ORDER BY {', '.join(f'{column} {direction}' for column in _ORDER)}"
        f"{'' if limit is None else ' LIMIT ?'}",
        [*where.params, *([] if limit is None else [min(limit, MAX_ROWS)])],
    )


def _states(
    session: Session, metric: StoredMetric, selection: Selection, rows: Sequence[Row]
) -> list[StateRow]:
    layers = read_layers(session, (row[2] for row in rows))
    return [
        StateRow(
            *(metric.name, selection.grain, bucket, id_, name, layers.get(key, frozenset())),
            metric.plan.states(cells),
        )
        for bucket, id_, key, name, *cells in rows
    ]


def _values(
    session: Session, metric: StoredMetric, selection: Selection, rows: Sequence[Row]
) -> list[Value]:
    divides = selection.covered and metric.function == "cpm" and selection.grain is not Grain.MINUTE
    covered = _covered(session, metric) if divides and rows else None
    values = []
    for row in _states(session, metric, selection, rows):
        value = metric.plan.value(row.states, row.grain.minutes)
        if covered is not None and value is not None:
            value = per_minute(row.states[0], covered.minutes_of(row.bucket))
        if value is not None:
            values.append(
                Value(
                    *(row.metric, row.grain, row.bucket, row.entity_id, row.entity_name),
                    *(row.layers, value),
                )
            )
    return values


def _covered(session: Session, metric: StoredMetric) -> CoveredTime:
    snapshot = Snapshot(session)
    return snapshot.covered(snapshot.metrics(), metric.source)


def read_bucket(session: Session, grain: Grain, bucket: int, most: int | None) -> BucketValues:
    """All values of a bucket, one query a source; of each source ``most`` entities, the busiest.

    Metric by metric it would take many queries, and a commit in between would show in some only.
    """
    active = [metric for metric in all_metrics(session) if metric.active and metric.columns]
    by_source: dict[str, list[StoredMetric]] = {}
    for metric in active:
        by_source.setdefault(metric.source, []).append(metric)
    entities: list[EntityValues] = []
    left_out: dict[str, int] = {}
    for _, metrics in sorted(by_source.items()):
        # One more than wanted, to know whether there are more.
        limit = MAX_ROWS if most is None else min(most + 1, MAX_ROWS)
        busiest = _read_busiest(session, grain, bucket, metrics, limit)
        entities += busiest[:most]
        if most is not None and len(busiest) > most:
            left_out |= _count_left_out(session, grain, bucket, metrics, busiest[:most])
    return BucketValues(grain, bucket, tuple(active), entities, left_out)


def _read_busiest(
    session: Session, grain: Grain, bucket: int, metrics: Sequence[StoredMetric], limit: int
) -> list[EntityValues]:
    """The entities of one source, the busiest first."""
    source = metrics[0].source
    columns = [column for metric in metrics for column in metric.columns]
    rows = session.rows(
        f"SELECT t.entity, e.kind, e.id, e.name, {_busy(metrics)} AS busy"
        f"{''.join(f', t.{column}' for column in columns)} "
        f"FROM {quote(table_name(grain, source))} AS t JOIN entity AS e ON e.key = t.entity "
        "WHERE t.bucket = ? ORDER BY busy DESC, e.id, t.entity LIMIT ?",
        [bucket, limit],
    )
    layers = read_layers(session, (row[0] for row in rows))
    entities = []
    for key, kind, id_, name, busy, *cells in rows:
        values = {}
        start = 0
        for metric in metrics:
            end = start + len(metric.columns)
            value = metric.plan.final_value(cells[start:end], grain.minutes)
            if value is not None:
                values[metric.name] = value
            start = end
        entities.append(
            EntityValues(source, kind, id_, name, layers.get(key, frozenset()), busy, values)
        )
    return entities


def _busy(metrics: Sequence[StoredMetric]) -> str:
    """How many rows the entity had, as SQL: the mean of all counts of its metrics."""
    counts: list[str] = []
    for metric in metrics:
        columns = iter(metric.columns)
        for shape in metric.plan.shapes:
            own = [next(columns) for _ in shape.cells]
            if shape is Shape.COUNT:
                counts += own
    counts = counts[:MAX_COUNTS]
    if not counts:
        return "0"
    return f"({' + '.join(f'coalesce(t.{column}, 0)' for column in counts)}) / {len(counts)}"


def _count_left_out(
    session: Session,
    grain: Grain,
    bucket: int,
    metrics: Sequence[StoredMetric],
    entities: Sequence[EntityValues],
) -> dict[str, int]:
    """By metric, how many entities have a value and were not read."""
    table = quote(table_name(grain, metrics[0].source))
    sums = ", ".join(f"sum(CASE WHEN {has_value(metric)} THEN 1 ELSE 0 END)" for metric in metrics)
    ((*counts,),) = session.rows(f"SELECT {sums} FROM {table} AS t WHERE t.bucket = ?", [bucket])
    missing = {
        metric.name: int(count or 0) - sum(metric.name in entity.values for entity in entities)
        for metric, count in zip(metrics, counts, strict=True)
    }
    return {name: count for name, count in missing.items() if count > 0}


def read_totals(
    session: Session, metrics: Sequence[StoredMetric], wanted: Mapping[int, Collection[str]]
) -> dict[tuple[int, str], list[Final]]:
    """The values of metrics of one source, by minute and entity id; see :meth:`Store.totals`."""
    known = {(metric.name, metric.version): metric.columns for metric in all_metrics(session)}
    columns: dict[str, int] = {}
    places: list[list[int] | None] = []
    for metric in metrics:
        # Its columns may have been given to another metric since it was read.
        if not metric.columns or known.get((metric.name, metric.version)) != metric.columns:
            places.append(None)
        else:
            places.append([columns.setdefault(name, len(columns)) for name in metric.columns])
    if not columns:
        return {}
    table = quote(table_name(Grain.MINUTE, metrics[0].source))
    # As the store keeps them: a very long id is cut there.
    ids = {bucket: {fit_text(id_): id_ for id_ in some} for bucket, some in wanted.items()}
    all_ids = sorted({id_ for some in ids.values() for id_ in some})
    ids_by_key: dict[int, str] = dict(rows_in(session, "SELECT key, id FROM entity", "id", all_ids))
    totals: dict[tuple[int, str], list[Final]] = {}
    for where in _lookups(sorted(ids), sorted(ids_by_key)):
        for bucket, key, *cells in session.rows(
            f"SELECT t.bucket, t.entity{''.join(f', t.{name}' for name in columns)} "
            f"FROM {table} AS t WHERE {where.sql}",
            where.params,
        ):
            id_ = ids[bucket].get(ids_by_key[key])
            if id_ is not None:
                totals[bucket, id_] = [
                    None if own is None else metric.plan.final_value([cells[n] for n in own], 1)
                    for metric, own in zip(metrics, places, strict=True)
                ]
    return totals


def _lookups(buckets: Sequence[int], keys: Sequence[int]) -> Iterator[Condition]:
    # Both are in the primary key, in this order: rows are looked up, no bucket is read through.
    for some_buckets in chunks(buckets, BUCKETS):
        for some_keys in chunks(keys):
            yield Condition.one_of("t.bucket", some_buckets) & Condition.one_of(
                "t.entity", some_keys
            )
