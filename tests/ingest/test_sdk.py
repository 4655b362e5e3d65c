"""OpenTelemetry's SDK as an application uses it: default settings, no pause between spans."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter as GrpcExporter
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter as HttpExporter
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter

from tests.kit.ingest import Ingest, ingest
from tests.kit.threads import PATIENCE_S

AT_LEAST = 5_000
"""Far more than its buffer of 2,048. An exporter that waited for the linger would send 512."""


def exporter(protocol: str, running: Ingest) -> SpanExporter:
    """The SDK's own."""
    if protocol == "gRPC":
        return GrpcExporter(running.grpc, insecure=True)
    return HttpExporter("http://{}:{}/v1/traces".format(*running.http))


@pytest.mark.parametrize("protocol", ["HTTP", "gRPC"])
def test_a_sender_that_is_alone_does_not_wait_for_the_linger(tmp_path: Path, protocol: str) -> None:
    """Its exporter sends one request after the other, and drops what does not fit its buffer."""
    with ingest(tmp_path / "home", "--linger", "600") as running:
        provider = TracerProvider(shutdown_on_exit=False)
        provider.add_span_processor(BatchSpanProcessor(exporter(protocol, running)))
        tracer = provider.get_tracer("tests")
        deadline = time.monotonic() + PATIENCE_S
        while running.metric("acknowledged_spans_total") <= AT_LEAST:
            assert time.monotonic() < deadline
            for _ in range(500):
                tracer.start_span("work").end()
        provider.shutdown()
        assert running.metric(f'requests_total{{outcome="ok",protocol="{protocol.lower()}"}}') > 10
