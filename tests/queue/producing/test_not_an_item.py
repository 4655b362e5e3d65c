"""What cannot be queued: None, and items that a selector has no place for."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest

from batchmill import (
    ConfigError,
    PartitionPolicy,
    PartitionSelector,
    SelectorError,
)
from tests.kit.queues import Recorder, Red, make_queue
from tests.kit.threads import WAIT_S
from tests.queue.kit import quiet


@pytest.mark.parametrize(
    "selector",
    [
        PartitionSelector.type_hash(),
        PartitionSelector.round_robin(),
        PartitionSelector.key_hash(lambda item: item.number),
        lambda item, count: item.number % count,
    ],
    ids=["type_hash", "round_robin", "key_hash", "own"],
)
@pytest.mark.parametrize("direct", [True, False], ids=["consumer", "handlers"])
def test_none_is_refused(selector: Any, direct: bool) -> None:
    """None is no item: a TypeError that says so, whatever the selector makes of it."""
    consumer = Recorder() if direct else None
    with (
        make_queue(consumer=consumer, selector=selector) as queue,
        pytest.raises(TypeError, match="None is not an item"),
    ):
        queue.produce(None)


@pytest.mark.parametrize(
    "selector",
    [PartitionSelector.type_hash(), PartitionSelector.round_robin()],
    ids=["type_hash", "round_robin"],
)
def test_none_among_many_is_refused(selector: Any) -> None:
    """produce_many() with None in it raises before it puts anything: the caller can try again."""
    recorder = Recorder()
    with (
        make_queue(consumer=recorder, selector=selector) as queue,
        pytest.raises(TypeError, match="None is not an item"),
    ):
        queue.produce_many([Red(1), None, Red(2)])
    assert recorder.items == []


def test_none_is_refused_with_a_handler_for_its_class() -> None:
    """Registering a handler for NoneType does not make None an item."""
    with make_queue() as queue:
        with contextlib.suppress(ConfigError):  # to refuse it here already is as good
            queue.add_handler(type(None), Recorder())
        with pytest.raises(TypeError, match="None is not an item"):
            queue.produce(None)


@pytest.mark.parametrize("answer", [4, 99, -1, "0", None, 1.0], ids=repr)
def test_selector_out_of_range_is_the_producers_error(answer: Any) -> None:
    """An answer that is no partition raises to the producer, and says what it was."""
    with (
        make_queue(
            consumer=Recorder(),
            partitions=PartitionPolicy.fixed(4),
            selector=lambda item, count: answer,
        ) as queue,
        pytest.raises(SelectorError) as caught,
    ):
        queue.produce(Red())
    error = caught.value
    assert (error.name, error.answer, error.partitions) == ("test", answer, 4)


def test_queue_lives_after_a_selector_error() -> None:
    """The item is not in the queue, and the next one is taken as ever."""
    recorder = Recorder()
    with make_queue(
        consumer=recorder,
        partitions=PartitionPolicy.fixed(4),
        selector=lambda item, count: item.number,
    ) as queue:
        with pytest.raises(SelectorError):
            queue.produce(Red(4))
        assert queue.produce(Red(3))
        assert queue.flush(WAIT_S)
    assert recorder.items == [Red(3)]


def test_selector_error_among_many() -> None:
    """In produce_many() what came before the bad one is in, what came after is not."""
    recorder = Recorder()
    with make_queue(
        consumer=recorder,
        partitions=PartitionPolicy.fixed(4),
        selector=lambda item, count: item.number,
    ) as queue:
        with pytest.raises(SelectorError):
            queue.produce_many([Red(0), Red(9), Red(1)])
        assert queue.flush(WAIT_S)
        assert quiet(queue.stats())
    assert recorder.items == [Red(0)]


@pytest.mark.parametrize("kind", [KeyError, IndexError, ZeroDivisionError])
def test_error_in_a_selector_is_the_producers(kind: type[Exception]) -> None:
    """What a selector raises reaches the producer as it is, and the queue goes on."""
    recorder = Recorder()

    def select(item: Red, count: int) -> int:
        if item.number:
            raise kind("mine")
        return 0

    with make_queue(consumer=recorder, selector=select) as queue:
        with pytest.raises(kind, match="mine"):
            queue.produce(Red(1))
        assert queue.produce(Red(0))
    assert recorder.items == [Red(0)]


def test_unhashable_key_is_the_producers_error() -> None:
    """A key that cannot be hashed raises to the producer."""
    selector = PartitionSelector.key_hash(lambda item: [item])  # type: ignore[arg-type,return-value]
    with (
        make_queue(consumer=Recorder(), selector=selector) as queue,
        pytest.raises(TypeError, match="unhashable"),
    ):
        queue.produce(Red())
