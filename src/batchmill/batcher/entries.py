"""A submitted item on its way through the batcher, and the future that its submitter waits on.

Guarantees of ``ItemFuture``
    * The condition is made under ``_lock``, once, and never goes away.
    * Without a condition the state changes under ``_lock`` only; with one, under the condition, as
      in the base class. So no change is lost, and a thread that waits (and so has a condition) is
      notified.
    * The result is set before the state says so: ``result()`` may look without a lock.

It uses names of ``concurrent.futures.Future`` that are not public. Where a Python has others,
``ItemFuture`` is the base class itself: slower, and just as right.
"""

from __future__ import annotations

import asyncio
import os
import threading
import weakref
from collections import deque
from collections.abc import Hashable
from concurrent.futures import Future, InvalidStateError
from typing import Any, Literal, TypeAlias, TypeVar

from batchmill.batcher.result import DeadlineExceededError, ItemResult, Outcome
from batchmill.pressure import ThresholdLevel

T = TypeVar("T")

Ending: TypeAlias = Literal["succeeded", "failed", "rejected", "dropped", "expired", "cancelled"]
"""How an entry ended: the counter of BatcherStats that counts it."""


class Entry:
    """A submitted item; subclasses know how to answer its submitter.

    It ends once: whoever has taken it (out of the queue, a batch, the intake) sets ``ending`` and
    ``result`` and then has it counted and answered.
    """

    __slots__ = (
        "__weakref__",
        "accepted_at",
        "attempt",
        "deadline",
        "ending",
        "item",
        "key",
        "result",
        "sent",
        "seq",
        "submitted_at",
        "weight",
    )

    def __init__(self, item: Any, now: float, deadline: float | None) -> None:
        self.item = item
        self.submitted_at = now
        self.accepted_at = now  # linger counts from here
        self.deadline = deadline
        self.seq = 0  # its number in the order of acceptance, from 1
        self.sent = False
        self.attempt = 1
        self.weight = 0.0
        self.key: Hashable = None
        self.ending: Ending
        self.result: ItemResult[Any] | None  # None: cancelled, there is nobody to answer

    def start(self) -> bool:
        """The item is about to be sent; False when its submitter cancelled it."""
        raise NotImplementedError

    def is_cancelled(self) -> bool:
        """Whether its submitter has cancelled it; unlike start(), it changes nothing."""
        raise NotImplementedError

    def resolve(self, result: ItemResult[Any]) -> None:
        """Answer the submitter; does nothing if it has cancelled."""
        raise NotImplementedError

    def fail(self, ending: Ending, error: BaseException) -> Entry:
        """End with an error."""
        self.ending = ending
        self.result = ItemResult(self.item, Outcome.FAILURE, error=error)
        return self

    def expire(self, now: float) -> Entry:
        """End because its deadline has passed."""
        return self.fail("expired", DeadlineExceededError(now - self.submitted_at))

    def drop(self, level: ThresholdLevel | None) -> Entry:
        """End because a threshold dropped it."""
        self.ending = "dropped"
        self.result = ItemResult(self.item, Outcome.DROPPED, level=level)
        return self

    def cancel(self) -> Entry:
        """End without an answer: its submitter does not want one."""
        self.ending = "cancelled"
        self.result = None
        return self

    def share(self, ending: Ending, result: ItemResult[Any]) -> Entry:
        """End like an entry with an equal key."""
        if not self.start():
            return self.cancel()
        self.ending = ending
        self.result = ItemResult(
            self.item, result.outcome, result.value, result.error, result.level
        )
        return self


class ThreadEntry(Entry):
    """Answers a ``concurrent.futures.Future``."""

    __slots__ = ("future",)

    def __init__(self, item: Any, now: float, deadline: float | None) -> None:
        super().__init__(item, now, deadline)
        self.future: Future[ItemResult[Any]] = ItemFuture()

    def start(self) -> bool:
        try:
            return self.future.set_running_or_notify_cancel()
        except (InvalidStateError, RuntimeError):  # its owner has set a result
            return False

    def is_cancelled(self) -> bool:
        return self.future.cancelled()

    def resolve(self, result: ItemResult[Any]) -> None:
        try:
            self.future.set_result(result)
        except InvalidStateError:  # cancelled by its owner at the last moment
            pass


class TaskEntry(Entry):
    """Answers an asyncio future, through the mailbox of its loop."""

    __slots__ = ("future", "mailbox")

    def __init__(
        self,
        item: Any,
        now: float,
        deadline: float | None,
        mailbox: LoopMailbox,
        future: asyncio.Future[ItemResult[Any]],
    ) -> None:
        super().__init__(item, now, deadline)
        self.mailbox = mailbox
        self.future = future

    def start(self) -> bool:
        return not self.future.cancelled()

    def is_cancelled(self) -> bool:
        return self.future.cancelled()

    def resolve(self, result: ItemResult[Any]) -> None:
        self.mailbox.post(self.future, result)


class LoopMailbox:
    """Passes answers to one event loop, with one call of the loop for all that are waiting.

    It holds the loop weakly: mailboxes are kept by loop and must not keep their loop alive.
    """

    __slots__ = ("_lock", "_loop", "_mail", "_scheduled")

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = weakref.ref(loop)
        self._mail: deque[tuple[asyncio.Future[ItemResult[Any]], ItemResult[Any]]] = deque()
        self._lock = threading.Lock()
        self._scheduled = False

    def post(self, future: asyncio.Future[ItemResult[Any]], result: ItemResult[Any]) -> None:
        with self._lock:
            self._mail.append((future, result))
            if self._scheduled:
                return
            self._scheduled = True
        loop = self._loop()
        try:
            if loop is not None:
                loop.call_soon_threadsafe(self._deliver)
        except RuntimeError:  # the loop is closed, and its tasks with it
            self._mail.clear()

    def _deliver(self) -> None:
        with self._lock:
            mail, self._mail = self._mail, deque()
            self._scheduled = False
        for future, result in mail:
            if not future.done():
                future.set_result(result)


_PENDING, _RUNNING, _FINISHED = "PENDING", "RUNNING", "FINISHED"
_KNOWN_NAMES = {
    "_condition",
    "_state",
    "_result",
    "_exception",
    "_waiters",
    "_done_callbacks",
}
# Re-entrant: a finaliser may use another future in the middle of this.
_lock = threading.RLock()


class _LazyFuture(Future[T]):
    """A Future that makes its condition on demand.

    Most of what a Future costs is the condition for those who wait, and most futures of a batcher
    are answered before anybody does.
    """

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
"""The future that ``submit()`` returns."""


def _renew_lock() -> None:
    global _lock
    _lock = threading.RLock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_renew_lock)
