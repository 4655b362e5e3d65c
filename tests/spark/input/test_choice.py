"""How much of the waiting input a batch takes."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchmill.spark.input.choice import (
    BatchTime,
    Cut,
    Pace,
    Room,
    Segment,
    batch_limit,
    cut,
    how_many,
    share,
)

MOST = 1_000_000
LEAST = 1_000


def segments(*sizes: int) -> list[Segment]:
    """Segments of those sizes."""
    return [Segment(float(at), f"/{at}", size, rows=1) for at, size in enumerate(sizes)]


@pytest.mark.parametrize(
    ("times", "limit"),
    [
        ([], MOST // 16),
        # A fixed cost of one second is assumed, and so a pace of 4,000 a second: 36,000.
        ([(4_000, 2.0)], 2 * 4_000),
        ([(10_000, 2.0)], 2 * 10_000),
        ([(36_000, 10.0)], 36_000),
        # Two sizes tell the fixed cost, which is 4 seconds here, and the pace, 1,000 a second.
        ([(2_000, 6.0), (4_000, 8.0)], 6_000),
        # A fixed cost above half of the target: the input has as much time as that.
        ([(2_000, 10.0), (4_000, 12.0)], 8_000),
        # The last one took far longer than the others tell.
        ([(40_000, 2.0), (40_000, 20.0)], 20_000),
        ([(MOST, 1.0)], MOST),
        ([(10, 5.0)], LEAST),
        # All of one size take too long: a larger one is tried.
        ([(2_000, 20.0)] * 3, 3_200),
        ([(1_000, 0.0)], 2_000),
    ],
)
def test_a_batch_follows_the_time_of_the_last_ones(
    times: list[tuple[int, float]], limit: int
) -> None:
    """So that it takes about ten seconds."""
    recent = [BatchTime(*time) for time in times]
    assert batch_limit(recent, 10.0, MOST, LEAST) == limit


@given(
    overhead=st.floats(0, 20),
    pace=st.floats(1_000, 100_000),
    target=st.floats(8, 30),
)
def test_a_backlog_is_worked_off_in_batches_of_about_the_target(
    overhead: float, pace: float, target: float
) -> None:
    """Whatever a batch costs: within a few batches they take the target, or the most they may.

    Where the fixed cost is large, they take twice that, and one that is tried a little more.
    """
    own = Pace(target)
    own.note(LEAST, 60.0)  # the first of a process is slow
    seconds = 0.0
    for _ in range(20):
        limit = own.limit(MOST, LEAST)
        seconds = overhead + limit / pace
        own.note(limit, seconds)
    assert LEAST <= limit <= MOST
    if LEAST < limit < MOST:
        assert 0.3 * target <= seconds <= max(1.5 * target, 2.7 * overhead)


def test_a_fixed_cost_alone_makes_batches_larger() -> None:
    """On a machine that does much else, small ones take no less time than large ones."""
    own = Pace(1.0)
    for _ in range(15):
        own.note(own.limit(MOST, LEAST), 60.0)
    assert own.limit(MOST, LEAST) == MOST


def test_beside_a_backlog_a_batch_has_half_of_the_time() -> None:
    """What is new waits for two batches at most: together they take the target."""
    own = Pace(10.0)
    for amount in (1_000, 2_000, 6_000):
        own.note(amount, amount / 1_000)
    assert own.limit(MOST, LEAST) == 10_000
    assert own.limit(MOST, LEAST, behind=True) == 5_000


def test_a_batch_that_ran_out_of_memory_lowers_the_limit_for_a_while() -> None:
    """To its half; with each batch of a backlog it grows, and reaches what was too much after
    many."""
    own = Pace(10.0)
    own.lower_ceiling(400_000)
    own.lower_ceiling(900_000)
    for _ in range(50):
        own.note(1, 1.0)
    assert own.ceiling == 400_000
    for _ in range(100):
        own.note(1, 1.0, backlog=1)
    assert 600_000 < own.ceiling < 800_000
    own.lower_ceiling(900_000)
    for _ in range(100):
        own.note(1, 1.0, backlog=1)
    assert 800_000 < own.ceiling < 1_000_000
    own.lower_ceiling(30)
    assert own.ceiling == 30
    own.note(1, 1.0, backlog=1)
    assert own.ceiling == 32
    own.lower_ceiling(0)
    assert own.ceiling == 1


def test_how_fast_a_backlog_is_read() -> None:
    """What is new in the same batches does not count."""
    own = Pace(10.0)
    assert own.backlog_per_s == 0
    own.note(1, 60.0)
    own.note(1, 5.0, backlog=1_000)
    own.note(1, 5.0, backlog=3_000)
    assert own.backlog_per_s == 400


def test_a_backfill_takes_all_it_may() -> None:
    """It has no target."""
    own = Pace(None)
    own.note(10, 100.0)
    assert own.limit(MOST, LEAST) == MOST


def test_one_segment_is_taken_in_any_case() -> None:
    """A larger one is a batch of its own; many small ones have a cost of their own."""
    large = 2**30
    room = Room(large, 100, large)
    assert how_many(segments(500, 1, 1), room) == 1
    assert how_many(segments(50, 50, 1), room) == 2
    assert how_many(segments(50, 51, 1), room) == 1
    assert how_many(segments(*[1] * 100), Room(10 * 32 * 1024 + 10, 100, large)) == 10
    assert how_many(segments(*[1] * 100), Room(large, 100, 7)) == 7
    assert how_many([], room) == 0


def stems(part: Sequence[Segment]) -> str:
    """The names of segments."""
    return "".join(segment.path.strip("/") for segment in part)


@pytest.mark.parametrize(
    ("room", "since", "parts"),
    [
        # Nothing is new: the oldest.
        (50, 9, ("01234", "56789", "")),
        (50, 7, ("012", "34567", "89")),
        # What is new takes three quarters at most.
        (80, 0, ("01", "23", "456789")),
        # All fits.
        (100, 9, ("0123456789", "", "")),
        # One of both ends in any case.
        (10, 0, ("0", "12345678", "9")),
        (19, 0, ("0", "12345678", "9")),
        # The oldest is larger than a batch may be.
        (9, 0, ("0", "123456789", "")),
    ],
)
def test_what_is_new_comes_beside_the_oldest(
    room: int, since: float, parts: tuple[str, str, str]
) -> None:
    """Of ten segments of ten bytes each."""
    large = 2**30
    made = cut(segments(*[10] * 10), Room(large, room, large), since)
    assert (stems(made.old), stems(made.left), stems(made.new)) == parts


@given(
    sizes=st.lists(st.integers(1, 100), min_size=1, max_size=40),
    room=st.integers(1, 300),
    since=st.integers(-1, 40),
)
def test_a_cut_keeps_the_order_and_the_room(sizes: list[int], room: int, since: int) -> None:
    """Nothing is left out, the backlog shrinks, and new ones are those after what is left."""
    waiting = segments(*sizes)
    large = 2**30
    made = cut(waiting, Room(large, room, large), since)
    assert [*made.old, *made.left, *made.new] == waiting
    assert made.old[0] is waiting[0]
    assert all(segment.mtime > since for segment in made.new)
    chosen = [*made.old, *made.new]
    assert sum(segment.size for segment in chosen) <= room or len(chosen) <= 2
    assert isinstance(made, Cut)


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
