"""The HTTP server that ingest, the web pages and the page for Prometheus share."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import socket
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest

pytest.importorskip("uvicorn")

from batchmill import ConfigError
from batchmill.http import (
    ConnectionRefusal,
    HttpServer,
    RefusalReason,
    ServerSettings,
    response_bytes,
)
from tests.kit.threads import WAIT_S, Gate, Spawned, spawn, until


@dataclass
class Served:
    """A server on a free port, and the connections it refused."""

    server: HttpServer
    refused: list[ConnectionRefusal] = field(default_factory=list)

    def refuse(self, refusal: ConnectionRefusal) -> bytes:
        self.refused.append(refusal)
        if not refusal.status:
            return b""
        return response_bytes(refusal.status, refusal.message.encode(), {})

    def reasons(self) -> list[RefusalReason]:
        return [refusal.reason for refusal in self.refused]

    def connect(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.server.port), WAIT_S)

    def get(self, path: str = "/") -> bytes:
        link = http.client.HTTPConnection("127.0.0.1", self.server.port, timeout=WAIT_S)
        with contextlib.closing(link):
            link.request("GET", path)
            return link.getresponse().read()


async def hello(scope: Any, receive: Any, send: Any) -> None:
    """An application that greets."""
    headers = [(b"content-length", b"5")]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": b"hello"})


def make(app: Any = hello, health: tuple[str, ...] = (), **settings: Any) -> Served:
    """A server that is not served yet."""
    served = Served(None)  # type: ignore[arg-type]
    served.server = HttpServer(app, ServerSettings(**settings), 0, served.refuse, health=health)
    return served


@contextlib.contextmanager
def serving(app: Any = hello, **settings: Any) -> Iterator[tuple[Served, Spawned[None]]]:
    """Serve on a thread of its own, until the block ends."""
    served, ready = make(app, **settings), threading.Event()
    with spawn(lambda: asyncio.run(served.server.serve(ready.set))) as running:
        try:
            assert ready.wait(WAIT_S)
            yield served, running
        finally:
            served.server.stop()


def test_requests_are_answered() -> None:
    """At the address that the server names, until it is stopped."""
    with serving() as (served, _):
        assert served.server.address == f"http://127.0.0.1:{served.server.port}"
        assert served.get() == b"hello"
        until(lambda: served.server.connections.open == 0)
    assert (served.server.connections.accepted, served.refused) == (1, [])
    with pytest.raises(ConnectionRefusedError), served.connect():
        pass


def test_a_server_stopped_before_it_serves() -> None:
    """It closes its port, drains, and is never ready."""
    events: list[str] = []

    async def drain() -> None:
        events.append("drained")

    served = make()
    served.server.listen()
    served.server.stop()
    asyncio.run(served.server.serve(lambda: events.append("ready"), drain))
    assert events == ["drained"]
    with pytest.raises(ConnectionRefusedError), served.connect():
        pass


def test_stop_waits_for_requests_in_progress() -> None:
    """A request that is being answered gets its response; new connections are refused."""
    gate = Gate()

    async def slow(scope: Any, receive: Any, send: Any) -> None:
        await asyncio.to_thread(gate.wait)
        await hello(scope, receive, send)

    with gate, serving(slow) as (served, running), spawn(served.get) as answer:
        gate.wait_entered()
        served.server.stop()
        until(lambda: not served.server.listening)
        with pytest.raises(ConnectionRefusedError), served.connect():
            pass
        assert not running.done()
        gate.open()
        assert answer.result() == b"hello"
        running.result()


def test_a_port_in_use_names_its_setting() -> None:
    """The error says which setting chose the port."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        server = HttpServer(
            hello, ServerSettings(), port, lambda _: b"", port_setting="metrics_port"
        )
        with pytest.raises(ConfigError, match=f"metrics_port={port} is not valid: .*free port"):
            server.listen()


def test_refused_connections_are_reported() -> None:
    """With the reason, and answered as the server's owner says."""
    with serving(request_s=0.2) as (served, _):
        with served.connect() as slow:
            slow.sendall(b"GET / HTTP/1.1\r\n")
            assert slow.makefile("rb").read().startswith(b"HTTP/1.1 408 Request Timeout\r\n")
        with served.connect() as other:
            other.sendall(b"this is not HTTP\r\n\r\n")
            assert other.makefile("rb").read().startswith(b"HTTP/1.1 400 Bad Request\r\n")
        served.connect().close()
        until(lambda: len(served.refused) == 3)
    assert served.reasons() == [
        RefusalReason.TOO_SLOW,
        RefusalReason.BAD_HTTP,
        RefusalReason.NO_REQUEST,
    ]


def test_connections_are_limited() -> None:
    """One that is idle is answered 503 and closed when another comes."""
    with serving(max_connections=1) as (served, _):
        with served.connect() as first, first.makefile("rb") as answers:
            first.sendall(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
            while answers.readline() != b"\r\n":
                pass
            assert answers.read(5) == b"hello"
            with served.connect():
                answer = answers.read()
        assert answer.startswith(b"HTTP/1.1 503 Service Unavailable\r\n")
        assert answer.endswith(b"the connection was idle, and others wait for one")
        until(lambda: served.server.connections.open == 0)
        assert served.get() == b"hello"
    assert (served.server.connections.accepted, served.server.connections.refused) == (3, 1)


def test_health_is_answered_beyond_the_limit() -> None:
    """On connections that serve nothing else, when clients that have authenticated take all."""

    async def known(scope: Any, receive: Any, send: Any) -> None:
        scope["state"]["authenticated"]()
        await hello(scope, receive, send)

    with (
        serving(known, health=("/healthz",), max_connections=1) as (served, _),
        served.connect() as first,
    ):
        first.sendall(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
        assert first.recv(12) == b"HTTP/1.1 200"
        assert served.get("/healthz") == b"hello"
        assert served.get("/other") == b"too many connections are open"
        assert served.reasons() == [RefusalReason.TOO_MANY_CONNECTIONS]
        assert served.server.connections.refused == 1


@pytest.mark.parametrize(
    ("setting", "value"), [("max_connections", 0), ("request_s", -1.0), ("request_s", float("inf"))]
)
def test_limits_must_be_above_zero(setting: str, value: Any) -> None:
    """The error names the setting."""
    with pytest.raises(ConfigError, match=f"{setting}=.* above 0"):
        ServerSettings(**{setting: value})
