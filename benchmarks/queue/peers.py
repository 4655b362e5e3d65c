"""The peers from the standard library, each with the code that a good engineer would add.

Every peer has two consumer threads that take what is there, up to MAX_BATCH items, group it by
class and call the class's handler with each group: the same handlers, called with the same kind of
batches, as batchmill's drain threads call. (Handing on single items instead is no faster with
``Queue`` and slower with ``SimpleQueue``; for the latter, whose plain use that is, it is a
contender of its own.)
"""

from __future__ import annotations

import queue
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Mapping
from typing import Any, Protocol, TypeAlias

from benchmarks.queue.check import Handler
from benchmarks.queue.work import Item

CONSUMERS = 2
MAX_BATCH = 2_000
"""Items a consumer takes at once at most: batchmill's default, and so everybody's here."""
BOUND = 10_000
JOIN_TIMEOUT_S = 120.0

Handlers: TypeAlias = Mapping[type[Item], Handler]


class Peer(Protocol):
    """One contender, set up and running."""

    @property
    def put(self) -> Callable[[Any], object]:
        """Hands over one helping: an item, or for bulk contenders a list of items."""

    def finish(self) -> None:
        """Return when everything that was put has been handled. Nothing is put afterwards."""

    def close(self) -> None:
        """Release what is left."""


class BlockingQueue(Protocol):
    """What ``queue.Queue``, ``queue.SimpleQueue`` and the sync sides of janus and culsans share."""

    def put(self, item: Any) -> None:
        """Add an item, waiting for room."""

    def get(self) -> Any:
        """Take an item, waiting for one."""

    def get_nowait(self) -> Any:
        """Take an item, or raise ``queue.Empty``."""


class _Stop:
    """Put once; every consumer that meets it puts it again for the next and leaves."""


def dispatch(batch: list[Any], handlers: Handlers) -> None:
    """Call each class's handler with its items of ``batch``."""
    groups: defaultdict[type, list[Any]] = defaultdict(list)
    for item in batch:
        groups[type(item)].append(item)
    groups.pop(_Stop, None)
    for cls, group in groups.items():
        handlers[cls].consume(group)


class Consumers:
    """Threads that run one function until it returns."""

    def __init__(self, target: Callable[[], None], count: int = CONSUMERS) -> None:
        self._threads = [threading.Thread(target=target, daemon=True) for _ in range(count)]
        for thread in self._threads:
            thread.start()

    def join(self) -> None:
        """Wait for all of them; one that hangs is an error, not a hang of the benchmark."""
        for thread in self._threads:
            thread.join(JOIN_TIMEOUT_S)
            if thread.is_alive():
                raise TimeoutError(f"{thread.name} did not finish in {JOIN_TIMEOUT_S:g} s")


class QueuePeer:
    """Any queue with blocking ``put`` and ``get``; ``freed`` hears how many items were taken."""

    def __init__(
        self,
        source: BlockingQueue,
        handlers: Handlers,
        *,
        put: Callable[[Any], object] | None = None,
        freed: Callable[[int], object] | None = None,
        consumers: int = CONSUMERS,
    ) -> None:
        self.put = put or source.put
        self._source = source
        self._handlers = handlers
        self._freed = freed
        self._consumers = Consumers(self._consume, consumers)

    def _consume(self) -> None:
        get, get_nowait = self._source.get, self._source.get_nowait
        stopped = False
        while not stopped:
            batch = [get()]
            add = batch.append
            try:
                for _ in range(MAX_BATCH - 1):
                    add(get_nowait())
            except queue.Empty:
                pass  # that was all there is
            stopped = type(batch[-1]) is _Stop  # it is put last, so it is met last
            if self._freed is not None:
                self._freed(len(batch))
            dispatch(batch, self._handlers)
        self.put(_Stop())

    def finish(self) -> None:
        """Let the consumers come to the end of the queue."""
        self.put(_Stop())
        self._consumers.join()

    def close(self) -> None:
        """Nothing is left."""


def plain_queue(handlers: Handlers, bound: int = BOUND) -> Peer:
    """``queue.Queue`` with a bound."""
    return QueuePeer(queue.Queue(bound), handlers)


def simple_queue(handlers: Handlers) -> Peer:
    """``queue.SimpleQueue``, which has no bound."""
    return QueuePeer(queue.SimpleQueue(), handlers)


class OneByOnePeer:
    """``queue.SimpleQueue`` as it is used most: take one item, handle it, and so on; no bound."""

    def __init__(self, handlers: Handlers) -> None:
        source: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.put = source.put
        self._source = source
        self._handlers = handlers
        self._consumers = Consumers(self._consume)

    def _consume(self) -> None:
        get, handlers = self._source.get, self._handlers
        while True:
            item = get()
            if type(item) is _Stop:
                self.put(item)
                return
            handlers[type(item)].consume([item])

    def finish(self) -> None:
        """Let the consumers come to the end of the queue."""
        self.put(_Stop())
        self._consumers.join()

    def close(self) -> None:
        """Nothing is left."""


def bounded_simple_queue(handlers: Handlers, bound: int = BOUND) -> Peer:
    """``queue.SimpleQueue`` behind a semaphore that counts the free places."""
    source: queue.SimpleQueue[Any] = queue.SimpleQueue()
    places = threading.BoundedSemaphore(bound)
    acquire, add = places.acquire, source.put

    def put(item: Any) -> None:
        acquire()
        add(item)

    return QueuePeer(source, handlers, put=put, freed=places.release)


class ByClassPeer:
    """A ``SimpleQueue`` for each consumer thread, and each class bound to one of them; no bound.

    What it takes for ``SimpleQueue`` to keep a class's items in order and the calls of its handler
    apart, as batchmill does.
    """

    def __init__(self, handlers: Handlers) -> None:
        sources: list[queue.SimpleQueue[Any]] = [queue.SimpleQueue() for _ in range(CONSUMERS)]
        routes = {cls: sources[rank % CONSUMERS].put for rank, cls in enumerate(handlers)}
        self._lines = [QueuePeer(source, handlers, consumers=1) for source in sources]

        def put(item: Any) -> None:
            routes[type(item)](item)

        self.put = put

    def finish(self) -> None:
        """Let every consumer come to the end of its queue."""
        for line in self._lines:
            line.finish()

    def close(self) -> None:
        """Nothing is left."""


class DequePeer:
    """``deque`` and two conditions on one lock, notified only when somebody waits."""

    def __init__(self, handlers: Handlers, bound: int = BOUND) -> None:
        self._handlers = handlers
        self._bound = bound
        self._items: deque[Any] = deque()
        self._lock = threading.Lock()
        self._not_empty = threading.Condition(self._lock)
        self._not_full = threading.Condition(self._lock)
        self._hungry = 0
        self._waiting = 0
        self._finished = False
        self._consumers = Consumers(self._consume)

    def put(self, item: Any) -> None:
        """Add an item, waiting for room."""
        with self._lock:
            while len(self._items) >= self._bound:
                self._waiting += 1
                self._not_full.wait()
                self._waiting -= 1
            self._items.append(item)
            if self._hungry:
                self._not_empty.notify()

    def _consume(self) -> None:
        while batch := self._take():
            dispatch(batch, self._handlers)

    def _take(self) -> list[Any]:
        with self._lock:
            while not self._items:
                if self._finished:
                    return []
                self._hungry += 1
                self._not_empty.wait()
                self._hungry -= 1
            take = self._items.popleft
            batch = [take() for _ in range(min(len(self._items), MAX_BATCH))]
            if self._waiting:
                self._not_full.notify(len(batch))
            return batch

    def finish(self) -> None:
        """Let the consumers come to the end of the deque."""
        with self._lock:
            self._finished = True
            self._not_empty.notify_all()
        self._consumers.join()

    def close(self) -> None:
        """Nothing is left."""


class PollingPeer:
    """A ``deque`` that nobody announces: consumers look, and sleep 1, 2, 4 … 50 ms in between.

    SkyWalking's design drains like this; it is only in the tables of latency and idle CPU.
    """

    MIN_IDLE_S = 0.001
    MAX_IDLE_S = 0.050

    def __init__(self, handlers: Handlers, consumers: int = CONSUMERS) -> None:
        self._handlers = handlers
        self._items: deque[Any] = deque()
        self.put = self._items.append
        self._finished = False
        self._consumers = Consumers(self._consume, consumers)

    def _consume(self) -> None:
        idle_s = self.MIN_IDLE_S
        while True:
            finished = self._finished
            if batch := self._take():
                dispatch(batch, self._handlers)
                idle_s = self.MIN_IDLE_S
            elif finished:
                return
            else:
                time.sleep(idle_s)
                idle_s = min(2 * idle_s, self.MAX_IDLE_S)

    def _take(self) -> list[Any]:
        batch = []
        try:
            for _ in range(MAX_BATCH):
                batch.append(self._items.popleft())
        except IndexError:
            pass  # another consumer was faster, or it is the end
        return batch

    def finish(self) -> None:
        """Let the consumers find the end of the deque."""
        self._finished = True
        self._consumers.join()

    def close(self) -> None:
        """Nothing is left."""
