"""OTLP over gRPC."""

from __future__ import annotations

import asyncio
import logging

from batchmill.http import (
    BrokenMessageError,
    ConnectionRefusal,
    GrpcCall,
    GrpcResponse,
    GrpcServer,
    Listener,
    RefusalReason,
)
from batchmill.ingest import responses
from batchmill.ingest.decode import PROTOBUF
from batchmill.ingest.intake import LOGS, METRICS, TRACES, Intake, ReceiverSettings, Take
from batchmill.ingest.responses import GRPC_ENCODINGS, Refusal

log = logging.getLogger("batchmill.ingest")

_SIGNALS = {
    "/opentelemetry.proto.collector.trace.v1.TraceService/Export": TRACES,
    "/opentelemetry.proto.collector.logs.v1.LogsService/Export": LOGS,
    "/opentelemetry.proto.collector.metrics.v1.MetricsService/Export": METRICS,
    "/opentelemetry.proto.collector.profiles.v1development.ProfilesService/Export": "profiles",
}


def build_server(
    intake: Intake, settings: ReceiverSettings, listener: Listener | None = None
) -> GrpcServer:
    """Make a server that does not listen yet.

    ``listener``: where connections come from, if another process listens on the port.
    """
    service = _Export(intake, settings)
    return GrpcServer(
        service.respond,
        settings,
        settings.grpc_port,
        service.refuse_connection,
        port_setting="grpc_port",
        encodings=GRPC_ENCODINGS,
        idle_s=settings.idle_s,
        max_header_bytes=settings.max_header_bytes,
        listener=listener,
    )


class _Export:
    """Handles the ``Export`` call of each signal; answers every call, and raises nothing."""

    def __init__(self, intake: Intake, settings: ReceiverSettings) -> None:
        self._intake = intake
        self._stats = intake.stats
        self._settings = settings
        self._takes = {signal: intake.take(signal) for signal in _SIGNALS.values()}

    async def respond(self, call: GrpcCall) -> GrpcResponse:
        """Take the spans of a call."""
        try:
            response = await self._respond(call)
        except Refusal as refusal:
            return self._refuse(refusal)
        except asyncio.CancelledError:  # by the sender, or by a receiver that has waited enough
            reason = "draining" if self._intake.draining else responses.DISCONNECTED
            self._stats.answered("grpc", reason)
            raise
        except Exception:  # whatever it is, the sender gets a response
            log.exception("a request failed")
            return self._refuse(responses.failed())
        self._stats.answered("grpc", "ok")
        return GrpcResponse(response)

    async def _respond(self, call: GrpcCall) -> bytes:
        signal = _SIGNALS.get(call.method)
        if signal is None:
            raise responses.unknown_method(call.method)
        if not self._settings.access.allows(call.metadata.get("authorization")):
            raise responses.unauthenticated()
        call.authenticated()
        take = self._takes[signal]
        if take is None:
            raise responses.unsupported_signal(signal)
        encoding = call.metadata.get("grpc-encoding", "identity")
        if encoding not in GRPC_ENCODINGS:
            raise responses.wrong_grpc_encoding(encoding)
        return await self._export(call, take, encoding)

    async def _export(self, call: GrpcCall, take: Take, encoding: str) -> bytes:
        limit = self._intake.limits.max_body_bytes
        with self._intake.admit(call.peer) as body:
            try:
                async with self._intake.reading(body, asyncio.get_running_loop().time()):
                    head = await call.head()
                    if head is None:
                        raise responses.malformed("the call has no message")
                    if head.bytes > limit:
                        raise responses.body_too_large(limit)
                    async for part in call.message():
                        body.add(part)
            except BrokenMessageError as error:
                raise responses.malformed(str(error)) from None
            if head.compressed and encoding == "identity":
                raise responses.malformed("the message is compressed, and grpc-encoding is missing")
            rejected = await take(body, encoding if head.compressed else "", PROTOBUF)
        return responses.success(rejected, PROTOBUF)

    def refuse_connection(self, refusal: ConnectionRefusal) -> bytes:
        """Count a connection that is not gRPC, and return the response to one of HTTP/1."""
        if refusal.reason is not RefusalReason.BAD_HTTP:
            return b""
        message = (
            f"{refusal.message}: this port takes OTLP over gRPC, OTLP over HTTP has another "
            f"(http_port, {self._settings.http_port} here)"
        )
        response = responses.bad_http(refusal.status, message)
        self._stats.answered("grpc", response.reason)
        return responses.raw_http(response)

    def _refuse(self, refusal: Refusal) -> GrpcResponse:
        self._stats.answered("grpc", refusal.reason)
        return GrpcResponse(
            status=refusal.code,
            text=responses.grpc_message(refusal),
            details=responses.http_body(refusal, PROTOBUF),
        )
