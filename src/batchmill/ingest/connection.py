"""An HTTP connection that a sender cannot hold for ever, and the door that counts them.

uvicorn's own protocol waits without end for a request's headers, closes a connection over unread
data (so that the sender may never see the answer), and fails on some orders of events. Here:

* a request's bytes arrive within ``request_s``, or the connection is answered 408 and closed;
* a connection closed before its request was read keeps reading for a moment and forgets it;
* whatever is not HTTP is answered 400 (431 for headers that are too long), without a traceback.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
import sys
from collections.abc import Callable
from http import HTTPStatus
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from batchmill.ingest import answers
from batchmill.ingest.answers import Refusal
from batchmill.ingest.figures import Figures

_LINGER_S = 2.0
_HANDSHAKE_S = 10.0
_GRACE_S = 1.0
"""The application cuts off a slow body itself, and says so: the connection waits a bit longer."""

log = logging.getLogger("batchmill.ingest")


class Connection(H11Protocol):
    """One connection; see the module."""

    def __init__(self, *, figures: Figures, request_s: float, **rest: Any) -> None:
        super().__init__(**rest)
        self._figures = figures
        self._request_s = request_s
        self._watch: asyncio.TimerHandle | None = None
        # What the application sees of it, as the state of each request.
        self.app_state = {"began": self.loop.time(), "abort": self._abort}
        self.on_lost: Callable[[], None] = lambda: None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Begin; the first request is awaited no longer than any other."""
        super().connection_made(_Lingering(transport, self))  # type: ignore[arg-type]
        self._begin()

    def connection_lost(self, exc: Exception | None) -> None:
        """The end."""
        self._stop_watch()
        self._unset_keepalive_if_required()
        super().connection_lost(exc)
        self.on_lost()

    def eof_received(self) -> bool | None:  # type: ignore[override]
        """The sender sends no more; one that waits for its answer gets it."""
        cycle = self.cycle
        waits = cycle is not None and not cycle.more_body and not cycle.response_complete
        if waits and not self._encrypted and not self.transport.is_closing():
            cycle.keep_alive = False
            return True
        return None

    def data_received(self, data: bytes) -> None:
        """Take what came, and see that the request does not take for ever."""
        if self.transport.is_closing():
            return  # lingering: read and forgotten
        if self._watch is None:
            self._begin()
        before = self.conn.their_state
        try:
            super().data_received(data)
        except h11.LocalProtocolError:
            self.transport.abort()
            return
        after = self.conn.their_state
        if after is h11.IDLE and before is h11.SEND_BODY:
            # The rest of a body whose answer was given already: now the connection is idle.
            self._stop_watch()
            if self.timeout_keep_alive_task is None:
                self.timeout_keep_alive_task = self.loop.call_later(
                    self.timeout_keep_alive, self.timeout_keep_alive_handler
                )
        elif after not in (h11.IDLE, h11.SEND_BODY):
            self._stop_watch()

    def send_400_response(self, msg: str) -> None:
        """Say what is wrong with what arrived, if an answer can still be sent."""
        error = sys.exception()
        status = getattr(error, "error_status_hint", 400)
        if not 400 <= status < 500:  # 501 for what the sender got wrong
            status = 400
        self._refuse(answers.bad_http(status, f"not understood as HTTP: {error or msg}"))

    def shutdown(self) -> None:
        """Close if idle; otherwise after the answer."""
        if self.cycle is None or self.cycle.response_complete:
            self.transport.close()
        else:
            self.cycle.keep_alive = False

    def timeout_keep_alive_handler(self) -> None:
        """Nothing came for too long."""
        self.transport.close()

    @property
    def _encrypted(self) -> bool:
        return self.scheme == "https"

    def _should_upgrade(self) -> bool:
        return False

    def _begin(self) -> None:
        self.app_state["began"] = self.loop.time()
        self._watch = self.loop.call_later(self._request_s + _GRACE_S, self._too_slow)

    def _abort(self) -> None:
        self.transport.abort()

    def _stop_watch(self) -> None:
        if self._watch is not None:
            self._watch.cancel()
            self._watch = None

    def _too_slow(self) -> None:
        self._watch = None
        if self.conn.their_state is h11.IDLE:
            self._refuse(answers.too_slow(self._request_s))
        else:  # the answer was given, or the application could not give it
            self.transport.abort()

    def _refuse(self, refusal: Refusal) -> None:
        self._figures.answered("http", refusal.reason)
        if self.cycle is not None and not self.cycle.response_complete:
            if self.cycle.response_started:
                self.transport.abort()
                return
            self.cycle.disconnected = True  # the application is not to answer as well
            self.cycle.message_event.set()
        if self.conn.our_state not in (h11.IDLE, h11.SEND_RESPONSE):
            self.transport.abort()
            return
        self.transport.write(raw(refusal))
        self.transport.close()


def raw(refusal: Refusal) -> bytes:
    """A whole answer, for where there is no request."""
    body = answers.http_body(refusal, answers.JSON)
    headers = answers.http_headers(refusal, answers.JSON)
    headers |= {"content-length": str(len(body)), "connection": "close"}
    lines = [f"HTTP/1.1 {refusal.status} {HTTPStatus(refusal.status).phrase}"]
    lines += [f"{name}: {value}" for name, value in headers.items()]
    return "\r\n".join([*lines, "", ""]).encode() + body


class _Lingering:
    """A transport whose ``close`` lets the sender finish and see the answer.

    A socket closed over unread data is reset, and the answer that was on its way is lost.
    """

    def __init__(self, transport: asyncio.Transport, owner: Connection) -> None:
        self._transport = transport
        self._owner = owner
        self._closing = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def is_closing(self) -> bool:
        return self._closing or self._transport.is_closing()

    def close(self) -> None:
        if self._closing:
            return
        self._closing = True
        unread = self._owner.conn.their_state in (h11.SEND_BODY, h11.ERROR)
        if not unread or self._transport.is_closing() or not self._transport.can_write_eof():
            self._transport.close()
            return
        self._transport.write_eof()
        self._transport.resume_reading()
        self._owner.loop.call_later(_LINGER_S, self._transport.abort)


class Door:
    """Accepts connections, so many and no more; those in a TLS handshake count."""

    def __init__(
        self,
        listening: socket.socket,
        limit: int,
        tls: ssl.SSLContext | None,
        factory: Callable[[], Connection],
        figures: Figures,
    ) -> None:
        self._listening = listening
        self._limit = limit
        self._tls = tls
        self._factory = factory
        self._figures = figures
        self._admitting: set[asyncio.Task[None]] = set()

    async def run(self) -> None:
        """Accept until cancelled."""
        loop = asyncio.get_running_loop()
        full = raw(answers.busy(f"{self._limit} connections are open already"))
        counts = self._figures.connections
        while True:
            # Accepting does not wait while there are more: those that are in have their turn.
            await asyncio.sleep(0)
            try:
                accepted, _ = await loop.sock_accept(self._listening)
            except OSError as error:  # out of file descriptors, most likely
                log.warning("cannot accept connections: %s", error)
                await asyncio.sleep(0.2)
                continue
            if counts["open"] >= self._limit:
                counts["refused"] += 1
                _turn_away(accepted, b"" if self._tls else full)
                continue
            counts["open"] += 1
            counts["accepted"] += 1
            task = loop.create_task(self._admit(accepted))
            self._admitting.add(task)
            task.add_done_callback(self._admitting.discard)

    def close(self) -> None:
        """Give up those that are still in their handshake."""
        for each in self._admitting:
            each.cancel()

    async def _admit(self, accepted: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        accepted.setblocking(False)
        try:
            accepted.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            await loop.connect_accepted_socket(
                self._made,
                accepted,
                ssl=self._tls,
                ssl_handshake_timeout=_HANDSHAKE_S if self._tls else None,
                ssl_shutdown_timeout=_LINGER_S if self._tls else None,
            )
        except (OSError, asyncio.CancelledError) as error:  # no handshake, or none in time
            log.debug("a connection ended before it began: %s", error)
            accepted.close()
            self._left()

    def _made(self) -> Connection:
        connection = self._factory()
        connection.on_lost = self._left
        return connection

    def _left(self) -> None:
        self._figures.connections["open"] -= 1


def _turn_away(accepted: socket.socket, answer: bytes) -> None:
    with accepted:
        accepted.setblocking(False)
        try:
            accepted.send(answer)
            accepted.shutdown(socket.SHUT_WR)
        except OSError as error:  # it has left already
            log.debug("a connection that was turned away: %s", error)
