"""One thread that calls things when their time comes; it exists only while something waits."""

from __future__ import annotations

import heapq
import itertools
import logging
import threading
import weakref
from collections.abc import Callable
from typing import Any, TypeAlias

from batchmill.batcher.clock import Clock
from batchmill.waiters import ThreadWaiter

log = logging.getLogger("batchmill.batcher")


Subject: TypeAlias = "weakref.ref[Any] | None"

_CLEAR_OUT_AT = 1024


class Timer:
    """Calls functions at given times, in that order, on a single thread."""

    def __init__(self, clock: Clock, name: str) -> None:
        self._clock = clock
        self._name = name
        self.reset()

    def reset(self) -> None:
        """Forget everything: at the start, and in a forked child."""
        self._lock = threading.Lock()
        self._heap: list[tuple[float, int, Callable[[], None], Subject]] = []
        self._clear_out_at = _CLEAR_OUT_AT
        self._ids = itertools.count()
        self._waiter = ThreadWaiter()
        self._thread: threading.Thread | None = None

    def at(self, when: float, action: Callable[[], None], subject: Subject = None) -> None:
        """Have ``action`` called at ``when`` on the clock, unless ``subject`` is gone by then.

        Actions whose subject is gone are cleared out now and then: deadlines that lie far ahead of
        items that were answered long ago take no more room than those that still matter.
        """
        with self._lock:
            heapq.heappush(self._heap, (when, next(self._ids), action, subject))
            if len(self._heap) > self._clear_out_at:
                self._heap = [timed for timed in self._heap if timed[3] is None or timed[3]()]
                heapq.heapify(self._heap)
                self._clear_out_at = max(_CLEAR_OUT_AT, 2 * len(self._heap))
            if self._thread is None:
                thread = threading.Thread(target=self._run, name=self._name, daemon=True)
                thread.start()
                self._thread = thread  # only now: where no thread is to be had, the next at() tries
        self._waiter.wake()

    def cancel_all(self) -> None:
        """Forget what has not been called yet; the thread ends."""
        with self._lock:
            self._heap.clear()
            thread = self._thread
        self._waiter.wake()
        if thread is not None and thread is not threading.current_thread():
            thread.join()

    def _run(self) -> None:
        while True:
            due: list[Callable[[], None]] = []
            with self._lock:
                now = self._clock.now()
                while self._heap and self._heap[0][0] <= now:
                    due.append(heapq.heappop(self._heap)[2])
                if not due and not self._heap:
                    self._thread = None  # under the lock: the next at() starts a new thread
                    return
                until = self._heap[0][0] if self._heap else now
            for action in due:
                try:
                    action()
                except BaseException:  # one action must not cost the others their thread
                    log.exception("batchmill batcher: a timed action failed")
            del due
            if until > now:
                self._clock.wait(self._waiter, until)
