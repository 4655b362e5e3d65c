"""The OTLP exporters of the OpenTelemetry SDK, set up for the shop."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from urllib.parse import urlsplit

from google.protobuf.message import DecodeError
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceResponse
from opentelemetry.sdk.trace.export import SpanExporter

LOOPBACK = frozenset({"127.0.0.1", "localhost", "::1"})


def make_exporter(endpoint: str, *, grpc: bool) -> tuple[SpanExporter, Callable[[], int]]:
    """An exporter, and what tells how many spans were refused in requests that were acknowledged.

    The SDK's gRPC exporter does not pass that part of the answer on: there it is 0.
    """
    return (_over_grpc(endpoint), lambda: 0) if grpc else _over_http(endpoint)


def _over_grpc(endpoint: str) -> SpanExporter:
    from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter

    return OTLPSpanExporter(endpoint, insecure=urlsplit(endpoint).scheme == "http")


def _over_http(endpoint: str) -> tuple[SpanExporter, Callable[[], int]]:
    import requests
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

    rejected = 0

    def look(response: requests.Response, *_: Any, **__: Any) -> None:
        nonlocal rejected
        if response.status_code == 200:
            rejected += rejected_spans(response.content)

    session = requests.Session()
    session.hooks["response"].append(look)
    parts = urlsplit(endpoint)
    if parts.hostname in LOOPBACK:
        session.trust_env = False  # no proxy knows what 127.0.0.1 is here
    url = endpoint if parts.path.strip("/") else f"{endpoint.rstrip('/')}/v1/traces"
    return OTLPSpanExporter(url, session=session), lambda: rejected


def rejected_spans(answer: bytes) -> int:
    """How many spans an answer of OTLP says were refused."""
    try:
        response = ExportTraceServiceResponse.FromString(answer)
    except DecodeError:  # not protobuf: it acknowledges all the same
        return 0
    return int(response.partial_success.rejected_spans)
