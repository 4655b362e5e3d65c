"""The threads of a batcher: workers that send batches, and a timer for deadlines and retries.

Guarantees of ``WorkerPool``
    * A worker that waits with nothing to do keeps neither the engine nor the backend alive: a
      batcher that nobody references ends, even if its backend is a method of its owner.
    * One worker at a time forms a batch; the others wait for their turn.
"""

from __future__ import annotations

import heapq
import itertools
import logging
import os
import threading
import time
import weakref
from collections.abc import Callable
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from batchmill.batcher.entries import Entry
from batchmill.waiters import ThreadWaiter

if TYPE_CHECKING:
    from batchmill.batcher.engine import Engine

log = logging.getLogger("batchmill.batcher")


class Clock(Protocol):
    """Tells the time and waits for it; a test can give a batcher one that it moves by hand."""

    def now(self) -> float:
        """Seconds; never goes back."""
        ...

    def wait(self, waiter: ThreadWaiter, until: float | None) -> bool:
        """Wait until woken (True) or until that time on this clock (False); None: for ever."""
        ...


class SystemClock:
    """The monotonic clock of the machine."""

    def now(self) -> float:
        return time.monotonic()

    def wait(self, waiter: ThreadWaiter, until: float | None) -> bool:
        return waiter.wait(None if until is None else until - time.monotonic())


class Work(NamedTuple):
    """What a worker has to do next."""

    batch: list[Entry] | None = None
    """Send these now."""
    batch_id: int = 0
    leave: bool = False
    """End: there will be no more batches."""
    until: float | None = None
    """Look again at this time at the latest; None: when woken."""


class WorkerPool:
    """The worker threads of an engine. Counts and the list of threads are under its lock."""

    __slots__ = (
        "__weakref__",
        "_clock",
        "_engine",
        "_turn",
        "free",
        "live",
        "revived",
        "threads",
        "waiter",
    )

    def __init__(self, engine: Engine, clock: Clock) -> None:
        self._engine = weakref.ref(engine)
        self._clock = clock
        self._turn = threading.Lock()
        self.waiter = ThreadWaiter()
        """Wakes the worker whose turn it is."""
        self.revived: Engine | None = None
        """An engine whose batcher was garbage collected, until it has closed."""
        self.threads: list[threading.Thread] = []
        """All workers that were ever started."""
        self.free = 0
        """Workers that wait for a batch."""
        self.live = 0
        """Workers that have not ended."""

    @property
    def engine(self) -> Engine | None:
        """The engine, while there is one."""
        return self._engine() or self.revived

    def start_worker(self, limit: int, name: str) -> None:
        """Start a worker if none is free and there are fewer than ``limit``; the lock is held.

        Raises RuntimeError if the system refuses the very first thread.
        """
        if self.free or len(self.threads) >= limit:
            return
        thread = threading.Thread(target=self.run, name=f"{name}-{len(self.threads)}", daemon=True)
        try:
            thread.start()
        except RuntimeError:
            if not self.threads:
                raise
            log.exception("%s: cannot start a thread, continuing with fewer workers", name)
            return
        self.threads.append(thread)
        self.live += 1
        self.free += 1  # counted from now on, so that no second one is started for the same batch

    def expire(self, reference: weakref.ref[Entry]) -> None:
        """The deadline of an entry has passed."""
        engine, entry = self.engine, reference()
        if engine is not None and entry is not None:
            engine.expire(entry)

    def run(self) -> None:
        """Send batches until there are no more: the target of a worker's thread."""
        enter_pool(self)
        process = os.getpid()
        while self._serve(process):
            pass

    def _serve(self, process: int) -> bool:
        """Wait for a batch and send it; False when the worker ends."""
        with self._turn:
            while True:
                engine = self.engine
                if engine is None:
                    return False
                work = engine.next_work()
                if work.leave or work.batch is not None:
                    break
                if work.until is None:
                    del engine  # nothing waits: do not keep it alive
                self._clock.wait(self.waiter, work.until)
        if work.batch is None:
            engine.leave()
            return False
        try:
            engine.send(work.batch_id, work.batch, process)
        except BaseException as error:  # a bug of ours must cost neither items nor a worker
            log.exception("batchmill batcher %s: a worker failed", engine.name)
            engine.fail(work.batch_id, error)
        return True


class PoolContext:
    """Code that runs inside a backend; a background task it started sees when the call is over."""

    __slots__ = ("pool",)

    def __init__(self, pool: WorkerPool | None) -> None:
        self.pool = pool


# A context variable rather than a thread-local: it follows an async backend onto its event loop,
# and from there through asyncio.to_thread into other threads.
_context: ContextVar[PoolContext | None] = ContextVar("batchmill_batcher_pool", default=None)


def enter_pool(pool: WorkerPool | None) -> PoolContext:
    """Mark the code of this context as running inside the backend of ``pool``."""
    context = PoolContext(pool)
    _context.set(context)
    return context


def current_pool() -> WorkerPool | None:
    """The pool inside whose backend the caller runs, or None."""
    context = _context.get()
    return context.pool if context is not None else None


class _Timed(NamedTuple):
    """An action in the order of its time; no two have the same number."""

    when: float
    number: int
    action: Callable[[], None]
    subject: weakref.ref[Any] | None


_CLEAR_OUT_AT = 1024


class Timer:
    """Calls functions at given times, in that order, on one thread.

    The thread exists only while something is timed.
    """

    def __init__(self, clock: Clock, name: str) -> None:
        self._clock = clock
        self._name = name
        self.reset()

    def reset(self) -> None:
        """Forget everything: at the start, and in a forked child."""
        self._lock = threading.Lock()
        self._heap: list[_Timed] = []
        self._clear_out_at = _CLEAR_OUT_AT
        self._numbers = itertools.count()
        self._waiter = ThreadWaiter()
        self._thread: threading.Thread | None = None

    def at(
        self, when: float, action: Callable[[], None], subject: weakref.ref[Any] | None = None
    ) -> None:
        """Call ``action`` at ``when`` on the clock, unless ``subject`` is gone by then.

        Actions whose subject is gone are cleared out now and then, so that far deadlines of items
        that were answered long ago do not pile up.
        """
        with self._lock:
            heapq.heappush(self._heap, _Timed(when, next(self._numbers), action, subject))
            if len(self._heap) > self._clear_out_at:
                self._heap = [
                    timed for timed in self._heap if timed.subject is None or timed.subject()
                ]
                heapq.heapify(self._heap)
                self._clear_out_at = max(_CLEAR_OUT_AT, 2 * len(self._heap))
            if self._thread is None:
                thread = threading.Thread(target=self._run, name=self._name, daemon=True)
                thread.start()
                self._thread = thread  # only now: if start() raises, the next at() tries again
        self._waiter.wake()

    def cancel_all(self) -> None:
        """Forget what has not been called yet; the thread ends."""
        with self._lock:
            self._heap.clear()
            thread = self._thread
        self._waiter.wake()
        if thread is not None and thread is not threading.current_thread():
            thread.join()

    def _run(self) -> None:
        while True:
            due: list[Callable[[], None]] = []
            with self._lock:
                now = self._clock.now()
                while self._heap and self._heap[0].when <= now:
                    due.append(heapq.heappop(self._heap).action)
                if not due and not self._heap:
                    self._thread = None  # under the lock: the next at() starts a new thread
                    return
                until = self._heap[0].when if self._heap else now
            for action in due:
                try:
                    action()
                except BaseException:  # one failing action must not stop the others
                    log.exception("batchmill batcher: a timed action failed")
            del due
            if until > now:
                self._clock.wait(self._waiter, until)
