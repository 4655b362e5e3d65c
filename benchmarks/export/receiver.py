"""A collector in its own process: accepts every OTLP metrics request over gRPC.

    python -m benchmarks.export.receiver

Prints its port and, when its standard input ends, the number of points it got.
"""

from __future__ import annotations

import sys
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import (
    ExportMetricsServiceResponse,
)
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2_grpc import (
    MetricsServiceServicer,
    add_MetricsServiceServicer_to_server,
)


class Collector(MetricsServiceServicer):
    points = 0

    def Export(self, request: Any, context: Any) -> Any:  # noqa: N802
        for resource in request.resource_metrics:
            for scope in resource.scope_metrics:
                for metric in scope.metrics:
                    self.points += len(metric.gauge.data_points) + len(metric.sum.data_points)
        return ExportMetricsServiceResponse()


def main() -> None:
    collector = Collector()
    server = grpc.server(ThreadPoolExecutor(2))
    add_MetricsServiceServicer_to_server(collector, server)  # type: ignore[no-untyped-call]
    print(server.add_insecure_port("127.0.0.1:0"), flush=True)
    server.start()
    sys.stdin.read()
    server.stop(1).wait()
    print(collector.points, flush=True)


if __name__ == "__main__":
    main()
