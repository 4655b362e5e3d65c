"""Serving HTTP: how any server of ours listens, authenticates, limits, speaks TLS and stops.

`ServerSettings` and `Access` say where a server listens and for whom; `HttpServer` runs an ASGI
application on it. `listen`, `reserve`, `Giver` and `Taker` let several processes serve one port. Of
these only `HttpServer` needs third-party packages (uvicorn and h11), so the rest loads without any
extra.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from batchmill.http.handover import Giver, Taker, handover_pair
from batchmill.http.refusal import ConnectionRefusal, RefusalReason, response_bytes
from batchmill.http.settings import (
    Access,
    ServerSettings,
    host_port,
    listen,
    port_error,
    reserve,
)

if TYPE_CHECKING:
    from batchmill.http.server import HttpServer

__all__ = [
    "Access",
    "ConnectionRefusal",
    "Giver",
    "HttpServer",
    "RefusalReason",
    "ServerSettings",
    "Taker",
    "handover_pair",
    "host_port",
    "listen",
    "port_error",
    "reserve",
    "response_bytes",
]


def __getattr__(name: str) -> Any:
    # Not extras.lazy_names: which extra is missing, only the package that serves can say.
    if name == "HttpServer":
        from batchmill.http.server import HttpServer

        return HttpServer
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
