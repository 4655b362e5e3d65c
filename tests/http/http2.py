"""A client of gRPC that sends what no library would: frames as the test wants them."""

from __future__ import annotations

import contextlib
import socket
import ssl
from dataclasses import dataclass, field
from typing import Self

from h2.config import H2Configuration
from h2.connection import H2Connection
from h2.events import (
    ConnectionTerminated,
    DataReceived,
    Event,
    ResponseReceived,
    StreamEnded,
    StreamReset,
    TrailersReceived,
)
from h2.settings import SettingCodes

from tests.kit.threads import PATIENCE_S

TRACES = "/opentelemetry.proto.collector.trace.v1.TraceService/Export"


@dataclass
class Answer:
    """What a call got: headers and trailers together, and bytes."""

    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""
    ended: bool = False
    reset: int | None = None

    @property
    def status(self) -> int:
        """Of gRPC."""
        return int(self.headers["grpc-status"])


class Http2Client:
    """One connection; as a context manager, it is closed at the end."""

    def __init__(
        self, address: str, *, window: int = 65_535, trusted: ssl.SSLContext | None = None
    ) -> None:
        host, _, port = address.rpartition(":")
        self.socket = socket.create_connection((host, int(port)), timeout=PATIENCE_S)
        if trusted is not None:
            self.socket = trusted.wrap_socket(self.socket, server_hostname=host)
        self.h2 = H2Connection(
            H2Configuration(header_encoding="utf-8", validate_outbound_headers=False)
        )
        self.h2.initiate_connection()
        self.h2.update_settings({SettingCodes.INITIAL_WINDOW_SIZE: window})
        self.answers: dict[int, Answer] = {}
        self.goodbye: int | None = None
        self.closed = False
        """Whether the other side has closed the connection."""
        self.flush()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.socket.close()

    def call(self, body: bytes, *, compressed: bool = False, **headers: str) -> Answer:
        """One whole call, and its answer."""
        stream = self.start(**headers)
        self.send(stream, message(body, compressed=compressed), end=True)
        return self.answer(stream)

    def start(self, method: str = TRACES, **headers: str) -> int:
        """Send the headers of a call."""
        stream = self.h2.get_next_available_stream_id()
        named = {
            ":method": "POST",
            ":scheme": "http",
            ":authority": "tests",
            ":path": method,
            "content-type": "application/grpc",
            "te": "trailers",
        } | {name.replace("_", "-"): value for name, value in headers.items()}
        self.answers[stream] = Answer()
        self.h2.send_headers(stream, list(named.items()))
        self.flush()
        return stream

    def send(self, stream: int, data: bytes, *, end: bool = False) -> None:
        """Send bytes of a call, as fast as the other side wants them; none after its answer."""
        while data and not self.answers[stream].ended and not self.closed:
            room = self.h2.local_flow_control_window(stream)
            if room <= 0:
                self.receive()
                continue
            part = data[: min(room, self.h2.max_outbound_frame_size)]
            data = data[len(part) :]
            self.h2.send_data(stream, part, end_stream=end and not data)
            self.flush()

    def answer(self, stream: int) -> Answer:
        """Wait for the end of a call."""
        answer = self.answers[stream]
        while not answer.ended and not self.closed:
            self.receive()
        return answer

    def wait_closed(self) -> None:
        """Wait until the other side has closed the connection."""
        while not self.closed:
            self.receive()

    def flush(self) -> None:
        """Send the frames that are ready."""
        with contextlib.suppress(ConnectionError):  # the end is seen when it is read
            self.socket.sendall(self.h2.data_to_send())

    def receive(self) -> None:
        """Wait for something from the other side."""
        try:
            data = self.socket.recv(65_536)
        except ConnectionError:
            data = b""
        if not data:
            self.closed = True
            return
        for event in self.h2.receive_data(data):
            self._handle(event)
        self.flush()

    def _handle(self, event: Event) -> None:
        match event:
            case ResponseReceived() | TrailersReceived():
                self.answers[event.stream_id].headers |= dict(event.headers)  # type: ignore[arg-type]
            case DataReceived():
                self.answers[event.stream_id].body += event.data
                self.h2.acknowledge_received_data(event.flow_controlled_length, event.stream_id)
            case StreamEnded():
                self.answers[event.stream_id].ended = True
            case StreamReset():
                self.answers[event.stream_id].reset = event.error_code
                self.answers[event.stream_id].ended = True
            case ConnectionTerminated():
                self.goodbye = event.error_code


def message(body: bytes, *, compressed: bool = False, announced: int | None = None) -> bytes:
    """A message with its head, which may announce another length."""
    length = len(body) if announced is None else announced
    return bytes([compressed]) + length.to_bytes(4, "big") + body
