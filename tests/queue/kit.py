"""The inside of a queue in tests: held producers, parked threads, moved partitions, payloads."""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple, Self

import pytest

from batchmill import BatchQueue, BatchQueueStats
from batchmill.queue import admission
from batchmill.queue.partition import Lane, Partition
from batchmill.queue.task import Cell, DrainTask
from batchmill.waiters import ThreadWaiter
from tests.kit.queues import Recorder, Red
from tests.kit.threads import WAIT_S, Gate, until

LOGGER = "batchmill.queue"


class A:
    """An item that is equal to no other."""


class B:
    """An item of another class."""


@dataclass(frozen=True, slots=True)
class Crimson(Red):
    """A subclass of Red: dispatch is by exact class, so Red's handler must not see it."""


def make_classes(count: int, prefix: str = "Kind") -> list[type]:
    """So many new classes, each under a name of its own."""
    return [type(f"{prefix}{index}", (), {}) for index in range(count)]


class Idler(Recorder):
    """A handler with ``on_idle``; ``events`` has what it was called for, in order."""

    def __init__(self, events: list[str] | None = None, name: str = "idle") -> None:
        super().__init__()
        self.events: list[str] = [] if events is None else events
        self._name = name
        self._idle_calls = threading.Semaphore(0)

    def consume(self, batch: list[Any]) -> None:
        super().consume(batch)
        self.events.append("consume")

    def on_idle(self) -> None:
        self.events.append(self._name)
        self._idle_calls.release()

    @property
    def idle_count(self) -> int:
        """How often ``on_idle`` was called."""
        return self.events.count(self._name)

    def wait_idle(self, times: int = 1) -> None:
        """Return once ``on_idle`` was called so many times more than were waited for before."""
        for _ in range(times):
            assert self._idle_calls.acquire(timeout=WAIT_S), "on_idle was not called"

    def wait_idle_from_now(self, times: int = 1) -> None:
        """Like :meth:`wait_idle`, but calls up to now do not count."""
        while self._idle_calls.acquire(blocking=False):
            pass
        self.wait_idle(times)


class WatchedLock:
    """Takes the place of a handler's lock, and tells when a thread has come to wait for it."""

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


class Waiters:
    """Sees producers that wait for room: ``seen`` has how long each wait might take at most."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        seen: list[float | None] = []
        came = threading.Semaphore(0)

        class Watched(ThreadWaiter):
            __slots__ = ()

            def wait(self, timeout_s: float | None) -> bool:
                seen.append(timeout_s)
                came.release()  # it is among the partition's waiters by now
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
        self._requests: Counter[str] = Counter()
        self._served: Counter[str] = Counter()
        run = DrainTask.run

        def watched_run(task: DrainTask, cell: Cell) -> None:
            name = task.core.name
            request = self._requests[name]
            run(task, cell)
            with self._changed:
                self._served[name] = request
                self._changed.notify_all()

        monkeypatch.setattr(DrainTask, "run", watched_run)

    def settle(self, queue: BatchQueue[Any]) -> None:
        """Run the task once more, and return when it has gone to sleep again."""
        name = queue.name
        with self._changed:
            self._requests[name] += 1
            request = self._requests[name]
        queue._core.wake_tasks()
        with self._changed:
            assert self._changed.wait_for(lambda: self._served[name] >= request, WAIT_S)


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


def partition_of(queue: BatchQueue[Any], index: int = 0) -> Partition:
    """A partition of the queue, the first unless given."""
    return queue._core.layout.partitions[index]


def lane_of(queue: BatchQueue[Any], cls: type) -> Lane:
    """The lane of ``cls``, made if need be."""
    return queue._core.layout.lane_of_type(cls)


def parked(queue: BatchQueue[Any]) -> None:
    """Wait until every partition is armed and no task is running or about to."""
    core = queue._core
    until(
        lambda: (
            all(_rests(task) for task in core.tasks)
            and all(p.reserve + len(p.tokens) == p.capacity for p in core.layout.partitions)
        ),
        "the queue parks",
    )


def parked_task(task: DrainTask) -> None:
    """Wait until one task has nothing to do, whatever the others do."""
    until(lambda: _rests(task), "the task parks")


def _rests(task: DrainTask) -> bool:
    return not task._submitted and not task._run_lock.locked() and not task._unarmed


class HeldSlot:
    """Stops the next fast-path producer of ``cls`` between taking its slot and putting its item.

    ``wait_taken`` returns when it has its slot; it goes on at :meth:`let_go`. Producers after it,
    and the queue itself, are not touched.
    """

    def __init__(self, queue: BatchQueue[Any], cls: type) -> None:
        self.gate = Gate()
        self.token: Partition | None = None
        self._first = threading.Lock()
        take, put = lane_of(queue, cls).route

        def take_and_wait() -> Partition | None:
            token = take()
            if self._first.acquire(blocking=False):
                self.token = token
                self.gate.wait()
            return token

        queue._routes[cls] = (take_and_wait, put)

    def wait_taken(self) -> None:
        self.gate.wait_entered()

    def let_go(self) -> None:
        self.gate.open()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.gate.open()


class Payload(NamedTuple):
    """What the stress tests send: everything in it can be derived from the first three fields."""

    producer: int
    sequence: int
    kind: int
    check: int


def check_of(producer: int, sequence: int, kind: int) -> int:
    """The check sum of a payload."""
    return hash((producer, sequence, kind, "batchmill"))


def payload_class(kind: int) -> type[Payload]:
    """A class of its own for each kind, as the queue tells items apart by exact class."""
    return type(f"Payload{kind}", (Payload,), {"__slots__": ()})


def problems_with(
    items: Iterable[Payload], accepted: dict[tuple[int, int], list[int]]
) -> list[str]:
    """What is wrong with what was consumed, given the accepted sequences by producer and kind."""
    consumed: dict[tuple[int, int], list[int]] = {}
    problems = []
    for item in items:
        if item.check != check_of(item.producer, item.sequence, item.kind):
            problems.append(f"corrupted: {item}")
        consumed.setdefault((item.producer, item.kind), []).append(item.sequence)
    for key in sorted(consumed.keys() | accepted.keys()):
        got, wanted = consumed.get(key, []), accepted.get(key, [])
        if got == wanted:
            continue
        lost = sorted(set(wanted) - set(got))
        extra = sorted(set(got) - set(wanted))
        doubled = len(got) - len(set(got))
        problems.append(
            f"producer {key[0]} kind {key[1]}: lost {lost[:5]} ({len(lost)}), "
            f"not accepted yet consumed {extra[:5]} ({len(extra)}), doubled {doubled}, "
            f"{'' if got != sorted(got) else 'not '}out of order"
        )
    return problems
