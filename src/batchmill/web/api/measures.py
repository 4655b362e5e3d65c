"""Measures of services, endpoints and relations: from stored rows to numbers.

The measure of one bucket is the metric's own value. Over a range, the cells of its rows are merged
first and finished then, so that an average, a percentile or a share is that of all calls together.

Latencies are milliseconds, from metrics in microseconds. Events without ``latencyMicros`` are in
whole milliseconds there, so that 0 stands for less than 1 ms. A store of an older version, or of a
script without these metrics, has those in milliseconds only: their averages are whole numbers, and
their percentiles multiples of 10, so that 0 stands for less than 1 or 10 ms.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import accumulate, islice, pairwise
from operator import itemgetter
from typing import Any, NamedTuple, Protocol, TypeAlias

from batchmill.oal import Value
from batchmill.sources import Grain
from batchmill.store import (
    BucketList,
    Buckets,
    Cell,
    EntityName,
    Ranking,
    Snapshot,
    StoredMetric,
    per_minute,
)
from batchmill.web.api.coverage import Coverage
from batchmill.web.api.parameters import TimeRange, minute_end_s
from batchmill.web.responses import BadRequest

MOST_CACHED_ROWS = 131_072
"""Of one set of metrics; of 500 services, the hours of ten days."""
MOST_KINDS = 6
MOST_TALLIES = 2_048

KnownEntity = dict[tuple[int, int], tuple[int, tuple[Any, ...]]]
"""By bucket and entity: the hash of the row, and the measures computed from it."""


class TallyPlan(Protocol):
    """Reads the states of a metric with tallies."""

    def states(self, values: Sequence[Any]) -> tuple[Any, ...]:
        """The states of a metric, from its cells."""
        ...


class MeasureCache:
    """Cache of results, keyed by a hash of what they were computed from.

    Nothing needs to be invalidated: rows that late events change have another hash. Bounded: when
    it is full, the older half is removed. Threads may share it; two may compute the same at once,
    and either result is right.
    """

    def __init__(self) -> None:
        self._rows: dict[Hashable, KnownEntity] = {}
        self._tallies: dict[int, dict[int, int]] = {}

    def rows(self, mark: Hashable, minutes: int) -> KnownEntity:
        """The cached rows of these metrics and of buckets of ``minutes``, for the caller to extend.

        Its size is checked at the next call.
        """
        for row in list(self._rows.values()):
            if len(row) > MOST_CACHED_ROWS:
                remove_older_half(row)
        if len(self._rows) > MOST_KINDS:
            self._rows = {}
        return self._rows.setdefault((mark, minutes), {})

    def tally(
        self, plan: TallyPlan, steady: Sequence[str], others: Sequence[str]
    ) -> dict[int, int]:
        """The merged tally of all texts; the result of the ``steady`` ones is cached."""
        cached = self._steady(plan, tuple(steady)) if steady else {}
        if not others:
            return cached
        merged = dict(cached)
        for number, count in plan.states((",".join(others),))[0].items():
            merged[number] = merged.get(number, 0) + count
        return merged

    def _steady(self, plan: TallyPlan, texts: tuple[str, ...]) -> dict[int, int]:
        mark = hash(texts)
        tally = self._tallies.get(mark)
        if tally is None:
            if len(self._tallies) >= MOST_TALLIES:
                remove_older_half(self._tallies)
            tally = self._tallies[mark] = plan.states((",".join(texts),))[0]
        return tally


def remove_older_half(known: dict[Any, Any]) -> None:
    """Remove the older half; another thread may be doing the same."""
    for key in islice(list(known), len(known) // 2):
        known.pop(key, None)


Number: TypeAlias = int | float | None
Row: TypeAlias = tuple[Any, ...]

SCALE = 10_000
"""Shares are kept as whole numbers out of this many, and shown from 0 to 1."""
SHARES = ("success", "apdex")
MICROS = "_micros"
"""How the names of metrics in microseconds end; they are shown in milliseconds."""
_HOURS = 10**11
"""Above the bucket of any hour or day, below that of any minute."""
RANKS = ("p50", "p75", "p90", "p95", "p99")


@dataclass(frozen=True, slots=True)
class MeasureSet:
    """The metrics that give the measures of one kind of entity."""

    source: str
    names: Mapping[str, tuple[str, ...]]
    """Metric names by measure, the best one first."""

    def chosen(
        self, metrics: Iterable[StoredMetric], time_range: TimeRange
    ) -> dict[str, StoredMetric]:
        """The metrics that the store has, by measure: the best that cover as much of the range."""
        known = {metric.name: metric for metric in metrics if metric.source == self.source}
        first_s = time_range.starts[0]

        def gaps(metric: StoredMetric) -> tuple[bool, int]:
            since = metric.since_minute
            begin_s = 0 if since is None else minute_end_s(since)
            return not metric.active, max(first_s, begin_s)

        choices = {
            measure: [known[name] for name in names if name in known]
            for measure, names in self.names.items()
        }
        return {measure: min(stored, key=gaps) for measure, stored in choices.items() if stored}


def _measure_set(
    source: str, prefix: str, sla: str = "sla", apdex: str | None = None
) -> MeasureSet:
    names = {
        "cpm": (f"{prefix}_cpm",),
        "avg": (f"{prefix}_resp_time{MICROS}", f"{prefix}_resp_time"),
        "p99": (f"{prefix}_percentile{MICROS}", f"{prefix}_percentile"),
        "success": (f"{prefix}_{sla}",),
    }
    return MeasureSet(source, names | ({"apdex": (apdex,)} if apdex else {}))


SERVICE = _measure_set("Service", "service", apdex="service_apdex")
INSTANCE = _measure_set("ServiceInstance", "service_instance")
ENDPOINT = _measure_set("Endpoint", "endpoint")
DATABASE = _measure_set("DatabaseAccess", "database_access")
CACHE = _measure_set("CacheAccess", "cache_access")
CALLEE_SIDE = _measure_set("ServiceRelation", "service_relation_server", "call_sla")
CALLER_SIDE = _measure_set("ServiceRelation", "service_relation_client", "call_sla")


class RangeRows(NamedTuple):
    """The rows of one entity that make up a range: those to add, and those to subtract."""

    more: list[Row]
    less: list[Row]


class Measures:
    """Computes measures from rows; ``cache`` keeps results.

    A row has its bucket, its entity, and the cells of each metric in order.
    """

    def __init__(
        self, metrics: Mapping[str, StoredMetric], cache: MeasureCache | None = None
    ) -> None:
        self._metrics = metrics
        ends = accumulate((len(metric.columns) for metric in metrics.values()), initial=2)
        self._places = {
            measure: slice(*bounds) for measure, bounds in zip(metrics, pairwise(ends), strict=True)
        }
        self._cache = cache or MeasureCache()
        self._known: dict[int, KnownEntity] = {}
        self._micros = {name for name in metrics if metrics[name].name.endswith(MICROS)}
        self._mark = tuple((measure, metric.plan) for measure, metric in metrics.items())

    def series(
        self, rows: Sequence[Row | None], minutes: int, covered: Sequence[int]
    ) -> dict[str, list[Number]]:
        """Every measure of each row; None where there is no row or no value.

        Each is a bucket of ``minutes``, of which ``covered`` have data: a rate divides by these.
        """
        if minutes not in self._known:
            self._known[minutes] = self._cache.rows(self._mark, minutes)
        known = self._known[minutes]
        lines: list[tuple[Number, ...]] = []
        nothing = (None,) * len(self._metrics)
        for row in rows:
            if row is None:
                lines.append(nothing)
                continue
            place, mark = row[:2], hash(row)
            cached = known.get(place)
            if cached is None or cached[0] != mark:
                cached = known[place] = (mark, self._finished(row, minutes))
            lines.append(cached[1])
        columns = zip(*lines, strict=True) if lines else [()] * len(self._metrics)
        return {
            measure: list(map(_rate, column, covered)) if metric.function == "cpm" else list(column)
            for (measure, metric), column in zip(self._metrics.items(), columns, strict=True)
        }

    def ranks_over(self, rows: RangeRows) -> dict[str, Number]:
        """The percentiles over all rows together, by rank."""
        metric = self._metrics.get("p99")
        if metric is None or not rows.more:
            return dict.fromkeys(RANKS)
        more, less = map(_columns, rows)
        value = self._merged_value("p99", metric, more, less, minutes=1)
        return {rank: self._shown("p99", value, rank) for rank in RANKS}

    @property
    def can_subtract(self) -> bool:
        """Whether rows can be subtracted: from a sum or a tally yes, from an extreme no."""
        return all(
            set(metric.plan.cells) == {Cell.SUM} or _is_tally(metric)
            for metric in self._metrics.values()
        )

    def over(
        self, rows: RangeRows, minutes: int, only: Collection[str] | None = None
    ) -> dict[str, Number]:
        """Every measure over all rows together, or ``only`` some; they cover ``minutes``."""
        metrics = {
            measure: metric
            for measure, metric in self._metrics.items()
            if only is None or measure in only
        }
        if not rows.more:
            return dict.fromkeys(metrics)
        columns, others = map(_columns, rows)
        return {
            measure: self._over(measure, metric, columns, others, minutes)
            for measure, metric in metrics.items()
        }

    def has_values(self, rows: RangeRows) -> bool:
        """Whether any measure over all rows together has a value; quick where calls are counted."""
        if self.calls(rows):
            return True
        return any(value is not None for value in self.over(rows, minutes=1).values())

    def calls(self, rows: RangeRows) -> int:
        """The number of calls, for sorting; 0 if no metric counts them."""
        if "cpm" not in self._metrics:
            return 0
        start = self._places["cpm"].start
        more, less = (sum(row[start] or 0 for row in some) for some in rows)
        return more - less

    def _over(
        self,
        measure: str,
        metric: StoredMetric,
        columns: Sequence[Sequence[Any]],
        less: Sequence[Sequence[Any]],
        minutes: int,
    ) -> Number:
        return self._shown(measure, self._merged_value(measure, metric, columns, less, minutes))

    def _merged_value(
        self,
        measure: str,
        metric: StoredMetric,
        columns: Sequence[Sequence[Any]],
        less: Sequence[Sequence[Any]],
        minutes: int,
    ) -> Value:
        place = self._places[measure]
        if _is_tally(metric):
            tally = self._tally(metric, columns[0], columns[place.start])
            if less:
                tally = _without(tally, self._tally(metric, less[0], less[place.start]))
            return metric.plan.value((tally,), minutes)
        cells = metric.plan.merge(columns[place])
        if less:
            away = metric.plan.merge(less[place])
            cells = [_less(one, other) for one, other in zip(cells, away, strict=True)]
        if metric.function == "cpm":
            return _rate(cells[0], minutes)
        return metric.plan.final_value(cells, minutes)

    def _tally(
        self, metric: StoredMetric, buckets: Sequence[int], texts: Sequence[str | None]
    ) -> dict[int, int]:
        """The merged tally; hours and days other than the newest are merged once and cached."""
        newest = max((bucket for bucket in buckets if bucket < _HOURS), default=0)
        steady: list[str] = []
        others: list[str] = []
        for bucket, text in zip(buckets, texts, strict=True):
            if text is not None:
                (steady if bucket < _HOURS and bucket != newest else others).append(text)
        return self._cache.tally(metric.plan, steady, others)

    def values_over(self, rows: RangeRows, minutes: int) -> dict[str, Value]:
        """The metrics' own values over all rows together: labels are kept, nothing is scaled."""
        if not rows.more:
            return dict.fromkeys(self._metrics)
        columns, others = map(_columns, rows)
        return {
            measure: self._merged_value(measure, metric, columns, others, minutes)
            for measure, metric in self._metrics.items()
        }

    def value(self, measure: str, row: Row, minutes: int) -> Value:
        """A metric's own value of one row; calls per minute are not rounded to whole ones."""
        if self._metrics[measure].function == "cpm":
            return _rate(row[self._places[measure].start], minutes)
        return self._value(measure, row, minutes)

    def merged(self, rows: Sequence[Row]) -> Row:
        """Several rows as one, with the bucket and the entity of the first."""
        if len(rows) == 1:
            return rows[0]
        columns = list(zip(*rows, strict=True))
        cells: list[Any] = []
        for measure, metric in self._metrics.items():
            cells += metric.plan.merge(columns[self._places[measure]])
        return (*rows[0][:2], *cells)

    def points(self, rows: Iterable[Row], time_range: TimeRange) -> list[Row | None]:
        """One row for each point of a chart, merged from all rows of its buckets."""
        place = _point_of(time_range)
        grouped: defaultdict[int, list[Row]] = defaultdict(list)
        for row in rows:
            grouped[place[row[0]]].append(row)
        return [
            self.merged(grouped[index]) if index in grouped else None
            for index in range(len(time_range.starts))
        ]

    def _finished(self, row: Row, minutes: int) -> tuple[Number, ...]:
        return tuple(
            [self._shown(measure, self._value(measure, row, minutes)) for measure in self._metrics]
        )

    def _value(self, measure: str, row: Row, minutes: int) -> Value:
        if self._metrics[measure].function == "cpm":  # the number of calls: see series
            calls: int | None = row[self._places[measure].start]
            return calls
        return self._metrics[measure].plan.final_value(row[self._places[measure]], minutes)

    def _shown(self, measure: str, value: Value, rank: str = "p99") -> Number:
        number = _at_rank(value, rank)
        if number is None:
            return None
        if measure in self._micros:
            return number / 1000
        return round(number / SCALE, 4) if measure in SHARES else number


def _columns(rows: Sequence[Row]) -> list[tuple[Any, ...]]:
    return list(zip(*rows, strict=True))


def _rate(calls: Number, minutes: int) -> Number:
    return per_minute(calls, minutes) if calls else None


def _is_tally(metric: StoredMetric) -> bool:
    return metric.function in ("percentile2", "percentileLog") and len(metric.columns) == 1


def _without(tally: Mapping[int, int], less: Mapping[int, int]) -> dict[int, int]:
    """Subtract a tally that is part of another."""
    left = {number: count - less.get(number, 0) for number, count in tally.items()}
    return {number: count for number, count in left.items() if count}


def _less(one: int | None, other: int | None) -> int | None:
    return one if one is None or other is None else one - other


def _at_rank(value: Value, rank: str) -> Number:
    """One of several percentiles, by either form of its label."""
    if not isinstance(value, dict):
        return value
    return value.get(f"{{p={rank[1:]}}}", value.get(str(RANKS.index(rank))))


@lru_cache(maxsize=32)
def _point_of(time_range: TimeRange) -> Mapping[int, int]:
    """By bucket, the number of the point that it belongs to."""
    step = time_range.merged
    return {number: index // step for index, number in enumerate(time_range.buckets)}


MOST_ROWS = 500_000
"""Rows that are read for one response at most."""


@dataclass(slots=True)
class RowReader:
    """Reads rows of some metrics of one source, within the limit of one response."""

    snapshot: Snapshot
    metrics: Mapping[str, StoredMetric]
    layer: str | None = None
    cache: MeasureCache | None = None
    left: int = field(default_factory=lambda: MOST_ROWS)

    @property
    def measures(self) -> Measures:
        """Computes measures from the rows."""
        return Measures(self.metrics, self.cache)

    def rows(
        self, buckets: Buckets | BucketList, entities: Collection[int] | None = None
    ) -> list[Row]:
        """The rows of some buckets; of some entities, or of all."""
        if not self.metrics:
            return []
        metrics = list(self.metrics.values())
        result = self.snapshot.cells(
            metrics, buckets, entities=entities, layer=self.layer, most=self.left
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
        self, coverage: Coverage, entities: Collection[int] | None = None
    ) -> dict[int, RangeRows]:
        """The rows that make up the totals of a range, by entity."""
        cover = coverage.totals.cover(coverage.newest, less=self.measures.can_subtract)
        more, less = (
            by_entity([row for piece in pieces for row in self.rows(piece, entities)])
            for pieces in (cover.more, cover.less)
        )
        return {key: RangeRows(rows, less.get(key, [])) for key, rows in more.items()}

    def room(self, coverage: Coverage) -> int:
        """The totals of how many entities can be read within the limit, whatever rows they have."""
        cover = coverage.totals.cover(coverage.newest, less=self.measures.can_subtract)
        return self.left // max(1, sum(len(piece) for piece in (*cover.more, *cover.less)))


MANY = 2_000
"""Of more entities than this, pages show the busiest, which the database finds."""
_DAYS_ABOVE_S = 3 * 86_400


def busiest(
    snapshot: Snapshot,
    metrics: Mapping[str, StoredMetric],
    time_range: TimeRange,
    most: int = MANY,
    **which: str | None,
) -> Ranking | None:
    """The entities with the most calls in the hours, or days, that a range touches.

    Whole hours have one row of each entity, so this is quick with a hundred thousand of them. None
    if no metric counts calls. ``which`` is passed to :meth:`Snapshot.busiest`.
    """
    metric = metrics.get("cpm")
    if metric is None:
        return None
    grain = Grain.HOUR if time_range.end_s - time_range.start_s <= _DAYS_ABOVE_S else Grain.DAY
    buckets = replace(time_range, grain=grain, merged=1).buckets
    return snapshot.busiest(metric, buckets, most=most, **which)


def few_or_busiest(
    snapshot: Snapshot,
    kind: str,
    sets: Iterable[MeasureSet],
    time_range: TimeRange,
    most: int,
    /,
    **ids: str,
) -> tuple[list[EntityName], int]:
    """The entities whose ids begin or end so; of many the busiest, and their count.

    ``most`` of each set of measures, the busiest first. The count is 0 if none is left out.
    """
    few = snapshot.find(kind, **ids, most=MANY + 1)
    if len(few) <= MANY:
        return few, 0
    keys: dict[int, None] = {}
    count = 0
    metrics = snapshot.metrics()
    for measure_set in sets:
        chosen = measure_set.chosen(metrics, time_range)
        ranking = busiest(snapshot, chosen, time_range, most, kind=kind, **ids)
        if ranking is not None:
            keys |= dict.fromkeys(ranking.keys)
            count = max(count, ranking.total)
    names = snapshot.entity_names(keys)
    return [names[key] for key in keys if key in names], count


def by_entity(rows: Iterable[Row]) -> dict[int, list[Row]]:
    """Rows by the key of their entity."""
    grouped: defaultdict[int, list[Row]] = defaultdict(list)
    for row in rows:
        grouped[row[1]].append(row)
    return dict(grouped)


def merged(several: Iterable[RangeRows]) -> RangeRows:
    """The rows of several entities together."""
    rows = list(several)
    return RangeRows(
        [row for own in rows for row in own.more], [row for own in rows for row in own.less]
    )
