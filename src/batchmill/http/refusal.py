"""Connections that are closed before their request reaches the application."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum, auto
from http import HTTPStatus
from typing import TypeAlias


class RefusalReason(Enum):
    """Why a connection is closed."""

    TOO_MANY_CONNECTIONS = auto()
    TOO_SLOW = auto()
    """The request did not arrive in time."""
    BAD_HTTP = auto()
    """What arrived is not HTTP, or its headers are too long."""
    NO_REQUEST = auto()
    """The client closed it, or the server stopped, before there was a request."""
    TLS_FAILED = auto()
    """The handshake failed, or took too long."""


@dataclass(frozen=True, slots=True)
class ConnectionRefusal:
    """One such connection."""

    reason: RefusalReason
    status: int = 0
    """Of the response; 0 where none can be sent."""
    message: str = ""


Refuse: TypeAlias = Callable[[ConnectionRefusal], bytes]
"""Counts a refusal and returns the whole response, see `response_bytes`; empty to send none."""


def response_bytes(status: int, body: bytes, headers: Mapping[str, str]) -> bytes:
    """A whole HTTP response, for a connection that is closed after it."""
    lines = [f"HTTP/1.1 {status} {HTTPStatus(status).phrase}"]
    lines += [f"{name}: {value}" for name, value in headers.items() if name != "connection"]
    lines += [f"content-length: {len(body)}", "connection: close", "", ""]
    return "\r\n".join(lines).encode() + body
