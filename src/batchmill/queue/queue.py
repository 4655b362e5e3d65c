"""The public queue class."""

from __future__ import annotations

import logging
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from operator import length_hint
from typing import TYPE_CHECKING, Any, Generic, Self

from batchmill import lifecycle
from batchmill.cores import available_cores
from batchmill.errors import ConfigError, WouldDeadlockError
from batchmill.queue import admission, deadlock
from batchmill.queue.core import QueueCore
from batchmill.queue.partition import Lane, Lists, Route
from batchmill.queue.scheduler import Scheduler
from batchmill.queue.settings import BatchQueueSettings, Guard, Handler
from batchmill.queue.stats import BatchQueueStats
from batchmill.queue.strategies import TypeHash
from batchmill.waiters import Countdown, ThreadWaiter
from batchmill.wording import count_of

log = logging.getLogger("batchmill.queue")

if TYPE_CHECKING:
    # Of every type checker's own; where nothing tells T, it is Any, and no annotation is needed.
    from typing_extensions import TypeVar

    T = TypeVar("T", default=Any)
    U = TypeVar("U")
else:
    from typing import TypeVar

    T = TypeVar("T")
    U = TypeVar("U")

_NONE = type(None)


class BatchQueue(Generic[T]):
    """A bounded queue that drains itself, in batches, into a handler per class.

    Any thread may call any method. It starts at once; end it with :meth:`shutdown`, or use it as
    a context manager.

    * *Bounded*: a partition never holds more than ``buffer_size`` items.
    * *Nothing lost*: an item for which ``produce`` returned True reaches its handler exactly once,
      also through shutdown, interpreter exit, growth and rebalancing. (An item of a class without
      a handler is dropped and counted.)
    * *In order*: items of one class (``type_hash``), or of one class and key (``key_hash``), that
      one thread produces are consumed in that order.
    * *By exact class*: an instance of a subclass needs a handler for that subclass.
    * *After fork*: the child's queue is empty and running; items in the parent's queue stay there.

    >>> with BatchQueue("sizes", BatchQueueSettings(threads=ThreadPolicy.fixed(1))) as queue:
    ...     queue.add_handler(str, lambda batch: print(len(batch)))
    ...     queue.produce("an item")
    True
    1
    """

    def __new__(cls, *args: Any, **kwargs: Any) -> BatchQueue[T]:
        # One table look-up from class to partition is most of what makes produce() fast. A selector
        # that inspects the item, and thresholds, need more work: the subclass below.
        config = kwargs.get("config", args[1] if len(args) > 1 else None)
        if isinstance(config, BatchQueueSettings) and not (
            isinstance(config.selector, TypeHash) and config.thresholds is None
        ):
            return super().__new__(_InspectingQueue)
        return super().__new__(cls)

    def __init_subclass__(cls) -> None:
        if cls.__module__ != __name__:
            raise TypeError("BatchQueue is not made to be subclassed: wrap it instead")

    def __init__(
        self,
        name: str,
        config: BatchQueueSettings[T],
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
            cores = available_cores()
            threads = config.threads.resolve(cores)
            partitions = config.partitions.resolve(threads, 0)
            tasks = min(threads, partitions)  # a partition is drained by one thread at a time
            if tasks < threads:
                log.warning(
                    "batchmill queue %s: %s for %s: starting %s",
                    name,
                    count_of(partitions, "partition"),
                    count_of(threads, "thread"),
                    count_of(tasks, "thread"),
                )
            scheduler = Scheduler(name, tasks, cores)
        else:
            tasks, partitions = 1, config.partitions.resolve(1, 0)
        self._core = QueueCore(name, config, scheduler, tasks, partitions, on_done)
        self._routes: dict[type, Route] = {}
        self._lists: dict[type, Lists] = {}
        self._core.start()
        lifecycle.track(self._core)

    @property
    def name(self) -> str:
        """The name the queue was made with."""
        return self._core.name

    @property
    def config(self) -> BatchQueueSettings[T]:
        """The settings the queue was made with."""
        return self._core.settings

    @property
    def running(self) -> bool:
        """Whether the queue accepts items: True until shutdown begins."""
        return not self._core.layout.closed

    def produce(self, item: T, timeout: float | None = None) -> bool:
        """Put one item; True when it was accepted, False when it was not and will not be.

        BLOCKING waits for room, for ``timeout`` seconds at most if given. IF_POSSIBLE waits for
        ``timeout`` if given, else at most a millisecond, for a drain thread that may just not have
        been scheduled. On a queue that is shut down, also while this call waits, it returns False.
        Do not call it in a signal handler or a finaliser.
        """
        # The fast path: two atomic list operations and no lock. Why this is safe: partition.py.
        try:
            take_slot, put = self._routes[type(item)]
            token = take_slot()
        except (KeyError, IndexError):  # a class not seen before, or no free slot among the tokens
            return admission.put(self._core, self._lane(item), [item], timeout) == 1
        except BaseException:
            self._core.interrupted()
            raise
        try:
            put(item)
            if token is not None:  # the wake token: the drain thread sleeps
                token.wake_owner()
        except BaseException:
            self._core.interrupted()
            raise
        return True

    def produce_many(self, items: Iterable[T], timeout: float | None = None) -> int:
        """Put items in order, up to the first that is not accepted; return how many were.

        Many times faster than one by one if all are of one class. ``timeout`` bounds the whole
        call. Every item that was not accepted is counted as dropped.
        """
        batch = _as_list(items)
        deadline = _deadline(timeout)
        for start, lane, run in self._slow_runs(batch):
            count = admission.put(self._core, lane, run, _left(deadline))
            if count < len(run):
                admission.count_untried(self._core, lane, len(batch) - start - len(run))
                return start + count
        return len(batch)

    async def aproduce(self, item: T, timeout: float | None = None) -> bool:
        """Like :meth:`produce`, but where that would block the thread, only the task waits."""
        lane = self._put_fast(item)
        return lane is None or await admission.aput(self._core, lane, [item], timeout) == 1

    async def aproduce_many(self, items: Iterable[T], timeout: float | None = None) -> int:
        """Like :meth:`produce_many`, but where that would block, only the task waits."""
        batch = _as_list(items)
        deadline = _deadline(timeout)
        for start, lane, run in self._slow_runs(batch):
            count = await admission.aput(self._core, lane, run, _left(deadline))
            if count < len(run):
                admission.count_untried(self._core, lane, len(batch) - start - len(run))
                return start + count
        return len(batch)

    def add_handler(
        self,
        cls: type[U],
        handler: Handler[U],
        weight: float = 1.0,
    ) -> None:
        """Register ``handler`` for every item whose class is exactly ``cls``.

        It is an object with ``consume(batch)`` and optionally ``on_idle()`` and ``on_shutdown()``,
        or a callable that takes the batch. ``weight`` is how much the class counts where partitions
        are adaptive. A second handler for a class raises :class:`HandlerExistsError`.
        """
        layout = self._core.layout
        layout.add_handler(cls, handler, weight)
        if cls in layout.lanes:
            self._lane_of(cls)  # so that the first item is fast already
        self._core.wake_tasks()

    def remove_handler(self, cls: type) -> bool:
        """Remove the handler of ``cls``; False when there is none.

        A batch that is being handled now is finished; items still queued are dropped and counted
        as unregistered, unless a new handler is added before they are drained.
        """
        return self._core.layout.remove_handler(cls)

    def flush(self, timeout: float | None = None) -> bool:
        """Wait until all items accepted before this call have been consumed.

        False when ``timeout`` seconds pass first. A handler of this queue must not call it.
        """
        if deadlock.is_needed_to_drain(self._core):
            raise WouldDeadlockError(self.name, "flush()")
        waiter = ThreadWaiter()
        countdown = Countdown(waiter)
        lanes = [lane for partition in self._core.layout.partitions for lane in partition.lanes]
        finished = False
        try:
            for lane in lanes:
                lane.watch(countdown)
            if self._core.settings.linger_ms:
                self._core.wake_tasks()  # what waits for more items is watched now: it is served
            countdown.done()
            finished = waiter.wait(timeout)
        finally:
            if not finished:
                for lane in lanes:
                    lane.unwatch(countdown)
        return finished

    @property
    def guard(self) -> Guard | None:
        """Decides about items under pressure, if ``thresholds`` were given."""
        return self._core.gate.guard if self._core.gate is not None else None

    def add_listener(self, listener: Any) -> None:
        """Have a listener called with every event of the thresholds from now on."""
        self._listened().add_listener(listener)

    def remove_listener(self, listener: Any) -> bool:
        """Call a listener no more; False when it is not there."""
        return self._listened().remove_listener(listener)

    def _listened(self) -> Guard:
        guard = self.guard
        if guard is None:
            raise ConfigError(
                "thresholds", None, "a QueueThresholdSettings: without one there are no events"
            )
        return guard

    def stats(self) -> BatchQueueStats:
        """A snapshot of how full the queue is and of its counters since the start."""
        return self._core.stats()

    def shutdown(self, timeout: float | None = None) -> bool:
        """Accept nothing more, drain what was accepted, end the threads.

        True when all of that happened within ``timeout`` seconds, or without one within
        ``shutdown_timeout_ms``; else False and a warning, and the drain goes on in the background
        as soon as the handler that hangs returns. Any number of threads may call it, any number of
        times: there is one shutdown. Inside a handler of this queue it returns False at once, and
        the drain finishes when the handler returns.

        Queues that this one passes items on to stay open: shut them down after it, as
        ``BatchQueueManager.shutdown_all`` does.
        """
        self._core.begin_close()
        if deadlock.is_needed_to_drain(self._core):
            return self._core.done.is_set()
        wait_s = self.config.shutdown_timeout_ms / 1000 if timeout is None else timeout
        return self._await_drain(time.monotonic() + wait_s)

    def _await_drain(self, deadline: float) -> bool:
        core = self._core
        if not core.await_done(deadline):
            return False
        if core.scheduler.stopping:
            core.scheduler.join(deadline)
        return True

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
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

    def _put_fast(self, item: T) -> Lane | None:
        """Put the item without a lock; if that is not possible, the lane to put it on slowly."""
        if admission.put_fast(self._core, self._routes, item):
            return None
        return self._lane(item)

    def _lane(self, item: T) -> Lane:
        """The lane of an item; for a new class, makes the lane and its fast path."""
        _refuse_none(item)
        return self._lane_of(type(item))

    def _lane_of(self, cls: type) -> Lane:
        lane = self._core.layout.lanes.get(cls)
        if lane is None:
            lane = self._core.layout.lane_of_type(cls)
        self._routes[cls] = lane.route
        self._lists[cls] = lane.lists
        return lane

    def _slow_runs(self, batch: list[T]) -> Iterator[tuple[int, Lane, list[T]]]:
        """Put items that can be put fast; yield the others: index of the first, lane, items.

        A batch of one class is yielded whole: it takes the lock once. Otherwise items are put in
        turn, and those that could not be put fast are yielded.
        """
        if not batch:
            return
        first = type(batch[0])
        if first is type(batch[-1]) and list(map(type, batch)).count(first) == len(batch):
            yield 0, self._lane(batch[0]), batch
            return
        rest = iter(batch)
        pairs = zip(rest, self._lists_of(batch), strict=True)
        while True:
            try:
                # As in produce(), without a call for each item. Grouping by class first, to take
                # a lock for each class only, was slower: it goes over the items three times.
                for item, (tokens, buffer) in pairs:
                    token = tokens.pop()
                    buffer.append(item)
                    if token is not None:
                        token.wake_owner()
                return
            except IndexError:  # no free slot among the tokens
                pass
            except BaseException:
                self._core.interrupted()
                raise
            yield len(batch) - length_hint(rest) - 1, self._lane(item), [item]

    def _lists_of(self, batch: list[T]) -> list[Lists]:
        """Where each item goes; refuses None before any item is put."""
        try:
            return list(map(self._lists.__getitem__, map(type, batch)))
        except KeyError:  # None, or a class not seen before
            for item in batch:
                self._lane(item)
        return list(map(self._lists.__getitem__, map(type, batch)))


class _InspectingQueue(BatchQueue[T]):
    """A queue that inspects each item, for its selector or for its thresholds."""

    def produce(self, item: T, timeout: float | None = None) -> bool:
        lane = self._put_fast(item)
        return lane is None or admission.put(self._core, lane, [item], timeout) == 1

    def _put_fast(self, item: T) -> Lane | None:
        _refuse_none(item)
        # The selector is the caller's code: what it raises is the caller's to see.
        core = self._core
        partition = core.layout.partition_of(item)
        if core.gate is None and admission.put_fast(core, partition.routes, item):
            return None
        return core.layout.lane_in(partition, type(item))

    def _slow_runs(self, batch: list[T]) -> Iterator[tuple[int, Lane, list[T]]]:
        if _NONE in map(type, batch):
            _refuse_none(None)
        for index, item in enumerate(batch):
            lane = self._put_fast(item)
            if lane is not None:
                yield index, lane, [item]


def _as_list(items: Iterable[T]) -> list[T]:
    return items if type(items) is list else list(items)


def _deadline(timeout: float | None) -> float | None:
    return None if timeout is None else time.monotonic() + timeout


def _left(deadline: float | None) -> float | None:
    return None if deadline is None else max(0.0, deadline - time.monotonic())


def _refuse_none(item: object) -> None:
    if item is None:
        raise TypeError("None is not an item: a queue takes instances of the classes it handles")
