"""Verdicts on growth: what keeps its level passes, what climbs fails."""

from __future__ import annotations

import random

import pytest

from tests.soak.growth import Bound, Series, problems
from tests.soak.probes import BOUNDS

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


def test_a_single_peak_passes_unless_it_is_above_the_most() -> None:
    """A burst is no growth; a limit is a limit."""
    samples = [*series(100), (601.0, 5_000.0)]
    assert Bound(most=10_000).problem(samples, START) is None
    assert Bound(most=1_000).problem(samples, START) == "was 5,000, and may be 1,000"


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
    assert problems({"a: b": climbing}, bounds, START) == []
    assert len(problems({"a: c": climbing}, bounds, START)) == 1
    assert problems({"x": climbing}, bounds, START) == ["x: has no bound"]


@pytest.mark.parametrize("name", ["memory: pipeline-jvm", "memory: side-pipeline-workers"])
def test_a_leak_in_a_jvm_is_beyond_the_bounds_of_a_soak(name: str) -> None:
    """Three MiB a second: the bounds that are in use notice within ten minutes."""
    assert problems({name: series(400, per_s=3.0)}, BOUNDS, START) != []
    assert problems({name: series(900, noise=100)}, BOUNDS, START) == []
