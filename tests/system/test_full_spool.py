"""Backpressure from end to end: Spark's lag is unread bytes, and senders are told to wait."""

from __future__ import annotations

import contextlib
import http.client
import random
import sys
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

pytest.importorskip("grpc")
pytest.importorskip("opentelemetry.sdk")
pytest.importorskip("uvicorn")

import grpc
from google.rpc.error_details_pb2 import RetryInfo
from google.rpc.status_pb2 import Status

from batchmill.spool import unread
from tests.kit.ingest import MIB, QUICK, SMALL, Ingest, ingest, request, stored
from tests.kit.otlp import otlp
from tests.kit.spark import EPOCH
from tests.kit.threads import PATIENCE_S, until
from tests.oracle.catalog import Row
from tests.oracle.spans import spans_to_events

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

TRACES = "/opentelemetry.proto.collector.trace.v1.TraceService/Export"
OAL = "n = from(Service.*).count(); most = from(Service.latency).max();"
CLIENTS = {"http": 5, "grpc": 3}
REQUESTS = 5
"""Of each client; all of them together are more than twice what the spool may hold."""
IN_A_REQUEST = 64
REFUSED = 1200
MOST_MIB = 64.0
"""What the receiver may take beyond what it takes when idle. It is sent several times as much."""


def test_a_full_spool_refuses_and_keeps_what_it_acknowledged(tmp_path: Path) -> None:
    """Nobody reads: senders press on, are told to wait, and the receiver does not grow."""
    home = tmp_path / "home"
    clients = make_clients(random.Random(3), pause_s=0.02)
    with ingest(home, *QUICK, *SMALL) as running:
        assert running.post(request(1)).status == 200
        before = peak_mib(running)
        with sending(clients, running):
            until(lambda: everybody_was_refused(clients) and refused(clients) > REFUSED)
            grown = peak_mib(running) - before
            assert running.ask("GET", "/readyz").status == 503
        pushed = sum(client.pushed for client in clients) / MIB
        say(f"{pushed:.0f} MiB sent, {refused(clients)} refused, {grown:.0f} MiB more memory")
        assert grown < MOST_MIB < pushed / 2
        ids = sorted(id_ for client in clients for id_ in client.acknowledged())
        assert 0 < len(ids) < len(spans_of(clients))
        # What was refused is not there.
        assert sorted(span["span_id"] for span in running.spans()) == sorted([*ids, f"{1:016x}"])
        until(lambda: running.status()["level"] == "CRITICAL")
        until(lambda: running.status()["unread_bytes"] == unread(home / "spool").bytes >= MIB)


def test_senders_wait_for_spark_and_everything_is_counted(
    spark: SparkSession, tmp_path: Path
) -> None:
    """A pipeline that comes late frees the spool: senders get through, and each span counts."""
    from tests.kit.pipelines import counted, differences, expected, pipeline
    from tests.kit.pipelines import stored as values

    home = tmp_path / "home"
    clients = make_clients(random.Random(4), pause_s=0.5)
    spans = spans_of(clients)
    with ingest(home, *QUICK, *SMALL) as running, sending(clients, running):
        until(lambda: everybody_was_refused(clients))
        ids = {id_ for client in clients for id_ in client.acknowledged()}
        assert 0 < len(ids) < len(spans)
        assert ids <= {span["span_id"] for span in stored(home)}
        given: dict[str, Any] = {"oal": OAL, "dedup_s": 600, "remove_read": True}
        with pipeline(spark, home, **given) as reading:
            reading.start(0.1)
            until(lambda: all(client.is_done() for client in clients))
            until(lambda: unread(home / "spool").segments == 0)
            running.await_level("NORMAL")
            reading.settle(everything=True)
            assert counted(reading.store, "rows")["Span", ""] == len(spans)
            assert counted(reading.store, "duplicates") == {}
            wanted = expected(spans_to_events(spans).events, OAL)
            assert differences(values(reading.store), wanted) == []


@dataclass
class Client:
    """Sends its requests one after the other, each until it is acknowledged."""

    protocol: str
    requests: Sequence[Sequence[Row]]
    pause_s: float
    """In earnest it would wait for as long as it is told."""
    done: int = 0
    """So many of its requests are acknowledged."""
    refused: int = 0
    pushed: int = 0
    """Bytes that it has sent, or tried to."""
    error: BaseException | None = None

    def acknowledged(self) -> list[str]:
        """The ids of its spans that are."""
        return [span["span_id"] for spans in self.requests[: self.done] for span in spans]

    def is_done(self) -> bool:
        """Whether all are."""
        self.check()
        return self.done == len(self.requests)

    def check(self) -> None:
        """Raise what went wrong, if anything did."""
        if self.error is not None:
            raise self.error

    def run(self, running: Ingest, end: threading.Event) -> None:
        """Send all of it."""
        send = {"http": post, "grpc": export}[self.protocol]
        try:
            for spans in self.requests:
                body = otlp(spans)
                self.pushed += len(body)
                while not send(running, body):
                    self.refused += 1
                    if end.wait(self.pause_s):
                        return
                    self.pushed += len(body)
                self.done += 1
        except BaseException as error:  # noqa: BLE001 - the test raises it
            self.error = error


def post(running: Ingest, body: bytes) -> bool:
    """Over HTTP; False if it is to come again."""
    try:
        answer = running.post(body)
    except (OSError, http.client.HTTPException):
        return False  # it hung up on what it did not want to read
    if answer.status == 503:
        assert int(answer.headers["retry-after"]) >= 1
        return False
    assert (answer.status, answer.body) == (200, b"")
    return True


def export(running: Ingest, body: bytes) -> bool:
    """Over gRPC; False if it is to come again."""
    with grpc.insecure_channel(running.grpc) as channel:
        try:
            answer = channel.unary_unary(TRACES)(body, timeout=PATIENCE_S)
        except grpc.RpcError as error:
            refusal = error
        else:
            assert answer == b""
            return True
    assert refusal.code() is grpc.StatusCode.UNAVAILABLE, refusal
    trailers = dict(refusal.trailing_metadata())
    status, retry = Status.FromString(trailers["grpc-status-details-bin"]), RetryInfo()
    assert status.details[0].Unpack(retry)
    assert retry.retry_delay.seconds >= 1
    return False


def make_clients(rng: random.Random, pause_s: float) -> list[Client]:
    """Each with requests of its own, of texts that do not get smaller on a disk."""
    kinds = [protocol for protocol, n in CLIENTS.items() for _ in range(n)]
    return [
        Client(
            kind,
            [[one_span(rng) for _ in range(IN_A_REQUEST)] for _ in range(REQUESTS)],
            pause_s,
        )
        for kind in kinds
    ]


def one_span(rng: random.Random) -> Row:
    """A request that a service has served."""
    at = EPOCH + timedelta(microseconds=rng.randrange(300_000_000))
    service = rng.choice(("shop", "stock"))
    return {
        "trace_id": f"{rng.getrandbits(128):032x}",
        "span_id": f"{rng.getrandbits(64):016x}",
        "parent_span_id": None,
        "name": "GET /",
        "kind": "SERVER",
        "time": at,
        "end_time": at + timedelta(microseconds=rng.randrange(10**6)),
        "status": "OK",
        "service": service,
        "resource": {"service.name": service},
        "attributes": {"text": rng.randbytes(1000).hex()},
    }


@contextlib.contextmanager
def sending(clients: Sequence[Client], running: Ingest) -> Iterator[None]:
    """All of them send meanwhile."""
    end = threading.Event()
    threads = [threading.Thread(target=client.run, args=(running, end)) for client in clients]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        end.set()
        for thread in threads:
            thread.join()


def spans_of(clients: Sequence[Client]) -> list[Row]:
    """All that they have."""
    return [span for client in clients for spans in client.requests for span in spans]


def everybody_was_refused(clients: Sequence[Client]) -> bool:
    """At least once; whatever went wrong is raised."""
    for client in clients:
        client.check()
    return all(client.refused for client in clients)


def refused(clients: Sequence[Client]) -> int:
    """How often senders were."""
    return sum(client.refused for client in clients)


def peak_mib(running: Ingest) -> float:
    """The most memory that a receiver has had so far."""
    lines = Path(f"/proc/{running.process.pid}/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("VmHWM")).split()[1]) / 1024


def say(what: str) -> None:
    """For whoever reads the output."""
    sys.stdout.write(f"{what}\n")
