"""A real queue and a plain list, given the same commands, agree."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from batchmill import (
    BatchQueue,
    BatchQueueSettings,
    BufferStrategy,
    PartitionPolicy,
    PartitionSelector,
    ThreadPolicy,
)
from tests.kit.queues import Scripted, rebalance_now
from tests.kit.threads import SOAK, WAIT_S


class Item:
    """An item with a number; a poisonous one makes its handler raise."""

    def __init__(self, number: int, poison: bool) -> None:
        self.number = number
        self.poison = poison

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.number}{', poison' if self.poison else ''})"


CLASSES: list[type[Item]] = [type(f"Item{index}", (Item,), {}) for index in range(5)]
kinds = st.integers(0, len(CLASSES) - 1)
policies = st.one_of(
    st.integers(1, 5).map(PartitionPolicy.fixed),
    st.integers(1, 2).map(PartitionPolicy.thread_multiply),
    st.just(PartitionPolicy.adaptive(1)),
    st.just(PartitionPolicy.adaptive()),
)
selectors = st.sampled_from(
    [PartitionSelector.type_hash(), PartitionSelector.key_hash(lambda item: type(item).__name__)]
)


class Poisoned(Exception):
    """What a handler raises at a poisonous item."""


class QueueMachine(RuleBasedStateMachine):
    """The model: per class, what was accepted in order, and what must reach a handler."""

    @initialize(
        threads=st.integers(1, 3),
        policy=policies,
        selector=selectors,
        size=st.integers(1, 6),
        batch=st.integers(1, 4),
        strategy=st.sampled_from(BufferStrategy),
    )
    def start(
        self,
        threads: int,
        policy: PartitionPolicy,
        selector: Any,
        size: int,
        batch: int,
        strategy: BufferStrategy,
    ) -> None:
        self.balancer = Scripted()
        self.lock = threading.Lock()
        self.open = threading.Event()
        self.open.set()
        self.number = 0
        self.handlers: dict[int, int] = {}
        self.accepted: list[list[int]] = [[] for _ in CLASSES]
        self.certain: list[set[int]] = [set() for _ in CLASSES]
        self.handled: list[list[int]] = [[] for _ in CLASSES]
        self.refused = 0
        self.stopped = 0
        self.inside: set[int] = set()
        self.faults: list[str] = []
        self.queue: BatchQueue[Item] = BatchQueue(
            "machine",
            BatchQueueSettings(
                threads=ThreadPolicy.fixed(threads),
                partitions=policy,
                selector=selector,
                buffer_size=size,
                max_batch=batch,
                strategy=strategy,
                balancer=self.balancer,
                error_handler=self.on_error,
                shutdown_timeout_ms=WAIT_S * 1000,
            ),
        )

    def on_error(self, batch: list[Any], error: BaseException) -> None:
        if not isinstance(error, Poisoned):
            self.faults.append(repr(error))

    def handle(self, kind: int, batch: list[Item]) -> None:
        with self.lock:
            if kind in self.inside:
                self.faults.append(f"class {kind} is handled twice at once")
            self.inside.add(kind)
        self.open.wait(WAIT_S * 2)
        with self.lock:
            self.inside.discard(kind)
            self.handled[kind].extend(item.number for item in batch)
            if any(type(item) is not CLASSES[kind] for item in batch):
                self.faults.append(f"class {kind} gets {batch}")
        if any(item.poison for item in batch):
            raise Poisoned

    @property
    def held(self) -> bool:
        return not self.open.is_set()

    def make(self, kind: int, poison: bool = False) -> Item:
        self.number += 1
        return CLASSES[kind](self.number, poison)

    def note_accepted(self, items: list[Item]) -> None:
        for item in items:
            kind = CLASSES.index(type(item))
            self.accepted[kind].append(item.number)
            if kind in self.handlers:
                self.certain[kind].add(item.number)

    @rule(kind=kinds, weight=st.sampled_from([0.05, 1.0, 2.0]))
    def add_handler(self, kind: int, weight: float) -> None:
        if kind in self.handlers:
            with pytest.raises(ValueError, match="already"):
                self.queue.add_handler(CLASSES[kind], lambda batch: None, weight)
            return
        self.queue.add_handler(CLASSES[kind], lambda batch: self.handle(kind, batch), weight)
        self.handlers[kind] = self.number

    @rule(kind=kinds)
    def remove_handler(self, kind: int) -> None:
        if not self.held:
            self.flush()
        assert self.queue.remove_handler(CLASSES[kind]) == (kind in self.handlers)
        if self.handlers.pop(kind, None) is not None and self.held:
            # What is queued now may be dropped, unless its batch is in the handler already.
            self.certain[kind].clear()

    @rule(kind=kinds, poison=st.booleans())
    def produce(self, kind: int, poison: bool) -> None:
        item = self.make(kind, poison)
        # Held, nobody may ever make room; else there will be some, and the producer can wait.
        if self.queue.produce(item, timeout=0 if self.held else WAIT_S):
            self.note_accepted([item])
        else:
            assert self.held
            self.refused += 1

    @rule(several=st.lists(kinds, max_size=25))
    def produce_many(self, several: list[int]) -> None:
        items = [self.make(kind) for kind in several]
        count = self.queue.produce_many(items, timeout=0 if self.held else WAIT_S)
        self.note_accepted(items[:count])
        self.refused += len(items) - count
        assert count == len(items) or self.held

    @rule(kind=kinds, count=st.integers(8, 30))
    def produce_run(self, kind: int, count: int) -> None:
        self.produce_many([kind] * count)

    @precondition(lambda self: not self.held)
    @rule()
    def hold(self) -> None:
        self.open.clear()

    @precondition(lambda self: self.held)
    @rule()
    def release(self) -> None:
        self.open.set()

    @rule(data=st.data())
    def rebalance(self, data: st.DataObject) -> None:
        threads = len(self.queue._core.tasks)
        count = len(self.queue._core.layout.partitions)
        self.balancer.plan = data.draw(
            st.lists(st.integers(0, threads - 1), min_size=count, max_size=count)
        )
        rebalance_now(self.queue)

    @precondition(lambda self: not self.held)
    @rule()
    def flush(self) -> None:
        assert self.queue.flush(WAIT_S)
        stats = self.queue.stats()
        assert stats.pending == 0
        assert stats.total_used == 0
        self.agree()

    @invariant()
    def nothing_went_wrong(self) -> None:
        assert self.faults == []

    @invariant()
    def bounded(self) -> None:
        for partition in self.queue._core.layout.partitions:
            with partition.lock:
                assert partition.used <= partition.capacity
                assert 0 <= partition.out <= partition.capacity

    @invariant()
    def counted(self) -> None:
        stats = self.queue.stats()
        assert stats.accepted == sum(map(len, self.accepted))
        assert stats.dropped["full"] == self.refused
        assert stats.pending >= stats.total_used >= 0

    def agree(self) -> None:
        """All is drained: the handlers got what the model says, in its order."""
        stats = self.queue.stats()
        handled = sum(map(len, self.handled))
        assert stats.consumed + stats.failed == handled
        assert stats.accepted == handled + stats.dropped["unregistered"]
        for kind, numbers in enumerate(self.handled):
            assert len(set(numbers)) == len(numbers), "an item came twice"
            kept = set(numbers)
            assert numbers == [number for number in self.accepted[kind] if number in kept]
            assert self.certain[kind] <= kept, "an item was lost"

    def teardown(self) -> None:
        if not hasattr(self, "queue"):
            return
        self.open.set()
        assert self.queue.shutdown()
        assert self.queue.produce(self.make(0)) is False
        assert self.queue.stats().dropped["stopped"] == 1
        assert self.faults == []
        self.agree()


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    """Unregistered classes are said once per class and queue: here that is very often."""
    log = logging.getLogger("batchmill.queue")
    level = log.level
    log.setLevel(logging.CRITICAL)
    yield
    log.setLevel(level)


class TestQueue(QueueMachine.TestCase):  # type: ignore[misc, valid-type]
    """Whatever the commands, the real queue does what the model does."""

    settings = settings(
        deadline=None,
        max_examples=120 * SOAK,
        stateful_step_count=40,
        suppress_health_check=list(HealthCheck),
    )
