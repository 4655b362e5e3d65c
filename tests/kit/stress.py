"""What the concurrency tests share: gates, doctored routes, threads with results, payloads."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from pathlib import Path
from types import TracebackType
from typing import Any, Generic, NamedTuple, Self, TypeVar

import pytest

import batchmill
from batchmill import BatchQueue, BatchQueueSettings, PartitionPolicy, ThreadPolicy
from batchmill.queue.partition import Lane, Partition
from batchmill.queue.task import DrainTask, current_task

R = TypeVar("R")

BOUND_S = 10.0
"""How long a test waits for what must happen before it calls the wait a failure."""

SOAK = max(1, int(os.environ.get("BATCHMILL_SOAK", "1")))
"""Multiplies the rounds of the stress tests."""

_names = itertools.count()


class A:
    """An item."""


class B:
    """An item of another class."""


def make_queue(
    *, threads: int = 1, partitions: int | PartitionPolicy = 1, **settings: Any
) -> BatchQueue[Any]:
    """A queue for a test: small, and bounded in its shutdown."""
    settings.setdefault("shutdown_timeout_ms", BOUND_S * 1000)
    if isinstance(partitions, int):
        partitions = PartitionPolicy.fixed(partitions)
    config = BatchQueueSettings(
        threads=ThreadPolicy.fixed(threads), partitions=partitions, **settings
    )
    return BatchQueue(f"test-{next(_names)}", config)


def wait_until(condition: Callable[[], object], what: str, bound_s: float = BOUND_S) -> None:
    """Return as soon as ``condition`` holds; for inner states that signal nobody."""
    deadline = time.monotonic() + bound_s
    while not condition():
        if time.monotonic() > deadline:
            pytest.fail(f"it never happened in {bound_s:g} s: {what}")
        os.sched_yield()


def holds(event: threading.Event, what: str) -> None:
    """Wait for ``event``, and fail if it does not come."""
    if not event.wait(BOUND_S):
        pytest.fail(f"it never happened in {BOUND_S:g} s: {what}")


def partition_of(queue: BatchQueue[Any], index: int = 0) -> Partition:
    """One of the partitions, the first if nothing is said."""
    return queue._core.layout.partitions[index]


def lane_of(queue: BatchQueue[Any], cls: type) -> Lane:
    """The lane of ``cls``, made if need be."""
    return queue._core.layout.lane_of_type(cls)


def parked(queue: BatchQueue[Any]) -> None:
    """Wait until every partition is armed and no task is running or about to."""
    core = queue._core

    def quiet() -> bool:
        return all(
            not task._submitted and not task._run_lock.locked() and not task._unarmed
            for task in core.tasks
        ) and all(p.reserve + len(p.tokens) == p.capacity for p in core.layout.partitions)

    wait_until(quiet, "the queue parks")


def parked_task(task: DrainTask) -> None:
    """Wait until one task has nothing to do, whatever the others do."""
    wait_until(
        lambda: not task._submitted and not task._run_lock.locked() and not task._unarmed,
        "the task parks",
    )


def rebalance_now(queue: BatchQueue[Any]) -> None:
    """Ask the balancer here and now, as a drain task does when its time has come."""
    queue._core.rebalancer.rebalance()


def owners(queue: BatchQueue[Any]) -> list[int]:
    """The task of each partition."""
    return [partition.owner.index for partition in queue._core.layout.partitions]


def settled(queue: BatchQueue[Any], plan: Sequence[int]) -> None:
    """Wait until the partitions belong to whom the plan says."""
    wait_until(lambda: owners(queue) == list(plan), f"the partitions belong to {list(plan)}")


class Call(Generic[R]):
    """A call on a thread of its own; its result, or what it raised, comes out of :meth:`result`."""

    def __init__(self, call: Callable[..., R], *args: Any, **named: Any) -> None:
        self._future: Future[R] = Future()
        self._work = (call, args, named)
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def _run(self) -> None:
        call, args, named = self._work
        del self._work
        try:
            self._future.set_result(call(*args, **named))
        except BaseException as error:  # noqa: BLE001 - handed to whoever asks for the result
            self._future.set_exception(error)

    @property
    def done(self) -> bool:
        return self._future.done()

    def result(self, bound_s: float = BOUND_S) -> R:
        answer = self._future.result(bound_s)
        self.thread.join(bound_s)
        return answer


class Gate:
    """Something to wait at; open for good once opened, and at the latest when the test ends."""

    def __init__(self) -> None:
        self.reached = threading.Event()
        self._open = threading.Event()

    def wait(self) -> None:
        self.reached.set()
        if not self._open.wait(BOUND_S * 2):
            raise TimeoutError("nobody opened the gate")

    def open(self) -> None:
        self._open.set()

    def someone_waits(self) -> None:
        holds(self.reached, "somebody reaches the gate")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.open()


def _task_index() -> int:
    task = current_task()
    return -1 if task is None else task.index


class Recorder:
    """A handler that keeps what it gets, and notes whoever enters it while another is inside."""

    def __init__(self, gate: Gate | None = None) -> None:
        self.items: list[Any] = []
        self.batches: list[list[Any]] = []
        self.tasks: list[int] = []
        self.overlaps = 0
        self.entries = 0
        self.gate = gate
        self._inside = threading.Lock()
        self._changed = threading.Condition()

    def consume(self, batch: list[Any]) -> None:
        free = self._inside.acquire(blocking=False)
        self.entries += 1
        try:
            if not free:
                self.overlaps += 1
            if self.gate is not None:
                self.gate.wait()
            with self._changed:
                self.items.extend(batch)
                self.batches.append(batch)
                self.tasks.append(_task_index())
                self._changed.notify_all()
        finally:
            if free:
                self._inside.release()

    def got(self, count: int, bound_s: float = BOUND_S) -> list[Any]:
        """What came, once at least ``count`` items did."""
        with self._changed:
            if not self._changed.wait_for(lambda: len(self.items) >= count, bound_s):
                pytest.fail(f"{len(self.items)} items consumed of {count} after {bound_s:g} s")
            return list(self.items)


class HeldSlot:
    """Stops the next quick-road producer of ``cls`` between taking its slot and putting its item.

    ``taken`` is set when it has its slot; it goes on at :meth:`let_go`. Producers after it, and the
    queue itself, are not touched.
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

    def taken(self) -> None:
        self.gate.someone_waits()

    def let_go(self) -> None:
        self.gate.open()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.gate.open()


class Scripted:
    """A balancer that answers what it was told to."""

    def __init__(self, plan: Any = None) -> None:
        self.plan = plan
        self.asked: list[list[int]] = []

    def assign(self, loads: Sequence[float], owners: Sequence[int], threads: int) -> Any:
        self.asked.append(list(owners))
        plan = owners if self.plan is None else self.plan
        return plan(loads, owners, threads) if callable(plan) else plan


class Payload(NamedTuple):
    """What the stress tests send: everything in it can be derived from the first two fields."""

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
    seen: dict[tuple[int, int], list[int]] = {}
    found = []
    for item in items:
        if item.check != check_of(item.producer, item.sequence, item.kind):
            found.append(f"corrupted: {item}")
        seen.setdefault((item.producer, item.kind), []).append(item.sequence)
    for key in sorted(seen.keys() | accepted.keys()):
        got, wanted = seen.get(key, []), accepted.get(key, [])
        if got == wanted:
            continue
        lost = sorted(set(wanted) - set(got))
        extra = sorted(set(got) - set(wanted))
        doubled = len(got) - len(set(got))
        found.append(
            f"producer {key[0]} kind {key[1]}: lost {lost[:5]} ({len(lost)}), "
            f"not accepted yet consumed {extra[:5]} ({len(extra)}), doubled {doubled}, "
            f"{'' if got != sorted(got) else 'not '}out of order"
        )
    return found


SOURCE = str(Path(batchmill.__file__).parents[1])
"""Where the package under test is, for scripts that run in an interpreter of their own."""


def run_script(
    source: str, *, bound_s: float = BOUND_S * 2, options: Sequence[str] = ()
) -> subprocess.CompletedProcess[str]:
    """Run ``source`` in a fresh interpreter; a script that does not end is a failure."""
    environment = dict(os.environ, PYTHONPATH=SOURCE)
    try:
        return subprocess.run(
            [sys.executable, *options, "-c", source],
            capture_output=True,
            text=True,
            timeout=bound_s,
            env=environment,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        pytest.fail(f"the script did not end in {bound_s:g} s: {error.stdout!r} {error.stderr!r}")
