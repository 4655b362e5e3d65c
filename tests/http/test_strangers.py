"""Strangers at the web UI, the page for Prometheus, and TLS: others are answered all the same.

They come from the address of the others. ``tests/ingest/test_strangers.py`` has the same for the
receiver, in more ways.
"""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import socket
import ssl
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

pytest.importorskip("uvicorn")
pytest.importorskip("starlette")

from batchmill.export import PrometheusServer, PrometheusSettings
from batchmill.http import HttpServer, ServerSettings
from batchmill.store import open_store
from batchmill.web import WebServer, WebSettings
from tests.http.strangers import HONEST, Returning, check_answered
from tests.http.test_server import hello
from tests.kit.servers.certificates import write_certificate
from tests.kit.threads import WAIT_S, spawn, until

STRANGERS = 200
HEADERS = b"GET / HTTP/1.1\r\nx: "
"""They have no end."""


@dataclass
class Place:
    """Where a server listens, and what it serves."""

    port: int
    path: str
    trusted: ssl.SSLContext | None = None

    def get(self, path: str) -> int:
        """The status of an answer, on a connection of its own; 0: there is none."""
        link: http.client.HTTPConnection
        if self.trusted is None:
            link = http.client.HTTPConnection("127.0.0.1", self.port, timeout=WAIT_S)
        else:
            link = http.client.HTTPSConnection(
                "127.0.0.1", self.port, timeout=WAIT_S, context=self.trusted
            )
        with contextlib.closing(link), contextlib.suppress(OSError, http.client.HTTPException):
            link.request("GET", path)
            return link.getresponse().status
        return 0


@contextlib.contextmanager
def served(server: HttpServer | WebServer) -> Iterator[None]:
    """A server on a thread of its own."""
    ready = threading.Event()
    with spawn(lambda: asyncio.run(server.serve(ready.set))):
        assert ready.wait(WAIT_S)
        yield
        server.stop()


@contextlib.contextmanager
def serving(kind: str, folder: Path) -> Iterator[Place]:
    """A server for fewer connections than strangers have; its other limits are the defaults."""
    folder.mkdir()
    if kind == "web":
        web = WebServer(f"sqlite:///{folder}/none.db", WebSettings(port=0, max_connections=100))
        with served(web):
            yield Place(int(web.address.rpartition(":")[2]), "/static/js/main.js")
    elif kind == "prometheus":
        url = f"sqlite:///{folder}/metrics.db"
        with PrometheusServer(lambda: open_store(url), PrometheusSettings(port=0)) as page:
            yield Place(page.port, "/metrics")
    else:
        access = write_certificate(folder)
        settings = ServerSettings(access=access, max_connections=100)
        server = HttpServer(hello, settings, 0, lambda _: b"", health=("/healthz",))
        with served(server):
            trusted = ssl.create_default_context(cafile=str(access.tls_cert))
            yield Place(server.port, "/", trusted)


@pytest.fixture
def places(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[Place, Place]]:
    """Two servers of a kind, of which nobody attacks the second."""
    kind = request.param
    with serving(kind, tmp_path / "attacked") as place, serving(kind, tmp_path / "calm") as calm:
        yield place, calm


def check_others(place: Place, calm: Place) -> None:
    """They are answered, and so is a health check."""
    for path, count in ((place.path, HONEST), ("/healthz", 1)):
        check_answered(
            lambda _, path=path: place.get(path) == 200,  # type: ignore[misc]
            lambda _, path=path: calm.get(path) == 200,  # type: ignore[misc]
            count,
        )


def idle(link: socket.socket) -> None:
    """Not a word; for TLS, a handshake that never begins."""


def slow(link: socket.socket) -> None:
    """Headers without an end."""
    link.sendall(HEADERS)


def hello_only(link: socket.socket) -> None:
    """A handshake of TLS that stops within its first message."""
    link.sendall(b"\x16\x03\x01\x02\x00\x01\x00")


def noise(link: socket.socket) -> None:
    """Bytes that mean nothing."""
    link.sendall(bytes(range(256)) * 4)


@pytest.mark.parametrize(
    ("places", "attack"),
    [
        *((server, attack) for server in ("web", "prometheus") for attack in (idle, slow, noise)),
        *(("tls", attack) for attack in (idle, hello_only, noise)),
    ],
    indirect=["places"],
)
def test_others_are_answered(
    places: tuple[Place, Place], attack: Callable[[socket.socket], None]
) -> None:
    """While strangers hold more connections than there may be, or as many as come."""
    place, calm = places
    with contextlib.ExitStack() as stack:
        for _ in range(STRANGERS):
            link = stack.enter_context(socket.create_connection(("127.0.0.1", place.port), WAIT_S))
            with contextlib.suppress(OSError):  # closed, since the next one has come
                attack(link)
        check_others(place, calm)


@pytest.mark.parametrize(("head", "more"), [(b"", b""), (HEADERS, b"y")], ids=["idle", "slow"])
@pytest.mark.parametrize("places", ["web", "prometheus"], indirect=True)
def test_others_are_answered_beside_strangers_who_come_back(
    places: tuple[Place, Place], head: bytes, more: bytes
) -> None:
    """Each time that their connections are closed, without a word or with headers without end."""
    place, calm = places
    with Returning(("127.0.0.1", place.port), STRANGERS, head, more) as strangers:
        until(lambda: strangers.reconnects > STRANGERS)
        check_others(place, calm)


@pytest.mark.parametrize(
    ("attacked_s", "calm_s", "enough"),
    [(9.0, 0.0, True), (11.0, 0.0, False), (120.0, 0.5, False), (14.0, 3.0, True)],
)
def test_an_answer_that_comes_late_does_not_count(
    attacked_s: float, calm_s: float, enough: bool
) -> None:
    """Unless the machine is so busy that answers without an attack are slow as well."""
    now = [0.0]

    def takes(seconds: float) -> bool:
        now[0] += seconds
        return True

    def check(late: int) -> None:
        check_answered(
            lambda number: takes(attacked_s if number <= late else 0.0),
            lambda _: takes(calm_s),
            clock=lambda: now[0],
        )

    check(late=2)  # of forty
    with contextlib.nullcontext() if enough else pytest.raises(AssertionError):
        check(late=3)
