"""Reading: values and states, entities, slow calls."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from batchmill.sources import Grain, UnknownNameError
from batchmill.store._entities import CHUNK
from batchmill.store._register import all_metrics
from batchmill.store._session import Session
from batchmill.store._sql import quoted, table_name
from batchmill.store._topn import RANKING
from batchmill.store._ttl import first_bucket, last_bucket
from batchmill.store._views import StateRow, StoredEntity, StoredMetric, TopRecord, Value

Moment = int | datetime


@dataclass(frozen=True, slots=True)
class Selection:
    """Which rows of a metric are wanted."""

    grain: Grain
    entity: str | None = None
    start: Moment | None = None
    end: Moment | None = None
    layer: str | None = None
    limit: int | None = None

    def conditions(self) -> tuple[list[str], list[Any]]:
        """As SQL over a table ``t`` joined with its entity ``e``, and the parameters."""
        found: list[str] = []
        params: list[Any] = []
        if self.start is not None:
            found.append("t.bucket >= ?")
            params.append(first_bucket(self.grain, self.start))
        if self.end is not None:
            found.append("t.bucket <= ?")
            params.append(last_bucket(self.grain, self.end))
        if self.entity is not None:
            # Keys first: they stand in the primary key, names do not.
            found.append("t.entity IN (SELECT key FROM entity WHERE id = ? OR name = ?)")
            params += [self.entity, self.entity]
        if self.layer is not None:
            found.append("t.entity IN (SELECT entity FROM entity_layer WHERE layer = ?)")
            params.append(self.layer)
        return found, params


def find_metric(session: Session, metric: str | StoredMetric) -> StoredMetric:
    """The metric of that name: the active version, else the last one that can be read."""
    if isinstance(metric, StoredMetric):
        return metric
    known = [each for each in all_metrics(session) if each.columns]
    versions = [each for each in known if each.name == metric]
    if not versions:
        raise UnknownNameError("metric", metric, tuple(dict.fromkeys(each.name for each in known)))
    return max(versions, key=lambda each: (each.active, each.version))


def read_states(session: Session, metric: StoredMetric, selection: Selection) -> Iterator[StateRow]:
    """The merged states by bucket and entity id; rows without any are left out."""
    if not metric.columns:
        return
    cells = ", ".join(f"t.{name}" for name in metric.columns)
    conditions, params = selection.conditions()
    some = " OR ".join(f"t.{name} IS NOT NULL" for name in metric.columns)
    conditions.append(f"({some})")
    rows = session.rows(
        f"SELECT t.bucket, t.entity, e.id, e.name, {cells} "
        f"FROM {quoted(table_name(selection.grain, metric.source))} AS t "
        f"JOIN entity AS e ON e.key = t.entity WHERE {' AND '.join(conditions)} "
        "ORDER BY t.bucket, e.id",
        params,
    )
    layers = read_layers(session, (row[1] for row in rows))
    for bucket, key, id_, name, *values in rows:
        states = metric.plan.states(values)
        yield StateRow(
            metric.name, selection.grain, bucket, id_, name, layers.get(key, frozenset()), states
        )


def read_values(session: Session, metric: StoredMetric, selection: Selection) -> Iterator[Value]:
    """The final values by bucket and entity id; rows in which nothing matched are left out."""
    minutes = selection.grain.minutes
    for row in read_states(session, metric, selection):
        value = metric.plan.value(row.states, minutes)
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
    if name_like is not None:
        conditions.append("lower(name) LIKE ? ESCAPE '!'")
        escaped = "".join(f"!{each}" if each in "!%_" else each for each in name_like.lower())
        params.append(f"%{escaped}%")
    if layer is not None:
        conditions.append("key IN (SELECT entity FROM entity_layer WHERE layer = ?)")
        params.append(layer)
    rows = session.rows(
        "SELECT key, kind, id, name, roles FROM entity "
        f"WHERE {' AND '.join(conditions)} ORDER BY kind, id",
        params,
    )
    layers = read_layers(session, (row[0] for row in rows))
    return [
        StoredEntity(kind_, id_, name, layers.get(key, frozenset()), json.loads(roles))
        for key, kind_, id_, name, roles in rows
    ]


def read_top(session: Session, stream: str, selection: Selection, n: int | None) -> list[TopRecord]:
    """The slowest calls by bucket, entity id and rank."""
    conditions, params = selection.conditions()
    ranked = ", ".join(f"t.{each}" for each in RANKING.split(", "))
    rows = session.rows(
        "SELECT t.bucket, e.id, e.name, t.latency, t.time_us, t.trace_id, t.span_id, t.statement, "
        "s.normalised, s.runs, s.total_ms FROM topn AS t JOIN entity AS e ON e.key = t.entity "
        "LEFT JOIN statement AS s ON s.stream = t.stream AND s.grain = t.grain "
        "AND s.bucket = t.bucket AND s.entity = t.entity AND s.digest = t.digest "
        f"WHERE {' AND '.join(['t.stream = ?', 't.grain = ?', *conditions])} "
        f"ORDER BY t.bucket, e.id, e.key, {ranked}",
        [stream, selection.grain.value, *params],
    )
    records: list[TopRecord] = []
    place: tuple[Any, ...] = ()
    rank = 0
    for bucket, id_, name, *rest in rows:
        rank = rank + 1 if place == (bucket, id_) else 1
        place = (bucket, id_)
        if n is None or rank <= n:
            latency, time_us, trace_id, span_id, statement, normalised, runs, total = rest
            records.append(
                TopRecord(
                    *(stream, selection.grain, bucket, id_, name, rank, latency, time_us),
                    *(trace_id, span_id, statement, normalised or "", runs or 0, total or 0),
                )
            )
    return records
