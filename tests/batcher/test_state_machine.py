"""A real batcher against a plain model: after every step the counters are what the model says.

Nothing is left to chance: batches are sent by flush() alone, time moves by hand, and a retried or
expiring item is acted on in the order of its time.
"""

from __future__ import annotations

import itertools
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from batchmill.batcher import BatcherSettings, BatcherStats, MicroBatcher
from batchmill.pressure import QueueDecision, strategies
from batchmill.testing import ManualClock
from tests.kit.batchers import FOREVER_MS, assert_balanced, levels
from tests.kit.threads import WAIT_S, until

RETRY_S = 2


@dataclass(eq=False)
class Item:
    """What it wants: ``fate`` under pressure, ``ok`` from the backend."""

    fate: str
    ok: bool
    outcome: str = "open"
    future: Future[Any] = field(default_factory=Future)


def _raise(context: object) -> QueueDecision:
    raise LookupError("a handler's bug")


HANDLER = strategies.by_priority(
    lambda item: item.fate,
    {
        "accept": strategies.accept(),
        "drop": strategies.drop(),
        "reject": strategies.reject(),
        "retry": strategies.retry(
            initial_ms=RETRY_S * 1000, max_ms=RETRY_S * 1000, max_attempts=2, jitter=0
        ),
        "raise": _raise,
    },
)
FATES = st.sampled_from(["accept", "drop", "reject", "retry", "raise"])


def _backend(batch: list[Item]) -> list[Any]:
    return [item if item.ok else ValueError("poison") for item in batch]


class Batching(RuleBasedStateMachine):
    """Thresholds at 2, 4, 6; WARNING accepts, above HANDLER decides; the hard capacity is 8."""

    def __init__(self) -> None:
        super().__init__()
        self.clock = ManualClock()
        self.batcher: MicroBatcher[Item] = MicroBatcher(
            _backend,
            BatcherSettings(batch_size=1000, linger_ms=FOREVER_MS, close_timeout_s=WAIT_S),
            levels(critical_handler=HANDLER),
            clock=self.clock,
        )
        self.items: list[Item] = []
        self.waiting: list[Item] = []
        self.parked: list[Item] = []
        self.timed: list[tuple[float, int, str, Item]] = []
        self.ids = itertools.count()

    def _offer(self, item: Item, attempt: int) -> None:
        depth = len(self.waiting)
        fate = item.fate if depth >= 4 else "accept"
        if fate == "accept" and depth < 8:
            self.waiting.append(item)
        elif fate == "retry" and attempt == 1:
            if len(self.parked) < 8:
                self.parked.append(item)
                when = self.clock.now() + RETRY_S
                self.timed.append((when, next(self.ids), "retry", item))
            else:
                item.outcome = "rejected"
        else:
            item.outcome = "dropped" if fate == "drop" else "rejected"

    @rule(fate=FATES, ok=st.booleans(), count=st.integers(1, 3))
    def submit(self, fate: str, ok: bool, count: int) -> None:
        for _ in range(count):
            item = Item(fate, ok)
            self.items.append(item)
            item.future = self.batcher.submit(item)
            self._offer(item, 1)

    @rule(fate=st.sampled_from(["accept", "drop"]), seconds=st.integers(1, 5))
    def submit_with_deadline(self, fate: str, seconds: int) -> None:
        item = Item(fate, ok=True)
        self.items.append(item)
        when = self.clock.now() + seconds
        item.future = self.batcher.submit(item, deadline_s=seconds)
        self._offer(item, 1)
        if item in self.waiting:
            self.timed.append((when, next(self.ids), "expire", item))

    @precondition(lambda self: self.items)
    @rule(data=st.data())
    def cancel(self, data: Any) -> None:
        item = data.draw(st.sampled_from(self.items))
        open_ = item.outcome == "open"
        assert item.future.cancel() == (open_ or item.future.cancelled())

    @rule(seconds=st.integers(1, 3))
    def advance(self, seconds: int) -> None:
        self.clock.advance(seconds)
        now = self.clock.now()
        due = sorted(event for event in self.timed if event[0] <= now)
        self.timed = [event for event in self.timed if event[0] > now]
        for _, _, what, item in due:
            if what == "retry":
                self.parked.remove(item)
                if item.future.cancelled():
                    item.outcome = "cancelled"
                else:
                    self._offer(item, 2)
            elif item in self.waiting:
                self.waiting.remove(item)
                item.outcome = "expired"

    @rule()
    def flush(self) -> None:
        self._settle()
        assert self.batcher.flush(WAIT_S)
        for item in self.waiting:
            if item.future.cancelled():
                item.outcome = "cancelled"
            else:
                item.outcome = "succeeded" if item.ok else "failed"
        self.waiting = []
        assert all(item.future.done() for item in self.items if item.outcome != "open")

    def _counts(self) -> dict[str, int]:
        outcomes = [item.outcome for item in self.items]
        ways = ("succeeded", "failed", "rejected", "dropped", "expired", "cancelled")
        return {
            "submitted": len(self.items),
            "queue_depth": len(self.waiting),
            "parked": len(self.parked),
            "in_flight": 0,
            "deciding": 0,
            **{way: outcomes.count(way) for way in ways},
        }

    def _settle(self) -> BatcherStats:
        expected = self._counts()

        def agreed() -> bool:
            stats = self.batcher.stats()
            assert_balanced(stats)
            return {name: getattr(stats, name) for name in expected} == expected

        until(agreed, f"the counters agree with {expected}")
        return self.batcher.stats()

    @invariant()
    def counters_agree(self) -> None:
        self._settle()

    def teardown(self) -> None:
        assert self.batcher.close(WAIT_S)
        assert all(item.future.done() for item in self.items)
        stats = self.batcher.stats()
        assert stats.pending == 0
        assert_balanced(stats)


Batching.TestCase.settings = settings(max_examples=120, stateful_step_count=30, deadline=None)
TestBatching = Batching.TestCase
