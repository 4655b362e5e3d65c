"""OTLP metrics over HTTP, as protobuf."""

from __future__ import annotations

import contextlib
import gzip
import http.client
import socket
import time
from collections.abc import Sequence

from google.protobuf.message import DecodeError
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import (
    ExportMetricsServiceResponse,
)

from batchmill.export.errors import SendError
from batchmill.export.senders.otlp import to_otlp
from batchmill.export.senders.retry_after import retry_after_s
from batchmill.export.settings import ExporterSettings
from batchmill.export.target import Target
from batchmill.export.values import ExportedValue

PATH = "/v1/metrics"
_LONGEST = 1 << 20
_WRONG = (400, 422)
"""What was sent is wrong. All other answers may change, and until then the outbox keeps it."""
_LONGEST_WAIT_S = 60.0


class HttpSender:
    """One connection to a collector, kept open."""

    def __init__(self, target: Target, settings: ExporterSettings) -> None:
        (peer,) = target.peers
        kind = http.client.HTTPSConnection if target.tls else http.client.HTTPConnection
        self._connection = kind(peer, timeout=settings.timeout_s)
        self._interrupted = False
        self._path = target.path or PATH
        self._headers = {
            **settings.headers,
            "content-type": "application/x-protobuf",
            "content-encoding": "gzip",
        }

    def send(self, values: Sequence[ExportedValue]) -> int:
        """See :class:`Sender`."""
        body = gzip.compress(to_otlp(values).SerializeToString(), 1)
        try:
            answer = self._post(body)
            read = answer.read(_LONGEST)
            if answer.read(1):  # more than anybody has to say: the connection is of no more use
                self._connection.close()
        except (OSError, http.client.HTTPException) as error:
            self._connection.close()
            reason = "timeout" if isinstance(error, TimeoutError) else "unreachable"
            raise SendError(reason, f"{type(error).__name__}: {error}") from error
        if not 200 <= answer.status < 300:
            after_s = retry_after_s(answer.getheader("retry-after"), time.time())
            raise SendError(
                f"HTTP {answer.status}",
                read[:200].decode("utf-8", "replace"),
                retry=answer.status not in (*_WRONG, 413),
                too_large=answer.status == 413,
                after_s=None if after_s is None else min(after_s, _LONGEST_WAIT_S),
            )
        with contextlib.suppress(DecodeError):  # it was taken all the same
            said = ExportMetricsServiceResponse.FromString(read)
            return int(said.partial_success.rejected_data_points)
        return 0

    def _post(self, body: bytes) -> http.client.HTTPResponse:
        used = self._connection.sock is not None
        try:
            self._connection.request("POST", self._path, body, self._headers)
            return self._connection.getresponse()
        except (http.client.RemoteDisconnected, ConnectionResetError, BrokenPipeError):
            self._connection.close()
            if not used or self._interrupted:
                raise
        # The peer closed it while nothing was to be sent, as it may: that is no failure.
        self._connection.request("POST", self._path, body, self._headers)
        return self._connection.getresponse()

    def interrupt(self) -> None:
        """See :class:`Sender`."""
        self._interrupted = True
        sock = self._connection.sock
        if sock is not None:
            with contextlib.suppress(OSError):  # it is closed already
                sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """See :class:`Sender`."""
        self._connection.close()
