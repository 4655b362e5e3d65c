"""Strangers without a token who hold connections beside the honest senders of a soak."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from collections.abc import Callable, Iterator
from typing import Self

from tests.http.http2 import Http2Client

MANY = 1_000
"""Connections, or calls, of one attack."""
_AT_ONCE = 20
"""Connections that are opened from one pause to the next: all are there after some seconds."""
_CALLS = 30
"""On one connection: more than 32 are refused at once."""
_PAUSE_S = 0.05
_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
"""So begins a connection of HTTP/2."""


class Strangers:
    """One kind of attack while it is entered; see ``schedule.STRANGERS``.

    ``ports``: of HTTP and of gRPC, of what is attacked.
    """

    def __init__(self, kind: str, ports: tuple[int, int]) -> None:
        self._http_port, self._grpc_port = ports
        attacks: dict[str, Callable[[], Iterator[None]]] = {
            "idle connections": lambda: self._hold(self._http_port, b""),
            "endless headers": lambda: self._hold(
                self._http_port, b"POST /v1/traces HTTP/1.1\r\nhost: x\r\nx: "
            ),
            "noise": lambda: self._noise(self._http_port, b""),
            "silent calls": self._silent_calls,
            "idle gRPC connections": lambda: self._hold(self._grpc_port, b""),
            "gRPC noise": lambda: self._noise(self._grpc_port, _PREFACE),
        }
        self._attack = attacks[kind]
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run, name="strangers")

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._end.is_set():
            # A receiver that is dead or stopped does not end the attack.
            with contextlib.suppress(OSError):
                for _ in self._attack():
                    if self._end.wait(_PAUSE_S):
                        return
            self._end.wait(0.5)

    def _connect(self, port: int) -> socket.socket:
        return socket.create_connection(("127.0.0.1", port), timeout=2)

    def _hold(self, port: int, opening: bytes) -> Iterator[None]:
        """Open connections until there are many, and those again that were closed."""
        links: list[socket.socket] = []
        try:
            while True:
                links = [link for link in links if self._is_open(link, b"y" * bool(opening))]
                for number in range(MANY - len(links)):
                    link = self._connect(port)
                    links.append(link)
                    link.sendall(opening)
                    link.setblocking(False)
                    if number % _AT_ONCE == 0:
                        yield
                yield
        finally:
            for link in links:
                link.close()

    def _is_open(self, link: socket.socket, more: bytes) -> bool:
        try:
            link.send(more)
            if link.recv(4096):
                return True
        except BlockingIOError:
            return True
        except OSError:
            pass
        link.close()
        return False

    def _noise(self, port: int, opening: bytes) -> Iterator[None]:
        """Bytes that are not HTTP, at once, and after an opening that is right."""
        while True:
            for number in range(_AT_ONCE // 4):
                with self._connect(port) as link, contextlib.suppress(OSError):
                    link.sendall(opening * (number % 2) + os.urandom(512) + b"\r\n\r\n")
            yield

    def _silent_calls(self) -> Iterator[None]:
        """Calls of gRPC whose message never comes."""
        with contextlib.ExitStack() as stack:
            for _ in range(MANY // _CALLS):
                client = stack.enter_context(Http2Client(f"127.0.0.1:{self._grpc_port}"))
                for _ in range(_CALLS):
                    client.start()
                yield
            for _ in range(100):  # longer than any of them lasts
                yield
