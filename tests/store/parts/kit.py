"""Batches that are committed by parts in tests: what a driver and its tasks do."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pyarrow as pa

from batchmill.store import Batch, Deltas, OpenParts, PartShare, Store
from tests.kit.stores import Measurement, Writer

PARTS = 4
DAY = 10_000


def part_of(row: Measurement) -> int:
    """The part that an entity's rows go into."""
    return sum(row.entity.encode()) % PARTS


class Parted:
    """Writes batches by parts: what a driver and its tasks do."""

    def __init__(self, store: Store, **settings: Any) -> None:
        self.writer = Writer(store, **settings)
        self.store = store

    @property
    def number(self) -> int:
        return self.writer.number

    def begin(self) -> OpenParts:
        return self.store.begin_parts(
            self.writer.stream, self.writer.claim.epoch, self.writer.number
        )

    def task(
        self, rows: Sequence[Measurement], opened: OpenParts, *parts: int
    ) -> tuple[Batch, PartShare]:
        """What a task commits."""
        own = [row for row in rows if part_of(row) in parts]
        batch = self.writer.batch(own, newest_minute=None)
        share = PartShare(parts, opened, {"Endpoint": len(own)}, self.writer.layout)
        return batch, share

    def books(self, rows: Sequence[Measurement]) -> Batch:
        """What the driver commits at the end."""
        days = Counter(("Endpoint", row.minute // DAY) for row in rows)
        return self.writer.batch(
            [],
            newest_minute=max((row.minute for row in rows), default=None),
            rows=dict(days),
            parts=PARTS,
            expected_rows={"Endpoint": len(rows)},
        )

    def write(self, rows: Sequence[Measurement]) -> None:
        """A whole batch, in two tasks."""
        opened = self.begin()
        for parts in ((0, 2), (1, 3)):
            assert self.store.commit_parts(*self.task(rows, opened, *parts)).applied
        assert self.store.commit(self.books(rows)).applied
        self.writer.number += 1


def as_arrow(deltas: Deltas) -> Deltas:
    """The same rows in Arrow arrays."""
    return replace(
        deltas,
        buckets=pa.array(deltas.buckets, pa.int64()),
        entities=pa.array(deltas.entities, pa.int64()),
        cells={name: _array(values) for name, values in deltas.cells.items()},
    )


def _array(values: Sequence[Any]) -> pa.Array:
    array = pa.array(values)
    return array.cast(pa.int64()) if pa.types.is_null(array.type) else array
