"""One entity of any kind over a range: its charts, what belongs to it, who calls it, statements.

The response describes a page: groups of charts from the store's registry, and lists of other
entities. So a page needs to know neither kinds of entities nor names of metrics.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from batchmill.sources import EntityIdError, Grain, split_entity_id
from batchmill.store import EntityName, Snapshot, StoredMetric
from batchmill.traces import SpanReader
from batchmill.web.api.coverage import Coverage
from batchmill.web.api.description import MEASURES, Chart, Group, groups
from batchmill.web.api.listing import find_entity
from batchmill.web.api.measures import (
    MANY,
    Number,
    RangeRows,
    Row,
    RowReader,
    few_or_busiest,
    merged,
)
from batchmill.web.api.parameters import SIZES_S, TimeRange
from batchmill.web.api.service import (
    MOST,
    MOST_TRACED,
    find_service,
    part_statements,
    slow_statements,
)
from batchmill.web.responses import NotFound

PARAMS = ("from", "to", "grain")
KINDS = (
    *("service", "instance", "endpoint", "given"),
    *("service_relation", "instance_relation", "endpoint_relation"),
)
MOST_LABELS = 12
_MOST_PARTS = 20_000
_PART = ("cpm", "avg", "p99", "success")
_SIDES = {"caller": "CLIENT", "callee": "SERVER"}
"""Who reports a call, and the detect point of those reports."""
ROLES = {
    "VIRTUAL_DATABASE": "Database",
    "VIRTUAL_CACHE": "Cache",
    "VIRTUAL_MQ": "Message queue",
    "VIRTUAL_GENAI": "Language model provider",
}
_ROLES_BY_SOURCE = {
    "DatabaseAccess": "Database",
    "CacheAccess": "Cache",
    "MQAccess": "Message queue",
    "GenAIProviderAccess": "Language model provider",
    "MQEndpointAccess": "Topic",
    "GenAIModelAccess": "Model",
}
_PARTS_OF = {
    "Message queue": ("Topics", "Topic", "Consumers", "Consumer"),
    "Language model provider": ("Operations", "Operation", "Models", "Model"),
}
_NAMES = {
    "service": "Service",
    "instance": "Instance",
    "endpoint": "Endpoint",
    "service_relation": "Calls between services",
    "instance_relation": "Calls between instances",
    "endpoint_relation": "Calls between endpoints",
    "given": "Entity",
}


@dataclass(frozen=True, slots=True)
class _EntityList:
    """A list of a page: entities, and what is shown of each instead of itself."""

    key: str
    title: str
    label: str
    empty: str
    entities: Sequence[EntityName]
    shown: Mapping[int, tuple[str, str, str]] | None = None
    """By key, the kind, id and name of another entity: the other end of a relation."""
    sides: tuple[str, ...] = ()
    """Who may report the calls, the preferred one first."""
    count: int = 0
    """How many entities there are, if the less busy are left out."""


def entity(
    snapshot: Snapshot,
    kind: str,
    given: str,
    time_range: TimeRange,
    spans: SpanReader | None = None,
) -> dict[str, Any]:
    """All about the entity of that kind with that id or name; ``spans`` are the kept ones."""
    named = _find(snapshot, kind, given)
    metrics = snapshot.metrics()
    coverage = Coverage.read(snapshot, time_range, metrics)
    same = [other for other in snapshot.find("given", ids=[named.id]) if other.key != named.key]
    keys = [named.key, *(other.key for other in same)] if named.key >= 0 else []
    layers = sorted(snapshot.layers(keys[:1]).get(named.key, ())) if keys else []
    page = _PageReader(snapshot, metrics, coverage)
    own = [group for group in groups(metrics) if group.kind in (kind, "given", None)]
    shown = page.groups(own, keys)
    role = _role(kind, layers, [group["key"].partition(" ")[0] for group in shown])
    if not shown and kind == "service":
        callers = snapshot.find("service_relation", id_ends=f"-{named.id}", most=_MOST_PARTS)
        relations = [
            group
            for group in groups(metrics, "service_relation")
            if group.filters == ("detectPoint == CLIENT",)
        ]
        shown = page.groups(relations, [relation.key for relation in callers])
    return {
        "entity": {
            **_reference(kind, named.id, named.name),
            "layers": layers,
            "role": role or _NAMES[kind],
            "ends": [_reference(*end) for end in _ends(kind, named.id)],
        },
        "grain": time_range.step,
        "from": time_range.start_s,
        "to": time_range.end_s,
        "times": time_range.times,
        "incomplete": coverage.incomplete_s,
        "groups": shown,
        "lists": [page.listed(of) for of in _lists(page, kind, named, role)],
        "statements": _statements(snapshot, kind, named, role, time_range, spans),
    }


def _find(snapshot: Snapshot, kind: str, given: str) -> EntityName:
    if kind not in KINDS:
        raise NotFound(f"there are no entities of kind {kind[:64]!r}: there are {', '.join(KINDS)}")
    if kind == "service":
        return find_service(snapshot, given)
    return find_entity(snapshot, kind, given)


def _role(kind: str, layers: Sequence[str], sources: Sequence[str]) -> str | None:
    """What an entity is besides its kind, by its layers and by the metrics that it has."""
    roles = [ROLES[layer] for layer in layers if layer in ROLES and kind == "service"]
    roles += [_ROLES_BY_SOURCE[source] for source in sources if source in _ROLES_BY_SOURCE]
    return roles[0] if roles else None


def _reference(kind: str, id_: str, name: str) -> dict[str, str]:
    return {"kind": kind, "id": id_, "name": name}


def _name(kind: Any, id_: str) -> str:
    """The name in an id; of a relation, those of both ends."""
    try:
        names = split_entity_id(kind, id_)
    except EntityIdError:
        return id_
    return " → ".join((names[0], names[-1])) if kind == "service_relation" else names[-1]


def _ends(kind: str, id_: str) -> list[tuple[str, str, str]]:
    """The entities that an id is made of: the service of a part, the two ends of a relation."""
    parts = id_.split("-")
    if kind in ("instance", "endpoint"):
        ids = [("service", id_.partition("_")[0])]
    elif kind == "service_relation" and len(parts) == 2:
        ids = [("service", part) for part in parts]
    elif kind == "instance_relation" and len(parts) == 2:
        ids = [("instance", part) for part in parts]
    elif kind == "endpoint_relation" and len(parts) == 4:
        ids = [("endpoint", f"{parts[0]}_{parts[1]}"), ("endpoint", f"{parts[2]}_{parts[3]}")]
    else:
        return []
    return [(of, end, _name(of, end)) for of, end in ids]


@dataclass(slots=True)
class _PageReader:
    """Reads the groups and lists of one page."""

    snapshot: Snapshot
    metrics: Sequence[StoredMetric]
    coverage: Coverage
    _coverage_of: dict[str, Coverage] = field(default_factory=dict)

    def coverage_of(self, source: str) -> Coverage:
        """The coverage of the range by events of one type."""
        if source not in self._coverage_of:
            self._coverage_of[source] = Coverage.read(
                self.snapshot, self.time_range, self.metrics, source
            )
        return self._coverage_of[source]

    @property
    def time_range(self) -> TimeRange:
        """The range that is shown."""
        return self.coverage.range

    def groups(self, candidates: Iterable[Group], keys: Sequence[int]) -> list[dict[str, Any]]:
        """The groups that have data of these entities in the range, or of the days around it."""
        shown: list[dict[str, Any]] = []
        if not keys:
            return shown
        days = TimeRange(
            self.time_range.start_s // SIZES_S[Grain.DAY] * SIZES_S[Grain.DAY],
            self.time_range.end_s,
            Grain.DAY,
        ).buckets
        present: dict[str, bool] = {}
        for group in candidates:
            some = [metric.metric for metric in group.metrics[:1]]
            if group.source not in present:
                rows = self.snapshot.cells(some, days, entities=keys, most=1).rows
                present[group.source] = bool(rows)
            if present[group.source]:
                description = self._group(group, keys)
                if description["charts"]:
                    shown.append(description)
        return shown

    def _group(self, group: Group, keys: Sequence[int]) -> dict[str, Any]:
        chosen = group.measures.chosen(self.metrics, self.time_range)
        charts = group.charts(chosen)
        reader = RowReader(
            self.snapshot, {chart.metric.metric.name: chart.metric.metric for chart in charts}
        )
        measures, coverage = reader.measures, self.coverage_of(group.source)
        rows = reader.rows(self.time_range.buckets, keys)
        whole = merged(reader.ranged(coverage, keys).values())
        over = measures.values_over(whole, coverage.minutes)
        points = measures.points(rows, self.time_range)
        covered = coverage.minutes_by_bucket
        shown = []
        for chart in charts:
            description = self._chart(chart, measures.value, points, covered, over)
            if description["series"]:
                shown.append(description)
        figures = {chart["key"]: _figure(chart) for chart in shown if chart["key"] in MEASURES}
        return {
            "key": group.key,
            "title": group.title,
            "range": {measure: figures.get(measure) for measure in MEASURES},
            "charts": shown,
        }

    def _chart(
        self,
        chart: Chart,
        value: Any,
        points: Sequence[Row | None],
        covered: Sequence[int],
        over: Mapping[str, Any],
    ) -> dict[str, Any]:
        metric = chart.metric
        name = metric.metric.name
        lines: dict[str, list[Number]] = {}
        for index, (row, minutes) in enumerate(zip(points, covered, strict=True)):
            if row is None:
                continue
            for label, number in metric.shown(value(name, row, minutes)).items():
                line = lines.setdefault(label, [None] * len(points))
                line[index] = number
        total = metric.shown(over[name])
        labels = _labels(lines, total)
        return {
            "key": chart.key,
            "title": chart.title,
            "metric": name,
            "unit": metric.unit,
            "least": metric.least,
            "series": [
                {"label": label, "over": total.get(label), "values": lines[label]}
                for label in labels[:MOST_LABELS]
            ],
            "left_out": max(0, len(labels) - MOST_LABELS),
        }

    def listed(self, of: _EntityList) -> dict[str, Any]:
        """A list of a page, the busiest first."""
        by_id = {named.id: named for named in of.entities}
        kinds = sorted({named.kind for named in of.entities})
        candidates = [group for kind in kinds for group in groups(self.metrics, kind)]
        candidates = [group for group in candidates if "cpm" in group.measures.names]
        sides = {
            name: {line["id"]: line for line in self._busiest(of, candidates, name)}
            for name in of.sides
        }
        lines = self._busiest(of, candidates, None) if not sides else _preferred(sides)
        rows = []
        for line in lines[:MOST]:
            named = by_id[line["id"]]
            shown = (of.shown or {}).get(named.key, (named.kind, named.id, named.name))
            rows.append(
                {
                    **_reference(*shown),
                    "relation_kind": named.kind if of.shown else None,
                    "relation_id": named.id if of.shown else None,
                    **_measured(line),
                    **{
                        name: _measured(sides[name][named.id])
                        if named.id in sides.get(name, {})
                        else None
                        for name in _SIDES
                    },
                }
            )
        return {
            "key": of.key,
            "title": of.title,
            "label": of.label,
            "empty": of.empty,
            "rows": rows,
            "left_out": max(0, max(of.count, len(lines)) - MOST),
        }

    def few(self, kind: str, most: int = MOST, /, **ids: str) -> tuple[list[EntityName], int]:
        """The entities whose ids begin or end so; of many the busiest, and their count."""
        sets = [group.measures for group in groups(self.metrics, kind)]
        return few_or_busiest(self.snapshot, kind, sets, self.time_range, most, **ids)

    def _busiest(
        self, of: _EntityList, candidates: Iterable[Group], side: str | None
    ) -> list[dict[str, Any]]:
        """The entities of a list, the busiest first; of one side of calls, or of either.

        An entity has the measures of the first event type that has calls of it.
        """
        sets = [
            group.measures for group in candidates if side is None or _side(group) in (side, None)
        ]
        ranked: list[tuple[int, dict[str, Any]]] = []
        left = list(of.entities)
        for measure_set in sets:
            reader = RowReader(self.snapshot, measure_set.chosen(self.metrics, self.time_range))
            if not reader.metrics or not left:
                continue
            coverage = self.coverage_of(measure_set.source)
            rows = reader.ranged(coverage, [named.key for named in left])
            measures, minutes = reader.measures, coverage.minutes
            idle = []
            for named in left:
                own = rows.get(named.key, RangeRows([], []))
                over = measures.over(own, minutes)
                if all(value is None for value in over.values()):
                    idle.append(named)
                    continue
                line = {"id": named.id, **{measure: over.get(measure) for measure in _PART}}
                ranked.append((measures.calls(own), line))
            left = idle
        ranked.sort(key=lambda part: (-part[0], part[1]["id"]))
        return [line for _, line in ranked]


def _measured(line: Mapping[str, Any]) -> dict[str, Number]:
    return {measure: line[measure] for measure in _PART}


def _preferred(sides: Mapping[str, Mapping[str, dict[str, Any]]]) -> list[dict[str, Any]]:
    """Each entity once, as the first side that reports it does; the busiest first."""
    lines: dict[str, dict[str, Any]] = {}
    for reported in sides.values():
        for id_, line in reported.items():
            lines.setdefault(id_, line)
    return sorted(lines.values(), key=lambda line: (-(line["cpm"] or 0), line["id"]))


def _side(group: Group) -> str | None:
    """Who reports the calls of a group; None if it does not say."""
    points = {f"detectPoint == {point}": side for side, point in _SIDES.items()}
    sides = [points[text] for text in group.filters if text in points]
    return sides[0] if sides else None


def _figure(chart: Mapping[str, Any]) -> Number:
    """The number of a chart over the whole range; of percentiles the highest rank."""
    over: Number = chart["series"][-1]["over"]
    return over


def _labels(lines: Mapping[str, Any], total: Mapping[str, Number]) -> list[str]:
    """Percentiles by rank, other labels by size."""
    if all(label[:1] == "p" and label[1:].isdigit() for label in lines):
        return sorted(lines, key=lambda label: int(label[1:]))
    return sorted(lines, key=lambda label: (-(total.get(label) or 0), label))


def _lists(
    page: _PageReader, kind: str, named: EntityName, role: str | None
) -> Iterable[_EntityList]:
    id_ = named.id
    if kind == "service":
        yield from _parts(page, named, role)
        yield from _relations(page, "service_relation", id_, "Service", ("service", 1))
    elif kind == "instance":
        yield from _relations(page, "instance_relation", id_, "Instance", ("instance", 1))
    elif kind == "endpoint" and "_" in id_:
        dashed = id_.replace("_", "-", 1)
        yield from _relations(page, "endpoint_relation", dashed, "Endpoint", ("endpoint", 2))
    elif kind == "service_relation" and len(ends := id_.split("-")) == 2:
        for part, title, mark in (
            ("endpoint_relation", "Endpoints", f"-{ends[1]}-"),
            ("instance_relation", "Instances", f"-{ends[1]}_"),
        ):
            begins = f"{ends[0]}-" if part == "endpoint_relation" else f"{ends[0]}_"
            among = page.snapshot.find(part, id_begins=begins, most=_MOST_PARTS)
            inside = [relation for relation in among if mark in relation.id]
            count = 0
            if len(inside) > MANY:
                count = len(inside)
                busy, _ = page.few(part, _MOST_PARTS, id_begins=begins)
                inside = [relation for relation in busy if mark in relation.id][:MOST]
            shown = {
                relation.key: (part, relation.id, _between(part, relation.id))
                for relation in inside
            }
            empty = f"No calls between {title.lower()} in this time range."
            heading = f"Calls between {title.lower()}"
            yield _EntityList(part, heading, "Caller → callee", empty, inside, shown, count=count)


def _between(kind: Any, id_: str) -> str:
    try:
        names = split_entity_id(kind, id_)
    except EntityIdError:
        return id_
    return f"{names[1]} → {names[3]}"


def _parts(page: _PageReader, named: EntityName, role: str | None) -> Iterable[_EntityList]:
    names = _PARTS_OF.get(role or "", ("Endpoints", "Endpoint", "Instances", "Instance"))
    for part, title, label in (("endpoint", *names[:2]), ("instance", *names[2:])):
        some, count = page.few(part, id_begins=f"{named.id}_")
        if some or role is None:
            empty = f"No calls to {title.lower()} in this time range."
            yield _EntityList(f"{part}s", title, label, empty, some, count=count)


def _relations(
    page: _PageReader, kind: str, id_: str, label: str, end: tuple[str, int]
) -> Iterable[_EntityList]:
    """Callers and callees; each as the entity itself reports it, else as the other side does."""
    of, length = end
    for key, title, sides in (
        ("callers", "Called by", ("callee", "caller")),
        ("callees", "Calls", ("caller", "callee")),
    ):
        callers = key == "callers"
        where = {"id_ends": f"-{id_}"} if callers else {"id_begins": f"{id_}-"}
        relations, count = page.few(kind, **where)
        shown = {}
        for relation in relations:
            parts = relation.id.split("-")
            other = "_".join(parts[:length] if callers else parts[-length:])
            name = _name(of, other)
            if of != "service":
                name = f"{_name('service', other.partition('_')[0])}: {name}"
            shown[relation.key] = (of, other, name)
        way = "from" if callers else "to"
        empty = f"No calls {way} other {of}s in this time range."
        yield _EntityList(key, title, label, empty, relations, shown, sides, count)


def _statements(
    snapshot: Snapshot,
    kind: str,
    named: EntityName,
    role: str | None,
    time_range: TimeRange,
    spans: SpanReader | None,
) -> dict[str, Any] | None:
    """The slow statements of a service, a database, the one at the other, or a service's part.

    Of a cache, its slow commands.
    """
    title, label, empty = (
        "Slow statements",
        "Statement",
        "No database statements in this time range.",
    )
    if role == "Cache":
        title, label, empty = "Slow commands", "Command", "No slow commands in this time range."
    if kind == "service" and named.key >= 0:
        rows = slow_statements(snapshot, named, time_range)
    elif kind == "service_relation" and len(ends := named.id.split("-")) == 2:
        caller = snapshot.find("service", ids=[ends[0]])
        rows = slow_statements(snapshot, caller[0], time_range) if caller else []
        rows = [row for row in rows if row["database_id"] == ends[1]]
    elif kind in ("endpoint", "instance") and spans is not None and named.key >= 0:
        service = snapshot.find("service", ids=[named.id.partition("_")[0]])
        if not service:
            return None
        made = part_statements(snapshot, service[0], kind, named, time_range, spans)
        if made is None:
            return None
        rows = made
        empty = (
            f"None of the {MOST_TRACED} slowest statements of its service was made by it, as far "
            "as their traces are kept."
        )
    else:
        return None
    return {
        "title": title,
        "label": label,
        "rows": rows[:MOST],
        "left_out": max(0, len(rows) - MOST),
        "empty": empty,
    }
