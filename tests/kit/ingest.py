"""A receiver in a process of its own (``batchmill ingest``) or on a thread, and requests for it."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import os
import re
import signal
import socket
import sys
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from batchmill.cli import _parser
from batchmill.cli import ingest as command
from batchmill.cli.options import only_given
from batchmill.ingest import Limits, Receiver
from tests.kit.files import ROOT
from tests.kit.processes import Life, wait_for_json
from tests.kit.threads import PATIENCE_S, spawn, until

PROTOBUF = "application/x-protobuf"
JSON = "application/json"
MIB = 2**20
SMALL = ("--unread-warning-mb", "1", "--unread-critical-mb", "1", "--unread-critical-plus-mb", "2")
"""Thresholds that a test can reach."""
QUICK = ("--linger", "0.01")


@dataclass
class Receiving:
    """A receiver that runs."""

    home: Path
    http: tuple[str, int]
    grpc: str

    def post(
        self, body: bytes, content_type: str = PROTOBUF, path: str = "/v1/traces", **headers: str
    ) -> Answer:
        given = {"content-type": content_type}
        given |= {name.replace("_", "-"): value for name, value in headers.items()}
        return self.ask("POST", path, body, given)

    def ask(
        self, method: str, path: str, body: bytes = b"", headers: dict[str, str] | None = None
    ) -> Answer:
        return ask(self.http, method, path, body, headers)

    def connect(self) -> socket.socket:
        return socket.create_connection(self.http, timeout=PATIENCE_S)

    def metric(self, name: str) -> float:
        page = self.ask("GET", "/metrics").body.decode()
        match = re.search(rf"^batchmill_ingest_{re.escape(name)} (\S+)$", page, re.MULTILINE)
        return float(match[1]) if match else 0.0

    def fill(self, mib: int) -> None:
        """Have so much in the spool that the pipeline has not read."""
        folder = self.home / "spool" / "Span"
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        unfinished = folder / ".unfinished"
        with unfinished.open("wb") as out:
            out.truncate(mib * MIB)
        # As every segment: whole, once it has its name.
        unfinished.rename(folder / f"000000000000000{mib}-00000000.parquet")

    def unfill(self) -> None:
        for path in (self.home / "spool" / "Span").glob("0*-00000000.parquet"):
            path.unlink()

    def await_level(self, level: str) -> None:
        until(lambda: self.ask("GET", "/readyz").body.decode().strip() == level)

    def status(self) -> dict[str, Any]:
        """The status file, which is written soon after the start and then each second."""
        status: dict[str, Any] = wait_for_json(self.home / "run" / "ingest.json")
        return status

    def spans(self) -> list[dict[str, Any]]:
        return stored(self.home)


@dataclass
class Ingest(Receiving):
    """A receiver in a process of its own."""

    process: Life
    errors: Path

    def stderr(self) -> str:
        return self.errors.read_text()


@dataclass
class LocalIngest(Receiving):
    """A receiver on a thread of this process."""

    receiver: Receiver


@dataclass
class Answer:
    status: int
    headers: dict[str, str]
    body: bytes = field(repr=False)

    def json(self) -> Any:
        return json.loads(self.body)


def ask(
    server: tuple[str, int],
    method: str,
    path: str,
    body: bytes = b"",
    headers: dict[str, str] | None = None,
) -> Answer:
    """Send one request, over a connection of its own."""
    with contextlib.closing(http.client.HTTPConnection(*server, timeout=PATIENCE_S)) as link:
        link.request(method, path, body, headers or {})
        answer = link.getresponse()
        return Answer(answer.status, {k.lower(): v for k, v in answer.getheaders()}, answer.read())


@contextlib.contextmanager
def ingest(home: Path, *options: str, env: dict[str, str] | None = None) -> Iterator[Ingest]:
    """A receiver on free ports; at the end it drains, exits with 0, and has shown no traceback.

    Unless the test has killed it, or seen its end.
    """
    home.mkdir(exist_ok=True)
    errors = home / "stderr"
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), **(env or {})}
    words = [sys.executable, "-m", "batchmill", *_words(home, options)]
    with Life(words, errors, environment) as process:
        listens = r".*https?://(\S+):(\d+) \(HTTP\) and (\S+) \(gRPC\).*"
        process.must_hear(listens)
        match = re.fullmatch(listens, process.lines[-1])
        assert match is not None
        yield Ingest(home, (match[1].strip("[]"), int(match[2])), match[3], process, errors)
        if not process.over:
            os.kill(process.pid, signal.SIGTERM)
            process.end(0)
    assert "Traceback" not in errors.read_text(), errors.read_text()


@contextlib.contextmanager
def local_ingest(home: Path, *options: str) -> Iterator[LocalIngest]:
    """The receiver that the command makes of these options, on a thread of this process.

    For tests of answers. Those of signals, memory, the log and many connections have a process.
    """
    words = _words(home, options)
    given = _parser(words).parse_args(words)
    with command._sink(given) as sink:
        receiver = Receiver(
            sink,
            command._settings(given),
            limits=Limits(**only_given(max_body_bytes=given.max_body_mb)),
            status_path=command._status_path(given),
        )
        ready = threading.Event()
        with spawn(lambda: asyncio.run(receiver.serve(ready.set))) as serving:
            until(lambda: ready.is_set() or serving.done(), "it listens")
            try:
                if ready.is_set():
                    host, _, port = receiver.http_address.rpartition(":")
                    yield LocalIngest(home, (host, int(port)), receiver.grpc_address, receiver)
            finally:
                receiver.stop()
            serving.result(PATIENCE_S)


def _words(home: Path, options: Sequence[str]) -> list[str]:
    """The command, on free ports."""
    return ["ingest", "--home", str(home), "--http-port", "0", "--grpc-port", "0", *options]


def stored(home: Path) -> list[dict[str, Any]]:
    """Every span in the segments, read as anybody would."""
    rows: list[dict[str, Any]] = []
    for path in sorted((home / "spool" / "Span").glob("[!.]*.parquet")):
        rows += pq.ParquetFile(path).read().to_pylist()
    return rows


def request(*span_ids: int, trace: int = 1, start: int = 10**18) -> bytes:
    """A request with these spans, one of them unusable for each 0."""
    message = ExportTraceServiceRequest()
    spans = message.resource_spans.add().scope_spans.add().spans
    for number in span_ids:
        spans.add(
            trace_id=trace.to_bytes(16, "big"),
            span_id=number.to_bytes(8, "big"),
            name="work",
            start_time_unix_nano=start,
            end_time_unix_nano=start + 10**6,
        )
    return bytes(message.SerializeToString())


def request_json(*span_ids: int) -> bytes:
    """The same in JSON."""
    spans = [
        {
            "traceId": f"{1:032x}",
            "spanId": f"{number:016x}",
            "name": "work",
            "startTimeUnixNano": str(10**18),
            "endTimeUnixNano": str(10**18 + 10**6),
        }
        for number in span_ids
    ]
    return json.dumps({"resourceSpans": [{"scopeSpans": [{"spans": spans}]}]}).encode()


def span_id(number: int) -> str:
    """As it is stored."""
    return f"{number:016x}"


def sdk_spans(count: int) -> list[ReadableSpan]:
    """Spans as the SDK makes them."""
    memory = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(memory))
    tracer = provider.get_tracer("tests")
    for number in range(count):
        with tracer.start_as_current_span(f"work {number}", attributes={"number": number}):
            pass
    provider.shutdown()
    return list(memory.get_finished_spans())


def ids_of(spans: list[ReadableSpan]) -> set[str]:
    """As they are stored."""
    return {f"{span.context.span_id:016x}" for span in spans if span.context}


def read_all(link: socket.socket) -> bytes:
    """What comes until the other side closes."""
    parts = []
    with contextlib.suppress(ConnectionResetError):
        while part := link.recv(65536):
            parts.append(part)
    return b"".join(parts)


def gzip_bomb(mib: int) -> bytes:
    """A small body that unpacks to so much."""
    import zlib

    packer = zlib.compressobj(1, wbits=31)
    head = packer.flush(zlib.Z_FULL_FLUSH)
    block = packer.compress(bytes(MIB)) + packer.flush(zlib.Z_FULL_FLUSH)
    # Blocks that do not refer to one another. It has no end: nobody may get there.
    return head + block * mib
