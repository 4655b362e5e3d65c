"""OTLP over gRPC, with the real SDK and a receiver in a process of its own."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.rpc.error_details_pb2 import RetryInfo
from google.rpc.status_pb2 import Status
from hypothesis import given, settings
from hypothesis import strategies as st
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceResponse
from opentelemetry.sdk.trace.export import SpanExportResult

from tests.http.http2 import Http2Client
from tests.kit.ingest import (
    MIB,
    QUICK,
    SMALL,
    Ingest,
    Receiving,
    gzip_bomb,
    ids_of,
    ingest,
    local_ingest,
    request,
    sdk_spans,
    span_id,
)
from tests.kit.threads import PATIENCE_S, until

TRACES = "/opentelemetry.proto.collector.trace.v1.TraceService/Export"


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ingest]:
    """One receiver for the tests that leave it as it was."""
    with ingest(tmp_path_factory.mktemp("ingest"), *QUICK) as running:
        yield running


def call(running: Receiving, body: bytes, method: str = TRACES, **options: Any) -> bytes:
    """One call of ``Export``, with bytes of our own."""
    unlimited = [("grpc.max_send_message_length", -1)]
    with grpc.insecure_channel(running.grpc, options=unlimited) as channel:
        answer: bytes = channel.unary_unary(method)(body, timeout=PATIENCE_S, **options)
        return answer


def refused(running: Receiving, body: bytes, method: str = TRACES, **options: Any) -> Any:
    """The error of a call that is refused."""
    with pytest.raises(grpc.RpcError) as caught:
        call(running, body, method, **options)
    return caught.value


def status_of(error: Any) -> Status:
    """What goes with an error in its trailers."""
    return Status.FromString(dict(error.trailing_metadata())["grpc-status-details-bin"])


@pytest.mark.parametrize("compression", [grpc.Compression.NoCompression, grpc.Compression.Gzip])
def test_the_sdk_exports(shared: Ingest, compression: grpc.Compression) -> None:
    """What the SDK's exporter sends is in the spool when it is told so."""
    spans = sdk_spans(200)
    sender = OTLPSpanExporter(
        shared.grpc, insecure=True, timeout=PATIENCE_S, compression=compression
    )
    assert sender.export(spans) is SpanExportResult.SUCCESS
    sender.shutdown()
    assert ids_of(spans) <= {span["span_id"] for span in shared.spans()}


def test_unusable_spans_are_a_partial_success(shared: Ingest) -> None:
    """The usable ones are stored, the others are told."""
    answer = ExportTraceServiceResponse.FromString(call(shared, request(5, 0)))
    assert answer.partial_success.rejected_spans == 1
    assert "span_id" in answer.partial_success.error_message
    assert not ExportTraceServiceResponse.FromString(call(shared, request(6))).HasField(
        "partial_success"
    )
    assert {span_id(5), span_id(6)} <= {span["span_id"] for span in shared.spans()}


def test_an_unknown_method(shared: Ingest) -> None:
    """UNIMPLEMENTED, as gRPC has it."""
    assert refused(shared, b"", "/some.Service/Method").code() is grpc.StatusCode.UNIMPLEMENTED


@pytest.mark.parametrize("body", [b"\xff\xff", b"\x1f\x8bnot gzip", b"\x0a\xff"])
def test_malformed_messages(shared: Ingest, body: bytes) -> None:
    """INVALID_ARGUMENT with a message."""
    error = refused(shared, body)
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert status_of(error).message == error.details() != ""


@settings(max_examples=60, deadline=None)
@given(body=st.binary(max_size=200) | st.binary(max_size=100).map(lambda x: request(1) + x))
def test_any_message_is_answered(shared: Ingest, body: bytes) -> None:
    """Taken or INVALID_ARGUMENT, and nothing else."""
    try:
        ExportTraceServiceResponse.FromString(call(shared, body))
    except grpc.RpcError as error:
        assert error.code() is grpc.StatusCode.INVALID_ARGUMENT  # noqa: PT017


def test_a_call_without_a_message(shared: Ingest) -> None:
    """INVALID_ARGUMENT: nothing to wait for."""
    with grpc.insecure_channel(shared.grpc) as channel, pytest.raises(grpc.RpcError) as caught:
        channel.stream_unary(TRACES)(iter([]), timeout=PATIENCE_S)
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


def test_a_gzip_bomb(shared: Ingest) -> None:
    """RESOURCE_EXHAUSTED, and the memory it would have taken is not taken."""
    assert call(shared, request(1), compression=grpc.Compression.Gzip) == b""
    Path(f"/proc/{shared.process.pid}/clear_refs").write_text("5")  # the peak is that from now on
    before = peak_mib(shared)
    bomb = gzip_bomb(512)
    error = refused(shared, bomb)  # the flag of gRPC says plain
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    with Http2Client(shared.grpc) as client:
        answer = client.call(bomb, compressed=True, grpc_encoding="gzip")
    assert answer.status == grpc.StatusCode.RESOURCE_EXHAUSTED.value[0]
    assert "decompressed" in answer.headers["grpc-message"]
    assert peak_mib(shared) - before < 300
    assert call(shared, request(2)) == b""


def peak_mib(running: Ingest) -> float:
    """The most memory that the receiver has had."""
    lines = Path(f"/proc/{running.process.pid}/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("VmHWM")).split()[1]) / 1024


def test_a_message_above_the_limit(shared: Ingest) -> None:
    """RESOURCE_EXHAUSTED, which senders do not repeat."""
    assert refused(shared, bytes(17 * MIB)).code() is grpc.StatusCode.RESOURCE_EXHAUSTED


def test_critical_and_critical_plus(tmp_path: Path) -> None:
    """UNAVAILABLE with RetryInfo; at CRITICAL_PLUS before the message has come."""
    with local_ingest(tmp_path / "home", *QUICK, *SMALL) as running:
        running.fill(1)
        running.await_level("CRITICAL")
        error = refused(running, request(1))
        assert error.code() is grpc.StatusCode.UNAVAILABLE
        status, retry = status_of(error), RetryInfo()
        assert status.details[0].Unpack(retry)
        assert (status.code, retry.retry_delay.seconds) == (14, 1)
        running.fill(2)
        running.await_level("CRITICAL_PLUS")
        end = threading.Event()

        def never() -> Iterator[bytes]:
            end.wait()
            yield b""

        with grpc.insecure_channel(running.grpc) as channel:
            with pytest.raises(grpc.RpcError) as caught:
                channel.stream_unary(TRACES)(never(), timeout=PATIENCE_S)
            end.set()
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        assert status_of(caught.value).details
        until(lambda: running.status()["refused_requests"] == {"CRITICAL": 1, "CRITICAL_PLUS": 1})


def test_a_refused_sdk_tries_again_and_succeeds(tmp_path: Path) -> None:
    """Backpressure loses nothing: the exporter comes back with the same spans."""
    spans = sdk_spans(10)
    with (
        local_ingest(tmp_path / "home", *QUICK, *SMALL) as running,
        ThreadPoolExecutor(1) as pool,
    ):
        running.fill(1)
        running.await_level("CRITICAL")
        sender = OTLPSpanExporter(running.grpc, insecure=True, timeout=PATIENCE_S)
        result = pool.submit(sender.export, spans)
        until(lambda: running.metric('requests_total{outcome="CRITICAL",protocol="grpc"}') > 0)
        running.unfill()
        assert result.result() is SpanExportResult.SUCCESS
        sender.shutdown()
        assert {span["span_id"] for span in running.spans()} == ids_of(spans)


def test_a_slow_sender_is_cut_off(tmp_path: Path) -> None:
    """A call whose message does not come ends, and others are answered meanwhile."""
    end = threading.Event()

    def never() -> Iterator[bytes]:
        end.wait()
        yield b""

    timeout = ("--request-timeout", "0.5")
    with (
        local_ingest(tmp_path / "home", *QUICK, *timeout) as running,
        grpc.insecure_channel(running.grpc) as channel,
    ):
        slow = channel.stream_unary(TRACES).future(never(), timeout=PATIENCE_S)
        assert call(running, request(1)) == b""
        assert slow.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        assert "within 0.5 s" in slow.details()
        end.set()


def test_a_receiver_that_stops_answers_what_is_under_way(tmp_path: Path) -> None:
    """A call that waits for its segment gets its answer; SIGTERM is tested with HTTP."""
    with (
        local_ingest(tmp_path / "home", "--linger", "2") as running,
        ThreadPoolExecutor(1) as pool,
    ):
        waiting = pool.submit(call, running, request(1))
        until(lambda: running.metric("received_spans_total") == 1)
        running.receiver.stop()
        assert waiting.result() == b""
        assert {span["span_id"] for span in running.spans()} == {span_id(1)}


def test_a_token_is_required(tmp_path: Path) -> None:
    """UNAUTHENTICATED without it, before the message is looked at."""
    with local_ingest(tmp_path / "home", *QUICK, "--token", "open-sesame") as running:
        for given_token in ((), (("authorization", "Bearer open"),), (("authorization", "x"),)):
            error = refused(running, b"\xff", metadata=given_token)
            assert error.code() is grpc.StatusCode.UNAUTHENTICATED
        right = (("authorization", "Bearer open-sesame"),)
        assert call(running, request(1), metadata=right) == b""
