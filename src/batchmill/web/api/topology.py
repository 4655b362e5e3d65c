"""The calls between services over a range, from the metrics of relations."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from batchmill.store import EntityName, Snapshot, StoredMetric
from batchmill.web.api.coverage import Coverage
from batchmill.web.api.measures import (
    MANY,
    SERVICE,
    Measures,
    RangeRows,
    RowReader,
    busiest,
    merged,
)
from batchmill.web.api.parameters import TimeRange
from batchmill.web.api.relations import SIDES, Relations, read_relations
from batchmill.web.api.service import name_of

PARAMS = ("from", "to", "grain", "layer")
MOST_NODES = 1_000
MOST_EDGES = 2_000
_SHOWN = ("cpm", "avg", "success")
"""The measures of a node."""


@dataclass(slots=True)
class _Node:
    id: str
    name: str
    layers: list[str] = field(default_factory=list)
    calls: int = 0
    measured: tuple[Measures, RangeRows] | None = None

    def as_json(self, minutes: int) -> dict[str, Any]:
        """With its measures: only of a node that is shown, as computing them takes most time."""
        over: Mapping[str, Any] = {}
        if self.measured is not None:
            measures, rows = self.measured
            over = measures.over(rows, minutes, _SHOWN)
        shown = {measure: over.get(measure) for measure in _SHOWN}
        return {"id": self.id, "name": self.name, "layers": self.layers, **shown}


def topology(snapshot: Snapshot, time_range: TimeRange, layer: str | None) -> dict[str, Any]:
    """Nodes and edges; with a layer, its services with their callers and callees."""
    metrics = snapshot.metrics()
    coverage = Coverage.read(snapshot, time_range, metrics)
    keys, edge_count = _busiest_edges(snapshot, coverage, metrics)
    relations = read_relations(snapshot, coverage, metrics, keys)
    edges = {relation.ends: relation for relation in relations.by_key.values()}
    nodes, node_count = _nodes(snapshot, coverage, metrics, relations)
    if layer is not None:
        inside = {node.id for node in nodes.values() if layer in node.layers}
        edges = {ends: edge for ends, edge in edges.items() if inside & set(ends)}
        kept = inside.union(*edges) if edges else inside
        nodes = {id_: node for id_, node in nodes.items() if id_ in kept}
    busy = sorted(nodes.values(), key=lambda node: (-node.calls, node.name, node.id))[:MOST_NODES]
    there = {node.id for node in busy}
    ranked = sorted(edges.items(), key=lambda item: (-item[1].calls, item[0]))
    minutes = coverage.minutes
    shown_edges = [(ends, edge) for ends, edge in ranked if there.issuperset(ends)][:MOST_EDGES]
    return {
        "from": time_range.start_s,
        "to": time_range.end_s,
        "nodes": [node.as_json(minutes) for node in busy],
        "edges": [
            {"from": caller, "to": callee, **edge.as_json()}
            for (caller, callee), edge in shown_edges
        ],
        "left_out": {
            "nodes": max(len(nodes), node_count) - len(busy),
            "edges": max(len(edges), edge_count) - len(shown_edges),
        },
    }


def _busiest_edges(
    snapshot: Snapshot, coverage: Coverage, metrics: Sequence[StoredMetric]
) -> tuple[list[int] | None, int]:
    """The relations to read, None for all; and how many there are, where some are left out."""
    if snapshot.count("service_relation") <= MANY:
        return None, 0
    keys: dict[int, None] = {}
    count = 0
    for measure_set in SIDES.values():
        reader = RowReader(snapshot, measure_set.chosen(metrics, coverage.range))
        most = min(MOST_EDGES, reader.room(coverage) // len(SIDES))
        ranking = busiest(snapshot, reader.metrics, coverage.range, most)
        if ranking is not None:
            keys |= dict.fromkeys(ranking.keys)
            count = max(count, ranking.total)
    return (list(keys), count) if keys else (None, 0)


def _nodes(
    snapshot: Snapshot,
    coverage: Coverage,
    metrics: Sequence[StoredMetric],
    relations: Relations,
) -> tuple[dict[str, _Node], int]:
    """Every service with calls of its own, and every end of an edge; of many the busiest.

    Also how many services there are, if some are left out; else 0.
    """
    reader = RowReader(snapshot, SERVICE.chosen(metrics, coverage.range))
    calls_by_end = _calls_by_end(relations)
    keys: list[int] | None = None
    count = 0
    if snapshot.count("service") > MANY:
        ranking = busiest(snapshot, reader.metrics, coverage.range, MOST_NODES)
        if ranking is not None:
            # The busiest ends of edges, too: their own figures are shown, if they have any.
            ends = sorted(calls_by_end.items(), key=lambda end: (-end[1], end[0]))
            busy = snapshot.find("service", ids=[id_ for id_, _ in ends[:MOST_NODES]])
            keys = list({*ranking.keys, *(entity.key for entity in busy)})
            count = ranking.total
    rows = reader.ranged(coverage, keys)
    measures = reader.measures
    served = snapshot.entity_names(rows)
    nodes = {
        entity.id: _Node(
            entity.id,
            entity.name,
            calls=measures.calls(rows[key]),
            measured=(measures, rows[key]),
        )
        for key, entity in served.items()
        if measures.has_values(rows[key])  # subtracting may leave a service without calls
    }
    incoming: defaultdict[str, list[RangeRows]] = defaultdict(list)
    for key, relation in relations.by_key.items():
        incoming[relation.ends[1]].append(relations.caller_rows.get(key, RangeRows([], [])))
    for id_, calls in calls_by_end.items():
        if id_ in nodes:
            continue
        # Who only calls, such as the users, is as busy as its calls are many.
        node = nodes[id_] = _Node(id_, name_of(id_), calls=calls)
        whole = merged(incoming[id_])
        if whole.more:  # as its callers report it
            node.calls = relations.caller_measures.calls(whole)
            node.measured = (relations.caller_measures, whole)
    known: dict[str, EntityName] = {
        entity.id: entity for entity in served.values() if entity.id in nodes
    }
    known |= {
        entity.id: entity for entity in snapshot.find("service", ids=nodes.keys() - known.keys())
    }
    layers = snapshot.layers(entity.key for entity in known.values())
    for id_, entity in known.items():
        nodes[id_].name = entity.name
        nodes[id_].layers = sorted(layers.get(entity.key, ()))
    return nodes, count


def _calls_by_end(relations: Relations) -> Counter[str]:
    """How many calls each end of a relation has made and got."""
    calls: Counter[str] = Counter()
    for relation in relations.by_key.values():
        for id_ in set(relation.ends):
            calls[id_] += relation.calls
    return calls
