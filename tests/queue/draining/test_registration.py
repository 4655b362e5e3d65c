"""Handlers that come and go: who may register, and who gets what waits meanwhile."""

from __future__ import annotations

from typing import Any

import pytest

from batchmill import (
    ConfigError,
    HandlerExistsError,
    PartitionPolicy,
    PartitionSelector,
    QueueClosedError,
)
from tests.kit.queues import Blue, Green, Recorder, Red, make_queue, reds
from tests.kit.threads import WAIT_S, Gate


def test_handler_that_comes_later_gets_what_waits() -> None:
    """Items queued before their class had a handler go to the one that came in time."""
    gate, late = Gate(), Recorder()
    with make_queue() as queue:
        queue.add_handler(Green, gate)
        queue.produce(Green())
        gate.wait_entered()
        queue.produce_many(reds(3))
        queue.add_handler(Red, late)
        queue.produce(Red(3))
    assert late.items == reds(4)


@pytest.mark.parametrize(
    "selector",
    [PartitionSelector.round_robin(), PartitionSelector.key_hash(lambda item: item.number)],
    ids=["round_robin", "key_hash"],
)
def test_handler_that_comes_later_gets_what_waits_anywhere(selector: Any) -> None:
    """The same where a class has items in several partitions: none is overlooked."""
    gate, late = Gate(), Recorder()
    with make_queue(partitions=PartitionPolicy.fixed(4), selector=selector) as queue:
        queue.add_handler(Green, gate)
        queue.produce(Green())
        gate.wait_entered()
        queue.produce_many(reds(20))
        queue.add_handler(Red, late)
    assert sorted(item.number for item in late.items) == list(range(20))


def test_second_handler_is_refused() -> None:
    """A class has one handler; a second raises, naming queue and class."""
    with make_queue() as queue:
        queue.add_handler(Red, Recorder())
        with pytest.raises(HandlerExistsError) as caught:
            queue.add_handler(Red, Recorder())
    assert (caught.value.name, caught.value.cls) == ("test", Red)


def test_refused_handler_changes_nothing() -> None:
    """After a second handler was refused, the first gets the items."""
    first, second = Recorder(), Recorder()
    with make_queue() as queue:
        queue.add_handler(Red, first)
        with pytest.raises(HandlerExistsError):
            queue.add_handler(Red, second)
        queue.produce(Red())
    assert (first.items, second.items) == ([Red()], [])


def test_same_handler_twice_for_one_class_is_refused() -> None:
    """Also the very same handler: registering twice is a mistake."""
    handler = Recorder()
    with make_queue() as queue:
        queue.add_handler(Red, handler)
        with pytest.raises(HandlerExistsError):
            queue.add_handler(Red, handler)


def test_not_a_handler_is_refused() -> None:
    """What is neither callable nor has consume() raises, and the class stays free."""
    with make_queue() as queue:
        with pytest.raises(ConfigError) as caught:
            queue.add_handler(Red, object())  # type: ignore[arg-type]
        queue.add_handler(Red, Recorder())
    assert caught.value.field == "handler"


def test_not_a_class_is_refused() -> None:
    """Handlers are for classes: an instance, say, raises and names the argument."""
    with make_queue() as queue, pytest.raises(ConfigError) as caught:
        queue.add_handler(Red(1), Recorder())  # type: ignore[arg-type]
    assert (caught.value.field, caught.value.value) == ("cls", Red(1))


@pytest.mark.parametrize("weight", [0, -1.0, float("nan"), float("inf"), "1"])
def test_bad_weight_is_refused(weight: Any) -> None:
    """A weight has to be a finite number above 0; the class stays free."""
    with make_queue() as queue:
        with pytest.raises(ConfigError, match=r"^weight="):
            queue.add_handler(Red, Recorder(), weight=weight)
        queue.add_handler(Red, Recorder())


def test_handler_after_shutdown_is_refused() -> None:
    """A queue that was shut down takes no handlers."""
    with make_queue() as queue:
        queue.shutdown()
        with pytest.raises(QueueClosedError) as caught:
            queue.add_handler(Red, Recorder())
    assert caught.value.name == "test"


def test_remove_handler_tells_whether_there_was_one() -> None:
    """True where the class had a handler, False where not."""
    with make_queue() as queue:
        queue.add_handler(Red, Recorder())
        answers = [queue.remove_handler(Red), queue.remove_handler(Red), queue.remove_handler(Blue)]
    assert answers == [True, False, False]


def test_removed_handler_gets_nothing_more() -> None:
    """Items that are drained after the removal are dropped and counted as unregistered."""
    handler = Recorder()
    with make_queue() as queue:
        queue.add_handler(Red, handler)
        queue.produce(Red(1))
        assert queue.flush(WAIT_S)
        queue.remove_handler(Red)
        queue.produce(Red(2))
        assert queue.flush(WAIT_S)
        assert queue.stats().dropped["unregistered"] == 1
    assert handler.items == [Red(1)]


def test_removed_handler_finishes_its_batch() -> None:
    """A batch that is being handled when its handler is removed counts as consumed."""
    gate = Gate()
    with make_queue() as queue:
        queue.add_handler(Red, gate)
        queue.produce(Red())
        gate.wait_entered()
        queue.remove_handler(Red)
        gate.open()
        assert queue.flush(WAIT_S)
        assert queue.stats().consumed == 1


def test_handler_can_be_replaced() -> None:
    """Items still queued when the handler is replaced go to the new one: none is lost."""
    gate, new = Gate(), Recorder()
    with make_queue() as queue:
        queue.add_handler(Red, gate)
        queue.produce(Red(0))
        gate.wait_entered()
        queue.produce_many(reds(5, start=1))
        queue.remove_handler(Red)
        queue.add_handler(Red, new)
    assert (gate.items, new.items) == ([Red(0)], reds(5, start=1))


def test_removing_one_class_leaves_the_handlers_others() -> None:
    """A handler of two classes that loses one still gets the other."""
    handler = Recorder()
    with make_queue() as queue:
        queue.add_handler(Red, handler)
        queue.add_handler(Green, handler)
        queue.remove_handler(Red)
        queue.produce(Red())
        queue.produce(Green())
    assert handler.items == [Green()]


def test_handler_may_register_another() -> None:
    """add_handler() works inside a handler: what it then produces finds the new one."""
    late = Recorder()

    def introduce(batch: list[Red]) -> None:
        queue.add_handler(Green, late)
        queue.produce(Green())

    with make_queue() as queue:
        queue.add_handler(Red, introduce)
        queue.produce(Red())
        assert queue.flush(WAIT_S)
    assert late.items == [Green()]


def test_handler_may_remove_itself() -> None:
    """remove_handler() works inside the handler it removes: it was called for the last time."""
    calls: list[list[Red]] = []

    def once(batch: list[Red]) -> None:
        calls.append(batch)
        queue.remove_handler(Red)

    with make_queue(max_batch=1) as queue:
        queue.add_handler(Red, once)
        queue.produce_many(reds(3))
        assert queue.flush(WAIT_S)
        assert queue.stats().dropped["unregistered"] == 2
    assert calls == [[Red(0)]]
