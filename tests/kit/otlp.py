"""OTLP in tests: receivers that fail on demand, stubborn senders, and spans of real clients."""

from __future__ import annotations

import contextlib
import gzip
import http.client
import random
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import cache
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Self

import grpc
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import (
    ExportMetricsServiceRequest,
    ExportMetricsServiceResponse,
)
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2_grpc import (
    MetricsServiceServicer,
    add_MetricsServiceServicer_to_server,
)
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, KeyValue
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status

from batchmill.ingest import Limits, decode_traces
from tests.kit.files import ROOT
from tests.kit.ingest import PROTOBUF
from tests.kit.threads import PATIENCE_S
from tests.oracle.catalog import Row

REAL_CLIENTS = ROOT / "tests" / "kit" / "real-clients.jsonl"
"""22 traces of OpenTelemetry's agents and SDKs, a request in OTLP's JSON a line. Services in Java,
Python, JavaScript and Go call each other, one PostgreSQL, a Redis and a Kafka, all on one machine,
with attributes of old and of new conventions."""


@cache
def real_spans() -> tuple[Row, ...]:
    """The spans of these traces, as the receiver decodes them."""
    spans = []
    for line in REAL_CLIENTS.read_bytes().splitlines():
        batch = decode_traces(line, "application/json", Limits()).batch.unpacked()
        for values in zip(*batch.columns.values(), strict=True):
            row = dict(zip(batch.columns, values, strict=True))
            spans.append(row | {name: _at(row[name]) for name in ("time", "end_time")})
    return tuple(spans)


def _at(micros: int) -> datetime:
    return datetime(1970, 1, 1, tzinfo=UTC) + timedelta(microseconds=micros)


@dataclass(frozen=True)
class Verdict:
    """How a request is answered."""

    code: grpc.StatusCode | None = None
    """None: it is taken. Over HTTP ``status`` counts."""
    status: int = 200
    rejected: int = 0
    """Points, or spans, of it that are refused."""
    hold: threading.Event | None = None
    """The answer waits for this."""
    taken: bool | None = None
    """Whether it is kept; None: if it is answered well."""


class _HttpServer(ABC):
    """Listens while entered, and answers in protobuf what :meth:`answer` says."""

    def __init__(self, *, hang_up: bool = False) -> None:
        """``hang_up``: close each connection after its first answer, without announcing that."""
        self.closed = 0
        """How many connections are over."""
        outer = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                if self.headers["Content-Encoding"] == "gzip":
                    body = gzip.decompress(body)
                headers = {key.lower(): value for key, value in self.headers.items()}
                status, written = outer.answer(self.path, headers, body)
                self.send_response(status)
                self.send_header("Content-Type", "application/x-protobuf")
                self.send_header("Content-Length", str(len(written)))
                self.send_header("Retry-After", "0")
                self.end_headers()
                self.wfile.write(written)
                self.close_connection |= hang_up

            def finish(self) -> None:
                super().finish()
                self.request.close()
                outer.closed += 1

            def log_message(self, format: str, *args: Any) -> None:  # noqa: A002
                pass

        self._http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._http.daemon_threads = False
        self._thread = threading.Thread(target=self._http.serve_forever, args=(0.02,))

    @abstractmethod
    def answer(self, path: str, headers: dict[str, str], body: bytes) -> tuple[int, bytes]:
        """Take a request; the status and the body of its answer. Called by several threads."""

    @property
    def port(self) -> int:
        """Where it listens."""
        return int(self._http.server_address[1])

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._http.shutdown()
        self._http.server_close()
        self._thread.join()


@dataclass(frozen=True)
class Point:
    """A data point, with all that it is told apart by."""

    metric: str
    entity: str
    start_ns: int
    end_ns: int
    value: int | float
    kind: str
    """``gauge``, ``delta``, or ``monotonic delta``."""
    label: str | None = None
    about: tuple[tuple[str, str], ...] = ()
    commit: str = ""
    """Of an increment: the commit whose it is."""


class Keeper:
    """What both receivers of metrics share: requests in the order in which they came."""

    def __init__(self, judge: Callable[[int], Verdict] = lambda number: Verdict()) -> None:
        self.judge = judge
        self.requests: list[ExportMetricsServiceRequest] = []
        """Those that were taken."""
        self.seen = 0
        """How many came, taken or not."""
        self.headers: list[dict[str, str]] = []
        self._changed = threading.Condition()

    def take(self, request: ExportMetricsServiceRequest, headers: dict[str, str]) -> Verdict:
        with self._changed:
            self.seen += 1
            verdict = self.judge(self.seen)
            fine = verdict.code is None and 200 <= verdict.status < 300
            if fine if verdict.taken is None else verdict.taken:
                self.requests.append(request)
            self.headers.append(headers)
            self._changed.notify_all()
        if verdict.hold is not None:
            verdict.hold.wait(PATIENCE_S)
        return verdict

    def wait_for(self, done: Callable[[], bool]) -> None:
        """Wait until that is so, looked at whenever a request has come."""
        deadline = time.monotonic() + PATIENCE_S
        with self._changed:
            while not done():
                left = deadline - time.monotonic()
                assert left > 0, f"not within {PATIENCE_S:g} s: {self.seen} requests came"
                self._changed.wait(min(left, 0.2))

    def points(self) -> list[Point]:
        """All points that were taken, in order."""
        with self._changed:
            return [point for request in self.requests for point in points_of(request)]


class GrpcReceiver(Keeper):
    """Receives metrics over gRPC while entered."""

    def __init__(
        self,
        judge: Callable[[int], Verdict] = lambda number: Verdict(),
        *,
        port: int = 0,
        max_bytes: int = 4 << 20,
    ) -> None:
        super().__init__(judge)
        outer = self

        class Servicer(MetricsServiceServicer):
            def Export(self, request: Any, context: Any) -> Any:  # noqa: N802
                headers = {key: str(value) for key, value in context.invocation_metadata()}
                verdict = outer.take(request, headers)
                if verdict.code is not None:
                    context.abort(verdict.code, "as the test wants it")
                answer = ExportMetricsServiceResponse()
                answer.partial_success.rejected_data_points = verdict.rejected
                return answer

        self._pool = ThreadPoolExecutor(4)
        options = (("grpc.max_receive_message_length", max_bytes), ("grpc.so_reuseport", 0))
        self._server = grpc.server(self._pool, options=options)
        add_MetricsServiceServicer_to_server(Servicer(), self._server)  # type: ignore[no-untyped-call]
        self.port = int(self._server.add_insecure_port(f"127.0.0.1:{port}"))

    @property
    def target(self) -> str:
        """Where it listens."""
        return f"otlp+grpc://127.0.0.1:{self.port}"

    def __enter__(self) -> Self:
        self._server.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.stop(None).wait(PATIENCE_S)
        self._pool.shutdown()


class HttpReceiver(Keeper, _HttpServer):
    """Receives metrics over HTTP while entered."""

    def __init__(
        self,
        judge: Callable[[int], Verdict] = lambda number: Verdict(),
        *,
        hang_up: bool = False,
    ) -> None:
        Keeper.__init__(self, judge)
        _HttpServer.__init__(self, hang_up=hang_up)

    def answer(self, path: str, headers: dict[str, str], body: bytes) -> tuple[int, bytes]:
        request = ExportMetricsServiceRequest.FromString(body)
        verdict = self.take(request, headers | {"path": path})
        answer = ExportMetricsServiceResponse()
        answer.partial_success.rejected_data_points = verdict.rejected
        return verdict.status, b"" if verdict.status == 204 else answer.SerializeToString()

    @property
    def target(self) -> str:
        """Where it listens."""
        return f"otlp+http://127.0.0.1:{self.port}"


def points_of(request: ExportMetricsServiceRequest) -> list[Point]:
    """The points of one request, in order."""
    points = []
    for resource in request.resource_metrics:
        for scope in resource.scope_metrics:
            for metric in scope.metrics:
                kind = metric.WhichOneof("data")
                data = getattr(metric, kind)
                if kind == "sum":
                    assert data.aggregation_temporality == 1  # delta
                    kind = "monotonic delta" if data.is_monotonic else "delta"
                metadata = {entry.key: entry.value.string_value for entry in metric.metadata}
                for point in data.data_points:
                    about = {
                        attribute.key: attribute.value.string_value
                        for attribute in point.attributes
                    }
                    points.append(
                        Point(
                            metric.name,
                            about["batchmill.entity.id"],
                            point.start_time_unix_nano,
                            point.time_unix_nano,
                            getattr(point, point.WhichOneof("value")),
                            kind,
                            about.get("batchmill.label"),
                            tuple(sorted(about.items())),
                            metadata.get("batchmill.commit", ""),
                        )
                    )
    return points


class TraceReceiver(_HttpServer):
    """Receives traces over HTTP while entered. ``judge`` gets the number of a request, from 1."""

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
        return [pair for request in self.requests for pair in spans_of(request)]

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
    pairs = []
    for group in request.resource_spans:
        about = {
            attribute.key: attribute.value.string_value for attribute in group.resource.attributes
        }
        for scope in group.scope_spans:
            pairs += [(about["service.name"], span) for span in scope.spans]
    return pairs


_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_RETRY_S = 0.05


def as_received(spans: Sequence[Row]) -> list[Row]:
    """Those that a receiver takes, with what it makes of a root's parent and of no service."""
    return [
        {
            **span,
            "parent_span_id": span["parent_span_id"] or None,
            "service": span["service"] or "unknown_service",
        }
        for span in spans
        if span["end_time"] >= span["time"]
    ]


def nearly_in_order(spans: Sequence[Row], distance: int, rng: random.Random) -> list[Row]:
    """Traces one after the other, but spans that far out of their place."""
    by_trace = sorted(spans, key=lambda span: str(span["trace_id"]))
    places = [number + rng.uniform(0, distance) for number in range(len(by_trace))]
    return [by_trace[number] for number in sorted(range(len(places)), key=places.__getitem__)]


def otlp(spans: Sequence[Row]) -> bytes:
    """A request with these spans, in protobuf."""
    message = ExportTraceServiceRequest()
    for span in spans:
        there = message.resource_spans.add()
        there.resource.attributes.extend(_pairs(span["resource"]))
        there.scope_spans.add().spans.add(
            trace_id=bytes.fromhex(span["trace_id"]),
            span_id=bytes.fromhex(span["span_id"]),
            parent_span_id=bytes.fromhex(span["parent_span_id"] or ""),
            name=span["name"],
            kind=Span.SpanKind.Value(f"SPAN_KIND_{span['kind']}"),
            start_time_unix_nano=_ns(span["time"]),
            end_time_unix_nano=_ns(span["end_time"]),
            status=Status(code=Status.StatusCode.Value(f"STATUS_CODE_{span['status']}")),
            attributes=_pairs(span["attributes"]),
        )
    return bytes(message.SerializeToString())


def _pairs(attributes: dict[str, str]) -> list[KeyValue]:
    return [
        KeyValue(key=key, value=AnyValue(string_value=text)) for key, text in attributes.items()
    ]


def _ns(time: datetime) -> int:
    return (time - _EPOCH) // timedelta(microseconds=1) * 1000


class Traffic:
    """Clients that send every request until it is acknowledged, and some of them again.

    The requests come in portions: a client that finds none left repeats old ones, so that there is
    traffic until it is over. Now and then a client does not wait for the answer, as if that had
    been lost, and sends the request again later.
    """

    LOST = 0.1
    CLIENTS = 4
    PACE_S = 0.1

    def __init__(self, port: int, bodies: Sequence[bytes], portions: int, seed: int) -> None:
        self._port = port
        self._bodies = bodies
        self._portions = portions
        self._rng = random.Random(seed)
        self._lock = threading.Lock()
        self._open: list[int] = []
        self._released = 0
        self._over = threading.Event()
        self._gone = threading.Event()
        self.acknowledged: list[int] = []
        """Requests by number; several times if they were sent again."""
        self.faults = 0
        """Tries that had no answer, or another one."""
        self.odd: list[str] = []
        """Answers that a receiver must not give."""

    def release(self) -> None:
        """Let the next portion go."""
        with self._lock:
            self._release(len(self._bodies) // self._portions + 1)

    def _release(self, n: int) -> None:
        until = min(len(self._bodies), self._released + n)
        self._open += range(self._released, until)
        self._released = until

    @contextlib.contextmanager
    def going(self) -> Iterator[None]:
        """Clients send meanwhile; none is left in the end."""
        threads = [threading.Thread(target=self._send) for _ in range(self.CLIENTS)]
        for thread in threads:
            thread.start()
        try:
            yield
        finally:
            self._gone.set()
            self._over.set()
            for thread in threads:
                thread.join()

    def finish(self) -> None:
        """Let all go, and say that it is over."""
        with self._lock:
            self._release(len(self._bodies))
        self._over.set()

    def is_done(self) -> bool:
        """Whether every request was acknowledged."""
        with self._lock:
            return len(set(self.acknowledged)) == len(self._bodies)

    def _send(self) -> None:
        link: http.client.HTTPConnection | None = None
        while not self._gone.is_set():
            number, lost = self._next()
            if number is None:
                if self._over.is_set() and self.is_done():
                    break
                self._gone.wait(_RETRY_S)
                continue
            answered = False
            try:
                if link is None:
                    link = http.client.HTTPConnection("127.0.0.1", self._port, timeout=PATIENCE_S)
                answered = self._exchange(link, number, lost=lost)
            except (OSError, http.client.HTTPException):
                pass
            if not answered:
                if link is not None:
                    link.close()
                    link = None
                self._gone.wait(_RETRY_S)
            self._note(number, answered=answered)
            if not self._over.is_set():
                self._over.wait(self.PACE_S)
        if link is not None:
            link.close()

    def _exchange(self, link: http.client.HTTPConnection, number: int, *, lost: bool) -> bool:
        body, headers = self._bodies[number], {"content-type": PROTOBUF}
        if number % 3 == 0:
            body, headers = gzip.compress(body, 1), {**headers, "content-encoding": "gzip"}
        link.request("POST", "/v1/traces", body, headers)
        if lost:
            return False
        answer = link.getresponse()
        said = answer.read()
        if answer.status == 200 and not said:  # not even a partial success
            return True
        if answer.status != 503:
            with self._lock:
                self.odd.append(f"{answer.status} {said!r}")
        return False

    def _next(self) -> tuple[int | None, bool]:
        with self._lock:
            lost = not self._over.is_set() and self._rng.random() < self.LOST
            if self._open:
                return self._open.pop(0), lost
            if self._over.is_set() or not self.acknowledged:
                return None, False
            return self._rng.choice(self.acknowledged), lost

    def _note(self, number: int, *, answered: bool) -> None:
        with self._lock:
            if answered:
                self.acknowledged.append(number)
                return
            self.faults += 1
            self._open.insert(self._rng.randint(0, len(self._open)), number)


def sizes(requests: Sequence[Sequence[Any]], numbers: Sequence[int]) -> int:
    """How many spans these requests have together."""
    return sum(len(requests[number]) for number in numbers)
