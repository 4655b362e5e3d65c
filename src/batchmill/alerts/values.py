"""Reads what alert rules look at: the last minutes of metrics, and calls of long windows."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta

from batchmill.alerts.evaluation import EntityNames, Outcome, Verdict, burn_rate, judge
from batchmill.alerts.expression import Number, Window
from batchmill.alerts.rules import BurnRate, NoData, Rule, Threshold
from batchmill.sources import EntityIdError, Grain, bucket_start, split_entity_id
from batchmill.store import Buckets, EntityName, Snapshot, StoredMetric

EXPECTED_MINUTES = 60
"""With ``no_data = "firing"``, an entity is expected for so long after its last value."""
_FULL_NAMES = {
    "instance": "{1} of {0}",
    "endpoint": "{1} in {0}",
    "service_relation": "{0} to {1}",
    "instance_relation": "{1} of {0} to {3} of {2}",
    "endpoint_relation": "{1} in {0} to {3} in {2}",
}


@dataclass(slots=True)
class Evaluation:
    """The outcomes of some rules in one minute."""

    outcomes: dict[str, dict[str, Outcome]] = field(default_factory=dict)
    """By rule and entity id."""
    faults: dict[str, str] = field(default_factory=dict)
    """Rules that could not be evaluated, and why."""


def evaluate(snapshot: Snapshot, rules: Iterable[Rule], minute: int) -> Evaluation:
    """Judge rules by the minutes up to ``minute``, with values of one moment."""
    result = Evaluation()
    known = {metric.name: metric for metric in snapshot.metrics()}
    by_source: dict[str, list[Rule]] = {}
    for rule in rules:
        try:
            source = _source(rule, known)
        except ValueError as error:
            result.faults[rule.id] = str(error)
            continue
        by_source.setdefault(source, []).append(rule)
    for of_source in by_source.values():
        _judge_values(snapshot, known, of_source, minute, result)
        for rule in of_source:
            if isinstance(rule.condition, BurnRate):
                outcomes = _judge_burn(snapshot, known[rule.condition.metric], rule, minute)
                result.outcomes[rule.id] = outcomes
    return result


def _source(rule: Rule, known: Mapping[str, StoredMetric]) -> str:
    """The source whose entities a rule is about; raises ValueError if there is not one."""
    missing = [name for name in rule.condition.metrics if name not in known]
    if missing:
        raise ValueError(f"the store has no metric {', '.join(missing)} (yet)")
    metrics = [known[name] for name in rule.condition.metrics]
    sources = {metric.source for metric in metrics}
    if len(sources) > 1:
        raise ValueError(
            f"its metrics are of different sources ({', '.join(sorted(sources))}): a rule needs "
            "metrics of one"
        )
    if isinstance(rule.condition, BurnRate) and metrics[0].function != "percent":
        raise ValueError(f"{metrics[0].name} is {metrics[0].function}(), and must be percent()")
    return metrics[0].source


def _judge_values(
    snapshot: Snapshot,
    known: Mapping[str, StoredMetric],
    rules: Sequence[Rule],
    minute: int,
    result: Evaluation,
) -> None:
    """Judge the conditions on values of one source; rows are read once for all of them."""
    rules = [rule for rule in rules if isinstance(rule.condition, Threshold)]
    if not rules:
        return
    names = list(dict.fromkeys(name for rule in rules for name in rule.condition.metrics))
    metrics = [known[name] for name in names]
    period = max(rule.condition.period for rule in rules)
    waiting = any(rule.no_data is NoData.FIRING for rule in rules)
    buckets = last_minutes(minute, period)
    cells = snapshot.cells(metrics, buckets)
    places = {bucket: place for place, bucket in enumerate(buckets)}
    values: dict[int, dict[str, dict[str, list[Number]]]] = {}
    for row in cells.rows:
        place, own = places[row[0]], values.setdefault(row[1], {})
        for metric in metrics:
            value = metric.plan.final_value(row[cells.places[metric.name]], 1)
            labelled = value if isinstance(value, dict) else {"": value}
            for label, number in labelled.items():
                series = own.setdefault(metric.name, {})
                series.setdefault(label, [None] * period)[place] = number
    keys: Collection[int] = values
    if waiting:
        expected = last_minutes(minute, max(period, EXPECTED_MINUTES))
        keys = {*values, *_keys_with_values(snapshot, metrics, expected)}
    entities = snapshot.entity_names(keys)
    for rule in rules:
        outcomes = result.outcomes.setdefault(rule.id, {})
        for key, entity in entities.items():
            own = values.get(key, {})
            if not own and rule.no_data is not NoData.FIRING:
                continue
            described = describe(entity)
            if not rule.scope.applies(described.all):
                continue
            of_rule = {name: own[name] for name in rule.condition.metrics if name in own}
            if not of_rule and rule.no_data is not NoData.FIRING:
                continue
            window = Window(of_rule, period).last(rule.condition.period)
            outcomes[entity.id] = judge(rule, window, described)


def _keys_with_values(
    snapshot: Snapshot, metrics: Sequence[StoredMetric], buckets: Buckets
) -> set[int]:
    return set(snapshot.entities_in(metrics[0].source, buckets))


def _judge_burn(
    snapshot: Snapshot, metric: StoredMetric, rule: Rule, minute: int
) -> dict[str, Outcome]:
    condition = rule.condition
    assert isinstance(condition, BurnRate)
    long = _calls(snapshot, metric, minute, condition.long_minutes)
    short = _calls(snapshot, metric, minute, condition.short_minutes)
    outcomes = {}
    for key, entity in snapshot.entity_names(long).items():
        described = describe(entity)
        if not rule.scope.applies(described.all):
            continue
        rates = [burn_rate(*calls.get(key, (0, 0)), condition.objective) for calls in (long, short)]
        if rates[1] is None and rule.no_data is NoData.KEEP:
            verdict = Verdict.UNKNOWN
        else:
            over = [rate is not None and rate > condition.factor for rate in rates]
            verdict = Verdict.HOLDS if all(over) else Verdict.PARTLY if any(over) else Verdict.FAILS
        outcomes[entity.id] = Outcome(described, verdict, rates[0])
    return outcomes


def _calls(
    snapshot: Snapshot, metric: StoredMetric, minute: int, minutes: int
) -> dict[int, tuple[int, int]]:
    """Good calls and all calls in the last minutes, by entity key.

    Whole hours are read as hours, the rest as minutes.
    """
    totals: dict[int, tuple[int, int]] = {}
    for buckets in cover(minute, minutes):
        cells = snapshot.cells([metric], buckets)
        place = cells.places[metric.name]
        for row in cells.rows:
            good, total = metric.plan.states(row[place])
            before = totals.get(row[1], (0, 0))
            totals[row[1]] = (before[0] + (good or 0), before[1] + (total or 0))
    return {key: calls for key, calls in totals.items() if calls[1]}


def last_minutes(minute: int, count: int) -> Buckets:
    """So many minutes up to one, that one included."""
    first = bucket_start(minute) - timedelta(minutes=count - 1)
    return Buckets(Grain.MINUTE, Grain.MINUTE.bucket(first), minute)


def cover(minute: int, count: int) -> list[Buckets]:
    """Buckets that add up to the last minutes: whole hours where there are any, else minutes.

    >>> [len(buckets) for buckets in cover(202403011229, 180)]
    [30, 2, 30]
    """
    end = bucket_start(minute) + timedelta(minutes=1)
    start = end - timedelta(minutes=count)
    hour = timedelta(hours=1)
    first = start.replace(minute=0) + (hour if start.minute else timedelta())
    last = end.replace(minute=0)
    if first >= last:
        return [last_minutes(minute, count)]
    one = timedelta(minutes=1)
    parts = [Buckets(Grain.HOUR, Grain.HOUR.bucket(first), Grain.HOUR.bucket(last - one))]
    if start < first:
        before = Grain.MINUTE.bucket(first - one)
        parts.insert(0, Buckets(Grain.MINUTE, Grain.MINUTE.bucket(start), before))
    if last < end:
        parts.append(Buckets(Grain.MINUTE, Grain.MINUTE.bucket(last), minute))
    return parts


def describe(entity: EntityName) -> EntityNames:
    """An entity with its full name: an endpoint's has that of its service."""
    template = _FULL_NAMES.get(entity.kind)
    if template is None:
        return EntityNames(entity.id, entity.name)
    try:
        full = template.format(*split_entity_id(entity.kind, entity.id))  # type: ignore[arg-type]
    except EntityIdError:
        return EntityNames(entity.id, entity.name)
    return EntityNames(entity.id, full, (entity.name,))
