"""A queue with thresholds: pressure is decided about by the queue's total depth."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from batchmill import (
    BatchQueue,
    BatchQueueSettings,
    ConfigError,
    PartitionPolicy,
    PartitionSelector,
    ThreadPolicy,
)
from batchmill.pressure import (
    EventKind,
    QueueAction,
    QueueDecision,
    QueueThresholdContext,
    QueueThresholdEvent,
    QueueThresholdSettings,
    ThresholdLevel,
    strategies,
)
from tests.kit.queues import Red
from tests.kit.threads import WAIT_S, Gate


@contextmanager
def held_queue(
    thresholds: QueueThresholdSettings, **settings: Any
) -> Iterator[tuple[BatchQueue[Any], Gate]]:
    """A queue of depth 0 whose only thread is held at the gate with one item."""
    gate = Gate()
    config = BatchQueueSettings(
        **{"threads": ThreadPolicy.fixed(1), "consumer": gate, **settings}, thresholds=thresholds
    )
    queue: BatchQueue[Any] = BatchQueue("guarded", config)
    try:
        assert queue.produce(Red())
        gate.wait_entered()
        yield queue, gate
    finally:
        gate.open()
        assert queue.shutdown()


def decisions(queue: BatchQueue[Any]) -> dict[tuple[ThresholdLevel, QueueAction], int]:
    """What the thresholds of a queue decided so far."""
    guard: Any = queue.guard
    return dict(guard.manager.stats().decisions)


def test_below_warning_there_is_no_decision() -> None:
    """Items that meet a depth below WARNING go in without a decision."""
    with held_queue(QueueThresholdSettings(max_queue_size=10)) as (queue, _):
        assert [queue.produce(Red()) for _ in range(5)] == [True] * 5
        assert decisions(queue) == {}


def test_levels_are_met_at_their_depths() -> None:
    """From depth 5 of 10 items are decided at WARNING, from 10 at CRITICAL, from 15 above it."""
    thresholds = QueueThresholdSettings(max_queue_size=10, critical_handler=strategies.accept())
    with held_queue(thresholds) as (queue, _):
        assert queue.produce_many([Red()] * 17) == 17
        assert decisions(queue) == {
            (ThresholdLevel.WARNING, QueueAction.ACCEPT): 5,
            (ThresholdLevel.CRITICAL, QueueAction.ACCEPT): 5,
            (ThresholdLevel.CRITICAL_PLUS, QueueAction.ACCEPT): 2,
        }


def test_rejected_items_are_counted_under_their_reason() -> None:
    """At CRITICAL the default action answers False, and the item counts as rejected."""
    with held_queue(QueueThresholdSettings(max_queue_size=4)) as (queue, gate):
        assert [queue.produce(Red()) for _ in range(6)] == [True] * 4 + [False] * 2
        assert queue.stats().dropped["rejected"] == 2
        gate.open()
        assert queue.flush(WAIT_S)
        assert len(gate.items) == 5


def test_dropped_items_are_counted_apart() -> None:
    """A DROP is no rejection: it counts as shed."""
    thresholds = QueueThresholdSettings(max_queue_size=2, critical_handler=strategies.drop())
    with held_queue(thresholds) as (queue, _):
        assert [queue.produce(Red()) for _ in range(5)] == [True, True, False, False, False]
        assert queue.stats().dropped["shed"] == 3


def test_hard_capacity_rejects_what_was_accepted() -> None:
    """Past the hard capacity an ACCEPT does not hold."""
    thresholds = QueueThresholdSettings(
        max_queue_size=4, hard_capacity=8, critical_handler=strategies.accept()
    )
    with held_queue(thresholds) as (queue, _):
        assert sum([queue.produce(Red()) for _ in range(20)]) == 8


def test_produce_many_stops_at_the_first_that_is_turned_away() -> None:
    """None is skipped: the answer is how many of the first got in, the rest is counted."""
    with held_queue(QueueThresholdSettings(max_queue_size=4)) as (queue, _):
        assert queue.produce_many([Red()] * 10) == 4
        assert queue.stats().dropped["rejected"] == 6


def test_retry_waits_and_gets_in() -> None:
    """RETRY is offered again after its delay, with the attempt's number, until there is room."""
    attempts: list[int] = []

    def decide(context: QueueThresholdContext[Any]) -> QueueDecision:
        attempts.append(context.attempt)
        if context.attempt == 3:
            gate.open()
            assert queue.flush(WAIT_S)
        return QueueDecision.retry(1)

    with held_queue(QueueThresholdSettings(max_queue_size=2, critical_handler=decide)) as (
        queue,
        gate,
    ):
        assert queue.produce_many([Red()] * 2) == 2
        assert queue.produce(Red())
        assert attempts == [1, 2, 3]


def test_retry_ends_with_its_attempts() -> None:
    """retry(max_attempts=3) asks three times and then rejects."""
    handler = strategies.retry(initial_ms=1, max_ms=1, max_attempts=3)
    with held_queue(QueueThresholdSettings(max_queue_size=2, critical_handler=handler)) as (
        queue,
        _,
    ):
        assert queue.produce_many([Red()] * 3) == 2
        assert decisions(queue)[(ThresholdLevel.CRITICAL, QueueAction.RETRY)] == 2
        assert queue.stats().dropped["rejected"] == 1


def test_retry_is_not_waited_for_past_the_timeout() -> None:
    """A delay that would end after the producer's timeout is a rejection at once."""
    handler = strategies.retry(initial_ms=60_000, max_ms=60_000)
    with held_queue(QueueThresholdSettings(max_queue_size=2, critical_handler=handler)) as (
        queue,
        _,
    ):
        assert queue.produce_many([Red()] * 2) == 2
        assert not queue.produce(Red(), timeout=0.01)


def test_shutdown_ends_a_retry() -> None:
    """A producer that waits for its next try is told False when the queue closes."""
    decision_made = threading.Event()

    def decide(context: QueueThresholdContext[Any]) -> QueueDecision:
        decision_made.set()
        return QueueDecision.retry(3_600_000)

    answers: list[bool] = []
    with held_queue(QueueThresholdSettings(max_queue_size=2, critical_handler=decide)) as (
        queue,
        _,
    ):
        assert queue.produce_many([Red()] * 2) == 2
        producer = threading.Thread(target=lambda: answers.append(queue.produce(Red())))
        producer.start()
        assert decision_made.wait(WAIT_S)
        queue._core.begin_close()
        producer.join(WAIT_S)
        assert answers == [False]


def test_asyncio_is_decided_about_too() -> None:
    """aproduce and aproduce_many meet the same thresholds, and wait without blocking the loop."""

    async def produce() -> tuple[bool, int]:
        return await queue.aproduce(Red()), await queue.aproduce_many([Red()] * 5)

    handler = strategies.retry(initial_ms=1, max_ms=1, max_attempts=2)
    with held_queue(QueueThresholdSettings(max_queue_size=4, critical_handler=handler)) as (
        queue,
        _,
    ):
        assert asyncio.run(produce()) == (True, 3)


@pytest.mark.parametrize(
    "selector",
    [PartitionSelector.type_hash(), PartitionSelector.round_robin()],
    ids=["type_hash", "round_robin"],
)
def test_depth_is_that_of_all_partitions(selector: Any) -> None:
    """With several partitions it is the whole queue that is too full, not one of them."""
    thresholds = QueueThresholdSettings(max_queue_size=8)
    with held_queue(thresholds, partitions=PartitionPolicy.fixed(4), selector=selector) as (
        queue,
        _,
    ):
        assert sum([queue.produce(Red()) for _ in range(20)]) == 8


def test_listeners_hear_levels_entered_and_left() -> None:
    """One event when the queue becomes too full, and one when it has drained."""
    heard: list[QueueThresholdEvent[Any]] = []
    thresholds = QueueThresholdSettings(
        max_queue_size=4, listeners=(heard.append,), synchronous_listeners=True
    )
    with held_queue(thresholds) as (queue, _):
        queue.produce_many([Red()] * 5)
    changes = [(event.kind, event.level) for event in heard if event.kind is not EventKind.DECISION]
    assert changes == [
        (EventKind.ENTERED, ThresholdLevel.WARNING),
        (EventKind.ENTERED, ThresholdLevel.CRITICAL),
        (EventKind.LEFT, ThresholdLevel.CRITICAL),
        (EventKind.LEFT, ThresholdLevel.WARNING),
    ]


def test_counters_still_balance() -> None:
    """accepted = consumed + pending: what thresholds turned away was never accepted."""
    with held_queue(QueueThresholdSettings(max_queue_size=4)) as (queue, gate):
        queue.produce_many([Red()] * 9)
        gate.open()
        assert queue.flush(WAIT_S)
        stats = queue.stats()
        assert (stats.accepted, stats.consumed, stats.pending) == (5, 5, 0)


def test_anything_else_is_refused() -> None:
    """``thresholds`` that cannot guard a queue raise an error that names the field."""
    with pytest.raises(ConfigError, match="thresholds"):
        BatchQueueSettings(threads=ThreadPolicy.fixed(1), thresholds=0.5)  # type: ignore[arg-type]


def test_hard_capacity_holds_for_many_producers() -> None:
    """However many produce at once, no more is accepted than the hard capacity allows."""
    thresholds = QueueThresholdSettings(
        max_queue_size=5, hard_capacity=20, critical_handler=strategies.accept()
    )
    accepted: list[int] = []
    with held_queue(thresholds) as (queue, _):
        barrier = threading.Barrier(16)

        def produce() -> None:
            barrier.wait(WAIT_S)
            accepted.append(sum([queue.produce(Red()) for _ in range(10)]))

        producers = [threading.Thread(target=produce) for _ in range(16)]
        for producer in producers:
            producer.start()
        for producer in producers:
            producer.join(WAIT_S)
        assert sum(accepted) == 20
        assert queue.stats().total_used == 20
