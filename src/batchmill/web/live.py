"""Server-sent events: the status of the run each second, and every commit.

One task polls for all listeners, and only while there are any. A listener always gets the newest
event of each kind; one that reads slowly misses those in between. So a listener needs no growing
memory, and delays no other.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from typing import Any

from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import BaseRoute, Route
from starlette.types import Message, Receive, Scope, Send

from batchmill.errors import check_ints, check_positive
from batchmill.run import StatusReader
from batchmill.sources import bucket_start
from batchmill.store import Store
from batchmill.web.query_pool import QueryPool
from batchmill.web.responses import Unavailable, as_error

log = logging.getLogger("batchmill.web")

_HELLO = "retry: 1000\n\n"
_HEARTBEAT = ": still here\n\n"
_MOST_FAILURES = 3
"""Consecutive polls that fail before the store is reported unreadable: it may be busy."""


@dataclass(frozen=True, kw_only=True)
class LiveSettings:
    """How often events are sent, and to how many listeners."""

    most_listeners: int = 50
    """Further ones get 503."""
    every_s: float = 1.0
    heartbeat_s: float = 15.0
    """Time without an event after which a comment line is sent, to keep the connection open."""
    send_s: float = 30.0
    """A listener that has read nothing for so long is disconnected."""

    def __post_init__(self) -> None:
        check_ints(self, 1, "most_listeners")
        check_positive(self, "every_s", "heartbeat_s", "send_s")


def event(kind: str, content: Mapping[str, Any]) -> str:
    """A server-sent event with JSON in it.

    >>> event("commit", {"last_batch": 3})
    'event: commit\\ndata: {"last_batch":3}\\n\\n'
    """
    return f"event: {kind}\ndata: {json.dumps(content, separators=(',', ':'))}\n\n"


def newest_commit(store: Store) -> dict[str, Any]:
    """The last commit of any stream, and the newest minute in the store."""
    minute = store.newest_minute()
    last = max(store.streams(), key=lambda stream: stream.committed_ms or 0, default=None)
    at_ms = None if last is None else last.committed_ms
    return {
        "newest_minute_s": None if minute is None else int(bucket_start(minute).timestamp()),
        "committed_at": None if at_ms is None else at_ms / 1000,
        "last_batch": None if last is None else last.last_batch,
    }


class Live:
    """Sends events to listeners; used on the event loop of a server only.

    ``close()`` ends all event streams, so that a server can stop while browsers are open; later
    requests get 503.
    """

    def __init__(
        self, pool: QueryPool, run: StatusReader | None, settings: LiveSettings | None = None
    ) -> None:
        """``run`` reads the status of the run; None without a run."""
        self.settings = settings or LiveSettings()
        self.listeners = 0
        self.refused = 0
        """Requests refused at ``most_listeners``."""
        self.disconnected = 0
        """Listeners disconnected because they did not read."""
        self._poller = _Poller(pool, run)
        self._newest: dict[str, tuple[int, str]] = {}
        self._number = 0
        self._changed = asyncio.Event()
        self._closed = False
        self._polling: asyncio.Task[None] | None = None

    def routes(self) -> list[BaseRoute]:
        """The route of the event stream."""
        return [Route("/api/v1/live", self.stream)]

    async def stream(self, request: Request) -> Response:
        """An event stream for one more listener, or 503."""
        return _EventStream(self)

    def close(self) -> None:
        """End all event streams. Called on the event loop; may be called twice."""
        self._closed = True
        self._wake()

    def add_listener(self) -> Response | None:
        """Count one more listener; returns a response if it is refused."""
        if self._closed:
            return _refusal("the server is stopping: try again in a moment")
        most = self.settings.most_listeners
        if self.listeners >= most:
            self.refused += 1
            return _refusal(
                f"the limit of {most} listeners is reached: close a page, or poll /api/v1/pipeline "
                "instead"
            )
        self.listeners += 1
        if self._polling is None:
            self._polling = asyncio.create_task(self._poll())
        return None

    def remove_listener(self) -> None:
        """Count one listener less; without listeners, polling stops."""
        self.listeners -= 1
        if not self.listeners and self._polling is not None:
            self._polling.cancel()
            self._polling = None
            # It would be old when the next listener comes.
            self._newest.clear()
            self._poller.reset()

    async def events(self) -> AsyncIterator[str]:
        """The newest event of each kind, and then new ones."""
        sent: dict[str, int] = {}
        yield _HELLO
        while not self._closed:
            changed = self._changed
            new = sorted(
                (number, kind, text)
                for kind, (number, text) in self._newest.items()
                if number > sent.get(kind, 0)
            )
            for number, kind, text in new:
                sent[kind] = number
                yield text
            if not new and not await self._wait(changed):
                yield _HEARTBEAT

    async def _wait(self, changed: asyncio.Event) -> bool:
        try:
            async with asyncio.timeout(self.settings.heartbeat_s):
                await changed.wait()
        except TimeoutError:
            return False
        return True

    async def _poll(self) -> None:
        while True:
            for kind, text in (await self._poller.poll()).items():
                self._number += 1
                self._newest[kind] = (self._number, text)
            self._wake()
            await asyncio.sleep(self.settings.every_s)

    def _wake(self) -> None:
        """Wake all waiting listeners, and make a new event for the next time."""
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()


class _Poller:
    """Polls the run and the store, on the pool's threads."""

    def __init__(self, pool: QueryPool, run: StatusReader | None) -> None:
        self._pool = pool
        self._run = run
        self._last: dict[str, str] = {}
        self._store_failures = 0
        self._run_failures = 0

    def reset(self) -> None:
        """Return all events at the next poll, changed or not."""
        self._last.clear()

    async def poll(self) -> dict[str, str]:
        """Events by kind: ``pipeline`` each time, ``commit`` and ``store`` when they change."""
        new: dict[str, str] = {}
        current = {**await self._store_events(), **await self._run_events()}
        for kind, text in current.items():
            if kind == "pipeline" or self._last.get(kind) != text:
                new[kind] = self._last[kind] = text
        return new

    async def _store_events(self) -> dict[str, str]:
        try:
            commit = await self._pool.query(newest_commit)
        except Unavailable as error:
            self._store_failures += 1
            if self._store_failures < _MOST_FAILURES:
                return {}
            return {"store": event("store", {"ok": False, "fault": error.reason})}
        self._store_failures = 0
        return {
            "store": event("store", {"ok": True, "fault": None}),
            "commit": event("commit", commit),
        }

    async def _run_events(self) -> dict[str, str]:
        run = self._run
        if run is None:
            return {}
        try:
            pipeline = event("pipeline", await self._pool.run(lambda: run.read().as_json()))
        except Unavailable:  # the server is busy, or stopping
            return {}
        except Exception:  # whatever it is: the next poll may succeed
            if not self._run_failures:
                log.exception("the status of the run cannot be read; retrying")
            self._run_failures += 1
            return {}
        self._run_failures = 0
        return {"pipeline": pipeline}


class _EventStream(StreamingResponse):
    """The event stream of one listener.

    The listener is counted when the response starts, not when it is created: a client that
    disconnects at once is never counted, and none can start between the check and the count.
    """

    def __init__(self, live: Live) -> None:
        # Proxies must not buffer the events.
        headers = {"cache-control": "no-store", "x-accel-buffering": "no"}
        super().__init__(live.events(), media_type="text/event-stream", headers=headers)
        self._live = live

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        live = self._live
        refusal = live.add_listener()
        if refusal is not None:
            await refusal(scope, receive, send)
            return

        async def send_in_time(message: Message) -> None:
            try:
                async with asyncio.timeout(live.settings.send_s):
                    await send(message)
            except TimeoutError:
                raise _TooSlow from None

        try:
            await super().__call__(scope, receive, send_in_time)
        except* _TooSlow:
            live.disconnected += 1
        finally:
            live.remove_listener()


class _TooSlow(Exception):
    """A listener does not read its events."""


def _refusal(why: str) -> Response:
    return as_error(503, why, {"Retry-After": "5"})
