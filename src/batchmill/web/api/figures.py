"""The figures that are shown of a service, an endpoint, a relation: from cells to numbers.

A figure of one bucket is the metric's own value. Over a range, the cells of its rows are merged
first and finished then, so that an average, a percentile or a share is that of all calls together.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from batchmill.oal import Value
from batchmill.store import Cell, CellRows, StoredMetric
from batchmill.web.api.memory import Known, Memory

Number: TypeAlias = int | float | None
Row: TypeAlias = tuple[Any, ...]

SCALE = 10_000
"""Shares are kept as whole numbers out of this many, and shown from 0 to 1."""
SHARES = ("success", "apdex")
_HOURS = 10**11
"""Above the bucket of any hour or day, below that of any minute."""
RANKS = ("p50", "p75", "p90", "p95", "p99")


@dataclass(frozen=True, slots=True)
class Kind:
    """Which metrics the figures of something are."""

    source: str
    names: Mapping[str, str]
    """By figure, the metric; of those that have such a figure at all."""

    def chosen(self, metrics: Iterable[StoredMetric]) -> dict[str, StoredMetric]:
        """The metrics that there are, by figure."""
        known = {each.name: each for each in metrics if each.source == self.source}
        return {figure: known[name] for figure, name in self.names.items() if name in known}


def _kind(source: str, prefix: str, sla: str = "sla", apdex: str | None = None) -> Kind:
    names = {
        "cpm": f"{prefix}_cpm",
        "avg": f"{prefix}_resp_time",
        "p99": f"{prefix}_percentile",
        "success": f"{prefix}_{sla}",
    }
    return Kind(source, names | ({"apdex": apdex} if apdex else {}))


SERVICE = _kind("Service", "service", apdex="service_apdex")
INSTANCE = _kind("ServiceInstance", "service_instance")
ENDPOINT = _kind("Endpoint", "endpoint")
CALLEE_SIDE = _kind("ServiceRelation", "service_relation_server", "call_sla")
CALLER_SIDE = _kind("ServiceRelation", "service_relation_client", "call_sla")


class Figures:
    """Works out figures from rows of :class:`CellRows`; ``memory`` spares doing so twice."""

    def __init__(
        self, metrics: Mapping[str, StoredMetric], rows: CellRows, memory: Memory | None = None
    ) -> None:
        self._metrics = metrics
        self._places = {figure: rows.places[each.name] for figure, each in metrics.items()}
        self._memory = memory or Memory()
        self._known: dict[int, Known] = {}
        self._mark = tuple((figure, each.plan) for figure, each in metrics.items())

    def series(self, rows: Sequence[Row | None], minutes: int) -> dict[str, list[Number]]:
        """Every figure of each row; None where there is no row, or no value."""
        if minutes not in self._known:
            self._known[minutes] = self._memory.rows(self._mark, minutes)
        known = self._known[minutes]
        lines: list[tuple[Number, ...]] = []
        nothing = (None,) * len(self._metrics)
        for row in rows:
            if row is None:
                lines.append(nothing)
                continue
            place, mark = row[:2], hash(row)
            found = known.get(place)
            if found is None or found[0] != mark:
                found = known[place] = (mark, self._finished(row, minutes))
            lines.append(found[1])
        columns = zip(*lines, strict=True) if lines else [()] * len(self._metrics)
        return {figure: list(column) for figure, column in zip(self._metrics, columns, strict=True)}

    def ranks(self, rows: Iterable[Row | None]) -> dict[str, list[Number]]:
        """The percentiles of each row, by rank."""
        metric = self._metrics.get("p99")
        found: list[Value] = [
            None if row is None or metric is None else self._value("p99", row, 1) for row in rows
        ]
        return {rank: [_at_rank(value, rank) for value in found] for rank in RANKS}

    @property
    def can_take_away(self) -> bool:
        """Whether rows can be taken away again: a sum or a tally lets that, an extreme does not."""
        return all(
            set(each.plan.cells) == {Cell.SUM} or _is_tally(each) for each in self._metrics.values()
        )

    def over(
        self, rows: Sequence[Row], minutes: int, less: Sequence[Row] = ()
    ) -> dict[str, Number]:
        """Every figure over all the rows together, without ``less``; they have so many minutes."""
        if not rows:
            return dict.fromkeys(self._metrics)
        columns = list(zip(*rows, strict=True))
        others = list(zip(*less, strict=True))
        return {
            figure: self._over(figure, metric, columns, others, minutes)
            for figure, metric in self._metrics.items()
        }

    def calls(self, rows: Iterable[Row], less: Iterable[Row] = ()) -> int:
        """How many calls there were, to tell the busy from the idle; 0 if nothing counts them."""
        if "cpm" not in self._metrics:
            return 0
        start = self._places["cpm"].start
        return sum(row[start] or 0 for row in rows) - sum(row[start] or 0 for row in less)

    def _over(
        self,
        figure: str,
        metric: StoredMetric,
        columns: Sequence[Sequence[Any]],
        less: Sequence[Sequence[Any]],
        minutes: int,
    ) -> Number:
        place = self._places[figure]
        if _is_tally(metric):
            tally = self._tally(metric, columns[0], columns[place.start])
            if less:
                tally = _without(tally, self._tally(metric, less[0], less[place.start]))
            return _shown(figure, metric.plan.value((tally,), minutes))
        cells = metric.plan.merged(columns[place])
        if less:
            away = metric.plan.merged(less[place])
            cells = [_less(one, other) for one, other in zip(cells, away, strict=True)]
        if metric.function == "cpm":
            return round(cells[0] / minutes, 3) if cells[0] else None
        return _shown(figure, metric.plan.finished(cells, minutes))

    def _tally(
        self, metric: StoredMetric, buckets: Sequence[int], texts: Sequence[str | None]
    ) -> dict[int, int]:
        """The merged tally; what hours and days bring, but the newest, is merged once."""
        newest = max((each for each in buckets if each < _HOURS), default=0)
        steady: list[str] = []
        others: list[str] = []
        for bucket, text in zip(buckets, texts, strict=True):
            if text is not None:
                (steady if bucket < _HOURS and bucket != newest else others).append(text)
        return self._memory.tally(metric.plan, steady, others)

    def _finished(self, row: Row, minutes: int) -> tuple[Number, ...]:
        return tuple(
            [_shown(figure, self._value(figure, row, minutes)) for figure in self._metrics]
        )

    def _value(self, figure: str, row: Row, minutes: int) -> Value:
        return self._metrics[figure].plan.finished(row[self._places[figure]], minutes)


def _is_tally(metric: StoredMetric) -> bool:
    return metric.function == "percentile2" and len(metric.columns) == 1


def _without(tally: Mapping[int, int], less: Mapping[int, int]) -> dict[int, int]:
    """A tally without what a part of it has brought."""
    left = {number: count - less.get(number, 0) for number, count in tally.items()}
    return {number: count for number, count in left.items() if count}


def _less(one: int | None, other: int | None) -> int | None:
    return one if one is None or other is None else one - other


def _shown(figure: str, value: Value) -> Number:
    if value is None:
        return None
    if isinstance(value, dict):
        return _at_rank(value, "p99")
    return round(value / SCALE, 4) if figure in SHARES else value


def _at_rank(value: Value, rank: str) -> Number:
    """Of percentiles one; both forms are known."""
    if not isinstance(value, dict):
        return value
    return value.get(f"{{p={rank[1:]}}}", value.get(str(RANKS.index(rank))))
