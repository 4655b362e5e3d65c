"""Reads the rows of metrics that cover a time range, by entity, up to a limit."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import itemgetter
from typing import NamedTuple

from batchmill.sources import Grain
from batchmill.store import BucketList, Buckets, CellRows, Snapshot, StoredMetric
from batchmill.web.api.measures import MeasureCache, Measures, Row
from batchmill.web.api.parameters import TimeRange
from batchmill.web.errors import BadRequest

_NO_BUCKET = Buckets(Grain.DAY, 19700101, 19700101)
MOST_ROWS = 500_000
"""Rows that are read for one response at most."""


class RangeRows(NamedTuple):
    """The rows of one entity that make up a range: those to add, and those to subtract."""

    more: list[Row]
    less: list[Row]


@dataclass(slots=True)
class RowReader:
    """Reads rows of some metrics of one source, within the limit of one response."""

    snapshot: Snapshot
    metrics: Mapping[str, StoredMetric]
    layer: str | None = None
    cache: MeasureCache | None = None
    left: int = field(default_factory=lambda: MOST_ROWS)
    _empty: CellRows | None = field(default=None, init=False)

    @property
    def measures(self) -> Measures:
        """Computes measures from the rows."""
        return Measures(self.metrics, self._no_rows(), self.cache)

    def rows(
        self, buckets: Buckets | BucketList, entities: Collection[int] | None = None
    ) -> list[Row]:
        """The rows of some buckets; of some entities, or of all."""
        if not self.metrics:
            return []
        result = self.snapshot.cells(
            self._metrics(), buckets, entities=entities, layer=self.layer, most=self.left
        )
        if not result.complete:
            raise BadRequest(
                f"more than {MOST_ROWS:,} rows would be read: request a shorter range, a coarser "
                "grain, one layer, or a part of the name"
            )
        self.left -= len(result.rows)
        # In order, so that the cache finds the same texts again.
        return sorted(result.rows, key=itemgetter(0))

    def ranged(
        self, time_range: TimeRange, newest: int | None, entities: Collection[int] | None = None
    ) -> dict[int, RangeRows]:
        """The rows that make up a range, by entity."""
        cover = time_range.cover(newest, less=self.measures.can_subtract)
        more, less = (
            by_entity([row for piece in pieces for row in self.rows(piece, entities)])
            for pieces in (cover.more, cover.less)
        )
        return {key: RangeRows(rows, less.get(key, [])) for key, rows in more.items()}

    def _metrics(self) -> Sequence[StoredMetric]:
        return list(self.metrics.values())

    def _no_rows(self) -> CellRows:
        if self._empty is None:
            no_entities: Collection[int] = ()
            self._empty = self.snapshot.cells(self._metrics(), _NO_BUCKET, entities=no_entities)
        return self._empty


def by_entity(rows: Iterable[Row]) -> dict[int, list[Row]]:
    """Rows by the key of their entity."""
    grouped: defaultdict[int, list[Row]] = defaultdict(list)
    for row in rows:
        grouped[row[1]].append(row)
    return dict(grouped)
