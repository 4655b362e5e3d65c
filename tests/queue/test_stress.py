"""Everything at once, at the smallest switch interval: nothing lost, doubled or out of order."""

from __future__ import annotations

import random
import sys
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from batchmill import (
    BatchQueue,
    BatchQueueManager,
    BatchQueueSettings,
    BufferStrategy,
    DrainBalancer,
    PartitionPolicy,
    PartitionSelector,
    QueueClosedError,
    ThreadPolicy,
)
from tests.kit.queues import Recorder, Scripted, new_queue
from tests.kit.threads import SOAK, WAIT_S, spawn
from tests.queue.kit import Payload, check_of, payload_class, problems_with

KINDS = [payload_class(kind) for kind in range(24)]


@pytest.fixture(autouse=True)
def _restless() -> Iterator[None]:
    """Threads are switched as often as the interpreter can."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


def shuffle(loads: Sequence[float], owners: Sequence[int], threads: int) -> Sequence[int]:
    """A plan that moves nearly everything, anywhere."""
    return [random.randrange(threads) for _ in owners]


def make(producer: int, sequence: int, kind: int) -> Payload:
    """A payload, derived from who sends it and when."""
    return KINDS[kind](producer, sequence, kind, check_of(producer, sequence, kind))


class Sink(Recorder):
    """A handler that now and then takes its time."""

    def consume(self, batch: list[Any]) -> None:
        with self.check:
            self.batches.append(batch)
            for _ in range(random.choice((0, 0, 50))):
                pass


class Storm:
    """Producers, a grower and an inspector, all on one queue, until it is shut down."""

    def __init__(self, queue: BatchQueue[Any], producers: int, kinds: int = len(KINDS)) -> None:
        self.queue = queue
        self.kinds = kinds
        self.known = 0
        self.sinks = [Sink() for _ in range(kinds)]
        self.accepted: dict[tuple[int, int], list[int]] = {}
        self.produced = 0
        self.overfull: list[str] = []
        self.start = threading.Barrier(producers + 3)
        self.stop = threading.Event()
        self.enough = threading.Event()
        for _ in range(min(3, kinds)):
            self._grow()
        self.calls = [spawn(self._produce, index) for index in range(producers)]
        self.calls += [spawn(self._inspect), spawn(self._keep_growing)]

    def _grow(self) -> None:
        # One handler for two kinds, now and then: its calls must not overlap either.
        sink = self.sinks[self.known - 1 if self.known % 5 == 4 else self.known]
        self.queue.add_handler(KINDS[self.known], sink)
        self.known += 1

    def _keep_growing(self) -> None:
        self.start.wait(WAIT_S)
        while self.known < self.kinds and not self.stop.is_set():
            if self.produced > 150 * (self.known - 2):
                try:
                    self._grow()
                except QueueClosedError:
                    return

    def _inspect(self) -> None:
        self.start.wait(WAIT_S)
        while not self.stop.is_set():
            for partition in list(self.queue._core.layout.partitions):
                with partition.lock:  # so that the lanes are seen at one moment
                    if partition.used > partition.capacity:
                        self.overfull.append(f"{partition.used} of {partition.capacity}")

    def _produce(self, me: int) -> None:
        queue, dice = self.queue, random.Random(me)
        sequence = 0
        self.start.wait(WAIT_S)
        while not self.stop.is_set():
            if dice.random() < 0.2:
                if dice.random() < 0.5:
                    kinds = [dice.randrange(self.known)] * dice.randrange(1, 30)
                else:
                    kinds = [dice.randrange(self.known) for _ in range(dice.randrange(1, 12))]
                items = [make(me, sequence + at, kind) for at, kind in enumerate(kinds)]
                count = queue.produce_many(items)
            else:
                items = [make(me, sequence, dice.randrange(self.known))]
                count = int(queue.produce(items[0]))
            for item in items[:count]:
                self.accepted.setdefault((me, item.kind), []).append(item.sequence)
            sequence += len(items)
            self.produced += count
            if self.produced >= self.target:
                self.enough.set()

    target = 0

    def blow(self, target: int) -> list[str]:
        """Let go, shut down in the middle of it, and say what went wrong."""
        self.target = target
        self.start.wait(WAIT_S)
        came = self.enough.wait(WAIT_S * 3)
        finished = self.queue.shutdown()
        self.stop.set()
        for call in self.calls:
            call.result()
        items = [item for sink in self.sinks for item in sink.items]
        problems = problems_with(items, self.accepted)
        overlaps = sum(sink.overlaps for sink in self.sinks)
        stats = self.queue.stats()
        if not came:
            problems.append(f"stalled: {self.produced} of {target} accepted")
        if not finished:
            problems.append("the shutdown did not finish")
        if overlaps:
            problems.append(f"handlers were entered twice at once {overlaps} times")
        if self.overfull:
            problems.append(f"overfull: {self.overfull[:3]}")
        if not stats.accepted == stats.consumed == len(items):
            problems.append(f"{stats.accepted} accepted, {stats.consumed} consumed")
        return problems


@pytest.mark.parametrize("strategy", list(BufferStrategy), ids=lambda strategy: strategy.name)
@pytest.mark.parametrize("balancer", ["shuffle", "throughput_weighted"])
@pytest.mark.parametrize("selector", ["type_hash", "key_hash"])
def test_all_at_once(selector: str, balancer: str, strategy: BufferStrategy) -> None:
    """Growth, rebalancing and shutdown under fire lose, double, mix up and overfill nothing."""
    for _ in range(SOAK):
        queue = new_queue(
            threads=3,
            partitions=PartitionPolicy.adaptive(4),
            selector=PartitionSelector.type_hash()
            if selector == "type_hash"
            else PartitionSelector.key_hash(lambda item: (item.producer, item.kind)),
            buffer_size=16,
            max_batch=7,
            strategy=strategy,
            balancer=Scripted(shuffle)
            if balancer == "shuffle"
            else DrainBalancer.throughput_weighted(),
            rebalance_interval_ms=2,
        )
        assert Storm(queue, producers=6).blow(target=6000) == []
        assert queue.stats().rebalances > 0


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("strategy", list(BufferStrategy), ids=lambda strategy: strategy.name)
def test_tiny_buffer(strategy: BufferStrategy, size: int) -> None:
    """A partition of one or two places is never overfull, and nobody is left waiting."""
    for _ in range(SOAK):
        queue = new_queue(
            threads=2,
            partitions=3,
            buffer_size=size,
            strategy=strategy,
            balancer=Scripted(shuffle),
            rebalance_interval_ms=3,
        )
        assert Storm(queue, producers=5, kinds=6).blow(target=2000) == []


def test_many_queues_on_one_scheduler() -> None:
    """Queues that share threads do not mix up, starve or lose anything."""
    for _ in range(SOAK):
        manager = BatchQueueManager()
        config = BatchQueueSettings(
            shared_scheduler=("pool", ThreadPolicy.fixed(2)),
            partitions=PartitionPolicy.adaptive(4),
            buffer_size=16,
            max_batch=7,
            shutdown_timeout_ms=WAIT_S * 1000,
        )
        storms = [
            Storm(manager.create(f"queue {index}", config), producers=2, kinds=5)
            for index in range(4)
        ]
        blows = [spawn(storm.blow, 1500) for storm in storms]
        assert [blow.result(WAIT_S * 4) for blow in blows] == [[]] * 4
        assert manager.names() == ()


def _produce_thousand(queue: BatchQueue[Any], barrier: threading.Barrier, me: int) -> None:
    barrier.wait(WAIT_S)
    for sequence in range(1000):
        assert queue.produce(make(me, sequence, me))


def test_direct_consumer() -> None:
    """A direct consumer with serialize=True, on several threads, gets everything once, in order."""
    for _ in range(SOAK):
        sink = Sink()
        queue = new_queue(
            threads=3, partitions=4, consumer=sink, serialize=True, buffer_size=16, max_batch=5
        )
        barrier = threading.Barrier(4)

        calls = [spawn(_produce_thousand, queue, barrier, me) for me in range(4)]
        for call in calls:
            call.result(WAIT_S * 2)
        assert queue.shutdown()
        wanted = {(me, me): list(range(1000)) for me in range(4)}
        assert problems_with(sink.items, wanted) == []
        assert sink.overlaps == 0


def test_accepted_means_consumed() -> None:
    """In 300 shutdowns among running producers, what was accepted is what was consumed."""
    wrong = []
    for round_ in range(300 * SOAK):
        queue = new_queue(threads=1 + round_ % 2, partitions=2, buffer_size=1 + round_ % 9)
        sink, accepted = Sink(), [0, 0, 0]
        queue.add_handler(KINDS[0], sink)
        queue.add_handler(KINDS[1], sink)
        barrier = threading.Barrier(4)

        def produce(
            me: int,
            queue: BatchQueue[Any] = queue,
            accepted: list[int] = accepted,
            barrier: threading.Barrier = barrier,
        ) -> None:
            barrier.wait(WAIT_S)
            sequence = 0
            while queue.produce(make(me, sequence, me % 2)):
                accepted[me] += 1
                sequence += 1

        calls = [spawn(produce, me) for me in range(3)]
        barrier.wait(WAIT_S)
        while sum(accepted) < round_ % 40:
            pass
        assert queue.shutdown()
        for call in calls:
            call.result()
        if sum(accepted) != len(sink.items):
            wrong.append((round_, sum(accepted), len(sink.items)))
    assert wrong == []


def test_lone_items() -> None:
    """Items that come one at a time, each to a queue about to park, are all consumed at once."""
    for round_ in range(3 * SOAK):
        queue = new_queue(threads=2, partitions=2, balancer=Scripted(shuffle))
        recorder = Recorder()
        queue.add_handler(int, recorder)
        with queue:
            for number in range(700):
                if number % 3 == round_:
                    queue._core.rebalancer.due_ns = 0
                assert queue.produce(number) if number % 2 else queue.produce_many([number])
                if number % 5 == 0:
                    recorder.wait_for(number + 1)
            recorder.wait_for(700)
        assert recorder.items == list(range(700))


def test_flush_under_fire() -> None:
    """After flush all that its caller had put is consumed, whatever others put meanwhile."""
    queue = new_queue(threads=2, partitions=3, buffer_size=32, max_batch=5)
    sinks = [Sink() for _ in range(4)]
    for kind, sink in enumerate(sinks):
        queue.add_handler(KINDS[kind], sink)
    barrier = threading.Barrier(4)

    def work(me: int) -> int:
        barrier.wait(WAIT_S)
        for sequence in range(150 * SOAK):
            assert queue.produce(make(me, sequence, me))
            if sequence % 3 == 0:
                assert queue.flush(WAIT_S)
                if len(sinks[me].items) != sequence + 1:
                    return sequence
        return -1

    calls = [spawn(work, me) for me in range(4)]
    assert [call.result(WAIT_S * 4) for call in calls] == [-1] * 4
    assert queue.shutdown()


def test_handlers_come_and_go() -> None:
    """Handlers removed and added under fire: every item is consumed or counted as unregistered."""
    queue = new_queue(threads=2, partitions=2, buffer_size=16, max_batch=3)
    sink = Sink()
    start, stop = threading.Barrier(4), threading.Event()
    accepted = [0, 0, 0]

    def produce(me: int) -> None:
        start.wait(WAIT_S)
        sequence = 0
        while not stop.is_set():
            accepted[me] += queue.produce(make(me, sequence, me % 2))
            sequence += 1

    calls = [spawn(produce, me) for me in range(3)]
    start.wait(WAIT_S)
    for _ in range(300 * SOAK):
        for kind in (0, 1):
            queue.add_handler(KINDS[kind], sink)
        for kind in (0, 1):
            assert queue.remove_handler(KINDS[kind])
    stop.set()
    for call in calls:
        call.result()
    assert queue.shutdown()
    stats = queue.stats()
    assert stats.accepted == sum(accepted)
    assert stats.accepted == len(sink.items) + stats.dropped["unregistered"]
    assert stats.consumed == len(sink.items) == len(set(map(id, sink.items)))
    assert sink.overlaps == 0
