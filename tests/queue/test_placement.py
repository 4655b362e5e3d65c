"""Which partition and which thread gets the next one, as plain numbers."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchmill.queue.layout import fewest_owned, index_of_least


def test_least_is_the_first_of_the_smallest() -> None:
    """Of several equally small values the first is taken."""
    assert index_of_least([3, 1, 2, 1]) == 1


@given(values=st.lists(st.floats(allow_nan=False), min_size=1))
def test_least_is_nobody_elses(values: list[float]) -> None:
    """No value is smaller than the one that index_of_least() points at."""
    assert values[index_of_least(values)] == min(values)


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
    assert fewest_owned(owners, 3) == owner


@given(owners=st.lists(st.integers(0, 7)), more=st.integers(1, 100))
def test_growth_evens_out(owners: list[int], more: int) -> None:
    """Partitions added one by one never widen the gap between threads, and close it in the end."""
    before = [owners.count(thread) for thread in range(8)]
    for _ in range(more):
        owners.append(fewest_owned(owners, 8))
    after = [owners.count(thread) for thread in range(8)]
    assert max(after) - min(after) <= max(max(before) - min(before), 1)
