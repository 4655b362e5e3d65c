"""What the workers of a dispatcher share: the lock, the router, the handler, and closing.

Guarantees
    * One lock, held for a few steps at a time and never while user code runs. (The exceptions are a
      flow id's own ``__hash__`` and ``__eq__``, and the assignment rule.)
    * Accepted means handled, evicted, or returned by ``close()``: closing and queueing happen
      under the same lock, and a worker ends only when its queue is empty.
    * Nothing here refers to the ``FlowDispatcher`` itself, so that it can be garbage collected.
"""

from __future__ import annotations

import functools
import logging
import threading
import time
import types
from collections import deque
from collections.abc import Callable
from typing import Any, TypeAlias

from batchmill import lifecycle
from batchmill.cores import available_cores
from batchmill.errors import WouldDeadlockError
from batchmill.flows.queues import Ticket, WorkerQueue
from batchmill.flows.router import Router
from batchmill.flows.settings import (
    Backpressure,
    ErrorHandler,
    FlowSettings,
    Handler,
    method_or_self,
)
from batchmill.flows.stats import CANCELLED, CLOSED, FLOWS, FlowStats, latency_stats
from batchmill.flows.worker import Worker
from batchmill.telemetry import (
    BATCH_SIZES,
    DURATIONS_S,
    Registration,
    default_registry,
    merged,
    register,
)
from batchmill.waiters import TaskWaiter, ThreadWaiter, Waiter
from batchmill.wording import count_of

log = logging.getLogger("batchmill.flows")

Clock: TypeAlias = Callable[[], float]

_JOIN_S = 5.0
"""How long a thread that has nothing left to do may take to end."""


class FlowCore:
    """The dispatcher behind its public class."""

    fork_order = 1
    kind = FLOWS

    def __init__(
        self,
        handler: Handler[Any],
        settings: FlowSettings,
        name: str,
        error_handler: ErrorHandler[Any] | None,
        clock: Clock,
    ) -> None:
        self.handler = handler
        self.consume = method_or_self("handler", handler, "consume", "(batch)")
        self.on_error = (
            None
            if error_handler is None
            else method_or_self("error_handler", error_handler, "on_error", "(batch, error)")
        )
        self.settings = settings
        self.name = name
        self.clock = clock
        self.cores = available_cores()
        self.abandoned = False
        self.deadline = 0.0
        self._registration: Registration | None = None
        self._reset()

    def _reset(self) -> None:
        self.lock = threading.Lock()
        self.router = Router(self.settings)
        self.workers = [Worker(self, queue) for queue in self.router.queues]
        self.orphans: deque[Ticket] = deque()
        """Tickets whose task was destroyed; a finaliser puts them here and takes no lock."""
        self.done = False
        self._ended = 0
        self._closers: list[Waiter] = []

    def start(self) -> None:
        """Start the workers; if the system refuses a thread, stop those that have one."""
        try:
            for worker in self.workers:
                worker.thread.start()
        except BaseException:
            with self.lock:
                for worker in self.workers:
                    if worker.thread.ident is None:
                        self.worker_ended()
            self.begin_close()
            raise
        if self._registration is None:  # else this is a forked child
            self._registration = register(self)

    def current_worker(self) -> Worker | None:
        """The worker whose handler is calling, if one is."""
        # By the thread itself: idents are reused when a thread has ended.
        thread = threading.current_thread()
        for worker in self.workers:
            if worker.thread is thread:
                return worker
        return None

    def join_waiting(self, ticket: Ticket, timeout: float | None) -> bool:
        """Let a producer whose signal was not queued wait; False when it is refused instead.

        The caller holds the lock, and has held it since the router refused the signal.
        """
        patient = self.settings.backpressure is Backpressure.BLOCK and ticket.reason != CLOSED
        if not patient or (timeout is not None and timeout <= 0):
            self.router.refuse(ticket.key, ticket.finish, ticket.reason, self.clock())
            return False
        if self.orphans:
            self.remove_orphans()
        self.router.add_waiting(ticket, self.clock())
        worker = self.current_worker()
        if worker is None or ticket.granted:
            return True
        if _may_wait(ticket, worker.queue, timeout):
            if timeout is None:
                worker.queue.blocked_on = ticket.queue
            return True
        self.router.give_up(ticket, ticket.reason, self.clock())
        if timeout is None:
            raise WouldDeadlockError(self.name, "dispatch() for which there is no room")
        return False

    def wait(self, ticket: Ticket, waiter: ThreadWaiter, timeout: float | None) -> bool:
        """Wait for room; whether the signal was queued."""
        waiter.wait(timeout)
        with self.lock:
            return self._end_wait(ticket)

    async def wait_in_task(self, ticket: Ticket, waiter: TaskWaiter, timeout: float | None) -> bool:
        """Like :meth:`wait`, but only the task waits, not the thread."""
        try:
            await waiter.wait(timeout)
        except GeneratorExit:  # the task is destroyed, perhaps by the garbage collector
            # Possibly inside a section that holds the lock, so the lock must not be taken here.
            self.orphans.append(ticket)
            self._wake_workers()
            raise
        except BaseException:
            with self.lock:
                self._unblock()
                self.router.give_up(ticket, CANCELLED, self.clock())
            raise
        with self.lock:
            return self._end_wait(ticket)

    def _end_wait(self, ticket: Ticket) -> bool:
        self._unblock()
        now = self.clock()
        if ticket.granted:  # also when that came together with the timeout
            return self.router.accept_granted(ticket, now)
        self.router.give_up(ticket, ticket.reason, now)
        return False

    def _unblock(self) -> None:
        worker = self.current_worker()
        if worker is not None:
            worker.queue.blocked_on = None

    def interrupted(self, ticket: Ticket | None) -> None:
        """An asynchronous exception (Ctrl-C) hit a producer, perhaps in the middle of a change."""
        with self.lock:
            self.router.interrupt(ticket, self.clock())

    def remove_orphans(self) -> None:
        """Give up the tickets of destroyed tasks. Under the lock."""
        while self.orphans:
            self.router.give_up(self.orphans.popleft(), CANCELLED, self.clock())

    def begin_close(self) -> None:
        """Accept no more and let the workers drain; does not wait."""
        with self.lock:
            if self.router.closed:
                return
            self.deadline = time.monotonic() + self.settings.close_timeout
            self.router.close()
            self._wake_workers()

    def abandon(self) -> None:
        """The dispatcher was garbage collected: have the workers close it.

        Called by a finaliser, which may run in any thread at any point, so it takes no lock.
        """
        lifecycle.keep(self)
        for worker in self.workers:
            worker.revived = self  # its weak reference may have been cleared already
        self.abandoned = True
        self._wake_workers()

    def _wake_workers(self) -> None:
        for queue in self.router.queues:
            queue.waiter.wake()

    def worker_ended(self) -> None:
        """A worker has nothing left to do; the last one wakes those that wait. Under the lock."""
        self._ended += 1
        if self._ended == len(self.workers):
            self.done = True
            lifecycle.release(self)
            for closer in self._closers:
                closer.wake()

    def await_end(self, waiter: Waiter) -> bool:
        """Have ``waiter`` woken when all is drained; False when it is already."""
        with self.lock:
            if not self.done:
                self._closers.append(waiter)
            return not self.done

    def stop_awaiting(self, waiter: Waiter) -> None:
        """Undo what :meth:`await_end` did."""
        with self.lock:
            if waiter in self._closers:
                self._closers.remove(waiter)

    def await_close(self) -> None:
        """At interpreter exit: wait for the drain until its deadline, and log what is left."""
        waiter = ThreadWaiter()
        if self.await_end(waiter):
            waiter.wait(self.deadline - time.monotonic())
        left = self.take_back()
        if left:
            log.warning(
                "batchmill flows %s: the interpreter ended before %s could be processed",
                self.name,
                count_of(len(left), "signal"),
            )

    def take_back(self) -> list[Any]:
        """Remove all that is queued; the signals in the order they were dispatched."""
        with self.lock:
            left = [entry[0] for entry in self.router.clear(self.clock())]
        self.leave_registry()
        return left

    def leave_registry(self) -> None:
        """Take it from the registry if it is closed and all workers have ended."""
        if self.done and self._registration is not None:
            self._registration.close(self)

    def join(self) -> None:
        """Wait for the threads to end if all is drained."""
        deadline = time.monotonic() + _JOIN_S
        for worker in self.workers:
            if self.done and worker.thread.ident is not None:
                worker.thread.join(max(0.0, deadline - time.monotonic()))

    def after_fork_in_child(self) -> None:
        """Start anew and empty: queued signals and threads are the parent's."""
        closed = self.router.closed
        self._reset()
        if closed:
            self.router.closed = True
            self.done = True
        else:
            self.start()

    def stats(self) -> FlowStats:
        """The dispatcher now; flows idle for too long are forgotten.

        Its counts are of one critical section. What was measured of handler calls is read after
        it, and may be of a call or two later.
        """
        with self.lock:
            now = self.clock()
            router = self.router
            router.expire(now)
            waiting = router.waiting_per_queue()
            snapshot = functools.partial(
                FlowStats,
                name=self.name,
                running=not router.closed,
                policy=self.settings.backpressure,
                workers=tuple(worker.stats(waiting[worker.queue], now) for worker in self.workers),
                cores=self.cores,
                ingress_depth=router.ingress_depth,
                ingress_capacity=self.settings.ingress_capacity,
                blocked=router.waiting,
                dispatched=router.dispatched,
                refused=types.MappingProxyType(dict(router.refused)),
                evicted=types.MappingProxyType(dict(router.evicted)),
                unprocessed=router.unprocessed,
                assigned_flows=router.flows.assigned,
                completed_flows=router.flows.completed,
                active_flows=router.flows.active,
                expired_flows=router.flows.expired,
                displaced_flows=router.flows.displaced,
                assignment_failures=router.assignment_failures,
            )
        # Without the lock: adding up histograms takes long enough to hold up producers.
        workers = self.workers
        return snapshot(
            handler_latency=latency_stats(worker.latency for worker in workers),
            wait=latency_stats(worker.wait for worker in workers),
            batch_sizes=merged(
                BATCH_SIZES,
                [tuple(worker.batch_sizes) for worker in workers],
                sum(worker.items for worker in workers),
            ),
            handler_seconds=merged(
                DURATIONS_S,
                [tuple(worker.durations) for worker in workers],
                sum(worker.busy_s for worker in workers),
            ),
        )


def snapshot_flows() -> tuple[FlowStats, ...]:
    """The stats of every running dispatcher of this process, sorted by name."""
    snapshots = [core.stats() for core in default_registry.components(FLOWS)]
    return tuple(stats for stats in snapshots if stats.running)


def _may_wait(ticket: Ticket, own: WorkerQueue, timeout: float | None) -> bool:
    """Whether a handler that runs on ``own`` can wait for this ticket without a deadlock.

    Waiting for another worker's queue is safe unless that worker waits, directly or through
    others, for this one: what becomes free there is for its own producers only. A place among the
    flows may depend on this very handler, so it is waited for only with a timeout.
    """
    if timeout is not None:
        return ticket.queue is not own
    queue = ticket.queue
    if queue is None or queue.depth == 0:
        return False
    while queue is not None:
        if queue is own:
            return False
        queue = queue.blocked_on
    return True
