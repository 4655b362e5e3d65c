"""asyncio: callers that never block their loop, and backends that are coroutines."""

from __future__ import annotations

import asyncio
import gc
import threading
import weakref
from typing import Any

import pytest

from batchmill import WouldDeadlockError
from batchmill.batcher import BatchResult, DeadlineExceededError, MicroBatcher
from batchmill.pressure import QueueFullError
from tests.kit.batchers import Echo, Gate, answer, batching, held, levels, threads_of
from tests.kit.threads import WAIT_S


def test_asubmit_answers() -> None:
    """Many at once share batches."""
    echo = Echo()

    async def main() -> list[Any]:
        batcher: MicroBatcher[int] = MicroBatcher(echo)
        async with batcher:
            return list(await asyncio.gather(*(batcher.asubmit(n) for n in range(200))))

    results = asyncio.run(main())
    assert [result.value for result in results] == [(n, "done") for n in range(200)]
    assert len(echo.batches) < 200


def test_asubmit_never_blocks_the_loop() -> None:
    """While the backend hangs, and while it waits for room, the loop goes on."""

    async def main() -> None:
        with held(levels(), waiting=4) as (batcher, gate):
            waiting = asyncio.create_task(batcher.asubmit("patient", timeout=WAIT_S))
            for _ in range(100):
                await asyncio.sleep(0)
            assert batcher.stats().deciding == 1
            assert not waiting.done()
            gate.open()
            result = await asyncio.wait_for(waiting, WAIT_S)
            assert result.is_success

    asyncio.run(main())


def test_asubmit_gives_up_after_its_timeout() -> None:
    """Then the thresholds decide."""

    async def main() -> None:
        with held(levels(), waiting=4) as (batcher, _):
            result = await batcher.asubmit("patient", timeout=0.001)
            assert isinstance(result.error, QueueFullError)

    asyncio.run(main())


def test_asubmit_without_a_timeout_is_decided_about_at_once() -> None:
    """As submit is."""

    async def main() -> None:
        with held(levels(), waiting=4) as (batcher, _):
            assert isinstance((await batcher.asubmit("a")).error, QueueFullError)

    asyncio.run(main())


def test_a_task_cancelled_while_it_waits_for_room() -> None:
    """Nothing of it is left behind."""

    async def main() -> None:
        with held(levels(), waiting=4) as (batcher, _):
            waiting = asyncio.create_task(batcher.asubmit("a", timeout=WAIT_S))
            await asyncio.sleep(0)
            waiting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await waiting
            stats = batcher.stats()
            assert (stats.cancelled, stats.deciding) == (1, 0)
            assert not batcher._engine.intake._room_waiters

    asyncio.run(main())


def test_a_task_cancelled_before_its_item_is_sent() -> None:
    """The item is skipped and counted."""

    async def main() -> None:
        with held() as (batcher, gate):
            task = asyncio.create_task(batcher.asubmit("a"))
            await asyncio.sleep(0)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            gate.open()
            assert await batcher.aflush(WAIT_S)
            assert batcher.stats().cancelled == 1
        assert gate.items == ["first"]

    asyncio.run(main())


def test_a_deadline_on_a_loop() -> None:
    """Prompt, though the backend hangs."""

    async def main() -> None:
        with held() as (batcher, _):
            result = await batcher.asubmit("a", deadline_s=0.001)
            assert isinstance(result.error, DeadlineExceededError)

    asyncio.run(main())


async def _twice(batch: list[int]) -> list[int]:
    await asyncio.sleep(0)
    return [item * 2 for item in batch]


def test_an_async_backend_runs_on_the_loop_it_was_born_on() -> None:
    """So that it may use that loop's clients."""
    loops: list[Any] = []

    async def backend(batch: list[Any]) -> list[Any]:
        loops.append(asyncio.get_running_loop())
        return await _twice(batch)

    async def main() -> None:
        batcher: MicroBatcher[int] = MicroBatcher(backend)
        async with batcher:
            assert (await batcher.asubmit(21)).value == 42
        assert loops == [asyncio.get_running_loop()]

    asyncio.run(main())


def test_an_async_backend_has_a_loop_of_its_own_elsewhere() -> None:
    """On one thread, which ends with the batcher."""
    names: list[str] = []

    async def backend(batch: list[Any]) -> list[Any]:
        names.append(threading.current_thread().name)
        return await _twice(batch)

    with batching(backend, linger_ms=0) as batcher:
        assert [answer(batcher.submit(n)).value for n in (1, 2)] == [2, 4]
    assert names == ["batchmill-batcher-loop"] * 2
    assert not any(t.name == "batchmill-batcher-loop" for t in threading.enumerate())


def test_async_dispatch() -> None:
    """An object whose dispatch is a coroutine function."""

    class Store:
        async def dispatch(self, batch: list[Any]) -> BatchResult:
            return BatchResult(await _twice(batch))

    with batching(Store(), linger_ms=0) as batcher:
        assert answer(batcher.submit(4)).value == 8


def test_an_async_backend_that_raises() -> None:
    """Fails its batch, like any other."""

    async def backend(batch: list[Any]) -> list[Any]:
        raise OSError("down")

    with batching(backend, linger_ms=0) as batcher:
        assert isinstance(answer(batcher.submit(1)).error, OSError)


@pytest.mark.parametrize("call", ["flush", "close"])
def test_waiting_on_the_loop_of_the_backend_is_refused(call: str) -> None:
    """It would hang: the loop it blocks is the one that the backend needs."""

    async def main() -> None:
        batcher: MicroBatcher[int] = MicroBatcher(_twice)
        async with batcher:
            pending = asyncio.create_task(batcher.asubmit(1))
            await asyncio.sleep(0)
            with pytest.raises(WouldDeadlockError, match=f"a{call}"):
                getattr(batcher, call)()
            assert await batcher.aflush(WAIT_S)
            assert (await pending).value == 2

    asyncio.run(main())


def test_waiting_on_a_loop_is_allowed_where_the_backend_is_plain() -> None:
    """It blocks the loop, and no more than that."""

    async def main() -> None:
        with batching(Echo()) as batcher:
            future = batcher.submit(1)
            assert batcher.flush(WAIT_S)
            assert future.done()

    asyncio.run(main())


def _inside(call: Any) -> Any:
    """What ``call(batcher)`` gives inside an async backend with a loop of its own."""
    outcome: list[Any] = []

    async def backend(batch: list[Any]) -> list[Any]:
        try:
            outcome.append(await call(batcher))
        except WouldDeadlockError as error:
            outcome.append(type(error))
        return batch

    with batching(backend, linger_ms=0) as batcher:
        assert answer(batcher.submit(1)).is_success
    return outcome[0]


async def _flush(batcher: MicroBatcher[Any]) -> bool:
    return batcher.flush()


async def _close(batcher: MicroBatcher[Any]) -> bool:
    return batcher.close()


async def _patient(batcher: MicroBatcher[Any]) -> Any:
    return batcher.submit("again", timeout=WAIT_S)


@pytest.mark.parametrize(
    ("call", "outcome"),
    [
        (_flush, WouldDeadlockError),
        (lambda batcher: batcher.aflush(), WouldDeadlockError),
        (lambda batcher: asyncio.to_thread(batcher.flush), WouldDeadlockError),
        (_patient, WouldDeadlockError),
        (lambda batcher: batcher.asubmit("again", timeout=1), WouldDeadlockError),
        (_close, False),
        (lambda batcher: batcher.aclose(), False),
    ],
    ids=["flush", "aflush", "flush in a thread", "submit", "asubmit", "close", "aclose"],
)
def test_inside_an_async_backend(call: Any, outcome: Any) -> None:
    """What would wait for that very backend is refused; close happens when it returns."""
    assert _inside(call) == outcome


def test_a_task_that_the_backend_left_behind_is_not_inside() -> None:
    """Once the call is over it may flush."""
    left: list[asyncio.Task[bool]] = []
    flushed = threading.Event()

    async def backend(batch: list[Any]) -> list[Any]:
        async def later() -> bool:
            await asyncio.to_thread(answered.wait, WAIT_S)
            done = await batcher.aflush(WAIT_S)
            flushed.set()
            return done

        left.append(asyncio.get_running_loop().create_task(later()))
        return batch

    answered = threading.Event()
    with batching(backend, linger_ms=0) as batcher:
        answer(batcher.submit(1))
        answered.set()
        assert flushed.wait(WAIT_S)


def test_a_loop_that_is_gone_is_forgotten() -> None:
    """A batcher that outlives many event loops keeps none of them."""
    with batching(Echo(), linger_ms=0) as batcher:
        loops: list[Any] = []

        async def main() -> None:
            loops.append(weakref.ref(asyncio.get_running_loop()))
            assert (await batcher.asubmit(1)).is_success

        for _ in range(3):
            asyncio.run(main())
        gc.collect()
        assert [loop() for loop in loops] == [None] * 3
        assert len(batcher._mailboxes) == 0


def test_answers_to_a_closed_loop_are_dropped() -> None:
    """The worker does not mind, and the next caller is served."""
    gate = Gate()

    async def main() -> None:
        task = asyncio.create_task(batcher.asubmit("a"))
        await asyncio.sleep(0)
        await asyncio.to_thread(gate.wait_entered)
        task.cancel()

    with batching(gate, linger_ms=0) as batcher:
        asyncio.run(main())
        gate.open()
        assert answer(batcher.submit("b")).is_success


@pytest.mark.filterwarnings("error")
def test_a_backend_whose_loop_is_closed_fails_its_items() -> None:
    """And no coroutine is left unawaited."""

    async def make() -> MicroBatcher[Any]:
        return MicroBatcher(_twice)

    batcher = asyncio.run(make())
    assert isinstance(answer(batcher.submit(1)).error, RuntimeError)
    assert batcher.close(WAIT_S)
    gc.collect()


def test_aclose_drains() -> None:
    """Everything accepted is answered, and the threads are gone."""

    async def main() -> None:
        batcher: MicroBatcher[Any] = MicroBatcher(_twice, name="adrain")
        tasks = [asyncio.create_task(batcher.asubmit(n)) for n in range(10)]
        await asyncio.sleep(0)
        assert await batcher.aclose(WAIT_S)
        assert [(await task).value for task in tasks] == [n * 2 for n in range(10)]
        assert threads_of("adrain") == []

    asyncio.run(main())


def test_aflush_gives_up_after_its_timeout() -> None:
    """False, and the loop was free meanwhile."""

    async def main() -> None:
        with held() as (batcher, _):
            assert not await batcher.aflush(0)

    asyncio.run(main())


def test_two_loops_share_a_batcher() -> None:
    """Each gets its own answers, on its own thread."""
    with batching(Echo(), linger_ms=1) as batcher:
        wrong: list[Any] = []

        async def main(start: int) -> None:
            results = await asyncio.gather(*(batcher.asubmit(n) for n in range(start, start + 50)))
            wrong.extend(r for n, r in enumerate(results, start) if r.value != (n, "done"))

        threads = [threading.Thread(target=asyncio.run, args=(main(n),)) for n in (0, 1000)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(WAIT_S)
    assert wrong == []


def test_asubmit_inside_its_own_backend_is_refused() -> None:
    """With one batch in flight it would wait for the very batch it is called from."""

    async def run() -> object:
        async def backend(batch: list[int]) -> list[str]:
            try:
                await batcher.asubmit(1)
            except WouldDeadlockError:
                return ["refused"] * len(batch)
            return ["answered"] * len(batch)

        batcher: MicroBatcher[int] = MicroBatcher(backend)
        async with batcher:
            return (await batcher.asubmit(0)).value

    assert asyncio.run(run()) == "refused"
