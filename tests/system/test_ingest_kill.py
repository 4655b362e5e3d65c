"""A receiver of several processes that are killed under load: what was acknowledged is stored."""

from __future__ import annotations

import contextlib
import http.client
import os
import random
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from tests.kit.ingest import PROTOBUF, Ingest, ingest, request, span_id
from tests.kit.threads import PATIENCE_S, until

TRACES = "/opentelemetry.proto.collector.trace.v1.TraceService/Export"
SENDERS = 4
"""Of each protocol."""
SPANS = 20
"""In a request."""
KILLS = 4

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="several processes need Linux")


class Sender(threading.Thread):
    """Sends spans of its own until told to stop; what fails is sent again until it succeeds."""

    def __init__(self, running: Ingest, number: int, over: threading.Event) -> None:
        super().__init__(name=f"sender-{number}")
        self.acknowledged: list[int] = []
        self.repeated: set[int] = set()
        """Spans of requests that were sent more than once."""
        self._running = running
        self._next = number * 10_000_000 + 1
        self._over = over

    def run(self) -> None:
        while not self._over.is_set():
            ids = range(self._next, self._next + SPANS)
            self._next += SPANS
            deadline = time.monotonic() + PATIENCE_S
            while not self.send(request(*ids)):
                assert time.monotonic() < deadline, "a request is never acknowledged"
                self.repeated.update(ids)
            self.acknowledged += ids

    def send(self, body: bytes) -> bool:
        """Send a request; whether it was acknowledged."""
        raise NotImplementedError


class HttpSender(Sender):
    """Over a connection that lasts until it is broken."""

    link: http.client.HTTPConnection | None = None

    def send(self, body: bytes) -> bool:
        if self.link is None:
            self.link = http.client.HTTPConnection(*self._running.http, timeout=PATIENCE_S)
        try:
            self.link.request("POST", "/v1/traces", body, {"content-type": PROTOBUF})
            answer = self.link.getresponse()
            answer.read()
        except (OSError, http.client.HTTPException):
            self.link.close()
            self.link = None
            return False
        return answer.status == 200


class GrpcSender(Sender):
    """Over a channel of its own."""

    channel: Any = None

    def send(self, body: bytes) -> bool:
        if self.channel is None:
            own = [("grpc.use_local_subchannel_pool", 1), ("grpc.max_reconnect_backoff_ms", 200)]
            self.channel = grpc.insecure_channel(self._running.grpc, options=own)
        try:
            self.channel.unary_unary(TRACES)(body, timeout=PATIENCE_S)
        except grpc.RpcError:
            return False
        return True


@contextlib.contextmanager
def receiving(home: Path) -> Iterator[tuple[Ingest, list[Sender]]]:
    """A receiver of two processes, with senders at work; they end first."""
    with (
        ingest(home, "--processes", "2", "--linger", "0.05") as running,
        sending(running) as senders,
    ):
        yield running, senders


@contextlib.contextmanager
def sending(running: Ingest) -> Iterator[list[Sender]]:
    """Senders of both protocols at work."""
    over = threading.Event()
    kinds = [HttpSender, GrpcSender] * SENDERS
    senders = [kind(running, number, over) for number, kind in enumerate(kinds)]
    for sender in senders:
        sender.start()
    try:
        yield senders
    finally:
        over.set()
        for sender in senders:
            sender.join(PATIENCE_S)
        for sender in senders:
            if isinstance(sender, GrpcSender) and sender.channel is not None:
                sender.channel.close()
            if isinstance(sender, HttpSender) and sender.link is not None:
                sender.link.close()


def test_workers_killed_under_load(tmp_path: Path) -> None:
    """Every acknowledged span is stored, once unless it was sent twice; none twice by itself."""
    moments = random.Random(18)
    with receiving(tmp_path) as (running, senders):
        for kill in range(KILLS):
            until(
                lambda: running.status()["state"] == "running",
                lambda: str(running.status()["workers"]),
            )
            sent = len(senders[0].acknowledged)
            until(lambda before=sent: len(senders[0].acknowledged) > before)  # type: ignore[misc]
            time.sleep(moments.random())  # the moment itself is what is random
            victim = running.status()["workers"][kill % 2]["pid"]
            os.kill(victim, signal.SIGKILL)
            until(lambda wanted=kill + 1: running.status()["restarts"] == wanted)  # type: ignore[misc]
    acknowledged = {span_id(number) for sender in senders for number in sender.acknowledged}
    repeated = {span_id(number) for sender in senders for number in sender.repeated}
    assert len(acknowledged) > SENDERS * SPANS
    stored = Counter(span["span_id"] for span in running.spans())
    assert acknowledged <= set(stored)
    assert set(stored) - acknowledged <= repeated
    assert {span for span, times in stored.items() if times > 1} <= repeated
    status = running.status()
    assert status["restarts"] == KILLS
    # Up to a second of each victim's counters is missing, and a span may be stored unanswered.
    assert 0 < status["acknowledged_spans"] <= sum(stored.values())


def test_the_sum_is_what_was_sent(tmp_path: Path) -> None:
    """Without kills: each span once, and the counters of both processes add up to it."""
    with receiving(tmp_path) as (running, senders):
        until(lambda: all(len(sender.acknowledged) >= 50 * SPANS for sender in senders))
        until(lambda: all(worker["received_spans"] for worker in running.status()["workers"]))
    sent = [span_id(number) for sender in senders for number in sender.acknowledged]
    assert not any(sender.repeated for sender in senders)
    assert Counter(span["span_id"] for span in running.spans()) == Counter(sent)
    status = running.status()
    assert status["acknowledged_spans"] == status["received_spans"] == len(sent)
    assert sum(status["requests"].values()) == len(sent) // SPANS
