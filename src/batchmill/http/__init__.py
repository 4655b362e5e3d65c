"""Serving HTTP: how any server of ours listens, authenticates, limits, speaks TLS and stops.

`ServerSettings` and `Access` say where a server listens and for whom; `HttpServer` runs an ASGI
application on it, `GrpcServer` answers gRPC calls. `listen`, `Giver` and `Taker` let several
processes serve one port. Only the two servers need third-party packages (uvicorn and h11, h2), so
the rest loads without any extra.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from batchmill.http.handover import Giver, Taker, handover_pair
from batchmill.http.refusal import ConnectionRefusal, RefusalReason, response_bytes
from batchmill.http.settings import Access, ServerSettings, host_port, listen

if TYPE_CHECKING:
    from batchmill.http.connection import Listener
    from batchmill.http.grpc import BrokenMessageError, GrpcCall, GrpcResponse, GrpcServer
    from batchmill.http.server import HttpServer

__all__ = [
    "Access",
    "BrokenMessageError",
    "ConnectionRefusal",
    "Giver",
    "GrpcCall",
    "GrpcResponse",
    "GrpcServer",
    "HttpServer",
    "Listener",
    "RefusalReason",
    "ServerSettings",
    "Taker",
    "handover_pair",
    "host_port",
    "listen",
    "response_bytes",
]


def __getattr__(name: str) -> Any:
    # Not extras.lazy_names: which extra is missing, only the package that serves can say.
    if name == "HttpServer":
        from batchmill.http.server import HttpServer

        return HttpServer
    if name == "Listener":
        from batchmill.http.connection import Listener

        return Listener
    if name in ("BrokenMessageError", "GrpcCall", "GrpcResponse", "GrpcServer"):
        from batchmill.http import grpc

        return getattr(grpc, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
