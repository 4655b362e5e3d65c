"""Senders of gRPC that do harm, or speak another dialect: answered, counted, nothing in the log."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import os
import signal
import socket
import threading
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path

import grpc
import pyarrow as pa
import pytest
from h2.errors import ErrorCodes
from hyperframe.frame import ContinuationFrame, HeadersFrame, PingFrame
from hypothesis import given, settings
from hypothesis import strategies as st
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from batchmill.ingest import Receiver, ReceiverSettings
from batchmill.spool import Spool
from tests.http.http2 import TRACES, Http2Client, message
from tests.kit.ingest import (
    MIB,
    QUICK,
    Ingest,
    Receiving,
    ask,
    ingest,
    local_ingest,
    read_all,
    request,
    span_id,
)
from tests.kit.processes import Life
from tests.kit.threads import PATIENCE_S, until

UNIMPLEMENTED, UNAVAILABLE, RESOURCE_EXHAUSTED, INVALID_ARGUMENT = 12, 14, 8, 3
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
TLS_HELLO = bytes.fromhex("160301003a0100003603030000000000000000000000") + bytes(40)
ENCODED: dict[str, Callable[[bytes], bytes]] = {
    "deflate": zlib.compress,
    "snappy": lambda body: pa.compress(body, "snappy", asbytes=True),
    "zstd": lambda body: pa.compress(body, "zstd", asbytes=True),
    "br": lambda body: pa.compress(body, "brotli", asbytes=True),
}


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ingest]:
    """One receiver, which all of this happens to; its log stays empty."""
    home = tmp_path_factory.mktemp("ingest")
    with ingest(home, *QUICK, "--max-body-mb", "1", "--request-timeout", "2") as running:
        yield running
    assert running.stderr() == ""


def count(running: Receiving, outcome: str) -> float:
    """How many calls had this outcome."""
    return running.metric(f'requests_total{{outcome="{outcome}",protocol="grpc"}}')


@pytest.mark.parametrize("encoding", ENCODED)
def test_other_encodings_are_unimplemented_and_counted(shared: Ingest, encoding: str) -> None:
    """The sender learns which ones are understood: in the header, and in words."""
    before = count(shared, "wrong_encoding")
    body = ENCODED[encoding](request(1))
    with Http2Client(shared.grpc) as client:
        answer = client.call(body, compressed=True, grpc_encoding=encoding)
        assert answer.status == UNIMPLEMENTED
        assert answer.headers["grpc-accept-encoding"] == "identity,gzip"
        assert f"'{encoding}' is not supported" in answer.headers["grpc-message"]
        compressed = gzip.compress(request(2))
        answer = client.call(compressed, compressed=True, grpc_encoding="gzip")
        assert (answer.status, answer.body) == (0, message(b""))  # on the same connection
    assert count(shared, "wrong_encoding") == before + 1


def test_deflate_of_a_real_client_is_unimplemented(shared: Ingest) -> None:
    """What gRPC's own library for Python says of it."""
    with grpc.insecure_channel(shared.grpc) as channel, pytest.raises(grpc.RpcError) as caught:
        channel.unary_unary(TRACES)(
            request(1), timeout=PATIENCE_S, compression=grpc.Compression.Deflate
        )
    assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED
    assert "gzip" in caught.value.details()


@pytest.mark.parametrize("encoding", ["", "identity"])
def test_a_compressed_message_without_an_encoding(shared: Ingest, encoding: str) -> None:
    """Nobody can know how to read it."""
    headers = {"grpc_encoding": encoding} if encoding else {}
    with Http2Client(shared.grpc) as client:
        answer = client.call(gzip.compress(request(1)), compressed=True, **headers)
    assert answer.status == INVALID_ARGUMENT
    assert "grpc-encoding" in answer.headers["grpc-message"]


def test_a_message_that_announces_too_much(shared: Ingest) -> None:
    """Refused before any of it is read, and counted."""
    before = count(shared, "too_large")
    with Http2Client(shared.grpc) as client:
        stream = client.start()
        client.send(stream, message(b"x", announced=MIB + 1))
        answer = client.answer(stream)
        assert answer.status == RESOURCE_EXHAUSTED
        assert str(MIB) in answer.headers["grpc-message"]
        assert client.call(request(3)).status == 0
    assert count(shared, "too_large") == before + 1


def test_the_limit_is_that_of_bodies(tmp_path: Path) -> None:
    """Not the 4 MiB of gRPC's libraries: a message of six is taken, of one byte more is not."""
    wanted = ExportTraceServiceRequest.FromString(request(*range(1, 4)))
    spans = wanted.resource_spans[0].scope_spans[0].spans
    for span in spans:
        span.events.add(name="x" * (2 * MIB - 200))
    body = wanted.SerializeToString()
    spans[0].events.add(name="y" * (6 * MIB - len(body)))
    too_much = wanted.SerializeToString()
    assert len(body) < 6 * MIB < len(too_much)
    options = [("grpc.max_send_message_length", -1)]
    with (
        local_ingest(tmp_path / "home", *QUICK, "--max-body-mb", "6") as running,
        grpc.insecure_channel(running.grpc, options) as channel,
    ):
        assert channel.unary_unary(TRACES)(body, timeout=PATIENCE_S) == b""
        with pytest.raises(grpc.RpcError) as caught:
            channel.unary_unary(TRACES)(too_much, timeout=PATIENCE_S)
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert count(running, "too_large") == 1
        assert {row["span_id"] for row in running.spans()} == {span_id(n) for n in (1, 2, 3)}


@contextlib.contextmanager
def receiver(folder: Path, chosen: ReceiverSettings) -> Iterator[Receiver]:
    """A receiver in this process, with settings that the command does not have."""
    with Spool(folder, linger_s=0.01) as spool:
        running, ready = Receiver(spool, chosen), threading.Event()
        thread = threading.Thread(target=lambda: asyncio.run(running.serve(ready.set)))
        thread.start()
        assert ready.wait(PATIENCE_S)
        try:
            yield running
        finally:
            running.stop()
            thread.join()


def test_messages_on_their_way_are_bounded_together(tmp_path: Path) -> None:
    """By the bytes that have arrived, not by those that are announced; freed with the sender."""
    chosen = ReceiverSettings(http_port=0, grpc_port=0, max_bytes=4 * MIB)
    with receiver(tmp_path, chosen) as running, contextlib.ExitStack() as stack:
        clients = [stack.enter_context(Http2Client(running.grpc_address)) for _ in range(20)]
        for client in clients:  # 200 MiB, announced
            client.send(client.start(), message(b"x", announced=10 * MIB))
        first, second = clients[:2]
        first.send(1, bytes(3 * MIB))
        until(lambda: running.status()["bytes_under_way"] == 3 * MIB + len(clients))
        second.send(1, bytes(2 * MIB))
        answer = second.answer(1)
        assert answer.status == UNAVAILABLE
        assert "try again" in answer.headers["grpc-message"]
        assert running.status()["bytes_under_way"] <= 4 * MIB
        first.socket.close()
        until(lambda: running.status()["bytes_under_way"] < 20)
        assert clients[2].call(request(1)).status == 0
        assert running.status()["refused_requests"]["busy"] == 1


def test_calls_that_are_cancelled_are_counted(shared: Ingest) -> None:
    """A sender that goes in the middle of its message, alone or with its connection."""
    before = count(shared, "disconnected")
    with Http2Client(shared.grpc) as client:
        stream = client.start()
        client.send(stream, message(b"x", announced=100))
        client.h2.reset_stream(stream, ErrorCodes.CANCEL)
        client.flush()
        until(lambda: count(shared, "disconnected") == before + 1)
        client.send(client.start(), message(b"x", announced=100))
    until(lambda: count(shared, "disconnected") == before + 2)


def test_a_sender_that_only_cancels_loses_its_connection(shared: Ingest) -> None:
    """HTTP/2's rapid reset: many calls, none of them awaited."""
    with Http2Client(shared.grpc) as client:
        for _ in range(300):
            stream = client.start()
            client.h2.reset_stream(stream, ErrorCodes.CANCEL)
            client.flush()
        client.wait_closed()
        assert client.goodbye == ErrorCodes.ENHANCE_YOUR_CALM
    with Http2Client(shared.grpc) as client:
        assert client.call(request(4)).status == 0


def test_many_cancelled_calls_at_once(shared: Ingest) -> None:
    """All in one piece: most of them are not even looked at, and they hold up no other sender."""
    before = count(shared, "disconnected")
    with Http2Client(shared.grpc) as client, Http2Client(shared.grpc) as other:
        for _ in range(5000):
            stream = client.h2.get_next_available_stream_id()
            client.h2.send_headers(stream, [(":method", "POST"), (":path", TRACES)])
            client.h2.reset_stream(stream, ErrorCodes.CANCEL)
        client.flush()
        client.wait_closed()
        assert other.call(request(7)).status == 0
    assert count(shared, "disconnected") - before < 1000


def test_a_sender_that_leaves_without_its_response(shared: Ingest) -> None:
    """It allows no bytes, and says goodbye: nothing is left of it, and nothing is logged."""
    with Http2Client(shared.grpc, window=0) as client:
        stream = client.start()
        client.send(stream, message(request(8)), end=True)
        while not client.answers[stream].headers:
            client.receive()
        client.h2.close_connection()
        client.flush()
        while client.socket.recv(65_536):
            pass


@pytest.mark.system
def test_a_sender_that_does_not_read(tmp_path: Path) -> None:
    """Its connection is closed, though our answers to it cannot be sent."""
    chosen = ReceiverSettings(http_port=0, grpc_port=0, idle_s=6, request_s=0.5)
    with receiver(tmp_path, chosen) as running, Http2Client(running.grpc_address) as client:
        client.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.socket.settimeout(1)
        pings = PingFrame(0, opaque_data=bytes(8)).serialize() * 5000
        with contextlib.suppress(OSError):  # once no more goes through
            while True:
                client.socket.sendall(pings)
        until(lambda: running.status()["grpc_connections"]["open"] == 0)


def test_a_sender_that_takes_no_response(shared: Ingest) -> None:
    """It allows no bytes of one: its call ends, and what it sent is stored."""
    with Http2Client(shared.grpc, window=0) as client:
        answer = client.call(request(5))
        assert answer.reset == ErrorCodes.CANCEL
    assert span_id(5) in {row["span_id"] for row in shared.spans()}


def test_a_response_waits_until_there_is_room(shared: Ingest) -> None:
    """A sender that allows the bytes later gets them then."""
    with Http2Client(shared.grpc, window=0) as client:
        stream = client.start()
        client.send(stream, message(request(6)), end=True)
        while not client.answers[stream].headers:
            client.receive()
        client.h2.increment_flow_control_window(5, stream)
        client.flush()
        answer = client.answer(stream)
    assert (answer.status, answer.body) == (0, message(b""))


def test_headers_without_end(shared: Ingest) -> None:
    """The connection is closed before they take much memory."""
    with Http2Client(shared.grpc) as client:
        frames = [
            HeadersFrame(1, data=bytes(1000)),
            *([ContinuationFrame(1, data=bytes(8000))] * 3),
        ]
        client.socket.sendall(b"".join(frame.serialize() for frame in frames))
        client.wait_closed()
        assert client.goodbye == ErrorCodes.ENHANCE_YOUR_CALM


def test_headers_that_are_too_long(shared: Ingest) -> None:
    """The connection is closed, with the reason of HTTP/2."""
    with Http2Client(shared.grpc) as client:
        stream = client.start(x="y" * 100_000)
        client.answer(stream)
        assert client.goodbye == ErrorCodes.ENHANCE_YOUR_CALM


def test_http_1_is_told_where_it_belongs(shared: Ingest) -> None:
    """An SDK that sends OTLP over HTTP to this port gets words that its user can read."""
    host, _, port = shared.grpc.rpartition(":")
    answer = ask((host, int(port)), "POST", "/v1/traces", request(1) * 100)
    assert answer.status == 400
    assert "http_port" in answer.json()["message"]
    assert count(shared, "bad_http") > 0


@pytest.mark.parametrize(
    ("headers", "status"),
    [({":method": "GET"}, "405"), ({"content_type": "application/json"}, "415")],
)
def test_http_2_that_is_not_grpc(shared: Ingest, headers: dict[str, str], status: str) -> None:
    """A status of HTTP, as the protocol wants it."""
    with Http2Client(shared.grpc) as client:
        stream = client.start(**headers)
        assert client.answer(stream).headers[":status"] == status


frames = st.builds(
    lambda kind, flags, stream, body: (
        len(body).to_bytes(3, "big") + bytes([kind, flags]) + stream.to_bytes(4, "big") + body
    ),
    st.integers(0, 12),
    st.sampled_from([0, 1, 4, 5, 8, 0x20, 0x2D, 255]),
    st.sampled_from([0, 1, 3, 5, 2, 2**31 - 1]),
    st.binary(max_size=60),
)


@settings(max_examples=200, deadline=None)
@given(
    parts=st.lists(frames | st.binary(max_size=50), max_size=6),
    preface=st.sampled_from([PREFACE, PREFACE + bytes(3) + b"\x04" + bytes(5), b"", TLS_HELLO]),
)
def test_any_bytes_end_only_their_sender(
    shared: Ingest, parts: list[bytes], preface: bytes
) -> None:
    """Frames that make no sense, TLS, noise: the receiver goes on, and its log stays empty."""
    host, _, port = shared.grpc.rpartition(":")
    with socket.create_connection((host, int(port)), timeout=PATIENCE_S) as link:
        with contextlib.suppress(ConnectionError):
            link.sendall(preface + b"".join(parts))
            link.shutdown(socket.SHUT_WR)
        read_all(link)
    assert shared.process.running


SENDER = """
import sys, threading, grpc
def body():
    print("sending", flush=True)
    threading.Event().wait()
    yield b""
channel = grpc.insecure_channel(address)
channel.stream_unary(method)(body())
"""


def test_nothing_of_this_is_in_the_log(tmp_path: Path) -> None:
    """Wrong encodings, a message that is too large, TLS, a sender that is killed: all counted."""
    with ingest(tmp_path / "home", *QUICK, "--max-body-mb", "1") as running:
        with Http2Client(running.grpc) as client:
            for encoding in ENCODED:
                answer = client.call(b"x", compressed=True, grpc_encoding=encoding)
                assert answer.status == UNIMPLEMENTED
        with grpc.insecure_channel(running.grpc) as channel:
            with pytest.raises(grpc.RpcError):
                channel.unary_unary(TRACES)(bytes(2 * MIB), timeout=PATIENCE_S)
            assert channel.unary_unary(TRACES)(request(1), timeout=PATIENCE_S) == b""
        host, _, port = running.grpc.rpartition(":")
        with socket.create_connection((host, int(port)), timeout=PATIENCE_S) as link:
            link.sendall(TLS_HELLO)
            read_all(link)
        with Life.of_script(SENDER, address=running.grpc, method=TRACES) as sender:
            sender.must_hear("sending")
            until(lambda: running.metric("grpc_connections") == 1)
            os.kill(sender.pid, signal.SIGKILL)
        until(lambda: running.metric("grpc_connections") == 0)
        assert count(running, "wrong_encoding") == len(ENCODED)
        assert count(running, "too_large") == 1
        assert count(running, "bad_http") == 1
    assert running.stderr() == ""


def test_connections_are_bounded_and_counted(tmp_path: Path) -> None:
    """One too many is closed; a sender then tries again later, as with any server."""
    options = ("--max-connections", "2")
    with (
        local_ingest(tmp_path / "home", *QUICK, *options) as running,
        contextlib.ExitStack() as stack,
    ):
        clients = [stack.enter_context(Http2Client(running.grpc)) for _ in range(2)]
        assert [client.call(request(1)).status for client in clients] == [0, 0]
        third = stack.enter_context(Http2Client(running.grpc))
        third.wait_closed()
        assert running.metric("grpc_connections_refused_total") == 1
        clients[0].socket.close()
        until(lambda: running.metric("grpc_connections") == 1)
        fourth = stack.enter_context(Http2Client(running.grpc))
        assert fourth.call(request(2)).status == 0
