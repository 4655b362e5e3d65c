"""HTTP connections with a read deadline, and the limit on how many are open.

uvicorn's own protocol waits without end for a request's headers, closes a connection over unread
data (so that the client may never see the response), and fails on some orders of events. Here:

* a request's headers arrive within ``header_s``, all of it within ``request_s``, or the connection
  is refused and closed;
* a client that has not authenticated has no claim to its connection, see `Seats`;
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
from batchmill.http.seats import Seat, Seats
from batchmill.http.tls import Tls
from batchmill.wording import count_of

LINGER_S = 2.0
"""How long a connection that is closed goes on reading, so that the client sees the response."""
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

    seat: Seat = Seat("")
    on_lost: Callable[[], None] = staticmethod(lambda: None)
    """Called by the connection once it has ended."""

    @property
    def busy(self) -> bool:
        """Whether a request is being answered."""
        return False

    def evict(self) -> None:
        """Close it: its seat is needed."""


class Connection(AcceptedConnection, H11Protocol):
    """One connection; see the module.

    The application finds in ``scope["state"]`` when the request began (``request_began``, in the
    event loop's time), how to drop the connection (``abort()``), how to say that the client has
    authenticated (``authenticated()``), and whether only health checks are answered (``reserve``).
    """

    def __init__(self, *, refuse: Refuse, header_s: float, request_s: float, **rest: Any) -> None:
        super().__init__(app_state={}, **rest)
        self._refuse_connection = refuse
        self._header_s = min(header_s, request_s)
        self._request_s = request_s
        self._idle_s = self.timeout_keep_alive
        self._deadline: asyncio.TimerHandle | None = None
        self._refused = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Begin; the first request has the same deadline as any other."""
        self.app_state = {
            "request_began": self.loop.time(),
            "abort": self._abort,
            "authenticated": self._authenticated,
            "reserve": self.seat.reserve,
        }
        self.timeout_keep_alive = max(1, min(self._idle_s, round(self._header_s)))  # a guest
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
        if after is h11.SEND_BODY and before is h11.IDLE:
            self._extend_deadline()
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

    @property
    def busy(self) -> bool:
        """Whether a request is being answered."""
        return self.cycle is not None and not self.cycle.response_complete

    def evict(self) -> None:
        """Close it: its seat is needed."""
        message = "the connection was idle, and others wait for one"
        if self.transport.is_closing():  # it has its response, and was to linger
            self._abort()
        elif self.seat.guest:
            self._refuse(RefusalReason.TOO_MANY_CONNECTIONS, 503, message)
        else:
            self.transport.close()

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

    def _authenticated(self) -> None:
        self.seat.authenticate()
        self.timeout_keep_alive = self._idle_s

    def _start_deadline(self) -> None:
        self.app_state["request_began"] = self.loop.time()
        self._deadline = self.loop.call_later(self._header_s, self._too_slow)

    def _extend_deadline(self) -> None:
        """The headers are there: the rest may take longer."""
        self._stop_deadline()
        began = self.app_state["request_began"]
        self._deadline = self.loop.call_at(began + self._request_s, self._too_slow)

    def _stop_deadline(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _too_slow(self) -> None:
        if self.conn.their_state is h11.IDLE:
            self._deadline = None
            message = f"the request did not arrive within {self._header_s:g} s"
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
    """Accepts connections as `Seats` allow; those in a TLS handshake count."""

    def __init__(
        self,
        listener: Listener,
        limit: int,
        tls: Tls,
        handshake_s: float,
        connect: Callable[[], AcceptedConnection],
        refuse: Refuse,
        stats: ConnectionStats,
        reserve: int = 0,
    ) -> None:
        self._listener = listener
        self._limit = limit
        self._seats = Seats(limit, reserve)
        self._tls = tls
        self._handshake_s = handshake_s
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
            tls = self._tls.context()
            seat, evicted = self._seats.take(_address_of(client))
            if evicted is not None and evicted.connection is not None:
                self._stats.refused += 1
                evicted.connection.evict()
            if seat is None:
                self._stats.refused += 1
                response = self._refuse(full)
                _close_with(client, b"" if tls else response)
                self._listener.released()
                continue
            self._stats.open += 1
            self._stats.accepted += 1
            task = loop.create_task(self._open(client, seat, tls))
            seat.connection = _Handshake(task, busy=tls is None)
            self._handshakes.add(task)
            task.add_done_callback(self._handshakes.discard)

    def close(self) -> None:
        """Close connections that are still in their handshake."""
        for task in self._handshakes:
            task.cancel()

    async def _open(self, client: socket.socket, seat: Seat, tls: ssl.SSLContext | None) -> None:
        loop = asyncio.get_running_loop()
        client.setblocking(False)

        def protocol() -> AcceptedConnection:
            connection = self._connect()
            connection.seat = seat
            connection.on_lost = lambda: self._lost(seat)
            return connection

        try:
            client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            _, connection = await loop.connect_accepted_socket(
                protocol,
                client,
                ssl=tls,
                ssl_handshake_timeout=self._handshake_s if tls else None,
                ssl_shutdown_timeout=LINGER_S if tls else None,
            )
            seat.connection = connection
        except (OSError, asyncio.CancelledError) as error:
            log.debug("a connection ended before it began: %s", error)
            client.close()
            reason = RefusalReason.TLS_FAILED if tls else RefusalReason.NO_REQUEST
            self._refuse(ConnectionRefusal(reason))
            self._lost(seat)

    def _lost(self, seat: Seat) -> None:
        if seat.ended:
            return
        seat.ended = True
        self._seats.release(seat)
        self._stats.open -= 1
        self._listener.released()


@dataclass(frozen=True)
class _Handshake:
    """A connection that has not begun."""

    task: asyncio.Task[None]
    busy: bool
    """Whether it begins at once, without the client."""

    def evict(self) -> None:
        self.task.cancel()


def _address_of(client: socket.socket) -> str:
    try:
        name = client.getpeername()
    except OSError:  # it has gone already
        return ""
    return str(name[0]) if isinstance(name, tuple) else ""


def _close_with(client: socket.socket, response: bytes) -> None:
    with client:
        client.setblocking(False)
        try:
            client.send(response)
            client.shutdown(socket.SHUT_WR)
        except OSError as error:  # the client has gone
            log.debug("a refused connection: %s", error)
