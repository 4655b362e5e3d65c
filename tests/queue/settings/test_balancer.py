"""The balancer's arithmetic: longest processing time first, and when to leave things alone."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from batchmill import DrainBalancer
from batchmill.queue.strategies import load_per_thread, partition_loads, plan_error


@dataclass(frozen=True)
class Situation:
    """What a balancer is asked about."""

    loads: list[float]
    owners: list[int]
    threads: int

    def per_thread(self, owners: Sequence[int]) -> list[float]:
        return load_per_thread(self.loads, owners, self.threads)

    def assign(self) -> Sequence[int]:
        balancer = DrainBalancer.throughput_weighted()
        return balancer.assign(self.loads, self.owners, self.threads)


@st.composite
def situations(draw: st.DrawFn) -> Situation:
    """Any loads, owned in any way, by 1 to 8 threads."""
    threads = draw(st.integers(1, 8))
    load = st.one_of(
        st.floats(0, 1e9, allow_subnormal=False),
        st.integers(0, 1000).map(float),
    )
    pairs = draw(st.lists(st.tuples(load, st.integers(0, threads - 1)), max_size=60))
    return Situation([load for load, _ in pairs], [owner for _, owner in pairs], threads)


@given(situations())
def test_plan_is_valid(situation: Situation) -> None:
    """The plan has a thread that exists for each partition."""
    assert plan_error(situation.assign(), len(situation.loads), situation.threads) is None


@given(situations())
def test_plan_is_never_worse(situation: Situation) -> None:
    """The busiest thread never has more to do than it had before."""
    after = situation.per_thread(situation.assign())
    assert max(after) <= max(situation.per_thread(situation.owners))


@given(situations())
def test_partitions_without_traffic_stay(situation: Situation) -> None:
    """A partition that nothing was offered to keeps its thread: moving it could gain nothing."""
    plan = situation.assign()
    quiet = [index for index, load in enumerate(situation.loads) if load == 0]
    assert [plan[index] for index in quiet] == [situation.owners[index] for index in quiet]


@given(
    extra=st.lists(st.integers(0, 3), max_size=40),
    noise=st.lists(st.floats(1.0, 1.14), min_size=4, max_size=4),
)
def test_balanced_threads_are_left_alone(extra: list[int], noise: list[float]) -> None:
    """Under a ratio of 1.15 between busiest and least busy thread, nothing moves."""
    owners = [0, 1, 2, 3, *extra]
    loads = [noise[owner] / owners.count(owner) for owner in owners]
    assert list(Situation(loads, owners, 4).assign()) == owners


def test_ratio_of_skipping_is_115() -> None:
    """At 1.14 all stays; at 1.16 partitions move."""
    moved = []
    for busier in (114, 116):
        owners = [0] * busier + [1] * 100
        moved.append(list(Situation([1.0] * len(owners), owners, 2).assign()) != owners)
    assert moved == [False, True]


@given(
    loads=st.lists(st.floats(0, 1000, allow_subnormal=False), max_size=7), threads=st.integers(1, 3)
)
def test_plan_is_as_good_as_longest_first_promises(loads: list[float], threads: int) -> None:
    """From one thread that has it all, the busiest ends within 4/3 of the best plan there is.

    One per cent of a thread's share comes on top: so much an owner may keep for moving less. And
    three per cent of the busiest, as no plan is carried out for less.
    """
    situation = Situation(loads, [0] * len(loads), threads)
    plans = itertools.product(range(threads), repeat=len(loads))
    best = min(max(situation.per_thread(plan)) for plan in plans)
    assert max(situation.per_thread(situation.assign())) <= best * (4 / 3 + 0.01) / 0.97


@given(situations())
def test_plan_is_stable(situation: Situation) -> None:
    """Asked again about the same loads, it does not move back and forth for ever."""
    now = situation
    for _ in range(20):
        plan = list(now.assign())
        if plan == now.owners:
            return
        now = Situation(now.loads, plan, now.threads)
    pytest.fail("partitions keep moving though the loads do not change")


def test_heavy_partitions_are_parted() -> None:
    """Two heavy partitions on one thread end on two."""
    plan = DrainBalancer.throughput_weighted().assign([100, 100, 1, 1], [0, 0, 1, 1], 2)
    assert plan[0] != plan[1]


def test_longest_goes_first() -> None:
    """3, 4, 3, 5, 3 on two threads, each to the least busy so far: 5 + 3 and 4 + 3 + 3."""
    loads = [3.0, 4.0, 3.0, 5.0, 3.0]
    plan = DrainBalancer.throughput_weighted().assign(loads, [0, 0, 0, 0, 0], 2)
    assert sorted(load_per_thread(loads, plan, 2)) == [8, 10]


def test_skewed_types_even_out() -> None:
    """100 partitions of which ten have most of the traffic, dealt to 4 threads: within 1.1."""
    loads = [1000.0 if index % 4 == 0 and index < 40 else 30.0 for index in range(100)]
    situation = Situation(loads, [index % 4 for index in range(100)], 4)
    before = situation.per_thread(situation.owners)
    after = situation.per_thread(situation.assign())
    assert max(before) / min(before) > 1.25
    assert max(after) / min(after) <= 1.1


def test_single_giant_moves_nothing() -> None:
    """One partition that is the whole load cannot be improved on by moving it."""
    assert list(DrainBalancer.throughput_weighted().assign([100, 0, 0], [0, 1, 0], 2)) == [0, 1, 0]


def test_moving_for_nothing_is_not_done() -> None:
    """A plan that would not take three per cent off the busiest thread is not worth a move."""
    loads = [100.0, 1.0, 1.0, 50.0]
    assert list(DrainBalancer.throughput_weighted().assign(loads, [0, 0, 0, 1], 2)) == [0, 0, 0, 1]


@pytest.mark.parametrize("loads", [[], [0, 0, 0]], ids=["no partitions", "no traffic"])
def test_nothing_to_balance(loads: list[float]) -> None:
    """Without traffic the owners stay."""
    owners = [0] * len(loads)
    assert list(DrainBalancer.throughput_weighted().assign(loads, owners, 3)) == owners


def test_load_per_thread_adds_up() -> None:
    """A thread's load is the sum of its partitions' loads; a thread without any has none."""
    assert load_per_thread([1, 2, 4], [0, 2, 0], 3) == [5, 0, 2]


@dataclass(frozen=True)
class Period:
    """What each partition saw since the last decision."""

    offered: list[int]
    drained: list[int]
    busy_ns: list[int]

    def loads(self) -> list[float]:
        return partition_loads(self.offered, self.drained, self.busy_ns)


@st.composite
def periods(draw: st.DrawFn, least_drained: int = 0) -> Period:
    """Any counters; time is only spent where something was drained."""
    rows = draw(
        st.lists(
            st.tuples(
                st.integers(0, 10**6), st.integers(least_drained, 10**6), st.integers(0, 10**10)
            ),
            max_size=30,
        )
    )
    return Period(
        [offered for offered, _, _ in rows],
        [drained for _, drained, _ in rows],
        [busy if drained else 0 for _, drained, busy in rows],
    )


@given(periods())
def test_weight_is_never_negative(period: Period) -> None:
    """Each partition has a load, and none is below zero."""
    loads = period.loads()
    assert len(loads) == len(period.offered)
    assert all(load >= 0 for load in loads)


@given(periods())
def test_nothing_offered_weighs_nothing(period: Period) -> None:
    """A partition without traffic has no load, whatever was left to drain from before."""
    loads = zip(period.offered, period.loads(), strict=True)
    assert all(load == 0 for offered, load in loads if offered == 0)


@given(offered=st.lists(st.integers(0, 10**6)), drained=st.integers(0, 100))
def test_without_times_items_are_counted(offered: list[int], drained: int) -> None:
    """Where no time was measured, a partition weighs what it was offered."""
    period = Period(offered, [drained] * len(offered), [0] * len(offered))
    assert period.loads() == offered


@given(periods(least_drained=1))
def test_all_drained_weighs_the_time_spent(period: Period) -> None:
    """Where all that was offered was drained, a partition weighs the time its handlers took."""
    assume(sum(period.busy_ns) > 0)
    even = Period(period.drained, period.drained, period.busy_ns)
    assert even.loads() == pytest.approx(period.busy_ns)


def test_cost_decides_over_count() -> None:
    """Ten slow items weigh more than a thousand quick ones."""
    few, many = partition_loads([10, 1000], [10, 1000], [10_000_000, 1_000_000])
    assert few > many


def test_unknown_cost_is_the_average() -> None:
    """A partition nothing was drained from yet is weighed with the average cost of an item."""
    assert partition_loads([10, 30, 7], [10, 30, 0], [100, 700, 0]) == [100, 700, 7 * 800 / 40]


@pytest.mark.parametrize(
    ("plan", "flaw"),
    [
        (None, "it is not a sequence but None"),
        (3, "it is not a sequence but 3"),
        ("010", "it is not a sequence but '010'"),
        ({0, 1}, "it is not a sequence but {0, 1}"),
        ([0, 1], "it has 2 entries for 3 partitions"),
        ([0, 1, 0, 1], "it has 4 entries for 3 partitions"),
        ([0, 2, 0], "partition 1 goes to 2, not to a thread from 0 to 1"),
        ([0, 1, -1], "partition 2 goes to -1, not to a thread from 0 to 1"),
        ([0, 1, 1.0], "partition 2 goes to 1.0, not to a thread from 0 to 1"),
        ([True, 1, 1], "partition 0 goes to True, not to a thread from 0 to 1"),
        ([0, None, 1], "partition 1 goes to None, not to a thread from 0 to 1"),
    ],
)
def test_flaw_is_named(plan: object, flaw: str) -> None:
    """What is wrong with a balancer's answer is said, so that its author can mend it."""
    assert plan_error(plan, partitions=3, threads=2) == flaw


@pytest.mark.parametrize("plan", [[0, 1, 1], (1, 0, 0), range(1)], ids=repr)
def test_sequences_of_threads_have_no_flaw(plan: Sequence[int]) -> None:
    """Any sequence of existing threads, one for each partition, will do."""
    assert plan_error(plan, partitions=len(plan), threads=2) is None
