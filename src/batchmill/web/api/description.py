"""What the metrics of a store are about: units, measures, and groups that a page shows together.

All of it is derived from the store's own registry, so that a metric of a user's event type is
described like one of ours. A group has the metrics of one event type with the same filters, such as
the reads of a cache; a page shows it as one row of tiles and one set of charts.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache

from batchmill.export import by_label
from batchmill.oal import Value
from batchmill.sources import UnknownNameError, builtin_catalog
from batchmill.store import StoredMetric
from batchmill.web.api.measures import MeasureSet, Number

MEASURES = ("cpm", "avg", "p99", "success", "apdex")
_TITLES = {
    "cpm": "Load",
    "avg": "Average response time",
    "p99": "Response time percentiles",
    "success": "Success rate",
    "apdex": "Apdex",
}
_GROUPS = {
    "Service": "Calls that it serves",
    "ServiceInstance": "Calls that it serves",
    "Endpoint": "Calls that it serves",
    "ServiceRelation": "Calls",
    "ServiceInstanceRelation": "Calls",
    "EndpointRelation": "Calls",
    "DatabaseAccess": "As its clients see it",
    "CacheAccess": "As its clients see it",
    "MQAccess": "Messages",
    "MQEndpointAccess": "Messages",
    "GenAIProviderAccess": "As its clients see it",
    "GenAIModelAccess": "As its clients see it",
}
_FILTERS = {
    "detectPoint == SERVER": "as the callee reports them",
    "detectPoint == CLIENT": "as the caller reports them",
    "operation == Read": "reads",
    "operation == Write": "writes",
    "operation == Consume": "consumed",
    "operation == Produce": "produced",
}
_PERCENTILES = ("percentile", "percentile2", "percentileLog")
_AVERAGES = ("longAvg", "doubleAvg")
_OF_ENUM = re.compile(r"\b[A-Za-z_]\w*\.(\w+)")
_OPERATOR = re.compile(r"\s*(==|!=|>=|<=|>|<)\s*")


@dataclass(frozen=True, slots=True)
class DescribedMetric:
    """A metric, with what its definition says."""

    metric: StoredMetric
    measured: str
    """The path that is measured, or ``*``."""
    filters: tuple[str, ...]
    """Conditions on a row, in short form: ``operation == Read``."""
    unit: str
    """``per_minute``, ``count``, ``share`` (0 to 1), ``score`` (0 to 1), ``ms``, ``bytes`` or
    empty; after :meth:`shown`."""
    factor: int
    """The metric's own values are this many times as large as what is shown."""
    least: int
    """Of milliseconds, what the metric can just tell: a value of 0 is less than this."""

    @property
    def kind(self) -> str | None:
        """The kind of entity; None for an event type that this process does not know."""
        return _kind(self.metric.source)

    @property
    def measure(self) -> str | None:
        """Which of the measures of a page it gives, if any."""
        function = self.metric.function
        if function in ("cpm", "apdex"):
            return function
        if function == "percent":
            return (
                "success" if "status" in self.metric.definition.rpartition("percent")[2] else None
            )
        if self.unit != "ms" or "tag[" in self.measured or self.measured == "timeToFirstToken":
            return None
        if function in _AVERAGES:
            return "avg"
        return "p99" if function in _PERCENTILES else None

    def shown(self, value: Value) -> dict[str, Number]:
        """The numbers to show, by label; the label of a plain value is empty."""
        if value is None:
            return {}
        return {
            label: number if self.factor == 1 else round(number / self.factor, 4)
            for label, number in by_label(self.metric, value)
        }


@lru_cache(maxsize=1024)
def _kind(source: str) -> str | None:
    try:
        return builtin_catalog().source(source).entity.kind
    except UnknownNameError:
        return None


@lru_cache(maxsize=4096)
def described(metric: StoredMetric) -> DescribedMetric:
    """A metric with what its definition says."""
    path, conditions = metric.measured
    unit, factor = metric.unit
    if unit == "percent":
        unit = ""
    step = metric.plan.args[0] if metric.function in ("percentile", "percentile2") else 1
    least = (step or 1) if unit == "ms" and factor == 1 else 1
    return DescribedMetric(metric, path, tuple(map(_short, conditions)), unit, factor, least)


def _short(condition: str) -> str:
    """A condition without the names of enums.

    >>> _short("operation==VirtualCacheOperation.Read")
    'operation == Read'
    """
    return _OPERATOR.sub(r" \1 ", _OF_ENUM.sub(r"\1", condition))


@dataclass(frozen=True, slots=True)
class Chart:
    """One chart: a metric, or the best of several that measure the same."""

    key: str
    title: str
    metric: DescribedMetric


@dataclass(frozen=True, slots=True)
class Group:
    """The metrics of one event type with the same filters."""

    source: str
    filters: tuple[str, ...]
    metrics: tuple[DescribedMetric, ...]

    @property
    def key(self) -> str:
        """Names it in an address or a test."""
        return " ".join((self.source, *self.filters))

    @property
    def title(self) -> str:
        """The heading of its charts."""
        name = _GROUPS.get(self.source, self.source)
        parts = [_FILTERS.get(text, text) for text in self.filters]
        return f"{name}, {', '.join(parts)}" if parts else name

    @property
    def kind(self) -> str | None:
        """The kind of entity that it is about, if this process knows."""
        return self.metrics[0].kind

    @property
    def measures(self) -> MeasureSet:
        """The metrics that give its measures; those in microseconds are better."""
        names: dict[str, tuple[str, ...]] = {}
        for measure in MEASURES:
            measured = [metric for metric in self.metrics if metric.measure == measure]
            measured.sort(key=lambda metric: (-metric.factor, metric.metric.name))
            if measured:
                names[measure] = tuple(metric.metric.name for metric in measured)
        return MeasureSet(self.source, names)

    def charts(self, chosen: Mapping[str, StoredMetric]) -> list[Chart]:
        """Its charts: one for each measure, by the chosen metrics, then its other metrics."""
        by_name = {metric.metric.name: metric for metric in self.metrics}
        charts = [
            Chart(measure, _TITLES[measure], by_name[chosen[measure].name])
            for measure in MEASURES
            if measure in chosen
        ]
        rest = [metric for metric in self.metrics if metric.measure is None]
        charts += [Chart(metric.metric.name, metric.metric.name, metric) for metric in rest]
        return charts


def groups(metrics: Iterable[StoredMetric], kind: str | None = None) -> list[Group]:
    """The groups of metrics; with ``kind``, only those that may be about such entities.

    Event types that this process does not know may be about any.
    """
    members: dict[tuple[str, tuple[str, ...]], list[DescribedMetric]] = {}
    for metric in map(described, metrics):
        if kind is None or metric.kind in (kind, None):
            filters = () if metric.measure is None and metric.filters else metric.filters
            members.setdefault((metric.metric.source, filters), []).append(metric)
    made = [Group(source, filters, tuple(some)) for (source, filters), some in members.items()]
    order = list(_GROUPS)
    last = len(order)
    made.sort(
        key=lambda group: (
            order.index(group.source) if group.source in order else last,
            group.source,
            group.filters,
        )
    )
    return made
