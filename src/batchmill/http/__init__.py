"""Serving HTTP: how any server of ours listens, authenticates, limits, speaks TLS and stops.

`ServerSettings` and `Access` say where a server listens and for whom; `HttpServer` runs an ASGI
application on it, `GrpcServer` answers gRPC calls. Only these two need third-party packages
(uvicorn and h11, h2), so the rest loads without any extra.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from batchmill.http.refusal import ConnectionRefusal, RefusalReason, response_bytes
from batchmill.http.settings import Access, ServerSettings, host_port

if TYPE_CHECKING:
    from batchmill.http.grpc import BrokenMessageError, GrpcCall, GrpcResponse, GrpcServer
    from batchmill.http.server import HttpServer

__all__ = [
    "Access",
    "BrokenMessageError",
    "ConnectionRefusal",
    "GrpcCall",
    "GrpcResponse",
    "GrpcServer",
    "HttpServer",
    "RefusalReason",
    "ServerSettings",
    "host_port",
    "response_bytes",
]


def __getattr__(name: str) -> Any:
    # Not extras.lazy_names: which extra is missing, only the package that serves can say.
    if name == "HttpServer":
        from batchmill.http.server import HttpServer

        return HttpServer
    if name in ("BrokenMessageError", "GrpcCall", "GrpcResponse", "GrpcServer"):
        from batchmill.http import grpc

        return getattr(grpc, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
