"""Who calls whom over a range, from the metrics of relations."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from batchmill.store import Named, Snapshot
from batchmill.web.api.figures import CALLEE_SIDE, CALLER_SIDE, SERVICE, Figures
from batchmill.web.api.range import Range
from batchmill.web.api.rows import Parts, Reader
from batchmill.web.api.service import name_of

PARAMS = ("from", "to", "grain", "layer")
MOST_NODES = 500
MOST_EDGES = 2_000


@dataclass(slots=True)
class _Node:
    id: str
    name: str
    layers: list[str] = field(default_factory=list)
    calls: int = 0
    figures: Mapping[str, Any] = field(default_factory=dict)


def topology(snapshot: Snapshot, wanted: Range, layer: str | None) -> dict[str, Any]:
    """The answer. With a layer: its services, and who calls them or is called by them."""
    newest = snapshot.newest_minute()
    minutes = wanted.minutes(newest)
    metrics = snapshot.metrics()
    edges: dict[tuple[str, str], tuple[int, dict[str, Any]]] = {}
    incoming: dict[str, Parts] = {}
    caller_side: Figures | None = None
    # The callee's side where it was observed; a database knows its callers' side only.
    for kind in (CALLEE_SIDE, CALLER_SIDE):
        reader = Reader(snapshot, kind.chosen(metrics))
        if not reader.metrics:
            continue
        rows = reader.ranged(wanted, newest)
        figures = reader.figures
        for key, named in snapshot.named(rows).items():
            ends = named.id.split("-")
            if len(ends) != 2:
                continue
            if kind is CALLER_SIDE:
                caller_side = figures
                whole = incoming.setdefault(ends[1], Parts([], []))
                whole.more.extend(rows[key].more)
                whole.less.extend(rows[key].less)
            over = figures.over(rows[key].more, minutes, rows[key].less)
            place = (ends[0], ends[1])
            if place not in edges and any(value is not None for value in over.values()):
                shown = {each: over.get(each) for each in ("cpm", "avg", "p99", "success")}
                edges[place] = (figures.calls(*rows[key]), shown)
    nodes = _nodes(snapshot, wanted, newest, edges, incoming, caller_side)
    if layer is not None:
        inside = {each.id for each in nodes.values() if layer in each.layers}
        edges = {ends: edge for ends, edge in edges.items() if inside & set(ends)}
        kept = inside.union(*edges) if edges else inside
        nodes = {id_: each for id_, each in nodes.items() if id_ in kept}
    busy = sorted(nodes.values(), key=lambda each: (-each.calls, each.name, each.id))[:MOST_NODES]
    there = {each.id for each in busy}
    ranked = sorted(edges.items(), key=lambda each: (-each[1][0], each[0]))
    shown_edges = [each for each in ranked if each[0][0] in there and each[0][1] in there]
    shown_edges = shown_edges[:MOST_EDGES]
    return {
        "from": wanted.start_s,
        "to": wanted.end_s,
        "nodes": [
            {
                "id": each.id,
                "name": each.name,
                "layers": each.layers,
                **{figure: each.figures.get(figure) for figure in ("cpm", "avg", "success")},
            }
            for each in busy
        ],
        "edges": [
            {"from": caller, "to": callee, **figures}
            for (caller, callee), (_, figures) in shown_edges
        ],
        "left_out": {
            "nodes": len(nodes) - len(busy),
            "edges": len(edges) - len(shown_edges),
        },
    }


def _nodes(
    snapshot: Snapshot,
    wanted: Range,
    newest: int | None,
    edges: Mapping[tuple[str, str], Any],
    incoming: Mapping[str, Parts],
    caller_side: Figures | None,
) -> dict[str, _Node]:
    """Every service that has calls of its own, or is an end of an edge."""
    reader = Reader(snapshot, SERVICE.chosen(snapshot.metrics()))
    rows = reader.ranged(wanted, newest)
    figures, minutes = reader.figures, wanted.minutes(newest)
    served = snapshot.named(rows)
    nodes = {
        each.id: _Node(
            each.id,
            each.name,
            calls=figures.calls(*rows[key]),
            figures=figures.over(rows[key].more, minutes, rows[key].less),
        )
        for key, each in served.items()
    }
    # Of some there may be nothing left but what was taken away.
    nodes = {
        id_: each
        for id_, each in nodes.items()
        if any(value is not None for value in each.figures.values())
    }
    for id_ in {end for ends in edges for end in ends} - nodes.keys():
        node = nodes[id_] = _Node(id_, name_of(id_))
        if caller_side is not None and id_ in incoming:  # as its clients see it
            more, less = incoming[id_]
            node.calls = caller_side.calls(more, less)
            node.figures = caller_side.over(more, minutes, less)
    known: dict[str, Named] = {each.id: each for each in served.values() if each.id in nodes}
    known |= {each.id: each for each in snapshot.find("service", ids=nodes.keys() - known.keys())}
    layers = snapshot.layers(each.key for each in known.values())
    for id_, each in known.items():
        nodes[id_].name = each.name
        nodes[id_].layers = sorted(layers.get(each.key, ()))
    return nodes
