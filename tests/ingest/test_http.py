"""OTLP over HTTP, with the real SDK and a receiver in a process of its own."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import urllib.request
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from google.rpc.error_details_pb2 import RetryInfo
from google.rpc.status_pb2 import Status
from opentelemetry.exporter.otlp.proto.http import Compression
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceResponse
from opentelemetry.sdk.trace.export import SpanExportResult

from batchmill.ingest import Receiver, ReceiverSettings
from batchmill.spool import Spool
from tests.ingest.kit import LARGE, HeldSpool
from tests.kit.files import ROOT
from tests.kit.ingest import (
    JSON,
    PROTOBUF,
    QUICK,
    SMALL,
    Ingest,
    ids_of,
    ingest,
    local_ingest,
    read_all,
    request,
    request_json,
    sdk_spans,
    span_id,
    stored,
)
from tests.kit.servers.prometheus import parsed
from tests.kit.threads import PATIENCE_S, WAIT_S, spawn, until


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ingest]:
    """One receiver for the tests that leave it as it was."""
    with ingest(tmp_path_factory.mktemp("ingest"), *QUICK) as running:
        yield running


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ingest]:
    """One receiver whose thresholds a test can reach; each test leaves it at NORMAL."""
    with ingest(tmp_path_factory.mktemp("small"), *QUICK, *SMALL) as running:
        yield running


def exporter(running: Ingest, **options: Any) -> OTLPSpanExporter:
    """The SDK's own."""
    host, port = running.http
    return OTLPSpanExporter(f"http://{host}:{port}/v1/traces", timeout=PATIENCE_S, **options)


@pytest.mark.parametrize("compression", [Compression.NoCompression, Compression.Gzip])
def test_the_sdk_exports(shared: Ingest, compression: Compression) -> None:
    """What the SDK's exporter sends is in the spool when it is told so."""
    spans = sdk_spans(200)
    sender = exporter(shared, compression=compression)
    assert sender.export(spans) is SpanExportResult.SUCCESS
    sender.shutdown()  # type: ignore[no-untyped-call]
    rows = {span["span_id"]: span for span in shared.spans()}
    assert ids_of(spans) <= rows.keys()
    row = rows[next(iter(ids_of(spans[3:4])))]
    assert (row["name"], dict(row["attributes"])) == ("work 3", {"number": "3"})


@pytest.mark.parametrize(
    ("content_type", "body", "answer"),
    [(PROTOBUF, request(7), b""), (JSON, request_json(8), b"{}")],
)
def test_acknowledged_means_durable(
    shared: Ingest, content_type: str, body: bytes, answer: bytes
) -> None:
    """The answer comes after the segment is in place, in the content type of the request."""
    given = shared.post(body, f"{content_type}; charset=utf-8")
    assert (given.status, given.headers["content-type"], given.body) == (200, content_type, answer)
    assert span_id(7 if content_type == PROTOBUF else 8) in {
        span["span_id"] for span in shared.spans()
    }


def test_unusable_spans_are_a_partial_success(shared: Ingest) -> None:
    """The usable ones are stored; the others are told and counted, with a reason."""
    before = shared.status()["rejected"]
    given = shared.post(request(21, 0, 0))
    partial = ExportTraceServiceResponse.FromString(given.body).partial_success
    assert (given.status, partial.rejected_spans) == (200, 2)
    assert "span_id" in partial.error_message
    partial_json = shared.post(request_json(22, 0), JSON).json()["partialSuccess"]
    assert partial_json["rejectedSpans"] == "1"
    assert "span_id" in partial_json["errorMessage"]
    assert {span_id(21), span_id(22)} <= {span["span_id"] for span in shared.spans()}
    # The file may be a second old, now and then.
    until(lambda: sum(shared.status()["rejected"].values()) >= sum(before.values()) + 3)


def test_the_page_for_prometheus_has_the_queues_of_the_process(shared: Ingest) -> None:
    """Beside the receiver's own counters: the micro-batcher in front of the spool, and levels."""
    shared.post(request(31))
    samples = parsed(shared.ask("GET", "/metrics").body.decode())
    spool = frozenset({("batcher", "spool-Span")})
    assert samples["batchmill_batcher_succeeded_items_total", spool] >= 1
    assert samples["batchmill_batcher_backend_duration_seconds_count", spool] >= 1
    rows = frozenset({("thresholds", "queue rows")})
    assert samples["batchmill_thresholds_level", rows] == 0
    assert samples["batchmill_ingest_acknowledged_spans_total", frozenset()] >= 1


def test_a_request_without_spans_is_a_success(shared: Ingest) -> None:
    """The protocol says so."""
    assert shared.post(b"").status == 200


@pytest.mark.parametrize(
    ("method", "path", "content_type", "status"),
    [
        ("GET", "/v1/traces", PROTOBUF, 405),
        ("POST", "/healthz", PROTOBUF, 405),
        ("POST", "/v1/trace", PROTOBUF, 404),
        ("POST", "/v1/traces/", PROTOBUF, 404),
        ("POST", "/v1/traces", "text/plain", 415),
        ("POST", "/v1/traces", "", 415),
    ],
)
def test_what_is_not_the_protocol_is_refused(
    shared: Ingest, method: str, path: str, content_type: str, status: int
) -> None:
    """A wrong path, verb or content type: an answer that says what is right."""
    given = shared.ask(method, path, b"x", {"content-type": content_type})
    assert given.status == status
    assert b"/v1/traces" in given.body or b"use " in given.body or b"x-protobuf" in given.body


@pytest.mark.parametrize(
    ("body", "content_type", "encoding", "status"),
    [
        (b"\xff\xff\xff", PROTOBUF, "", 400),
        (b"{", JSON, "", 400),
        (b"[" * 100_000, JSON, "", 400),
        (b'{"resourceSpans": 5}', JSON, "", 400),
        (b"not gzip", PROTOBUF, "gzip", 400),
        (request(1), PROTOBUF, "br", 415),
    ],
)
def test_malformed_bodies(
    shared: Ingest, body: bytes, content_type: str, encoding: str, status: int
) -> None:
    """400 with a message in a Status (415 for an encoding that is not taken)."""
    given = shared.post(body, content_type, content_encoding=encoding)
    assert given.status == status
    message = Status.FromString(given.body).message if content_type == PROTOBUF else given.json()
    assert message


def test_pages_about_itself(shared: Ingest) -> None:
    """Health, readiness, Prometheus, and the status file that `batchmill status` reads."""
    assert shared.post(request(31)).status == 200
    assert shared.ask("GET", "/healthz").status == 200
    assert shared.ask("GET", "/readyz").body == b"NORMAL\n"
    assert shared.metric("acknowledged_spans_total") >= 1
    until(lambda: shared.status()["acknowledged_spans"] == shared.status()["received_spans"] > 0)
    status = shared.status()
    assert status["http"] == "{}:{}".format(*shared.http)
    assert (status["name"], status["pid"]) == ("ingest", shared.process.pid)
    assert (shared.home / "run" / "ingest.json").stat().st_mode & 0o777 == 0o600


def test_the_status_has_what_the_pipeline_page_draws(shared: Ingest) -> None:
    """What waits for the spool, in spans, with its threads; and the level with what makes it."""
    assert shared.post(request(32)).status == 200
    until(lambda: shared.status()["queues"][0]["accepted"] == shared.status()["received_spans"] > 0)
    status = shared.status()
    (queue,) = status["queues"]
    assert (queue["name"], queue["kind"], queue["unit"]) == ("spool", "batcher", "spans")
    assert queue["partitions"] == [{"depth": queue["depth"], "capacity": 200_000}]
    threads = queue["threads"]  # a second one is started while the first has a slow disk
    assert [thread["name"] for thread in threads] == [
        f"batchmill-spool-Span-{number}" for number in range(len(threads))
    ]
    assert threads
    assert all(0 <= thread["load"] <= 1 for thread in threads)
    levels = status["thresholds"]
    assert (levels["level"], levels["why"]) == ("NORMAL", "")
    assert [level["name"] for level in levels["measures"]] == [
        "queue rows",
        "queue bytes",
        "unread bytes",
    ]
    assert levels["free_bytes"] > 0


def test_critical_and_critical_plus(small: Ingest) -> None:
    """503 with Retry-After; at CRITICAL_PLUS before the body is read, and the connection ends."""
    before = Counter(small.status()["refused_requests"])
    small.fill(1)
    small.await_level("CRITICAL")
    given = small.post(request(1))
    assert (given.status, "connection" in given.headers) == (503, False)
    assert int(given.headers["retry-after"]) >= 1
    status = Status.FromString(given.body)
    retry = RetryInfo()
    assert status.details[0].Unpack(retry)
    assert retry.retry_delay.ToTimedelta().total_seconds() > 0
    assert "not read yet" in status.message
    until(lambda: small.status()["thresholds"]["level"] == "CRITICAL")
    assert "not read yet" in small.status()["thresholds"]["why"]
    small.fill(2)
    small.await_level("CRITICAL_PLUS")
    with small.connect() as link:
        link.sendall(
            b"POST /v1/traces HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
            b"content-length: 1000\r\n\r\n"
        )
        head, _, body = read_all(link).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 503 ")
    assert b"retry-after: 2" in head
    assert json.loads(body)["details"][0]["retryDelay"] == "2s"
    small.unfill()
    small.await_level("NORMAL")
    assert small.post(request(1)).status == 200
    refused = before + Counter({"CRITICAL": 1, "CRITICAL_PLUS": 1})
    until(lambda: small.status()["refused_requests"] == refused)


def test_a_refused_sdk_tries_again_and_succeeds(small: Ingest) -> None:
    """Backpressure loses nothing: the exporter comes back with the same spans."""
    spans = sdk_spans(10)
    refused = 'requests_total{outcome="CRITICAL",protocol="http"}'
    before, stored_before = small.metric(refused), len(small.spans())
    with ThreadPoolExecutor(1) as pool:
        small.fill(1)
        small.await_level("CRITICAL")
        sender = exporter(small)
        result = pool.submit(sender.export, spans)
        until(lambda: small.metric(refused) > before)
        small.unfill()
        assert result.result() is SpanExportResult.SUCCESS
        sender.shutdown()  # type: ignore[no-untyped-call]
    rows = small.spans()
    assert ids_of(spans) <= {span["span_id"] for span in rows}
    assert len(rows) == stored_before + len(spans)
    small.await_level("NORMAL")


def test_a_disk_that_refuses(tmp_path: Path) -> None:
    """503, so that the sender tries again; and once the disk is well, it is taken."""
    with local_ingest(tmp_path / "home", *QUICK) as running:
        blocked = running.home / "spool" / "Span"
        if blocked.exists():
            blocked.rmdir()
        blocked.write_text("in the way")
        given = running.post(request(1))
        assert (given.status, "retry-after" in given.headers) == (503, True)
        blocked.unlink()
        until(lambda: running.post(request(2)).status == 200)
        assert {span["span_id"] for span in running.spans()} == {span_id(2)}
    status = running.status()
    assert status["received_spans"] == 1 + status["unacknowledged_spans"] > 1


def test_sigterm_answers_what_is_under_way(tmp_path: Path) -> None:
    """No new connections, an answer for the request that waits for its segment, exit code 0."""
    with ingest(tmp_path / "home", "--linger", "2") as running, ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(running.post, request(1))
        until(lambda: running.metric("received_spans_total") == 1)
        os.kill(running.process.pid, signal.SIGTERM)
        assert waiting.result().status == 200
        running.process.end(0)
        assert {span["span_id"] for span in running.spans()} == {span_id(1)}
        with pytest.raises(ConnectionRefusedError), socket.create_connection(running.http):
            pass
        assert running.status()["state"] == "draining"


def test_sigterm_does_not_wait_for_a_slow_sender(tmp_path: Path) -> None:
    """Half a body when the end comes: 503, so that it is sent to the next receiver."""
    with ingest(tmp_path / "home", *QUICK) as running, running.connect() as link:
        link.sendall(
            b"POST /v1/traces HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
            b"content-length: 1000\r\n\r\n{"
        )
        until(lambda: running.metric("requests_under_way") == 1)
        os.kill(running.process.pid, signal.SIGTERM)
        assert read_all(link).startswith(b"HTTP/1.1 503 ")
        running.process.end(0)


def test_inside_another_program(tmp_path: Path) -> None:
    """A receiver on an event loop of a thread, stopped from another one."""
    with Spool(tmp_path / "spool", linger_s=0.01) as spool:
        receiver = Receiver(spool, ReceiverSettings(http_port=0, grpc_port=0))
        ready = threading.Event()
        with ThreadPoolExecutor(1) as pool:
            running = pool.submit(lambda: asyncio.run(receiver.serve(ready.set)))
            assert ready.wait(WAIT_S)
            address = f"http://{receiver.http_address}/v1/traces"
            sender = OTLPSpanExporter(address, timeout=PATIENCE_S)
            assert sender.export(sdk_spans(3)) is SpanExportResult.SUCCESS
            sender.shutdown()  # type: ignore[no-untyped-call]
            receiver.stop()
            running.result(WAIT_S)
    assert receiver.status()["acknowledged_spans"] == 3


@pytest.mark.parametrize("requests", [1, 60])
def test_sigkill_loses_nothing_that_was_acknowledged(tmp_path: Path, requests: int) -> None:
    """Killed after some answers, in the middle of others: what was answered is in segments."""
    acknowledged: set[int] = set()

    def send(sender: int) -> None:
        for number in range(1, 10_000):
            span = sender * 10_000 + number
            try:
                if running.post(request(span)).status == 200:
                    acknowledged.add(span)
            except OSError:
                return  # it was killed

    with ingest(tmp_path / "home", *QUICK) as running, ThreadPoolExecutor(4) as pool:
        senders = [pool.submit(send, sender) for sender in range(4)]
        until(lambda: len(acknowledged) >= requests)
        running.process.kill()
        for sender in senders:
            sender.result()
    there = {span["span_id"] for span in stored(running.home)}
    assert {span_id(number) for number in acknowledged} <= there


def test_a_large_body_does_not_hold_up_the_others(tmp_path: Path) -> None:
    """While the thread for large bodies is busy, others are answered."""
    large = request_json(*range(1, LARGE + 1))
    ready = threading.Event()
    with HeldSpool(tmp_path) as spool:
        receiver = Receiver(spool, ReceiverSettings(http_port=0, grpc_port=0))
        with spawn(lambda: asyncio.run(receiver.serve(ready.set))) as serving:
            assert ready.wait(WAIT_S)
            with spool.gate, spawn(lambda: post(receiver, large)) as slow:
                spool.gate.wait_entered()
                assert post(receiver, request_json(1)) == 200
                assert not slow.done()
                spool.gate.open()
                assert slow.result() == 200
            receiver.stop()
            serving.result()


def post(receiver: Receiver, body: bytes) -> int:
    """The status that a request in JSON is answered with."""
    address = f"http://{receiver.http_address}/v1/traces"
    request = urllib.request.Request(address, body, {"content-type": JSON})
    with urllib.request.urlopen(request, timeout=PATIENCE_S) as answer:
        return int(answer.status)


def test_the_missing_extra_is_named() -> None:
    """Without what the receivers are built on, the command says what to install."""
    code = (
        "import sys; sys.modules['uvicorn'] = None; sys.argv = ['batchmill', 'ingest'];"
        "from batchmill.cli import main; sys.exit(main())"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={"PYTHONPATH": str(ROOT / "src")},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert "pip install 'batchmill[otlp]'" in done.stderr
    assert "Traceback" not in done.stderr


def test_nobody_lingers_when_all_senders_wait(tmp_path: Path) -> None:
    """Two senders who together have enough for a segment are answered long before the linger."""
    body = request(*range(1, 1001))
    head = f"POST /v1/traces HTTP/1.1\r\nHost: shop\r\nContent-Type: {PROTOBUF}\r\n"
    head += f"Content-Length: {len(body)}\r\nExpect: 100-continue\r\n\r\n"
    with (
        local_ingest(tmp_path, "--linger", "600") as running,
        running.connect() as one,
        running.connect() as other,
    ):
        for sender in (one, other):  # both requests have begun before one of them is complete
            sender.sendall(head.encode())
            assert b"HTTP/1.1 100 " in read_head(sender)
        for sender in (one, other):
            sender.sendall(body)
        for sender in (one, other):
            assert b"HTTP/1.1 200 " in read_head(sender)
    assert len(stored(tmp_path)) == 2000


def read_head(client: socket.socket) -> bytes:
    """The status and the headers of a response."""
    head = b""
    while not head.endswith(b"\r\n\r\n"):
        more = client.recv(1)
        assert more, head
        head += more
    return head


def test_an_answer_means_that_the_spans_are_on_the_disk(tmp_path: Path) -> None:
    """They are there when the answer is, though the segment is only written half a second later."""
    with local_ingest(tmp_path, "--linger", "0.5") as running:
        assert running.post(request(1, 2)).status == 200
        assert {span["span_id"] for span in stored(tmp_path)} == {span_id(1), span_id(2)}
