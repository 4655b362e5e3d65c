"""The calls of the aggregation benchmark, their metrics, and the states they must give."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import TypeAlias

from batchmill.sources import Grain, service, source
from batchmill.store import open_store
from benchmarks.queue.work import SEED

APDEX_MS = 500
PRECISION = 10
STEP, STEPS = 100, 20
FILTER_MS = 7
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_MINUTE = timedelta(minutes=1)


@source(entity=service("service"))
@dataclass(frozen=True)
class BenchCall:
    """A call of a service."""

    time: datetime
    service: str
    latency: int
    status: bool


def script(times: int = 1) -> str:
    """Six metrics of calls; ``times`` as many, which differ in the calls they count."""
    return "\n".join(_six(number) for number in range(times))


def _six(number: int) -> str:
    where = f".filter(latency >= {FILTER_MS * number})" if number else ""
    name = f"bench_{number}"
    return f"""
    {name}_cpm = from(BenchCall.*){where}.cpm();
    {name}_avg = from(BenchCall.latency){where}.longAvg();
    {name}_percentile = from(BenchCall.latency){where}.percentile2({PRECISION});
    {name}_sla = from(BenchCall.*){where}.percent(status == true);
    {name}_apdex = from(BenchCall.latency){where}.apdex(service, status);
    {name}_histogram = from(BenchCall.latency){where}.histogram({STEP}, {STEPS});
    """


def make_calls(
    count: int, *, entities: int, minutes: int, ago: int = 0, seed: int = SEED
) -> list[BenchCall]:
    """Calls in the order in which they end, each with its own start, over some minutes.

    The last of these minutes ended ``ago`` minutes before this one began. Latencies are lognormal
    (median 90 ms, p99 920 ms); 1 % of the calls fail.
    """
    rng = random.Random(seed)
    start = datetime.now(UTC).replace(second=0, microsecond=0) - (ago + minutes) * _MINUTE
    step = minutes * _MINUTE / count
    names = [f"service-{number}" for number in range(entities)]
    calls = []
    for number in range(count):
        latency = int(rng.lognormvariate(4.5, 1))
        moment = start + number * step - timedelta(milliseconds=latency)
        calls.append(BenchCall(moment, rng.choice(names), latency, rng.random() < 0.99))
    return calls


Key: TypeAlias = tuple[int, str]
"""The minute, counted from 1970, and the service."""


@dataclass
class States:
    """The states of the six metrics of a service in a minute."""

    count: int = 0
    total: int = 0
    ok: int = 0
    satisfied: int = 0
    tolerated: int = 0
    percentile: dict[int, int] = field(default_factory=dict)
    """Calls by tens of milliseconds."""
    histogram: dict[int, int] = field(default_factory=dict)
    """Calls by hundreds of milliseconds, those from 2,000 on together."""


Results: TypeAlias = dict[Key, States]


def minute_of(moment: datetime) -> int:
    """The minute, counted from 1970."""
    return (moment - _EPOCH) // _MINUTE


def expected_results(calls: Iterable[BenchCall]) -> Results:
    """The states of each service and minute, in the plainest way."""
    by_key: dict[Key, list[BenchCall]] = {}
    for call in calls:
        by_key.setdefault((minute_of(call.time), call.service), []).append(call)
    return {key: _states(own) for key, own in by_key.items()}


def _states(calls: list[BenchCall]) -> States:
    good = [call.latency for call in calls if call.status]
    return States(
        count=len(calls),
        total=sum(call.latency for call in calls),
        ok=len(good),
        satisfied=sum(ms <= APDEX_MS for ms in good),
        tolerated=sum(APDEX_MS < ms <= 4 * APDEX_MS for ms in good),
        percentile=dict(Counter(call.latency // PRECISION for call in calls)),
        histogram=dict(Counter(min(call.latency // STEP, STEPS) for call in calls)),
    )


def expected_growth(calls: Sequence[BenchCall], times: int) -> list[Results]:
    """The states of every six metrics of ``script(times)``."""
    return [
        expected_results(call for call in calls if call.latency >= FILTER_MS * number)
        for number in range(times)
    ]


def stored_results(url: str, number: int = 0) -> Results:
    """The states that a store has of six metrics."""
    results: Results = {}
    with open_store(url, create=False) as store:
        read = {
            name: {
                (row.bucket, row.entity_name): row.states
                for row in store.states(f"bench_{number}_{name}", grain=Grain.MINUTE)
            }
            for name in ("cpm", "avg", "percentile", "sla", "apdex", "histogram")
        }
    for key, (total, count) in read["avg"].items():
        if not count:  # the filter leaves none of the entity's calls
            continue
        ok, in_sla = read["sla"][key]
        satisfied, tolerated, in_apdex = read["apdex"][key]
        if {in_sla, in_apdex, *read["cpm"][key]} != {count}:
            raise WrongResult(f"{key}: the metrics count different numbers of calls")
        (percentile,), (histogram,) = read["percentile"][key], read["histogram"][key]
        bucket, name = key
        moment = datetime.strptime(str(bucket), "%Y%m%d%H%M").replace(tzinfo=UTC)
        results[minute_of(moment), name] = States(
            count, total, ok, satisfied, tolerated, dict(percentile), dict(histogram)
        )
    return results


class WrongResult(Exception):
    """A contender counted something else than the calls it was given: its time means nothing."""


def check(name: str, results: Results, expected: Results) -> None:
    """Raise unless the results are those expected."""
    if results.keys() != expected.keys():
        odd = sorted(results.keys() ^ expected.keys())
        raise WrongResult(f"{name}: {len(odd)} missing or unexpected states, such as {odd[0]}")
    for key, states in expected.items():
        if results[key] != states:
            raise WrongResult(f"{name}: {key} is {results[key]}, expected {states}")


@dataclass
class ServiceTotals:
    """What a counter and a histogram know of a service: no minutes, and no percentiles."""

    calls: dict[bool, int] = field(default_factory=dict)
    """By success."""
    histogram: dict[int, int] = field(default_factory=dict)
    total: int = 0


def service_totals(expected: Results) -> dict[str, ServiceTotals]:
    """The same calls by service alone."""
    totals: dict[str, ServiceTotals] = {}
    for (_, name), states in expected.items():
        own = totals.setdefault(name, ServiceTotals())
        own.total += states.total
        for success, count in ((True, states.ok), (False, states.count - states.ok)):
            if count:
                own.calls[success] = own.calls.get(success, 0) + count
        for place, count in states.histogram.items():
            own.histogram[place] = own.histogram.get(place, 0) + count
    return totals
