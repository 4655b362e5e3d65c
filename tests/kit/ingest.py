"""A receiver in a process of its own (``batchmill ingest``), and requests for it."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import re
import signal
import socket
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from tests.kit.files import ROOT
from tests.kit.processes import Life, wait_for_json
from tests.kit.threads import PATIENCE_S, until

PROTOBUF = "application/x-protobuf"
JSON = "application/json"
MIB = 2**20
SMALL = ("--unread-warning-mb", "1", "--unread-critical-mb", "1", "--unread-critical-plus-mb", "2")
"""Thresholds that a test can reach."""
QUICK = ("--linger", "0.01")


@dataclass
class Ingest:
    """A receiver that runs."""

    home: Path
    process: Life
    http: tuple[str, int]
    grpc: str
    errors: Path

    def stderr(self) -> str:
        return self.errors.read_text()

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
    command = [sys.executable, "-m", "batchmill", "ingest", "--home", str(home)]
    command += ["--http-port", "0", "--grpc-port", "0", *options]
    home.mkdir(exist_ok=True)
    errors = home / "stderr"
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), **(env or {})}
    with Life(command, errors, environment) as process:
        listens = r".*https?://(\S+):(\d+) \(HTTP\) and (\S+) \(gRPC\).*"
        process.must_hear(listens)
        match = re.fullmatch(listens, process.lines[-1])
        assert match is not None
        yield Ingest(home, process, (match[1].strip("[]"), int(match[2])), match[3], errors)
        if not process.over:
            os.kill(process.pid, signal.SIGTERM)
            process.end(0)
    assert "Traceback" not in errors.read_text(), errors.read_text()


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
    block = bytes(MIB)
    return b"".join([packer.compress(block) for _ in range(mib)] + [packer.flush()])
