"""Where questions to the store are answered: on threads, a bounded number at a time.

The event loop never waits for a database. Each thread has a store of its own, opened when it is
first needed and let go of when it fails: one that is not there yet, was replaced by another or
restarted is found again by the next question.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

from batchmill.errors import BatchmillError, ConfigError
from batchmill.sources import UnknownNameError
from batchmill.store import RetryPolicy, Store, StoreClosedError, open_store
from batchmill.web.errors import BadQuestion, Refused, Unavailable

T = TypeVar("T")

THREADS = 4
MOST_UNDER_WAY = 16
"""So many questions are answered, or wait for a thread; one more is refused."""
RETRY = RetryPolicy(give_up_after_s=2.0, max_ms=500)
"""Whoever asks waits no longer than this for a database that is busy or gone."""
_FILE = "sqlite:///"


class Desk:
    """Answers questions about one store; may be asked from any task of an event loop.

    ``close()`` waits for the questions under way.
    """

    def __init__(self, store_url: str) -> None:
        self._url = store_url
        path = store_url.removeprefix(_FILE)
        self._path = Path(path) if path != store_url else None
        self._free: list[tuple[Store, object]] = []
        self._lock = threading.Lock()
        self._under_way = 0
        self.ending = False
        """Whether the server was told to stop: what has no end of its own ends then."""
        self._threads: ThreadPoolExecutor | None = None
        self.answers: Counter[str] = Counter()
        """How many questions were answered, by what: ``ok``, or why not. Counted on the loop."""

    async def ask(self, work: Callable[[Store], T]) -> T:
        """What ``work`` says of the store, on a thread; :class:`Unavailable` if it cannot."""
        return await self.run(lambda: self._answer(work))

    async def run(self, work: Callable[[], T]) -> T:
        """What ``work`` answers, on a thread; :class:`Unavailable` if all are taken."""
        with self._admitted(), self._counted():
            if self._threads is None:
                self._threads = ThreadPoolExecutor(THREADS, "batchmill-web")
            return await asyncio.get_running_loop().run_in_executor(self._threads, work)

    def close(self) -> None:
        """Take no more questions, and let go of the store."""
        self.ending = True
        if self._threads is not None:
            self._threads.shutdown(cancel_futures=True)
            self._threads = None
        with self._lock:
            stores, self._free = self._free, []
        for store, _ in stores:
            store.close()

    @contextlib.contextmanager
    def _admitted(self) -> Iterator[None]:
        """Counted on the event loop alone."""
        if self.ending:
            raise Unavailable("the server is ending: ask again when it is back")
        if self._under_way >= MOST_UNDER_WAY:
            self.answers["too many"] += 1
            raise Unavailable(
                f"{MOST_UNDER_WAY} questions are under way already: ask again in a moment", 1
            )
        self._under_way += 1
        try:
            yield
        finally:
            self._under_way -= 1

    @contextlib.contextmanager
    def _counted(self) -> Iterator[None]:
        try:
            yield
        except Unavailable:
            self.answers["unavailable"] += 1
            raise
        except Refused:
            self.answers["refused"] += 1
            raise
        except BaseException:
            self.answers["failed"] += 1
            raise
        self.answers["ok"] += 1

    def _answer(self, work: Callable[[Store], T]) -> T:
        with self._store() as store:
            return work(store)

    @contextlib.contextmanager
    def _store(self) -> Iterator[Store]:
        """A store for one question; one that failed is closed, not kept."""
        try:
            mark = self._mark()
            store = self._taken(mark) or self._opened()
            kept = False
            try:
                yield store
                kept = True
            except (Refused, UnknownNameError, ConfigError):
                kept = True  # the question was at fault, not the store
                raise
            finally:
                if kept:
                    with self._lock:
                        self._free.append((store, mark))
                else:
                    store.close()
        except (UnknownNameError, ConfigError) as error:
            raise BadQuestion(str(error)) from error
        except StoreClosedError:
            raise Unavailable("the server is ending: ask again when it is back") from None
        except (BatchmillError, OSError) as error:
            raise Unavailable(f"the store cannot be read: {error}") from error

    def _opened(self) -> Store:
        try:
            return open_store(self._url, retry=RETRY, create=False)
        except ConfigError as error:  # of the address, which whoever asks has not given
            raise Unavailable(f"the store cannot be read: {error}") from error

    def _taken(self, mark: object) -> Store | None:
        with self._lock:
            stale = [store for store, was in self._free if was != mark]
            self._free = [each for each in self._free if each[1] == mark]
            found = self._free.pop()[0] if self._free else None
        for each in stale:
            each.close()
        return found

    def _mark(self) -> object:
        """What tells one database file from another that took its place."""
        if self._path is None:
            return None
        try:
            stat = self._path.stat()
        except OSError:  # opening it says what is wrong
            return None
        return stat.st_dev, stat.st_ino
