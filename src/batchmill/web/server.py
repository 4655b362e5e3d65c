"""Serves the application over HTTP until told to stop."""

from __future__ import annotations

import contextlib
import logging
import socket
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import uvicorn

from batchmill.errors import ConfigError
from batchmill.ingest import Access
from batchmill.web.app import make_app
from batchmill.web.connection import Connection

log = logging.getLogger("batchmill.web")

PORT = 8080
_BACKLOG = 128
_MAX_HEADER_BYTES = 64 * 2**10


@dataclass(frozen=True, kw_only=True)
class WebSettings:
    """Where the dashboard is served, and to whom."""

    bind: str = "127.0.0.1"
    port: int = PORT
    """0: any free one."""
    access: Access = field(default_factory=Access)
    insecure: bool = False
    """Listen beyond this machine without asking anybody for anything."""
    max_connections: int = 500
    """One more is answered 503."""
    request_s: float = 30.0
    """From a request's first byte to its last. Whoever is slower is cut off."""
    idle_s: float = 60.0
    """A connection without a request is closed after this."""
    drain_s: float = 5.0
    """How long requests under way may take once the server is told to stop."""

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65535:
            raise ConfigError("port", self.port, "a port, 0 to 65535")
        for name in ("max_connections", "request_s", "idle_s", "drain_s"):
            if not 0 < getattr(self, name) < float("inf"):
                raise ConfigError(name, getattr(self, name), "above 0")
        self.access.check_bind(self.bind, self.insecure)

    @property
    def hosts(self) -> frozenset[str]:
        """By which names it may be asked; empty: by any, since askers show something, or all may.

        What is not ``insecure`` and asks nobody for anything listens on this machine alone.
        """
        if self.insecure or self.access.token is not None or self.access.client_ca is not None:
            return frozenset()
        bind = f"[{self.bind}]" if ":" in self.bind else self.bind
        return frozenset({bind, "localhost", "127.0.0.1", "[::1]"})


class WebServer:
    """Serves the pages and the API of a store.

    ``serve()`` runs on the caller's event loop, and returns once it was told to stop and what was
    under way is answered. ``stop()`` may be called from any thread.
    """

    def __init__(
        self,
        store_url: str,
        settings: WebSettings | None = None,
        *,
        pipeline: Callable[[], Mapping[str, Any]] | None = None,
    ) -> None:
        self.settings = settings or WebSettings()
        self.address = ""
        """Where it is served, once it is: ``http://127.0.0.1:8080``."""
        self._app = make_app(
            store_url,
            access=self.settings.access,
            pipeline=pipeline,
            hosts=self.settings.hosts,
        )
        self._asked = False
        self._web: uvicorn.Server | None = None

    def stop(self) -> None:
        """Ask for the end."""
        self._asked = True
        self._app.state.desk.ending = True
        if self._web is not None:
            self._web.should_exit = True

    async def serve(self, ready: Callable[[], None] | None = None) -> None:
        """Serve until told to stop; ``ready`` is called once the port listens."""
        settings = self.settings
        if settings.access.token is not None and not settings.access.tls and settings.insecure:
            log.warning("the token travels in the clear: set tls_cert and tls_key as well")
        tls = settings.access.ssl_context()
        with _listen(settings) as listening:
            self.address = _address(settings, listening.getsockname()[1])
            config = uvicorn.Config(
                self._app,
                http=type("Bounded", (Connection,), {"request_s": settings.request_s}),
                ws="none",
                lifespan="on",
                interface="asgi3",
                log_config=None,
                access_log=False,
                server_header=False,
                h11_max_incomplete_event_size=_MAX_HEADER_BYTES,
                limit_concurrency=settings.max_connections,
                timeout_keep_alive=max(1, round(settings.idle_s)),
                timeout_graceful_shutdown=max(1, round(settings.drain_s)),
                proxy_headers=False,
            )
            config.load()
            config.ssl = tls
            self._web = _Web(config, ready, self._app.state.live.close)
            if self._asked:
                return
            await self._web.serve(sockets=[listening])


class _Web(uvicorn.Server):
    """uvicorn without its signal handlers: the server's owner has its own."""

    def __init__(
        self,
        config: uvicorn.Config,
        ready: Callable[[], None] | None,
        end_streams: Callable[[], None],
    ) -> None:
        super().__init__(config)
        self._ready = ready
        self._end_streams = end_streams

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started and self._ready is not None:
            self._ready()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._end_streams()  # they would never end by themselves
        await super().shutdown(sockets)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


@contextlib.contextmanager
def _listen(settings: WebSettings) -> Iterator[socket.socket]:
    family = socket.AF_INET6 if ":" in settings.bind else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as listening:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listening.bind((settings.bind, settings.port))
            listening.listen(_BACKLOG)
        except OSError as error:
            raise ConfigError(
                "port", settings.port, f"a free port of {settings.bind} ({error})"
            ) from error
        yield listening


def _address(settings: WebSettings, port: int) -> str:
    host = f"[{settings.bind}]" if ":" in settings.bind else settings.bind
    return f"{'https' if settings.access.tls else 'http'}://{host}:{port}"
