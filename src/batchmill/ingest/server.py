"""Both receivers in one process, on one event loop: start, serve, drain.

The order of the end: accept nothing new, answer what is under way, then close the spool. So
whatever was acknowledged is in a segment, and whatever is in a segment was meant to be.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import uvicorn

from batchmill.errors import ConfigError
from batchmill.http import is_loopback
from batchmill.ingest.connection import Connection, Door
from batchmill.ingest.decode.limits import Limits
from batchmill.ingest.figures import Figures
from batchmill.ingest.grpc import build_server
from batchmill.ingest.http import Pages
from batchmill.ingest.intake import Intake, Onward, SpanSink
from batchmill.ingest.settings import ReceiverSettings
from batchmill.ingest.sink_figures import sink_queues, thresholds
from batchmill.telemetry import ProcessStats

log = logging.getLogger("batchmill.ingest")

_BACKLOG = 512
_STATUS_S = 1.0
_OF_A_SPOOL = ("unread_bytes", "unread_segments")
"""What is known where the pipeline removes what it has read; not of a topic."""


class Receiver:
    """Takes spans over HTTP and gRPC into a spool, or a topic, until told to stop.

    ``serve()`` runs on the caller's event loop and returns after draining; the spool is the
    caller's, and is closed by them after that. ``stop()`` may be called from any thread.
    """

    def __init__(
        self,
        spool: SpanSink,
        settings: ReceiverSettings | None = None,
        *,
        limits: Limits | None = None,
        status_path: Path | None = None,
        onward: Mapping[str, Onward] | None = None,
    ) -> None:
        """``onward``: who gets ``traces`` once they are durable, and ``logs``, which nobody stores.

        They are closed by the caller, after the spool.
        """
        self.settings = settings or ReceiverSettings()
        self.figures = Figures()
        self.http_address = ""
        self.grpc_address = ""
        self._spool = spool
        self._limits = limits or Limits()
        self._status_path = status_path
        self._onward = onward or {}
        self._started = time.time()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._asked = asyncio.Event()
        self._intake: Intake | None = None
        self._status_failed = False
        self._process = ProcessStats()

    def stop(self) -> None:
        """Ask for the end; ``serve()`` returns after draining."""
        loop = self._loop
        if loop is not None and not loop.is_closed():
            loop.call_soon_threadsafe(self._asked.set)
        else:
            self._asked.set()

    async def serve(self, ready: Callable[[], None] | None = None) -> None:
        """Take spans until told to stop; ``ready`` is called once both ports listen."""
        self._loop = asyncio.get_running_loop()
        settings = self.settings
        tls = settings.access.ssl_context()
        if settings.access.token is not None and tls is None and not is_loopback(settings.bind):
            log.warning("the token travels in the clear: set tls_cert and tls_key as well")
        intake = self._intake = Intake(
            self._spool, self._limits, settings, self.figures, self._onward
        )
        with contextlib.closing(intake), _listen(settings) as listening:
            grpc_server, grpc_port = build_server(intake, settings)
            self.http_address = _address(settings.bind, listening.getsockname()[1])
            self.grpc_address = _address(settings.bind, grpc_port)
            web = self._web(intake)

            def connection() -> Connection:
                return Connection(
                    figures=self.figures,
                    request_s=settings.request_s,
                    config=web.config,
                    server_state=web.server_state,
                    app_state={},
                )

            door = Door(listening, settings.max_connections, tls, connection, self.figures)
            await grpc_server.start()
            serving = asyncio.create_task(web.serve(sockets=[]))
            accepting = asyncio.create_task(door.run())
            reporting = asyncio.create_task(self._report())
            try:
                if ready is not None:
                    ready()
                await self._until_asked(serving, accepting, reporting)
            finally:
                log.info("draining")
                await _ended(accepting)
                listening.close()
                door.close()
                intake.drain()
                web.should_exit = True
                await asyncio.gather(serving, grpc_server.stop(settings.drain_s))
                await _ended(reporting)
        await asyncio.to_thread(self._write_status)

    def status(self) -> dict[str, Any]:
        """The receiver at one moment, as the status file has it."""
        intake, spool = self._intake, self._spool.stats()
        ends = intake is not None and intake.draining
        return {
            "name": "ingest",
            "pid": os.getpid(),
            "started": self._started,
            "state": "draining" if ends else "running",
            "http": self.http_address,
            "grpc": self.grpc_address,
            **self.figures.snapshot(),
            "requests_under_way": 0 if intake is None else intake.requests,
            "bytes_under_way": 0 if intake is None else intake.bytes,
            "queue_rows": spool.queue_rows,
            **{name: getattr(spool, name) for name in _OF_A_SPOOL if hasattr(spool, name)},
            "level": spool.level.name,
            "forwarded": {name: dict(each.figures()) for name, each in self._onward.items()},
            "thresholds": thresholds(self._spool.judge(), self._spool.measures(), spool),
        }

    def _told(self) -> dict[str, Any]:
        """The status with all queues of this process: for the file, which one thread writes."""
        status, stats = self.status(), self._spool.stats()
        return status | {
            "queues": sink_queues(self._process.queues(), self._spool.measures(), stats)
        }

    def _web(self, intake: Intake) -> uvicorn.Server:
        config = uvicorn.Config(
            Pages(intake, self.settings.access, self.status),
            http="h11",
            ws="none",
            lifespan="off",
            interface="asgi3",
            log_config=None,
            access_log=False,
            server_header=False,
            h11_max_incomplete_event_size=self.settings.max_header_bytes,
            timeout_keep_alive=max(1, round(self.settings.idle_s)),
            timeout_graceful_shutdown=max(1, round(self.settings.drain_s)),
            proxy_headers=False,
        )
        config.load()
        return _Web(config)

    async def _until_asked(self, *tasks: asyncio.Task[None]) -> None:
        asked = asyncio.create_task(self._asked.wait())
        try:
            done, _ = await asyncio.wait({asked, *tasks}, return_when=asyncio.FIRST_COMPLETED)
            for each in done:
                each.result()  # a task that failed: its error is the receiver's
        finally:
            await _ended(asked)

    async def _report(self) -> None:
        while True:
            await asyncio.to_thread(self._write_status)
            await asyncio.sleep(_STATUS_S)

    def _write_status(self) -> None:
        path = self._status_path
        if path is None:
            return
        new = path.with_name(f".{path.name}.{os.getpid()}.tmp")
        try:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            new.touch(mode=0o600)
            new.write_text(json.dumps(self._told()))
            new.replace(path)
            self._status_failed = False
        except OSError as error:  # a full disk must not end the receiver
            if not self._status_failed:
                log.warning("the status cannot be written: %s", error)
            self._status_failed = True


class _Web(uvicorn.Server):
    """uvicorn without its signal handlers: the receiver's owner has its own."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


@contextlib.contextmanager
def _listen(settings: ReceiverSettings) -> Iterator[socket.socket]:
    family = socket.AF_INET6 if ":" in settings.bind else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as listening:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listening.bind((settings.bind, settings.http_port))
            listening.listen(_BACKLOG)
        except OSError as error:
            raise ConfigError(
                "http_port", settings.http_port, f"a free port of {settings.bind} ({error})"
            ) from error
        listening.setblocking(False)
        yield listening


def _address(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


async def _ended(task: asyncio.Task[Any]) -> None:
    task.cancel()
    await asyncio.wait({task})
