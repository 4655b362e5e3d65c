"""Verdicts: what climbs, what is not answered and what did not take place makes a soak fail."""

from __future__ import annotations

import random

import pytest

from tests.soak.probes import BOUNDS
from tests.soak.report import Result
from tests.soak.schedule import Disturbance, Plan
from tests.soak.verdict import (
    RECOVERY_S,
    Attempt,
    Bound,
    Happened,
    Series,
    Share,
    growth_problems,
    load_problems,
    plan_problems,
    shares_under_attack,
    undisturbed,
)

START = 100.0


def series(value: float, per_s: float = 0.0, noise: float = 0.0) -> Series:
    """Samples of ten minutes."""
    rng = random.Random(1)
    return [(at, value + per_s * at + rng.uniform(-noise, noise)) for at in range(0, 600, 5)]


@pytest.mark.parametrize("noise", [0, 50])
def test_a_level_that_is_kept_passes(noise: float) -> None:
    """Whatever the noise is."""
    assert Bound(slack=10).problem(series(200, noise=noise), START) is None


def test_a_leak_fails() -> None:
    """The message has both levels and the limit."""
    problem = Bound(ratio=1.2).problem(series(100, per_s=1.0), START)
    assert problem is not None
    assert problem.startswith("grew from ")


def test_growth_during_the_warm_up_passes() -> None:
    """Caches fill, code is compiled."""
    samples = [(at, min(at, START)) for at in map(float, range(0, 600, 5))]
    assert Bound(ratio=1.01).problem(samples, START) is None
    # Nor does what comes after the traffic, when a backlog is worked off.
    samples += [(at, 9.0 * at) for at in map(float, range(600, 999, 5))]
    assert Bound(ratio=1.01).problem(samples, START, 600.0) is None
    assert Bound(ratio=1.01).problem(samples, START) is not None


def test_a_single_peak_passes_unless_it_is_above_the_most() -> None:
    """A burst is no growth; a limit is a limit."""
    samples = [*series(100), (601.0, 5_000.0)]
    assert Bound(most=10_000).problem(samples, START) is None
    assert Bound(most=1_000).problem(samples, START) == "was 5,000, and may be 1,000"


def test_most_samples_must_be_at_the_usual_level() -> None:
    """Those of the warm-up do not count, nor do a few."""
    bound = Bound(slack=1_000, usual=150)
    assert bound.problem([*series(100), *[(601.0, 999.0)] * 20], START) is None
    assert bound.problem([(0.0, 999.0)] * 500 + [*series(100)], START) is None
    problem = bound.problem(series(200), START)
    assert problem == "was 200 for a quarter of the time; 150 is usual"


def test_a_store_may_grow_steadily() -> None:
    """But not faster and faster."""
    bound = Bound(ratio=1.5, per_second=True)
    assert bound.problem(series(0, per_s=7.0), START) is None
    squared = [(at, at * at) for at in map(float, range(0, 600, 5))]
    assert bound.problem(squared, 0) is not None


def test_too_few_samples_give_no_verdict() -> None:
    """A process that has just started proves nothing."""
    assert Bound(ratio=1.0).problem([(START + 1, 1.0), (START + 2, 9.0)], START) is None
    assert Bound(ratio=1.0).problem([], START) is None


def test_the_longest_name_decides_which_bound_counts() -> None:
    """And a series that nobody has thought of is a problem."""
    bounds = {"a: ": Bound(ratio=1.0), "a: b": Bound(ratio=100.0)}
    climbing = series(1, per_s=1.0)
    assert growth_problems({"a: b": climbing}, bounds, START) == []
    assert len(growth_problems({"a: c": climbing}, bounds, START)) == 1
    assert growth_problems({"x": climbing}, bounds, START) == ["x: has no bound"]


@pytest.mark.parametrize("name", ["memory: pipeline-jvm", "memory: side-pipeline-workers"])
def test_a_leak_in_a_jvm_is_beyond_the_bounds_of_a_soak(name: str) -> None:
    """Three MiB a second: the bounds that are in use notice within ten minutes."""
    assert growth_problems({name: series(400, per_s=3.0)}, BOUNDS, START) != []
    assert growth_problems({name: series(900, noise=100)}, BOUNDS, START) == []


ATTACK = Happened(Disturbance(0, "strangers", "noise at ingest", 20), 100.0, 120.0)


def attempts(good: int, bad: int, at_s: float = 110.0) -> list[Attempt]:
    """So many that were answered, and not."""
    return [Attempt(at_s, True)] * good + [Attempt(at_s, False)] * bad


def test_less_than_95_of_100_under_an_attack_are_too_few() -> None:
    """What was asked before and after does not count."""
    for bad in (5, 6):
        own = [*attempts(100 - bad, bad), *attempts(0, 500, 99.0), *attempts(500, 0, 121.0)]
        share = shares_under_attack({"ingest": own}, [ATTACK])["noise at ingest"]
        assert (share.answered, share.attempts) == (100 - bad, 100)
        assert share.is_bad == (bad == 6)
    assert str(share) == "94 of 100 (94.0%)"


def test_an_attack_on_one_listener_says_nothing_of_another() -> None:
    """Each is attacked by itself."""
    shares = shares_under_attack({"ingest": attempts(9, 0), "web": attempts(0, 99)}, [ATTACK])
    assert shares == {"noise at ingest": Share(answered=9, attempts=9)}


def test_few_attempts_give_no_verdict() -> None:
    """One of ten is a tenth, and an accident."""
    assert not Share.of(attempts(9, 1)).is_bad
    assert not Share.of([]).is_bad
    assert str(Share.of([])) == "nobody asked"


def test_what_is_down_cannot_answer() -> None:
    """The listener, the run that has it, or its disk; other processes are no excuse."""
    own = attempts(0, 30, 130.0)
    for kind, target, excused in (
        ("kill", "ingest", True),
        ("stop", "supervisor", True),
        ("disk", "full", True),
        ("kill", "web", False),
        ("kill", "pipeline", False),
        ("strangers", "noise at ingest", False),
    ):
        happened = [Happened(Disturbance(0, kind, target), 120.0, 120.0)]
        assert (undisturbed("ingest", own, happened) == []) == excused, target
    run = [Happened(Disturbance(0, "kill", "supervisor"), 120.0, 120.0)]
    assert undisturbed("side-ingest", own, run) == own
    later = attempts(0, 30, 121.0 + RECOVERY_S)
    assert undisturbed("ingest", later, run) == later


def test_a_load_that_was_not_reached_is_a_problem() -> None:
    """Less so in bursts, which are as much as a small machine can do."""
    counts = {"due": 1000, "missed": 50, "burst_due": 1000, "burst_acknowledged": 500}
    assert load_problems(counts) == []
    assert len(load_problems({**counts, "missed": 51})) == 1
    assert len(load_problems({**counts, "burst_acknowledged": 499})) == 1
    assert load_problems({}) == []


def test_a_burst_that_is_acknowledged_after_its_end_is_none() -> None:
    """Requests that wait in the sender, and are sent once the burst is over, are no burst."""
    [problem] = load_problems({"burst_due": 1000, "burst_missed": 0, "burst_acknowledged": 200})
    assert problem.startswith("20% of the spans planned for bursts were acknowledged while")


def test_a_disturbance_that_never_took_place_is_a_problem() -> None:
    """Unless it did another time; and most must take place."""
    web = [Disturbance(at_s, "kill", "web") for at_s in range(20)]
    alerts = Disturbance(30, "kill", "alerts")
    done = [Happened(event, 0.0, 0.0) for event in web]
    assert plan_problems(web, done[2:]) == []
    assert plan_problems(web, done[3:]) == ["3 of 20 disturbances did not take place"]
    assert plan_problems([*web, alerts], done) == ["kill: alerts was planned and never took place"]


def test_the_rate_of_bursts_is_that_which_was_acknowledged_meanwhile() -> None:
    """In the closing lines and in the summary; a road without bursts has none."""
    plan = Plan(seconds=600)
    result = Result(
        plan=plan,
        seconds=600,
        balances=[],
        problems=[],
        series={},
        events=[],
        missed=[],
        notes=[],
        counts={
            "main": {"due": 960_000, "burst_due": 2_400_000, "burst_acknowledged": 648_000},
            "side": {"due": 60_000},
        },
        starts={},
        pages=Share.of([]),
        shares={},
        load_average=0.0,
        machine={},
    )
    bursts = {"main": {"planned_spans_per_s": 20_000, "reached_spans_per_s": 5_400}}
    assert result.summary()["bursts"] == bursts
    assert [line for line in result.lines() if "bursts of" in line] == [
        "  main: bursts of 20,000 spans/s were planned, 5,400 were acknowledged while they lasted"
    ]
