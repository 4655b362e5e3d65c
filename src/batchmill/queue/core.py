"""The state of a queue that its drain tasks share, and how it closes.

Drain tasks refer to this object and never to the public :class:`BatchQueue`, so that a queue that
nobody refers to any more is garbage, which is noticed, and the queue closes itself.

Guarantee
    Closing stops producers before it lets the tasks finish, so everything accepted is drained.
    Each task drains its own partitions on its own thread: a call that hangs delays no other task.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable
from typing import Any

from batchmill import lifecycle
from batchmill.queue import deadlock
from batchmill.queue.admission import Gate
from batchmill.queue.layout import Layout, Rebalancer
from batchmill.queue.partition import Lane, Receiver
from batchmill.queue.scheduler import Scheduler
from batchmill.queue.settings import BatchQueueSettings
from batchmill.queue.stats import QUEUE, BatchQueueStats, take_snapshot
from batchmill.queue.task import DrainTask, forget_current_task
from batchmill.telemetry import Registration, default_registry, register
from batchmill.wording import count_of

log = logging.getLogger("batchmill.queue")


class QueueCore:
    """The inside of one queue; its threads are the scheduler's."""

    fork_order = 1
    kind = QUEUE

    def __init__(
        self,
        name: str,
        settings: BatchQueueSettings,
        scheduler: Scheduler,
        tasks: int,
        partitions: int,
        on_done: Callable[[QueueCore], None] | None = None,
    ) -> None:
        self.name = name
        self.settings = settings
        self.scheduler = scheduler
        self.tasks = [DrainTask(self, index) for index in range(tasks)]
        self.layout = Layout(name, settings, self.tasks, partitions)
        self.rebalancer = Rebalancer(self.layout)
        self.gate: Gate | None = None
        if settings.thresholds is not None:
            self.gate = Gate(settings.thresholds.guard(name), self.layout.depth)
        self.done = threading.Event()
        self.abandoned = False
        self.closing = False
        self.deadline = 0.0
        self._on_done = on_done
        self._released = False
        self._registration: Registration | None = None
        self._reset_counters()

    def _reset_counters(self) -> None:
        self.interruptions = 0
        self.recovered_slots = 0
        self._warned_classes: dict[type, object] = {}
        self._unfinished = len(self.tasks)

    def start(self) -> None:
        """Take the scheduler's threads and begin draining."""
        self.scheduler.acquire()
        self._registration = register(self)
        self.wake_tasks()

    def wake_tasks(self) -> None:
        for task in self.tasks:
            task.wake()

    def call_safely(self, receiver: Receiver, method: Callable[[], object] | None) -> None:
        """Call ``on_idle`` or ``on_shutdown``; its error is reported with an empty batch."""
        if method is None:
            return
        try:
            method()
        except BaseException as error:  # noqa: BLE001 - user code; reported, the thread lives
            self.report(receiver, [], error)

    def report(self, receiver: Receiver | None, batch: list[Any], error: BaseException) -> None:
        """Pass a handler's error to the error handler, or else log it."""
        if self.settings.error_handler is None:
            log.error(
                "batchmill queue %s: handler %r failed on %s",
                self.name,
                receiver.handler if receiver is not None else None,
                count_of(len(batch), "item"),
                exc_info=error,
            )
            return
        try:
            self.settings.error_handler(batch, error)
        except BaseException:
            log.exception("batchmill queue %s: the error handler failed", self.name)

    def warn_unregistered(self, lane: Lane) -> None:
        """Warn, once per class, that it has no handler."""
        cls = lane.cls
        first = object()
        # One atomic step: of two threads with the same class only one logs it.
        if cls is None or self._warned_classes.setdefault(cls, first) is not first:
            return
        log.warning(
            "batchmill queue %s: no handler for %s.%s; its items are dropped and counted "
            "(dropped['unregistered']). Register one with add_handler(). Logged once per class.",
            self.name,
            cls.__module__,
            cls.__qualname__,
        )

    def interrupted(self) -> None:
        """A producer was interrupted in the middle of a put: its slot or its wake may be lost."""
        self.interruptions += 1
        for task in self.tasks:
            task.wake_surely()

    def begin_close(self) -> None:
        """Accept nothing more and start the final drain; calling it again changes nothing.

        It does not wait, so that a handler can call it. A call that is interrupted halfway is
        completed by the next one.
        """
        if not self.deadline:
            self.deadline = time.monotonic() + self.settings.shutdown_timeout_ms / 1000
        self.layout.close()
        if self.gate is not None:
            self.gate.close()
        # Only now: a task that sees this may finish as soon as its lanes are empty.
        self.closing = True
        self.wake_tasks()

    def await_close(self) -> None:
        """Wait for the final drain until its deadline."""
        self.done.wait(max(0.0, self.deadline - time.monotonic()))

    def abandon(self) -> None:
        """Nobody refers to the queue any more: have the tasks close it.

        Called by a finaliser, which may run in any thread at any point, so it takes no lock that
        is not reentrant: the tasks do the rest.
        """
        lifecycle.keep(self)
        self.abandoned = True
        for task in self.tasks:
            task.timer_id = -1  # its timer, a weak reference, may be dead
            task.wake()

    def task_finished(self) -> None:
        """A task has drained all it owns; the last one calls ``on_shutdown`` of the handlers."""
        with self.layout.lock:
            self._unfinished -= 1
            if self._unfinished:
                return
        for receiver in self.layout.receivers():
            self.call_on_shutdown(receiver)
        if self.gate is not None:
            self.gate.guard.observe(0)
            self.gate.guard.close()
        self._finish()

    def call_on_shutdown(self, receiver: Receiver) -> None:
        """The last call of a handler, which may have merged items that it did not pass on yet."""
        with receiver.lock or contextlib.nullcontext():
            self.call_safely(receiver, receiver.on_shutdown)

    def stats(self) -> BatchQueueStats:
        """A frozen copy of how full the queue is and of its counters."""
        return take_snapshot(self)

    def _finish(self) -> None:
        """Everything is drained: release the threads and wake the callers of ``shutdown``."""
        if not self._released:
            self._released = True
            if self._on_done is not None:
                self._on_done(self)
            else:
                self.scheduler.release()
        lifecycle.release(self)
        if self._registration is not None:
            self._registration.close(self)
        self.done.set()

    def after_fork_in_child(self) -> None:
        """Start empty, with new threads: the queued items and the old threads are the parent's."""
        forget_current_task()
        deadlock.renew_lock()
        self.scheduler.after_fork_in_child()
        done = self.done.is_set()
        self.done = threading.Event()
        self.layout.after_fork_in_child()
        if self.gate is not None:
            self.gate.reset()
        for task in self.tasks:
            task.reset()
        self.rebalancer.reset()
        self._reset_counters()
        if not self.layout.closed:
            self.wake_tasks()
        elif done:
            self.done.set()
        else:
            self._finish()


def snapshot_queues() -> tuple[BatchQueueStats, ...]:
    """The stats of every running queue of this process, sorted by name."""
    snapshots = [core.stats() for core in default_registry.components(QUEUE)]
    return tuple(stats for stats in snapshots if stats.running)
