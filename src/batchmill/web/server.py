"""Serves the web UI and the API over HTTP until stopped."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from batchmill.http import (
    ConnectionRefusal,
    HttpServer,
    RefusalReason,
    ServerSettings,
    response_bytes,
)
from batchmill.run import StatusReader
from batchmill.web.app import make_app
from batchmill.web.responses import HEALTH

PORT = 8080
_MAX_HEADER_BYTES = 64 * 2**10


@dataclass(frozen=True, kw_only=True)
class WebSettings(ServerSettings):
    """Address, access control and limits of the web server."""

    port: int = PORT
    """0 for any free port."""
    idle_s: float = 60.0
    """A connection without a request is closed after this."""
    drain_s: float = 5.0
    """How long requests in progress may take after ``stop()``."""

    @property
    def hosts(self) -> frozenset[str]:
        """The host names that requests may use; empty for any.

        Any, if clients authenticate or the server is ``insecure``; else it listens on this machine
        only, see `Guard`.
        """
        if self.insecure or self.access.token is not None or self.access.client_ca is not None:
            return frozenset()
        bind = f"[{self.bind}]" if ":" in self.bind else self.bind
        return frozenset({bind, "localhost", "127.0.0.1", "[::1]"})


class WebServer:
    """Serves the web UI and the API of a store, and the kept spans in the folder ``traces``.

    ``normalise_names``: whether the pipeline takes ids out of names, as ``PipelineSettings`` say.

    ``serve()`` runs on the caller's event loop, and returns after ``stop()`` once the requests in
    progress are finished. ``stop()`` may be called by any thread.
    """

    def __init__(
        self,
        store_url: str,
        settings: WebSettings | None = None,
        *,
        run: StatusReader | None = None,
        traces: Path | None = None,
        normalise_names: bool = True,
    ) -> None:
        self.settings = settings = settings or WebSettings()
        self._app = make_app(
            store_url,
            access=settings.access,
            run=run,
            hosts=settings.hosts,
            traces=traces,
            normalise_names=normalise_names,
        )
        self._http = HttpServer(
            self._app,
            settings,
            settings.port,
            _refuse,
            idle_s=settings.idle_s,
            drain_s=settings.drain_s,
            max_header_bytes=_MAX_HEADER_BYTES,
            lifespan=True,
            health=(HEALTH,),
        )

    @property
    def address(self) -> str:
        """``http://127.0.0.1:8080``, once the port is open; before that empty."""
        return self._http.address

    def stop(self) -> None:
        """Ask ``serve()`` to return."""
        self._app.state.pool.ending = True
        self._http.stop()

    async def serve(self, ready: Callable[[], None] | None = None) -> None:
        """Serve until stopped; ``ready`` is called once the port is open."""
        await self._http.serve(ready, self._end_streams)

    async def _end_streams(self) -> None:
        self._app.state.live.close()  # these responses would never end by themselves


def _refuse(refusal: ConnectionRefusal) -> bytes:
    if refusal.reason not in (RefusalReason.TOO_MANY_CONNECTIONS, RefusalReason.BAD_HTTP):
        return b""
    body = json.dumps({"error": refusal.message}).encode()
    return response_bytes(refusal.status, body, {"content-type": "application/json"})
