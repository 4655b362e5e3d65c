"""The threads: a small pool that runs drain tasks when they are woken or when their time comes.

Guarantees
    * A woken task is run soon, by some thread of the pool; a pool with nothing to do costs no CPU.
    * Tasks that are ready take turns: one that has always more to do goes to the back of the line
      whenever another waits.
    * A parked pool holds no reference to any task, so an abandoned queue can be collected.

A dedicated queue has a scheduler of its own with a thread per task; a shared one is handed from
queue to queue by the manager. Threads are daemons: the exit hook drains the queues first
(``_process``), and nothing of ours may keep an interpreter from ending after that.
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

from batchmill import lifecycle
from batchmill.queue.ready import ReadyLine
from batchmill.queue.task import DrainTask, cell_of_thread
from batchmill.waiters import ThreadWaiter

log = logging.getLogger("batchmill.queue")

_NEVER = float("inf")


class Scheduler:
    """Runs drain tasks on ``threads`` threads until the last user has released it."""

    def __init__(self, name: str, threads: int) -> None:
        self.name = name
        self.size = threads
        self.users = 0
        self._reset()

    def _reset(self) -> None:
        self._pid = os.getpid()
        self._ready: ReadyLine[DrainTask] = ReadyLine()
        self._timers: list[tuple[float, int, weakref.ref[DrainTask]]] = []
        self._timer_ids = itertools.count()
        self._lock = threading.Lock()
        self._looks_again_at = [_NEVER] * self.size
        self.waiting = 0  # threads in handlers that wait for room (see _knots)
        self.stopping = False
        self.threads: list[threading.Thread] = []

    def acquire(self) -> None:
        """Count one more user; the first starts the threads."""
        with self._lock:
            if not self.threads:
                self._start_threads()
            self.users += 1

    def _start_threads(self) -> None:
        try:
            for index in range(self.size):
                thread = threading.Thread(
                    target=self._loop,
                    args=(index,),
                    name=f"batchmill-{self.name}-{index}",
                    daemon=True,
                )
                thread.start()
                self.threads.append(thread)
        except RuntimeError:  # the system has no thread left: not with half of them
            self.stopping = True
            self._ready.close()
            raise

    def release(self) -> bool:
        """Count one user less; the last one stops the threads. True when that was the last."""
        with self._lock:
            self.users -= 1
            if self.users:
                return False
            self.stopping = True
        self._ready.close()
        return True

    def join(self, deadline: float) -> None:
        """Wait for the threads of a released scheduler to end, but not for oneself."""
        for thread in self.threads:
            if thread is not threading.current_thread():
                thread.join(max(0.0, deadline - time.monotonic()))

    def submitter(self) -> Callable[[DrainTask], None]:
        """What has a task run as soon as a thread is free: safe to call from anywhere."""
        return self._ready.put

    def submit_later(self, task: DrainTask, delay_s: float) -> None:
        """Run ``task`` after ``delay_s``, if it is still there then; replaces an earlier wish.

        A task has one live timer at most. A wish for later than that one just moves ``wake_at``,
        and the timer is set again when it goes off too early; a wish for sooner gets a new timer,
        and the old one is ignored when it goes off.
        """
        due = time.monotonic() + delay_s
        with self._lock:
            task.wake_at = due
            if task.timer_id < 0 or task.timer_due > due:
                self._set_timer(task)

    def _set_timer(self, task: DrainTask) -> None:
        task.timer_id = next(self._timer_ids)
        task.timer_due = task.wake_at
        heapq.heappush(self._timers, (task.timer_due, task.timer_id, weakref.ref(task)))

    def others_wait(self) -> bool:
        """Whether the running task should let another have the thread."""
        if not self._ready.empty():
            return True
        timers = self._timers
        try:
            return bool(timers) and timers[0][0] <= time.monotonic()
        except IndexError:  # another thread took the last timer
            return False

    def after_fork_in_child(self) -> None:
        """Start anew: the parent's threads do not exist here, and its locks may be held.

        Every queue of a shared scheduler calls this; the first call does it.
        """
        if self._pid == os.getpid():
            return
        running = bool(self.threads) and not self.stopping
        self._reset()
        if running:
            self._start_threads()

    def _loop(self, index: int) -> None:
        ready = self._ready
        cell = cell_of_thread()
        waiter = ThreadWaiter()
        while True:
            task = ready.get(waiter, self._fire_timers(index))
            if task is not None:
                self._looks_again_at[index] = _NEVER
                if self._timers:
                    self._leave_timers_to_others()
                try:
                    task.run(cell)
                except BaseException:  # a fault of ours must not cost the pool a thread
                    log.exception("batchmill scheduler %s: a drain task failed", self.name)
                if ready is not self._ready:
                    lifecycle.leave_forked_child()
            elif self.stopping and ready.empty():
                return
            del task  # a parked thread must not keep a queue alive

    def _leave_timers_to_others(self) -> None:
        """This thread is about to be busy: see that another one looks in time for the next timer.

        The others may be waiting for a later time, or for none: timers set since are unknown to
        them.
        """
        with self._lock:
            due = self._timers[0][0] if self._timers else _NEVER
        if self.size > 1 and due < min(self._looks_again_at):
            self._ready.nudge()

    def _fire_timers(self, index: int) -> float | None:
        """Submit what is due; seconds until the next timer, or None."""
        self._looks_again_at[index] = _NEVER
        if not self._timers:
            return None
        due: list[DrainTask] = []
        wait = None
        with self._lock:
            now = time.monotonic()
            while self._timers and self._timers[0][0] <= now:
                _, timer_id, reference = heapq.heappop(self._timers)
                task = reference()
                if task is None or task.timer_id != timer_id:
                    continue
                task.timer_id = -1
                if task.wake_at > now:
                    self._set_timer(task)
                else:
                    due.append(task)
            if self._timers:
                self._looks_again_at[index] = self._timers[0][0]
                wait = self._timers[0][0] - now
        for task in due:
            task.wake()
        return wait
