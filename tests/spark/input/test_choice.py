"""How much of the waiting input a batch takes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchmill.spark.input.choice import BatchTime, Pace, Segment, batch_limit, how_many, share

MOST = 1_000_000
LEAST = 1_000


def segments(*sizes: int) -> list[Segment]:
    """Segments of those sizes."""
    return [Segment(float(at), f"/{at}", size) for at, size in enumerate(sizes)]


@pytest.mark.parametrize(
    ("times", "limit"),
    [
        ([], MOST // 4),
        # A pace of 2,000 a second.
        ([(4_000, 2.0)], 20_000),
        # Small batches are overhead: the best pace counts.
        ([(4_000, 2.0), (10, 1.0)], 20_000),
        # The last one took twice as long as it should: half as much.
        ([(40_000, 2.0), (40_000, 20.0)], 20_000),
        ([(MOST, 1.0)], MOST),
        ([(10, 5.0)], LEAST),
        ([(10, 0.0)], 100_000),
    ],
)
def test_a_batch_follows_the_pace_of_the_last_ones(
    times: list[tuple[int, float]], limit: int
) -> None:
    """So that it takes about ten seconds."""
    recent = [BatchTime(*time) for time in times]
    assert batch_limit(recent, 10.0, MOST, LEAST) == limit


@given(
    overhead=st.floats(0, 5),
    pace=st.floats(1_000, 100_000),
    target=st.floats(8, 30),
)
def test_a_backlog_is_worked_off_in_batches_of_about_the_target(
    overhead: float, pace: float, target: float
) -> None:
    """Whatever a batch costs: within a few batches they take the target, or the most they may."""
    own = Pace(target)
    seconds = 0.0
    for _ in range(20):
        limit = own.limit(MOST, LEAST)
        seconds = overhead + limit / pace
        own.note(limit, seconds)
    assert LEAST <= limit <= MOST
    if LEAST < limit < MOST:
        assert 0.3 * target <= seconds <= 1.5 * target


def test_overhead_alone_does_not_make_batches_ever_smaller() -> None:
    """Even the smallest one takes too long: they stay at the least amount."""
    own = Pace(1.0)
    for _ in range(10):
        own.note(own.limit(MOST, LEAST), 60.0)
    assert own.limit(MOST, LEAST) == LEAST


def test_a_backfill_takes_all_it_may() -> None:
    """It has no target."""
    own = Pace(None)
    own.note(10, 100.0)
    assert own.limit(MOST, LEAST) == MOST


def test_one_segment_is_taken_in_any_case() -> None:
    """A larger one is a batch of its own; many small ones have a cost of their own."""
    large = 2**30
    assert how_many(segments(500, 1, 1), large, 100) == 1
    assert how_many(segments(50, 50, 1), large, 100) == 2
    assert how_many(segments(50, 51, 1), large, 100) == 1
    assert how_many(segments(*[1] * 100), 10 * 32 * 1024 + 10, 100) == 10
    assert how_many([], large, 100) == 0


def test_partitions_share_a_batch() -> None:
    """Each with the same part of what waits in it; all if all fits."""
    waiting = {0: (100, 200), 1: (0, 300), 2: (7, 8)}
    assert share(waiting, 401) == waiting
    assert share(waiting, 40) == {0: (100, 109), 1: (0, 29), 2: (7, 8)}
    assert share(waiting, 1) == {0: (100, 101), 1: (0, 1), 2: (7, 8)}


@given(
    st.dictionaries(st.integers(0, 9), st.tuples(st.integers(0, 99), st.integers(1, 9999))),
    st.integers(1, 5000),
)
def test_all_messages_are_taken_in_the_end(lags: dict[int, tuple[int, int]], limit: int) -> None:
    """In batches that follow each other, of at most the limit and one for each partition."""
    waiting = {partition: (first, first + lag) for partition, (first, lag) in lags.items()}
    while waiting:
        taken = share(waiting, limit)
        assert sum(end - first for first, end in taken.values()) <= limit + len(taken)
        left = {}
        for partition, (first, end) in waiting.items():
            assert taken[partition][0] == first
            assert first < taken[partition][1] <= end
            if taken[partition][1] < end:
                left[partition] = taken[partition][1], end
        waiting = left
