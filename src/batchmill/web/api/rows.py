"""Reading rows for figures: those that cover a range, by entity, and no more than so many."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import itemgetter
from typing import NamedTuple

from batchmill.sources import Grain
from batchmill.store import Buckets, CellRows, Snapshot, StoredMetric
from batchmill.web.api.figures import Figures, Row
from batchmill.web.api.memory import Memory
from batchmill.web.api.range import Range
from batchmill.web.errors import BadQuestion

_NOWHEN = Buckets(Grain.DAY, 19700101, 19700101)
MOST_ROWS = 500_000
"""So many rows are read for one answer at most."""


class Parts(NamedTuple):
    """The rows of one entity that make a range: what is added up, and what is taken away."""

    more: list[Row]
    less: list[Row]


@dataclass(slots=True)
class Reader:
    """Reads rows of some metrics of one source within one answer's bound."""

    snapshot: Snapshot
    metrics: Mapping[str, StoredMetric]
    layer: str | None = None
    memory: Memory | None = None
    left: int = field(default_factory=lambda: MOST_ROWS)
    _empty: CellRows | None = field(default=None, init=False)

    @property
    def figures(self) -> Figures:
        """What works out figures from the rows."""
        return Figures(self.metrics, self._none(), self.memory)

    def rows(self, buckets: Buckets, entities: Collection[int] | None = None) -> list[Row]:
        """The rows of all buckets from one to another."""
        return self._rows(buckets, entities)

    def listed(self, grain: Grain, buckets: Sequence[int], entities: Collection[int]) -> list[Row]:
        """The rows of some buckets."""
        return self._rows((grain, buckets), entities)

    def _rows(
        self,
        buckets: Buckets | tuple[Grain, Sequence[int]],
        entities: Collection[int] | None,
    ) -> list[Row]:
        if not self.metrics:
            return []
        found = self.snapshot.cells(
            self._listed(), buckets, entities=entities, layer=self.layer, most=self.left
        )
        if not found.complete:
            raise BadQuestion(
                f"more than {MOST_ROWS:,} rows would be read: ask for a shorter range, a coarser "
                "grain, one layer, or a part of the name"
            )
        self.left -= len(found.rows)
        # In order, so that what is remembered by its texts is found again.
        return sorted(found.rows, key=itemgetter(0))

    def ranged(
        self, wanted: Range, newest: int | None, entities: Collection[int] | None = None
    ) -> dict[int, Parts]:
        """The rows that make a range, by entity."""
        cover = wanted.cover(newest, less=self.figures.can_take_away)
        more, less = (
            by_entity([row for each in pieces for row in self.rows(each, entities)])
            for pieces in (cover.more, cover.less)
        )
        return {key: Parts(rows, less.get(key, [])) for key, rows in more.items()}

    def _listed(self) -> Sequence[StoredMetric]:
        return list(self.metrics.values())

    def _none(self) -> CellRows:
        if self._empty is None:
            nobody: Collection[int] = ()
            self._empty = self.snapshot.cells(self._listed(), _NOWHEN, entities=nobody)
        return self._empty


def by_entity(rows: Iterable[Row]) -> dict[int, list[Row]]:
    """Rows by the key of their entity."""
    found: defaultdict[int, list[Row]] = defaultdict(list)
    for row in rows:
        found[row[1]].append(row)
    return dict(found)
