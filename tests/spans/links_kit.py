"""Spans and batches of them, for the tests of links."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable
from typing import Any

import pyarrow as pa

from batchmill.spans.columns import compact
from batchmill.spans.hosts import KnownHosts
from batchmill.spans.links import SUMMARY_SCHEMA, Links, link
from batchmill.spans.sources import broker_rows, relation_rows
from batchmill.spool import SPAN_COLUMNS, SpanBatch, span_table
from tests.kit.spark import span

Span = dict[str, Any]
LINKED = (
    *("ServiceRelation", "ServiceInstanceRelation", "EndpointRelation"),
    *("MQAccess", "MQEndpointAccess"),
)
"""The event types whose rows come of pairs of spans."""


def served(span_id: str | None, parent: str | None = None, **changes: Any) -> Span:
    """A span that serves."""
    return span(span_id, parent_span_id=parent, **changes)


def called(span_id: str | None, **changes: Any) -> Span:
    """A span that calls."""
    return span(span_id, "CLIENT", **changes)


def compacted(spans: Iterable[Span]) -> pa.Table:
    """Those spans as :func:`link` takes them."""
    rows = list(spans)
    columns = {name: [row[name] for row in rows] for name in SPAN_COLUMNS}
    return compact(span_table(SpanBatch(columns)))


class Run:
    """Batches linked one after the other, each summary carried on for ``window`` batches."""

    def __init__(self, window: int | None = None) -> None:
        self._window = window
        self._summaries: dict[int, pa.Table] = {}
        self._number = 0
        self.relations: list[dict[str, Any]] = []
        self.messages: list[dict[str, Any]] = []
        """The rows of MQEndpointAccess of the last batch."""
        self.rows: dict[str, list[dict[str, Any]]] = {source: [] for source in LINKED}
        """Those of all batches, by event type."""
        self.lost: Counter[str] = Counter()
        self.hosts = KnownHosts()

    def batch(self, spans: Iterable[Span], expire: int | None = None) -> list[dict[str, Any]]:
        """Link one batch; its relations."""
        self._number += 1
        if expire is None and self._window is not None:
            expire = self._number - self._window
        pending = pa.concat_tables(self._summaries.values()) if self._summaries else None
        new = compacted(spans)
        links = link(new, pending, self._number, expire, self.hosts)
        self.hosts = self.hosts.after(links.answered, links.given_up)
        self._summaries[self._number] = self.summary(new, links)
        self.lost += links.unresolved
        for number in [number for number in self._summaries if number <= (expire or 0)]:
            del self._summaries[number]
        tables = relation_rows(links.relations, LINKED) | broker_rows(links.accessed, LINKED)
        for source, table in tables.items():
            self.rows[source] += table.to_pylist()
        self.messages = tables["MQEndpointAccess"].to_pylist() if len(links.accessed) else []
        relations: list[dict[str, Any]] = links.relations.to_pylist()
        self.relations += relations
        return relations

    def summary(self, new: pa.Table, links: Links) -> pa.Table:
        """What is carried on of a batch."""
        assert links.summary.column_names == SUMMARY_SCHEMA.names
        return links.summary

    def end(self) -> list[dict[str, Any]]:
        """Let everything expire."""
        return self.batch([], expire=self._number)

    def waiting(self, number: int) -> set[str | None]:
        """The spans of a batch that are not settled."""
        rows = self._summaries[number].to_pylist()
        return {row["span_id"] for row in rows if not row["settled"]}


def brief(relations: Iterable[dict[str, Any]]) -> list[str]:
    """Each relation as ``caller > callee/endpoint`` and its detect point, sorted."""
    return sorted(
        f"{row['sourceService']} > {row['destService']}/{row['endpoint']} {row['detectPoint']}"
        for row in relations
    )


FAR = {"peer.service": "far"}
HOST = {"server.address": "h", "server.port": "1"}
QUEUE = {"messaging.system": "kafka"}


def ways(messages: Iterable[dict[str, Any]]) -> list[str]:
    """Each message with its endpoint, and how long it took, sorted."""
    return sorted(
        f"{row['operation']} {row['endpoint']} {row['transmissionLatency']}" for row in messages
    )


SERVICES = ("a", "b", "c")


def forest(rng: random.Random) -> list[Span]:
    """Spans of a few traces with everything that can be odd about them."""
    spans: list[Span] = []
    for trace in range(rng.randint(1, 3)):
        made: list[Span] = []
        for number in range(rng.randint(1, 9)):
            pool = [f"s{number}" for number in range(9)] + [None, "", "gone"]
            parent = rng.choice(pool) if not made or rng.random() < 0.2 else made[-1]["span_id"]
            kind = rng.choice(("SERVER", "CONSUMER", "CLIENT", "PRODUCER", "INTERNAL"))
            made.append(
                span(
                    rng.choice((f"s{number}",) * 9 + (None,)),
                    kind,
                    name=f"op{number}",
                    service=rng.choice(SERVICES),
                    trace_id=rng.choice((f"t{trace}",) * 9 + (None,)),
                    parent_span_id=parent,
                    at=rng.randint(0, 3) * rng.choice((1, 900)),
                    us=rng.randint(0, 3) * 1000,
                    attributes=rng.choice(({}, FAR, QUEUE)),
                )
            )
        made += rng.sample(made, k=rng.randint(0, 2) if len(made) > 1 else 0)
        spans += made
    return spans
