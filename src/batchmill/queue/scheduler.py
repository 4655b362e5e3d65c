"""The scheduler: a small thread pool that runs drain tasks when they are woken or due.

Guarantees
    * A woken task is run soon, by some thread of the pool; a pool with nothing to do costs no CPU.
    * Ready tasks take turns: one that always has more to do goes to the back of the ready queue
      whenever another waits.
    * An idle pool holds no reference to any task, so an abandoned queue can be collected.

A dedicated queue has a scheduler of its own with a thread per task; a shared one is used by
several queues of a manager. Threads are daemons: the exit hook (:mod:`batchmill.lifecycle`) drains
the queues first, and after that no thread of a queue may keep the interpreter from ending.
"""

from __future__ import annotations

import heapq
import itertools
import logging
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

from batchmill import lifecycle
from batchmill.queue.task import DrainTask, cell_of_thread
from batchmill.waiters import ThreadWaiter

log = logging.getLogger("batchmill.queue")

T = TypeVar("T")

_NEVER = float("inf")


class ReadyQueue(Generic[T]):
    """Tasks that are ready to run, and the threads that sleep until there is one.

    * ``put`` takes no lock and may be called from anywhere, a finaliser or a signal handler too.
    * No task waits while a thread sleeps: ``put`` wakes one after adding, a thread checks once
      more after it joined the sleepers, and one that takes a task while others wait wakes another.
    * Of several sleepers the last one is woken: what it needs is still in the CPU's caches.

    It relies on ``deque.append``, ``pop``, ``popleft`` and ``remove`` each being atomic. Why not
    ``queue.SimpleQueue``: before Python 3.13 its timed ``get``, with several threads taking, may
    wait for ever when a woken thread loses the item to another one just as its time is up.
    """

    def __init__(self) -> None:
        self._tasks: deque[T] = deque()
        self._sleepers: deque[ThreadWaiter] = deque()
        self._closed = False
        self._nudged = False

    def put(self, task: T) -> None:
        """Add a task and wake a thread for it."""
        self._tasks.append(task)
        self._wake_one()

    def empty(self) -> bool:
        """Whether no task waits."""
        return not self._tasks

    def _wake_one(self) -> None:
        """Wake one sleeping thread, if there is one.

        The thread itself leaves the list of sleepers: interrupted here, no thread is off the list
        and still asleep.
        """
        try:
            sleeper = self._sleepers[-1]
        except IndexError:
            return
        sleeper.wake()

    def nudge(self) -> None:
        """Have a thread return from ``get``: a sleeping one, or else the next to fall asleep."""
        self._nudged = True
        self._wake_one()

    def close(self) -> None:
        """Let no thread sleep any more."""
        self._closed = True
        for sleeper in list(self._sleepers):
            sleeper.wake()

    def get(self, waiter: ThreadWaiter, timeout_s: float | None) -> T | None:
        """The next task; None when the thread was woken, or ``timeout_s`` passed, without one.

        ``waiter`` is the calling thread's own.
        """
        task = self._take()
        if task is not None:
            return task
        self._sleepers.append(waiter)
        # Checked again only now: an earlier put, close or nudge may have seen no sleeper.
        if not (self._tasks or self._closed or self._nudged):
            waiter.wait(timeout_s)
        self._nudged = False
        self._sleepers.remove(waiter)
        return self._take()

    def _take(self) -> T | None:
        try:
            task = self._tasks.popleft()
        except IndexError:
            return None
        if self._tasks:
            self._wake_one()
        return task


class Scheduler:
    """Runs drain tasks on ``threads`` threads until the last user has released it."""

    def __init__(self, name: str, threads: int, cores: int) -> None:
        self.name = name
        self.size = threads
        self.cores = cores
        """The cores that the number of threads was resolved for."""
        self.users = 0
        self._reset()

    def _reset(self) -> None:
        self._pid = os.getpid()
        self._ready: ReadyQueue[DrainTask] = ReadyQueue()
        self.submit: Callable[[DrainTask], None] = self._ready.put
        self._timers: list[tuple[float, int, weakref.ref[DrainTask]]] = []
        self._timer_ids = itertools.count()
        self._lock = threading.Lock()
        self._next_check = [_NEVER] * self.size  # when each thread looks at the timers again
        self.waiting = 0  # threads whose handler waits for room in a partition
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
                name = f"batchmill-{self.name}-{index}"
                thread = threading.Thread(target=self._loop, args=(index,), name=name, daemon=True)
                thread.start()
                self.threads.append(thread)
        except RuntimeError:  # the system has no thread left: do not run with half of them
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
        """Wait for the threads of a released scheduler to end, except for the calling one."""
        for thread in self.threads:
            if thread is not threading.current_thread():
                thread.join(max(0.0, deadline - time.monotonic()))

    def submit_later(self, task: DrainTask, delay_s: float) -> None:
        """Run ``task`` after ``delay_s``, if it still exists then; replaces an earlier call.

        A task has one live timer at most. A later time only moves ``wake_at``, and the timer is set
        again when it goes off too early; a sooner time gets a new timer, and the old one is ignored
        when it goes off.
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

    def has_ready_tasks(self) -> bool:
        """Whether the running task should yield its thread to another."""
        if not self._ready.empty():
            return True
        timers = self._timers
        try:
            return bool(timers) and timers[0][0] <= time.monotonic()
        except IndexError:  # another thread took the last timer
            return False

    def after_fork_in_child(self) -> None:
        """Start new threads: the parent's do not exist here, and its locks may be held.

        Every queue of a shared scheduler calls this; only the first call has an effect.
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
                self._next_check[index] = _NEVER
                if self._timers:
                    self._leave_timers_to_others()
                try:
                    task.run(cell)
                except BaseException:  # a bug in a task must not cost the pool a thread
                    log.exception("batchmill scheduler %s: a drain task failed", self.name)
                if ready is not self._ready:
                    lifecycle.leave_forked_child()
            elif self.stopping and ready.empty():
                return
            del task  # an idle thread must not keep a queue alive

    def _leave_timers_to_others(self) -> None:
        """This thread is about to be busy: make sure that another one serves the next timer.

        The others may be waiting for a later time, or for none: they do not know of timers that
        were set since.
        """
        with self._lock:
            due = self._timers[0][0] if self._timers else _NEVER
        if self.size > 1 and due < min(self._next_check):
            self._ready.nudge()

    def _fire_timers(self, index: int) -> float | None:
        """Submit what is due; seconds until the next timer, or None."""
        self._next_check[index] = _NEVER
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
                self._next_check[index] = self._timers[0][0]
                wait = self._timers[0][0] - now
        for task in due:
            task.wake()
        return wait
