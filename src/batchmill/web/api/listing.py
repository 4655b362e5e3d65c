"""Lists of metrics, entities, values and slow calls."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from batchmill.export import series_names
from batchmill.oal import Value
from batchmill.sources import Grain, UnknownNameError, bucket_start
from batchmill.store import Buckets, EntityName, Snapshot, StoredMetric, TopRecord
from batchmill.web.api.coverage import Coverage
from batchmill.web.api.description import described
from batchmill.web.api.measures import MANY, RowReader, busiest, by_entity
from batchmill.web.api.parameters import TimeRange, bucket, choice, whole
from batchmill.web.responses import BadRequest, NotFound

ENTITY_PARAMS = ("kind", "name", "layer", "limit", "offset")
VALUE_PARAMS = ("entity", "from", "to", "grain", "layer", "search", "order", "limit")
VALUE_ORDERS = ("id", "top")
TOPN_PARAMS = ("stream", "entity", "from", "to", "grain", "n")
MOST_ENTITIES = 1_000
MOST_SERIES = 1_000
MOST_RECORDS = 1_000
MOST_CHOSEN = 50
"""Entities that one request may name."""
MOST_COMPARED = 5_000
"""Names that an unknown one is compared with."""
MOST_POINTS = 1_000_000


def epoch(of: int) -> int:
    """The start of a bucket, in seconds since 1970."""
    return int(bucket_start(of).timestamp())


def metrics(snapshot: Snapshot) -> dict[str, Any]:
    """All metrics of the store."""
    stored = snapshot.metrics()
    series = series_names([metric for metric in stored if metric.active])
    return {"metrics": [_described(metric, series.get(metric.name)) for metric in stored]}


def _described(metric: StoredMetric, series: str | None) -> dict[str, Any]:
    description = described(metric)
    return {
        "name": metric.name,
        "version": metric.version,
        "source": metric.source,
        "entity_kind": description.kind,
        "function": metric.function,
        "decorator": metric.decorator,
        "labelled": metric.labelled,
        "unit": description.unit,
        "factor": description.factor,
        "least": description.least,
        "definition": metric.definition,
        "active": metric.active,
        "since_minute": metric.since_minute,
        "series": series,
    }


def entities(snapshot: Snapshot, params: Mapping[str, str]) -> dict[str, Any]:
    """A page of the entities."""
    page = snapshot.entities(
        params.get("kind"),
        params.get("name"),
        params.get("layer"),
        limit=whole(params, "limit", 100, 1, MOST_ENTITIES),
        offset=whole(params, "offset", 0, 0, 10_000_000),
    )
    return {
        "entities": [
            {
                "kind": entity.kind,
                "id": entity.id,
                "name": entity.name,
                "layers": sorted(entity.layers),
                "roles": dict(entity.roles),
            }
            for entity in page.entities
        ],
        "total": page.total,
    }


def values(
    snapshot: Snapshot,
    name: str,
    time_range: TimeRange,
    params: Mapping[str, str],
    chosen: Sequence[str] = (),
) -> dict[str, Any]:
    """The values of a metric, a series for each entity, in order of their ids or their size."""
    limit = whole(params, "limit", 100, 1, MOST_SERIES)
    order = choice(params, "order", "id", VALUE_ORDERS)
    metric = _metric(snapshot, name)
    coverage = Coverage.read(snapshot, time_range, snapshot.metrics(), metric.source)
    layer = params.get("layer")
    keys = _keys(snapshot, metric, time_range, chosen, layer)
    if "search" in params:
        like = set(snapshot.keys_like(None, params["search"], layer))
        keys = [key for key in keys if key in like]
    reader = RowReader(snapshot, {"value": metric}, layer)
    measures = reader.measures
    over: dict[int, Value] = {}
    count = 0
    if order == "top":
        over = _over(reader, coverage, _busy(snapshot, metric, time_range, keys))
        count = len(keys) if len(keys) > MANY else 0
        keys = sorted(over, key=lambda key: -_size(over[key]))
    keys, left_out = keys[:limit], max(0, max(count, len(keys)) - limit)
    if order == "id":
        over = _over(reader, coverage, keys)
    rows = by_entity(reader.rows(time_range.buckets, keys))
    names = snapshot.entity_names(rows)
    named = [names[key] for key in keys if key in names]
    if order == "id":
        named.sort(key=lambda entity: (entity.id, entity.key))
    layers = snapshot.layers(rows)
    covered = coverage.minutes_by_bucket
    series, points = [], 0
    for entity in named:
        line = [
            None if row is None else measures.value("value", row, minutes)
            for row, minutes in zip(
                measures.points(rows[entity.key], time_range), covered, strict=True
            )
        ]
        if all(value is None for value in line):
            continue
        points += sum(len(v) if isinstance(v, dict) else 1 for v in line)
        if points > MOST_POINTS:
            raise BadRequest(
                f"the result has more than {MOST_POINTS:,} points: request fewer entities, "
                "a shorter range or a coarser grain"
            )
        series.append(
            {
                **_entity(entity),
                "layers": sorted(layers.get(entity.key, ())),
                "over": over.get(entity.key),
                "values": line,
            }
        )
    return {
        "metric": metric.name,
        "grain": time_range.step,
        "from": time_range.start_s,
        "to": time_range.end_s,
        "times": time_range.times,
        "incomplete": coverage.incomplete_s,
        "series": series,
        "left_out": left_out,
    }


def _busy(
    snapshot: Snapshot, metric: StoredMetric, time_range: TimeRange, keys: list[int]
) -> list[int]:
    """All of few entities; of many the busiest, if a metric of the same events counts them."""
    counting = [
        other
        for other in snapshot.metrics()
        if other.source == metric.source and other.function == "cpm"
    ]
    if len(keys) <= MANY or not counting:
        return keys
    ranking = busiest(snapshot, {"cpm": counting[0]}, time_range, most=len(keys))
    among = frozenset(keys)
    return [key for key in ranking.keys if key in among][:MANY] if ranking else keys


def _over(reader: RowReader, coverage: Coverage, keys: Sequence[int]) -> dict[int, Value]:
    """The metric's value over the whole range, by entity; those without one are left out."""
    measures = reader.measures
    values_ = {
        key: measures.values_over(rows, coverage.minutes)["value"]
        for key, rows in reader.ranged(coverage, keys).items()
    }
    return {key: value for key, value in values_.items() if value is not None}


def _size(value: Value) -> float:
    """For sorting; of several labels the greatest."""
    return max(value.values(), default=0) if isinstance(value, dict) else value or 0


def _metric(snapshot: Snapshot, name: str) -> StoredMetric:
    known = {metric.name: metric for metric in snapshot.metrics()}
    if name not in known:
        raise NotFound(str(UnknownNameError("metric", name[:200], tuple(known))))
    return known[name]


def _keys(
    snapshot: Snapshot,
    metric: StoredMetric,
    time_range: TimeRange,
    chosen: Sequence[str],
    layer: str | None,
) -> list[int]:
    """The entities of the metric: those chosen by id or name, or all with data on the same days."""
    days = Buckets(Grain.DAY, bucket(Grain.DAY, time_range.start_s), last_day(time_range))
    keys: list[int] = []
    for entity in chosen:
        matching = [named.key for named in snapshot.find(id_or_name=entity)]
        if not matching:
            raise NotFound(f"there is no entity {entity[:200]!r}: see /api/v1/entities?name=…")
        keys += matching
    if not chosen:
        keys = snapshot.entities_in(metric.source, days)
    if layer is not None:
        of_layer = snapshot.layers(keys)
        keys = [key for key in keys if layer in of_layer.get(key, ())]
    return list(dict.fromkeys(keys))


def last_day(time_range: TimeRange) -> int:
    """The last day of a range."""
    return bucket(Grain.DAY, time_range.end_s - 1)


def _entity(entity: EntityName) -> dict[str, str]:
    """What a record says of the entity that it is about."""
    return {"entity_id": entity.id, "entity_name": entity.name, "entity_kind": entity.kind}


def topn(snapshot: Snapshot, time_range: TimeRange, params: Mapping[str, str]) -> dict[str, Any]:
    """The slowest calls of the buckets of a range."""
    n = whole(params, "n", 20, 1, MOST_RECORDS)
    streams = snapshot.top_streams()
    stream = params.get("stream", streams[0] if streams else "")
    if "stream" in params and stream not in streams:
        allowed = ", ".join(streams) or "none yet"
        raise NotFound(f"there are no slow calls of {stream[:200]!r}: there are {allowed}")
    records: list[TopRecord] = []
    if "entity" in params:
        keys = [record.key for record in snapshot.find(id_or_name=params["entity"])]
        if not keys:
            raise NotFound(f"there is no entity {params['entity'][:200]!r}")
        for key in keys:
            records += snapshot.slowest(stream, time_range.buckets, entity=key, n=n)
        records = sorted(records, key=lambda record: (-record.latency, record.time_us))[:n]
    elif stream:
        records = snapshot.slowest(stream, time_range.buckets, n=n)
    return {
        "stream": stream,
        "streams": streams,
        "records": [_record(record, rank) for rank, record in enumerate(records, 1)],
    }


def _record(record: TopRecord, rank: int) -> dict[str, Any]:
    return {**asdict(record), "grain": record.grain.value, "rank": rank}


def find_entity(snapshot: Snapshot, kind: str, given: str) -> EntityName:
    """The entity with that id, else with that name; :class:`NotFound` suggests similar names."""
    matching = snapshot.find(kind, id_or_name=given)
    if not matching:
        known = dict.fromkeys(entity.name for entity in snapshot.find(kind, most=MOST_COMPARED))
        raise NotFound(str(UnknownNameError(kind, given[:200], tuple(known))))
    return next((entity for entity in matching if entity.id == given), matching[0])
