"""Queues in tests: items, handlers that record or never run, and queues that always end."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from batchmill import BatchQueue, BatchQueueSettings, PartitionPolicy, ThreadPolicy
from tests.kit.threads import WAIT_S, Gate, until


@dataclass(frozen=True, slots=True)
class Red:
    number: int = 0


@dataclass(frozen=True, slots=True)
class Green:
    number: int = 0


@dataclass(frozen=True, slots=True)
class Blue:
    number: int = 0


def reds(count: int, start: int = 0) -> list[Red]:
    """``count`` items, numbered in the order in which they should be consumed."""
    return [Red(number) for number in range(start, start + count)]


class OverlapCheck:
    """Counts the ``with`` blocks that begin while another one is under way."""

    def __init__(self) -> None:
        self._inside = threading.Lock()
        self.overlaps = 0

    def __enter__(self) -> None:
        if not self._inside.acquire(blocking=False):
            self.overlaps += 1

    def __exit__(self, *_: object) -> None:
        if self._inside.locked():
            self._inside.release()


class Recorder:
    """A handler that keeps every batch, after waiting at ``gate`` if it has one."""

    def __init__(self, gate: Gate | None = None) -> None:
        self.batches: list[list[Any]] = []
        self.entries = 0
        self._gate = gate
        self.check = OverlapCheck()
        self._changed = threading.Condition()

    def consume(self, batch: list[Any]) -> None:
        with self.check:
            self.entries += 1
            if self._gate is not None:
                self._gate.wait()
            with self._changed:
                self.batches.append(batch)
                self._changed.notify_all()

    @property
    def items(self) -> list[Any]:
        return [item for batch in self.batches for item in batch]

    @property
    def overlaps(self) -> int:
        """Calls that began while another one was under way."""
        return self.check.overlaps

    def wait_for(self, count: int, timeout_s: float = WAIT_S) -> list[Any]:
        """The items, once there are at least ``count``."""
        with self._changed:
            arrived = self._changed.wait_for(
                lambda: sum(map(len, self.batches)) >= count, timeout_s
            )
        assert arrived, f"{len(self.items)} items consumed of {count} after {timeout_s:g} s"
        return self.items


def new_queue(
    name: str = "test",
    *,
    threads: int | ThreadPolicy = 1,
    partitions: int | PartitionPolicy = 1,
    **settings: Any,
) -> BatchQueue[Any]:
    """A queue with one thread and one partition unless given; the test has to shut it down."""
    settings.setdefault("shutdown_timeout_ms", WAIT_S * 1000)
    policy = ThreadPolicy.fixed(threads) if isinstance(threads, int) else threads
    if isinstance(partitions, int):
        partitions = PartitionPolicy.fixed(partitions)
    return BatchQueue(name, BatchQueueSettings(threads=policy, partitions=partitions, **settings))


@contextlib.contextmanager
def make_queue(name: str = "test", **settings: Any) -> Iterator[BatchQueue[Any]]:
    """A queue as of :func:`new_queue` that is shut down at the end of the block.

    All gates are opened first, so that a failing test fails instead of hanging; and where the
    test passes, the shutdown has to be in time.
    """
    queue = new_queue(name, **settings)
    try:
        yield queue
    except BaseException:
        Gate.open_all()
        queue.shutdown()
        raise
    Gate.open_all()
    assert queue.shutdown(), "the queue did not drain in time"


def fill(queue: BatchQueue[Any], cls: type = Red) -> int:
    """Put items of ``cls`` until one is refused; how many were accepted."""
    count = 0
    while queue.produce(cls(count), timeout=0):
        count += 1
    return count


class Scripted:
    """A balancer that returns the given plan."""

    def __init__(self, plan: Any = None) -> None:
        self.plan = plan
        self.calls: list[list[int]] = []

    def assign(self, loads: Sequence[float], owners: Sequence[int], threads: int) -> Any:
        self.calls.append(list(owners))
        plan = owners if self.plan is None else self.plan
        return plan(loads, owners, threads) if callable(plan) else plan


def rebalance_now(queue: BatchQueue[Any]) -> None:
    """spawn the balancer here and now, as a drain task does when its time has come."""
    queue._core.rebalancer.rebalance()


def owners(queue: BatchQueue[Any]) -> list[int]:
    """The task of each partition."""
    return list(queue._core.layout.owners())


def settled(queue: BatchQueue[Any], plan: Sequence[int]) -> None:
    """Wait until the partitions have the owners of the plan."""
    until(lambda: owners(queue) == list(plan), f"the owners are {list(plan)}")


async def coroutine_function(*arguments: Any) -> None:
    """Never runs where nothing awaits it."""
    raise AssertionError("nothing was to run this")


async def async_generator_function(*arguments: Any) -> AsyncIterator[Any]:
    """Never runs where nothing iterates over it."""
    yield arguments


def generator_function(*arguments: Any) -> Iterator[Any]:
    """Never runs where nothing iterates over it."""
    yield arguments


class _AsyncCall:
    """An object that is called, by a coroutine function."""

    async def __call__(self, *arguments: Any) -> None:
        await coroutine_function(*arguments)


class AsyncCallable(_AsyncCall):
    """The same, inherited; and a method that is a coroutine function."""

    async def method(self, *arguments: Any) -> None:
        await coroutine_function(*arguments)


def awaitable_of(function: Callable[..., Any]) -> Callable[..., Any]:
    """A plain function that returns what ``function`` returns; nothing shows from outside."""
    return lambda *arguments: function(*arguments)


class Later:
    """An awaitable that is no coroutine."""

    def __await__(self) -> Iterator[None]:
        yield


RECOGNIZED: dict[str, Callable[..., Any]] = {
    "coroutine function": coroutine_function,
    "partial": functools.partial(coroutine_function, "an argument"),
    "partial of a partial": functools.partial(functools.partial(coroutine_function, 1), 2),
    "callable object": AsyncCallable(),
    "partial of a callable object": functools.partial(AsyncCallable(), 1),
    "bound method": AsyncCallable().method,
    "async generator": async_generator_function,
    "generator": generator_function,
}
"""What can be refused before it is called."""

UNRECOGNIZED: dict[str, Callable[..., Any]] = {
    "lambda": awaitable_of(coroutine_function),
    "lambda of an async generator": awaitable_of(async_generator_function),
    "lambda of a generator": awaitable_of(generator_function),
    "another awaitable": lambda *arguments: Later(),
}
"""What only shows by what it returns."""
