"""The end of a queue as its handlers see it: the last batch, and then one last call."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from batchmill import (
    PartitionPolicy,
    ThreadPolicy,
)
from batchmill.queue.core import QueueCore
from tests.kit.queues import Green, Recorder, Red, make_queue, reds
from tests.kit.threads import WAIT_S, Gate
from tests.queue.kit import Idler


class Ender(Idler):
    """A handler with on_shutdown as well."""

    def on_shutdown(self) -> None:
        self.events.append("shutdown")


def test_last_on_idle_comes_after_the_last_batch() -> None:
    """At shutdown a handler is told one last time, after the final drain."""
    gate = Gate()

    class Handler(Idler):
        def consume(self, batch: list[Any]) -> None:
            gate.consume(batch)
            super().consume(batch)

    handler = Handler()
    with make_queue(min_idle_ms=60_000, max_idle_ms=60_000, max_batch=1) as queue:
        queue.add_handler(Red, handler)
        queue.produce_many(reds(3))
        gate.wait_entered()
        queue._core.begin_close()
        gate.open()
        assert queue.shutdown()
    assert handler.events[-4:] == ["consume", "consume", "consume", "idle"]


def test_on_shutdown_takes_the_place_of_the_last_on_idle() -> None:
    """A handler with on_shutdown() gets that at the end, once, and nothing after it."""
    handler = Ender()
    with make_queue() as queue:
        queue.add_handler(Red, handler)
        handler.wait_idle()
        queue.produce(Red())
        queue.shutdown()
    assert handler.events.count("shutdown") == 1
    assert handler.events[-1] == "shutdown"


def test_on_shutdown_comes_after_the_last_batch() -> None:
    """on_shutdown() finds all the handler's items consumed."""
    seen: list[int] = []

    class Handler(Recorder):
        def on_shutdown(self) -> None:
            seen.append(len(self.items))

    with make_queue(max_batch=10) as queue:
        queue.add_handler(Red, Handler())
        queue.produce_many(reds(500))
    assert seen == [500]


def test_on_shutdown_comes_when_nothing_ever_did() -> None:
    """Also a handler that never got an item hears of the end."""
    handler = Ender()
    with make_queue() as queue:
        queue.add_handler(Red, handler)
    assert handler.events[-1] == "shutdown"


def test_on_shutdown_of_a_direct_consumer() -> None:
    """A direct consumer hears of the end once, on however many threads it was called."""
    consumer = Ender()
    with make_queue(
        consumer=consumer, threads=ThreadPolicy.fixed(3), partitions=PartitionPolicy.fixed(3)
    ):
        pass
    assert consumer.events.count("shutdown") == 1


def test_on_shutdown_of_a_handler_of_two_classes_comes_once() -> None:
    """A handler of two classes on two threads ends once, not twice."""
    handler = Ender()
    with make_queue(threads=ThreadPolicy.fixed(2), partitions=PartitionPolicy.fixed(2)) as queue:
        queue.add_handler(Red, handler)
        queue.add_handler(Green, handler)
    assert handler.events.count("shutdown") == 1


def test_on_shutdown_comes_when_all_threads_are_done(monkeypatch: pytest.MonkeyPatch) -> None:
    """No handler hears of the end before every thread of the queue has drained what it owns."""
    signed_off = threading.Event()
    task_finished = QueueCore.task_finished

    def watched(core: QueueCore) -> None:
        task_finished(core)
        signed_off.set()

    monkeypatch.setattr(QueueCore, "task_finished", watched)
    gate, ender = Gate(), Ender()
    with make_queue(threads=ThreadPolicy.fixed(2), partitions=PartitionPolicy.fixed(2)) as queue:
        queue.add_handler(Red, ender)
        queue.add_handler(Green, gate)
        queue.produce(Green())
        gate.wait_entered()
        queue._core.begin_close()
        assert signed_off.wait(WAIT_S)  # the other thread had nothing left to do
        assert "shutdown" not in ender.events
        gate.open()
        assert queue.shutdown()
    assert ender.events[-1] == "shutdown"


def test_removed_handler_hears_its_end_when_it_is_removed() -> None:
    """A handler that loses its last class gets its last call then, and not once more at the end."""
    over = threading.Event()

    class Handler(Ender):
        def on_shutdown(self) -> None:
            super().on_shutdown()
            over.set()

    handler = Handler()
    with make_queue() as queue:
        queue.add_handler(Red, handler)
        queue.remove_handler(Red)
        assert over.wait(WAIT_S)
    assert handler.events.count("shutdown") == 1


def test_handler_that_keeps_a_class_does_not_hear_its_end() -> None:
    """A handler of two classes that loses one goes on."""
    handler = Ender()
    with make_queue() as queue:
        queue.add_handler(Red, handler)
        queue.add_handler(Green, handler)
        queue.remove_handler(Red)
        handler.wait_idle_from_now()
        assert "shutdown" not in handler.events


def test_second_shutdown_tells_nobody_again() -> None:
    """Shutting down twice is shutting down once."""
    handler = Ender()
    with make_queue() as queue:
        queue.add_handler(Red, handler)
        queue.shutdown()
        queue.shutdown()
    assert handler.events.count("shutdown") == 1


def test_error_in_on_shutdown_does_not_stop_the_end() -> None:
    """What on_shutdown() raises is reported, the others are told, and the shutdown succeeds."""
    reported: list[BaseException] = []

    class Failing(Recorder):
        def on_shutdown(self) -> None:
            raise ValueError("not now")

    other = Ender()
    with make_queue(error_handler=lambda batch, error: reported.append(error)) as queue:
        queue.add_handler(Red, Failing())
        queue.add_handler(Green, other)
        assert queue.shutdown()
    assert [str(error) for error in reported] == ["not now"]
    assert other.events[-1] == "shutdown"


def test_produce_in_on_shutdown_is_refused() -> None:
    """What a handler produces at the very end, to its own queue, is refused: nobody would come."""
    answers: list[bool] = []

    class Late(Recorder):
        def on_shutdown(self) -> None:
            answers.append(queue.produce(Red()))

    with make_queue() as queue:
        queue.add_handler(Red, Late())
    assert answers == [False]
