"""Lists of metrics, entities, values and slow calls."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from batchmill.sources import Grain, UnknownNameError, bucket_start
from batchmill.store import Buckets, EntityName, Snapshot, StoredMetric, TopRecord
from batchmill.web.api.coverage import Coverage
from batchmill.web.api.measures import RowReader, by_entity
from batchmill.web.api.parameters import TimeRange, bucket, whole
from batchmill.web.responses import BadRequest, NotFound

ENTITY_PARAMS = ("kind", "name", "layer", "limit", "offset")
VALUE_PARAMS = ("entity", "from", "to", "grain", "layer", "limit")
TOPN_PARAMS = ("stream", "entity", "from", "to", "grain", "n")
MOST_ENTITIES = 1_000
MOST_SERIES = 1_000
MOST_RECORDS = 1_000
MOST_COMPARED = 5_000
"""Names that an unknown one is compared with."""
MOST_POINTS = 1_000_000


def epoch(of: int) -> int:
    """The start of a bucket, in seconds since 1970."""
    return int(bucket_start(of).timestamp())


def metrics(snapshot: Snapshot) -> dict[str, Any]:
    """All metrics of the store."""
    return {
        "metrics": [
            {
                "name": metric.name,
                "source": metric.source,
                "function": metric.function,
                "labelled": metric.labelled,
                "definition": f"{metric.name} = {metric.definition};",
                "active": metric.active,
                "since": None if metric.since_minute is None else epoch(metric.since_minute),
            }
            for metric in snapshot.metrics()
        ]
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
    snapshot: Snapshot, name: str, time_range: TimeRange, params: Mapping[str, str]
) -> dict[str, Any]:
    """The values of a metric, a series for each entity, in order of their ids."""
    limit = whole(params, "limit", 100, 1, MOST_SERIES)
    metric = _metric(snapshot, name)
    times, buckets = time_range.times, time_range.buckets
    coverage = Coverage.read(snapshot, time_range, ())
    layer = params.get("layer")
    keys, left_out = _keys(snapshot, metric, time_range, params.get("entity"), layer, limit)
    reader = RowReader(snapshot, {"value": metric}, layer)
    rows = by_entity(reader.rows(buckets, keys))
    places = [bucket(time_range.grain, time) for time in times]
    named = sorted(snapshot.entity_names(rows).values(), key=lambda entity: (entity.id, entity.key))
    layers = snapshot.layers(rows)
    series, points = [], 0
    for entity in named:
        finished = {
            row[0]: metric.plan.final_value(row[2:], time_range.grain.minutes)
            for row in rows[entity.key]
        }
        if all(value is None for value in finished.values()):
            continue
        points += sum(len(v) if isinstance(v, dict) else 1 for v in finished.values())
        if points > MOST_POINTS:
            raise BadRequest(
                f"the result has more than {MOST_POINTS:,} points: request fewer entities, "
                "a shorter range or a coarser grain"
            )
        series.append(
            {
                "entity": _entity(entity, sorted(layers.get(entity.key, ()))),
                "values": [finished.get(place) for place in places],
            }
        )
    return {
        "metric": metric.name,
        "grain": time_range.grain.value,
        "times": times,
        "incomplete": coverage.incomplete_s,
        "series": series,
        "left_out": left_out,
    }


def _metric(snapshot: Snapshot, name: str) -> StoredMetric:
    known = {metric.name: metric for metric in snapshot.metrics()}
    if name not in known:
        raise NotFound(str(UnknownNameError("metric", name[:200], tuple(known))))
    return known[name]


def _keys(
    snapshot: Snapshot,
    metric: StoredMetric,
    time_range: TimeRange,
    entity: str | None,
    layer: str | None,
    limit: int,
) -> tuple[list[int], int]:
    """The entities to read, and how many more have data on the same days."""
    days = Buckets(Grain.DAY, bucket(Grain.DAY, time_range.start_s), last_day(time_range))
    if entity is not None:
        keys = [named.key for named in snapshot.find(id_or_name=entity)]
        if not keys:
            raise NotFound(f"there is no entity {entity[:200]!r}: see /api/v1/entities?name=…")
    else:
        keys = snapshot.entities_in(metric.source, days)
    if layer is not None:
        of_layer = snapshot.layers(keys)
        keys = [key for key in keys if layer in of_layer.get(key, ())]
    return keys[:limit], max(0, len(keys) - limit)


def last_day(time_range: TimeRange) -> int:
    """The last day of a range."""
    return bucket(Grain.DAY, time_range.end_s - 1)


def _entity(entity: EntityName, layers: Sequence[str]) -> dict[str, Any]:
    return {"id": entity.id, "name": entity.name, "layers": layers}


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
    return {
        "entity": {"id": record.entity_id, "name": record.entity_name},
        "bucket": epoch(record.bucket),
        "rank": rank,
        "latency": record.latency,
        "time": record.time_us // 1_000_000,
        "trace_id": record.trace_id,
        "span_id": record.span_id,
        "statement": record.statement,
        "normalised": record.normalised,
        "runs": record.runs,
        "total_ms": record.total_ms,
    }


def find_entity(snapshot: Snapshot, kind: str, given: str) -> EntityName:
    """The entity with that id, else with that name; :class:`NotFound` suggests similar names."""
    matching = snapshot.find(kind, id_or_name=given)
    if not matching:
        known = dict.fromkeys(entity.name for entity in snapshot.find(kind, most=MOST_COMPARED))
        raise NotFound(str(UnknownNameError(kind, given[:200], tuple(known))))
    return next((entity for entity in matching if entity.id == given), matching[0])
