"""A future that is cheap while nobody waits for it.

Most of what a ``concurrent.futures.Future`` costs is the condition it makes for those who wait, and
most futures of a batcher are answered before anybody does. This one makes it on demand.

Guarantees
    * The condition is made under ``_lock``, once, and never goes away.
    * Without a condition the state changes under ``_lock`` only; with one, under the condition, as
      in the base class. So no change is lost, and whoever waits (and so has a condition) is told.
    * A result is there before the state says so: ``result()`` may look without a lock.

It leans on names of the base class that are not public. Where a Python has others, ``ItemFuture``
is the base class itself: slower, and just as right.
"""

from __future__ import annotations

import os
import threading
from concurrent.futures import Future
from typing import Any, TypeVar

T = TypeVar("T")

_PENDING, _RUNNING, _FINISHED = "PENDING", "RUNNING", "FINISHED"
_KNOWN_NAMES = {
    "_condition",
    "_state",
    "_result",
    "_exception",
    "_waiters",
    "_done_callbacks",
}
# Re-entrant: a finaliser may touch another future in the middle of this.
_lock = threading.RLock()


class _LazyFuture(Future[T]):
    """A Future whose condition is made when somebody needs it."""

    def __init__(self) -> None:
        # Not super().__init__(): it would make the condition.
        self._own: threading.Condition | None = None
        self._state = _PENDING
        self._result: T | None = None
        self._exception: BaseException | None = None
        self._waiters: list[Any] = []
        self._done_callbacks: list[Any] = []

    @property
    def _condition(self) -> threading.Condition:  # type: ignore[override]
        own = self._own
        if own is None:
            fresh = threading.Condition()
            with _lock:
                own = self._own
                if own is None:
                    own = self._own = fresh
        return own

    def set_running_or_notify_cancel(self) -> bool:
        with _lock:
            if self._own is None and self._state == _PENDING:
                self._state = _RUNNING
                return True
        return super().set_running_or_notify_cancel()

    def set_result(self, result: T) -> None:
        with _lock:
            if self._own is None and self._state in (_PENDING, _RUNNING):
                self._result = result
                self._state = _FINISHED
                return
        super().set_result(result)

    def result(self, timeout: float | None = None) -> T:
        if self._state == _FINISHED and self._exception is None:
            return self._result  # type: ignore[return-value]
        return super().result(timeout)


ItemFuture = _LazyFuture if set(vars(Future())) == _KNOWN_NAMES else Future
"""The future that a batcher gives to threads."""


def _renew_lock() -> None:
    global _lock
    _lock = threading.RLock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_renew_lock)
