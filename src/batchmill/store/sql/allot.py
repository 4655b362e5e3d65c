"""Which metric gets which columns: decided here, done elsewhere.

Every version of a metric has columns of its own, so that a metric that goes or comes never
disturbs another. A metric belongs to the streams that compute it, and goes with the last of them:
no stream retires or changes what another one computes. The column of a metric that was retired so
long ago that all its values have expired is given to the next one of the same kind.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from batchmill.oal import Metric
from batchmill.sources import Grain
from batchmill.store.cell import Cell
from batchmill.store.errors import MetricConflictError, TooManyColumnsError
from batchmill.store.plan import Plan
from batchmill.store.ttl import day_of
from batchmill.store.views import StoredMetric

KEY_COLUMNS = 2
"""Every table has a bucket and an entity beside its cells."""


@dataclass(frozen=True, slots=True)
class Column:
    """A column of a source's tables, and the metric that it belongs to."""

    number: int
    cell: Cell
    metric: str
    version: int

    @property
    def name(self) -> str:
        """Its name in the tables."""
        return column_name(self.number)


@dataclass(frozen=True, slots=True)
class NewVersion:
    """A metric that gets columns."""

    metric: Metric
    version: int
    plan: Plan
    columns: tuple[int, ...]


@dataclass(slots=True)
class Allotment:
    """What registering a set of metrics comes to."""

    kept: dict[str, StoredMetric] = field(default_factory=dict)
    """Versions that go on as they are, by name."""
    added: list[NewVersion] = field(default_factory=list)
    retired: list[StoredMetric] = field(default_factory=list)
    created: dict[str, list[Column]] = field(default_factory=dict)
    """By source: columns to add to its tables."""
    reused: dict[str, list[Column]] = field(default_factory=dict)
    """By source: columns that exist and get a new owner."""
    emptied: set[tuple[str, int]] = field(default_factory=set)
    """(name, version) of metrics that lost their columns."""


def column_name(number: int) -> str:
    """The name of a column.

    >>> column_name(17)
    'c17'
    """
    return f"c{number}"


def allot(
    metrics: Iterable[Metric],
    stored: Iterable[StoredMetric],
    columns: Mapping[str, list[Column]],
    retired_minutes: Mapping[tuple[str, int], int],
    *,
    cutoff: int,
    most_columns: int,
    retire: bool,
    stream: str = "",
    owners: Mapping[tuple[str, int], frozenset[str]] = MappingProxyType({}),
) -> Allotment:
    """Decide what registering ``metrics`` for a stream changes.

    ``stored`` are all versions, ``columns`` all columns by source, ``retired_minutes`` the newest
    minute at each retirement by (name, version), ``cutoff`` the oldest day that is kept, and
    ``owners`` the streams that compute a metric, by (name, version).
    """
    wanted = list(metrics)
    versions: dict[str, int] = {}
    active: dict[str, StoredMetric] = {}
    for each in stored:
        versions[each.name] = max(each.version, versions.get(each.name, 0))
        if each.active:
            active[each.name] = each
    result = Allotment()
    new: list[Metric] = []

    def others(known: StoredMetric) -> frozenset[str]:
        return owners.get((known.name, known.version), frozenset()) - {stream}

    for metric in wanted:
        known = active.get(metric.name)
        if known and known.definition == metric.text and known.plan == Plan.of(metric):
            result.kept[metric.name] = known
        else:
            new.append(metric)
            if known:
                mine = stream in owners.get((known.name, known.version), ())
                conflict = bool(others(known)) or not (retire or mine)
                # The same definition may be kept in another way than by an older batchmill.
                if conflict and known.definition != metric.text:
                    streams = tuple(sorted(others(known)))
                    raise MetricConflictError(
                        known.name, streams, known.definition, metric.text, retire
                    )
                result.retired.append(known)
    if retire:
        names = {each.name for each in wanted}
        result.retired += [
            each for name, each in active.items() if name not in names and not others(each)
        ]
    free = _free_columns(columns, retired_minutes, cutoff)
    highest = {
        source: max((each.number for each in owned), default=0) for source, owned in columns.items()
    }
    for metric in new:
        version = versions.get(metric.name, 0) + 1
        plan = Plan.of(metric)
        numbers = []
        for cell in plan.cells:
            spare = free.get((metric.source, cell))
            if spare:
                old = spare.pop(0)
                result.emptied.add((old.metric, old.version))
                number = old.number
                changed = result.reused
            else:
                number = highest[metric.source] = highest.get(metric.source, 0) + 1
                changed = result.created
            changed.setdefault(metric.source, []).append(Column(number, cell, metric.name, version))
            numbers.append(number)
        result.added.append(NewVersion(metric, version, plan, tuple(numbers)))
    for source, number in highest.items():
        if number + KEY_COLUMNS > most_columns:
            raise TooManyColumnsError(source, number + KEY_COLUMNS, most_columns)
    return result


def _free_columns(
    columns: Mapping[str, list[Column]],
    retired_minutes: Mapping[tuple[str, int], int],
    cutoff: int,
) -> dict[tuple[str, Cell], list[Column]]:
    free: dict[tuple[str, Cell], list[Column]] = {}
    for source, owned in columns.items():
        for each in sorted(owned, key=lambda column: column.number):
            minute = retired_minutes.get((each.metric, each.version))
            # Nothing was written to it after the day on which its metric was retired.
            if minute is not None and day_of(Grain.MINUTE, minute) < cutoff:
                free.setdefault((source, each.cell), []).append(each)
    return free
