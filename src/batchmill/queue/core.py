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
from batchmill.callables import check_done
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
        self.on_done = on_done
        """The manager's; equal for queues of the same manager."""
        self.downstream: tuple[QueueCore, ...] = ()
        """The queues that its handlers pass on to, as declared: they close after this one."""
        self.upstream: tuple[QueueCore, ...] = ()
        """The queues that have declared this one as their downstream."""
        self._released = False
        self._registration: Registration | None = None
        self._reset_counters()

    def _reset_counters(self) -> None:
        self.interruptions = 0
        self.recovered_slots = 0
        self.refused_hand_overs: dict[str, int] = {}
        self.failed_last_calls = 0
        self.failed_idle_calls = 0
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

    def call_on_idle(self, receiver: Receiver) -> None:
        """Call ``on_idle``; an error goes to the error handler, or once a minute to the log."""
        if receiver.on_idle is None:
            return
        try:
            check_done(receiver.on_idle, receiver.on_idle())
        except BaseException as error:
            with self.layout.lock:
                self.failed_idle_calls += 1
            if self.settings.error_handler is not None:
                self.report(receiver, [], error)
            elif count := receiver.idle_failures.count(time.monotonic()):
                log.error(
                    "batchmill queue %s: on_idle of handler %r failed, %s since the last message "
                    "(at most one a minute)",
                    self.name,
                    receiver.handler,
                    count_of(count, "time"),
                    exc_info=error,
                )

    def call_on_shutdown(self, receiver: Receiver) -> None:
        """The last call of a handler, which may have merged items that it did not pass on yet."""
        if receiver.on_shutdown is None:
            return
        with receiver.lock or contextlib.nullcontext():
            try:
                check_done(receiver.on_shutdown, receiver.on_shutdown())
            except BaseException as error:  # noqa: BLE001 - user code; reported, the thread lives
                with self.layout.lock:
                    self.failed_last_calls += 1
                self.report(receiver, [], error)

    def count_refused_hand_over(self, target: QueueCore, count: int) -> None:
        """Count items that a handler of this queue passed on and that ``target`` refused.

        Refused by a queue that is neither declared nor closing, they are the handler's business:
        it may well expect that and try again.
        """
        same_manager = self.on_done is not None and self.on_done == target.on_done
        if target in self.downstream or (target.layout.closed and same_manager):
            with self.layout.lock:
                counts = self.refused_hand_overs
                counts[target.name] = counts.get(target.name, 0) + count

    def report(self, receiver: Receiver | None, batch: list[Any], error: BaseException) -> None:
        """Pass a handler's error to the error handler, or else log it."""
        handler: Any = self.settings.error_handler
        if handler is None:
            what = f"on {count_of(len(batch), 'item')}"
            if not batch:
                what = "in its last call; what it had merged and not passed on is lost"
            log.error(
                "batchmill queue %s: handler %r failed %s",
                self.name,
                receiver.handler if receiver is not None else None,
                what,
                exc_info=error,
            )
            return
        try:
            on_error = getattr(handler, "on_error", handler)
            check_done(on_error, on_error(batch, error))
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
        self.await_done(self.deadline)

    def await_done(self, deadline: float) -> bool:
        """Wait for the final drain; False, and a warning, if it is not over at ``deadline``."""
        if self.done.wait(max(0.0, deadline - time.monotonic())):
            return True
        log.warning(
            "batchmill queue %s: not drained after %g s; %s left. "
            "A handler hangs or is slow; raise shutdown_timeout_ms if it is slow.",
            self.name,
            self.settings.shutdown_timeout_ms / 1000,
            count_of(self.stats().pending, "item"),
        )
        return False

    @property
    def may_close_itself(self) -> bool:
        """Whether nobody refers to it any more, and nobody can still pass items on to it."""
        return self.abandoned and all(upstream.done.is_set() for upstream in self.upstream)

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

    def stats(self) -> BatchQueueStats:
        """A frozen copy of how full the queue is and of its counters."""
        return take_snapshot(self)

    def _finish(self) -> None:
        """Everything is drained: release the threads and wake the callers of ``shutdown``."""
        downstream = self.downstream  # the manager takes them off
        if self.refused_hand_overs:
            log.warning(
                "batchmill queue %s: items that its handlers passed on were refused: %s. Declare "
                "them (downstream=... of create()), so that they are closed after this queue.",
                self.name,
                ", ".join(
                    f"{count:,} by {name}" for name, count in self.refused_hand_overs.items()
                ),
            )
        if not self._released:
            self._released = True
            if self.on_done is not None:
                self.on_done(self)
            else:
                self.scheduler.release()
        lifecycle.release(self)
        if self._registration is not None:
            self._registration.close(self)
        self.done.set()
        for core in downstream:
            core.wake_tasks()  # one that nobody refers to has waited for this one

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
