"""HTTP connections with a read deadline, and the limit on how many are open.

uvicorn's own protocol waits without end for a request's headers, closes a connection over unread
data (so that the client may never see the response), and fails on some orders of events. Here:

* a request's bytes arrive within ``request_s``, or the connection is refused and closed;
* a connection closed before its request was read goes on reading for a moment and discards it;
* whatever is not HTTP is answered 400 (431 for headers that are too long), without a traceback.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from batchmill.http.refusal import ConnectionRefusal, RefusalReason, Refuse
from batchmill.wording import count_of

LINGER_S = 2.0
"""How long a connection that is closed goes on reading, so that the client sees the response."""
_HANDSHAKE_S = 10.0
_GRACE_S = 1.0
"""An application that reads a body stops at ``request_s`` itself, and can still answer then."""

log = logging.getLogger("batchmill.http")


@dataclass(slots=True)
class ConnectionStats:
    """Connections of a server: ``open`` now, ``accepted`` and ``refused`` since the start."""

    open: int = 0
    accepted: int = 0
    refused: int = 0


class AcceptedConnection(asyncio.Protocol):
    """What an `Acceptor` makes of a connection."""

    on_lost: Callable[[], None] = staticmethod(lambda: None)
    """Called by the connection once it has ended."""


class Connection(AcceptedConnection, H11Protocol):
    """One connection; see the module.

    The application finds in ``scope["state"]`` when the request began (``request_began``, in the
    event loop's time) and how to drop the connection (``abort()``).
    """

    def __init__(self, *, refuse: Refuse, request_s: float, **rest: Any) -> None:
        super().__init__(app_state={}, **rest)
        self._refuse_connection = refuse
        self._request_s = request_s
        self._deadline: asyncio.TimerHandle | None = None
        self._refused = False
        self.app_state = {"request_began": self.loop.time(), "abort": self._abort}

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Begin; the first request has the same deadline as any other."""
        super().connection_made(_LingeringTransport(transport, self))  # type: ignore[arg-type]
        self._start_deadline()

    def connection_lost(self, exc: Exception | None) -> None:
        """Release what belongs to the connection."""
        self._stop_deadline()
        self._unset_keepalive_if_required()
        super().connection_lost(exc)
        if self.cycle is None and not self._refused:
            self._refuse_connection(ConnectionRefusal(RefusalReason.NO_REQUEST))
        self.on_lost()

    def eof_received(self) -> bool | None:  # type: ignore[override]
        """Stay open for a client that has sent its whole request and waits for the response."""
        cycle = self.cycle
        waits = cycle is not None and not cycle.more_body and not cycle.response_started
        if waits and self.scheme != "https" and not self.transport.is_closing():
            cycle.keep_alive = False
            return True
        return None

    def data_received(self, data: bytes) -> None:
        """Parse what arrived; the deadline runs while a request is incomplete."""
        if self.transport.is_closing():
            return  # lingering: read and discarded
        if self._deadline is None:
            self._start_deadline()
        before = self.conn.their_state
        try:
            super().data_received(data)
        except h11.LocalProtocolError:
            self._abort()
            return
        after = self.conn.their_state
        if after is h11.IDLE and before is h11.SEND_BODY:
            # The rest of a body that was answered before it was read: now the connection is idle.
            self._stop_deadline()
            if self.timeout_keep_alive_task is None:
                self.timeout_keep_alive_task = self.loop.call_later(
                    self.timeout_keep_alive, self.timeout_keep_alive_handler
                )
        elif after not in (h11.IDLE, h11.SEND_BODY):
            self._stop_deadline()

    def send_400_response(self, msg: str) -> None:
        """Refuse what cannot be parsed, if a response can still be sent."""
        error = sys.exception()
        status = getattr(error, "error_status_hint", 400)
        if not 400 <= status < 500:  # h11 hints 501 for mistakes of the client, too
            status = 400
        self._refuse(RefusalReason.BAD_HTTP, status, f"not understood as HTTP: {error or msg}")

    def shutdown(self) -> None:
        """Close if idle; otherwise after the response."""
        if self.cycle is None or self.cycle.response_complete:
            self.transport.close()
        else:
            self.cycle.keep_alive = False

    def timeout_keep_alive_handler(self) -> None:
        """Close a connection that was idle for too long."""
        self.transport.close()

    def _should_upgrade(self) -> bool:
        return False

    def _start_deadline(self) -> None:
        self.app_state["request_began"] = self.loop.time()
        self._deadline = self.loop.call_later(self._request_s, self._too_slow)

    def _stop_deadline(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _too_slow(self) -> None:
        if self.conn.their_state is h11.IDLE:
            self._deadline = None
            message = f"the request did not arrive within {self._request_s:g} s"
            self._refuse(RefusalReason.TOO_SLOW, 408, message)
        else:
            self._deadline = self.loop.call_later(_GRACE_S, self._abort)

    def _abort(self) -> None:
        self.transport.abort()

    def _refuse(self, reason: RefusalReason, status: int, message: str) -> None:
        self._refused = True
        response = self._refuse_connection(ConnectionRefusal(reason, status, message))
        if self.cycle is not None and not self.cycle.response_complete:
            if self.cycle.response_started:
                self._abort()
                return
            self.cycle.disconnected = True  # the application must not respond as well
            self.cycle.message_event.set()
        if self.conn.our_state not in (h11.IDLE, h11.SEND_RESPONSE):
            self._abort()
            return
        self.transport.write(response)
        self.transport.close()


class _LingeringTransport:
    """A transport whose ``close`` lets the client finish sending and see the response.

    A socket closed over unread data is reset, and a response on its way is lost.
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
        self._owner.loop.call_later(LINGER_S, self._transport.abort)


class Listener(Protocol):
    """Where connections come from."""

    async def accept(self) -> socket.socket:
        """Wait for a connection."""

    def released(self) -> None:
        """Note that a connection has ended."""

    def close(self) -> None:
        """Accept no more."""


class PortListener:
    """Connections to a port that this process listens on."""

    def __init__(self, port: socket.socket) -> None:
        self._port = port

    async def accept(self) -> socket.socket:
        """Wait for a connection."""
        client, _ = await asyncio.get_running_loop().sock_accept(self._port)
        return client

    def released(self) -> None:
        """A port does not count connections."""

    def close(self) -> None:
        """Close the port."""
        self._port.close()


class Acceptor:
    """Accepts connections up to a limit; those in a TLS handshake count."""

    def __init__(
        self,
        listener: Listener,
        limit: int,
        tls: ssl.SSLContext | None,
        handshake_s: float,
        connect: Callable[[], AcceptedConnection],
        refuse: Refuse,
        stats: ConnectionStats,
    ) -> None:
        self._listener = listener
        self._limit = limit
        self._tls = tls
        self._handshake_s = min(_HANDSHAKE_S, handshake_s)
        self._connect = connect
        self._refuse = refuse
        self._stats = stats
        self._handshakes: set[asyncio.Task[None]] = set()

    async def run(self) -> None:
        """Accept until cancelled."""
        loop = asyncio.get_running_loop()
        what = f"{count_of(self._limit, 'connection')} open already"
        full = ConnectionRefusal(RefusalReason.TOO_MANY_CONNECTIONS, 503, what)
        while True:
            # accept() does not yield while clients are waiting: let open connections run.
            await asyncio.sleep(0)
            try:
                client = await self._listener.accept()
            except OSError as error:  # out of file descriptors, most likely
                log.warning("cannot accept connections: %s", error)
                await asyncio.sleep(0.2)
                continue
            if self._stats.open >= self._limit:
                self._stats.refused += 1
                response = self._refuse(full)
                _close_with(client, b"" if self._tls else response)
                self._listener.released()
                continue
            self._stats.open += 1
            self._stats.accepted += 1
            task = loop.create_task(self._open(client))
            self._handshakes.add(task)
            task.add_done_callback(self._handshakes.discard)

    def close(self) -> None:
        """Close connections that are still in their handshake."""
        for task in self._handshakes:
            task.cancel()

    async def _open(self, client: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        client.setblocking(False)
        try:
            client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            await loop.connect_accepted_socket(
                self._protocol,
                client,
                ssl=self._tls,
                ssl_handshake_timeout=self._handshake_s if self._tls else None,
                ssl_shutdown_timeout=LINGER_S if self._tls else None,
            )
        except (OSError, asyncio.CancelledError) as error:
            log.debug("a connection ended before it began: %s", error)
            client.close()
            reason = RefusalReason.TLS_FAILED if self._tls else RefusalReason.NO_REQUEST
            self._refuse(ConnectionRefusal(reason))
            self._lost()

    def _protocol(self) -> AcceptedConnection:
        connection = self._connect()
        connection.on_lost = self._lost
        return connection

    def _lost(self) -> None:
        self._stats.open -= 1
        self._listener.released()


def _close_with(client: socket.socket, response: bytes) -> None:
    with client:
        client.setblocking(False)
        try:
            client.send(response)
            client.shutdown(socket.SHUT_WR)
        except OSError as error:  # the client has gone
            log.debug("a refused connection: %s", error)
