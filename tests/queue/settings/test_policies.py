"""ThreadPolicy and PartitionPolicy: intent in, numbers out."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchmill import (
    BatchQueueManager,
    BatchQueueSettings,
    ConfigError,
    PartitionPolicy,
    ThreadPolicy,
    cores,
)
from tests.kit.queues import make_queue
from tests.queue.kit import make_classes, messages

ADAPTIVE_ON_8_THREADS = [(0, 8), (100, 100), (200, 200), (500, 350), (1000, 600), (1889, 1045)]
"""Handlers and partitions, as the seeds have them."""


@pytest.mark.parametrize("make", [ThreadPolicy.fixed, ThreadPolicy.io_bound])
@pytest.mark.parametrize("count", [1, 4, 64])
def test_counted_threads_do_not_depend_on_the_machine(
    make: Callable[[int], ThreadPolicy], count: int
) -> None:
    """fixed(n) and io_bound(n) are n threads on any number of cores."""
    assert {make(count).resolve(cores) for cores in (1, 2, 8, 256)} == {count}


@pytest.mark.parametrize(
    ("multiplier", "cores", "threads"),
    [
        (1.0, 8, 8),
        (0.5, 8, 4),
        (0.25, 8, 2),
        (2.0, 8, 16),
        (0.25, 2, 1),
        (0.25, 4, 1),
        (0.25, 16, 4),
        (0.25, 6, 2),  # 1.5 is rounded up
        (0.25, 10, 3),  # and so is 2.5, where Python's round() would go down
        (0.1, 4, 1),  # 0.4 would be none at all
    ],
)
def test_cpu_cores_rounds_half_up(multiplier: float, cores: int, threads: int) -> None:
    """cpu_cores(x) is x threads per core, rounded half up, and never none."""
    assert ThreadPolicy.cpu_cores(multiplier).resolve(cores) == threads


@pytest.mark.parametrize(("cores", "threads"), [(1, 1), (2, 2), (4, 2), (8, 3), (16, 5)])
def test_base_comes_on_top_of_the_cores(cores: int, threads: int) -> None:
    """cpu_cores_with_base(1, 0.25) is one thread and one more per four cores."""
    assert ThreadPolicy.cpu_cores_with_base(1, 0.25).resolve(cores) == threads


@given(
    base=st.integers(0, 100),
    multiplier=st.floats(1e-6, 100, allow_nan=False),
    cores=st.integers(1, 1024),
)
def test_threads_are_at_least_one(base: int, multiplier: float, cores: int) -> None:
    """However small the share of a core, there is a thread."""
    assert ThreadPolicy.cpu_cores_with_base(base, multiplier).resolve(cores) >= 1


def test_resolve_counts_the_cores_the_process_may_use(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without an argument, cores are those of affinity and container quota, not the machine's."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(64)), raising=False)
    monkeypatch.setattr(cores, "cpu_quota", lambda: 1.5)
    assert ThreadPolicy.cpu_cores(1.0).resolve() == 2


def test_stats_have_the_resolved_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """The cores that a policy met and the threads it gave, of own and shared schedulers."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(64)), raising=False)
    monkeypatch.setattr(cores, "cpu_quota", lambda: 3.0)
    partitions = PartitionPolicy.thread_multiply(2)
    with make_queue(threads=ThreadPolicy.cpu_cores(1.0), partitions=partitions) as queue:
        stats = queue.stats()
    assert (stats.cores, stats.scheduler_threads, len(stats.threads)) == (3, 3, 3)
    assert len(stats.partitions) == 6
    manager = BatchQueueManager()
    pool = ("pool", ThreadPolicy.cpu_cores_with_base(1, 1.0))
    shared = manager.create("shared", BatchQueueSettings(shared_scheduler=pool))
    stats = shared.stats()
    assert (stats.cores, stats.scheduler_threads, len(stats.threads)) == (3, 4, 1)
    assert manager.shutdown_all()


def test_thread_policies_are_equal_when_they_say_the_same() -> None:
    """Two policies made alike are equal: that is how a manager sees that settings agree."""
    assert ThreadPolicy.cpu_cores(0.5) == ThreadPolicy.cpu_cores(0.5)
    assert ThreadPolicy.cpu_cores(0.5) != ThreadPolicy.cpu_cores(0.25)


@pytest.mark.parametrize(
    ("policy", "text"),
    [
        (ThreadPolicy.fixed(4), "fixed(4)"),
        (ThreadPolicy.io_bound(9), "io_bound(9)"),
        (ThreadPolicy.cpu_cores(0.5), "cpu_cores(0.5)"),
        (ThreadPolicy.cpu_cores_with_base(1, 0.25), "cpu_cores_with_base(1, 0.25)"),
        (PartitionPolicy.fixed(3), "fixed(3)"),
        (PartitionPolicy.thread_multiply(2), "thread_multiply(2)"),
        (PartitionPolicy.adaptive(), "adaptive(25)"),
    ],
)
def test_policy_reads_as_it_was_made(policy: object, text: str) -> None:
    """str() of a policy is the call that makes it: warnings show it."""
    assert str(policy) == text


@pytest.mark.parametrize(
    ("make", "field", "value"),
    [
        (ThreadPolicy.fixed, "count", 0),
        (ThreadPolicy.fixed, "count", -1),
        (ThreadPolicy.fixed, "count", 1.0),
        (ThreadPolicy.fixed, "count", True),
        (ThreadPolicy.io_bound, "count", 0),
        (ThreadPolicy.cpu_cores, "multiplier", 0),
        (ThreadPolicy.cpu_cores, "multiplier", -0.5),
        (ThreadPolicy.cpu_cores, "multiplier", float("inf")),
        (ThreadPolicy.cpu_cores, "multiplier", float("nan")),
        (ThreadPolicy.cpu_cores, "multiplier", "1"),
        (lambda base: ThreadPolicy.cpu_cores_with_base(base, 1.0), "base", -1),
        (lambda share: ThreadPolicy.cpu_cores_with_base(1, share), "multiplier", 0),
        (PartitionPolicy.fixed, "count", 0),
        (PartitionPolicy.thread_multiply, "multiplier", 0),
        (PartitionPolicy.thread_multiply, "multiplier", 1.5),
        (PartitionPolicy.adaptive, "multiplier", 0),
    ],
)
def test_bad_figures_are_refused_by_name(
    make: Callable[[Any], object], field: str, value: object
) -> None:
    """A figure out of range raises when the policy is made, naming the argument and the value."""
    with pytest.raises(ConfigError) as caught:
        make(value)
    assert caught.value.field == field
    assert str(caught.value).startswith(f"{field}={value!r} ")


def test_fixed_partitions_do_not_depend_on_anything() -> None:
    """PartitionPolicy.fixed(n) is n partitions for any threads and handlers."""
    policy = PartitionPolicy.fixed(5)
    assert {policy.resolve(threads, handlers) for threads in (1, 8) for handlers in (0, 99)} == {5}


def test_thread_multiply_follows_the_threads() -> None:
    """thread_multiply(2) is two partitions per thread, whatever the handlers."""
    policy = PartitionPolicy.thread_multiply(2)
    assert [policy.resolve(threads, 99) for threads in (1, 4, 8)] == [2, 8, 16]


@pytest.mark.parametrize(("handlers", "partitions"), ADAPTIVE_ON_8_THREADS)
def test_adaptive_resolves_to_the_seeds_figures(handlers: int, partitions: int) -> None:
    """On 8 threads: one partition per handler up to 200, then one for every second."""
    assert PartitionPolicy.adaptive().resolve(8, handlers) == partitions


def test_adaptive_resolves_weights_to_the_seeds_figure() -> None:
    """642 handlers of weight 1.0 and 1247 of 0.05 make 452 partitions on 8 threads."""
    assert PartitionPolicy.adaptive().resolve(8, 642 * 1.0 + 1247 * 0.05) == 452


def test_adaptive_multiplier_sets_the_threshold() -> None:
    """adaptive(2) on 8 threads gives one partition each up to 16 handlers."""
    policy = PartitionPolicy.adaptive(2)
    assert [policy.resolve(8, handlers) for handlers in (16, 17, 18, 20)] == [16, 17, 17, 18]


@given(count=st.integers(1, 3000), weight=st.sampled_from([0.05, 0.1, 0.3, 1 / 3]))
def test_adaptive_ignores_the_rounding_of_sums(count: int, weight: float) -> None:
    """Adding a weight up n times resolves like multiplying it by n."""
    policy = PartitionPolicy.adaptive()
    assert policy.resolve(8, sum([weight] * count)) == policy.resolve(8, weight * count)


@given(threads=st.integers(1, 64), handlers=st.floats(0, 10_000), more=st.floats(0, 100))
def test_adaptive_never_shrinks_with_more_handlers(
    threads: int, handlers: float, more: float
) -> None:
    """From the first handler on, more weight never means fewer partitions."""
    policy = PartitionPolicy.adaptive()
    one = max(handlers, 1.0)
    assert policy.resolve(threads, one + more) >= policy.resolve(threads, one)


@pytest.mark.parametrize(("handlers", "partitions"), ADAPTIVE_ON_8_THREADS)
def test_queue_grows_to_the_seeds_figures(handlers: int, partitions: int) -> None:
    """A running queue of 8 threads has the seeds' number of partitions after add_handler()."""
    with make_queue(threads=ThreadPolicy.fixed(8), partitions=PartitionPolicy.adaptive()) as queue:
        for cls in make_classes(handlers):
            queue.add_handler(cls, print)
        assert len(queue.stats().partitions) == partitions


def test_queue_grows_by_weight_to_the_seeds_figure() -> None:
    """642 handlers of weight 1.0 and 1247 of 0.05, added one by one, make 452 partitions."""
    with make_queue(threads=ThreadPolicy.fixed(8), partitions=PartitionPolicy.adaptive()) as queue:
        for cls in make_classes(642, "Traced"):
            queue.add_handler(cls, print)
        for cls in make_classes(1247, "Metered"):
            queue.add_handler(cls, print, weight=0.05)
        assert len(queue.stats().partitions) == 452


def test_queue_never_shrinks() -> None:
    """Partitions stay when handlers go: items may still be in them."""
    with make_queue(partitions=PartitionPolicy.adaptive()) as queue:
        classes = make_classes(10)
        for cls in classes:
            queue.add_handler(cls, print)
        for cls in classes:
            queue.remove_handler(cls)
        assert len(queue.stats().partitions) == 10


def test_weight_of_a_removed_handler_no_longer_counts() -> None:
    """Ten handlers come and go, ten others come: there are ten partitions, not twenty."""
    with make_queue(partitions=PartitionPolicy.adaptive()) as queue:
        for round_of_classes in (make_classes(10, "Early"), make_classes(10, "Late")):
            for cls in round_of_classes:
                queue.add_handler(cls, print)
            for cls in round_of_classes:
                queue.remove_handler(cls)
        assert len(queue.stats().partitions) == 10


def test_new_partitions_are_spread_over_the_threads() -> None:
    """Growth gives each of 4 threads a quarter of 100 partitions."""
    with make_queue(threads=ThreadPolicy.fixed(4), partitions=PartitionPolicy.adaptive()) as queue:
        for cls in make_classes(100):
            queue.add_handler(cls, print)
        assert [thread.partitions for thread in queue.stats().threads] == [25, 25, 25, 25]


def test_fewer_partitions_than_threads_reduces_the_threads() -> None:
    """Four threads on two partitions are two threads: a partition has one at a time."""
    with make_queue(threads=ThreadPolicy.fixed(4), partitions=PartitionPolicy.fixed(2)) as queue:
        assert len(queue.stats().threads) == 2


@pytest.mark.parametrize(
    ("threads", "partitions", "message"),
    [
        (4, 2, "narrow: 2 partitions for 4 threads: starting 2 threads"),
        (2, 1, "narrow: 1 partition for 2 threads: starting 1 thread"),
    ],
)
def test_fewer_partitions_than_threads_warns(
    threads: int, partitions: int, message: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Reducing the threads is logged, with the queue, its partitions and its threads."""
    policies = {
        "threads": ThreadPolicy.fixed(threads),
        "partitions": PartitionPolicy.fixed(partitions),
    }
    with make_queue("narrow", **policies):
        [logged] = messages(caplog)
    assert logged.endswith(message)


def test_enough_partitions_warn_of_nothing(caplog: pytest.LogCaptureFixture) -> None:
    """As many partitions as threads is no reason for a warning."""
    with make_queue(threads=ThreadPolicy.fixed(2), partitions=PartitionPolicy.fixed(2)):
        assert messages(caplog) == []
