"""What several test files share: items, handlers that can be held, queues that always end.

Nothing here sleeps. A test that has to know how far another thread got waits for that thread to
say so; ``WAIT_S`` is only how long it waits before it fails.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar

import pytest
from hypothesis import settings

from batchmill import BatchQueue, BatchQueueSettings, BatchQueueStats, ThreadPolicy
from batchmill.queue import admission
from batchmill.queue.task import Cell, DrainTask
from batchmill.waiters import ThreadWaiter

T = TypeVar("T")

WAIT_S = 20.0
"""How long anything may take before its test fails: a bound on failure, never a measure."""

LOGGER = "batchmill.queue"

untimed = settings(deadline=None)
"""For property tests: Hypothesis would fail an example for being slow, and here any may be."""


@dataclass(frozen=True, slots=True)
class Red:
    number: int = 0


@dataclass(frozen=True, slots=True)
class Green:
    number: int = 0


@dataclass(frozen=True, slots=True)
class Blue:
    number: int = 0


@dataclass(frozen=True, slots=True)
class Crimson(Red):
    """A kind of Red: dispatch is by exact class, so Red's handler must not see it."""


def make_classes(count: int, prefix: str = "Kind") -> list[type]:
    """So many new classes, each under a name of its own."""
    return [type(f"{prefix}{index}", (), {}) for index in range(count)]


def reds(count: int, start: int = 0) -> list[Red]:
    """``count`` items, numbered in the order in which they should be consumed."""
    return [Red(number) for number in range(start, start + count)]


class Recorder:
    """A handler that keeps every batch it gets."""

    def __init__(self) -> None:
        self.batches: list[list[Any]] = []

    def consume(self, batch: list[Any]) -> None:
        self.batches.append(batch)

    @property
    def items(self) -> list[Any]:
        return [item for batch in self.batches for item in batch]


class Gate(Recorder):
    """A handler that keeps every batch, and stays in ``consume`` until it is opened.

    It is how a test holds a drain thread: produce one item, ``wait_entered()``, and from then on
    nothing is drained by that thread until ``open()``.
    """

    _all: ClassVar[weakref.WeakSet[Gate]] = weakref.WeakSet()

    def __init__(self) -> None:
        super().__init__()
        self._entered = threading.Semaphore(0)
        self._opened = threading.Event()
        Gate._all.add(self)

    def consume(self, batch: list[Any]) -> None:
        super().consume(batch)
        self._entered.release()
        if not self._opened.wait(WAIT_S):
            raise TimeoutError("the test never opened its gate")

    def wait_entered(self) -> None:
        """Return once a drain thread is in ``consume``, one call for each batch."""
        assert self._entered.acquire(timeout=WAIT_S), "no drain thread came to the gate"

    def open(self) -> None:
        self._opened.set()

    @classmethod
    def open_all(cls) -> None:
        for gate in list(cls._all):
            gate.open()


class Idler(Recorder):
    """A handler with ``on_idle``; ``events`` has what it was called for, in order."""

    def __init__(self, events: list[str] | None = None, name: str = "idle") -> None:
        super().__init__()
        self.events: list[str] = [] if events is None else events
        self._name = name
        self._told = threading.Semaphore(0)

    def consume(self, batch: list[Any]) -> None:
        super().consume(batch)
        self.events.append("consume")

    def on_idle(self) -> None:
        self.events.append(self._name)
        self._told.release()

    @property
    def times_told(self) -> int:
        return self.events.count(self._name)

    def wait_told(self, times: int = 1) -> None:
        """Return once ``on_idle`` was called so many times more than were waited for before."""
        for _ in range(times):
            assert self._told.acquire(timeout=WAIT_S), "on_idle was not called"

    def wait_told_from_now(self, times: int = 1) -> None:
        """Like :meth:`wait_told`, but calls up to now do not count."""
        while self._told.acquire(blocking=False):
            pass
        self.wait_told(times)


class FoundOverlap:
    """Notices when two calls that should exclude each other are under way at once."""

    def __init__(self) -> None:
        self._inside = threading.Lock()
        self.seen = False

    def __enter__(self) -> None:
        if not self._inside.acquire(blocking=False):
            self.seen = True

    def __exit__(self, *_: object) -> None:
        if self._inside.locked():
            self._inside.release()


class WatchedLock:
    """A lock that says when a thread has come to wait for it. It takes the place of a handler's."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waits = threading.Semaphore(0)

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        if self._lock.acquire(blocking=False):
            return True
        if not blocking:
            return False
        self._waits.release()
        return self._lock.acquire(timeout=timeout)

    def release(self) -> None:
        self._lock.release()

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()

    def wait_contended(self) -> None:
        """Return once a thread waits for the lock that another one holds."""
        assert self._waits.acquire(timeout=WAIT_S), "no thread came to wait for the lock"


@contextlib.contextmanager
def make_queue(name: str = "test", **settings: Any) -> Iterator[BatchQueue[Any]]:
    """A queue on one thread unless told otherwise, shut down at the end whatever happens.

    All gates are opened first, so that a failing test fails instead of hanging; and where the
    test passes, the shutdown has to be in time.
    """
    settings.setdefault("shutdown_timeout_ms", WAIT_S * 1000)
    if "shared_scheduler" not in settings:
        settings.setdefault("threads", ThreadPolicy.fixed(1))
    queue: BatchQueue[Any] = BatchQueue(name, BatchQueueSettings(**settings))
    try:
        yield queue
    except BaseException:
        Gate.open_all()
        queue.shutdown()
        raise
    Gate.open_all()
    assert queue.shutdown(), "the queue did not drain in time"


def spawn(function: Callable[..., T], *args: Any) -> Future[T]:
    """Run ``function`` on a thread of its own; ``.result(WAIT_S)`` has what came of it."""
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(function(*args))
        except BaseException as error:  # noqa: BLE001 - handed to whoever asks for the result
            future.set_exception(error)

    threading.Thread(target=run, daemon=True, name=f"spawned-{function!r}").start()
    return future


def fill(queue: BatchQueue[Any], cls: type = Red) -> int:
    """Put items of ``cls`` until one is refused; how many were accepted."""
    count = 0
    while queue.produce(cls(count), timeout=0):
        count += 1
    return count


class Waiters:
    """Sees producers that wait for room: ``seen`` has how long each wait might take at most."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        seen: list[float | None] = []
        came = threading.Semaphore(0)

        class Watched(ThreadWaiter):
            __slots__ = ()

            def wait(self, timeout_s: float | None) -> bool:
                seen.append(timeout_s)
                came.release()  # it is in the partition's line by now
                return super().wait(timeout_s)

        monkeypatch.setattr(admission, "ThreadWaiter", Watched)
        self.seen = seen
        self._came = came

    def wait_for_one(self) -> None:
        """Return once a producer has come to wait, one call for each."""
        assert self._came.acquire(timeout=WAIT_S), "no producer came to wait"


class Parking:
    """Tells when the drain task of a one-thread queue has nothing more to do.

    To be made before the queue is.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._changed = threading.Condition()
        self._asked: Counter[str] = Counter()
        self._answered: Counter[str] = Counter()
        run = DrainTask.run

        def watched_run(task: DrainTask, cell: Cell) -> None:
            name = task.core.name
            asked = self._asked[name]
            run(task, cell)
            with self._changed:
                self._answered[name] = asked
                self._changed.notify_all()

        monkeypatch.setattr(DrainTask, "run", watched_run)

    def settle(self, queue: BatchQueue[Any]) -> None:
        """Have the task look once more, and return when it has looked and gone to sleep again."""
        name = queue.name
        with self._changed:
            self._asked[name] += 1
            asked = self._asked[name]
        queue._core.wake_tasks()
        with self._changed:
            assert self._changed.wait_for(lambda: self._answered[name] >= asked, WAIT_S)


def quiet(stats: BatchQueueStats) -> bool:
    """Whether the counters balance and nothing is under way."""
    finished = stats.consumed + stats.failed + stats.dropped["unregistered"]
    return stats.pending == 0 and stats.accepted == finished


def messages(caplog: pytest.LogCaptureFixture, level: int = logging.WARNING) -> list[str]:
    """What batchmill has logged at ``level`` or above."""
    return [
        record.getMessage()
        for record in caplog.records
        if record.name == LOGGER and record.levelno >= level
    ]
