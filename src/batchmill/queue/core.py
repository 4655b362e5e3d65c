"""The inside of a queue: what its drain tasks share, and the way it closes.

Drain tasks refer to this object and never to the public :class:`BatchQueue`, so that a queue whose
users have all gone is noticed and closes itself.

Guarantee
    Closing lets nobody in before it lets the tasks finish, so what was accepted is drained. Each
    task drains its own partitions on its own thread: no handler is run beside a call that hangs.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import Any

from batchmill import lifecycle
from batchmill.queue import knots
from batchmill.queue.config import BatchQueueSettings
from batchmill.queue.gate import Gate
from batchmill.queue.handler import Receiver
from batchmill.queue.layout import Layout
from batchmill.queue.partition import Lane
from batchmill.queue.rebalance import Rebalancer
from batchmill.queue.scheduler import Scheduler
from batchmill.queue.task import DrainTask, forget_current_task

log = logging.getLogger("batchmill.queue")


class QueueCore:
    """State and rules of one queue; its threads are the scheduler's."""

    fork_order = 1

    def __init__(
        self,
        name: str,
        config: BatchQueueSettings,
        scheduler: Scheduler,
        tasks: int,
        partitions: int,
        on_done: Callable[[QueueCore], None] | None = None,
    ) -> None:
        self.name = name
        self.config = config
        self.scheduler = scheduler
        self.tasks = [DrainTask(self, index) for index in range(tasks)]
        self.layout = Layout(name, config, self.tasks, partitions)
        self.rebalancer = Rebalancer(config, self.layout)
        self.gate: Gate | None = None
        if config.thresholds is not None:
            self.gate = Gate(config.thresholds.guard(name), self.layout.depth)
        self.done = threading.Event()
        self.abandoned = False
        self.closing = False
        self.deadline = 0.0
        self._on_done = on_done
        self._released = False
        self._reset_counters()

    def _reset_counters(self) -> None:
        self.interruptions = 0
        self.recovered_slots = 0
        self._unregistered_seen: dict[type, object] = {}
        self._unfinished = len(self.tasks)

    def start(self) -> None:
        """Take the scheduler's threads and begin draining."""
        self.scheduler.acquire()
        self.wake_tasks()

    def wake_tasks(self) -> None:
        for task in self.tasks:
            task.wake()

    def notify(self, receiver: Receiver, method: Callable[[], object] | None) -> None:
        """Call ``on_idle`` or ``on_shutdown``; what it raises is reported with an empty batch."""
        if method is None:
            return
        try:
            method()
        except BaseException as error:  # noqa: BLE001 - user code; reported, the thread lives
            self.report(receiver, [], error)

    def report(self, receiver: Receiver | None, batch: list[Any], error: BaseException) -> None:
        """Tell of a handler that raised: to the error handler, or to the log."""
        if self.config.error_handler is None:
            log.error(
                "batchmill queue %s: handler %r failed on %d items",
                self.name,
                receiver.handler if receiver is not None else None,
                len(batch),
                exc_info=error,
            )
            return
        try:
            self.config.error_handler(batch, error)
        except BaseException:
            log.exception("batchmill queue %s: the error handler failed", self.name)

    def note_unregistered(self, lane: Lane) -> None:
        """Say, once per class, that nobody handles it."""
        cls = lane.cls
        first = object()
        # One step, so that of two threads that meet the class at once only one says so.
        if cls is None or self._unregistered_seen.setdefault(cls, first) is not first:
            return
        log.warning(
            "batchmill queue %s: no handler for %s.%s; its items are dropped and counted "
            "(dropped['unregistered']). Register one with add_handler(). Said once per class.",
            self.name,
            cls.__module__,
            cls.__qualname__,
        )

    def interrupted(self) -> None:
        """A producer was interrupted in the middle of a put: its slot, or its wake, may be lost."""
        self.interruptions += 1
        for task in self.tasks:
            task.wake_surely()

    def begin_close(self) -> None:
        """Close the gate and send the tasks to the final drain; once, however often it is called.

        Waits for nobody, so that it can be called from inside a handler. A call that is
        interrupted halfway is made good by the next one.
        """
        if not self.deadline:
            self.deadline = time.monotonic() + self.config.shutdown_timeout_ms / 1000
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
        """Nobody has the queue any more: have the tasks close it.

        Called by a finaliser, which may run in any thread at any point, so it takes no lock that
        is not reentrant: the tasks do the rest.
        """
        lifecycle.keep(self)
        self.abandoned = True
        for task in self.tasks:
            task.timer_id = -1  # its timer, a weak reference, may be dead
            task.wake()

    def task_finished(self) -> None:
        """A task has drained all it owns; the last one says goodbye to the handlers."""
        with self.layout.lock:
            self._unfinished -= 1
            if self._unfinished:
                return
        for receiver in self.layout.receivers():
            self.say_goodbye(receiver)
        if self.gate is not None:
            self.gate.guard.observe(0)
            self.gate.guard.close()
        self._finish()

    def say_goodbye(self, receiver: Receiver) -> None:
        """Give a handler its last call; it may have merged what it did not pass on yet."""
        if receiver.lock is None:
            self.notify(receiver, receiver.on_shutdown)
        else:
            with receiver.lock:
                self.notify(receiver, receiver.on_shutdown)

    def _finish(self) -> None:
        """Everything is drained: let go of the threads and tell whoever waits."""
        if not self._released:
            self._released = True
            if self._on_done is not None:
                self._on_done(self)
            else:
                self.scheduler.release()
        lifecycle.release(self)
        self.done.set()

    def after_fork_in_child(self) -> None:
        """Start anew and empty: what was queued is the parent's, and so are the threads."""
        forget_current_task()
        knots.renew_lock()
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
