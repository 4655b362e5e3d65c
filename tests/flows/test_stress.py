"""Many producers at a barrier, a tiny switch interval, payloads that say where they belong."""

from __future__ import annotations

import random
import sys
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from batchmill.flows import Backpressure, FlowDispatcher
from tests.flows.kit import Signal, assert_balanced, config
from tests.kit.threads import WAIT_S

PRODUCERS = 6
PER_PRODUCER = 1_200


@pytest.fixture(autouse=True)
def restless() -> Iterator[None]:
    """Have threads take turns as often as the interpreter lets them."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


class Witness:
    """A handler that sees whether two workers ever have the same flow at once."""

    def __init__(self, *, fails: bool = False) -> None:
        self._lock = threading.Lock()
        self._inside: set[Any] = set()
        self._fails = fails
        self.overlaps = 0
        self.handled: defaultdict[Any, list[int]] = defaultdict(list)
        self.workers: defaultdict[Any, set[int]] = defaultdict(set)

    def __call__(self, batch: list[Signal]) -> None:
        flows = {signal.flow for signal in batch if signal.flow is not None}
        with self._lock:
            self.overlaps += bool(flows & self._inside)
            self._inside |= flows
        for signal in batch:
            self.handled[signal.flow].append(signal.number)
            self.workers[signal.flow].add(threading.get_ident())
        with self._lock:
            self._inside -= flows
        if self._fails and batch[0].number % 3 == 0:
            raise ValueError("now and then")


def run_producers(produce: Callable[[int], None], count: int = PRODUCERS) -> None:
    """Start all at once, and see all of them end well."""
    barrier = threading.Barrier(count)
    failures: list[BaseException] = []

    def run(index: int) -> None:
        try:
            barrier.wait(WAIT_S)
            produce(index)
        except BaseException as error:  # noqa: BLE001 - handed to the test
            failures.append(error)

    threads = [threading.Thread(target=run, args=(index,)) for index in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_S * 2)
        assert not thread.is_alive()
    assert failures == []


def quietly(batch: list[Any], error: BaseException) -> None:
    """An error handler for errors that are part of the test."""


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize(("capacity", "ingress"), [(2, 0), (2, 5), (8_192, 0)])
def test_every_flow_in_order_and_on_one_worker_at_a_time(
    capacity: int, ingress: int, fails: bool
) -> None:
    """Blocked, buffered or not, failing or not: nothing lost or twice, no flow on two workers."""
    witness = Witness(fails=fails)
    dispatcher: FlowDispatcher[Any] = FlowDispatcher(
        witness,
        config(
            worker_count=4, worker_queue_capacity=capacity, ingress_capacity=ingress, batch_max=3
        ),
        error_handler=quietly,
    )

    def produce(index: int) -> None:
        for number in range(PER_PRODUCER):
            assert dispatcher.dispatch(Signal((index, number % 5), number))

    run_producers(produce)
    assert dispatcher.close(WAIT_S) == []
    assert witness.overlaps == 0
    assert len(witness.handled) == PRODUCERS * 5
    for (_, lane), numbers in witness.handled.items():
        assert numbers == list(range(lane, PER_PRODUCER, 5))
    assert all(len(workers) == 1 for workers in witness.workers.values())
    stats = dispatcher.stats()
    assert stats.dispatched == stats.handled + stats.failed == PRODUCERS * PER_PRODUCER
    assert (stats.failed > 0) is fails


@pytest.mark.parametrize("policy", list(Backpressure))
def test_short_lived_flows_leave_no_mapping_behind(policy: Backpressure) -> None:
    """Finish signals that are handled, evicted or refused: at the end no flow is known.

    Few ids, used again and again by all producers, while signals of their past lives wait.
    """
    witness = Witness(fails=True)
    dispatcher: FlowDispatcher[Any] = FlowDispatcher(
        witness,
        config(
            worker_count=3,
            worker_queue_capacity=4,
            ingress_capacity=8,
            batch_max=2,
            max_flows=None,
            backpressure=policy,
        ),
        error_handler=quietly,
    )
    accepted = [0] * PRODUCERS

    def produce(index: int) -> None:
        rng = random.Random(index)
        for life in range(PER_PRODUCER // 3):
            flow = rng.randrange(10)
            for step in range(3):
                number = (index * PER_PRODUCER + life) * 3 + step
                accepted[index] += dispatcher.dispatch(Signal(flow, number, step == 2))

    run_producers(produce)
    for flow in range(10):  # another producer's signal may have come behind the last finish
        dispatcher.complete(flow)
    assert dispatcher.close(WAIT_S) == []
    stats = dispatcher.stats()
    assert witness.overlaps == 0
    assert (stats.active_flows, stats.pending, stats.blocked) == (0, 0, 0)
    assert [worker.flows for worker in stats.workers] == [0, 0, 0]
    assert stats.dispatched == sum(accepted)
    assert_balanced(stats)
    if policy is Backpressure.DROP_OLDEST:
        assert sum(stats.evicted.values()) > 0
    numbers = sum(map(len, witness.handled.values()))
    assert numbers == stats.handled + stats.failed


def test_evicted_finish_signals_leave_no_mapping_behind() -> None:
    """DROP_OLDEST with finish signals only: most are evicted, and every flow is forgotten."""
    gate = threading.Event()
    dispatcher: FlowDispatcher[Any] = FlowDispatcher(
        lambda batch: gate.wait(WAIT_S),
        config(worker_count=2, worker_queue_capacity=3, backpressure=Backpressure.DROP_OLDEST),
    )

    def produce(index: int) -> None:
        for number in range(PER_PRODUCER):
            assert dispatcher.dispatch(Signal((index, number), number, last=True))

    run_producers(produce)
    # All but two queues of three, and what the two workers had taken by then.
    assert sum(dispatcher.stats().evicted.values()) >= PRODUCERS * PER_PRODUCER - 8
    gate.set()
    dispatcher.close(WAIT_S)
    stats = dispatcher.stats()
    assert stats.active_flows == 0
    assert_balanced(stats)


def test_reused_ids_never_overtake_their_past() -> None:
    """One producer an id; each life ends with a finish; the numbers arrive as they were sent."""
    witness = Witness()
    dispatcher: FlowDispatcher[Any] = FlowDispatcher(
        witness, config(worker_count=4, worker_queue_capacity=5, batch_max=2)
    )

    def produce(index: int) -> None:
        for number in range(PER_PRODUCER):
            assert dispatcher.dispatch(Signal(index, number, last=number % 2 == 1))

    run_producers(produce)
    assert dispatcher.close(WAIT_S) == []
    assert witness.overlaps == 0
    for index in range(PRODUCERS):
        assert witness.handled[index] == list(range(PER_PRODUCER))
    assert dispatcher.stats().active_flows == 0


def test_max_flows_under_block_lets_everybody_in_at_last() -> None:
    """Fewer places than producers: each waits for its turn, and all signals arrive in order."""
    witness = Witness()
    dispatcher: FlowDispatcher[Any] = FlowDispatcher(
        witness, config(worker_count=2, worker_queue_capacity=2, max_flows=2)
    )

    def produce(index: int) -> None:
        for number in range(60):
            assert dispatcher.dispatch(Signal(index, number, last=number % 3 == 2))

    run_producers(produce)
    assert dispatcher.close(WAIT_S) == []
    assert witness.overlaps == 0
    for index in range(PRODUCERS):
        assert witness.handled[index] == list(range(60))
    assert dispatcher.stats().active_flows == 0


def test_closing_in_the_middle_accounts_for_every_signal() -> None:
    """Accepted is handled or given back, in order; refused is neither; nobody hangs."""
    for _ in range(10):
        witness = Witness()
        dispatcher: FlowDispatcher[Any] = FlowDispatcher(
            witness, config(worker_count=2, worker_queue_capacity=4)
        )
        accepted: list[list[int]] = [[] for _ in range(PRODUCERS)]
        left: list[Signal] = []
        halfway = threading.Event()

        def produce(
            index: int,
            dispatcher: FlowDispatcher[Any] = dispatcher,
            accepted: list[list[int]] = accepted,
            left: list[Signal] = left,
            halfway: threading.Event = halfway,
        ) -> None:
            if index == 0:
                halfway.wait(WAIT_S)
                left.extend(dispatcher.close(0))
                return
            for number in range(PER_PRODUCER):
                if number == 30:
                    halfway.set()
                if dispatcher.dispatch(Signal(index, number)):
                    accepted[index].append(number)

        run_producers(produce)
        dispatcher.close(WAIT_S)
        for index in range(1, PRODUCERS):
            back = [signal.number for signal in left if signal.flow == index]
            assert witness.handled[index] + back == accepted[index]
        assert_balanced(dispatcher.stats())
