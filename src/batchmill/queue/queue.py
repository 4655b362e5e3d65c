"""The queue as its users see it."""

from __future__ import annotations

import logging
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from types import TracebackType
from typing import Any, Generic, Self, TypeVar

from batchmill import lifecycle
from batchmill.errors import ConfigError, SelectorError, WouldDeadlockError
from batchmill.queue import intake, knots, placement
from batchmill.queue.config import BatchQueueSettings
from batchmill.queue.core import QueueCore
from batchmill.queue.gate import REFUSED, Guard, apass_gate, pass_gate
from batchmill.queue.handler import HandlerConsumer
from batchmill.queue.partition import Lane, Partition, Route
from batchmill.queue.scheduler import Scheduler
from batchmill.queue.selector import KeyHash, TypeHash, key_bucket
from batchmill.queue.snapshot import snapshot
from batchmill.queue.stats import BatchQueueStats
from batchmill.waiters import Countdown, ThreadWaiter

log = logging.getLogger("batchmill.queue")

T = TypeVar("T")
U = TypeVar("U")

_NONE = type(None)


class BatchQueue(Generic[T]):
    """A bounded queue that drains itself, in batches, into a handler per class.

    Any thread may call any method. It starts at once; leave it with :meth:`shutdown`, or use it
    as a context manager.

    * *Bounded*: a partition never holds more than ``buffer_size`` items.
    * *Nothing lost*: an item for which ``produce`` answered True reaches its handler exactly once,
      also through shutdown, interpreter exit, growth and rebalancing. (An item of a class without
      a handler is dropped and counted.)
    * *In order*: items of one class (``type_hash``), or of one class and key (``key_hash``), that
      one thread produces are consumed in that order.
    * *By exact class*: an instance of a subclass needs a handler for that subclass.
    * *After fork*: the child's queue is empty and running; what the parent had queued stays there.

    >>> with BatchQueue("sizes", BatchQueueSettings(threads=ThreadPolicy.fixed(1))) as queue:
    ...     queue.add_handler(str, lambda batch: print(len(batch)))
    ...     queue.produce("an item")
    True
    1
    """

    def __new__(cls, *args: Any, **kwargs: Any) -> BatchQueue[T]:
        # Classes find their partition in one table, which is most of what makes produce() quick.
        # A selector that looks at the item, and thresholds, take more: the subclass below.
        config = kwargs.get("config", args[1] if len(args) > 1 else None)
        if isinstance(config, BatchQueueSettings) and not (
            isinstance(config.selector, TypeHash) and config.thresholds is None
        ):
            return super().__new__(_CarefulQueue)
        return super().__new__(cls)

    def __init_subclass__(cls) -> None:
        if cls.__module__ != __name__:
            raise TypeError("BatchQueue is not made to be subclassed: wrap it instead")

    def __init__(
        self,
        name: str,
        config: BatchQueueSettings,
        *,
        scheduler: Scheduler | None = None,
        on_done: Callable[[QueueCore], None] | None = None,
    ) -> None:
        if scheduler is None:
            if config.threads is None:
                raise ConfigError(
                    "shared_scheduler",
                    config.shared_scheduler,
                    "used through a manager, which owns the schedulers: default_manager.create()",
                )
            threads = config.threads.resolve()
            partitions = config.partitions.resolve(threads, 0)
            tasks = placement.fit_threads(threads, partitions)
            if tasks < threads:
                log.warning(
                    "batchmill queue %s: %d partitions for %d threads; running %d threads",
                    name,
                    partitions,
                    threads,
                    tasks,
                )
            scheduler = Scheduler(name, tasks)
        else:
            tasks, partitions = 1, config.partitions.resolve(1, 0)
        self._core = QueueCore(name, config, scheduler, tasks, partitions, on_done)
        self._routes: dict[type, Route] = {}
        self._core.start()
        lifecycle.track(self._core)

    @property
    def name(self) -> str:
        """The name the queue was made with."""
        return self._core.name

    @property
    def config(self) -> BatchQueueSettings:
        """The settings the queue was made with."""
        return self._core.config

    @property
    def running(self) -> bool:
        """Whether the queue accepts items: True until shutdown begins."""
        return not self._core.layout.closed

    def produce(self, item: T, timeout: float | None = None) -> bool:
        """Put one item; True when it was accepted, False when it was not and will not be.

        BLOCKING waits for room, for ``timeout`` seconds at most where one is given. IF_POSSIBLE
        waits for a ``timeout`` that is given; else a millisecond at most, for a drain thread that
        may just not have had its turn. A queue that is shut down, also while this call waits,
        answers False. Not to be called by a signal handler or a finaliser.
        """
        # The quick road: two atomic list operations and no lock. See _partition for why it holds.
        try:
            take_slot, put = self._routes[type(item)]
            token = take_slot()
        except (KeyError, IndexError):  # a class not seen before, or no slot at hand
            return intake.put(self._core, self._lane(item), [item], timeout) == 1
        except BaseException:
            self._core.interrupted()
            raise
        try:
            put(item)
            if token is not None:  # the wake token: the drain thread sleeps
                token.ring()
        except BaseException:
            self._core.interrupted()
            raise
        return True

    def produce_many(self, items: Iterable[T], timeout: float | None = None) -> int:
        """Put items in order, stopping at the first that is not accepted; how many were.

        Much quicker than one by one where several in a row are of one class. ``timeout`` bounds
        the whole call. Items that were not accepted are counted as dropped, each of them.
        """
        batch = _as_list(items)
        deadline = _deadline(timeout)
        for start, lane, run in self._pieces(batch):
            count = intake.put(self._core, lane, run, _left(deadline))
            if count < len(run):
                intake.count_unoffered(lane, len(batch) - start - len(run))
                return start + count
        return len(batch)

    async def aproduce(self, item: T, timeout: float | None = None) -> bool:
        """Like :meth:`produce`, but where that would block the thread, only the task waits."""
        lane = self._enter(item)
        return lane is None or await intake.aput(self._core, lane, [item], timeout) == 1

    async def aproduce_many(self, items: Iterable[T], timeout: float | None = None) -> int:
        """Like :meth:`produce_many`, but where that would block, only the task waits."""
        batch = _as_list(items)
        deadline = _deadline(timeout)
        for start, lane, run in self._pieces(batch):
            count = await intake.aput(self._core, lane, run, _left(deadline))
            if count < len(run):
                intake.count_unoffered(lane, len(batch) - start - len(run))
                return start + count
        return len(batch)

    def add_handler(
        self,
        cls: type[U],
        handler: HandlerConsumer[U] | Callable[[list[U]], object],
        weight: float = 1.0,
    ) -> None:
        """Have ``handler`` take every item whose class is exactly ``cls``.

        An object with ``consume(batch)`` and, if it likes, ``on_idle()`` and ``on_shutdown()``, or
        a plain callable that takes the batch. ``weight`` is how much the class counts where
        partitions are adaptive. A class that has a handler is refused one more.
        """
        layout = self._core.layout
        layout.add_handler(cls, handler, weight)
        if cls in layout.lanes:
            self._routes[cls] = layout.lanes[cls].route  # so that the first item is quick already
        self._core.wake_tasks()

    def remove_handler(self, cls: type) -> bool:
        """Stop handling ``cls``; False when nobody did.

        A batch that is being handled now is finished; items still queued are dropped and counted
        as unregistered, unless a new handler comes before they are drained.
        """
        return self._core.layout.remove_handler(cls)

    def flush(self, timeout: float | None = None) -> bool:
        """Wait until all that was accepted before this call has been consumed.

        False when ``timeout`` seconds pass first. Not to be called inside a handler of this queue.
        """
        if knots.would_wait_for_itself(self._core):
            raise WouldDeadlockError(self.name, "flush()")
        waiter = ThreadWaiter()
        countdown = Countdown(waiter)
        lanes = [lane for partition in self._core.layout.partitions for lane in partition.lanes]
        finished = False
        try:
            for lane in lanes:
                lane.watch(countdown)
            countdown.done()
            finished = waiter.wait(timeout)
        finally:
            if not finished:
                for lane in lanes:
                    lane.unwatch(countdown)
        return finished

    @property
    def guard(self) -> Guard | None:
        """Who decides about items under pressure, if ``thresholds`` were given."""
        return self._core.gate.guard if self._core.gate is not None else None

    def stats(self) -> BatchQueueStats:
        """A snapshot of how full the queue is and of its counters since the start."""
        return snapshot(self._core)

    def shutdown(self) -> bool:
        """Accept nothing more, drain what was accepted, end the threads.

        True when all of that happened within ``shutdown_timeout_ms``; else False and a warning,
        and the drain goes on behind the caller's back as soon as the handler that hangs returns.
        Any number of threads may call it, any number of times: there is one shutdown. Inside a
        handler of this queue it answers False at once, and finishes when the handler returns.
        """
        self._core.begin_close()
        if knots.would_wait_for_itself(self._core):
            return self._core.done.is_set()
        return self._await_drain(time.monotonic() + self.config.shutdown_timeout_ms / 1000)

    def _await_drain(self, deadline: float) -> bool:
        core = self._core
        if not core.done.wait(max(0.0, deadline - time.monotonic())):
            log.warning(
                "batchmill queue %s: not drained after %g s; %d items left. "
                "A handler hangs or is slow; raise shutdown_timeout_ms if it is slow.",
                self.name,
                self.config.shutdown_timeout_ms / 1000,
                self.stats().pending,
            )
            return False
        if core.scheduler.stopping:
            core.scheduler.join(deadline)
        return True

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.shutdown()

    def __repr__(self) -> str:
        state = "running" if self.running else "shut down"
        return f"<BatchQueue {self.name!r} {state}>"

    def __del__(self) -> None:
        core = getattr(self, "_core", None)
        if core is not None and not core.layout.closed:
            core.abandon()
            warnings.warn(
                f"batchmill queue {core.name!r} was never shut down; it drains itself now",
                ResourceWarning,
                source=self,
                stacklevel=2,
            )

    def _enter(self, item: T) -> Lane | None:
        """Put the item by the quick road; where that is closed, the lane to put it on slowly."""
        if intake.quick(self._core, self._routes, item):
            return None
        return self._lane(item)

    def _lane(self, item: T) -> Lane:
        """The lane of an item; makes it, and the quick road to it, where the class is new."""
        _refuse_none(item)
        cls = type(item)
        lane = self._core.layout.lanes.get(cls)
        if lane is None:
            lane = self._core.layout.lane_of_type(cls)
        self._routes[cls] = lane.route
        return lane

    def _pieces(self, batch: list[T]) -> Iterator[tuple[int, Lane, list[T]]]:
        """What has to go by the slow road, in order: where it starts, its lane, its items.

        Items of one class are put together. Where classes alternate, each goes by the quick road,
        on the way, and only those that could not are given back.
        """
        if not batch:
            return
        classes = list(map(type, batch))
        if classes.count(classes[0]) == len(batch):
            yield 0, self._lane(batch[0]), batch
        else:
            if _NONE in classes:
                _refuse_none(None)
            yield from self._singly(batch)

    def _singly(self, batch: list[T]) -> Iterator[tuple[int, Lane, list[T]]]:
        for index, item in enumerate(batch):
            lane = self._enter(item)
            if lane is not None:
                yield index, lane, [item]


class _CarefulQueue(BatchQueue[T]):
    """A queue that looks at each item: its selector, or its thresholds, want to know more."""

    def produce(self, item: T, timeout: float | None = None) -> bool:
        gate = self._core.gate
        if gate is None:
            lane = self._enter(item)
            return lane is None or intake.put(self._core, lane, [item], timeout) == 1
        lane = self._lane(item)
        answer = pass_gate(gate, lane, item, timeout)
        if answer == 1 or answer == REFUSED:
            return answer == 1
        return intake.put(self._core, lane, [item], timeout) == 1  # full there, or closed

    def produce_many(self, items: Iterable[T], timeout: float | None = None) -> int:
        gate = self._core.gate
        if gate is None:
            return super().produce_many(items, timeout)
        batch = _as_list(items)
        deadline = _deadline(timeout)
        for index, item in enumerate(batch):
            if not self.produce(item, _left(deadline)):
                gate.count("rejected", len(batch) - index - 1)
                return index
        return len(batch)

    async def aproduce(self, item: T, timeout: float | None = None) -> bool:
        gate = self._core.gate
        if gate is None:
            return await super().aproduce(item, timeout)
        lane = self._lane(item)
        answer = await apass_gate(gate, lane, item, timeout)
        if answer == 1 or answer == REFUSED:
            return answer == 1
        return await intake.aput(self._core, lane, [item], timeout) == 1

    async def aproduce_many(self, items: Iterable[T], timeout: float | None = None) -> int:
        gate = self._core.gate
        if gate is None:
            return await super().aproduce_many(items, timeout)
        batch = _as_list(items)
        deadline = _deadline(timeout)
        for index, item in enumerate(batch):
            if not await self.aproduce(item, _left(deadline)):
                gate.count("rejected", len(batch) - index - 1)
                return index
        return len(batch)

    def _enter(self, item: T) -> Lane | None:
        _refuse_none(item)
        # The selector is the caller's code: what it raises is the caller's to see.
        partition = self._partition_of(item)
        if intake.quick(self._core, partition.routes, item):
            return None
        return self._core.layout.lane_in(partition, type(item))

    def _lane(self, item: T) -> Lane:
        _refuse_none(item)
        return self._core.layout.lane_in(self._partition_of(item), type(item))

    def _pieces(self, batch: list[T]) -> Iterator[tuple[int, Lane, list[T]]]:
        if _NONE in map(type, batch):
            _refuse_none(None)
        return self._singly(batch)

    def _partition_of(self, item: T) -> Partition:
        layout = self._core.layout
        selector = layout.config.selector
        if isinstance(selector, TypeHash):
            lane = layout.lanes.get(type(item))
            return (lane or layout.lane_of_type(type(item))).partition
        if isinstance(selector, KeyHash):
            return layout.partition_of_bucket(key_bucket(selector.key(item)))
        partitions = layout.partitions
        count = len(partitions)
        answer = selector(item, count)
        if isinstance(answer, int) and 0 <= answer < count:
            return partitions[answer]
        raise SelectorError(self.name, answer, count)


def _as_list(items: Iterable[T]) -> list[T]:
    return items if type(items) is list else list(items)


def _deadline(timeout: float | None) -> float | None:
    return None if timeout is None else time.monotonic() + timeout


def _left(deadline: float | None) -> float | None:
    return None if deadline is None else max(0.0, deadline - time.monotonic())


def _refuse_none(item: object) -> None:
    if item is None:
        raise TypeError("None is not an item: a queue takes instances of the classes it handles")
