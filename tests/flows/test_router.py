"""The router, with those who wait for room, against a plain model of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from batchmill.flows import Assignment, Backpressure, WorkerView
from batchmill.flows.assignment import LeastLoaded, RoundRobin, ShortestQueue
from batchmill.flows.flow_map import Flow
from batchmill.flows.queues import Ticket, WorkerQueue
from batchmill.flows.router import Router
from tests.flows.kit import Signal, config

KEYS = st.sampled_from(["a", "a", "b", "c", None])


class Flag:
    """A waiter that only records that it was woken."""

    def __init__(self) -> None:
        self.woken = False

    def wake(self) -> bool:
        self.woken = True
        return True


class RouterMachine(RuleBasedStateMachine):
    """Queues are plain lists of signals; a signal's number says when it was let in."""

    @initialize(
        policy=st.sampled_from(Backpressure),
        workers=st.integers(1, 3),
        capacity=st.integers(1, 3),
        ingress=st.integers(0, 4),
        most=st.one_of(st.none(), st.integers(1, 3)),
        ttl=st.one_of(st.none(), st.integers(1, 3)),
        batch=st.integers(1, 3),
    )
    def begin(
        self,
        policy: Backpressure,
        workers: int,
        capacity: int,
        ingress: int,
        most: int | None,
        ttl: int | None,
        batch: int,
    ) -> None:
        self.config = config(
            worker_count=workers,
            worker_queue_capacity=capacity,
            ingress_capacity=ingress,
            batch_max=batch,
            backpressure=policy,
            max_flows=most,
            idle_ttl=ttl,
        )
        self.router = Router(self.config)
        self.now = 0.0
        self.queues: list[list[Signal]] = [[] for _ in range(workers)]
        self.running: list[list[Signal]] = [[] for _ in range(workers)]
        self.tickets: list[tuple[Ticket, Flag]] = []
        self.numbers = 0
        self.tally: Counter[str] = Counter()
        self.arrivals: list[Signal] = []
        self.seen: dict[Any, int] = {}
        self.accepted: set[Any] = set()
        """Flows with a signal accepted since they were last unknown."""

    @rule(key=KEYS, finish=st.booleans())
    def offer(self, key: str | None, finish: bool) -> None:
        signal = self._next(key, finish)
        before = [list(queue) for queue in self.queues]
        known = None if key is None else self.router.flows.get(key)
        home = None if known is None else known.worker
        loads = [self._rank(worker) for worker in range(len(self.queues))]
        reason = self.router.offer(signal, key, finish, self.now)
        if reason is None:
            self._note_arrival(signal, before, home, loads)
        elif self.config.backpressure is Backpressure.BLOCK:
            flag = Flag()
            ticket = Ticket(signal, key, finish, reason, flag)
            self.router.add_waiting(ticket, self.now)
            self.tickets.append((ticket, flag))
        else:
            self.router.refuse(key, finish, reason, self.now)
            self.tally[f"refused {reason}"] += 1

    @precondition(lambda self: self.tickets)
    @rule(data=st.data())
    def go_on(self, data: st.DataObject) -> None:
        """A producer that waits notices that it was woken, or loses patience."""
        index = data.draw(st.integers(0, len(self.tickets) - 1))
        ticket, flag = self.tickets[index]
        assert flag.woken is ticket.granted
        if ticket.granted and data.draw(st.booleans()):
            del self.tickets[index]
            assert self.router.accept_granted(ticket, self.now)
            assert ticket.queue is not None
            self._arrive(ticket.signal, ticket.queue.index)
        else:
            del self.tickets[index]
            self.router.give_up(ticket, "cancelled", self.now)
            self.tally["refused cancelled"] += 1

    @rule(data=st.data())
    def take(self, data: st.DataObject) -> None:
        index = data.draw(st.integers(0, len(self.queues) - 1))
        if self.running[index]:
            self.router.settle(self.router.queues[index], data.draw(st.booleans()), self.now)
            self.tally["settled"] += len(self.running[index])
            self.running[index] = []
        taken = [entry[0] for entry in self.router.take(self.router.queues[index], self.now)]
        most = self.config.batch_max
        assert taken == self.queues[index][:most]
        self.running[index], self.queues[index] = taken, self.queues[index][most:]
        for signal in taken:
            if signal.flow is not None:
                assert self.seen.get(signal.flow, -1) < signal.number
                self.seen[signal.flow] = signal.number

    @rule(key=KEYS)
    def complete(self, key: str | None) -> None:
        self.router.complete(key, self.now)

    @rule(seconds=st.integers(1, 3))
    def let_time_pass(self, seconds: int) -> None:
        self.now += seconds
        self.router.expire(self.now)

    @rule()
    def recount(self) -> None:
        """Counting anew what is counted right changes nothing."""
        self.router.recount(self.now)

    @invariant()
    def queues_are_the_models_and_bounded(self) -> None:
        if not hasattr(self, "router"):
            return
        models = zip(self.queues, self.running, strict=True)
        for queue, (signals, running) in zip(self.router.queues, models, strict=True):
            assert [entry[0] for entry in queue.queued()] == signals
            assert queue.depth == len(signals)
            assert queue.buffered == len(signals[queue.capacity :])
            assert queue.load == len(signals) + len(running)
        assert self.router.ingress_depth <= self.config.ingress_capacity
        assert self.router.waiting == len(self.tickets)

    @invariant()
    def signals_of_a_flow_are_on_its_worker_and_counted(self) -> None:
        if not hasattr(self, "router"):
            return
        pending: Counter[Any] = Counter()
        for index, signals in enumerate(self.queues):
            for signal in [*signals, *self.running[index]]:
                if signal.flow is not None:
                    pending[signal.flow] += 1
                    assert self._flow(signal.flow).worker == index
        for key in "abc":
            flow = self.router.flows.get(key)
            assert pending[key] == (0 if flow is None else flow.pending)
        assert self.config.max_flows is None or len(self.router.flows) <= self.config.max_flows

    @invariant()
    def nobody_waits_where_there_is_room(self) -> None:
        if not hasattr(self, "router"):
            return
        promised = [ticket for ticket, _ in self.tickets if ticket.granted]
        free = {
            queue: queue.capacity - queue.depth - sum(other.queue is queue for other in promised)
            for queue in self.router.queues
        }
        in_ingress = sum(-room for room in free.values() if room < 0)
        assert in_ingress <= self.config.ingress_capacity
        for index, (ticket, _) in enumerate(self.tickets):
            behind = any(other.key == ticket.key for other, _ in self.tickets[:index] if ticket.key)
            if not ticket.granted and not behind and ticket.queue is not None:
                assert free[ticket.queue] < 1
                assert in_ingress == self.config.ingress_capacity

    @invariant()
    def every_signal_is_counted_once(self) -> None:
        if not hasattr(self, "router"):
            return
        router = self.router
        settled = sum(queue.handled + queue.failed for queue in router.queues)
        assert settled == self.tally["settled"]
        pending = sum(map(len, self.queues)) + sum(map(len, self.running))
        assert router.dispatched == settled + sum(router.evicted.values()) + pending
        assert sum(router.evicted.values()) == self.tally["evicted"]
        flows = router.flows
        self.accepted = {key for key in self.accepted if flows.get(key)}
        assert flows.active == len(self.accepted)
        for reason, count in router.refused.items():
            assert count == self.tally[f"refused {reason}"]

    def teardown(self) -> None:
        """Closed, all who wait are told; drained, no flow is left but open ones."""
        if not hasattr(self, "router"):
            return
        self.router.close()
        assert all(flag.woken for _, flag in self.tickets)
        for ticket, _ in self.tickets:
            assert not self.router.accept_granted(ticket, self.now)
        left = [entry[0] for entry in self.router.clear(self.now)]
        assert left == [
            signal for signal in self.arrivals if any(signal in queue for queue in self.queues)
        ]
        for queue in self.router.queues:
            self.router.settle(queue, True, self.now)
        for key in "abc":
            self.router.complete(key, self.now)
        assert (len(self.router.flows), self.router.waiting) == (0, 0)
        assert [queue.flows for queue in self.router.queues] == [0] * len(self.router.queues)

    def _next(self, key: str | None, finish: bool) -> Signal:
        self.numbers += 1
        return Signal(key, self.numbers, finish)

    def _note_arrival(
        self,
        signal: Signal,
        before: list[list[Signal]],
        home: int | None,
        loads: list[tuple[bool, int]],
    ) -> None:
        """The signal is in: see where, and what had to go for it."""
        [index] = [
            queue.index
            for queue in self.router.queues
            if signal in [entry[0] for entry in queue.queued()]
        ]
        if home is not None:
            assert index == home
        elif signal.flow is not None:
            assert loads[index] == min(loads)
        for queue, signals in zip(self.router.queues, before, strict=True):
            now_there = [entry[0] for entry in queue.queued()]
            gone = [old for old in signals if old not in now_there]
            if gone:
                assert self.config.backpressure is Backpressure.DROP_OLDEST
                assert queue.index == index
                victims = [old for old in signals if not old.last] or signals
                assert gone == victims[:1]
                self.queues[queue.index].remove(gone[0])
                self.tally["evicted"] += 1
        self._arrive(signal, index)

    def _arrive(self, signal: Signal, index: int) -> None:
        self.accepted.add(signal.flow)
        self.queues[index].append(signal)
        self.arrivals.append(signal)

    def _rank(self, worker: int) -> tuple[bool, int]:
        queue = self.router.queues[worker]
        return queue.free < 1, len(self.queues[worker]) + len(self.running[worker])

    def _flow(self, key: str) -> Flow:
        flow = self.router.flows.get(key)
        assert flow is not None
        return flow


TestRouter = RouterMachine.TestCase
TestRouter.settings = settings(max_examples=200, stateful_step_count=40, deadline=None)


def queue_with(*finishes: bool) -> WorkerQueue:
    """A full queue of numbered signals, of which these finish their flow."""
    queue = WorkerQueue(0, len(finishes))
    for number, finish in enumerate(finishes):
        queue.put((number, None, finish, 0.0, number))
    return queue


def test_finish_signals_are_evicted_last() -> None:
    """The oldest that finishes nothing goes first; only then the finish signals, oldest first."""
    queue = queue_with(True, False, True, False)
    assert [queue.evict()[0] for _ in range(4)] == [1, 3, 0, 2]


def test_finish_signals_that_were_passed_over_keep_their_place() -> None:
    """Eviction changes nothing about the order of what stays."""
    queue = queue_with(True, False, True, False, False)
    queue.evict()
    queue.evict()
    queue.put((9, None, False, 0.0, 9))
    assert [entry[0] for entry in queue.take(2)] == [0, 2]
    assert [entry[0] for entry in queue.take(9)] == [4, 9]


def test_the_ingress_buffer_takes_what_a_full_queue_cannot() -> None:
    """Its room is beside that of the queues, and all workers share it."""
    router = Router(config(worker_count=2, worker_queue_capacity=2, ingress_capacity=3))
    for key in "ab":
        for number in range(2):
            assert router.offer(number, key, False, 0.0) is None
    assert [router.offer(2, key, False, 0.0) for key in "aba"] == [None, None, None]
    assert [queue.depth for queue in router.queues] == [4, 3]
    assert router.ingress_depth == 3
    assert router.offer(9, "b", False, 0.0) == "ingress_full"
    assert router.offer(9, "new", False, 0.0) == "ingress_full"


def test_a_full_ingress_buffer_stops_only_workers_that_are_full() -> None:
    """What has room in its worker's queue does not pass through the buffer."""
    router = Router(config(worker_count=2, worker_queue_capacity=2, ingress_capacity=1))
    for number in range(3):
        assert router.offer(number, "a", False, 0.0) is None
    assert router.offer(3, "a", False, 0.0) == "ingress_full"
    assert [router.offer(number, "b", False, 0.0) for number in range(2)] == [None, None]


def test_signals_leave_the_ingress_buffer_in_order() -> None:
    """They move up as the worker takes batches, and the buffer has room again."""
    router = Router(config(worker_queue_capacity=2, ingress_capacity=2, batch_max=3))
    for number in range(4):
        assert router.offer(number, "a", False, 0.0) is None
    assert [entry[0] for entry in router.take(router.queues[0], 0.0)] == [0, 1, 2]
    assert router.ingress_depth == 0
    for number in range(4, 7):
        assert router.offer(number, "a", False, 0.0) is None
    assert router.offer(7, "a", False, 0.0) == "ingress_full"
    assert [entry[0] for entry in router.clear(0.0)] == [3, 4, 5, 6]


def test_room_in_the_ingress_buffer_goes_round_the_workers() -> None:
    """A busy worker's producers do not keep those of another one waiting."""
    router = Router(config(worker_count=2, worker_queue_capacity=1, ingress_capacity=2))
    for key in "abab":
        assert router.offer("signal", key, False, 0.0) is None
    tickets = [lined_up(router, key) for key in ("a", "c", "a", "b")]
    assert [router.offer("signal", key, False, 0.0) for key in "ab"] == ["ingress_full"] * 2
    served = []
    for _ in range(2):
        router.take(router.queues[0], 0.0)  # each time room in the buffer, not in the other queue
        [ticket] = [ticket for ticket in tickets if ticket.granted and not ticket.gone]
        assert router.accept_granted(ticket, 0.0)
        served.append(ticket.queue)
    assert served == router.queues


def test_a_ticket_whose_loop_is_gone_gets_no_promise() -> None:
    """Room is not kept for somebody who cannot come."""

    class Gone:
        def wake(self) -> bool:
            return False

    router = Router(config(worker_queue_capacity=1))
    assert router.offer("a1", "a", False, 0.0) is None
    for waiter in (Gone(), Flag()):
        reason = router.offer("b1", "b", False, 0.0)
        assert reason == "queue_full"
        router.add_waiting(ticket := Ticket("b1", "b", False, reason, waiter), 0.0)
    router.take(router.queues[0], 0.0)
    assert ticket.granted
    assert router.accept_granted(ticket, 0.0)


def test_a_newcomer_does_not_pass_a_producer_that_waits_with_the_same_flow() -> None:
    """Room that is left does not help it: the signal before it is not in yet."""
    router = Router(config(worker_queue_capacity=2, batch_max=2))
    for number in (1, 2):
        assert router.offer(number, "a", False, 0.0) is None
    reason = router.offer(3, "a", False, 0.0)
    assert reason == "queue_full"
    router.add_waiting(third := Ticket(3, "a", False, reason, Flag()), 0.0)
    router.take(router.queues[0], 0.0)
    assert third.granted
    assert router.offer(4, "a", False, 0.0) == "queue_full"
    assert router.offer(4, "b", False, 0.0) is None
    assert router.accept_granted(third, 0.0)


def lined_up(router: Router, key: str | None) -> Ticket:
    """A producer that found no room for a signal of that flow."""
    reason = router.offer("signal", key, False, 0.0)
    assert reason is not None
    ticket = Ticket("signal", key, False, reason, Flag())
    router.add_waiting(ticket, 0.0)
    return ticket


def test_producers_without_a_flow_wait_on_their_own() -> None:
    """They have no order to keep, so each has a place in line, and gets in when there is room."""
    router = Router(config(worker_queue_capacity=2, batch_max=2))
    for _ in range(2):
        assert router.offer("signal", None, False, 0.0) is None
    first, second, third = (lined_up(router, None) for _ in range(3))
    router.take(router.queues[0], 0.0)
    assert [ticket.granted for ticket in (first, second, third)] == [True, True, False]
    router.give_up(first, "cancelled", 0.0)
    assert third.granted
    assert router.accept_granted(third, 0.0)
    assert router.accept_granted(second, 0.0)
    assert router.waiting == 0


def test_the_rest_of_a_flow_moves_up_when_its_first_gives_up() -> None:
    """Whether room was kept for it or not."""
    router = Router(config(worker_queue_capacity=1))
    assert router.offer("signal", "a", False, 0.0) is None
    first, second, third = (lined_up(router, "a") for _ in range(3))
    router.give_up(first, "queue_full", 0.0)
    router.take(router.queues[0], 0.0)
    assert (second.granted, third.granted) == (True, False)
    router.give_up(second, "cancelled", 0.0)
    assert third.granted


def test_the_next_of_a_flow_is_served_as_soon_as_the_one_before_is_in() -> None:
    """It does not wait for the worker to take something when there is room already."""
    router = Router(config(worker_queue_capacity=2, batch_max=2))
    for _ in range(2):
        assert router.offer("signal", "a", False, 0.0) is None
    first, second = lined_up(router, "a"), lined_up(router, "a")
    router.take(router.queues[0], 0.0)
    assert (first.granted, second.granted) == (True, False)
    assert router.accept_granted(first, 0.0)
    assert second.granted


@dataclass
class Worker:
    load: int = 0
    flows: int = 0
    free: int = 1
    depth: int = 0


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


def test_the_shortest_queue_counts_only_what_waits() -> None:
    """The rule of the proposal: running signals do not count, the lowest index wins."""
    busy, idle = Worker(load=1, depth=0), Worker(load=0, depth=0)
    assert ShortestQueue().pick([busy, idle]) == 0
    assert ShortestQueue().pick([Worker(depth=2), Worker(depth=1), Worker(depth=1)]) == 1


@pytest.mark.parametrize("rule", [LeastLoaded, RoundRobin])
def test_a_rule_serves_dispatchers_of_different_sizes(rule: type[Assignment]) -> None:
    """Settings, and the rule in them, may be shared."""
    shared = rule()
    for count in (5, 5, 5, 5, 2, 1, 5):
        assert 0 <= shared.pick([Worker() for _ in range(count)]) < count


class Fixed:
    """An assignment that always returns the same."""

    def __init__(self, picked: Any) -> None:
        self.picked = picked

    def pick(self, workers: Sequence[WorkerView], /) -> Any:
        if isinstance(self.picked, Exception):
            raise self.picked
        return self.picked


def test_the_assignment_rule_chooses_the_worker_of_a_new_flow() -> None:
    """Only of a new one: the other signals of a flow follow its first."""
    rule = Fixed(2)
    router = Router(config(worker_count=3, assignment=rule))
    for key in "ab":
        assert router.offer("signal", key, False, 0.0) is None
    rule.picked = 0
    for key in "abc":
        assert router.offer("signal", key, False, 0.0) is None
    assert [queue.depth for queue in router.queues] == [1, 0, 4]


@pytest.mark.parametrize("picked", [3, -1, None, "0", RuntimeError("no idea")])
def test_an_assignment_rule_that_fails_is_replaced_and_counted(picked: object) -> None:
    """The flow goes to the least loaded worker; nothing is lost."""
    router = Router(config(worker_count=3, assignment=Fixed(picked)))
    for key in "abc":
        assert router.offer("signal", key, False, 0.0) is None
    assert [queue.depth for queue in router.queues] == [1, 1, 1]
    assert router.assignment_failures == 3
    assert isinstance(router.assignment_error, Exception)
