"""A small real receiver of OTLP over HTTP: parses, keeps the spans, refuses on demand."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)

from tests.kit.otlp_http import HttpReceiver


@dataclass(frozen=True)
class Verdict:
    """How a request is answered; ``rejected`` spans of it are refused one by one."""

    status: int = 200
    rejected: int = 0


class Receiver(HttpReceiver):
    """Listens while entered. ``judge`` is given the number of each request, from 1."""

    def __init__(self, judge: Callable[[int], Verdict] = lambda number: Verdict()) -> None:
        super().__init__()
        self.requests: list[ExportTraceServiceRequest] = []
        self.statuses: list[int] = []
        self.received_ns: list[int] = []
        self.paths: set[str] = set()
        self.arrived = threading.Event()
        self._judge = judge
        self._lock = threading.Lock()

    @property
    def endpoint(self) -> str:
        """Where it listens."""
        return f"http://127.0.0.1:{self.port}"

    def spans(self) -> list[tuple[str, Any]]:
        """The service and the span, of all requests that were acknowledged."""
        return [each for request in self.requests for each in spans_of(request)]

    def answer(self, path: str, headers: dict[str, str], body: bytes) -> tuple[int, bytes]:
        verdict = self._take(path, body)
        answer = ExportTraceServiceResponse()
        answer.partial_success.rejected_spans = verdict.rejected
        return verdict.status, answer.SerializeToString()

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


def spans_of(request: ExportTraceServiceRequest) -> list[tuple[str, Any]]:
    """The service and the span, of one request."""
    found = []
    for group in request.resource_spans:
        about = {each.key: each.value.string_value for each in group.resource.attributes}
        for scope in group.scope_spans:
            found += [(about["service.name"], span) for span in scope.spans]
    return found
