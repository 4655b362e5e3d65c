"""Entries that answer a thread's future, and entries that answer an asyncio task's."""

from __future__ import annotations

import asyncio
import threading
import weakref
from collections import deque
from concurrent.futures import Future, InvalidStateError
from typing import Any

from batchmill.batcher.future import ItemFuture
from batchmill.batcher.pending import Entry
from batchmill.batcher.result import ItemResult


class ThreadEntry(Entry):
    """Answers a ``concurrent.futures.Future``."""

    __slots__ = ("future",)

    def __init__(self, item: Any, since: float, deadline: float | None) -> None:
        super().__init__(item, since, deadline)
        self.future: Future[ItemResult[Any]] = ItemFuture()

    def start(self) -> bool:
        try:
            return self.future.set_running_or_notify_cancel()
        except (InvalidStateError, RuntimeError):  # its owner answered it himself
            return False

    def is_cancelled(self) -> bool:
        return self.future.cancelled()

    def resolve(self, result: ItemResult[Any]) -> None:
        try:
            self.future.set_result(result)
        except InvalidStateError:  # cancelled by its owner at the last moment
            pass


class TaskEntry(Entry):
    """Answers an asyncio future, by way of its loop's mailbox."""

    __slots__ = ("future", "mailbox")

    def __init__(
        self,
        item: Any,
        since: float,
        deadline: float | None,
        mailbox: LoopMailbox,
        future: asyncio.Future[ItemResult[Any]],
    ) -> None:
        super().__init__(item, since, deadline)
        self.mailbox = mailbox
        self.future = future

    def start(self) -> bool:
        return not self.future.cancelled()

    def is_cancelled(self) -> bool:
        return self.future.cancelled()

    def resolve(self, result: ItemResult[Any]) -> None:
        self.mailbox.post(self.future, result)


class LoopMailbox:
    """Carries answers to one event loop; however many come, the loop is called once.

    It does not keep the loop: mailboxes are kept by loop, and a loop that is gone takes its own.
    """

    __slots__ = ("_lock", "_loop", "_mail", "_rung")

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = weakref.ref(loop)
        self._mail: deque[tuple[asyncio.Future[ItemResult[Any]], ItemResult[Any]]] = deque()
        self._lock = threading.Lock()
        self._rung = False

    def post(self, future: asyncio.Future[ItemResult[Any]], result: ItemResult[Any]) -> None:
        with self._lock:
            self._mail.append((future, result))
            if self._rung:
                return
            self._rung = True
        loop = self._loop()
        try:
            if loop is not None:
                loop.call_soon_threadsafe(self._deliver)
        except RuntimeError:  # the loop is closed, and its tasks with it
            self._mail.clear()

    def _deliver(self) -> None:
        with self._lock:
            mail, self._mail = self._mail, deque()
            self._rung = False
        for future, result in mail:
            if not future.done():
                future.set_result(result)
