"""Calling the user's backend: sync or async, retried, split and broken off as configured."""

from __future__ import annotations

import asyncio
import inspect
import threading
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Protocol

from batchmill.batcher.result import BackendContractError, BatchResult, CircuitOpenError
from batchmill.batcher.settings import AdaptiveConcurrency, BatcherSettings, BreakerPolicy
from batchmill.batcher.threads import Clock, current_pool, enter_pool
from batchmill.errors import ConfigError
from batchmill.waiters import ThreadWaiter
from batchmill.wording import count_of

_FINAL = (CircuitOpenError, BackendContractError)
"""Errors that neither another try nor a smaller batch would mend."""


class Backend(Protocol):
    """Takes batches; ``dispatch`` may be a coroutine function."""

    def dispatch(self, batch: list[Any], /) -> BatchResult | Awaitable[BatchResult]:
        """One result per item, in order; an exception instance marks its item failed."""
        ...


class BackendCaller:
    """Calls a backend with a batch and returns one result per item; never raises.

    Runs on the worker threads of the batcher. Coroutines run on ``loop`` if one is given, else on
    a loop with a thread of its own, and the worker waits for them.
    """

    def __init__(
        self,
        backend: Any,
        settings: BatcherSettings,
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
        self._settings = settings
        self._clock = clock
        self._loops = LoopThread(loop)
        self._is_async = inspect.iscoroutinefunction(call)
        self.reset()

    def reset(self) -> None:
        """Free locks and zero counters: at the start, and in a forked child."""
        self._lock = threading.Lock()
        self._loops.reset()
        breaker = self._settings.breaker
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

    def close(self) -> None:
        self._loops.close()

    def deliver(self, items: list[Any]) -> list[Any]:
        """One result per item: what the backend returned for it, or an exception.

        A batch that fails is split in halves, and those again, as ``on_batch_failure`` says.
        """
        bisect = self._settings.on_batch_failure
        calls_left = bisect.max_calls - 1 if bisect is not None else 0
        results: list[Any] = []
        parts = [items]  # a stack: the first part is at its end
        while parts:
            part = parts.pop()
            answers, error = self._try(part, whole=part is items)
            if error is None:
                results.extend(answers)
            elif len(part) < 2 or isinstance(error, _FINAL) or calls_left < 2:
                results.extend([error] * len(part))
            else:
                calls_left -= 2
                middle = len(part) // 2
                parts += (part[middle:], part[:middle])
        return results

    def _try(self, items: list[Any], whole: bool) -> tuple[Sequence[Any], BaseException | None]:
        """Call the backend, for a whole batch again as the retry policy says; results, or error.

        A part of a batch is sent once: its batch has failed as often as the policy allows, so the
        cause is taken to be one of its items, which is found by splitting, not by waiting.
        """
        retry = self._settings.retry if whole else None
        attempt = 1
        error: BaseException | None = None
        while True:
            previous = error
            results, error = self._once(items, whole)
            if isinstance(error, CircuitOpenError):
                error.__cause__ = previous
            if error is None or retry is None or isinstance(error, _FINAL):
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
        # The failure of a part is no new one: its batch has failed already, and one poison item
        # would open the circuit alone. A part that succeeds does show that the backend works.
        if self._breaker is not None and (whole or error is None):
            with self._lock:
                self._breaker.record(error is None, self._clock.now())
        return results, error


def _checked(answer: Any, expected: int) -> Sequence[Any]:
    results = answer.results if isinstance(answer, BatchResult) else answer
    if not isinstance(results, Sequence) or isinstance(results, (str, bytes)):
        raise BackendContractError(expected, f"a {type(answer).__name__}")
    if len(results) != expected:
        raise BackendContractError(expected, count_of(len(results), "result"))
    return results


class CircuitBreaker:
    """Closed: calls go through. Open: they do not. Half open: one goes through, and decides.

    Its user holds a lock.
    """

    __slots__ = ("_failures", "_open_until", "_policy", "_trial", "opened")

    def __init__(self, policy: BreakerPolicy) -> None:
        self._policy = policy
        self._failures = 0
        self._open_until: float | None = None
        self._trial = False
        self.opened = 0
        """How often the circuit has opened."""

    def blocked_for(self, now: float) -> float | None:
        """None when a call may go ahead (a trial, if it was open); else seconds until one may."""
        if self._open_until is None:
            return None
        if now < self._open_until:
            return self._open_until - now
        if self._trial:
            return self._policy.reset_after_s
        self._trial = True
        return None

    def record(self, ok: bool, now: float) -> None:
        """Learn how a call that went through ended."""
        was_trial, self._trial = self._trial, False
        if ok:
            self._failures = 0
            self._open_until = None
            return
        self._failures += 1
        if was_trial or self._failures >= self._policy.failures:
            if self._open_until is None or was_trial:
                self.opened += 1
            self._open_until = now + self._policy.reset_after_s


class InFlightLimit:
    """How many batches may be in flight now: additive increase, multiplicative decrease.

    Its user holds a lock.
    """

    __slots__ = ("_baseline_s", "_exact", "_least", "_most", "_policy")

    def __init__(self, most: int, policy: AdaptiveConcurrency | None) -> None:
        self._policy = policy
        self._most = float(most)
        self._least = float(min(policy.least, most)) if policy is not None else self._most
        self._exact = self._least
        self._baseline_s: float | None = None

    @property
    def current(self) -> int:
        """Batches that may be in flight now."""
        return max(1, int(self._exact))

    def record(self, took_s: float, ok: bool, in_flight: int) -> None:
        """Learn from a batch that took ``took_s`` while ``in_flight`` were out, itself included."""
        policy = self._policy
        if policy is None:
            return
        baseline_s = self._baseline_s
        if not ok or (baseline_s is not None and took_s > baseline_s * policy.tolerance):
            self._exact = max(self._least, self._exact * policy.back_off)
        elif in_flight >= self.current:  # only a limit that was used up says anything
            self._exact = min(self._most, self._exact + 1.0 / self.current)
        if ok:
            # Follows quicker answers at once and slower ones slowly, so that a backend that has
            # become slower for good does not look overloaded for ever.
            if baseline_s is None or took_s < baseline_s:
                self._baseline_s = took_s
            else:
                self._baseline_s = baseline_s + (took_s - baseline_s) * 0.05


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
        pool = current_pool()

        async def finish() -> Any:
            context = enter_pool(pool)
            try:
                return await awaitable
            finally:
                context.pool = None

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
