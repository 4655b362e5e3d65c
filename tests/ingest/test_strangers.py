"""Strangers who hold connections and calls: honest senders are answered all the same.

The strangers come from the address of the honest senders: no limit by address helps here.
"""

from __future__ import annotations

import contextlib
import resource
import socket
import ssl
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.http.http2 import Http2Client
from tests.http.strangers import Returning, check_answered
from tests.kit.ingest import QUICK, Ingest, ingest, local_ingest, request
from tests.kit.servers.certificates import write_certificate
from tests.kit.threads import spawn, until

TOKEN = {"authorization": "Bearer open-sesame"}
HEADERS = b"POST /v1/traces HTTP/1.1\r\nhost: x\r\nx: "
"""They have no end."""
PROCESSES = (1, pytest.param(2, marks=pytest.mark.system))


@pytest.fixture(scope="module", params=PROCESSES)
def running(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Ingest]:
    """A receiver with a token, and otherwise the default settings, which all of this happens to.

    Of one process, or of two that share its limits.
    """
    folder = tmp_path_factory.mktemp("ingest")
    token = folder / "token"
    token.write_text("open-sesame\n")
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = before[1] if before[1] != resource.RLIM_INFINITY else 65_536
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(before[0], min(wanted, 65_536)), before[1]))
    try:
        options = ("--token-file", str(token), "--processes", str(request.param))
        with ingest(folder / "home", *QUICK, *options) as process:
            yield process
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


@pytest.fixture(scope="module")
def calm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ingest]:
    """A receiver that nobody attacks: how long an answer takes on this machine."""
    with ingest(tmp_path_factory.mktemp("calm") / "home", *QUICK) as process:
        yield process


def ask(running: Ingest, number: int, trusted: ssl.SSLContext | None = None) -> bool:
    """An honest request with a span, over either protocol."""
    if number % 2 and trusted is None:
        return running.post(request(number), **TOKEN).status == 200
    with Http2Client(running.grpc, trusted=trusted) as client:
        return client.call(request(number), authorization=TOKEN["authorization"]).status == 0


def check_honest_senders(running: Ingest, calm: Ingest) -> None:
    """They are answered, and so are health checks."""
    check_answered(lambda number: ask(running, number), lambda number: ask(calm, number))

    def is_healthy(receiver: Ingest, number: int) -> bool:
        return receiver.ask("GET", ("/healthz", "/readyz")[number % 2]).status == 200

    check_answered(lambda number: is_healthy(running, number), lambda n: is_healthy(calm, n), 2)


def test_a_thousand_idle_connections(running: Ingest, calm: Ingest) -> None:
    """On either port, without a word."""
    host, _, port = running.grpc.rpartition(":")
    with contextlib.ExitStack() as stack:
        for place in (running.http, (host, int(port))):
            for _ in range(1000):
                stack.enter_context(socket.create_connection(place))
        check_honest_senders(running, calm)


def silent(link: socket.socket) -> None:
    """A handshake that never begins."""


def hello_only(link: socket.socket) -> None:
    """One that stops within its first message."""
    link.sendall(b"\x16\x03\x01\x02\x00\x01\x00")


@pytest.mark.parametrize("processes", PROCESSES)
@pytest.mark.parametrize("attack", [silent, hello_only])
def test_tls_handshakes_at_the_grpc_port_that_never_end(
    tmp_path: Path, calm: Ingest, processes: int, attack: Callable[[socket.socket], None]
) -> None:
    """More of them than there may be connections: the calls of others are answered."""
    access = write_certificate(tmp_path)
    options = ("--tls-cert", str(access.tls_cert), "--tls-key", str(access.tls_key))
    shared = ("--max-connections", "100", "--processes", str(processes))
    trusted = ssl.create_default_context(cafile=str(access.tls_cert))
    trusted.set_alpn_protocols(["h2"])
    with (
        ingest(tmp_path / "home", *QUICK, *options, *shared) as running,
        contextlib.ExitStack() as stack,
    ):
        host, _, port = running.grpc.rpartition(":")
        for _ in range(200):
            link = stack.enter_context(socket.create_connection((host, int(port))))
            with contextlib.suppress(OSError):  # closed, since the next one has come
                attack(link)
        check_answered(
            lambda number: ask(running, number, trusted), lambda number: ask(calm, number)
        )


def test_a_connection_that_says_nothing_is_closed_within_seconds(running: Ingest) -> None:
    """Though a request as a whole may take longer."""
    with running.connect() as idle, running.connect() as slow:
        slow.sendall(b"POST /v1/traces HTTP/1.1\r\n")
        for link in (idle, slow):
            link.settimeout(20)  # less than the 30 s of a request
            assert link.recv(12) == b"HTTP/1.1 408"


@pytest.mark.parametrize(
    ("head", "more"),
    [
        pytest.param(HEADERS, b"y", id="slow"),
        pytest.param(b"", b"", id="idle", marks=pytest.mark.system),
    ],
)
def test_strangers_who_come_back(running: Ingest, calm: Ingest, head: bytes, more: bytes) -> None:
    """More connections than there may be, with headers that have no end, or without a word."""
    with Returning(running.http, 1000, head, more) as strangers:
        check_honest_senders(running, calm)
        until(lambda: strangers.reconnects > 100)
        check_honest_senders(running, calm)


def test_calls_that_never_send_their_message(running: Ingest, calm: Ingest) -> None:
    """With the right token, and more than there may be requests in progress."""
    before = ended(running)
    with contextlib.ExitStack() as stack:
        for _ in range(70):
            client = stack.enter_context(Http2Client(running.grpc))
            for _ in range(30):
                client.start(**TOKEN)
        until(
            lambda: running.status()["requests_under_way"] >= 1900 or ended(running) > before + 100
        )
        check_honest_senders(running, calm)
        # They end by themselves, soon.
        until(lambda: running.status()["requests_under_way"] == 0)
        assert ended(running) >= before + 2000


def ended(running: Ingest) -> int:
    """How many requests were ended because they were slow."""
    refused = running.status()["refused_requests"]
    return int(refused.get("too_slow", 0) + refused.get("busy", 0))


def many_calls(running: Ingest) -> None:
    """Three hundred at a time, which are not a sender's: the connection is closed."""
    with Http2Client(running.grpc) as client:
        for _ in range(300):  # it does not listen to what it is allowed
            client.start(**TOKEN)
        client.wait_closed()


def noise(running: Ingest) -> None:
    """Bytes that are no HTTP of any version, to both ports."""
    host, _, port = running.grpc.rpartition(":")
    for place in (running.http, (host, int(port))):
        with socket.create_connection(place, 20) as link, contextlib.suppress(OSError):
            link.sendall(bytes(range(256)) * 64)
            while link.recv(4096):
                pass


@pytest.mark.system
@pytest.mark.parametrize("attack", [many_calls, noise])
def test_strangers_who_come_again_and_again(
    running: Ingest, calm: Ingest, attack: Callable[[Ingest], None]
) -> None:
    """As soon as their connection is closed; meanwhile, the others are answered."""
    ended, times = threading.Event(), [0]

    def repeat() -> None:
        while not ended.is_set():
            with contextlib.suppress(ConnectionError):
                attack(running)
            times[0] += 1

    with contextlib.ExitStack() as stack:
        strangers = [stack.enter_context(spawn(repeat)) for _ in range(4)]
        try:
            until(lambda: times[0] > 4)
            check_honest_senders(running, calm)
        finally:
            ended.set()
        for stranger in strangers:
            stranger.result()


def test_health_is_answered_when_all_connections_are_taken(tmp_path: Path) -> None:
    """By senders that have authenticated; one more of those is told to come again."""
    with (
        local_ingest(tmp_path / "home", *QUICK, "--max-connections", "3") as running,
        contextlib.ExitStack() as stack,
    ):
        body = request(1)
        head = b"POST /v1/traces HTTP/1.1\r\nhost: x\r\ncontent-type: application/x-protobuf\r\n"
        for _ in range(3):
            link = stack.enter_context(running.connect())
            link.sendall(head + b"content-length: %d\r\n\r\n" % len(body) + body)
            assert link.recv(12) == b"HTTP/1.1 200"
        assert running.post(request(2)).status == 503
        assert running.ask("GET", "/healthz").status == 200
