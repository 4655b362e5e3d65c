"""Strangers without a token who hold connections beside the honest senders of a soak."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from collections.abc import Callable, Iterator
from typing import Self

from tests.http.http2 import Http2Client

MANY = 300
"""Connections of one attack."""
_PAUSE_S = 0.01


class Strangers:
    """One kind of attack on a receiver while it is entered; see ``schedule.STRANGERS``."""

    def __init__(self, kind: str, ports: tuple[int, int]) -> None:
        self._http_port, self._grpc_port = ports
        attacks: dict[str, Callable[[], Iterator[None]]] = {
            "idle connections": lambda: self._hold(b""),
            "endless headers": lambda: self._hold(b"POST /v1/traces HTTP/1.1\r\nhost: x\r\nx: "),
            "noise": self._noise,
            "silent calls": self._silent_calls,
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

    def _connect(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self._http_port), timeout=2)

    def _hold(self, opening: bytes) -> Iterator[None]:
        """Open connections until there are many, then open those again that were closed."""
        links: list[socket.socket] = []
        try:
            while True:
                if len(links) < MANY:
                    link = self._connect()
                    links.append(link)
                    link.sendall(opening)
                    link.setblocking(False)
                else:
                    links = [link for link in links if self._is_open(link, b"y" * bool(opening))]
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

    def _noise(self) -> Iterator[None]:
        """Bytes that are not HTTP."""
        while True:
            with self._connect() as link, contextlib.suppress(OSError):
                link.sendall(os.urandom(512) + b"\r\n\r\n")
            yield

    def _silent_calls(self) -> Iterator[None]:
        """Calls of gRPC whose message never comes."""
        with contextlib.ExitStack() as stack:
            for _ in range(20):
                client = stack.enter_context(Http2Client(f"127.0.0.1:{self._grpc_port}"))
                for _ in range(10):
                    client.start()
                yield
            for _ in range(200):
                yield
