"""Reading: values and states, entities, slow calls."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from batchmill.errors import ConfigError
from batchmill.sources import Grain, UnknownNameError
from batchmill.store.cell import Shape
from batchmill.store.sql.entities import CHUNK, clean, fitted
from batchmill.store.sql.merging import quoted, table_name
from batchmill.store.sql.register import all_metrics, looked_up
from batchmill.store.sql.session import Row, Session
from batchmill.store.sql.topn import RANKING
from batchmill.store.ttl import first_bucket, last_bucket
from batchmill.store.views import StateRow, StoredEntity, StoredMetric, TopRecord, Value

Moment = int | datetime
Place = tuple[int, str, int]
"""Where a row stands: its bucket, its entity's id and key."""

PAGE = 10_000
"""How many rows are read at a time where there may be any number of them."""
MOST_ROWS = 2**63 - 1
"""The greatest limit that a database takes."""
PLACE = ("t.bucket", "e.id", "t.entity")
ENTITY = "key, kind, id, name, roles"
"""What is read of an entity."""
_CALENDAR = "a moment that the calendar has in UTC: between the years 1 and 9999"


@dataclass(frozen=True, slots=True)
class Selection:
    """Which rows of a metric are wanted."""

    grain: Grain
    entity: str | None = None
    start: Moment | None = None
    end: Moment | None = None
    layer: str | None = None
    limit: int | None = None
    """So many rows at most: the newest."""

    def __post_init__(self) -> None:
        if self.limit is not None and self.limit < 0:
            raise ConfigError("limit", self.limit, "a whole number of at least 0, or None for all")

    def conditions(self) -> tuple[list[str], list[Any]]:
        """As SQL over a table ``t`` joined with its entity ``e``, and the parameters."""
        found: list[str] = []
        params: list[Any] = []
        if self.start is not None:
            found.append("t.bucket >= ?")
            params.append(_bound("start", first_bucket, self.grain, self.start))
        if self.end is not None:
            found.append("t.bucket <= ?")
            params.append(_bound("end", last_bucket, self.grain, self.end))
        if self.entity is not None:
            # Keys first: they stand in the primary key, names do not.
            found.append("t.entity IN (SELECT key FROM entity WHERE id = ? OR name = ?)")
            params += [fitted(self.entity), fitted(clean(self.entity))]
        if self.layer is not None:
            found.append("t.entity IN (SELECT entity FROM entity_layer WHERE layer = ?)")
            params.append(fitted(self.layer))
        return found, params


def _bound(
    name: str, bucket_of: Callable[[Grain, Moment], int], grain: Grain, moment: Moment
) -> int:
    try:
        return bucket_of(grain, moment)
    except OverflowError:  # of another zone, and beyond the calendar in UTC
        raise ConfigError(name, moment, _CALENDAR) from None


def find_metric(session: Session, metric: str | StoredMetric) -> StoredMetric:
    """The metric of that name: the active version, else the last one that can be read."""
    if isinstance(metric, StoredMetric):
        return looked_up(session, metric)
    known = [each for each in all_metrics(session) if each.columns]
    versions = [each for each in known if each.name == metric]
    if not versions:
        raise UnknownNameError("metric", metric, tuple(dict.fromkeys(each.name for each in known)))
    return max(versions, key=lambda each: (each.active, each.version))


def read_states(session: Session, metric: StoredMetric, selection: Selection) -> list[StateRow]:
    """The merged states by bucket and entity id; rows without any are left out."""
    query = _Query(metric, selection, _any_state(metric))
    return [state for _, state in query.newest(session)]


def read_values(session: Session, metric: StoredMetric, selection: Selection) -> list[Value]:
    """The final values by bucket and entity id; rows in which nothing matched are left out."""
    query = _Query(metric, selection, has_value(metric))
    return [value for _, row in query.newest(session) for value in _value(metric, row)]


def read_page(
    session: Session, metric: StoredMetric, selection: Selection, after: Place | None
) -> tuple[list[Value], Place | None]:
    """The next :data:`PAGE` values, oldest first, and where they end; None: these are the last."""
    rows = _Query(metric, selection, has_value(metric)).page(session, after)
    end = rows[-1][0] if len(rows) == PAGE else None
    return [value for _, row in rows for value in _value(metric, row)], end


def by_pages(page: Callable[[Place | None], tuple[list[Value], Place | None]]) -> Iterator[Value]:
    """The values of one page after the other; the next is read when it is needed."""
    after: Place | None = None
    while True:
        values, after = page(after)
        yield from values
        if after is None:
            return


def count_values(session: Session, metric: StoredMetric, selection: Selection) -> int:
    """How many values there are; the limit does not matter."""
    conditions, params = selection.conditions()
    table = quoted(table_name(selection.grain, metric.source))
    where = " AND ".join([*conditions, has_value(metric)])
    ((count,),) = session.rows(f"SELECT count(*) FROM {table} AS t WHERE {where}", params)
    return int(count)


def has_value(metric: StoredMetric) -> str:
    """The condition, as SQL over a table ``t``, that a row of a metric has a value.

    Whatever divides by a number of rows has it as its last state, and no value without one. So the
    database can count values, and stop after the newest ones, without them being worked out here.
    """
    if metric.columns and metric.plan.shapes[-1] is Shape.COUNT:
        return f"t.{metric.columns[-1]} > 0"
    return _any_state(metric)


def _any_state(metric: StoredMetric) -> str:
    some = " OR ".join(f"t.{name} IS NOT NULL" for name in metric.columns)
    return f"({some})" if some else "1 = 0"


@dataclass(frozen=True, slots=True)
class _Query:
    """The rows of a metric that are wanted."""

    metric: StoredMetric
    selection: Selection
    present: str
    """The condition that there is something in a row."""

    def newest(self, session: Session) -> list[tuple[Place, StateRow]]:
        """The newest rows, as many as are wanted, the oldest of them first."""
        limit = self.selection.limit
        if limit is None:
            return self._rows(session, "", [], "")
        return self._rows(session, "", [min(limit, MOST_ROWS)], "DESC")[::-1]

    def page(self, session: Session, after: Place | None) -> list[tuple[Place, StateRow]]:
        """The first rows behind a place."""
        if after is None:
            return self._rows(session, "", [PAGE], "")
        # The bucket alone as well: that is what there is an index for.
        behind = f"t.bucket >= ? AND ({', '.join(PLACE)}) > (?, ?, ?)"
        return self._rows(session, behind, [after[0], *after, PAGE], "")

    def _rows(
        self, session: Session, condition: str, more: list[Any], direction: str
    ) -> list[tuple[Place, StateRow]]:
        """Rows in order of their places; of the ``more`` parameters the last is the limit."""
        metric, grain = self.metric, self.selection.grain
        conditions, params = self.selection.conditions()
        where = " AND ".join([self.present, *conditions, *([condition] if condition else [])])
        rows = session.rows(
            f"SELECT {', '.join(PLACE)}, e.name{''.join(f', t.{each}' for each in metric.columns)} "
            f"FROM {quoted(table_name(grain, metric.source))} AS t "
            f"JOIN entity AS e ON e.key = t.entity WHERE {where} "
            f"ORDER BY {', '.join(f'{each} {direction}' for each in PLACE)}"
            f"{' LIMIT ?' if more else ''}",
            [*params, *more],
        )
        layers = read_layers(session, (row[2] for row in rows))
        return [
            (
                (bucket, id_, key),
                StateRow(
                    *(metric.name, grain, bucket, id_, name, layers.get(key, frozenset())),
                    metric.plan.states(values),
                ),
            )
            for bucket, id_, key, name, *values in rows
        ]


def _value(metric: StoredMetric, row: StateRow) -> Iterator[Value]:
    value = metric.plan.value(row.states, row.grain.minutes)
    if value is not None:
        yield Value(
            *(row.metric, row.grain, row.bucket, row.entity_id, row.entity_name),
            *(row.layers, value),
        )


def read_layers(session: Session, keys: Iterable[int]) -> dict[int, frozenset[str]]:
    """The layers of entities, by key."""
    found: dict[int, set[str]] = {}
    wanted = list(dict.fromkeys(keys))
    for start in range(0, len(wanted), CHUNK):
        chunk = wanted[start : start + CHUNK]
        marks = ", ".join("?" * len(chunk))
        for key, layer in session.rows(
            f"SELECT entity, layer FROM entity_layer WHERE entity IN ({marks})", chunk
        ):
            found.setdefault(key, set()).add(layer)
    return {key: frozenset(layers) for key, layers in found.items()}


def read_entities(
    session: Session, kind: str | None, name_like: str | None, layer: str | None
) -> list[StoredEntity]:
    """Entities by kind and id."""
    conditions = ["1 = 1"]
    params: list[Any] = []
    if kind is not None:
        conditions.append("kind = ?")
        params.append(kind)
    if layer is not None:
        conditions.append("key IN (SELECT entity FROM entity_layer WHERE layer = ?)")
        params.append(fitted(layer))
    where = " AND ".join(conditions)
    if name_like:
        keys = named_like(session, where, params, name_like)
        rows = list(entities_of(session, keys))
    else:
        rows = session.rows(f"SELECT {ENTITY} FROM entity WHERE {where}", params)
    rows.sort(key=lambda row: (row[1].encode(), row[2].encode()))  # as the databases would
    layers = read_layers(session, (row[0] for row in rows))
    return [
        StoredEntity(kind_, id_, name, layers.get(key, frozenset()), json.loads(roles))
        for key, kind_, id_, name, roles in rows
    ]


def named_like(session: Session, where: str, params: list[Any], name_like: str) -> list[int]:
    """The keys of entities by part of their name, in any case.

    Compared here: the databases know capitals of ASCII only. All names are looked at anyway, as
    no index helps with the middle of a name.
    """
    wanted = name_like.casefold()
    found: list[int] = []
    last: int | None = None
    while True:
        behind = "" if last is None else " AND key > ?"
        page = session.rows(
            f"SELECT key, name FROM entity WHERE {where}{behind} ORDER BY key LIMIT ?",
            [*params, *([] if last is None else [last]), PAGE],
        )
        found += [key for key, name in page if wanted in name.casefold()]
        if len(page) < PAGE:
            return found
        last = page[-1][0]


def entities_of(session: Session, keys: list[int]) -> Iterator[Row]:
    """What :data:`ENTITY` names of the entities with those keys."""
    for start in range(0, len(keys), CHUNK):
        chunk = keys[start : start + CHUNK]
        marks = ", ".join("?" * len(chunk))
        yield from session.rows(f"SELECT {ENTITY} FROM entity WHERE key IN ({marks})", chunk)


def read_top(session: Session, stream: str, selection: Selection, n: int | None) -> list[TopRecord]:
    """The slowest calls by bucket, entity id and rank."""
    conditions, params = selection.conditions()
    ranked = ", ".join(f"t.{each}" for each in RANKING.split(", "))
    where = " AND ".join(["t.stream = ?", "t.grain = ?", *conditions])
    rows = session.rows(
        "SELECT t.bucket, e.id, e.name, t.place, t.latency, t.time_us, t.trace_id, t.span_id, "
        "t.statement, coalesce(s.normalised, ''), coalesce(s.runs, 0), coalesce(s.total_ms, 0) "
        f"FROM (SELECT t.*, row_number() OVER (PARTITION BY t.bucket, t.entity ORDER BY {ranked}) "
        f"AS place FROM topn AS t WHERE {where}) AS t JOIN entity AS e ON e.key = t.entity "
        "LEFT JOIN statement AS s ON s.stream = t.stream AND s.grain = t.grain "
        "AND s.bucket = t.bucket AND s.entity = t.entity AND s.digest = t.digest "
        "WHERE t.place <= ? ORDER BY t.bucket, e.id, e.key, t.place",
        [stream, selection.grain.value, *params, MOST_ROWS if n is None else min(n, MOST_ROWS)],
    )
    return [TopRecord(stream, selection.grain, *row) for row in rows]
