"""Prometheus series from the store, with the names, labels and samples of the exporters.

The value of a minute is one sample, at its end, once the next minute has begun: what remote
write sends. It is current until the next minute is complete or, without one, for five minutes. So a
query returns what a Prometheus returns that receives our remote write.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from batchmill.export import by_label, complete_minute, entity_labels, series_names
from batchmill.oal import Value
from batchmill.sources import Grain
from batchmill.store import (
    BucketList,
    Buckets,
    EntityName,
    Snapshot,
    StoredEntity,
    StoredMetric,
)
from batchmill.web.api.measures import RowReader, by_entity
from batchmill.web.api.parameters import MINUTE_S, bucket, minute_end_s
from batchmill.web.promql.parser import NAME, Selector
from batchmill.web.responses import BadRequest

LOOKBACK_S = 300
MOST_SAMPLES = 1_000_000
MOST_ENTITIES = 20_000
MOST_METRICS = 100


@dataclass(frozen=True, slots=True)
class SampledSeries:
    """A series: its labels, and its value at each requested time, or None."""

    labels: Mapping[str, str]
    values: list[float | None]


def chosen_metrics(snapshot: Snapshot, selector: Selector) -> dict[str, StoredMetric]:
    """The metrics that a selector may match, by the name of their series."""
    active = [metric for metric in snapshot.metrics() if metric.active]
    names = series_names(active)
    chosen = {
        names[metric.name]: metric for metric in active if selector.matches_name(names[metric.name])
    }
    if len(chosen) > MOST_METRICS:
        raise BadRequest(f"the selector matches more than {MOST_METRICS} metrics: select fewer")
    return chosen


def sampled_series(
    snapshot: Snapshot, selector: Selector, moments_s: Sequence[float], now_s: float
) -> list[SampledSeries]:
    """The matching series at each time, without those that have no value."""
    newest = complete_minute(snapshot.newest_minute(), now_s)
    minutes = [_minute(moment, newest) for moment in moments_s]
    wanted = sorted({minute for minute in minutes if minute is not None})
    if not wanted:
        return []
    result: list[SampledSeries] = []
    for name, metric in sorted(chosen_metrics(snapshot, selector).items()):
        entities = _entities(snapshot, metric, selector, wanted)
        if len(entities) * len(moments_s) > MOST_SAMPLES:
            raise BadRequest(
                f"the result has more than {MOST_SAMPLES:,} samples: select fewer series, a "
                "shorter range or a longer step"
            )
        reader = RowReader(snapshot, {"value": metric})
        rows = by_entity(reader.rows(BucketList(Grain.MINUTE, wanted), list(entities)))
        for key, mine in sorted(rows.items(), key=lambda item: entities[item[0]].id):
            finished = {row[0]: metric.plan.final_value(row[2:], 1) for row in mine}
            labels = {NAME: name, **dict(entity_labels(entities[key]))}
            result += _by_label(metric, labels, finished, minutes, selector)
            if len(result) * len(moments_s) > MOST_SAMPLES:
                raise BadRequest(
                    f"the result has more than {MOST_SAMPLES:,} samples: select fewer series"
                )
    return result


def series(
    snapshot: Snapshot, selector: Selector, start_s: float, end_s: float, most: int
) -> Iterator[dict[str, str]]:
    """The labels of the matching series that have data on the days of a range."""
    days = Buckets(Grain.DAY, bucket(Grain.DAY, int(start_s)), bucket(Grain.DAY, int(end_s)))
    count = 0
    for name, metric in sorted(chosen_metrics(snapshot, selector).items()):
        entities = _entities(snapshot, metric, selector, (), days)
        reader = RowReader(snapshot, {"value": metric})
        rows = by_entity(reader.rows(days, list(entities)))
        for key, mine in sorted(rows.items(), key=lambda item: entities[item[0]].id):
            labels = {NAME: name, **dict(entity_labels(entities[key]))}
            known: set[str | None] = set()
            for row in mine:
                value = metric.plan.final_value(row[2:], Grain.DAY.minutes)
                if value is not None:
                    known |= (
                        {label for label, _ in by_label(metric, value)}
                        if metric.labelled
                        else {None}
                    )
            for label in sorted(known, key=lambda label_text: label_text or ""):
                whole = labels if label is None else {**labels, "label": label}
                if selector.matches(whole):
                    yield whole
                    count += 1
                    if count >= most:
                        return


def _minute(moment_s: float, newest: int | None) -> int | None:
    """The minute whose value is current at a time."""
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
) -> dict[int, StoredEntity]:
    """The entities that a selector may match, of those with data on the same days."""
    known: dict[int, EntityName]
    given = selector.required_value("entity_id") or selector.required_value("name")
    if given is not None:
        known = {item.key: item for item in snapshot.find(id_or_name=given, most=MOST_ENTITIES)}
    else:
        if days is None:
            days = Buckets(Grain.DAY, minutes[0] // 10_000, minutes[-1] // 10_000)
        known = snapshot.entity_names(snapshot.entities_in(metric.source, days))
    layers = snapshot.layers(known)
    labelled = {
        key: StoredEntity(item.kind, item.id, item.name, layers.get(key, frozenset()), {})
        for key, item in known.items()
    }
    matchers = [matcher for matcher in selector.matchers if matcher.label not in (NAME, "label")]
    matching = {}
    for key, entity in labelled.items():
        labels = dict(entity_labels(entity))
        if all(item.matches(labels.get(item.label, "")) for item in matchers):
            matching[key] = entity
    if len(matching) > MOST_ENTITIES:
        raise BadRequest(f"the selector matches more than {MOST_ENTITIES:,} series: select fewer")
    return matching


def _by_label(
    metric: StoredMetric,
    labels: Mapping[str, str],
    finished: Mapping[int, Value],
    minutes: Sequence[int | None],
    selector: Selector,
) -> Iterator[SampledSeries]:
    """The series of one entity: one, or one for each label."""
    by_text: dict[str, dict[int, float]] = {}
    for minute, value in finished.items():
        if value is not None:
            for label, number in by_label(metric, value):
                by_text.setdefault(label, {})[minute] = number
    for label, numbers in sorted(by_text.items()):
        whole = {**labels, "label": label} if metric.labelled else labels
        values = [None if minute is None else numbers.get(minute) for minute in minutes]
        if selector.matches(whole) and any(value is not None for value in values):
            yield SampledSeries(whole, values)
