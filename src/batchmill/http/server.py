"""Runs an ASGI application on one port: start, serve, drain, stop."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import threading
from collections.abc import Awaitable, Callable, Collection, Iterator
from typing import Any

import uvicorn

from batchmill.http.connection import (
    Acceptor,
    Connection,
    ConnectionStats,
    Listener,
    PortListener,
)
from batchmill.http.refusal import ConnectionRefusal, RefusalReason, Refuse
from batchmill.http.settings import ServerSettings, host_port, is_loopback, listen
from batchmill.http.tls import Tls

log = logging.getLogger("batchmill.http")

_RESERVE = 8
"""Connections beyond the limit, for health checks."""


class HttpServer:
    """Serves an ASGI application with bounded connections, headers and times, until stopped.

    ``listen()`` opens the port. ``serve()`` runs on the caller's event loop and returns after
    ``stop()``, once the requests in progress are answered. ``stop()`` may be called by any thread,
    also before ``serve()``. A server serves once.
    """

    def __init__(
        self,
        app: Any,
        settings: ServerSettings,
        port: int,
        refuse: Refuse,
        *,
        port_setting: str = "port",
        idle_s: float = 60.0,
        drain_s: float = 5.0,
        max_header_bytes: int = 16 * 2**10,
        lifespan: bool = False,
        listener: Listener | None = None,
        health: Collection[str] = (),
    ) -> None:
        """``refuse`` answers and counts connections whose request does not reach ``app``.

        ``idle_s``: a connection without a request is closed after this. ``drain_s``: how long
        requests in progress may take after ``stop()``. ``lifespan``: whether ``app`` has one.
        ``listener``: where connections to ``port`` come from, if another process listens there.
        ``health``: paths of health checks. They are answered on a few connections beyond the limit,
        too, which serve nothing else.
        """
        self.connections = ConnectionStats()
        self._app = _HealthReserve(app, health, refuse, self.connections) if health else app
        self._reserve = _RESERVE if health else 0
        self._settings = settings
        self._wanted_port = port
        self._port_setting = port_setting
        self._refuse = refuse
        self._idle_s = idle_s
        self._drain_s = drain_s
        self._max_header_bytes = max_header_bytes
        self._lifespan = lifespan
        self._given_listener = listener
        self._listener: Listener | None = None
        self._port = 0
        self._stop = asyncio.Event()
        self._stopped = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._lock = threading.Lock()

    @property
    def port(self) -> int:
        """The port, once it is open; before that 0."""
        return self._port

    @property
    def address(self) -> str:
        """``http://127.0.0.1:8080``, once the port is open; before that empty."""
        if not self._port:
            return ""
        scheme = "https" if self._settings.access.tls else "http"
        return f"{scheme}://{host_port(self._settings.bind, self._port)}"

    @property
    def listening(self) -> bool:
        """Whether the port is open."""
        return self._listener is not None

    def listen(self) -> None:
        """Open the port and read the certificates; raises `ConfigError` naming the setting."""
        access, bind = self._settings.access, self._settings.bind
        self._tls = Tls(access)
        if access.token is not None and not access.tls and not is_loopback(bind):
            log.warning("the token is sent unencrypted: set tls_cert and tls_key as well")
        if self._given_listener is not None:
            self._listener, self._port = self._given_listener, self._wanted_port
            return
        port = listen(bind, self._wanted_port, self._port_setting)
        self._listener, self._port = PortListener(port), port.getsockname()[1]

    def close(self) -> None:
        """Close the port; for a server that listens and is not served."""
        if self._listener is not None:
            self._listener.close()
            self._listener = None

    def stop(self) -> None:
        """Ask ``serve()`` to drain and return."""
        with self._lock:
            self._stopped = True
            if self._loop is not None:
                self._loop.call_soon_threadsafe(self._stop.set)

    async def serve(
        self,
        ready: Callable[[], None] | None = None,
        drain: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        """Serve until stopped; ``ready`` is called once requests are answered.

        ``drain`` is awaited after the port is closed, while requests in progress are answered.
        """
        if not self.listening:
            self.listen()
        with self._lock:
            stopped = self._stopped
            self._loop = None if stopped else asyncio.get_running_loop()
        if stopped:
            self.close()
            if drain is not None:
                await drain()
            return
        try:
            await self._serve(ready, drain)
        finally:
            with self._lock:
                self._loop = None

    async def _serve(
        self,
        ready: Callable[[], None] | None,
        drain: Callable[[], Awaitable[None]] | None,
    ) -> None:
        uvicorn_server = _Uvicorn(self._uvicorn_config())

        def connect() -> Connection:
            return Connection(
                refuse=self._refuse,
                header_s=self._settings.header_s,
                request_s=self._settings.request_s,
                config=uvicorn_server.config,
                server_state=uvicorn_server.server_state,
            )

        assert self._listener is not None
        acceptor = Acceptor(
            self._listener,
            self._settings.max_connections,
            self._tls,
            min(self._settings.header_s, self._settings.request_s),
            connect,
            self._refuse,
            self.connections,
            self._reserve,
        )

        async def accept() -> None:
            await uvicorn_server.running.wait()
            if ready is not None:
                ready()
            await acceptor.run()

        answering = asyncio.create_task(uvicorn_server.serve(sockets=[]))
        accepting = asyncio.create_task(accept())
        stopping = asyncio.create_task(self._stop.wait())
        try:
            done, _ = await asyncio.wait(
                {answering, accepting, stopping}, return_when=asyncio.FIRST_COMPLETED
            )
            for task in done:
                task.result()  # a task that failed: its error is the server's
        finally:
            for task in (accepting, stopping):
                task.cancel()
            await asyncio.wait({accepting, stopping})
            self.close()
            acceptor.close()
            uvicorn_server.should_exit = True
            await asyncio.gather(answering, *([drain()] if drain is not None else []))

    def _uvicorn_config(self) -> uvicorn.Config:
        config = uvicorn.Config(
            self._app,
            http="h11",
            ws="none",
            lifespan="on" if self._lifespan else "off",
            interface="asgi3",
            log_config=None,
            access_log=False,
            server_header=False,
            h11_max_incomplete_event_size=self._max_header_bytes,
            timeout_keep_alive=max(1, round(self._idle_s)),
            timeout_graceful_shutdown=max(1, round(self._drain_s)),
            proxy_headers=False,
        )
        config.load()
        return config


class _HealthReserve:
    """Lets an application answer nothing but health checks on connections of the reserve."""

    def __init__(
        self, app: Any, health: Collection[str], refuse: Refuse, stats: ConnectionStats
    ) -> None:
        self._app = app
        self._health = frozenset(health)
        self._refuse = refuse
        self._stats = stats

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        own = scope["type"] != "http" or not scope["state"]["reserve"]
        if own or scope["path"] in self._health:
            await self._app(scope, receive, send)
            return
        self._stats.refused += 1
        full = "too many connections are open"
        response = self._refuse(ConnectionRefusal(RefusalReason.TOO_MANY_CONNECTIONS, 503, full))
        head, _, body = response.partition(b"\r\n\r\n")
        headers = [tuple(line.split(b": ", 1)) for line in head.split(b"\r\n")[1:]]
        await send({"type": "http.response.start", "status": 503, "headers": headers})
        await send({"type": "http.response.body", "body": body})


class _Uvicorn(uvicorn.Server):
    """uvicorn without sockets and signal handlers: those are the caller's."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.running = asyncio.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.running.set()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield
