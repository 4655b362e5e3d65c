"""Incidents of the simulated shop: when they are, what they break, and that alert rules see it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from batchmill.alerts import DEMO_RULES, load_rules
from batchmill.demo import incidents, plan
from batchmill.store import open_store
from tests.alerts.kit import Shop, firing
from tests.web.kit import START_S, Call

MINUTE_S = 1_700_000_040
"""The start of a minute."""


def minutes_of(is_incident: Callable[[float], bool], count: int) -> list[int]:
    """The minutes of the clock that are incidents all the way, of a run that begins with one."""
    return [
        minute
        for minute in range(count)
        if all(is_incident(60 * minute + second) for second in (0, 30, 59.9))
    ]


@pytest.mark.parametrize("seconds", [None, 3600.0])
def test_a_long_run_has_two_bad_minutes_of_fifteen(seconds: float | None) -> None:
    """Whole minutes of the clock, the first of them soon."""
    assert minutes_of(incidents(MINUTE_S, seconds), 35) == [2, 3, 17, 18, 32, 33]


@pytest.mark.parametrize("into", [0, 15, 59])
def test_a_short_run_begins_with_an_incident(into: int) -> None:
    """It ends with the first minute of the clock, so that this minute is bad as a whole."""
    is_incident = incidents(MINUTE_S + into, 60.0)
    assert is_incident(0)
    assert is_incident(59.9 - into)
    assert not is_incident(60 - into)


def success(seed: int, *, incident: bool) -> dict[str, float]:
    """The share of good calls of each service, over two minutes."""
    good: Counter[str] = Counter()
    total: Counter[str] = Counter()
    for request in plan(seed, 20, 120, lambda offset_s: incident):
        for step, _ in request.root.family():
            if step.kind in ("SERVER", "CONSUMER"):
                total[step.service] += 1
                good[step.service] += not step.error
    return {service: good[service] / total[service] for service in total}


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_an_incident_breaks_the_catalogue(seed: int) -> None:
    """A third of its calls fail, so that its rule fires; before and after, hardly any."""
    broken, healthy = success(seed, incident=True), success(seed, incident=False)
    assert broken["catalogue"] < 0.72
    assert broken["gateway"] > broken["catalogue"]
    assert all(share > 0.9 for share in healthy.values())


def test_without_an_incident_the_plan_is_what_it_was() -> None:
    """Request by request: a seed means the same spans."""
    assert list(plan(3, 20, 5)) == list(plan(3, 20, 5, lambda offset_s: False))


def test_the_rules_of_the_demo_find_the_incident(tmp_path: Path) -> None:
    """The catalogue fires in the minute of the incident, and is resolved after it; nobody else."""
    with open_store(f"sqlite:///{tmp_path}/store.db") as store:
        shop = Shop(store)
        calls = [
            Call(
                step.service,
                START_S + request.offset_us // 1_000_000,
                latency=step.duration_us // 1000,
                ok=not step.error,
            )
            for request in plan(7, 20, 240, lambda offset_s: 60 <= offset_s < 120)
            for step, _ in request.root.family()
            if step.kind in ("SERVER", "CONSUMER")
        ]
        shop.writer.write(calls)
        states = []
        with shop.engine(load_rules(DEMO_RULES).rules) as engine:
            for number in range(3):
                shop.over(number)
                engine.evaluate()
                states.append(firing(engine))
    assert states[0] == []
    assert ("service_errors", "catalogue") in states[1]
    assert ("catalogue_availability/1h", "catalogue") in states[1]
    assert [alert for alert in states[2] if alert[0] == "service_errors"] == []
