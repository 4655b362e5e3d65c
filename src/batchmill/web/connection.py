"""A connection on which nobody can begin a request and never end it."""

from __future__ import annotations

import asyncio
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol


class Connection(H11Protocol):
    """uvicorn's own, which waits without end for a request that has begun: here it is closed.

    An answer may take, or last, as long as it likes.
    """

    request_s = 30.0
    """From the connection, or a request's first byte, to its last byte."""

    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        self._watch: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Begin; the first request is awaited no longer than any other."""
        super().connection_made(transport)
        self._begin()

    def connection_lost(self, exc: Exception | None) -> None:
        """The end."""
        self._stop()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Take what came, and see whether more of it has to come."""
        super().data_received(data)
        state = self.conn.their_state
        begun = state is h11.SEND_BODY or (state is h11.IDLE and bool(self.conn.trailing_data[0]))
        if not begun:
            self._stop()
        elif self._watch is None:
            self._begin()

    def _begin(self) -> None:
        self._watch = self.loop.call_later(self.request_s, self.transport.close)

    def _stop(self) -> None:
        if self._watch is not None:
            self._watch.cancel()
            self._watch = None
