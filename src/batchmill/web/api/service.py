"""One service over a range: measures, endpoints, instances, callers, callees, slow statements."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from batchmill.sources import EntityIdError, split_entity_id
from batchmill.store import EntityName, Snapshot
from batchmill.web.api.listing import find_entity
from batchmill.web.api.measures import (
    CALLEE_SIDE,
    CALLER_SIDE,
    ENDPOINT,
    INSTANCE,
    SERVICE,
    MeasureSet,
    Number,
    RangeRows,
    RowReader,
)
from batchmill.web.api.parameters import TimeRange

PARAMS = ("from", "to", "grain")
MOST = 100
"""Entries of each list: the busiest, or the slowest."""
_MOST_PARTS = 20_000
_MOST_RECORDS = 2_000
_OWN = ("cpm", "avg", "p99", "success", "apdex")
_PART = ("cpm", "avg", "p99", "success")
_RELATION = ("cpm", "avg", "success")
BY_SERVICE = "top_n_service_database_statement"
BY_DATABASE = "top_n_database_statement"


def service(snapshot: Snapshot, given: str, time_range: TimeRange) -> dict[str, Any]:
    """All about the service with that id or name."""
    entity = find_entity(snapshot, "service", given)
    newest = snapshot.newest_minute()
    minutes = time_range.minutes(newest)
    metrics = snapshot.metrics()
    reader = RowReader(snapshot, SERVICE.chosen(metrics, time_range))
    whole = reader.ranged(time_range, newest, [entity.key]).get(entity.key, RangeRows([], []))
    measures = reader.measures
    line = measures.points(reader.rows(time_range.buckets, [entity.key]), time_range)
    series = measures.series(line, time_range.step_minutes)
    nothing: list[Number] = [None for _ in line]
    over = measures.over(whole, minutes)
    listed, left_out = {}, {}
    for name, entity_kind, kind in (
        ("endpoints", "endpoint", ENDPOINT),
        ("instances", "instance", INSTANCE),
    ):
        parts = snapshot.find(entity_kind, id_begins=f"{entity.id}_", most=_MOST_PARTS)
        shown = _busiest(snapshot, parts, [kind], time_range, newest, _PART)
        listed[name], left_out[name] = shown[:MOST], max(0, len(shown) - MOST)
    towards = snapshot.find("service_relation", id_ends=f"-{entity.id}", most=_MOST_PARTS)
    onwards = snapshot.find("service_relation", id_begins=f"{entity.id}-", most=_MOST_PARTS)
    # As the service itself reports them, else as the other side does.
    for name, relations, sides in (
        ("callers", towards, [CALLEE_SIDE, CALLER_SIDE]),
        ("callees", onwards, [CALLER_SIDE, CALLEE_SIDE]),
    ):
        others = {relation.key: _other_end(relation, name == "callers") for relation in relations}
        shown = _busiest(snapshot, relations, sides, time_range, newest, _RELATION, others)
        listed[name], left_out[name] = shown[:MOST], max(0, len(shown) - MOST)
    statements = slow_statements(snapshot, entity, time_range)
    return {
        "service": {
            "id": entity.id,
            "name": entity.name,
            "layers": sorted(snapshot.layers([entity.key]).get(entity.key, ())),
        },
        "grain": time_range.step,
        "from": time_range.start_s,
        "to": time_range.end_s,
        "times": time_range.times,
        "range": {item: over.get(item) for item in _OWN},
        "series": {
            **{item: series.get(item, nothing) for item in _OWN if item != "p99"},
            "percentiles": measures.ranks(line),
        },
        **listed,
        "statements": statements[:MOST],
        "left_out": {**left_out, "statements": max(0, len(statements) - MOST)},
    }


def _busiest(
    snapshot: Snapshot,
    entities: Sequence[EntityName],
    kinds: Sequence[MeasureSet],
    time_range: TimeRange,
    newest: int | None,
    shown: Sequence[str],
    others: Mapping[int, tuple[str, str]] | None = None,
) -> list[dict[str, Any]]:
    """The measures of entities over the range, the busiest first; of kinds the first with calls."""
    ranked: list[tuple[int, dict[str, Any]]] = []
    left = list(entities)
    metrics = snapshot.metrics()
    for kind in kinds:
        reader = RowReader(snapshot, kind.chosen(metrics, time_range))
        if not reader.metrics or not left:
            continue
        rows = reader.ranged(time_range, newest, [entity.key for entity in left])
        measures, minutes = reader.measures, time_range.minutes(newest)
        idle = []
        for entity in left:
            own = rows.get(entity.key, RangeRows([], []))
            over = measures.over(own, minutes)
            if all(value is None for value in over.values()):
                idle.append(entity)
                continue
            id_, name = (others or {}).get(entity.key, (entity.id, entity.name))
            line = {"id": id_, "name": name, **{figure: over.get(figure) for figure in shown}}
            ranked.append((measures.calls(own), line))
        left = idle
    ranked.sort(key=lambda entity: (-entity[0], entity[1]["name"], entity[1]["id"]))
    return [line for _, line in ranked]


def _other_end(relation: EntityName, caller: bool) -> tuple[str, str]:
    """Id and name of the service at the other end of a relation."""
    ids = relation.id.split("-")
    if len(ids) != 2:
        return relation.id, relation.name
    id_ = ids[0] if caller else ids[1]
    return id_, name_of(id_)


def name_of(service_id: str) -> str:
    """The name in a service's id; the id itself, if it is not one of ours."""
    try:
        return split_entity_id("service", service_id)[0]
    except EntityIdError:
        return service_id


def slow_statements(
    snapshot: Snapshot, entity: EntityName, time_range: TimeRange
) -> list[dict[str, Any]]:
    """The slow statements, each normalised text once: its slowest run, and how often it ran."""
    lines: list[dict[str, Any]] = []
    for stream in (BY_SERVICE, BY_DATABASE):
        records = snapshot.slowest(stream, time_range.buckets, entity=entity.key, n=_MOST_RECORDS)
        if not records:
            continue
        totals = snapshot.statement_totals(stream, time_range.buckets, entity.key)
        databases = (
            _databases(snapshot, time_range, [record.span_id for record in records])
            if stream == BY_SERVICE
            else {}
        )
        own = (entity.id, entity.name)
        slowest = {record.normalised or record.statement: record for record in reversed(records)}
        for text, record in slowest.items():
            runs, total_ms = totals.get(text, (0, 0))
            span = (record.trace_id, record.span_id)
            id_, name = own if stream == BY_DATABASE else databases.get(span, (None, None))
            lines.append(
                {
                    "database": name,
                    "database_id": id_,
                    "statement": record.statement,
                    "normalised": record.normalised,
                    "latency": record.latency,
                    "runs": runs,
                    "total_ms": total_ms,
                    "trace_id": record.trace_id,
                    "time": record.time_us // 1_000_000,
                }
            )
    lines.sort(key=lambda line: (-line["latency"], line["time"], line["statement"]))
    return lines


def _databases(
    snapshot: Snapshot, time_range: TimeRange, spans: Sequence[str]
) -> dict[tuple[str, str], tuple[str, str]]:
    """Id and name of the database of each slow statement: its list has the same span, too."""
    records = snapshot.slowest(BY_DATABASE, time_range.buckets, n=_MOST_RECORDS)
    among = frozenset(spans)
    return {
        (record.trace_id, record.span_id): (record.entity_id, record.entity_name)
        for record in records
        if record.span_id in among
    }
