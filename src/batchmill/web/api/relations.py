"""Calls between services over a range, as the caller saw them and as the callee did.

The two differ: a call that times out fails at the caller and may succeed at the callee, and what
is on the way takes time at the caller only. So both are returned, each under its name.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from batchmill.store import EntityName, Snapshot, StoredMetric
from batchmill.web.api.coverage import Coverage
from batchmill.web.api.measures import (
    CALLEE_SIDE,
    CALLER_SIDE,
    Measures,
    Number,
    RangeRows,
    RowReader,
)

SIDES = {"callee": CALLEE_SIDE, "caller": CALLER_SIDE}
"""The callee's side first: where only one number is shown, it is that one."""
SHOWN = ("cpm", "avg", "p99", "success")


@dataclass
class Relation:
    """A relation, with the measures of each side that reports it."""

    entity: EntityName
    minutes: int
    """How many its rows cover."""
    rows: dict[str, tuple[Measures, RangeRows]] = field(default_factory=dict)
    """By side."""
    calls: int = 0
    """As the callee counted them, else the caller."""

    @cached_property
    def sides(self) -> dict[str, dict[str, Number]]:
        """The measures by side; computed when asked for, as not every relation is shown."""
        shown = {}
        for side, (measures, rows) in self.rows.items():
            over = measures.over(rows, self.minutes, SHOWN)
            shown[side] = {measure: over.get(measure) for measure in SHOWN}
        return shown

    @property
    def ends(self) -> tuple[str, str]:
        """The ids of caller and callee."""
        caller, _, callee = self.entity.id.partition("-")
        return caller, callee

    def as_json(self) -> dict[str, Any]:
        """The measures of one side at the top, and those of both under their names."""
        either = next(iter(self.sides.values()))
        return {**either, **{side: self.sides.get(side) for side in ("caller", "callee")}}


@dataclass(frozen=True, slots=True)
class Relations:
    """The relations of a range, and the rows that the callers' side was computed from."""

    by_key: Mapping[int, Relation]
    caller_rows: Mapping[int, RangeRows]
    caller_measures: Measures


def read_relations(
    snapshot: Snapshot,
    coverage: Coverage,
    metrics: Collection[StoredMetric],
    keys: Collection[int] | None = None,
) -> Relations:
    """The relations with calls in a range; those with the given keys, or all."""
    by_key: dict[int, Relation] = {}
    rows: dict[int, RangeRows] = {}
    measures = Measures({})
    minutes = coverage.minutes
    for side, measure_set in SIDES.items():
        reader = RowReader(snapshot, measure_set.chosen(metrics, coverage.range))
        measures = reader.measures
        rows = reader.ranged(coverage, keys)
        names = snapshot.entity_names(rows)
        for key, own in rows.items():
            if key not in names or not measures.has_values(own):
                continue
            relation = by_key.setdefault(key, Relation(names[key], minutes))
            relation.rows[side] = (measures, own)
            relation.calls = relation.calls or measures.calls(own)
    return Relations(by_key, rows, measures)
