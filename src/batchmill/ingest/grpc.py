"""OTLP over gRPC.

``Export`` is served as a call with a stream of messages, which is the same on the wire. So a call
can be refused before its message is received.

gRPC's own decompression is off, as it has no limit on the result; `decompress` has one.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import grpc
import grpc.aio

from batchmill.http import host_port, port_error
from batchmill.ingest import responses
from batchmill.ingest.decode import PROTOBUF
from batchmill.ingest.intake import (
    GRPC_MESSAGE_BYTES,
    LOGS,
    METRICS,
    TRACES,
    Intake,
    ReceiverSettings,
    Take,
)
from batchmill.ingest.responses import Refusal

log = logging.getLogger("batchmill.ingest")

_SIGNALS = {
    "/opentelemetry.proto.collector.trace.v1.TraceService/Export": TRACES,
    "/opentelemetry.proto.collector.logs.v1.LogsService/Export": LOGS,
    "/opentelemetry.proto.collector.metrics.v1.MetricsService/Export": METRICS,
    "/opentelemetry.proto.collector.profiles.v1development.ProfilesService/Export": "profiles",
}
_GZIP = b"\x1f\x8b"
"""How gzip starts. No protobuf message starts like this: 0x1f is not a field."""
_SHARED_CONNECTION_S = 300.0
"""A sender of a shared port is asked to connect anew after this, for which any process may be
chosen: so connections also spread to a process that was restarted."""
_CODES = {code.value[0]: code for code in grpc.StatusCode}


def build_server(
    intake: Intake, settings: ReceiverSettings, *, shared: bool = False
) -> tuple[grpc.aio.Server, int]:
    """Make a server, not yet started, that listens on a port; returns both.

    ``shared``: other processes listen on the port as well, and the system spreads connections.
    """
    max_message = min(GRPC_MESSAGE_BYTES, intake.limits.max_body_bytes)
    spreading = [("grpc.max_connection_age_ms", int(_SHARED_CONNECTION_S * 1000))]
    server = grpc.aio.server(
        options=[
            # Without it, else a second receiver could use the same port.
            ("grpc.so_reuseport", int(shared)),
            *(spreading if shared else ()),
            ("grpc.max_receive_message_length", max_message),
            ("grpc.per_message_decompression", 0),
            ("grpc.compression_enabled_algorithms_bitset", 0b101),  # identity and gzip
            ("grpc.max_metadata_size", settings.max_header_bytes),
            ("grpc.absolute_max_metadata_size", settings.max_header_bytes),
            ("grpc.max_allowed_incoming_connections", settings.max_connections),
            ("grpc.max_concurrent_streams", 100),
            ("grpc.server_handshake_timeout_ms", 10_000),
            ("grpc.max_connection_idle_ms", int(settings.idle_s * 1000)),
            ("grpc.keepalive_time_ms", 30_000),  # detects senders that have vanished
            ("grpc.keepalive_timeout_ms", 10_000),
            ("grpc.http2.min_recv_ping_interval_without_data_ms", 10_000),
            ("grpc.keepalive_permit_without_calls", 1),
        ]
    )
    server.add_generic_rpc_handlers((_Export(intake, settings),))
    address = host_port(settings.bind, settings.grpc_port)
    credentials = settings.access.grpc_credentials()
    try:
        if credentials is None:
            return server, server.add_insecure_port(address)
        return server, server.add_secure_port(address, credentials)
    except RuntimeError as error:
        raise port_error("grpc_port", settings.grpc_port, settings.bind, error) from error


class _Export(grpc.GenericRpcHandler):  # type: ignore[misc]
    """Handles the ``Export`` call of each signal."""

    def __init__(self, intake: Intake, settings: ReceiverSettings) -> None:
        self._intake = intake
        self._settings = settings

    def service(self, handler_call_details: Any) -> Any:
        signal = _SIGNALS.get(handler_call_details.method)
        if signal is None:
            return None  # gRPC answers UNIMPLEMENTED
        handler = self._handler(self._intake.take(signal), signal)
        return grpc.stream_unary_rpc_method_handler(handler)

    def _handler(self, take: Take | None, signal: str) -> Any:
        """The handler of a call; without ``take`` it refuses ``signal``."""

        async def export(messages: Any, call: Any) -> bytes:
            try:
                self._authenticate(call)
                if take is None:
                    raise responses.unsupported_signal(signal)
                response = await self._export(call, take)
            except Refusal as refusal:
                await self._refuse(call, refusal)
            except Exception:  # whatever it is, the sender gets a response
                log.exception("a request failed")
                await self._refuse(call, responses.failed())
            self._intake.stats.answered("grpc", "ok")
            return response

        return export

    def _authenticate(self, call: Any) -> None:
        header = dict(call.invocation_metadata() or ()).get("authorization")
        if not self._settings.access.allows(header):
            raise responses.unauthenticated()

    async def _export(self, call: Any, take: Take) -> bytes:
        intake = self._intake
        with intake.admit(call.peer()) as body:
            with intake.reading_grpc():
                async with intake.reading(asyncio.get_running_loop().time()):
                    message = await call.read()
                if message is grpc.aio.EOF:
                    raise responses.malformed("the call has no message")
                body.add(bytes(message))
            encoding = "gzip" if body.starts_with(_GZIP) else ""
            rejected = await take(body, encoding, PROTOBUF)
        return responses.success(rejected, PROTOBUF)

    async def _refuse(self, call: Any, refusal: Refusal) -> None:
        """End the call with an error; raises what gRPC expects of its handler then."""
        self._intake.stats.answered("grpc", refusal.reason)
        await call.abort(
            _CODES[refusal.code],
            responses.grpc_message(refusal),
            responses.grpc_trailers(refusal),
        )
