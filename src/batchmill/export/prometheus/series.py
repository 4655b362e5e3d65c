"""The values of a minute as series of Prometheus: names, labels, and no more than so many.

Both roads to Prometheus, the page that is scraped and remote write, show the same series.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from operator import itemgetter
from typing import Protocol, TypeAlias

from batchmill.errors import ConfigError
from batchmill.store import BucketValues, StoredMetric

Labels: TypeAlias = tuple[tuple[str, str], ...]
Place: TypeAlias = tuple[str, str, str]
"""Where a series stands among those of its name: its entity's kind and id, and its label."""

PREFIX = "batchmill_"
OWN = (f"{PREFIX}export_", f"{PREFIX}pipeline_")
"""How the names begin that are not a metric's."""

OVER_LIMIT = (
    "%d series are over the limit and left out, of %s: raise the limit of series, or compute fewer "
    "metrics of so many entities"
)

NOT_A_NAME = re.compile(r"[^A-Za-z0-9_]")
_RANK = re.compile(r"\{p=([0-9]+)\}")


@dataclass(frozen=True, kw_only=True, slots=True)
class SeriesLimits:
    """How many series of one minute are shown at most; the busiest entities come first."""

    max_series: int = 10_000
    """Of all metrics together."""
    max_series_per_metric: int = 2_000
    """Of each metric. So many entities of each source are read at most."""

    def __post_init__(self) -> None:
        for name in ("max_series", "max_series_per_metric"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ConfigError(name, value, "a whole number of at least 1")


class LabelledEntity(Protocol):
    """What the labels of an entity are made of."""

    @property
    def kind(self) -> str:
        """What it is."""
        ...

    @property
    def id(self) -> str:
        """Its id."""
        ...

    @property
    def name(self) -> str:
        """Its name."""
        ...

    @property
    def layers(self) -> frozenset[str]:
        """Its layers."""
        ...


@dataclass(frozen=True, slots=True)
class Series:
    """One line of a page: labels and a value."""

    labels: Labels
    value: float


@dataclass(frozen=True, slots=True)
class Family:
    """All series of one name."""

    name: str
    kind: str
    """``gauge`` or ``counter``; the name of a counter ends in ``_total``."""
    help: str
    series: Sequence[Series]


@dataclass(frozen=True, slots=True)
class Chosen:
    """The series of a minute that are shown."""

    families: list[Family] = field(default_factory=list)
    """By name; in each, by entity kind, id and label."""
    dropped: Mapping[str, int] = field(default_factory=dict)
    """By metric, how many series are left out. An entity that was not even read counts as one."""

    @property
    def series(self) -> int:
        """How many there are."""
        return sum(len(each.series) for each in self.families)


def choose(values: BucketValues, limits: SeriesLimits) -> Chosen:
    """The series of a bucket, within the limits.

    Taken entity by entity, the busiest first (of equals, by kind and id), metric by metric and
    label by label, both by name: the same values always give the same series.
    """
    names = series_names(values.metrics)
    known = {each.name: each for each in values.metrics}
    taken: dict[str, list[tuple[Place, Series]]] = {each: [] for each in names}
    dropped = dict(values.left_out)
    room = limits.max_series
    for entity in sorted(values.entities, key=lambda each: (-each.busy, each.kind, each.id)):
        labels = entity_labels(entity)
        for name in sorted(entity.values):
            into = taken[name]
            for label, value in by_label(known[name], entity.values[name]):
                if room and len(into) < limits.max_series_per_metric:
                    more = (("label", label),) if known[name].labelled else ()
                    place = (entity.kind, entity.id, label)
                    into.append((place, Series((*labels, *more), value)))
                    room -= 1
                else:
                    dropped[name] = dropped.get(name, 0) + 1
    families = [
        Family(names[name], "gauge", help_text(known[name]), _in_order(into))
        for name, into in taken.items()
        if into
    ]
    families.sort(key=lambda each: each.name)
    return Chosen(families, dict(sorted(dropped.items())))


def _in_order(taken: list[tuple[Place, Series]]) -> list[Series]:
    return [each for _, each in sorted(taken, key=itemgetter(0))]


def series_names(metrics: Sequence[StoredMetric]) -> dict[str, str]:
    """The name of each metric's series, by metric.

    What is no letter, digit or underscore becomes an underscore; a name that another one has
    already, or that is kept for figures of our own, gets one more at its end.
    """
    found: dict[str, str] = {}
    taken: set[str] = set()
    for each in sorted(metrics, key=lambda metric: metric.name):
        name = PREFIX + NOT_A_NAME.sub("_", each.name)
        while name in taken or (name.startswith(OWN) and not name.endswith("_")):
            name += "_"
        found[each.name] = name
        taken.add(name)
    return found


def help_text(metric: StoredMetric) -> str:
    """What a metric means: its definition."""
    return f"{metric.definition}, of one minute"


def entity_labels(entity: LabelledEntity) -> Labels:
    """The labels that every series of an entity has."""
    return (
        ("entity", entity.id),
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
        rank = _RANK.fullmatch(label) if metric.function == "percentile2" else None
        yield f"p{rank[1]}" if rank else label, number
