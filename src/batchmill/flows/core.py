"""What the workers share: the lock, the router behind it, the handler, and the way it all ends.

Guarantees
    * One lock, held for a few steps at a time and never while user code runs. (The exception is a
      flow id's own ``__hash__`` and ``__eq__``.)
    * Accepted means handled, evicted, or given back by ``close()``: the gate is closed under the
      same lock under which signals are queued, and a worker ends only when its lane is empty.
    * Nothing here refers to the ``FlowDispatcher`` itself, so that its end can be noticed.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any, TypeAlias

from batchmill import lifecycle
from batchmill.flows.lines import Ticket
from batchmill.flows.router import Router
from batchmill.flows.settings import FlowSettings
from batchmill.flows.stats import CANCELLED
from batchmill.flows.worker import Worker
from batchmill.waiters import ThreadWaiter, Waiter

log = logging.getLogger("batchmill.flows")

Handler: TypeAlias = Callable[[list[Any]], object]
ErrorHandler: TypeAlias = Callable[[list[Any], BaseException], object]
Clock: TypeAlias = Callable[[], float]

_LAST_STEPS_S = 5.0
"""How long a thread that has nothing left to do may take to end."""

_COURTESIES = 20
"""How often a thread lets others run before it queues up for the lock."""


class FlowCore:
    """A dispatcher without its public face."""

    fork_order = 1

    def __init__(
        self,
        handler: Handler,
        config: FlowSettings,
        name: str,
        error_handler: ErrorHandler | None,
        clock: Clock,
    ) -> None:
        self.handler = handler
        self.config = config
        self.name = name
        self.error_handler = error_handler
        self.clock = clock
        self.abandoned = False
        self.deadline = 0.0
        self._reset()

    def _reset(self) -> None:
        self.lock = threading.Lock()
        self.router = Router(self.config)
        self.workers = [Worker(self, lane) for lane in self.router.lanes]
        self.orphans: deque[Ticket] = deque()
        """Tickets whose task was destroyed; a finaliser puts them here and takes no lock."""
        self.done = False
        self._ended = 0
        self._closers: list[Waiter] = []

    def start(self) -> None:
        """Start the workers; where the system refuses a thread, stop those that have one."""
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

    def current_worker(self) -> Worker | None:
        """The worker whose handler is calling, if one is."""
        # By the thread itself: idents are given anew when a thread has ended.
        thread = threading.current_thread()
        for worker in self.workers:
            if worker.thread is thread:
                return worker
        return None

    def give_way(self) -> None:
        """Let the thread that has the lock finish, before queueing up for it.

        Under the GIL a held lock nearly always means that its holder was switched out in the few
        steps it needs it for. Whoever blocks on it then is handed the lock, in the kernel, long
        before its turn to run comes; whoever runs meanwhile blocks in turn, and soon there is a
        thread switch for every signal. Yielding first avoids that queue; where it was tried (four
        producers, two cores, CPython 3.11) dispatching became several times as fast. It is a
        courtesy, not a lock: what follows takes the lock as ever.
        """
        for _ in range(_COURTESIES):
            time.sleep(0)
            if not self.lock.locked():
                return

    def begin_close(self) -> None:
        """Close the gate and send the workers to the final drain; waits for nobody."""
        with self.lock:
            if self.router.closed:
                return
            self.deadline = time.monotonic() + self.config.close_timeout
            self.router.close()
            self._wake_workers()

    def abandon(self) -> None:
        """Nobody has the dispatcher any more: have the workers close it.

        Called by a finaliser, which may run in any thread at any point, so it takes no lock.
        """
        lifecycle.keep(self)
        for worker in self.workers:
            worker.revived = self  # its weak reference may have been cleared already
        self.abandoned = True
        self._wake_workers()

    def _wake_workers(self) -> None:
        for lane in self.router.lanes:
            lane.parked.wake()

    def worker_ended(self) -> None:
        """A worker has nothing left to do; the last one tells whoever waits. Under the lock."""
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
        """The other side of :meth:`await_end`."""
        with self.lock:
            if waiter in self._closers:
                self._closers.remove(waiter)

    def await_close(self) -> None:
        """Wait for the drain until its deadline, and say what was not processed: at exit."""
        waiter = ThreadWaiter()
        if self.await_end(waiter):
            waiter.wait(self.deadline - time.monotonic())
        left = self.take_back()
        if left:
            log.warning(
                "batchmill flows %s: %d signals were not processed before the interpreter ended",
                self.name,
                len(left),
            )

    def take_back(self) -> list[Any]:
        """All that is queued, out of the queues, in the order it was dispatched."""
        with self.lock:
            return [entry[0] for entry in self.router.clear(self.clock())]

    def join(self) -> None:
        """Let the threads of a dispatcher that is done come to their end."""
        deadline = time.monotonic() + _LAST_STEPS_S
        for worker in self.workers:
            if self.done and worker.thread.ident is not None:
                worker.thread.join(max(0.0, deadline - time.monotonic()))

    def interrupted(self, ticket: Ticket | None) -> None:
        """An exception out of the blue (Ctrl-C) hit a producer, perhaps in mid-step."""
        with self.lock:
            self.router.interrupt(ticket, self.clock())

    def orphan(self, ticket: Ticket) -> None:
        """The task that waited was destroyed. Called by a finaliser: no lock."""
        self.orphans.append(ticket)
        self._wake_workers()

    def bury_orphans(self) -> None:
        """Give up the tickets of destroyed tasks. Under the lock."""
        while self.orphans:
            self.router.give_up(self.orphans.popleft(), CANCELLED, self.clock())

    def after_fork_in_child(self) -> None:
        """Start anew and empty: what was queued is the parent's, and so are the threads."""
        closed, assignment = self.router.closed, self.router.assignment
        self._reset()
        self.router.assignment = assignment
        if closed:
            self.router.closed = True
            self.done = True
        else:
            self.start()
