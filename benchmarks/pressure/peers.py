"""Other ways to batch single items for a backend and return each result: a hand-written loop, and
async-batcher from PyPI.
"""

from __future__ import annotations

import asyncio
import importlib
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from time import monotonic
from typing import Any, Protocol, TypeAlias

from batchmill.batcher import BatcherSettings, MicroBatcher
from batchmill.pressure import QueueThresholdSettings
from benchmarks.queue.third_party import MissingPeer

MILL = "batchmill"
MILL_THRESHOLDS = "batchmill, thresholds"
EXECUTOR_LOOP = "executor loop"
SIMPLE_LOOP = "executor loop, SimpleQueue"
ASYNC_BATCHER = "async-batcher"

BATCH_SIZE = 100
LINGER_MS = 5

Backend: TypeAlias = Callable[[list[int]], Any]
"""From a batch to its results, or to an awaitable of them."""


class ThreadPeer(Protocol):
    """Takes items from threads."""

    def submit(self, item: int, /) -> Future[Any]:
        """Take an item; the future tells its answer."""

    def value(self, result: Any, /) -> Any:
        """What the backend answered, from what the future told."""

    def close(self) -> object:
        """End."""


class MillThreads:
    """The micro-batcher, as its users run it."""

    def __init__(
        self, backend: Backend, in_flight: int, thresholds: QueueThresholdSettings | None = None
    ) -> None:
        config = BatcherSettings(
            batch_size=BATCH_SIZE, linger_ms=LINGER_MS, max_in_flight=in_flight
        )
        batcher: MicroBatcher[int] = MicroBatcher(backend, config, thresholds)
        self.submit = batcher.submit
        self.close = batcher.close

    def value(self, result: Any, /) -> Any:
        return result.unwrap()


class ExecutorLoop:
    """A queue, a thread that forms batches by size and time, an executor, a future per item.

    Nothing more: no bound, no cancelling, no counters.
    """

    def __init__(
        self,
        backend: Backend,
        in_flight: int,
        make_queue: Callable[[], queue.Queue[Any] | queue.SimpleQueue[Any]] = queue.Queue,
    ) -> None:
        self._backend = backend
        self._queue = make_queue()
        self._executor = ThreadPoolExecutor(max_workers=in_flight)
        self._collector = threading.Thread(target=self._collect)
        self._collector.start()

    def submit(self, item: int, /) -> Future[Any]:
        future: Future[Any] = Future()
        self._queue.put((item, future))
        return future

    def value(self, result: Any, /) -> Any:
        return result

    def close(self) -> None:
        self._queue.put(None)
        self._collector.join()
        self._executor.shutdown()

    def _collect(self) -> None:
        while (entry := self._queue.get()) is not None:
            batch = [entry]
            until = monotonic() + LINGER_MS / 1000
            while len(batch) < BATCH_SIZE:
                try:
                    entry = self._queue.get(timeout=max(0.0, until - monotonic()))
                except queue.Empty:
                    break
                if entry is None:
                    break
                batch.append(entry)
            self._executor.submit(self._send, batch)
            if entry is None:
                return

    def _send(self, batch: list[tuple[int, Future[Any]]]) -> None:
        try:
            results = self._backend([item for item, _ in batch])
        except Exception as error:  # noqa: BLE001 - it is the items' answer
            for _, future in batch:
                future.set_exception(error)
        else:
            for (_, future), result in zip(batch, results, strict=True):
                future.set_result(result)


class TaskPeer(Protocol):
    """Takes items from asyncio tasks; made and used on one event loop."""

    async def ask(self, item: int, /) -> Any:
        """What the backend answers for an item."""

    async def close(self) -> None:
        """End."""


class MillTasks:
    """The micro-batcher's ``asubmit``."""

    def __init__(self, backend: Backend, in_flight: int) -> None:
        config = BatcherSettings(
            batch_size=BATCH_SIZE, linger_ms=LINGER_MS, max_in_flight=in_flight
        )
        self._batcher: MicroBatcher[int] = MicroBatcher(backend, config)

    async def ask(self, item: int, /) -> Any:
        return (await self._batcher.asubmit(item)).unwrap()

    async def close(self) -> None:
        await self._batcher.aclose()


class ExecutorLoopTasks:
    """The hand-written loop, its futures wrapped for asyncio; a coroutine backend is beyond it."""

    def __init__(self, backend: Backend, in_flight: int) -> None:
        self._loop = ExecutorLoop(backend, in_flight)

    async def ask(self, item: int, /) -> Any:
        return await asyncio.wrap_future(self._loop.submit(item))

    async def close(self) -> None:
        self._loop.close()


class AsyncBatcherTasks:
    """async-batcher: coroutine backends run on the loop, plain ones on an executor."""

    def __init__(self, backend: Backend, in_flight: int) -> None:
        base = async_batcher_class()
        method = "process_batch"
        subclass = type("Batcher", (base,), {method: staticmethod(_by_keyword(backend))})
        self._executor = ThreadPoolExecutor(max_workers=in_flight)
        self._batcher = subclass(
            max_batch_size=BATCH_SIZE,
            max_queue_time=LINGER_MS / 1000,
            concurrency=in_flight,
            executor=self._executor,
        )
        self.ask = self._batcher.process

    async def close(self) -> None:
        # Everything is answered: to stop kindly would only wait a second for its next poll.
        await self._batcher.stop(force=True)
        self._executor.shutdown()


def async_batcher_class() -> Any:
    """Its base class; MissingPeer where it is not installed."""
    try:
        return importlib.import_module("async_batcher.batcher").AsyncBatcher
    except ImportError as error:
        raise MissingPeer("async-batcher is not installed") from error


def _by_keyword(backend: Backend) -> Callable[..., Any]:
    """async-batcher calls coroutine functions with ``batch=``, and others by position."""
    if asyncio.iscoroutinefunction(backend):

        async def process_batch(batch: list[int]) -> Any:
            return await backend(batch)

        return process_batch
    return backend
