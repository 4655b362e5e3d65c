"""What senders are answered: each outcome as an HTTP response and as a gRPC status.

The bodies are messages of the protocol: ``google.rpc.Status`` for a refused request,
``ExportTraceServiceResponse`` for an accepted one.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from typing import Any

from google.rpc.error_details_pb2 import RetryInfo
from google.rpc.status_pb2 import Status
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTracePartialSuccess,
    ExportTraceServiceResponse,
)

from batchmill.http import response_bytes
from batchmill.ingest.decode import ENCODINGS, JSON, PROTOBUF

DISCONNECTED = "disconnected"
"""The outcome of a request that its sender gave up: there is nobody to answer."""
GRPC_ENCODINGS = ("identity", "gzip")
"""The encodings of gRPC messages that are understood."""
_LONGEST_MESSAGE = 1000
"""gRPC sends a message twice in headers that should stay below 8 KiB."""
_RETRY_INFO = "type.googleapis.com/google.rpc.RetryInfo"

# https://github.com/googleapis/googleapis/blob/master/google/rpc/code.proto
INVALID_ARGUMENT, DEADLINE_EXCEEDED, NOT_FOUND = 3, 4, 5
RESOURCE_EXHAUSTED, UNIMPLEMENTED, UNAVAILABLE, UNAUTHENTICATED = 8, 12, 14, 16


@dataclass(eq=False)
class Refusal(Exception):
    """Raised to refuse a request: why, and what its sender should do."""

    reason: str
    """Short, from a fixed set: refusals are counted by it."""
    status: int
    """Of HTTP."""
    code: int
    """Of gRPC."""
    message: str
    retry_after_s: float | None = None
    """Set where the sender should try again; also what makes a gRPC sender do so."""
    close: bool = False
    """Close the connection after the response: the rest of the body is not read."""
    headers: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, slots=True)
class Rejected:
    """Spans of an accepted request that were rejected: how many, and why."""

    spans: int = 0
    reason: str = ""


def overloaded(level: str, why: str, retry_after_s: float, *, unread: bool = False) -> Refusal:
    """Too much is waiting already. 503, because some exporters drop what is answered with 429."""
    message = f"{why}; try again in {retry_after_s:g} s"
    return Refusal(level, 503, UNAVAILABLE, message, retry_after_s, close=unread)


def busy(what: str, retry_after_s: float = 1.0) -> Refusal:
    """The limit of requests, connections or bytes in progress is reached."""
    message = f"{what}; try again in {retry_after_s:g} s"
    return Refusal("busy", 503, UNAVAILABLE, message, retry_after_s, close=True)


def draining() -> Refusal:
    """The receiver is stopping."""
    return Refusal("draining", 503, UNAVAILABLE, "shutting down; try again", 1.0, close=True)


def not_stored(why: str) -> Refusal:
    """The spans could not be made durable: a full disk, most likely."""
    return Refusal("not_stored", 503, UNAVAILABLE, f"not stored: {why}", 5.0)


def failed() -> Refusal:
    """A bug in the receiver."""
    return Refusal("failed", 503, UNAVAILABLE, "the receiver failed; its log says why", 5.0)


def malformed(message: str) -> Refusal:
    """The body cannot be decoded; sending it again will not help."""
    return Refusal("malformed", 400, INVALID_ARGUMENT, message)


def too_large(message: str, *, unread: bool = False) -> Refusal:
    """The body is above a limit, as sent or decompressed."""
    return Refusal("too_large", 413, RESOURCE_EXHAUSTED, message, close=unread)


def body_too_large(limit: int) -> Refusal:
    """The body is above the limit as sent; the rest of it is not read."""
    message = f"the body has more than {limit} bytes: send fewer spans in a request"
    return too_large(message, unread=True)


def too_slow(seconds: float, *, silent: bool = False) -> Refusal:
    """The whole request did not arrive in time, or nothing of it for so long."""
    what = "nothing more of the request arrived for" if silent else "it did not arrive within"
    message = f"the request is too slow: {what} {seconds:g} s"
    return Refusal("too_slow", 408, DEADLINE_EXCEEDED, message, close=True)


def unauthenticated() -> Refusal:
    """The token is missing or wrong."""
    return Refusal(
        "unauthenticated",
        401,
        UNAUTHENTICATED,
        "a bearer token is required: set the header 'authorization: Bearer <token>'",
        close=True,
        headers=(("www-authenticate", "Bearer"),),
    )


def unsupported_signal(signal: str) -> Refusal:
    """Profiles; metrics and logs where the receiver is set to refuse them."""
    return Refusal(
        "unsupported_signal",
        404,
        UNIMPLEMENTED,
        f"{signal} are not supported: this receiver takes traces, at /v1/traces; "
        f"set OTEL_{signal.upper()}_EXPORTER=none",
    )


def unknown_path(path: str) -> Refusal:
    """The path does not exist."""
    return Refusal(
        "unknown_path", 404, NOT_FOUND, f"nothing at {path!r}: send traces to /v1/traces"
    )


def unknown_method(method: str) -> Refusal:
    """The same over gRPC."""
    message = f"no method {method[:200]!r}: this receiver takes OTLP's Export"
    return Refusal("unknown_path", 404, UNIMPLEMENTED, message)


def wrong_method(method: str, allowed: str) -> Refusal:
    """The path exists, for another method."""
    return Refusal(
        "wrong_method",
        405,
        UNIMPLEMENTED,
        f"{method} is not allowed here: use {allowed}",
        headers=(("allow", allowed),),
    )


def wrong_content_type(content_type: str) -> Refusal:
    """The content type is neither of OTLP's two."""
    message = f"content type {content_type!r} is not understood: send {PROTOBUF} or {JSON}"
    return Refusal("wrong_content_type", 415, INVALID_ARGUMENT, message, close=True)


def wrong_encoding(message: str) -> Refusal:
    """The body is compressed in a way that is not supported."""
    headers = (("accept-encoding", ", ".join(ENCODINGS)),)
    return Refusal("wrong_encoding", 415, INVALID_ARGUMENT, message, headers=headers)


def wrong_grpc_encoding(encoding: str) -> Refusal:
    """The same over gRPC, where the accepted ones are in a header of every response."""
    accepted = ", ".join(GRPC_ENCODINGS)
    message = f"the encoding {encoding[:40]!r} is not supported over gRPC: send {accepted}"
    return Refusal("wrong_encoding", 415, UNIMPLEMENTED, message, close=True)


def bad_http(status: int, message: str) -> Refusal:
    """What arrived is not HTTP, or its headers are too long."""
    return Refusal("bad_http", status, INVALID_ARGUMENT, message, close=True)


def content_type_of(header: str) -> str | None:
    """Which of OTLP's two content types a header names; None for any other."""
    name = header.partition(";")[0].strip().lower()
    return name if name in (PROTOBUF, JSON) else None


def http_headers(refusal: Refusal, content_type: str) -> dict[str, str]:
    """The headers of a refusal's response."""
    headers = {"content-type": content_type, **dict(refusal.headers)}
    if refusal.retry_after_s is not None:
        headers["retry-after"] = str(max(1, math.ceil(refusal.retry_after_s)))
    if refusal.close:
        headers["connection"] = "close"
    return headers


def http_body(refusal: Refusal, content_type: str) -> bytes:
    """The body of a refusal's response: a ``google.rpc.Status``."""
    retry_after_s, message = refusal.retry_after_s, _shorten(refusal.message)
    if content_type == PROTOBUF:
        status = Status(code=refusal.code, message=message)
        if retry_after_s is not None:
            retry = RetryInfo()
            retry.retry_delay.FromNanoseconds(round(retry_after_s * 1e9))
            status.details.add().Pack(retry)
        return bytes(status.SerializeToString())
    body: dict[str, Any] = {"code": refusal.code, "message": message}
    if retry_after_s is not None:
        body["details"] = [{"@type": _RETRY_INFO, "retryDelay": f"{retry_after_s:g}s"}]
    return json.dumps(body).encode()


def raw_http(refusal: Refusal) -> bytes:
    """A refusal as the whole of an HTTP response, for a connection that is closed after it."""
    headers = http_headers(refusal, JSON)
    return response_bytes(refusal.status, http_body(refusal, JSON), headers)


def grpc_message(refusal: Refusal) -> str:
    """The message of a refusal's gRPC status."""
    return _shorten(refusal.message)


def success(rejected: Rejected, content_type: str) -> bytes:
    """The body for an accepted request; with ``partial_success`` only if spans were rejected."""
    if not rejected.spans:
        return b"" if content_type == PROTOBUF else b"{}"
    reason = _shorten(rejected.reason)
    if content_type == PROTOBUF:
        partial = ExportTracePartialSuccess(rejected_spans=rejected.spans, error_message=reason)
        return bytes(ExportTraceServiceResponse(partial_success=partial).SerializeToString())
    # 64-bit numbers are strings in the JSON of protobuf.
    body = {"partialSuccess": {"rejectedSpans": str(rejected.spans), "errorMessage": reason}}
    return json.dumps(body).encode()


def _shorten(message: str) -> str:
    # It may quote what senders sent, which need not be encodable.
    message = message.encode("utf-8", "replace").decode()
    return message if len(message) <= _LONGEST_MESSAGE else message[: _LONGEST_MESSAGE - 1] + "…"
