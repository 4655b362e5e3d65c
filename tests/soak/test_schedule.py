"""The schedule of a soak: repeatable by its seed, complete, and calm at both ends."""

from __future__ import annotations

import dataclasses
import math

from tests.soak.schedule import (
    GRPC_STRANGERS,
    KINDS,
    LISTENERS,
    STRANGERS,
    VICTIMS,
    Plan,
    Traffic,
    unknown_kinds,
)

HOUR = Plan(seconds=3600, seed=3)


def test_a_seed_gives_the_same_schedule() -> None:
    """And another seed another one."""
    assert HOUR.disturbances() == Plan(seconds=3600, seed=3).disturbances()
    assert HOUR.disturbances() != Plan(seconds=3600, seed=4).disturbances()


def test_every_process_is_killed_and_stopped_within_half_an_hour() -> None:
    """The default length has every kind of disturbance with every target."""
    events = Plan().disturbances()
    assert {event.kind for event in events} == set(KINDS)
    for kind in ("kill", "stop"):
        assert {event.target for event in events if event.kind == kind} == set(VICTIMS)
    attacks = {event.target for event in events if event.kind == "strangers"}
    assert len(attacks) == len(STRANGERS) * len(LISTENERS) - len(GRPC_STRANGERS)


def test_a_kind_that_is_left_out_does_not_happen() -> None:
    """All others still do."""
    events = Plan(without=frozenset({"machine clock", "disk"})).disturbances()
    assert {event.kind for event in events} == set(KINDS) - {"machine clock", "disk"}
    assert Plan(without=frozenset(KINDS)).disturbances() == []


def test_without_a_side_road_nothing_of_it_is_disturbed() -> None:
    """Neither its processes nor its database, and nobody attacks it."""
    events = Plan(side_road=False).disturbances()
    assert not [event for event in events if "side-" in event.target or event.kind == "postgres"]
    assert any(event.target == "noise at web" for event in events)


def test_the_start_and_the_end_are_calm() -> None:
    """Events are in order, and between the calm parts."""
    moments = [event.at_s for event in HOUR.disturbances()]
    assert moments == sorted(moments)
    assert moments[0] >= HOUR.calm_start_s
    assert moments[-1] <= HOUR.seconds - HOUR.calm_end_s


def test_only_kills_have_no_end() -> None:
    """Everything else ends in time for the system to recover."""
    for event in HOUR.disturbances():
        assert (event.lasts_s == 0) == (event.kind == "kill")
        assert event.lasts_s <= HOUR.longest_s


def test_a_burst_is_the_last_minute_of_each_five() -> None:
    """Ten times the rate, and the plain rate before."""
    traffic = Traffic()
    assert [traffic.rate(at_s) for at_s in (0, 239, 241, 299, 301)] == [
        *(2_000, 2_000, 20_000, 20_000, 2_000)
    ]


def test_bursts_last_as_long_as_the_rate_is_higher() -> None:
    """Whole bursts, and the part of one that the end cuts off."""
    traffic = Traffic()
    for seconds in (0, 239, 270, 300, 570, 1_800):
        high = sum(traffic.rate(at_s) > traffic.spans_per_s for at_s in range(seconds))
        assert traffic.bursting_s(seconds) == high


def test_growth_is_judged_in_a_third_of_the_run_at_least() -> None:
    """A run that is shorter is all warm-up."""
    assert HOUR.judged_from_s == 600
    assert dataclasses.replace(HOUR, seconds=900).judged_from_s == 600
    assert dataclasses.replace(HOUR, seconds=899).judged_from_s == math.inf


def test_an_unknown_kind_is_named() -> None:
    """So that --without has no effect silently."""
    assert unknown_kinds(["disk", "dusk"]) == ["dusk"]
