from __future__ import annotations

from dataclasses import dataclass

from hypothesis import given
from hypothesis import strategies as st

from batchmill.flows.router import LeastLoaded, RoundRobin


@dataclass
class Worker:
    load: int = 0
    flows: int = 0
    free: int = 1


workers = st.lists(
    st.builds(Worker, st.integers(0, 3), st.integers(0, 3), st.integers(-1, 1)),
    min_size=1,
    max_size=9,
)


@given(workers, st.integers(0, 20))
def test_the_least_loaded_worker_with_room_is_picked(crew: list[Worker], warm_up: int) -> None:
    """Room first, then the least load, then the fewest flows: nobody is better than the pick."""
    rule = LeastLoaded()
    for _ in range(warm_up):
        rule.pick(crew)
    picked = crew[rule.pick(crew)]
    best = min((worker.free < 1, worker.load, worker.flows) for worker in crew)
    assert (picked.free < 1, picked.load, picked.flows) == best


@given(st.integers(1, 9), st.integers(0, 30))
def test_equal_workers_take_turns(count: int, picks: int) -> None:
    """Among equals every worker is picked once before any is picked again."""
    rule = LeastLoaded()
    crew = [Worker() for _ in range(count)]
    assert [rule.pick(crew) for _ in range(picks)] == [step % count for step in range(picks)]


def test_a_running_signal_counts_as_load() -> None:
    """A worker that is busy with one signal is not as free as one that is idle."""
    busy, idle = Worker(load=1), Worker(load=0, flows=5)
    assert LeastLoaded().pick([busy, idle]) == 1


def test_the_turn_goes_on_from_the_worker_that_was_picked() -> None:
    """Ties are not broken in favour of the lowest number."""
    rule = LeastLoaded()
    crew = [Worker(load=1), Worker(), Worker()]
    assert [rule.pick(crew) for _ in range(4)] == [1, 2, 1, 2]


@given(workers, st.integers(1, 20))
def test_round_robin_passes_over_full_workers(crew: list[Worker], picks: int) -> None:
    """Signals without a flow go round those with room; all full: round all of them."""
    rule = RoundRobin()
    with_room = [index for index, worker in enumerate(crew) if worker.free > 0]
    turns = with_room or list(range(len(crew)))
    assert [rule.pick(crew) for _ in range(picks)] == [
        turns[step % len(turns)] for step in range(picks)
    ]
