"""OTLP over gRPC.

``Export`` is served as a call with a stream of messages, which is the same on the wire: so it is
asked before its message is received, and can be refused without that.

Messages arrive as they were sent. gRPC would inflate a gzip one without a bound on the outcome;
ours has one.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import grpc
import grpc.aio

from batchmill.errors import ConfigError
from batchmill.ingest import answers
from batchmill.ingest.answers import Refusal, Refused
from batchmill.ingest.intake import LOGS, Hold, Intake
from batchmill.ingest.settings import GRPC_MESSAGE_BYTES, ReceiverSettings

log = logging.getLogger("batchmill.ingest")

TRACES = "/opentelemetry.proto.collector.trace.v1.TraceService/Export"
OTHERS = {
    "/opentelemetry.proto.collector.logs.v1.LogsService/Export": "logs",
    "/opentelemetry.proto.collector.metrics.v1.MetricsService/Export": "metrics",
    "/opentelemetry.proto.collector.profiles.v1development.ProfilesService/Export": "profiles",
}
_GZIP = b"\x1f\x8b"
"""What gzip begins with. No message of protobuf does: 0x1f is no field."""
_CODES = {each.value[0]: each for each in grpc.StatusCode}


def build_server(intake: Intake, settings: ReceiverSettings) -> tuple[grpc.aio.Server, int]:
    """A server that is bound but not started, and its port."""
    most = min(GRPC_MESSAGE_BYTES, intake.limits.max_body_bytes)
    server = grpc.aio.server(
        options=[
            ("grpc.so_reuseport", 0),  # two receivers on one port would share the senders
            ("grpc.max_receive_message_length", most),
            ("grpc.per_message_decompression", 0),
            ("grpc.compression_enabled_algorithms_bitset", 0b101),  # identity and gzip
            ("grpc.max_metadata_size", settings.max_header_bytes),
            ("grpc.absolute_max_metadata_size", settings.max_header_bytes),
            ("grpc.max_allowed_incoming_connections", settings.max_connections),
            ("grpc.max_concurrent_streams", 100),
            ("grpc.server_handshake_timeout_ms", 10_000),
            ("grpc.max_connection_idle_ms", int(settings.idle_s * 1000)),
            ("grpc.keepalive_time_ms", 30_000),  # notices senders that vanished
            ("grpc.keepalive_timeout_ms", 10_000),
            ("grpc.http2.min_recv_ping_interval_without_data_ms", 10_000),
            ("grpc.keepalive_permit_without_calls", 1),
        ]
    )
    server.add_generic_rpc_handlers((_Methods(intake, settings),))
    host = f"[{settings.bind}]" if ":" in settings.bind else settings.bind
    address = f"{host}:{settings.grpc_port}"
    credentials = settings.access.grpc_credentials()
    try:
        if credentials is None:
            return server, server.add_insecure_port(address)
        return server, server.add_secure_port(address, credentials)
    except RuntimeError as error:
        raise ConfigError(
            "grpc_port", settings.grpc_port, f"a free port of {settings.bind} ({error})"
        ) from error


class _Methods(grpc.GenericRpcHandler):  # type: ignore[misc]
    """Which call is answered how."""

    def __init__(self, intake: Intake, settings: ReceiverSettings) -> None:
        self._intake = intake
        self._settings = settings

    def service(self, handler_call_details: Any) -> Any:
        method = handler_call_details.method
        if method == TRACES:
            return grpc.stream_unary_rpc_method_handler(self._answering(self._exported))
        if OTHERS.get(method) == LOGS and LOGS in self._intake.onward:
            return grpc.stream_unary_rpc_method_handler(self._answering(self._handed_on))
        if method in OTHERS:
            return grpc.stream_unary_rpc_method_handler(self._unsupported(OTHERS[method]))
        return None  # gRPC answers UNIMPLEMENTED

    def _answering(self, work: Callable[[Any], Awaitable[bytes]]) -> Any:
        async def export(messages: Any, call: Any) -> bytes:
            try:
                answer = await work(call)
            except Refused as refused:
                await self._refuse(call, refused.refusal)
            except Exception:  # whatever it is, the sender gets an answer, and the next one too
                log.exception("a request failed")
                await self._refuse(call, answers.failed())
            self._intake.figures.answered("grpc", "ok")
            return answer

        return export

    async def _exported(self, call: Any) -> bytes:
        async with self._received(call) as (hold, encoding):
            rejected = await self._intake.take(hold, encoding, answers.PROTOBUF)
        return answers.success(*rejected, answers.PROTOBUF)

    async def _handed_on(self, call: Any) -> bytes:
        async with self._received(call) as (hold, encoding):
            await self._intake.hand_on_logs(hold, encoding, answers.PROTOBUF)
        return b""

    @contextlib.asynccontextmanager
    async def _received(self, call: Any) -> AsyncIterator[tuple[Hold, str]]:
        intake = self._intake
        self._check_token(call)
        with intake.admitted() as hold:
            with intake.grpc_reading():
                hold.add(await self._message(call))
            yield hold, "gzip" if hold.starts_with(_GZIP) else ""

    async def _message(self, call: Any) -> bytes:
        try:
            async with asyncio.timeout(self._settings.request_s) as timeout:
                with self._intake.in_time(timeout):
                    message = await call.read()
        except TimeoutError:
            raise self._intake.out_of_time() from None
        if message is grpc.aio.EOF:
            raise Refused(answers.malformed("the call has no message"))
        return bytes(message)

    def _check_token(self, call: Any) -> None:
        given = dict(call.invocation_metadata() or ()).get("authorization")
        if not self._settings.access.allows(given):
            raise Refused(answers.unauthenticated())

    def _unsupported(self, signal: str) -> Any:
        async def refuse(messages: Any, call: Any) -> bytes:
            try:
                self._check_token(call)
            except Refused as refused:
                await self._refuse(call, refused.refusal)
            await self._refuse(call, answers.unsupported_signal(signal))
            raise AssertionError("the call was aborted")

        return refuse

    async def _refuse(self, call: Any, refusal: Refusal) -> None:
        """End the call; raises what ends the handler."""
        self._intake.figures.answered("grpc", refusal.reason)
        await call.abort(
            _CODES[refusal.code],
            answers.grpc_message(refusal),
            answers.grpc_trailers(refusal),
        )
