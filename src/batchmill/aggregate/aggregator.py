"""Makes, merges and rolls up the states of one event type."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import pyarrow as pa

from batchmill.aggregate.columns import (
    Column,
    Groups,
    Longs,
    Mask,
    Numbers,
    Runs,
    Selection,
    Tallies,
    as_texts,
    count,
    group,
    numbered,
    numbered_starts,
    sorted_order,
)
from batchmill.aggregate.deltas import Deltas, concat
from batchmill.aggregate.plan import Key, SourcePlan, TallyColumn, Total, Where
from batchmill.aggregate.rows import Rows, both, check, is_valid
from batchmill.aggregate.validity import Reasons
from batchmill.errors import ConfigError
from batchmill.oal import Metric, Path
from batchmill.sources import Grain, SourceType


@dataclass(frozen=True)
class AggregationResult:
    """The deltas of a batch of rows, and the rows that were left out, by reason."""

    deltas: Deltas
    """By minute, each pair of minute and entity once."""
    reasons: Reasons
    """Why rows are invalid, which no metric can count."""

    @property
    def invalid(self) -> Counter[str]:
        """How many rows are invalid, by reason."""
        return self.reasons.counts


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

    def make(
        self, rows: pa.Table | pa.RecordBatch, *, latest_us: int | None = None
    ) -> AggregationResult:
        """Aggregate rows, given in the columns of the event type's ``arrow_schema()``.

        Columns that no metric reads may be left out. ``latest_us`` is the latest valid start, in
        microseconds since 1970.
        """
        table = pa.Table.from_batches([rows]) if isinstance(rows, pa.RecordBatch) else rows
        checked = check(table, self.plan, latest_us)
        return AggregationResult(_make(checked.rows, self.plan), checked.reasons)

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
    roles = tuple(map(rows.role, plan.roles))
    groups = group([numbered_starts(rows.minutes), *map(numbered, roles)])
    firsts = pa.array(groups.firsts)
    counter = _RowCounter(rows, groups)
    # First, since they sort the rows, and so totals need not.
    tallies = {name: counter.tallies(tally) for name, tally in plan.tallies.items()}
    return Deltas(
        Grain.MINUTE,
        rows.minutes[groups.firsts],
        tuple(role.take(firsts) for role in map(as_texts, roles)),
        counter.count(()),
        {name: counter.total(total) for name, total in plan.totals.items()},
        tallies,
    )


class _RowCounter:
    """Totals and tallies of grouped rows; what several of them need is computed once."""

    def __init__(self, rows: Rows, groups: Groups) -> None:
        self._rows = rows
        self._groups = groups
        self._counts: dict[Where, Longs] = {}
        self._selections: dict[tuple[Where, Path | None], Selection] = {}
        self._keys: dict[Key, _SortedKeys] = {}
        self._order: Longs | None = None
        """An order that sorts the rows by group."""

    def count(self, where: Where) -> Longs:
        """How many rows of each group meet the tests."""
        if where not in self._counts:
            met = self._rows.where(where)
            if where and self._order is not None:
                self._counts[where] = self._all_rows().counts(met)
            else:
                self._counts[where] = count(self._groups.codes, len(self._groups), met)
        return self._counts[where]

    def total(self, total: Total) -> Column:
        """One number of each group."""
        if total.value is None:
            return Column("sum", self.count(total.where), None)
        values, valid = self._rows.number(total.value, total.part)
        counts = both(self._rows.where(total.where), valid)
        # Without nulls, all values of the same rows share a selection.
        key = (total.where, None if valid is None else total.value)
        if key not in self._selections:
            self._selections[key] = self._all_rows().where(counts)
        return self._selections[key].reduced(total.how, values)

    def _all_rows(self) -> Selection:
        if self._order is None:
            self._order = sorted_order(self._groups.codes, len(self._groups))
        return Selection.all(self._order, self.count(()))

    def tallies(self, tally: TallyColumn) -> Tallies:
        """One tally of each group."""
        if tally.key not in self._keys:
            self._keys[tally.key] = self._sorted(tally.key)
        keys = self._keys[tally.key]
        runs = keys.runs(tally.coarser, tally.last)
        met, amounts = self._rows.where(tally.where), []
        if tally.summed is not None:
            upper, valid = self._rows.number(tally.summed, "upper")
            lower, _ = self._rows.number(tally.summed, "lower")
            met = both(met, valid)
            halves = (upper, lower) if met is None else (upper * met, lower * met)
            amounts = [runs.sums(half) for half in halves]
        before = None if met is None else keys.before(tally.where, tally.summed, met)
        amounts.append(runs.counts(before))
        return Tallies.of_runs(len(self._groups), runs, keys.texts, amounts)

    def _sorted(self, key: Key) -> _SortedKeys:
        texts = None
        if key.width is None:
            encoded = self._rows.label(key.value)
            texts, indices = encoded.dictionary, encoded.indices
            valid = is_valid(indices)
            numbers = indices.fill_null(0).to_numpy().astype(np.int64)
        else:
            numbers, valid = self._rows.bucket(key)
        codes = self._groups.codes
        if valid is None:
            runs = Runs.of(codes, len(self._groups), numbers)
            self._order = runs.order
            return _SortedKeys(texts, runs)
        places = np.flatnonzero(valid)
        runs = Runs.of(codes[places], len(self._groups), numbers[places])
        return _SortedKeys(texts, replace(runs, order=places[runs.order]))


class _SortedKeys:
    """The rows that have a key, sorted by group and key."""

    def __init__(self, texts: pa.Array | None, runs: Runs) -> None:
        self.texts = texts
        """The keys, where they are texts; the runs have places in it."""
        self._runs: dict[tuple[int, int | None], Runs] = {(1, None): runs}
        self._before: dict[tuple[Where, Path | None], Numbers] = {}

    def runs(self, coarser: int, last: int | None) -> Runs:
        """The runs of wider buckets."""
        if (coarser, last) not in self._runs:
            self._runs[coarser, last] = self._runs[1, None].coarsened(coarser, last)
        return self._runs[coarser, last]

    def before(self, where: Where, summed: Path | None, met: Mask) -> Numbers:
        """How many of the sorted rows before each place meet tests, and have a value."""
        if (where, summed) not in self._before:
            self._before[where, summed] = self._runs[1, None].before(met)
        return self._before[where, summed]
