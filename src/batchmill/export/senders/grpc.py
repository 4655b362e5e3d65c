"""OTLP metrics over gRPC."""

from __future__ import annotations

from collections.abc import Sequence

import grpc
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2_grpc import MetricsServiceStub

from batchmill.export.errors import SendError
from batchmill.export.senders.otlp import to_otlp
from batchmill.export.settings import ExporterSettings
from batchmill.export.target import Target
from batchmill.export.values import ExportedValue

_OPTIONS = (
    # A peer that comes back is found within seconds; gRPC's own limit is two minutes.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 5_000),
    ("grpc.keepalive_time_ms", 60_000),
)
_TOO_LARGE = "larger than max"
"""What a server says of a message beyond its limit."""


class GrpcSender:
    """One connection to a collector."""

    def __init__(self, target: Target, settings: ExporterSettings) -> None:
        (peer,) = target.peers
        if target.tls:
            credentials = grpc.ssl_channel_credentials()
            self._channel = grpc.secure_channel(peer, credentials, _OPTIONS)
        else:
            self._channel = grpc.insecure_channel(peer, _OPTIONS)
        self._stub = MetricsServiceStub(self._channel)  # type: ignore[no-untyped-call]
        self._timeout_s = settings.timeout_s
        self._headers = tuple((name.lower(), value) for name, value in settings.headers.items())

    def send(self, values: Sequence[ExportedValue]) -> int:
        """See :class:`Sender`."""
        request = to_otlp(values)
        try:
            answer = self._stub.Export(request, timeout=self._timeout_s, metadata=self._headers)
        except grpc.RpcError as error:
            raise _told(error) from error
        except ValueError as error:  # what gRPC says of a channel that was closed
            raise SendError("interrupted", str(error)) from error
        return int(answer.partial_success.rejected_data_points)

    def interrupt(self) -> None:
        """See :class:`Sender`."""
        self._channel.close()

    def close(self) -> None:
        """See :class:`Sender`."""
        self._channel.close()


def _told(error: grpc.RpcError) -> SendError:
    code, detail = error.code(), str(error.details() or "")
    too_large = code is grpc.StatusCode.RESOURCE_EXHAUSTED and _TOO_LARGE in detail
    # Only this code says that what was sent is wrong. All others may pass: a token is put right, a
    # service installed, and until then the outbox keeps what is to be sent.
    retry = code is not grpc.StatusCode.INVALID_ARGUMENT and not too_large
    return SendError(code.name, detail, retry=retry, too_large=too_large)
