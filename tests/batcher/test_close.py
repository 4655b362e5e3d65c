"""Closing: nothing is lost, nobody hangs, wherever it is called from."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from batchmill import WouldDeadlockError
from batchmill.batcher import BatcherClosedError, BatcherSettings, MicroBatcher
from batchmill.pressure import QueueDecision
from tests.kit.batchers import (
    FOREVER_MS,
    Echo,
    Gate,
    answer,
    assert_balanced,
    batching,
    held,
    levels,
    threads_of,
)
from tests.kit.threads import WAIT_S, spawn, until


def test_close_answers_everything() -> None:
    """What was accepted is sent; the threads are gone."""
    batcher: MicroBatcher[Any] = MicroBatcher(Echo(), name="ending")
    futures = batcher.submit_many(range(500))
    assert batcher.close(WAIT_S)
    assert all(future.done() for future in futures)
    assert batcher.stats().succeeded == 500
    assert threads_of("ending") == []
    assert batcher.closed


def test_after_close_items_are_rejected() -> None:
    """Answered, not raised; counted as rejected, and not sent."""
    with batching(Echo()) as batcher:
        batcher.close()
        assert isinstance(answer(batcher.submit("late")).error, BatcherClosedError)
        assert batcher.stats().rejected == 1


def test_closing_twice_is_harmless() -> None:
    """And so is closing what never had an item."""
    batcher: MicroBatcher[Any] = MicroBatcher(Echo())
    assert batcher.close()
    assert batcher.close()
    assert batcher.flush()


def test_closing_from_several_threads() -> None:
    """All of them come back when it is over."""
    with (
        held(waiting=3) as (batcher, gate),
        spawn(batcher.close) as one,
        spawn(batcher.close) as two,
    ):
        until(lambda: len(batcher._engine._outcomes.waiters) == 2, "both wait")
        gate.open()
        assert one.result(WAIT_S)
        assert two.result(WAIT_S)
        assert batcher.queue_depth == 0


def test_close_gives_up_after_its_timeout() -> None:
    """What was not sent is rejected; what is with the backend is answered when it returns."""
    gate = Gate()
    with batching(gate, batch_size=1) as batcher:
        sent = batcher.submit("sent")
        gate.wait_entered()
        unsent = batcher.submit("unsent")
        assert not batcher.close(timeout=0)
        error = answer(unsent).error
        assert isinstance(error, BatcherClosedError)
        assert "ran out of time" in str(error)
        assert not sent.done()
        assert_balanced(batcher.stats())
        gate.open()
        assert answer(sent).is_success
        assert batcher.close(WAIT_S)
    assert gate.items == ["sent"]


def test_an_async_backend_left_behind_by_close_tidies_up() -> None:
    """Its loop's thread ends when the backend does, though nobody waits any more."""
    entered, go_on = threading.Event(), threading.Event()

    async def backend(batch: list[Any]) -> list[Any]:
        entered.set()
        go_on.wait(WAIT_S)
        return batch

    batcher: MicroBatcher[Any] = MicroBatcher(backend)
    future = batcher.submit(1)
    assert entered.wait(WAIT_S)
    assert not batcher.close(timeout=0)
    go_on.set()
    assert answer(future).is_success


def test_close_inside_the_backend() -> None:
    """False at once; the rest is sent when the backend returns, and the threads end."""
    answers: list[bool] = []

    def backend(batch: list[Any]) -> list[Any]:
        answers.append(batcher.close())
        return batch

    batcher: MicroBatcher[Any] = MicroBatcher(backend, name="suicidal")
    futures = batcher.submit_many(range(150))
    for future in futures:
        answer(future)
    for thread in threads_of("suicidal"):
        thread.join(WAIT_S)
    assert threads_of("suicidal") == []
    assert set(answers) == {False}
    assert batcher.close(WAIT_S)


def test_close_inside_the_backend_ends_the_listeners_too() -> None:
    """And the timer: nobody else would."""
    heard: list[object] = []

    def backend(batch: list[Any]) -> list[Any]:
        batcher.close()
        return batch

    thresholds = levels(
        listeners=(heard.append,), critical_handler=lambda _: QueueDecision.retry(3_600_000)
    )
    batcher: MicroBatcher[Any] = MicroBatcher(
        backend, BatcherSettings(linger_ms=FOREVER_MS), thresholds, name="inside"
    )
    futures = batcher.submit_many(range(5))
    assert batcher.flush(WAIT_S)
    assert isinstance(answer(futures[4]).error, BatcherClosedError)
    for thread in threads_of("inside"):
        thread.join(WAIT_S)


def test_flush_inside_the_backend_is_refused() -> None:
    """It would wait for itself."""
    caught: list[type] = []

    def backend(batch: list[Any]) -> list[Any]:
        try:
            batcher.flush()
        except WouldDeadlockError as error:
            caught.append(type(error))
        return batch

    with batching(backend, linger_ms=0) as batcher:
        answer(batcher.submit(1))
    assert caught == [WouldDeadlockError]


def test_a_backend_may_flush_another_batcher() -> None:
    """Only its own is refused."""
    with batching(Echo(), linger_ms=FOREVER_MS) as other:

        def backend(batch: list[Any]) -> list[Any]:
            other.submit_many(batch)
            return [other.flush(WAIT_S)] * len(batch)

        with batching(backend, linger_ms=0) as batcher:
            assert answer(batcher.submit(1)).value is True


def test_close_in_a_callback_of_an_expired_item() -> None:
    """On the timer's thread; it waits for the rest as anywhere else."""
    closed: list[bool] = []
    done = threading.Event()

    def callback(_: object) -> None:
        closed.append(batcher.close(WAIT_S))
        done.set()

    with batching(Echo(), linger_ms=FOREVER_MS) as batcher:
        batcher.submit("rest")
        hasty = batcher.submit("hasty", deadline_s=0.01)
        hasty.add_done_callback(callback)
        assert done.wait(WAIT_S)
    assert closed == [True]


def test_close_wakes_those_who_wait_for_room() -> None:
    """They are rejected at once, not after their timeout."""
    with (
        held(levels(), waiting=4) as (batcher, gate),
        spawn(lambda: batcher.submit("patient", timeout=3600)) as submitted,
    ):
        until(lambda: batcher._engine.intake._room_waiters, "it waits")
        with spawn(batcher.close) as closed:
            assert isinstance(answer(submitted.result(WAIT_S)).error, BatcherClosedError)
            gate.open()
            assert closed.result(WAIT_S)


def test_leaving_the_block_closes() -> None:
    """Also when it is left by an exception."""
    batcher: MicroBatcher[Any] = MicroBatcher(Echo())

    def leave() -> None:
        with batcher:
            batcher.submit(1)
            raise LookupError

    with pytest.raises(LookupError):
        leave()
    assert batcher.closed
    assert batcher.stats().succeeded == 1


def test_no_thread_to_be_had(monkeypatch: pytest.MonkeyPatch) -> None:
    """The submitter is told, nothing is kept or counted, and the next one is served."""

    def start(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with batching(Echo(), linger_ms=0, key=lambda item: item) as batcher:
        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", start)
            with pytest.raises(RuntimeError, match="can't start"):
                batcher.submit("a")
        assert batcher.stats().submitted == 0
        assert answer(batcher.submit("a")).is_success


def test_no_second_thread_to_be_had(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The first one goes on alone."""

    def start(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    gate = Gate()
    with batching(gate, batch_size=1, max_in_flight=2) as batcher:
        batcher.submit("a")
        gate.wait_entered()
        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", start)
            future = batcher.submit("b")
        gate.open()
        assert answer(future).is_success
    assert "continuing with fewer workers" in caplog.text
