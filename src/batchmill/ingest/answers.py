"""What a sender is told: from what happened to the HTTP answer and to the gRPC one. Pure.

The bodies are the messages of the protocol (``google.rpc.Status``, ``ExportTraceServiceResponse``),
written by hand: they have two or three fields each.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from typing import Any

PROTOBUF = "application/x-protobuf"
JSON = "application/json"
SIGNALS = {
    "/v1/logs": "logs",
    "/v1/metrics": "metrics",
    "/v1development/profiles": "profiles",
}
"""The protocol's other signals, by their HTTP path."""

_LONGEST_MESSAGE = 1000
"""gRPC sends a message twice in headers that should stay below 8 KiB."""

# https://github.com/googleapis/googleapis/blob/master/google/rpc/code.proto
INVALID_ARGUMENT, DEADLINE_EXCEEDED, NOT_FOUND = 3, 4, 5
RESOURCE_EXHAUSTED, UNIMPLEMENTED, UNAVAILABLE, UNAUTHENTICATED = 8, 12, 14, 16


@dataclass(frozen=True, slots=True)
class Refusal:
    """A request that was not taken: why, and what its sender should do."""

    reason: str
    """Short, from a fixed set: it is counted under this."""
    status: int
    code: int
    """The gRPC one."""
    message: str
    retry_after_s: float | None = None
    """Given where another try makes sense; also what makes a gRPC sender try again."""
    close: bool = False
    """The connection ends with the answer: the rest of the body is not wanted."""
    headers: tuple[tuple[str, str], ...] = ()


class Refused(Exception):
    """Carries a ``refusal`` to where it is answered."""

    def __init__(self, refusal: Refusal) -> None:
        super().__init__(refusal.message)
        self.refusal = refusal


def overloaded(level: str, why: str, retry_after_s: float, *, unread: bool = False) -> Refusal:
    """Too much waits already. 503: some exporters drop what is answered with 429."""
    message = f"{why}; try again in {retry_after_s:g} s"
    return Refusal(level, 503, UNAVAILABLE, message, retry_after_s, close=unread)


def busy(what: str, retry_after_s: float = 1.0) -> Refusal:
    """As many requests, connections or bytes are under way as may be."""
    message = f"{what}; try again in {retry_after_s:g} s"
    return Refusal("busy", 503, UNAVAILABLE, message, retry_after_s, close=True)


def draining() -> Refusal:
    """The receiver ends; the next one takes it."""
    return Refusal("draining", 503, UNAVAILABLE, "shutting down; try again", 1.0, close=True)


def not_stored(why: str) -> Refusal:
    """The spans could not be made durable: a full disk, most likely."""
    return Refusal("not_stored", 503, UNAVAILABLE, f"not stored: {why}", 5.0)


def failed() -> Refusal:
    """A mistake in the receiver, which the sender can do nothing about but try again."""
    return Refusal("failed", 503, UNAVAILABLE, "the receiver failed; its log says why", 5.0)


def malformed(message: str) -> Refusal:
    """The body is not what it should be; sending it again will not help."""
    return Refusal("malformed", 400, INVALID_ARGUMENT, message)


def too_large(message: str, *, unread: bool = False) -> Refusal:
    """The body is above a limit, as sent or unpacked."""
    return Refusal("too_large", 413, RESOURCE_EXHAUSTED, message, close=unread)


def too_slow(seconds: float) -> Refusal:
    """The whole request did not arrive in time."""
    message = f"the request did not arrive within {seconds:g} s"
    return Refusal("too_slow", 408, DEADLINE_EXCEEDED, message, close=True)


def unauthenticated() -> Refusal:
    """No token, or a wrong one."""
    return Refusal(
        "unauthenticated",
        401,
        UNAUTHENTICATED,
        "a bearer token is required: set the header 'authorization: Bearer <token>'",
        close=True,
        headers=(("www-authenticate", "Bearer"),),
    )


def unsupported_signal(signal: str) -> Refusal:
    """One of the protocol's other signals."""
    return Refusal(
        "unsupported_signal",
        404,
        UNIMPLEMENTED,
        f"{signal} are not supported: this receiver takes traces, at /v1/traces; "
        f"set OTEL_{signal.upper()}_EXPORTER=none",
    )


def unknown_path(path: str) -> Refusal:
    """Nothing is there."""
    return Refusal(
        "unknown_path", 404, NOT_FOUND, f"nothing at {path!r}: send traces to /v1/traces"
    )


def wrong_method(method: str, allowed: str) -> Refusal:
    """The path is right, the verb is not."""
    return Refusal(
        "wrong_method",
        405,
        UNIMPLEMENTED,
        f"{method} is not allowed here: use {allowed}",
        headers=(("allow", allowed),),
    )


def wrong_content_type(found: str) -> Refusal:
    """Neither of the protocol's two."""
    message = f"content type {found!r} is not understood: send {PROTOBUF} or {JSON}"
    return Refusal("wrong_content_type", 415, INVALID_ARGUMENT, message, close=True)


def wrong_encoding(message: str) -> Refusal:
    """The body is packed in a way that is not taken."""
    headers = (("accept-encoding", "gzip, deflate, identity"),)
    return Refusal("wrong_encoding", 415, INVALID_ARGUMENT, message, headers=headers)


def bad_http(status: int, message: str) -> Refusal:
    """What arrived is not HTTP, or its headers are too long."""
    return Refusal("bad_http", status, INVALID_ARGUMENT, message, close=True)


# -- the answers' bytes --------------------------------------------------------------------------


def content_type_of(header: str) -> str | None:
    """Which of the two content types a header names; None if neither."""
    name = header.partition(";")[0].strip().lower()
    return name if name in (PROTOBUF, JSON) else None


def http_headers(refusal: Refusal, content_type: str) -> dict[str, str]:
    """The headers of a refusal's answer."""
    headers = {"content-type": content_type, **dict(refusal.headers)}
    if refusal.retry_after_s is not None:
        headers["retry-after"] = str(max(1, math.ceil(refusal.retry_after_s)))
    if refusal.close:
        headers["connection"] = "close"
    return headers


def http_body(refusal: Refusal, content_type: str) -> bytes:
    """The body of a refusal's answer: a ``google.rpc.Status``."""
    message = _shortened(refusal.message)
    if content_type == PROTOBUF:
        return _number(1, refusal.code) + _text(2, message) + _details(refusal)
    body: dict[str, Any] = {"code": refusal.code, "message": message}
    if refusal.retry_after_s is not None:
        delay = f"{refusal.retry_after_s:g}s"
        body["details"] = [{"@type": _RETRY_INFO, "retryDelay": delay}]
    return json.dumps(body).encode()


def grpc_message(refusal: Refusal) -> str:
    """The text of a refusal in gRPC."""
    return _shortened(refusal.message)


def grpc_trailers(refusal: Refusal) -> tuple[tuple[str, bytes], ...]:
    """What goes with a refusal in gRPC: a ``google.rpc.Status`` with ``RetryInfo``."""
    return (("grpc-status-details-bin", http_body(refusal, PROTOBUF)),)


def success(rejected: int, reason: str, content_type: str) -> bytes:
    """An ``ExportTraceServiceResponse``; ``partial_success`` is set only if spans were rejected."""
    if content_type == PROTOBUF:
        if not rejected:
            return b""
        return _bytes(1, _number(1, rejected) + _text(2, _shortened(reason)))
    if not rejected:
        return b"{}"
    # 64-bit numbers are text in the JSON of protobuf.
    partial = {"rejectedSpans": str(rejected), "errorMessage": _shortened(reason)}
    return json.dumps({"partialSuccess": partial}).encode()


_RETRY_INFO = "type.googleapis.com/google.rpc.RetryInfo"


def _details(refusal: Refusal) -> bytes:
    if refusal.retry_after_s is None:
        return b""
    seconds, nanos = divmod(round(refusal.retry_after_s * 1e9), 10**9)
    delay = (_number(1, seconds) if seconds else b"") + (_number(2, nanos) if nanos else b"")
    return _bytes(3, _text(1, _RETRY_INFO) + _bytes(2, _bytes(1, delay)))


def _shortened(message: str) -> str:
    # What senders sent may be in it: it must be text that can be encoded.
    message = message.encode("utf-8", "replace").decode()
    return message if len(message) <= _LONGEST_MESSAGE else message[: _LONGEST_MESSAGE - 1] + "…"


def _number(field: int, value: int) -> bytes:
    return _varint(field << 3) + _varint(value)


def _text(field: int, value: str) -> bytes:
    return _bytes(field, value.encode())


def _bytes(field: int, value: bytes) -> bytes:
    return _varint(field << 3 | 2) + _varint(len(value)) + value


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)
