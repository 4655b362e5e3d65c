"""MicroBatcher, the class that applications use."""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Awaitable, Callable, Iterable, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, Generic, Self, TypeAlias, cast, overload

from batchmill import lifecycle
from batchmill.batcher.backend import Backend, BackendCaller
from batchmill.batcher.engine import Engine
from batchmill.batcher.entries import LoopMailbox, TaskEntry, ThreadEntry
from batchmill.batcher.result import BatchResult, ItemResult
from batchmill.batcher.settings import BatcherSettings
from batchmill.batcher.stats import BatcherStats
from batchmill.batcher.threads import Clock, SystemClock, current_pool
from batchmill.errors import ConfigError, WouldDeadlockError
from batchmill.pressure import (
    QueueThresholdListener,
    QueueThresholdManager,
    QueueThresholdSettings,
    ThresholdListener,
)
from batchmill.waiters import TaskWaiter

if TYPE_CHECKING:
    # Of every type checker's own; where nothing tells them, they are Any.
    from typing_extensions import TypeVar

    T = TypeVar("T", default=Any)
    R = TypeVar("R", default=Any)
else:
    from typing import TypeVar

    T = TypeVar("T")
    R = TypeVar("R")

BackendLike: TypeAlias = (
    Backend
    | Callable[[list[T]], Sequence[R] | BatchResult]
    | Callable[[list[T]], Awaitable[Sequence[R] | BatchResult]]
)


class MicroBatcher(Generic[T, R]):
    """Collects single items into batches for a backend, and answers each item by itself.

    Any thread and any event loop may submit. Every item is answered exactly once, with an
    :class:`ItemResult`: success, failure or dropped. Without ``thresholds`` nothing is refused
    and nothing bounds what waits; with them, they decide what is accepted under pressure.

    ``T`` is the type of the items, ``R`` that of the backend's results; a type checker takes both
    from the backend.

    >>> with MicroBatcher(lambda batch: [x * 2 for x in batch]) as batcher:
    ...     batcher.submit(21).result().value
    42
    """

    if not TYPE_CHECKING:  # Python 3.11 knows no defaults: MicroBatcher[str] has a second type, Any

        def __class_getitem__(cls, types):
            return super().__class_getitem__(types if isinstance(types, tuple) else (types, Any))

    @overload
    def __init__(
        self,
        backend: Callable[[list[T]], Sequence[R]],
        config: BatcherSettings | None = None,
        thresholds: QueueThresholdSettings | None = None,
        *,
        name: str = "batcher",
        clock: Clock | None = None,
    ) -> None: ...

    @overload
    def __init__(
        self,
        backend: Callable[[list[T]], Awaitable[Sequence[R]]],
        config: BatcherSettings | None = None,
        thresholds: QueueThresholdSettings | None = None,
        *,
        name: str = "batcher",
        clock: Clock | None = None,
    ) -> None: ...

    @overload
    def __init__(
        self,
        backend: Backend | Callable[[list[T]], BatchResult | Awaitable[BatchResult]],
        config: BatcherSettings | None = None,
        thresholds: QueueThresholdSettings | None = None,
        *,
        name: str = "batcher",
        clock: Clock | None = None,
    ) -> None: ...

    def __init__(
        self,
        backend: Any,
        config: BatcherSettings | None = None,
        thresholds: QueueThresholdSettings | None = None,
        *,
        name: str = "batcher",
        clock: Clock | None = None,
    ) -> None:
        config = config or BatcherSettings()
        clock = clock or SystemClock()
        # An async backend runs on the loop that the batcher was made on, if there is one.
        caller = BackendCaller(backend, config, clock, asyncio._get_running_loop())
        self._engine = Engine(name, config, thresholds, caller, clock)
        self._mailboxes: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, LoopMailbox] = (
            weakref.WeakKeyDictionary()
        )
        lifecycle.track(self._engine)

    @classmethod
    def with_thresholds(
        cls, backend: BackendLike[T, R], config: BatcherSettings, thresholds: QueueThresholdSettings
    ) -> MicroBatcher[T, R]:
        """A batcher that handles pressure; the same as giving ``thresholds`` to the class."""
        made: Any = cls(cast("Any", backend), config, thresholds)
        return cast("MicroBatcher[T, R]", made)

    @property
    def name(self) -> str:
        """The name in logs and on threads."""
        return self._engine.name

    @property
    def queue_depth(self) -> int:
        """Items waiting for a batch; those with the backend are not counted."""
        return self._engine.depth

    @property
    def closed(self) -> bool:
        """Whether it accepts no more items."""
        return self._engine.closing

    def submit(
        self, item: T, timeout: float | None = None, *, deadline_s: float | None = None
    ) -> Future[ItemResult[T, R]]:
        """Submit one item; the future's result is an ItemResult, and it never raises.

        Does not wait, except with a ``timeout``: up to that many seconds for the depth to fall
        below the critical threshold; then the thresholds decide as usual. An item that has not been
        sent ``deadline_s`` seconds from now fails with DeadlineExceededError. Cancelling the future
        before the item is sent takes the item back.
        """
        engine = self._engine
        now = engine.clock.now()
        entry = ThreadEntry(item, now, _deadline(now, deadline_s))
        if timeout is None:
            engine.submit(entry)
        else:
            self._refuse_self_wait("submit() with a timeout")
            engine.submit_patiently(entry, now + timeout)
        return entry.future

    def submit_many(
        self, items: Iterable[T], timeout: float | None = None, *, deadline_s: float | None = None
    ) -> list[Future[ItemResult[T, R]]]:
        """Submit several items; a future for each, in order. ``timeout`` is for each."""
        return [self.submit(item, timeout, deadline_s=deadline_s) for item in items]

    async def asubmit(
        self, item: T, timeout: float | None = None, *, deadline_s: float | None = None
    ) -> ItemResult[T, R]:
        """Like :meth:`submit`, and wait for the answer; the event loop is never blocked."""
        engine = self._engine
        loop = asyncio.get_running_loop()
        mailbox = self._mailboxes.get(loop)
        if mailbox is None:
            mailbox = self._mailboxes[loop] = LoopMailbox(loop)
        self._refuse_self_wait("asubmit()")  # it waits for the answer
        now = engine.clock.now()
        entry = TaskEntry(item, now, _deadline(now, deadline_s), mailbox, loop.create_future())
        done = engine.submit(entry, patient=timeout is not None)
        if timeout is not None and not done:
            until = loop.time() + timeout
            try:
                while not done:
                    done = engine.intake.offer(entry, await self._await_room(until))
            except BaseException:  # the task is cancelled: the item was not accepted
                engine.intake.withdraw(entry)
                raise
        return await entry.future

    async def _await_room(self, until: float) -> bool:
        loop = asyncio.get_running_loop()
        intake = self._engine.intake
        waiter = TaskWaiter()
        try:
            while intake.full_for(waiter):
                if not await waiter.wait(max(0.0, until - loop.time())):
                    return False
            return True
        finally:
            intake.stop_waking(waiter)

    def flush(self, timeout: float | None = None) -> bool:
        """Send what waits now; True when all accepted before the call has been answered."""
        self._refuse_deadlock("flush()")
        return self._engine.flush(self._until(timeout))

    async def aflush(self, timeout: float | None = None) -> bool:
        """Like :meth:`flush`, without blocking the event loop."""
        self._refuse_deadlock("aflush()", on_loop=True)
        return await asyncio.to_thread(self._engine.flush, self._until(timeout))

    def hurry(self, least: float = 1, *, when_idle: bool = False) -> bool:
        """Send now if at least ``least`` items wait, or with ``max_weight`` that weight.

        With ``when_idle`` only if the backend has no batch: while it has one, items gather.
        Does not wait for the answers; returns whether it was enough. For a caller that knows that
        nobody else is about to submit, so that lingering would be in vain.
        """
        return self._engine.hurry(least, when_idle=when_idle)

    def close(self, timeout: float | None = None) -> bool:
        """Accept no more, send what waits, answer everything; True when that was in time.

        After ``timeout`` seconds (default: ``close_timeout_s``) what has not been sent is rejected;
        what is with the backend is answered when the backend is done. Inside the backend it returns
        False at once, and the rest happens when the backend returns.
        """
        engine = self._engine
        if current_pool() is engine.workers:
            engine.begin_close(unattended=True)
            return False
        self._refuse_deadlock("close()")
        engine.begin_close()
        return engine.finish_close(self._close_until(timeout))

    async def aclose(self, timeout: float | None = None) -> bool:
        """Like :meth:`close`, without blocking the event loop."""
        if current_pool() is self._engine.workers:
            return self.close(timeout)
        self._engine.begin_close()
        return await asyncio.to_thread(self._engine.finish_close, self._close_until(timeout))

    def add_listener(self, listener: ThresholdListener | QueueThresholdListener) -> None:
        """Have a listener called with every event of the thresholds from now on."""
        self._thresholds().add_listener(listener)

    def remove_listener(self, listener: ThresholdListener | QueueThresholdListener) -> bool:
        """Call a listener no more; False when it is not there."""
        return self._thresholds().remove_listener(listener)

    def _thresholds(self) -> QueueThresholdManager:
        manager = self._engine.thresholds
        if manager is None:
            raise ConfigError(
                "thresholds", None, "a QueueThresholdSettings: without one there are no events"
            )
        return manager

    def stats(self) -> BatcherStats:
        """What waits now, and the counters since the start."""
        return self._engine.stats()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    def __repr__(self) -> str:
        state = "closed" if self.closed else "open"
        return f"<MicroBatcher {self.name!r} {state}, {self.queue_depth} waiting>"

    def __del__(self) -> None:
        engine = getattr(self, "_engine", None)
        if engine is not None and not engine.closing:
            engine.abandon()

    def _until(self, timeout: float | None) -> float | None:
        return None if timeout is None else self._engine.clock.now() + timeout

    def _close_until(self, timeout: float | None) -> float | None:
        return self._until(self._engine.settings.close_timeout_s if timeout is None else timeout)

    def _refuse_self_wait(self, call: str) -> None:
        if self._engine.settings.max_in_flight == 1 and current_pool() is self._engine.workers:
            raise WouldDeadlockError(self.name, call)

    def _refuse_deadlock(self, call: str, on_loop: bool = False) -> None:
        if current_pool() is self._engine.workers:
            raise WouldDeadlockError(self.name, call)
        loop = self._engine.caller.loop
        if loop is not None and not on_loop and asyncio._get_running_loop() is loop:
            raise WouldDeadlockError(
                self.name, f"{call} on the event loop of its backend (use a{call})"
            )


def _deadline(now: float, deadline_s: float | None) -> float | None:
    if deadline_s is None:
        return None
    if not deadline_s >= 0:
        raise ConfigError("deadline_s", deadline_s, "a number of at least 0")
    return now + deadline_s
