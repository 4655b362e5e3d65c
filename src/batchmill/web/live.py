"""What happens now, as server-sent events: how the run is doing each second, and every commit.

One task looks, however many listen, and only while somebody does. It makes texts that are ready to
be sent; a listener always gets the newest one of each kind, and one that reads slowly misses those
in between. So a listener takes up no memory that grows, and holds up nobody.
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

from batchmill.errors import ConfigError
from batchmill.run import StatusReader
from batchmill.sources import bucket_start
from batchmill.store import Store
from batchmill.web.errors import Unavailable
from batchmill.web.query_pool import QueryPool
from batchmill.web.responses import as_error

log = logging.getLogger("batchmill.web")

_HELLO = "retry: 1000\n\n"
_HEARTBEAT = ": still here\n\n"
_FAULTS = 3
"""So many looks in a row must fail before the store is said to be unreadable: it may be busy."""


@dataclass(frozen=True, kw_only=True)
class LiveSettings:
    """How often there is something new, and for how many."""

    most_listeners: int = 50
    """One more is answered 503."""
    every_s: float = 1.0
    heartbeat_s: float = 15.0
    """Of nothing happening, before a line is sent that says no more than that we are there."""
    send_s: float = 30.0
    """Whoever has not read anything for so long is let go, to make room for another."""

    def __post_init__(self) -> None:
        if self.most_listeners < 1:
            raise ConfigError("most_listeners", self.most_listeners, "at least 1")
        for name in ("every_s", "heartbeat_s", "send_s"):
            if not getattr(self, name) > 0:
                raise ConfigError(name, getattr(self, name), "above 0")


def event(kind: str, content: Mapping[str, Any]) -> str:
    """A server-sent event with JSON in it.

    >>> event("commit", {"last_batch": 3})
    'event: commit\\ndata: {"last_batch":3}\\n\\n'
    """
    return f"event: {kind}\ndata: {json.dumps(content, separators=(',', ':'))}\n\n"


def newest_commit(store: Store) -> dict[str, Any]:
    """The commit that was last, of whatever stream, and the newest minute there is."""
    minute = store.newest_minute()
    last = max(store.streams(), key=lambda stream: stream.committed_at or 0, default=None)
    at_ms = None if last is None else last.committed_at
    return {
        "newest_minute": None if minute is None else int(bucket_start(minute).timestamp()),
        "committed_at": None if at_ms is None else at_ms / 1000,
        "last_batch": None if last is None else last.last_batch,
    }


class Live:
    """The newest events, and those who listen; all of it on the event loop of a server.

    ``close()`` ends every listener's answer, so that a server can stop without waiting for people
    to close their browsers; whoever comes later is answered 503.
    """

    def __init__(
        self, pool: QueryPool, run: StatusReader | None, settings: LiveSettings | None = None
    ) -> None:
        """``run`` reads the status of the run; None: there is no run."""
        self.settings = settings or LiveSettings()
        self.listeners = 0
        self.refused = 0
        """How many were sent away because too many listen."""
        self.let_go = 0
        """How many did not read what they were sent."""
        self._look = _Look(pool, run)
        self._newest: dict[str, tuple[int, str]] = {}
        self._number = 0
        self._changed = asyncio.Event()
        self._closed = False
        self._looking: asyncio.Task[None] | None = None

    def routes(self) -> list[BaseRoute]:
        """Where the stream is."""
        return [Route("/api/v1/live", self.answer)]

    async def answer(self, request: Request) -> Response:
        """A stream of events for one more listener, or why there is none."""
        return _Answer(self)

    def close(self) -> None:
        """End all answers; on the event loop. May be called twice."""
        self._closed = True
        self._wake()

    def enter(self) -> Response | None:
        """Count one more listener; the answer for whoever may not listen."""
        if self._closed:
            return _refusal("the server is stopping: try again in a moment")
        most = self.settings.most_listeners
        if self.listeners >= most:
            self.refused += 1
            return _refusal(
                f"{most} listen already, and no more may: close a page, or ask for "
                "/api/v1/pipeline now and then instead"
            )
        self.listeners += 1
        if self._looking is None:
            self._looking = asyncio.create_task(self._look_on())
        return None

    def leave(self) -> None:
        """A listener is gone; after the last one, nobody looks any more."""
        self.listeners -= 1
        if not self.listeners and self._looking is not None:
            self._looking.cancel()
            self._looking = None
            # By the time somebody listens again, it is old.
            self._newest.clear()
            self._look.forget()

    async def events(self) -> AsyncIterator[str]:
        """The newest of each kind, and then whatever is new."""
        seen: dict[str, int] = {}
        yield _HELLO
        while not self._closed:
            changed = self._changed
            news = sorted(
                (number, kind, text)
                for kind, (number, text) in self._newest.items()
                if number > seen.get(kind, 0)
            )
            for number, kind, text in news:
                seen[kind] = number
                yield text
            if not news and not await self._came(changed):
                yield _HEARTBEAT

    async def _came(self, changed: asyncio.Event) -> bool:
        try:
            async with asyncio.timeout(self.settings.heartbeat_s):
                await changed.wait()
        except TimeoutError:
            return False
        return True

    async def _look_on(self) -> None:
        while True:
            for kind, text in (await self._look.news()).items():
                self._number += 1
                self._newest[kind] = (self._number, text)
            self._wake()
            await asyncio.sleep(self.settings.every_s)

    def _wake(self) -> None:
        """Wake all who wait; the next wait is for the next time."""
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()


class _Look:
    """Looks at the run and the store, on the pool's threads."""

    def __init__(self, pool: QueryPool, run: StatusReader | None) -> None:
        self._pool = pool
        self._run = run
        self._last: dict[str, str] = {}
        self._failed = 0
        self._untold = 0

    def forget(self) -> None:
        """Tell everything anew at the next look."""
        self._last.clear()

    async def news(self) -> dict[str, str]:
        """Events by kind: ``pipeline`` each time, ``commit`` and ``store`` when they change."""
        new: dict[str, str] = {}
        for kind, text in (*(await self._of_store()).items(), *(await self._of_run()).items()):
            if kind == "pipeline" or self._last.get(kind) != text:
                new[kind] = self._last[kind] = text
        return new

    async def _of_store(self) -> dict[str, str]:
        try:
            commit = await self._pool.query(newest_commit)
        except Unavailable as error:
            self._failed += 1
            if self._failed < _FAULTS:
                return {}
            return {"store": event("store", {"ok": False, "fault": error.reason})}
        self._failed = 0
        return {
            "store": event("store", {"ok": True, "fault": None}),
            "commit": event("commit", commit),
        }

    async def _of_run(self) -> dict[str, str]:
        run = self._run
        if run is None:
            return {}
        try:
            found = event("pipeline", await self._pool.run(lambda: run.read().as_json()))
        except Unavailable:  # the server is busy, or ends
            return {}
        except Exception:  # whatever it is: the next look may succeed, and people listen on
            if not self._untold:
                log.exception("the state of the run cannot be read; trying on")
            self._untold += 1
            return {}
        self._untold = 0
        return {"pipeline": found}


class _Answer(StreamingResponse):
    """The stream of one listener.

    Counted while it is under way, and not from when it was made: who asks and leaves at once never
    counts, and nobody gets in between the count and the stream.
    """

    def __init__(self, live: Live) -> None:
        # A proxy must not collect what is to be seen at once.
        headers = {"cache-control": "no-store", "x-accel-buffering": "no"}
        super().__init__(live.events(), media_type="text/event-stream", headers=headers)
        self._live = live

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        live = self._live
        refusal = live.enter()
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
            live.let_go += 1
        finally:
            live.leave()


class _TooSlow(Exception):
    """A listener does not read."""


def _refusal(why: str) -> Response:
    return as_error(503, why, {"Retry-After": "5"})
