from __future__ import annotations

import math
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchmill.flows.stats import BOUNDS, LONGEST_S, MEMORY_S, SHORTEST_S, Histogram, Rate, merged

durations = st.lists(
    st.floats(SHORTEST_S * 1.01, LONGEST_S, allow_nan=False), min_size=1, max_size=200
)


@given(durations, st.sampled_from([0.0, 0.5, 0.95, 0.99, 1.0]))
def test_a_quantile_is_within_two_percent(values: list[float], share: float) -> None:
    """The answer is at most 2 % off the value of that rank."""
    histogram = Histogram()
    histogram.record_many(values)
    exact = sorted(values)[max(1, math.ceil(share * len(values))) - 1]
    assert histogram.quantile(share) == pytest.approx(exact, rel=0.02)


@given(durations, durations)
def test_merging_is_recording_all_in_one(first: list[float], second: list[float]) -> None:
    """Two workers' histograms together say what one histogram of both would."""
    parts = []
    for values in (first, second):
        part = Histogram()
        part.record_many(values)
        parts.append(part)
    whole = Histogram()
    for value in first + second:
        whole.record(value)
    shares = (0.1, 0.5, 0.99)
    assert merged(parts).quantiles(shares) == whole.quantiles(shares)
    assert merged(parts).count == len(first) + len(second)


@pytest.mark.parametrize(
    ("value", "answer"), [(0.0, 0.0), (-1.0, 0.0), (SHORTEST_S / 2, 0.0), (1e9, BOUNDS[-1])]
)
def test_what_is_out_of_range_counts_at_the_edge(value: float, answer: float) -> None:
    """Nothing is too short, too long or too negative to be counted."""
    histogram = Histogram()
    histogram.record(value)
    assert (histogram.count, histogram.quantile(0.5)) == (1, answer)


def test_an_empty_histogram_answers_zero() -> None:
    """No durations, no error."""
    assert Histogram().quantiles((0.5, 0.99)) == [0.0, 0.0]


def test_a_histogram_does_not_grow() -> None:
    """However much is recorded, there are as many buckets as at the start, a few kilobytes."""
    histogram = Histogram()
    before = sys.getsizeof(histogram._counts)
    histogram.record_many(number * 1e-6 for number in range(10_000))
    assert sys.getsizeof(histogram._counts) == before < 8_192


@pytest.mark.parametrize("seconds", [2, 10, 100])
def test_a_steady_rate_is_that_rate(seconds: int) -> None:
    """Ten signals every tenth of a second are a hundred a second, also soon after the start."""
    rate = Rate(0.0)
    for tenth in range(seconds * 10):
        rate.add(10, tenth / 10)
    assert rate.per_second(float(seconds)) == pytest.approx(100, rel=0.02)


def test_a_rate_fades_when_nothing_comes() -> None:
    """After three times its memory the rate of the past is down to a twentieth."""
    rate = Rate(0.0)
    for second in range(100):
        rate.add(100, float(second))
    busy = rate.per_second(100.0)
    assert rate.per_second(100.0 + 3 * MEMORY_S) == pytest.approx(busy / 20, rel=0.02)


def test_reading_a_rate_changes_nothing() -> None:
    """Two readers see the same figure."""
    rate = Rate(5.0)
    rate.add(7, 6.0)
    assert rate.per_second(8.0) == rate.per_second(8.0)


def test_a_rate_at_its_first_moment_is_zero() -> None:
    """Nothing is divided by no time at all."""
    rate = Rate(5.0)
    rate.add(1, 5.0)
    assert rate.per_second(5.0) == 0.0
