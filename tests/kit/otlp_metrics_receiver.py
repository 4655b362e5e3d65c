"""A small real receiver of OTLP metrics, over gRPC or HTTP: keeps what it gets, fails on demand."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
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

from tests.kit import otlp_http

PATIENCE_S = 60.0


@dataclass(frozen=True)
class Verdict:
    """How a request is answered."""

    code: grpc.StatusCode | None = None
    """None: it is taken. Over HTTP ``status`` counts."""
    status: int = 200
    rejected: int = 0
    """Points of it that are refused."""
    hold: threading.Event | None = None
    """The answer waits for this."""
    taken: bool | None = None
    """Whether it is kept; None: if it is answered well."""


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
    """What both receivers share: requests in the order in which they came."""

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
    """Listens while entered."""

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


class HttpReceiver(Keeper, otlp_http.HttpReceiver):
    """Listens while entered."""

    def __init__(
        self,
        judge: Callable[[int], Verdict] = lambda number: Verdict(),
        idle_s: float | None = None,
    ) -> None:
        Keeper.__init__(self, judge)
        otlp_http.HttpReceiver.__init__(self, idle_s)

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
    found = []
    for resource in request.resource_metrics:
        for scope in resource.scope_metrics:
            for metric in scope.metrics:
                kind = metric.WhichOneof("data")
                data = getattr(metric, kind)
                if kind == "sum":
                    assert data.aggregation_temporality == 1  # delta
                    kind = "monotonic delta" if data.is_monotonic else "delta"
                told = {each.key: each.value.string_value for each in metric.metadata}
                for point in data.data_points:
                    about = {each.key: each.value.string_value for each in point.attributes}
                    found.append(
                        Point(
                            metric.name,
                            about["batchmill.entity.id"],
                            point.start_time_unix_nano,
                            point.time_unix_nano,
                            getattr(point, point.WhichOneof("value")),
                            kind,
                            about.get("batchmill.label"),
                            tuple(sorted(about.items())),
                            told.get("batchmill.commit", ""),
                        )
                    )
    return found
