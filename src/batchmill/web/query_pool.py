"""Runs queries against the store on a bounded number of threads.

The event loop never waits for a database. Each thread uses a store of its own, opened on first use
and closed when it fails: a store that does not exist yet, was replaced or restarted is opened again
by the next query.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from batchmill.errors import BatchmillError, ConfigError
from batchmill.sources import UnknownNameError
from batchmill.store import RetryPolicy, Store, StoreClosedError, open_store
from batchmill.web.responses import BadRequest, RequestError, Unavailable

T = TypeVar("T")

THREADS = 4
MOST_RUNNING = 16
"""Queries that run or wait for a thread; one more is refused."""
RETRY = RetryPolicy(give_up_after_s=2.0, max_ms=500)
"""How long a query waits for a database that is busy or gone."""
_FILE = "sqlite:///"


@dataclass(frozen=True, slots=True)
class _IdleStore:
    store: Store
    file_id: object


class QueryPool:
    """Runs queries on one store; may be used from any task of an event loop.

    ``close()`` waits for the running queries.
    """

    def __init__(self, store_url: str) -> None:
        self._url = store_url
        path = store_url.removeprefix(_FILE)
        self._path = Path(path) if path != store_url else None
        self._idle: list[_IdleStore] = []
        self._lock = threading.Lock()
        self._running = 0
        self.ending = False
        """Whether the server is stopping: endless responses end then."""
        self._threads: ThreadPoolExecutor | None = None
        self.answers: Counter[str] = Counter()
        """Number of queries by result: ``ok``, or why not. Counted on the loop."""

    async def query(self, work: Callable[[Store], T]) -> T:
        """Run ``work`` with a store on a thread; :class:`Unavailable` if it cannot be read."""
        return await self.run(lambda: self._run(work))

    async def run(self, work: Callable[[], T]) -> T:
        """Run ``work`` on a thread; :class:`Unavailable` if too many queries run already."""
        with self._admitted(), self._counted():
            if self._threads is None:
                self._threads = ThreadPoolExecutor(THREADS, "batchmill-web")
            return await asyncio.get_running_loop().run_in_executor(self._threads, work)

    def close(self) -> None:
        """Accept no more queries, and close the stores."""
        self.ending = True
        if self._threads is not None:
            self._threads.shutdown(cancel_futures=True)
            self._threads = None
        with self._lock:
            stores, self._idle = self._idle, []
        for idle in stores:
            idle.store.close()

    @contextlib.contextmanager
    def _admitted(self) -> Iterator[None]:
        """Count a running query; on the event loop only."""
        if self.ending:
            raise Unavailable("the server is stopping: try again when it is back")
        if self._running >= MOST_RUNNING:
            self.answers["too many"] += 1
            raise Unavailable(
                f"{MOST_RUNNING} queries are running already: try again in a moment", 1
            )
        self._running += 1
        try:
            yield
        finally:
            self._running -= 1

    @contextlib.contextmanager
    def _counted(self) -> Iterator[None]:
        try:
            yield
        except Unavailable:
            self.answers["unavailable"] += 1
            raise
        except RequestError:
            self.answers["refused"] += 1
            raise
        except BaseException:
            self.answers["failed"] += 1
            raise
        self.answers["ok"] += 1

    def _run(self, work: Callable[[Store], T]) -> T:
        with self._store() as store:
            return work(store)

    @contextlib.contextmanager
    def _store(self) -> Iterator[Store]:
        """A store for one query; one that failed is closed, not kept."""
        try:
            file_id = self._file_id()
            store = self._take_idle(file_id) or self._open()
            kept = False
            try:
                yield store
                kept = True
            except (RequestError, UnknownNameError, ConfigError):
                kept = True  # the query was at fault, not the store
                raise
            finally:
                if kept:
                    with self._lock:
                        self._idle.append(_IdleStore(store, file_id))
                else:
                    store.close()
        except (UnknownNameError, ConfigError) as error:
            raise BadRequest(str(error)) from error
        except StoreClosedError:
            raise Unavailable("the server is stopping: try again when it is back") from None
        except (BatchmillError, OSError) as error:
            raise Unavailable(f"the store cannot be read: {error}") from error

    def _open(self) -> Store:
        try:
            return open_store(self._url, retry=RETRY, create=False)
        except ConfigError as error:  # of the address, which is not the client's
            raise Unavailable(f"the store cannot be read: {error}") from error

    def _take_idle(self, file_id: object) -> Store | None:
        with self._lock:
            stale = [idle.store for idle in self._idle if idle.file_id != file_id]
            self._idle = [idle for idle in self._idle if idle.file_id == file_id]
            store = self._idle.pop().store if self._idle else None
        for replaced in stale:
            replaced.close()
        return store

    def _file_id(self) -> object:
        """Identifies the database file, so that one that took its place is noticed."""
        if self._path is None:
            return None
        try:
            stat = self._path.stat()
        except OSError:  # opening it says what is wrong
            return None
        return stat.st_dev, stat.st_ino
