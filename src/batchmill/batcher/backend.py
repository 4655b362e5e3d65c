"""Calling the user's backend: sync or async, retried, split and broken off as configured."""

from __future__ import annotations

import asyncio
import inspect
import threading
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Protocol

from batchmill.batcher import inside
from batchmill.batcher.clock import Clock
from batchmill.batcher.failure import CircuitBreaker
from batchmill.batcher.result import BackendContractError, BatchResult, CircuitOpenError
from batchmill.batcher.settings import BatcherSettings
from batchmill.errors import ConfigError
from batchmill.waiters import ThreadWaiter


class Backend(Protocol):
    """Takes batches; ``dispatch`` may be a coroutine function."""

    def dispatch(self, batch: list[Any], /) -> BatchResult | Awaitable[BatchResult]:
        """One result per item, in order; an exception instance marks its item failed."""
        ...


class BackendCaller:
    """Hands batches to a backend and answers with one result per item, never raising.

    Runs on the worker threads of the batcher. Coroutines run on ``loop`` where one is given, else
    on a loop of the caller's own, and the worker waits for them.
    """

    def __init__(
        self,
        backend: Any,
        config: BatcherSettings,
        clock: Clock,
        loop: asyncio.AbstractEventLoop | None,
    ) -> None:
        call = getattr(backend, "dispatch", None)
        if not callable(call):
            call = backend
        if not callable(call):
            raise ConfigError(
                "backend", backend, "a callable from list to list, or an object with dispatch()"
            )
        self._call: Callable[[list[Any]], Any] = call
        self._config = config
        self._clock = clock
        self._loops = LoopThread(loop)
        self._is_async = inspect.iscoroutinefunction(call)
        self.reset()

    def reset(self) -> None:
        """Free locks and zero counters: at the start, and in a forked child."""
        self._lock = threading.Lock()
        self._loops.reset()
        breaker = self._config.breaker
        self._breaker = CircuitBreaker(breaker) if breaker is not None else None
        self.calls = 0
        self.retries = 0

    @property
    def breaker_opened(self) -> int:
        return self._breaker.opened if self._breaker is not None else 0

    @property
    def loop(self) -> asyncio.AbstractEventLoop | None:
        """The loop it was given, if the backend's coroutines run there."""
        return self._loops.given if self._is_async else None

    def deliver(self, items: list[Any]) -> list[Any]:
        """One result per item: what the backend answered, or the exception that befell it."""
        bisect = self._config.on_batch_failure
        budget = [bisect.max_calls - 1 if bisect is not None else 0]
        return self._deliver(items, budget, whole=True)

    def close(self) -> None:
        self._loops.close()

    def _deliver(self, items: list[Any], budget: list[int], whole: bool) -> list[Any]:
        results, error = self._try(items, whole)
        if error is None:
            return list(results)
        if len(items) < 2 or isinstance(error, _HOPELESS) or budget[0] < 2:
            return [error] * len(items)
        budget[0] -= 2
        middle = len(items) // 2
        halves = (items[:middle], items[middle:])
        return [result for half in halves for result in self._deliver(half, budget, whole=False)]

    def _try(self, items: list[Any], whole: bool) -> tuple[Sequence[Any], BaseException | None]:
        """Call, and call again as the retry policy says; results, or the last error."""
        retry = self._config.retry
        attempt = 1
        error: BaseException | None = None
        while True:
            failed = error
            results, error = self._once(items, whole)
            if isinstance(error, CircuitOpenError):
                error.__cause__ = failed
            if error is None or retry is None or isinstance(error, _HOPELESS):
                return results, error
            delay_ms = retry.delay_ms(attempt, error)
            if delay_ms is None:
                return results, error
            with self._lock:
                self.retries += 1
            self._clock.wait(ThreadWaiter(), self._clock.now() + delay_ms / 1000)
            attempt += 1

    def _once(self, items: list[Any], whole: bool) -> tuple[Sequence[Any], BaseException | None]:
        with self._lock:
            if self._breaker is not None and whole:
                blocked_s = self._breaker.blocked_for(self._clock.now())
                if blocked_s is not None:
                    return (), CircuitOpenError(blocked_s)
            self.calls += 1
        results: Sequence[Any] = ()
        error: BaseException | None = None
        try:
            answer = self._call(list(items))
            if inspect.isawaitable(answer):
                self._is_async = True
                answer = self._loops.run(answer)
            results = _checked(answer, len(items))
        except BaseException as raised:  # noqa: BLE001 - it becomes the items' result
            error = raised
        # A part of a batch that failed already is no failure of its own: one poison item would
        # open the circuit by itself. That a part succeeds does say that the backend is well.
        if self._breaker is not None and (whole or error is None):
            with self._lock:
                self._breaker.record(error is None, self._clock.now())
        return results, error


# Another try, or a smaller batch, would not help.
_HOPELESS = (CircuitOpenError, BackendContractError)


def _checked(answer: Any, expected: int) -> Sequence[Any]:
    results = answer.results if isinstance(answer, BatchResult) else answer
    if not isinstance(results, Sequence) or isinstance(results, (str, bytes)):
        raise BackendContractError(expected, f"a {type(answer).__name__}")
    if len(results) != expected:
        raise BackendContractError(expected, f"{len(results)} results")
    return results


class LoopThread:
    """Runs coroutines for threads: on a loop that was given, or on one with a thread of its own."""

    def __init__(self, given: asyncio.AbstractEventLoop | None) -> None:
        self.given = given
        self.reset()

    def reset(self) -> None:
        self._lock = threading.Lock()
        self._own: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None

    def run(self, awaitable: Awaitable[Any]) -> Any:
        """The result of ``awaitable``; the calling thread waits."""

        owner = inside.current()

        async def finish() -> Any:
            visit = inside.enter(owner)
            try:
                return await awaitable
            finally:
                visit.owner = None

        loop = self.given or self._start()
        running = finish()
        try:
            future = asyncio.run_coroutine_threadsafe(running, loop)
        except RuntimeError:  # the loop is closed
            running.close()
            if inspect.iscoroutine(awaitable):
                awaitable.close()
            raise
        return future.result()

    def _start(self) -> asyncio.AbstractEventLoop:
        with self._lock:
            if self._own is None:
                self._own = asyncio.new_event_loop()
                self._thread = threading.Thread(
                    target=_run_loop, args=(self._own,), name="batchmill-batcher-loop", daemon=True
                )
                self._thread.start()
            return self._own

    def close(self) -> None:
        with self._lock:
            loop, thread = self._own, self._thread
            self._own = self._thread = None
        if loop is not None and thread is not None:
            loop.call_soon_threadsafe(loop.stop)
            if thread is not threading.current_thread():
                thread.join()


def _run_loop(loop: asyncio.AbstractEventLoop) -> None:
    asyncio.set_event_loop(loop)
    try:
        loop.run_forever()
    finally:
        loop.run_until_complete(loop.shutdown_asyncgens())
        loop.close()
