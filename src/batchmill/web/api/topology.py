"""The calls between services over a range, from the metrics of relations."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from batchmill.store import EntityName, Snapshot
from batchmill.web.api.measures import (
    CALLEE_SIDE,
    CALLER_SIDE,
    SERVICE,
    Measures,
    RangeRows,
    RowReader,
)
from batchmill.web.api.parameters import TimeRange
from batchmill.web.api.service import name_of

PARAMS = ("from", "to", "grain", "layer")
MOST_NODES = 1_000
MOST_EDGES = 5_000


@dataclass(slots=True)
class _Node:
    id: str
    name: str
    layers: list[str] = field(default_factory=list)
    calls: int = 0
    measures: Mapping[str, Any] = field(default_factory=dict)


def topology(snapshot: Snapshot, time_range: TimeRange, layer: str | None) -> dict[str, Any]:
    """Nodes and edges; with a layer, its services with their callers and callees."""
    newest = snapshot.newest_minute()
    minutes = time_range.minutes(newest)
    metrics = snapshot.metrics()
    edges: dict[tuple[str, str], tuple[int, dict[str, Any]]] = {}
    incoming: dict[str, RangeRows] = {}
    caller_side: Measures | None = None
    # The callee's measures where it reports them; a database is known from its callers only.
    for kind in (CALLEE_SIDE, CALLER_SIDE):
        reader = RowReader(snapshot, kind.chosen(metrics, time_range))
        if not reader.metrics:
            continue
        rows = reader.ranged(time_range, newest)
        measures = reader.measures
        for key, named in snapshot.entity_names(rows).items():
            ends = named.id.split("-")
            if len(ends) != 2:
                continue
            if kind is CALLER_SIDE:
                caller_side = measures
                whole = incoming.setdefault(ends[1], RangeRows([], []))
                whole.more.extend(rows[key].more)
                whole.less.extend(rows[key].less)
            over = measures.over(rows[key], minutes)
            place = (ends[0], ends[1])
            if place not in edges and any(value is not None for value in over.values()):
                shown = {node: over.get(node) for node in ("cpm", "avg", "p99", "success")}
                edges[place] = (measures.calls(rows[key]), shown)
    nodes = _nodes(snapshot, time_range, newest, edges, incoming, caller_side)
    if layer is not None:
        inside = {node.id for node in nodes.values() if layer in node.layers}
        edges = {ends: edge for ends, edge in edges.items() if inside & set(ends)}
        kept = inside.union(*edges) if edges else inside
        nodes = {id_: node for id_, node in nodes.items() if id_ in kept}
    busy = sorted(nodes.values(), key=lambda node: (-node.calls, node.name, node.id))[:MOST_NODES]
    there = {node.id for node in busy}
    ranked = sorted(edges.items(), key=lambda item: (-item[1][0], item[0]))
    shown_edges = [node for node in ranked if node[0][0] in there and node[0][1] in there]
    shown_edges = shown_edges[:MOST_EDGES]
    return {
        "from": time_range.start_s,
        "to": time_range.end_s,
        "nodes": [
            {
                "id": node.id,
                "name": node.name,
                "layers": node.layers,
                **{measure: node.measures.get(measure) for measure in ("cpm", "avg", "success")},
            }
            for node in busy
        ],
        "edges": [
            {"from": caller, "to": callee, **measures}
            for (caller, callee), (_, measures) in shown_edges
        ],
        "left_out": {
            "nodes": len(nodes) - len(busy),
            "edges": len(edges) - len(shown_edges),
        },
    }


def _nodes(
    snapshot: Snapshot,
    time_range: TimeRange,
    newest: int | None,
    edges: Mapping[tuple[str, str], Any],
    incoming: Mapping[str, RangeRows],
    caller_side: Measures | None,
) -> dict[str, _Node]:
    """Every service with calls of its own, and every end of an edge."""
    reader = RowReader(snapshot, SERVICE.chosen(snapshot.metrics(), time_range))
    rows = reader.ranged(time_range, newest)
    measures, minutes = reader.measures, time_range.minutes(newest)
    served = snapshot.entity_names(rows)
    nodes = {
        entity.id: _Node(
            entity.id,
            entity.name,
            calls=measures.calls(rows[key]),
            measures=measures.over(rows[key], minutes),
        )
        for key, entity in served.items()
    }
    # Subtracting may leave a service without calls.
    nodes = {
        id_: entity
        for id_, entity in nodes.items()
        if any(value is not None for value in entity.measures.values())
    }
    for id_ in {end for ends in edges for end in ends} - nodes.keys():
        node = nodes[id_] = _Node(id_, name_of(id_))
        if caller_side is not None and id_ in incoming:  # as its callers report it
            node.calls = caller_side.calls(incoming[id_])
            node.measures = caller_side.over(incoming[id_], minutes)
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
    return nodes
