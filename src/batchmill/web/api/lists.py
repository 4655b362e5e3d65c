"""Metrics, entities, values and slow calls, as the store has them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from batchmill.sources import Grain, UnknownNameError, bucket_start
from batchmill.store import Buckets, Named, Snapshot, StoredMetric, TopRecord
from batchmill.web.api.params import whole
from batchmill.web.api.range import Range, bucket
from batchmill.web.api.rows import Reader, by_entity
from batchmill.web.errors import BadQuestion, NotFound

ENTITY_PARAMS = ("kind", "name", "layer", "limit", "offset")
VALUE_PARAMS = ("entity", "from", "to", "grain", "layer", "limit")
TOPN_PARAMS = ("stream", "entity", "from", "to", "grain", "n")
MOST_ENTITIES = 1_000
MOST_SERIES = 1_000
MOST_RECORDS = 1_000
MOST_POINTS = 1_000_000


def epoch(of: int) -> int:
    """When a bucket begins, in seconds since 1970."""
    return int(bucket_start(of).timestamp())


def metrics(snapshot: Snapshot) -> dict[str, Any]:
    """Every metric that can be read."""
    return {
        "metrics": [
            {
                "name": each.name,
                "source": each.source,
                "function": each.function,
                "labelled": each.labelled,
                "definition": f"{each.name} = {each.definition};",
                "active": each.active,
                "since": None if each.since_minute is None else epoch(each.since_minute),
            }
            for each in snapshot.metrics()
        ]
    }


def entities(snapshot: Snapshot, params: Mapping[str, str]) -> dict[str, Any]:
    """A page of the entities."""
    found, total = snapshot.entities(
        params.get("kind"),
        params.get("name"),
        params.get("layer"),
        limit=whole(params, "limit", 100, 1, MOST_ENTITIES),
        offset=whole(params, "offset", 0, 0, 10_000_000),
    )
    return {
        "entities": [
            {
                "kind": each.kind,
                "id": each.id,
                "name": each.name,
                "layers": sorted(each.layers),
                "roles": dict(each.roles),
            }
            for each in found
        ],
        "total": total,
    }


def values(
    snapshot: Snapshot, name: str, wanted: Range, params: Mapping[str, str]
) -> dict[str, Any]:
    """The values of a metric, a series for each entity, in order of their ids."""
    limit = whole(params, "limit", 100, 1, MOST_SERIES)
    metric = _metric(snapshot, name)
    times, buckets = wanted.times, wanted.buckets
    layer = params.get("layer")
    keys, left_out = _keys(snapshot, metric, wanted, params.get("entity"), layer, limit)
    reader = Reader(snapshot, {"value": metric}, layer)
    rows = by_entity(reader.rows(buckets, keys))
    places = [bucket(wanted.grain, each) for each in times]
    named = sorted(snapshot.named(rows).values(), key=lambda each: (each.id, each.key))
    layers = snapshot.layers(rows)
    series, points = [], 0
    for each in named:
        finished = {
            row[0]: metric.plan.finished(row[2:], wanted.grain.minutes) for row in rows[each.key]
        }
        if all(value is None for value in finished.values()):
            continue
        points += sum(len(v) if isinstance(v, dict) else 1 for v in finished.values())
        if points > MOST_POINTS:
            raise BadQuestion(
                f"that are more than {MOST_POINTS:,} points: ask for fewer entities, a shorter "
                "range or a coarser grain"
            )
        series.append(
            {
                "entity": _entity(each, sorted(layers.get(each.key, ()))),
                "values": [finished.get(place) for place in places],
            }
        )
    return {
        "metric": metric.name,
        "grain": wanted.grain.value,
        "times": times,
        "series": series,
        "left_out": left_out,
    }


def _metric(snapshot: Snapshot, name: str) -> StoredMetric:
    known = {each.name: each for each in snapshot.metrics()}
    if name not in known:
        raise NotFound(str(UnknownNameError("metric", name[:200], tuple(known))))
    return known[name]


def _keys(
    snapshot: Snapshot,
    metric: StoredMetric,
    wanted: Range,
    entity: str | None,
    layer: str | None,
    limit: int,
) -> tuple[list[int], int]:
    """Whose rows are read, and how many others there may be: seen on the same days."""
    days = Buckets(Grain.DAY, bucket(Grain.DAY, wanted.start_s), wanted_day(wanted))
    if entity is not None:
        found = [each.key for each in snapshot.find(id_or_name=entity)]
        if not found:
            raise NotFound(f"there is no entity {entity[:200]!r}: see /api/v1/entities?name=…")
    else:
        found = snapshot.entities_in(metric.source, days)
    if layer is not None:
        of_layer = snapshot.layers(found)
        found = [key for key in found if layer in of_layer.get(key, ())]
    return found[:limit], max(0, len(found) - limit)


def wanted_day(wanted: Range) -> int:
    """The last day of a range."""
    return bucket(Grain.DAY, wanted.end_s - 1)


def _entity(each: Named, layers: Sequence[str]) -> dict[str, Any]:
    return {"id": each.id, "name": each.name, "layers": layers}


def topn(snapshot: Snapshot, wanted: Range, params: Mapping[str, str]) -> dict[str, Any]:
    """The slowest calls of whole buckets."""
    n = whole(params, "n", 20, 1, MOST_RECORDS)
    streams = snapshot.top_streams()
    stream = params.get("stream", streams[0] if streams else "")
    if "stream" in params and stream not in streams:
        allowed = ", ".join(streams) or "none yet"
        raise NotFound(f"there are no slow calls of {stream[:200]!r}: there are {allowed}")
    records: list[TopRecord] = []
    if "entity" in params:
        keys = [each.key for each in snapshot.find(id_or_name=params["entity"])]
        if not keys:
            raise NotFound(f"there is no entity {params['entity'][:200]!r}")
        for key in keys:
            records += snapshot.slowest(stream, wanted.buckets, entity=key, n=n)
        records = sorted(records, key=lambda each: (-each.latency, each.time_us))[:n]
    elif stream:
        records = snapshot.slowest(stream, wanted.buckets, n=n)
    return {
        "stream": stream,
        "streams": streams,
        "records": [_record(each, rank) for rank, each in enumerate(records, 1)],
    }


def _record(each: TopRecord, rank: int) -> dict[str, Any]:
    return {
        "entity": {"id": each.entity_id, "name": each.entity_name},
        "bucket": epoch(each.bucket),
        "rank": rank,
        "latency": each.latency,
        "time": each.time_us // 1_000_000,
        "trace_id": each.trace_id,
        "span_id": each.span_id,
        "statement": each.statement,
        "normalised": each.normalised,
        "runs": each.runs,
        "total_ms": each.total_ms,
    }
