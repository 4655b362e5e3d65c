"""Strangers who hold connections and calls: honest senders are answered all the same.

The strangers come from the address of the honest senders: no limit by address helps here.
"""

from __future__ import annotations

import contextlib
import itertools
import resource
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Self

import pytest

from tests.http.http2 import Http2Client
from tests.kit.ingest import QUICK, Ingest, ingest, local_ingest, request
from tests.kit.threads import until

TOKEN = {"authorization": "Bearer open-sesame"}
HONEST = 40
"""Requests of honest senders, each on a connection of its own."""
GOAL = 0.95


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ingest]:
    """A receiver with a token, and otherwise the default settings, which all of this happens to."""
    folder = tmp_path_factory.mktemp("ingest")
    token = folder / "token"
    token.write_text("open-sesame\n")
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = before[1] if before[1] != resource.RLIM_INFINITY else 65_536
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(before[0], min(wanted, 65_536)), before[1]))
    try:
        with ingest(folder / "home", *QUICK, "--token-file", str(token)) as process:
            yield process
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def answered(running: Ingest) -> float:
    """The share of honest requests that are answered with success, over both protocols."""
    good = 0
    for number in range(1, HONEST + 1):
        if number % 2:
            with contextlib.suppress(OSError):
                good += running.post(request(number), **TOKEN).status == 200
            continue
        with (
            contextlib.suppress(OSError, AssertionError, KeyError),
            Http2Client(running.grpc) as client,
        ):
            good += client.call(request(number), authorization=TOKEN["authorization"]).status == 0
    return good / HONEST


def check_honest_senders(running: Ingest) -> None:
    """They are answered, and so are health checks."""
    assert answered(running) >= GOAL
    assert [running.ask("GET", path).status for path in ("/healthz", "/readyz")] == [200, 200]


def test_a_thousand_idle_connections(running: Ingest) -> None:
    """On either port, without a word."""
    host, _, port = running.grpc.rpartition(":")
    with contextlib.ExitStack() as stack:
        for place in (running.http, (host, int(port))):
            for _ in range(1000):
                stack.enter_context(socket.create_connection(place))
        check_honest_senders(running)


def test_a_connection_that_says_nothing_is_closed_within_seconds(running: Ingest) -> None:
    """Though a request as a whole may take longer."""
    with running.connect() as idle, running.connect() as slow:
        slow.sendall(b"POST /v1/traces HTTP/1.1\r\n")
        for link in (idle, slow):
            link.settimeout(20)  # less than the 30 s of a request
            assert link.recv(12) == b"HTTP/1.1 408"


class Slowloris:
    """Keeps many connections busy with headers that have no end; opens those anew that end."""

    def __init__(self, running: Ingest, count: int) -> None:
        self.reconnects = 0
        self._running = running
        self._links: list[socket.socket | None] = [None] * count
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> Self:
        self._thread.start()
        until(lambda: None not in self._links)
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        self._thread.join()
        for link in self._links:
            if link is not None:
                link.close()

    def _run(self) -> None:
        for number in itertools.cycle(range(len(self._links))):
            if self._end.is_set():
                return
            link = self._links[number]
            try:
                if link is None:
                    link = self._links[number] = socket.create_connection(self._running.http)
                    link.sendall(b"POST /v1/traces HTTP/1.1\r\nhost: x\r\nx: ")
                    link.setblocking(False)
                link.send(b"y")
                with contextlib.suppress(BlockingIOError):
                    if not link.recv(1000):
                        raise ConnectionResetError
            except BlockingIOError:
                continue
            except OSError:
                if link is not None:
                    link.close()
                self._links[number] = None
                self.reconnects += 1
            self._end.wait(0.0005)


def test_a_slowloris_that_reconnects(running: Ingest) -> None:
    """As many connections as there are, all of them sending headers, and coming again."""
    with Slowloris(running, 1000) as strangers:
        check_honest_senders(running)
        until(lambda: strangers.reconnects > 100)
        check_honest_senders(running)


def test_calls_that_never_send_their_message(running: Ingest) -> None:
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
        check_honest_senders(running)
        # They end by themselves, soon.
        until(lambda: running.status()["requests_under_way"] == 0)
        assert ended(running) >= before + 2000


def ended(running: Ingest) -> int:
    """How many requests were ended because they were slow."""
    refused = running.status()["refused_requests"]
    return int(refused.get("too_slow", 0) + refused.get("busy", 0))


def test_a_connection_with_too_many_calls_is_closed(running: Ingest) -> None:
    """Three hundred at a time are not a sender's."""
    with Http2Client(running.grpc) as client:
        for _ in range(300):  # it does not listen to what it is allowed
            client.start(**TOKEN)
        client.wait_closed()
    check_honest_senders(running)


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
