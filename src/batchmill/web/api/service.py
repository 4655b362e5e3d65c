"""One service over a range: its figures, its parts, who calls whom, its slow statements."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from batchmill.sources import EntityIdError, split_entity_id
from batchmill.store import Named, Snapshot
from batchmill.web.api.figures import (
    CALLEE_SIDE,
    CALLER_SIDE,
    ENDPOINT,
    INSTANCE,
    SERVICE,
    Kind,
    Number,
)
from batchmill.web.api.names import found_one
from batchmill.web.api.range import Range, bucket
from batchmill.web.api.rows import Parts, Reader

PARAMS = ("from", "to", "grain")
MOST = 100
"""Of each list so many: the busiest, or the slowest."""
_MOST_PARTS = 20_000
_MOST_RECORDS = 2_000
_OWN = ("cpm", "avg", "p99", "success", "apdex")
_PART = ("cpm", "avg", "p99", "success")
_RELATION = ("cpm", "avg", "success")
BY_SERVICE = "top_n_service_database_statement"
BY_DATABASE = "top_n_database_statement"


def service(snapshot: Snapshot, given: str, wanted: Range) -> dict[str, Any]:
    """The answer about the service with that id, or name."""
    found = found_one(snapshot, "service", given)
    newest = snapshot.newest_minute()
    minutes = wanted.minutes(newest)
    metrics = snapshot.metrics()
    reader = Reader(snapshot, SERVICE.chosen(metrics))
    whole = reader.ranged(wanted, newest, [found.key]).get(found.key, Parts([], []))
    figures = reader.figures
    by_bucket = {row[0]: row for row in reader.rows(wanted.buckets, [found.key])}
    line = [by_bucket.get(bucket(wanted.grain, each)) for each in wanted.times]
    series = figures.series(line, wanted.grain.minutes)
    nothing: list[Number] = [None for _ in line]
    over = figures.over(whole.more, minutes, whole.less)
    listed, left_out = {}, {}
    for name, entity_kind, kind in (
        ("endpoints", "endpoint", ENDPOINT),
        ("instances", "instance", INSTANCE),
    ):
        parts = snapshot.find(entity_kind, id_begins=f"{found.id}_", most=_MOST_PARTS)
        shown = _busiest(snapshot, parts, [kind], wanted, newest, _PART)
        listed[name], left_out[name] = shown[:MOST], max(0, len(shown) - MOST)
    towards = snapshot.find("service_relation", id_ends=f"-{found.id}", most=_MOST_PARTS)
    onwards = snapshot.find("service_relation", id_begins=f"{found.id}-", most=_MOST_PARTS)
    # As the service itself has seen them; else as the other end has.
    for name, relations, sides in (
        ("callers", towards, [CALLEE_SIDE, CALLER_SIDE]),
        ("callees", onwards, [CALLER_SIDE, CALLEE_SIDE]),
    ):
        others = {each.key: _other_end(each, name == "callers") for each in relations}
        shown = _busiest(snapshot, relations, sides, wanted, newest, _RELATION, others)
        listed[name], left_out[name] = shown[:MOST], max(0, len(shown) - MOST)
    statements = _statements(snapshot, found, wanted)
    return {
        "service": {
            "id": found.id,
            "name": found.name,
            "layers": sorted(snapshot.layers([found.key]).get(found.key, ())),
        },
        "grain": wanted.grain.value,
        "from": wanted.start_s,
        "to": wanted.end_s,
        "times": wanted.times,
        "range": {each: over.get(each) for each in _OWN},
        "series": {
            **{each: series.get(each, nothing) for each in _OWN if each != "p99"},
            "percentiles": figures.ranks(line),
        },
        **listed,
        "statements": statements[:MOST],
        "left_out": {**left_out, "statements": max(0, len(statements) - MOST)},
    }


def _busiest(
    snapshot: Snapshot,
    entities: Sequence[Named],
    kinds: Sequence[Kind],
    wanted: Range,
    newest: int | None,
    shown: Sequence[str],
    others: Mapping[int, tuple[str, str]] | None = None,
) -> list[dict[str, Any]]:
    """The figures of entities over the range, the busiest first; of kinds the first with calls."""
    found: list[tuple[int, dict[str, Any]]] = []
    left = list(entities)
    metrics = snapshot.metrics()
    for kind in kinds:
        reader = Reader(snapshot, kind.chosen(metrics))
        if not reader.metrics or not left:
            continue
        rows = reader.ranged(wanted, newest, [each.key for each in left])
        figures, minutes = reader.figures, wanted.minutes(newest)
        idle = []
        for each in left:
            more, less = rows.get(each.key, Parts([], []))
            over = figures.over(more, minutes, less)
            if all(value is None for value in over.values()):
                idle.append(each)
                continue
            id_, name = (others or {}).get(each.key, (each.id, each.name))
            line = {"id": id_, "name": name, **{figure: over.get(figure) for figure in shown}}
            found.append((figures.calls(more, less), line))
        left = idle
    found.sort(key=lambda each: (-each[0], each[1]["name"], each[1]["id"]))
    return [line for _, line in found]


def _other_end(relation: Named, caller: bool) -> tuple[str, str]:
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


def _statements(snapshot: Snapshot, found: Named, wanted: Range) -> list[dict[str, Any]]:
    """The slow statements, each normalised text once: its slowest run, and how often it ran."""
    lines: list[dict[str, Any]] = []
    for stream in (BY_SERVICE, BY_DATABASE):
        records = snapshot.slowest(stream, wanted.buckets, entity=found.key, n=_MOST_RECORDS)
        if not records:
            continue
        totals = snapshot.statement_totals(stream, wanted.buckets, found.key)
        databases = (
            _databases(snapshot, wanted, [each.span_id for each in records])
            if stream == BY_SERVICE
            else {}
        )
        slowest = {each.normalised or each.statement: each for each in reversed(records)}
        for text, each in slowest.items():
            runs, total_ms = totals.get(text, (0, 0))
            lines.append(
                {
                    "database": found.name
                    if stream == BY_DATABASE
                    else databases.get((each.trace_id, each.span_id)),
                    "statement": each.statement,
                    "normalised": each.normalised,
                    "latency": each.latency,
                    "runs": runs,
                    "total_ms": total_ms,
                    "trace_id": each.trace_id,
                    "time": each.time_us // 1_000_000,
                }
            )
    lines.sort(key=lambda line: (-line["latency"], line["time"], line["statement"]))
    return lines


def _databases(
    snapshot: Snapshot, wanted: Range, spans: Sequence[str]
) -> dict[tuple[str, str], str]:
    """Which database a slow statement of a service ran in: the same span is one of that, too."""
    records = snapshot.slowest(BY_DATABASE, wanted.buckets, n=_MOST_RECORDS)
    among = frozenset(spans)
    return {
        (each.trace_id, each.span_id): each.entity_name for each in records if each.span_id in among
    }
