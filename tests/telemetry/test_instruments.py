"""Distributions: buckets found by bits are those that a plain comparison finds."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from batchmill.telemetry import (
    BATCH_SIZES,
    DURATIONS_S,
    LONGEST_BITS,
    NO_BATCHES,
    durations_by_bits,
    sizes_by_bits,
)
from tests.kit.queues import make_queue, reds
from tests.kit.threads import WAIT_S, Gate

THREADS = st.lists(st.lists(st.integers(0, 10**11), max_size=20), min_size=1, max_size=3)


def by_bits(values: list[int]) -> list[int]:
    """Counts as a drain thread has them."""
    counts = [0] * LONGEST_BITS
    for value in values:
        counts[value.bit_length()] += 1
    return counts


@given(THREADS)
def test_sizes_are_in_the_bucket_of_their_bound(threads: list[list[int]]) -> None:
    """Bounds are inclusive; what is above the last one is in the last bucket."""
    values = [value for thread in threads for value in thread]
    sizes = sizes_by_bits([by_bits(thread) for thread in threads], sum(values))
    expected = Counter(bisect_left(BATCH_SIZES, value) for value in values)
    assert sizes.counts == tuple(expected[bucket] for bucket in range(len(BATCH_SIZES) + 1))
    assert (sizes.count, sizes.sum) == (len(values), sum(values))


@given(THREADS)
def test_durations_are_in_the_bucket_of_their_bound(threads: list[list[int]]) -> None:
    """Nanoseconds in, seconds out; a duration of exactly a bound is the only one that is above."""
    threads = [[value for value in thread if value / 1e9 not in DURATIONS_S] for thread in threads]
    values = [value for thread in threads for value in thread]
    durations = durations_by_bits([by_bits(thread) for thread in threads], sum(values) / 1e9)
    expected = Counter(bisect_left(DURATIONS_S, value / 1e9) for value in values)
    assert durations.counts == tuple(expected[bucket] for bucket in range(len(DURATIONS_S) + 1))


def test_a_queue_counts_its_handler_calls() -> None:
    """By size and time, failed ones too; items without a handler are no call."""
    gate = Gate()

    def fail(batch: list[object]) -> None:
        gate.wait()
        raise ValueError(len(batch))

    with make_queue(consumer=fail, error_handler=lambda batch, error: None) as queue:
        assert queue.stats().batch_sizes == NO_BATCHES
        queue.produce_many(reds(1))
        gate.wait_entered()
        queue.produce_many(reds(20))
        gate.open()
        assert queue.flush(WAIT_S)
        stats = queue.stats()
    sizes = stats.batch_sizes
    assert (sizes.count, sizes.sum) == (2, 21)
    assert [bound for bound, count in zip(sizes.bounds, sizes.counts, strict=False) if count] == [
        1,
        63,
    ]
    assert stats.handler_seconds.count == 2
    assert stats.handler_seconds.sum == sum(thread.busy_seconds for thread in stats.threads)
    with make_queue() as queue:
        queue.produce_many(reds(5))
        assert queue.flush(WAIT_S)
        stats = queue.stats()
    assert (stats.dropped["unregistered"], stats.batch_sizes.count) == (5, 0)
