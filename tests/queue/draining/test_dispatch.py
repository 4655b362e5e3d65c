"""Dispatch: which handler gets what, in which batches, and in which turn."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest

from batchmill import (
    PartitionPolicy,
    QueueConflictError,
)
from tests.kit.queues import Blue, Green, Recorder, Red, make_queue, reds
from tests.kit.threads import WAIT_S, Gate
from tests.queue.kit import Crimson, make_classes, messages


def test_each_class_goes_to_its_handler() -> None:
    """A handler gets the items of its class, in order, and no others."""
    red, green = Recorder(), Recorder()
    with make_queue() as queue:
        queue.add_handler(Red, red)
        queue.add_handler(Green, green)
        for number in range(5):
            queue.produce(Red(number))
            queue.produce(Green(number))
    assert red.items == reds(5)
    assert green.items == [Green(number) for number in range(5)]


def test_batch_has_one_class() -> None:
    """However classes were mixed when produced, a handler's batch is of its class alone."""
    gate, red, green = Gate(), Recorder(), Recorder()
    with make_queue() as queue:
        queue.add_handler(Blue, gate)
        queue.add_handler(Red, red)
        queue.add_handler(Green, green)
        queue.produce(Blue())
        gate.wait_entered()
        queue.produce_many([Red(1), Green(1), Red(2), Green(2)])
        gate.open()
        assert queue.flush(WAIT_S)
    assert (red.batches, green.batches) == ([[Red(1), Red(2)]], [[Green(1), Green(2)]])


def test_plain_callable_is_a_handler() -> None:
    """A handler may be any callable that takes the batch."""
    got: list[Red] = []
    with make_queue() as queue:
        queue.add_handler(Red, got.extend)
        queue.produce(Red(1))
    assert got == [Red(1)]


def test_object_with_consume_is_a_handler() -> None:
    """A handler may be an object: its consume() is called, even where it is callable too."""

    class Both(Recorder):
        def __call__(self, batch: list[Any]) -> None:
            raise AssertionError("consume() was there to be called")

    both = Both()
    with make_queue() as queue:
        queue.add_handler(Red, both)
        queue.produce(Red(1))
    assert both.items == [Red(1)]


@pytest.mark.parametrize("make", [lambda r: r, lambda r: r.consume], ids=["object", "callable"])
def test_direct_consumer_takes_every_class(make: Callable[[Recorder], Any]) -> None:
    """A direct consumer gets whatever is produced, in order, across classes."""
    recorder = Recorder()
    produced = [Red(1), Green(2), "three", 4.0, Crimson(5)]
    with make_queue(consumer=make(recorder)) as queue:
        for item in produced:
            assert queue.produce(item)
    assert recorder.items == produced


def test_direct_consumer_gets_mixed_batches() -> None:
    """A direct consumer's batch is not grouped: it is what was there, as it came."""
    gate = Gate()
    mixed = [Green(1), Red(2), Green(3)]
    with make_queue(consumer=gate) as queue:
        queue.produce(Red(0))
        gate.wait_entered()
        queue.produce_many(mixed)
    assert gate.batches == [[Red(0)], mixed]


def test_direct_consumer_excludes_handlers() -> None:
    """A queue with a direct consumer refuses handlers: they would never be called."""
    with make_queue(consumer=Recorder()) as queue, pytest.raises(QueueConflictError) as caught:
        queue.add_handler(Red, Recorder())
    assert caught.value.name == "test"


@pytest.mark.parametrize(
    ("registered", "produced"), [(Red, Crimson), (Crimson, Red)], ids=["subclass", "base class"]
)
def test_dispatch_is_by_exact_class(registered: type, produced: type) -> None:
    """A subclass's instance is not its base class's, nor the reverse: it has no handler."""
    handler = Recorder()
    with make_queue() as queue:
        queue.add_handler(registered, handler)
        queue.produce(produced(1))
        queue.shutdown()
        assert queue.stats().dropped["unregistered"] == 1
    assert handler.items == []


def test_batch_is_the_handlers_to_keep() -> None:
    """A handler may empty its batch: the items still count as consumed."""
    with make_queue(consumer=list.clear) as queue:
        queue.produce_many(reds(5))
        assert queue.flush(WAIT_S)
        assert queue.stats().consumed == 5


def test_unregistered_items_are_counted() -> None:
    """An item of a class nobody handles is accepted, dropped when drained, and counted."""
    with make_queue() as queue:
        assert queue.produce_many(reds(3)) == 3
        assert queue.flush(WAIT_S)
        stats = queue.stats()
    assert (stats.accepted, stats.dropped["unregistered"], stats.pending) == (3, 3, 0)


def test_unregistered_class_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    """The first drop of a class is logged, with its name and the queue's; the others are not."""
    with make_queue("lonely") as queue:
        for item in reds(3):
            queue.produce(item)
            assert queue.flush(WAIT_S)
    [said] = messages(caplog)
    assert "lonely: no handler for tests.kit.queues.Red;" in said


def test_unregistered_classes_are_logged_each(caplog: pytest.LogCaptureFixture) -> None:
    """Each class without a handler is logged."""
    classes = make_classes(3)
    with make_queue() as queue:
        for cls in [*classes, *classes]:
            queue.produce(cls())
    assert len(messages(caplog)) == 3


def test_unregistered_class_does_not_disturb_others() -> None:
    """Items of a handled class, produced in between, are all consumed."""
    handler = Recorder()
    with make_queue() as queue:
        queue.add_handler(Red, handler)
        for number in range(10):
            queue.produce(Green(number))
            queue.produce(Red(number))
    assert handler.items == reds(10)


def test_batches_are_bounded() -> None:
    """A handler gets max_batch items at most; what remains comes in the next batches, in order."""
    gate = Gate()
    with make_queue(max_batch=10) as queue:
        queue.add_handler(Red, gate)
        queue.produce(Red(0))
        gate.wait_entered()
        queue.produce_many(reds(25, start=1))
    assert [len(batch) for batch in gate.batches] == [1, 10, 10, 5]
    assert gate.items == reds(26)


@pytest.mark.parametrize("partitions", [1, 2], ids=["same partition", "another partition"])
def test_saturated_class_does_not_starve_another(partitions: int) -> None:
    """A class that never runs dry delays another on its thread by a batch, not for ever."""
    served = threading.Event()

    def endless(batch: list[Any]) -> None:
        if not served.is_set():
            queue.produce_many(batch)

    with make_queue(max_batch=10, partitions=PartitionPolicy.fixed(partitions)) as queue:
        queue.add_handler(Red, endless)
        queue.add_handler(Green, lambda batch: served.set())
        queue.produce_many(reds(100))  # ten batches, and each comes back
        queue.produce(Green())
        was_served = served.wait(WAIT_S)
        served.set()
    assert was_served


def test_handler_may_empty_its_batch() -> None:
    """The list is the handler's own: what it does to it changes no count."""
    with make_queue() as queue:
        queue.add_handler(Red, list.clear)
        queue.produce_many([Red(number) for number in range(5)])
        assert queue.flush(WAIT_S)
        assert (queue.stats().consumed, queue.stats().pending) == (5, 0)
