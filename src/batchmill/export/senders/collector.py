"""OTLP metrics to an OpenTelemetry collector, over gRPC or HTTP."""

from __future__ import annotations

import contextlib
import gzip
from collections.abc import Sequence

import grpc
from google.protobuf.message import DecodeError
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import (
    ExportMetricsServiceResponse,
)
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2_grpc import MetricsServiceStub

from batchmill.export.http import HttpClient
from batchmill.export.senders import SendError
from batchmill.export.senders.otlp import to_otlp
from batchmill.export.settings import ExporterSettings, Target
from batchmill.export.values import ExportedValue

_CHANNEL_OPTIONS = (
    # A peer that comes back is found within seconds; gRPC's own limit is two minutes.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 5_000),
    ("grpc.keepalive_time_ms", 60_000),
)
_TOO_LARGE = "larger than max"
"""In gRPC's message about a request beyond the server's limit."""
_PATH = "/v1/metrics"
_MAX_ANSWER_BYTES = 2**20
_WRONG = (400, 422)
"""What was sent is wrong. All other answers may change, and until then the outbox keeps it."""
_MAX_RETRY_AFTER_S = 60.0


class GrpcSender:
    """Sends over one gRPC channel; see :class:`Sender`."""

    def __init__(self, target: Target, settings: ExporterSettings) -> None:
        (peer,) = target.peers
        if target.tls:
            credentials = grpc.ssl_channel_credentials()
            self._channel = grpc.secure_channel(peer, credentials, _CHANNEL_OPTIONS)
        else:
            self._channel = grpc.insecure_channel(peer, _CHANNEL_OPTIONS)
        self._stub = MetricsServiceStub(self._channel)  # type: ignore[no-untyped-call]
        self._timeout_s = settings.timeout_s
        self._headers = tuple((name.lower(), value) for name, value in settings.headers.items())

    def send(self, values: Sequence[ExportedValue]) -> int:
        request = to_otlp(values)
        try:
            answer = self._stub.Export(request, timeout=self._timeout_s, metadata=self._headers)
        except grpc.RpcError as error:
            raise _as_send_error(error) from error
        except ValueError as error:  # what gRPC says of a channel that was closed
            raise SendError("interrupted", str(error)) from error
        return int(answer.partial_success.rejected_data_points)

    def interrupt(self) -> None:
        self._channel.close()

    def close(self) -> None:
        self._channel.close()


def _as_send_error(error: grpc.RpcError) -> SendError:
    code, detail = error.code(), str(error.details() or "")
    too_large = code is grpc.StatusCode.RESOURCE_EXHAUSTED and _TOO_LARGE in detail
    # Only this code says that what was sent is wrong. All others may pass: a token is put right, a
    # service installed, and until then the outbox keeps what is to be sent.
    retry = code is not grpc.StatusCode.INVALID_ARGUMENT and not too_large
    return SendError(code.name, detail, retry=retry, too_large=too_large)


class HttpSender:
    """Sends protobuf over one HTTP connection; see :class:`Sender`."""

    def __init__(self, target: Target, settings: ExporterSettings) -> None:
        (peer,) = target.peers
        self._client = HttpClient(
            peer,
            path=target.path or _PATH,
            headers={
                **settings.headers,
                "content-type": "application/x-protobuf",
                "content-encoding": "gzip",
            },
            tls=target.tls,
            timeout_s=settings.timeout_s,
            max_answer_bytes=_MAX_ANSWER_BYTES,
        )

    def send(self, values: Sequence[ExportedValue]) -> int:
        try:
            answer = self._client.post(gzip.compress(to_otlp(values).SerializeToString(), 1))
        except OSError as error:
            reason = "timeout" if isinstance(error, TimeoutError) else "unreachable"
            raise SendError(reason, f"{type(error).__name__}: {error}") from error
        if not 200 <= answer.status < 300:
            after_s = answer.retry_after_s
            raise SendError(
                f"HTTP {answer.status}",
                answer.text,
                retry=answer.status not in (*_WRONG, 413),
                too_large=answer.status == 413,
                after_s=None if after_s is None else min(after_s, _MAX_RETRY_AFTER_S),
            )
        with contextlib.suppress(DecodeError):  # it was taken all the same
            response = ExportMetricsServiceResponse.FromString(answer.body)
            return int(response.partial_success.rejected_data_points)
        return 0

    def interrupt(self) -> None:
        self._client.interrupt()

    def close(self) -> None:
        self._client.close()
