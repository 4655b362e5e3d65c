"""The newest complete minute, and its values as series of Prometheus within limits.

The page that is scraped and remote write show the same series.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from operator import itemgetter
from typing import Protocol, TypeAlias

from batchmill.errors import check_ints
from batchmill.sources import bucket_end, bucket_start, minute_bucket
from batchmill.store import BucketValues, StoredMetric
from batchmill.telemetry import prometheus_names

log = logging.getLogger("batchmill.export")

Labels: TypeAlias = tuple[tuple[str, str], ...]

PREFIX = "batchmill_"
RESERVED = (f"{PREFIX}export_", f"{PREFIX}pipeline_")
"""How the names begin that no metric's series may have."""
NOT_A_NAME = re.compile(r"[^A-Za-z0-9_]")
_RANKED = ("percentile2", "percentileLog")
_RANK = re.compile(r"\{p=([0-9]+)\}")
_MINUTE = timedelta(minutes=1)


def complete_minute(newest: int | None, now_s: float) -> int | None:
    """The newest complete minute: the one before the newest minute of a store.

    A minute is over, by the time of the events themselves, when its successor has begun. A newest
    minute that lies ahead of the clock counts as the present one: a sender whose clock is wrong
    must not hide what the others send. None: the store is empty.

    >>> complete_minute(202402291345, now_s=2e9)
    202402291344
    """
    if newest is None:
        return None
    present = minute_bucket(datetime.fromtimestamp(now_s, UTC))
    return minutes_before(min(newest, present), 1)


def minutes_before(minute: int, count: int) -> int:
    """The minute that is ``count`` minutes before another; after it, if that is negative.

    >>> minutes_before(202403010000, 1)
    202402292359
    """
    return minute_bucket(bucket_start(minute) - count * _MINUTE)


def minutes_after(minute: int, last: int) -> Iterator[int]:
    """Every minute after ``minute``, up to and with ``last``."""
    while minute < last:
        minute = minutes_before(minute, -1)
        yield minute


def end_s(minute: int) -> float:
    """When a minute was over, in seconds since 1970."""
    return bucket_end(minute).timestamp()


@dataclass(frozen=True, kw_only=True, slots=True)
class SeriesLimits:
    """How many series of one minute are shown at most; the busiest entities come first."""

    max_series: int = 10_000
    """Of all metrics together."""
    max_series_per_metric: int = 2_000
    """Of each metric. So many entities of each source are read at most."""

    def __post_init__(self) -> None:
        check_ints(self, 1, "max_series", "max_series_per_metric")


class LabelledEntity(Protocol):
    """The fields of an entity that its labels are made of."""

    @property
    def kind(self) -> str: ...
    @property
    def id(self) -> str: ...
    @property
    def name(self) -> str: ...
    @property
    def layers(self) -> frozenset[str]: ...


@dataclass(frozen=True, slots=True)
class Series:
    """Labels and a value."""

    labels: Labels
    value: float


@dataclass(frozen=True, slots=True)
class Family:
    """All series of one metric."""

    name: str
    help: str
    series: Sequence[Series]
    """They have the same label names, in the same order."""

    @property
    def label_names(self) -> list[str]:
        """Those of every series; there is at least one."""
        return [name for name, _ in self.series[0].labels]


@dataclass(frozen=True, slots=True)
class SeriesSelection:
    """The series of a minute that are shown."""

    families: list[Family] = field(default_factory=list)
    """By name; in each, by entity kind, id and label."""
    dropped: Mapping[str, int] = field(default_factory=dict)
    """By metric, how many series are left out. An entity that was not even read counts as one."""

    @property
    def count(self) -> int:
        """How many series there are."""
        return sum(len(family.series) for family in self.families)


class DroppedSeriesLog:
    """Logs which metrics have series over the limit, each time these metrics change."""

    def __init__(self) -> None:
        self._metrics: frozenset[str] = frozenset()

    def log(self, dropped: Mapping[str, int]) -> None:
        """Log the metrics of a selection, unless the previous one had the same."""
        if dropped and self._metrics != dropped.keys():
            log.warning(
                "left out %d series over the limit, of %s: raise the limit of series, or compute "
                "fewer metrics of so many entities",
                *(sum(dropped.values()), ", ".join(dropped)),
            )
        self._metrics = frozenset(dropped)


def select_series(values: BucketValues, limits: SeriesLimits) -> SeriesSelection:
    """The series of a minute, within the limits.

    Taken entity by entity, the busiest first (of equals, by kind and id), metric by metric and
    label by label, both by name: the same values always give the same series.
    """
    names = series_names(values.metrics)
    metrics = {metric.name: metric for metric in values.metrics}
    taken: dict[str, list[tuple[tuple[str, str, str], Series]]] = {name: [] for name in names}
    dropped = dict(values.left_out)
    room = limits.max_series
    for entity in sorted(
        values.entities, key=lambda entity: (-entity.busy, entity.kind, entity.id)
    ):
        labels = entity_labels(entity)
        for name in sorted(entity.values):
            metric, of_metric = metrics[name], taken[name]
            for label, value in by_label(metric, entity.values[name]):
                if room and len(of_metric) < limits.max_series_per_metric:
                    label_label = (("label", label),) if metric.labelled else ()
                    sort_key = (entity.kind, entity.id, label)
                    of_metric.append((sort_key, Series((*labels, *label_label), value)))
                    room -= 1
                else:
                    dropped[name] = dropped.get(name, 0) + 1
    families = [
        Family(
            names[name],
            help_text(metrics[name]),
            [series for _, series in sorted(of_metric, key=itemgetter(0))],
        )
        for name, of_metric in taken.items()
        if of_metric
    ]
    families.sort(key=lambda family: family.name)
    return SeriesSelection(families, dict(sorted(dropped.items())))


def series_names(metrics: Sequence[StoredMetric]) -> dict[str, str]:
    """The name of each metric's series, by metric.

    What is no letter, digit or underscore becomes an underscore; a name that another one has
    already, or that is reserved, gets one more at its end.
    """
    names: dict[str, str] = {}
    taken = prometheus_names()  # the page has the queues of its process, too
    for metric in sorted(metrics, key=lambda metric: metric.name):
        name = PREFIX + NOT_A_NAME.sub("_", metric.name)
        while name in taken or (name.startswith(RESERVED) and not name.endswith("_")):
            name += "_"
        names[metric.name] = name
        taken.add(name)
    return names


def help_text(metric: StoredMetric) -> str:
    """What a metric means: its definition."""
    return f"{metric.definition}, of one minute"


def entity_labels(entity: LabelledEntity) -> Labels:
    """The labels that every series of an entity has."""
    return (
        ("entity_id", entity.id),
        ("name", entity.name),
        ("kind", entity.kind),
        ("layer", ",".join(sorted(entity.layers))),
    )


def by_label(metric: StoredMetric, value: float | Mapping[str, int]) -> Iterator[tuple[str, float]]:
    """Each number with its label; a percentile's is ``p99``."""
    if not isinstance(value, Mapping):
        yield "", value
        return
    for label, number in sorted(value.items()):
        rank = _RANK.fullmatch(label) if metric.function in _RANKED else None
        yield f"p{rank[1]}" if rank else label, number
