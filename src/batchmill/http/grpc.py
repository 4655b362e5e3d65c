"""Serves gRPC calls with one message in and one out, over HTTP/2.

gRPC's own server answers some calls by itself and tells nobody: those in an encoding that it does
not know (as INTERNAL, where the protocol wants UNIMPLEMENTED) and those that are too large. Its log
goes straight to the standard error output. Here a call reaches the application when its headers
have arrived, and its message part by part, so that the application can refuse it at any time, count
it, and bound its memory. HTTP/2 itself is h2's.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import logging
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias
from urllib.parse import quote

from h2.config import H2Configuration
from h2.connection import H2Connection
from h2.errors import ErrorCodes
from h2.events import (
    ConnectionTerminated,
    DataReceived,
    Event,
    RemoteSettingsChanged,
    RequestReceived,
    StreamEnded,
    StreamReset,
    WindowUpdated,
)
from h2.exceptions import DenialOfServiceError, H2Error
from h2.settings import SettingCodes, Settings
from hyperframe.frame import GoAwayFrame

from batchmill.http.connection import (
    LINGER_S,
    AcceptedConnection,
    Acceptor,
    ConnectionStats,
    Listener,
    PortListener,
)
from batchmill.http.refusal import ConnectionRefusal, RefusalReason, Refuse
from batchmill.http.settings import ServerSettings, listen
from batchmill.http.tls import Tls

if TYPE_CHECKING:
    from typing_extensions import Buffer

log = logging.getLogger("batchmill.http")

_PREFIX_BYTES = 5
"""Before each message: whether it is compressed, and its length."""
_FRAME_BYTES = 64 * 2**10
_STREAM_WINDOW_BYTES = 2**20
_CONNECTION_WINDOW_BYTES = 8 * 2**20
_MAX_CALLS = 32
"""Of one connection at a time."""
_MAX_GUEST_CALLS = 20
"""Of a connection whose client has not authenticated, before it is closed."""
_MAX_RESETS = 100
"""Calls that a client may cancel beyond those that it waits for; else it only makes work."""
_HTTP_1 = re.compile(rb"[A-Z]+ \S+ HTTP/1")
_PLAIN = "".join(chr(code) for code in range(0x20, 0x7F) if chr(code) != "%")
"""The characters of a status message that are sent as they are."""


class _Connection(H2Connection):
    """The frames of a connection. Our limits hold from the start, not from the client's reply on.

    Headers are not validated: they are read, and handed to nobody else.
    """

    MAX_CLOSED_STREAMS = 1000  # h2 remembers 65,536, which is megabytes for each connection

    def __init__(self, max_header_bytes: int) -> None:
        super().__init__(H2Configuration(client_side=False, validate_inbound_headers=False))
        self.local_settings = Settings(
            client=False,
            initial_values={
                SettingCodes.MAX_CONCURRENT_STREAMS: _MAX_CALLS,
                SettingCodes.MAX_HEADER_LIST_SIZE: max_header_bytes,
                SettingCodes.MAX_FRAME_SIZE: _FRAME_BYTES,
                SettingCodes.INITIAL_WINDOW_SIZE: _STREAM_WINDOW_BYTES,
            },
        )
        self.max_inbound_frame_size = _FRAME_BYTES
        self.decoder.max_header_list_size = max_header_bytes
        self._max_header_bytes = max_header_bytes

    def receive_data(self, data: Buffer) -> list[Event]:
        """The events of bytes that have arrived.

        h2 itself keeps 64 frames of headers without an end, however large.
        """
        events: list[Event] = super().receive_data(data)
        waiting = self.incoming_buffer._headers_buffer
        if waiting and sum(len(frame.data) for frame in waiting) > self._max_header_bytes:
            self.close_connection(ErrorCodes.ENHANCE_YOUR_CALM)
            raise DenialOfServiceError("the headers of a call have no end")
        return events


class BrokenMessageError(Exception):
    """A call ended before its message was complete."""


@dataclass(frozen=True, slots=True)
class MessageHead:
    """What is known of a message before it arrives."""

    compressed: bool
    bytes: int


@dataclass(frozen=True, slots=True)
class GrpcResponse:
    """What a call gets: a message, or a status other than 0 with a text."""

    message: bytes = b""
    status: int = 0
    text: str = ""
    details: bytes = b""
    """A ``google.rpc.Status``, for ``grpc-status-details-bin``."""


class GrpcCall:
    """A call in progress, and its message as it arrives."""

    def __init__(
        self,
        metadata: Mapping[str, str],
        peer: str,
        authenticated: Callable[[], None] = lambda: None,
    ) -> None:
        self.authenticated = authenticated
        """To be called once the client has authenticated."""
        self.metadata = metadata
        """The headers, with those of HTTP/2 and gRPC."""
        self.method = metadata.get(":path", "")
        self.peer = peer
        """Where it came from: address and port."""
        self._parts: list[bytes] = []
        self._left: int | None = None
        """Bytes of the message that were not read; None until its head was."""
        self._arrived = asyncio.Event()
        self.complete = False
        """Whether the client has sent all that it will send."""

    async def head(self) -> MessageHead | None:
        """Wait for the first bytes of the message; None if the call ends without one."""
        while sum(map(len, self._parts)) < _PREFIX_BYTES:
            if self.complete:
                if any(self._parts):
                    raise BrokenMessageError("the call ended within the head of its message")
                return None
            await self._more()
        data = b"".join(self._parts)
        self._parts = [data[_PREFIX_BYTES:]]
        self._left = int.from_bytes(data[1:_PREFIX_BYTES], "big")
        return MessageHead(bool(data[0] & 1), self._left)

    async def message(self) -> AsyncIterator[bytes]:
        """The message in parts, after its head."""
        assert self._left is not None, "head() was not called"
        while self._left:
            if not any(self._parts):
                if self.complete:
                    raise BrokenMessageError("the call ended within its message")
                await self._more()
            parts, self._parts = self._parts, []
            for part in parts:
                wanted = part[: self._left]
                self._left -= len(wanted)
                if wanted:
                    yield wanted

    def feed(self, data: bytes) -> None:
        """Take bytes that have arrived; those after the message are dropped."""
        if data and self._left != 0:
            self._parts.append(data)
            self._arrived.set()

    def end(self) -> None:
        """Note that nothing more will arrive."""
        self.complete = True
        self._arrived.set()

    async def _more(self) -> None:
        self._arrived.clear()
        await self._arrived.wait()


Respond: TypeAlias = Callable[[GrpcCall], Awaitable[GrpcResponse]]
"""Answers a call. It is cancelled when the client gives the call up."""


class GrpcServer:
    """Serves calls on one port, with bounded connections, headers and times, until stopped."""

    def __init__(
        self,
        respond: Respond,
        settings: ServerSettings,
        port: int,
        refuse: Refuse,
        *,
        port_setting: str = "port",
        encodings: Sequence[str] = ("identity",),
        idle_s: float = 60.0,
        max_header_bytes: int = 16 * 2**10,
        listener: Listener | None = None,
    ) -> None:
        """``refuse`` answers and counts connections that are not gRPC.

        ``encodings`` are those of messages, which clients are told. ``idle_s``: a connection
        without a call is closed after this. ``listener``: where connections to ``port`` come from,
        if another process listens there.
        """
        self.connections = ConnectionStats()
        self.respond = respond
        self.refuse = refuse
        self.header_s = min(settings.header_s, settings.request_s)
        self.request_s = settings.request_s
        self.idle_s = idle_s
        self.max_header_bytes = max_header_bytes
        self.encodings = ",".join(encodings)
        self.open: set[GrpcConnection] = set()
        self.port = 0
        """Once it is open."""
        self._settings = settings
        self._wanted_port = port
        self._port_setting = port_setting
        self._given_listener = listener
        self._listener: Listener | None = None
        self._tls: Tls | None = None
        self._acceptor: Acceptor | None = None
        self._accepting: asyncio.Task[None] | None = None
        self._empty = asyncio.Event()

    def listen(self) -> None:
        """Open the port and read the certificates; raises `ConfigError` naming the setting."""
        settings = self._settings
        self._tls = Tls(settings.access, ["h2"])
        if self._given_listener is not None:
            self._listener, self.port = self._given_listener, self._wanted_port
            return
        port = listen(settings.bind, self._wanted_port, self._port_setting)
        self._listener, self.port = PortListener(port), port.getsockname()[1]

    def start(self) -> None:
        """Begin to accept connections, on the running event loop."""
        assert self._listener is not None, "listen() was not called"
        assert self._tls is not None
        self._acceptor = Acceptor(
            self._listener,
            self._settings.max_connections,
            self._tls,
            self.header_s,
            lambda: GrpcConnection(self),
            self.refuse,
            self.connections,
        )
        self._accepting = asyncio.create_task(self._acceptor.run())

    def close(self) -> None:
        """Close the port."""
        if self._listener is not None:
            self._listener.close()

    async def stop(self, grace_s: float) -> None:
        """Accept nothing new, answer the calls in progress for ``grace_s``, and end."""
        if self._accepting is not None and self._acceptor is not None:
            self._accepting.cancel()
            await asyncio.wait({self._accepting})
            self._acceptor.close()
        self.close()
        for connection in list(self.open):
            connection.drain()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(grace_s):
                while self.open:
                    self._empty.clear()
                    await self._empty.wait()
        for connection in list(self.open):
            connection.abort()

    def lost(self, connection: GrpcConnection) -> None:
        """Forget a connection that has ended."""
        self.open.discard(connection)
        if not self.open:
            self._empty.set()


class GrpcConnection(AcceptedConnection):
    """One connection, and the calls on it."""

    def __init__(self, server: GrpcServer) -> None:
        self._server = server
        self._loop = asyncio.get_running_loop()
        self._h2 = _Connection(server.max_header_bytes)
        self._calls: dict[int, GrpcCall] = {}
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._resets = 0
        self._guest_calls = 0
        self._begun = False
        """Whether what arrived is HTTP/2."""
        self._left = False
        """Whether the client has said that it sends no more calls."""
        self._draining = False
        self._closing = False
        self._windows = asyncio.Event()
        self._timer: asyncio.TimerHandle | None = None
        self._transport: asyncio.Transport
        self._peer = ""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Wait for the client's first call, ``header_s`` at most."""
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self._server.open.add(self)
        self._peer = ":".join(map(str, (transport.get_extra_info("peername") or ("?",))[:2]))
        self._h2.initiate_connection()
        self._h2.increment_flow_control_window(_CONNECTION_WINDOW_BYTES)
        self._wait_for_call(self._server.header_s)

    @property
    def busy(self) -> bool:
        """Whether a call is being answered."""
        return bool(self._tasks)

    def evict(self) -> None:
        """Close it: its seat is needed."""
        self.drain()

    def connection_lost(self, exc: Exception | None) -> None:
        """Cancel the calls: nobody waits for them any more."""
        self._closing = True
        self._stop_timer()
        self._cancel(*self._tasks)
        self._server.lost(self)
        self.on_lost()

    def data_received(self, data: bytes) -> None:
        """Handle the frames that have arrived."""
        if self._closing:
            return
        try:
            for event in self._h2.receive_data(data):
                self._handle(event)
                if self._closing:  # what else has arrived is not looked at
                    return
        except Exception as error:  # noqa: BLE001 - whatever the bytes, they end only their sender
            self._refuse(data, error)
            return
        self._flush()

    def pause_writing(self) -> None:
        """Read nothing more from a client that does not read."""
        self._transport.pause_reading()

    def resume_writing(self) -> None:
        """Go on."""
        self._transport.resume_reading()

    def drain(self) -> None:
        """Close once the calls in progress are answered; the client sends no new ones here."""
        self._draining = True
        if not self._closing:
            self._flush()
            # By hand: after h2's own GOAWAY it would send no more responses.
            last = self._h2.highest_inbound_stream_id
            self._transport.write(GoAwayFrame(0, last_stream_id=last).serialize())
        if not self._tasks:
            self._end_transport()

    def abort(self) -> None:
        """Close at once."""
        self._transport.abort()

    def _handle(self, event: Event) -> None:
        match event:
            case DataReceived():
                call = self._calls.get(event.stream_id)
                if call is not None:
                    call.feed(event.data)
                self._h2.acknowledge_received_data(event.flow_controlled_length, event.stream_id)
            case RequestReceived():
                self._begin(event)
            case StreamEnded():
                call = self._calls.get(event.stream_id)
                if call is not None:
                    call.end()
            case StreamReset():
                self._reset(event.stream_id)
            case WindowUpdated():
                self._windows.set()
            case RemoteSettingsChanged():
                self._windows.set()
                if not self._begun:
                    self._begun = True
                    self._wait_for_call(self._server.idle_s)
            case ConnectionTerminated():  # the client goes, and h2 sends nothing more
                self._left = True
                self.drain()

    def _begin(self, event: RequestReceived) -> None:
        self._stop_timer()
        stream = event.stream_id
        metadata = {
            name.decode("latin-1"): value.decode("latin-1") for name, value in event.headers
        }
        call = GrpcCall(metadata, self._peer, self.seat.authenticate)
        self._calls[stream] = call
        task = self._loop.create_task(self._respond(stream, call))
        self._tasks[stream] = task
        task.add_done_callback(lambda _: self._end(stream))

    def _cancel(self, *streams: int) -> None:
        for stream in streams:
            task = self._tasks.get(stream)
            if task is not None:
                # Not at once: one that has just been made shall begin, so that it is counted.
                self._loop.call_soon(task.cancel)

    def _reset(self, stream: int) -> None:
        self._cancel(stream)
        self._resets += 1
        if self._resets > _MAX_RESETS:
            self._h2.close_connection(ErrorCodes.ENHANCE_YOUR_CALM)
            self._close()

    def _end(self, stream: int) -> None:
        del self._tasks[stream], self._calls[stream]
        self._guest_calls += self.seat.guest
        if self._tasks or self._closing:
            return
        if self._draining:
            self._end_transport()
        elif self.seat.guest and self._guest_calls >= _MAX_GUEST_CALLS:
            self.drain()
        else:
            self._wait_for_call(self._server.header_s if self.seat.guest else self._server.idle_s)

    async def _respond(self, stream: int, call: GrpcCall) -> None:
        refused = self._not_grpc(call)
        try:
            if refused is not None:
                self._h2.send_headers(stream, refused, end_stream=True)
            else:
                await self._send(stream, await self._server.respond(call))
            if not call.complete:
                self._h2.reset_stream(stream, ErrorCodes.NO_ERROR)  # it need not send the rest
            self._resets = max(0, self._resets - 1)
        except H2Error as error:  # the client has ended the call, or the connection
            log.debug("a response was not sent: %s", error)
        except TimeoutError:  # the client does not read its responses
            with contextlib.suppress(H2Error):  # it has said goodbye
                self._h2.reset_stream(stream, ErrorCodes.CANCEL)
        if not self._closing:
            self._flush()

    def _not_grpc(self, call: GrpcCall) -> list[tuple[str, str]] | None:
        """The response to a request of another kind."""
        method = call.metadata.get(":method", "")
        content_type = call.metadata.get("content-type", "")
        if method != "POST":
            status, message = 405, f"{method} is not a gRPC call"
        elif not content_type.startswith("application/grpc"):
            status, message = 415, f"content type {content_type!r} is not that of gRPC"
        else:
            return None
        self._server.refuse(ConnectionRefusal(RefusalReason.BAD_HTTP, status, message))
        return [(":status", str(status))]

    async def _send(self, stream: int, response: GrpcResponse) -> None:
        headers = [
            (":status", "200"),
            ("content-type", "application/grpc"),
            ("grpc-accept-encoding", self._server.encodings),
        ]
        trailers = [("grpc-status", str(response.status))]
        if response.text:
            trailers.append(("grpc-message", quote(response.text, safe=_PLAIN)))
        if response.details:
            details = base64.b64encode(response.details).decode().rstrip("=")
            trailers.append(("grpc-status-details-bin", details))
        if response.status:
            self._h2.send_headers(stream, headers + trailers, end_stream=True)
            return
        self._h2.send_headers(stream, headers)
        data = b"\0" + len(response.message).to_bytes(4, "big") + response.message
        async with asyncio.timeout(self._server.request_s):
            while data:
                room = self._h2.local_flow_control_window(stream)
                if room <= 0:
                    self._flush()
                    self._windows.clear()
                    await self._windows.wait()
                    continue
                part = data[: min(room, self._h2.max_outbound_frame_size)]
                self._h2.send_data(stream, part)
                data = data[len(part) :]
        self._h2.send_headers(stream, trailers, end_stream=True)

    def _refuse(self, data: bytes, error: Exception) -> None:
        """End a connection whose bytes are not HTTP/2."""
        if self._left:  # h2 takes nothing after a goodbye, but it may cross with our frames
            self._close()
            return
        message = f"not understood as HTTP/2: {error}"
        refusal = ConnectionRefusal(RefusalReason.BAD_HTTP, 400, message)
        response = self._server.refuse(refusal)
        if not self._begun and _HTTP_1.match(data):
            self._h2.clear_outbound_data_buffer()
            self._transport.write(response)
        self._close()

    def _close(self) -> None:
        """Close, but let the client see what was sent: what it still sends is discarded."""
        if self._closing:
            return
        self._flush()
        self._closing = True
        self._stop_timer()
        self._cancel(*self._tasks)
        if self._transport.is_closing() or not self._transport.can_write_eof():
            self._transport.close()
            return
        self._transport.write_eof()
        self._loop.call_later(LINGER_S, self._transport.abort)

    def _end_transport(self) -> None:
        """Close once all is sent, or after ``request_s``, if the client does not read."""
        self._transport.close()
        self._loop.call_later(self._server.request_s, self._transport.abort)

    def _flush(self) -> None:
        data = self._h2.data_to_send()
        if data and not self._transport.is_closing():
            self._transport.write(data)

    def _wait_for_call(self, seconds: float) -> None:
        self._stop_timer()
        self._timer = self._loop.call_later(seconds, self.drain)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
