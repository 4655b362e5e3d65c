"""A small real receiver of OTLP over HTTP: parses, keeps the spans, refuses on demand."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Self

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)


@dataclass(frozen=True)
class Verdict:
    """How a request is answered; ``rejected`` spans of it are refused one by one."""

    status: int = 200
    rejected: int = 0


class Receiver:
    """Listens while entered. ``judge`` is given the number of each request, from 1."""

    def __init__(self, judge: Callable[[int], Verdict] = lambda number: Verdict()) -> None:
        self.requests: list[ExportTraceServiceRequest] = []
        self.statuses: list[int] = []
        self.received_ns: list[int] = []
        self.paths: set[str] = set()
        self.arrived = threading.Event()
        self._judge = judge
        self._lock = threading.Lock()
        outer = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                verdict = outer._take(self.path, body)
                answer = ExportTraceServiceResponse()
                answer.partial_success.rejected_spans = verdict.rejected
                written = answer.SerializeToString()
                self.send_response(verdict.status)
                self.send_header("Content-Type", "application/x-protobuf")
                self.send_header("Content-Length", str(len(written)))
                self.send_header("Retry-After", "0")
                self.end_headers()
                self.wfile.write(written)

            def log_message(self, format: str, *args: Any) -> None:  # noqa: A002
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = False
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,))

    @property
    def endpoint(self) -> str:
        """Where it listens."""
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    def spans(self) -> list[tuple[str, Any]]:
        """The service and the span, of all requests that were acknowledged."""
        return [each for request in self.requests for each in spans_of(request)]

    def _take(self, path: str, body: bytes) -> Verdict:
        request = ExportTraceServiceRequest.FromString(body)
        with self._lock:
            verdict = self._judge(len(self.statuses) + 1)
            self.statuses.append(verdict.status)
            self.paths.add(path)
            if verdict.status == 200:
                self.requests.append(request)
                self.received_ns.append(time.time_ns())
            self.arrived.set()
        return verdict

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def spans_of(request: ExportTraceServiceRequest) -> list[tuple[str, Any]]:
    """The service and the span, of one request."""
    found = []
    for group in request.resource_spans:
        about = {each.key: each.value.string_value for each in group.resource.attributes}
        for scope in group.scope_spans:
            found += [(about["service.name"], span) for span in scope.spans]
    return found
