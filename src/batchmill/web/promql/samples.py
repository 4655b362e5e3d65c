"""Series of Prometheus out of the store: names, labels and samples as the exporters write them.

A value of a minute is one sample, at the minute's end, once the next minute has begun: just what
remote write sends. It is the present one until the minute after it is complete; if there is none,
for five minutes. So a query answers what a Prometheus answers that was written to.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from batchmill.export import by_label, complete_minute, entity_labels, series_names
from batchmill.oal import Value
from batchmill.sources import Grain
from batchmill.store import Buckets, Named, Snapshot, StoredMetric
from batchmill.web.api.range import MINUTE_S, bucket, minute_end_s
from batchmill.web.api.rows import Reader, by_entity
from batchmill.web.errors import BadQuestion
from batchmill.web.promql.parser import NAME, Selector

LOOKBACK_S = 300
MOST_SAMPLES = 1_000_000
MOST_ENTITIES = 20_000
MOST_METRICS = 100


@dataclass(frozen=True, slots=True)
class Labelled:
    """An entity with what its labels are made of."""

    kind: str
    id: str
    name: str
    layers: frozenset[str]


@dataclass(frozen=True, slots=True)
class Line:
    """A series: its labels, and the value at each moment; None where it has none."""

    labels: Mapping[str, str]
    values: list[float | None]


def chosen_metrics(snapshot: Snapshot, selector: Selector) -> dict[str, StoredMetric]:
    """By the name of their series, the metrics that a selector may mean."""
    active = [each for each in snapshot.metrics() if each.active]
    names = series_names(active)
    found = {names[each.name]: each for each in active if selector.named(names[each.name])}
    if len(found) > MOST_METRICS:
        raise BadQuestion(f"that are more than {MOST_METRICS} metrics: name fewer of them")
    return found


def lines(
    snapshot: Snapshot, selector: Selector, moments_s: Sequence[float], now_s: float
) -> list[Line]:
    """The series that a selector means, at each moment; those without any value are left out."""
    newest = complete_minute(snapshot.newest_minute(), now_s)
    minutes = [_minute(moment, newest) for moment in moments_s]
    wanted = sorted({each for each in minutes if each is not None})
    if not wanted:
        return []
    found: list[Line] = []
    for name, metric in sorted(chosen_metrics(snapshot, selector).items()):
        entities = _entities(snapshot, metric, selector, wanted)
        if len(entities) * len(moments_s) > MOST_SAMPLES:
            raise BadQuestion(
                f"that are more than {MOST_SAMPLES:,} samples: select fewer series, a shorter "
                "range or a longer step"
            )
        reader = Reader(snapshot, {"value": metric})
        rows = by_entity(reader.listed(Grain.MINUTE, wanted, list(entities)))
        for key, mine in sorted(rows.items(), key=lambda each: entities[each[0]].id):
            finished = {row[0]: metric.plan.finished(row[2:], 1) for row in mine}
            labels = {NAME: name, **dict(entity_labels(entities[key]))}
            found += _by_label(metric, labels, finished, minutes, selector)
            if len(found) * len(moments_s) > MOST_SAMPLES:
                raise BadQuestion(f"that are more than {MOST_SAMPLES:,} samples: select fewer")
    return found


def series(
    snapshot: Snapshot, selector: Selector, start_s: float, end_s: float, most: int
) -> Iterator[dict[str, str]]:
    """The labels of the series that a selector means and that the days of a time have."""
    days = Buckets(Grain.DAY, bucket(Grain.DAY, int(start_s)), bucket(Grain.DAY, int(end_s)))
    count = 0
    for name, metric in sorted(chosen_metrics(snapshot, selector).items()):
        entities = _entities(snapshot, metric, selector, (), days)
        reader = Reader(snapshot, {"value": metric})
        rows = by_entity(reader.rows(days, list(entities)))
        for key, mine in sorted(rows.items(), key=lambda each: entities[each[0]].id):
            labels = {NAME: name, **dict(entity_labels(entities[key]))}
            known: set[str | None] = set()
            for row in mine:
                value = metric.plan.finished(row[2:], Grain.DAY.minutes)
                if value is not None:
                    known |= (
                        {label for label, _ in by_label(metric, value)}
                        if metric.labelled
                        else {None}
                    )
            for label in sorted(known, key=lambda each: each or ""):
                whole = labels if label is None else {**labels, "label": label}
                if selector.matches(whole):
                    yield whole
                    count += 1
                    if count >= most:
                        return


def _minute(moment_s: float, newest: int | None) -> int | None:
    """The minute whose value is the present one at a moment."""
    if newest is None or moment_s < MINUTE_S:
        return None
    end_s = min(math.floor(moment_s / MINUTE_S) * MINUTE_S, minute_end_s(newest))
    if moment_s - end_s >= LOOKBACK_S:
        return None
    return bucket(Grain.MINUTE, end_s - MINUTE_S)


def _entities(
    snapshot: Snapshot,
    metric: StoredMetric,
    selector: Selector,
    minutes: Sequence[int],
    days: Buckets | None = None,
) -> dict[int, Labelled]:
    """The entities that a selector may mean, of those seen on the days of some minutes."""
    known: dict[int, Named]
    given = selector.equal("entity") or selector.equal("name")
    if given is not None:
        known = {each.key: each for each in snapshot.find(id_or_name=given, most=MOST_ENTITIES)}
    else:
        if days is None:
            days = Buckets(Grain.DAY, minutes[0] // 10_000, minutes[-1] // 10_000)
        known = snapshot.named(snapshot.entities_in(metric.source, days))
    layers = snapshot.layers(known)
    found = {
        key: Labelled(each.kind, each.id, each.name, layers.get(key, frozenset()))
        for key, each in known.items()
    }
    own = [each for each in selector.matchers if each.label not in (NAME, "label")]
    kept = {}
    for key, entity in found.items():
        labels = dict(entity_labels(entity))
        if all(each.matches(labels.get(each.label, "")) for each in own):
            kept[key] = entity
    if len(kept) > MOST_ENTITIES:
        raise BadQuestion(f"that are more than {MOST_ENTITIES:,} series: select fewer")
    return kept


def _by_label(
    metric: StoredMetric,
    labels: Mapping[str, str],
    finished: Mapping[int, Value],
    minutes: Sequence[int | None],
    selector: Selector,
) -> Iterator[Line]:
    """The lines of one entity: one, or one for each label."""
    found: dict[str, dict[int, float]] = {}
    for minute, value in finished.items():
        if value is not None:
            for label, number in by_label(metric, value):
                found.setdefault(label, {})[minute] = number
    for label, numbers in sorted(found.items()):
        whole = {**labels, "label": label} if metric.labelled else labels
        values = [None if each is None else numbers.get(each) for each in minutes]
        if selector.matches(whole) and any(each is not None for each in values):
            yield Line(whole, values)
