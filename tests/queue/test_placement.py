"""Placement: who gets what, as plain numbers."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchmill.queue.placement import deal, fit_threads, least, owner_for_new
from tests.kit.queues import untimed

counts = st.integers(1, 200)


def test_least_is_the_first_of_the_smallest() -> None:
    """Of several equally small values the first is taken."""
    assert least([3, 1, 2, 1]) == 1


@untimed
@given(values=st.lists(st.floats(allow_nan=False), min_size=1))
def test_least_is_nobody_elses(values: list[float]) -> None:
    """No value is smaller than the one that least() points at."""
    assert values[least(values)] == min(values)


def test_deal_goes_round() -> None:
    """Eight partitions on four threads: thread 0 has 0 and 4, thread 1 has 1 and 5, and so on."""
    assert deal(8, 4) == [0, 1, 2, 3, 0, 1, 2, 3]


@untimed
@given(partitions=counts, threads=counts)
def test_deal_is_even(partitions: int, threads: int) -> None:
    """No thread gets two partitions more than another."""
    dealt = Counter(deal(partitions, threads))
    shares = [dealt[thread] for thread in range(threads)]
    assert sum(shares) == partitions
    assert max(shares) - min(shares) <= 1


@pytest.mark.parametrize(
    ("owners", "owner"),
    [
        ([], 0),
        ([0, 1, 2], 0),
        ([0, 1, 2, 0], 1),
        ([0, 0, 0, 1, 2, 2], 1),
        ([1, 2, 2], 0),
    ],
)
def test_new_partition_goes_to_the_thread_with_the_fewest(owners: list[int], owner: int) -> None:
    """A partition that is added goes to whoever serves the fewest, however that came about."""
    assert owner_for_new(owners, 3) == owner


@untimed
@given(owners=st.lists(st.integers(0, 7)), more=st.integers(1, 100))
def test_growth_evens_out(owners: list[int], more: int) -> None:
    """Partitions added one by one never widen the gap between threads, and close it in the end."""
    before = [owners.count(thread) for thread in range(8)]
    for _ in range(more):
        owners.append(owner_for_new(owners, 8))
    after = [owners.count(thread) for thread in range(8)]
    assert max(after) - min(after) <= max(max(before) - min(before), 1)


@pytest.mark.parametrize(
    ("threads", "partitions", "useful"), [(4, 2, 2), (2, 4, 2), (3, 3, 3), (8, 1, 1)]
)
def test_threads_fit_the_partitions(threads: int, partitions: int, useful: int) -> None:
    """More threads than partitions would have nothing to do."""
    assert fit_threads(threads, partitions) == useful
