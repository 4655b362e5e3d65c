"""Makes, merges and rolls up the states of one event type."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from batchmill.aggregate.columns import (
    Column,
    Groups,
    Longs,
    Tallies,
    group,
    numbered,
    numbered_starts,
)
from batchmill.aggregate.deltas import Deltas, concat
from batchmill.aggregate.plan import Key, SourcePlan, TallyColumn, Total, Where
from batchmill.aggregate.rows import Rows, check
from batchmill.errors import ConfigError
from batchmill.oal import Metric
from batchmill.sources import Grain, SourceType


@dataclass(frozen=True)
class Made:
    """What became of a batch of rows."""

    deltas: Deltas
    """By minute, each pair of minute and entity once."""
    invalid: Counter[str] = field(default_factory=Counter)
    """How many rows no metric can count, by reason."""


class Aggregator:
    """Aggregates the rows of one event type for its metrics.

    Merging is associative and commutative: however rows are split into batches, and in whatever
    order the deltas of those are merged, the result is the same.
    """

    def __init__(
        self,
        source: SourceType,
        metrics: Iterable[Metric],
        *,
        apdex_ms: Mapping[str, int] | None = None,
    ) -> None:
        self.plan = SourcePlan(source, tuple(metrics), dict(apdex_ms or {}))

    def make(self, rows: pa.Table | pa.RecordBatch, *, latest_us: int | None = None) -> Made:
        """Aggregate rows, given in the columns of the event type's ``arrow_schema()``.

        Columns that no metric reads may be left out. ``latest_us`` is the latest valid start, in
        microseconds since 1970.
        """
        table = pa.Table.from_batches([rows]) if isinstance(rows, pa.RecordBatch) else rows
        checked = check(table, self.plan, latest_us)
        return Made(_make(checked.rows, self.plan), checked.invalid)

    def merge(self, deltas: Sequence[Deltas]) -> Deltas:
        """Merge deltas of one grain; each pair of bucket and entity is there once."""
        return concat(deltas).grouped() if deltas else self.empty()

    def roll_up(self, deltas: Deltas, grain: Grain) -> Deltas:
        """The deltas of hours or days, from those of minutes or hours."""
        if grain is deltas.grain:
            return deltas
        if grain.minutes < deltas.grain.minutes:
            raise ConfigError("grain", grain.value, f"{deltas.grain.value} or longer")
        starts = deltas.starts // grain.minutes * grain.minutes
        return replace(deltas, grain=grain, starts=starts).grouped()

    def empty(self) -> Deltas:
        """Deltas of no rows."""
        return _make(Rows({}, np.zeros(0, np.int64), self.plan), self.plan)


def _make(rows: Rows, plan: SourcePlan) -> Deltas:
    roles = tuple(map(rows.texts, plan.roles))
    groups = group([numbered_starts(rows.minutes), *map(numbered, roles)])
    firsts = pa.array(groups.firsts)
    counter = _RowCounter(rows, groups)
    return Deltas(
        Grain.MINUTE,
        rows.minutes[groups.firsts],
        tuple(role.take(firsts) for role in roles),
        counter.count(()),
        {name: counter.total(total) for name, total in plan.totals.items()},
        {name: counter.tallies(tally) for name, tally in plan.tallies.items()},
    )


class _RowCounter:
    """Totals and tallies of grouped rows."""

    def __init__(self, rows: Rows, groups: Groups) -> None:
        self._rows = rows
        self._groups = groups
        self._codes: dict[Where, Longs] = {}
        self._counted: dict[tuple[Key, Where], Tallies] = {}

    def count(self, where: Where) -> Longs:
        """How many rows of each group meet the tests."""
        return np.bincount(self._group_of(where), minlength=len(self._groups)).astype(np.int64)

    def total(self, total: Total) -> Column:
        """One number of each group."""
        if total.value is None:
            return Column("sum", self.count(total.where), None)
        values, valid = self._rows.number(total.value, total.part)
        met = self._rows.where(total.where)
        counts = met if valid is None else valid if met is None else met & valid
        return Column.reduced(total.how, values, counts, self._groups.codes, len(self._groups))

    def tallies(self, tally: TallyColumn) -> Tallies:
        """One tally of each group."""
        if tally.summed is not None:
            return self._label_sums(tally)
        known = (tally.key, tally.where)
        if known not in self._counted:
            self._counted[known] = self._count_keys(tally.key, tally.where)
        if tally.key.width is None:
            return self._counted[known]
        return self._counted[known].coarsened(tally.coarser, tally.last)

    def _count_keys(self, key: Key, where: Where) -> Tallies:
        met = self._rows.where(where)
        if key.width is None:
            texts = self._rows.label(key.value)
            present = (
                pc.is_valid(texts).to_numpy(zero_copy_only=False) if texts.null_count else None
            )
            counts = met if present is None else present if met is None else met & present
            codes = self._groups.codes
            if counts is not None:
                texts, codes = texts.filter(pa.array(counts)), codes[counts]
            return Tallies.counted(codes, len(self._groups), texts)
        keys, valid = self._rows.bucket(key)
        counts = met if valid is None else valid if met is None else met & valid
        codes = self._groups.codes
        if counts is not None:
            keys, codes = keys[counts], codes[counts]
        return Tallies.counted(codes, len(self._groups), keys)

    def _label_sums(self, tally: TallyColumn) -> Tallies:
        assert tally.summed is not None
        upper, valid = self._rows.number(tally.summed, "upper")
        lower, _ = self._rows.number(tally.summed, "lower")
        labels = self._rows.label(tally.key.value)
        counts = np.ones(len(self._rows), np.bool_) if valid is None else valid.copy()
        if labels.null_count:
            counts &= pc.is_valid(labels).to_numpy(zero_copy_only=False)
        met = self._rows.where(tally.where)
        if met is not None:
            counts &= met
        ones = np.ones(int(counts.sum()), np.int64)
        return Tallies.counted(
            self._groups.codes[counts],
            len(self._groups),
            labels.filter(pa.array(counts)),
            (upper[counts].astype(np.int64), lower[counts].astype(np.int64), ones),
        )

    def _group_of(self, where: Where) -> Longs:
        """The groups of the rows that meet the tests."""
        if where not in self._codes:
            met = self._rows.where(where)
            self._codes[where] = self._groups.codes if met is None else self._groups.codes[met]
        return self._codes[where]
