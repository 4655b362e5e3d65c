"""What the tests of the kernel share: the metrics of a script, and stores that they fill."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from batchmill.aggregate import Aggregator, Deltas, EntityBook, contribution
from batchmill.oal import load
from batchmill.store import Batch, Layout, Store, cells, decode
from tests.oracle.catalog import Row
from tests.oracle.generate import to_table

States = dict[tuple[Any, ...], tuple[Any, ...]]
"""Metric, grain, bucket and entity id to the decoded states."""


class Kernel:
    """The metrics of a script: rows to deltas, by source, and deltas to states or into a store."""

    def __init__(self, oal: str, apdex_ms: Mapping[str, int] | None = None) -> None:
        self.metrics = load(oal)
        self.aggregators = {
            source: Aggregator(self.metrics.catalog.source(source), own, apdex_ms=apdex_ms)
            for source, own in self.metrics.by_source().items()
        }

    def make(self, events: Mapping[str, Sequence[Row]]) -> dict[str, Deltas]:
        """The deltas of rows, all of which are valid."""
        deltas = {}
        for source, rows in events.items():
            made = self.aggregators[source].make(to_table(source, rows))
            assert not made.invalid
            deltas[source] = made.deltas
        return deltas

    def merge(self, *parts: Mapping[str, Deltas]) -> dict[str, Deltas]:
        """The deltas of several batches as those of one."""
        sources = {source for part in parts for source in part}
        return {
            source: self.aggregators[source].merge(
                [part[source] for part in parts if source in part]
            )
            for source in sources
        }

    def states(self, deltas: Mapping[str, Deltas]) -> States:
        """What a store would merge, decoded."""
        columns = {
            metric.name: tuple(
                f"{metric.name}_{number}"
                for number, _ in enumerate(cell for state in metric.states for cell in cells(state))
            )
            for metric in self.metrics
        }
        states: States = {}
        batch = self._batch(deltas, Layout(columns), epoch=0, number=0)
        part: Any  # its columns are Arrow arrays here
        for part in batch.deltas:
            lists = {cell: column.to_pylist() for cell, column in part.cells.items()}
            lists |= {cell: lists[first] for cell, first in part.shared.items()}
            rows = list(zip(part.buckets.to_pylist(), part.entities.to_pylist(), strict=True))
            for metric in self.metrics.by_source()[part.source]:
                own = zip(*(lists[column] for column in columns[metric.name]), strict=True)
                for (bucket, entity), values in zip(rows, own, strict=True):
                    key = (metric.name, part.grain, bucket, batch.entities[entity].id)
                    assert key not in states
                    states[key] = _decoded(metric.states, values)
        return states

    def commit(self, store: Store, *batches: Mapping[str, Deltas], stream: str = "kernel") -> None:
        """Commit deltas to a store, each argument as one batch."""
        claim = store.claim(stream, f"{stream}-checkpoint", fresh=True, committed=None)
        layout = store.register(self.metrics, stream=stream)
        for number, deltas in enumerate(batches):
            assert store.commit(self._batch(deltas, layout, claim.epoch, number, stream)).applied

    def _batch(
        self,
        deltas: Mapping[str, Deltas],
        layout: Layout,
        epoch: int,
        number: int,
        stream: str = "kernel",
    ) -> Batch:
        book = EntityBook()
        batch = Batch(stream, epoch, number)
        for source, part in deltas.items():
            made = contribution(part, self.aggregators[source], layout, book)
            batch.deltas += made.deltas
            batch.newest_minute = max((batch.newest_minute or 0, *made.rows_by_minute))
        batch.entities = book.rows()
        return batch


def _decoded(states: Sequence[Any], values: Sequence[Any]) -> tuple[Any, ...]:
    decoded, rest = [], list(values)
    for state in states:
        size = len(cells(state))
        decoded.append(decode(state, rest[:size]))
        rest = rest[size:]
    return tuple(decoded)


Content = dict[tuple[Any, ...], dict[str, Any]]
"""Start and roles to the number of rows, the totals and the tallies, by their columns."""


def content(deltas: Deltas) -> Content:
    """Everything that deltas hold, whatever their order; each pair of bucket and entity once."""
    roles = (role.to_pylist() for role in deltas.roles)
    keys = list(zip(deltas.starts.tolist(), *roles, strict=True))
    assert len(set(keys)) == len(keys)
    columns: dict[str, list[Any]] = {"rows": deltas.rows.tolist()}
    columns |= {name: column.tolist() for name, column in deltas.totals.items()}
    columns |= {name: _entries(tallies) for name, tallies in deltas.tallies.items()}
    return {
        key: {name: values[place] for name, values in columns.items()}
        for place, key in enumerate(keys)
    }


def _entries(tallies: Any) -> list[dict[Any, tuple[int, ...]]]:
    """The tally of each group."""
    amounts = list(zip(*(amount.tolist() for amount in tallies.amounts), strict=True))
    pairs = list(zip(tallies.keys.tolist(), amounts, strict=True))
    ends = tallies.offsets.tolist()
    parts = [pairs[start:end] for start, end in pairwise(ends)]
    assert all(len(dict(part)) == len(part) for part in parts)
    return [dict(part) for part in parts]
