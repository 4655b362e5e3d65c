"""One service over a range: measures, endpoints, instances, callers, callees, slow statements."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from batchmill.sources import EntityIdError, instance_id, service_id, split_entity_id
from batchmill.store import EntityName, Snapshot, StoredMetric, TopRecord
from batchmill.traces import SpanReader
from batchmill.web.api.coverage import Coverage
from batchmill.web.api.listing import find_entity
from batchmill.web.api.measures import (
    CACHE,
    CALLER_SIDE,
    DATABASE,
    ENDPOINT,
    INSTANCE,
    RANKS,
    SERVICE,
    MeasureSet,
    Number,
    RangeRows,
    RowReader,
    few_or_busiest,
    merged,
)
from batchmill.web.api.parameters import TimeRange
from batchmill.web.api.relations import SIDES, read_relations
from batchmill.web.responses import NotFound

PARAMS = ("from", "to", "grain")
MOST = 100
"""Entries of each list: the busiest, or the slowest."""
_MOST_PARTS = 20_000
_MOST_RECORDS = 2_000
MOST_TRACED = 50
"""Of so many statements of a service kept spans are asked which part of it made them."""
_OWN = ("cpm", "avg", "p99", "success", "apdex")
_PART = ("cpm", "avg", "p99", "success")
_NO_KEY = -1
"""Of a service that the store knows from relations only."""
BY_SERVICE = "top_n_service_database_statement"
BY_DATABASE = "top_n_database_statement"
CACHE_COMMANDS = ("top_n_cache_read_command", "top_n_cache_write_command")


def service(snapshot: Snapshot, given: str, time_range: TimeRange) -> dict[str, Any]:
    """All about the service with that id or name, be it a database or a host outside."""
    metrics = snapshot.metrics()
    coverage = Coverage.read(snapshot, time_range, metrics)
    entity = find_service(snapshot, given)
    seen = _seen_by(snapshot, coverage, metrics, entity)
    own = seen.own(coverage)
    listed, left_out = {}, {}
    for name, entity_kind, kind in (
        ("endpoints", "endpoint", ENDPOINT),
        ("instances", "instance", INSTANCE),
    ):
        parts, count = few_or_busiest(
            *(snapshot, entity_kind, [kind], time_range, MOST), id_begins=f"{entity.id}_"
        )
        shown = _busiest(snapshot, coverage, metrics, parts, kind)
        listed[name], left_out[name] = shown[:MOST], max(0, max(count, len(shown)) - MOST)
    for name, ids in (
        ("callers", {"id_ends": f"-{entity.id}"}),
        ("callees", {"id_begins": f"{entity.id}-"}),
    ):
        relations, count = few_or_busiest(
            *(snapshot, "service_relation", SIDES.values(), time_range, MOST), **ids
        )
        shown = _related(snapshot, coverage, metrics, relations, caller=name == "callers")
        listed[name], left_out[name] = shown[:MOST], max(0, max(count, len(shown)) - MOST)
    statements = slow_statements(snapshot, entity, time_range)
    return {
        "service": {
            "id": entity.id,
            "name": entity.name,
            "layers": sorted(snapshot.layers([entity.key]).get(entity.key, ())),
        },
        "measured_by": seen.side,
        "grain": time_range.step,
        "from": time_range.start_s,
        "to": time_range.end_s,
        "times": time_range.times,
        "incomplete": coverage.incomplete_s,
        **own,
        **listed,
        "statements": statements[:MOST],
        "left_out": {**left_out, "statements": max(0, len(statements) - MOST)},
    }


def find_service(snapshot: Snapshot, given: str) -> EntityName:
    """The service with that id or name; also one that is known from its callers only."""
    try:
        return find_entity(snapshot, "service", given)
    except NotFound:
        ids = [given, service_id(given, normal=False), service_id(given, normal=True)]
        for id_ in ids:
            if name_of(id_) != id_ and (
                snapshot.find("service_relation", id_ends=f"-{id_}", most=1)
                or snapshot.find("service_relation", id_begins=f"{id_}-", most=1)
            ):
                return EntityName(_NO_KEY, "service", id_, name_of(id_))
        raise


@dataclass(frozen=True, slots=True)
class _ServiceRows:
    """The rows that show a service: its own, or those of the calls to it."""

    side: str
    """``itself``, or ``callers`` if it reports nothing itself."""
    reader: RowReader
    keys: Sequence[int]

    def own(self, coverage: Coverage) -> dict[str, Any]:
        """Its measures over the range, and by bucket."""
        measures, time_range = self.reader.measures, coverage.range
        over = measures.over(
            merged(self.reader.ranged(coverage, self.keys).values()), coverage.minutes
        )
        points = measures.points(self.reader.rows(time_range.buckets, self.keys), time_range)
        series: dict[str, list[Number]] = {measure: [] for measure in _OWN}
        ranks: dict[str, list[Number]] = {rank: [] for rank in RANKS}
        for row, minutes in zip(points, coverage.minutes_by_bucket, strict=True):
            inside = RangeRows([] if row is None else [row], [])
            shown = measures.over(inside, minutes)
            for measure in _OWN:
                series[measure].append(shown.get(measure))
            for rank, value in measures.ranks_over(inside).items():
                ranks[rank].append(value)
        del series["p99"]
        return {
            "range": {measure: over.get(measure) for measure in _OWN},
            "series": {**series, "percentiles": ranks},
        }


def _seen_by(
    snapshot: Snapshot,
    coverage: Coverage,
    metrics: Sequence[StoredMetric],
    entity: EntityName,
) -> _ServiceRows:
    """Who measures a service: itself; else its clients, who report accesses, or calls."""

    def reader_of(kind: MeasureSet) -> RowReader:
        return RowReader(snapshot, kind.chosen(metrics, coverage.range))

    itself = _ServiceRows("itself", reader_of(SERVICE), [entity.key])
    accesses = [
        _ServiceRows("callers", reader_of(kind), [entity.key]) for kind in (DATABASE, CACHE)
    ]
    for seen in (itself, *accesses):
        if seen.reader.rows(coverage.range.buckets, seen.keys):
            return seen
    towards = snapshot.find("service_relation", id_ends=f"-{entity.id}", most=_MOST_PARTS)
    callers = _ServiceRows(
        "callers", reader_of(CALLER_SIDE), [relation.key for relation in towards]
    )
    return callers if callers.reader.rows(coverage.range.buckets, callers.keys) else itself


def _busiest(
    snapshot: Snapshot,
    coverage: Coverage,
    metrics: Sequence[StoredMetric],
    entities: Sequence[EntityName],
    kind: MeasureSet,
) -> list[dict[str, Any]]:
    """The measures of entities over the range, the busiest first."""
    reader = RowReader(snapshot, kind.chosen(metrics, coverage.range))
    rows = reader.ranged(coverage, [entity.key for entity in entities])
    measures = reader.measures
    ranked: list[tuple[int, dict[str, Any]]] = []
    for entity in entities:
        own = rows.get(entity.key, RangeRows([], []))
        over = measures.over(own, coverage.minutes)
        if any(value is not None for value in over.values()):
            line = {"id": entity.id, "name": entity.name}
            ranked.append((measures.calls(own), line | {name: over.get(name) for name in _PART}))
    ranked.sort(key=lambda part: (-part[0], part[1]["name"], part[1]["id"]))
    return [line for _, line in ranked]


def _related(
    snapshot: Snapshot,
    coverage: Coverage,
    metrics: Sequence[StoredMetric],
    entities: Sequence[EntityName],
    *,
    caller: bool,
) -> list[dict[str, Any]]:
    """The services at the other end of relations, the busiest first, with both sides' measures."""
    keys = [entity.key for entity in entities]
    relations = read_relations(snapshot, coverage, metrics, keys).by_key.values()
    ranked: list[tuple[int, dict[str, Any]]] = []
    for relation in relations:
        id_, name = _other_end(relation.entity, caller)
        # As the service itself reports them, else as the other side does.
        first = relation.sides.get("callee" if caller else "caller", {})
        line = {"id": id_, "name": name, **relation.as_json(), **first}
        ranked.append((relation.calls, line))
    ranked.sort(key=lambda part: (-part[0], part[1]["name"], part[1]["id"]))
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
    """The slow statements of a service or database, or the slow commands of a cache.

    Each normalised text once: its slowest run, and how often it ran.
    """
    lines: list[dict[str, Any]] = []
    for stream in (BY_SERVICE, BY_DATABASE, *CACHE_COMMANDS):
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
            database = databases.get(span, (None, None)) if stream == BY_SERVICE else own
            lines.append(_statement(record, database, runs, total_ms))
    lines.sort(key=lambda line: (-line["latency"], line["time_us"], line["statement"]))
    return lines


def part_statements(
    snapshot: Snapshot,
    service: EntityName,
    kind: str,
    part: EntityName,
    time_range: TimeRange,
    spans: SpanReader,
) -> list[dict[str, Any]] | None:
    """Those among the slowest statements of a service that an endpoint or instance of it made.

    Each text once. The store does not know which of them made a statement: kept spans tell, of few
    statements. None: the service has no slow statements.
    """
    records = snapshot.slowest(BY_SERVICE, time_range.buckets, entity=service.key, n=MOST_TRACED)
    if not records:
        return None
    times = [record.time_us for record in records]
    ids = [(record.trace_id, record.span_id) for record in records]
    if kind == "endpoint":
        calls = spans.served_calls(ids, min(times), max(times))
        mine = {span for span, name in calls.items() if name == part.name}
    else:
        names = spans.instances(ids, min(times), max(times))
        mine = {span for span, name in names.items() if instance_id(service.id, name) == part.id}
    own = [record for record, span in zip(records, ids, strict=True) if span in mine]
    databases = _databases(snapshot, time_range, [record.span_id for record in own])
    slowest = {record.normalised or record.statement: record for record in reversed(own)}
    return [
        _statement(record, databases.get((record.trace_id, record.span_id), (None, None)))
        for record in sorted(slowest.values(), key=lambda record: record.rank)
    ]


def _statement(
    record: TopRecord, database: tuple[str | None, str | None], runs: int = 0, total_ms: int = 0
) -> dict[str, Any]:
    return {
        "database_id": database[0],
        "database_name": database[1],
        "statement": record.statement,
        "normalised": record.normalised,
        "latency": record.latency,
        "runs": runs,
        "total_ms": total_ms,
        "trace_id": record.trace_id,
        "time_us": record.time_us,
    }


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
