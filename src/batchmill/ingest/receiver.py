"""The receiver: OTLP over HTTP and gRPC in one process, on one event loop.

It may be one of several processes that share ports, limits and status; see `ParentLink`.

When it stops, it accepts nothing new, answers the requests in progress, and only then returns, so
that the caller can close the sink: all acknowledged spans are durable.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from batchmill.files import write_json
from batchmill.http import HttpServer, host_port
from batchmill.ingest.decode import Limits, decoder_in_use
from batchmill.ingest.grpc import build_server
from batchmill.ingest.http import HEALTH, HttpApp
from batchmill.ingest.intake import Forwarder, Intake, ReceiverSettings
from batchmill.ingest.stats import ReceiverStats, prometheus, thresholds, with_sink
from batchmill.ingest.worker import ParentLink
from batchmill.process_stats import ProcessStats
from batchmill.spool import Level, SpanSink
from batchmill.telemetry.exposition import (
    render_telemetry,
    render_telemetry_of,
    telemetry_samples,
)

log = logging.getLogger("batchmill.ingest")

_STATUS_S = 1.0


class Receiver:
    """Takes spans over HTTP and gRPC into a spool, or a topic, until stopped.

    ``serve()`` runs on the caller's event loop and returns after draining. The sink is the
    caller's, who closes it after that. ``stop()`` may be called by any thread.
    """

    def __init__(
        self,
        spool: SpanSink,
        settings: ReceiverSettings | None = None,
        *,
        limits: Limits | None = None,
        status_path: Path | None = None,
        forwarders: Mapping[str, Forwarder] | None = None,
        parent: ParentLink | None = None,
    ) -> None:
        """``forwarders`` get copies of requests, by signal: ``traces`` and ``logs``.

        Traces are forwarded once they are durable; logs are forwarded and stored nowhere. The
        caller closes the forwarders, after the sink. ``status_path`` is written each second.
        With ``parent`` this is one of several processes, and reports there instead.
        """
        self.settings = settings = settings or ReceiverSettings()
        self.stats = ReceiverStats()
        self.http_address = ""
        self.grpc_address = ""
        self._sink = spool
        self._status_path = status_path
        self._forwarders = forwarders or {}
        self._started = time.time()
        self._intake = Intake(spool, limits or Limits(), settings, self.stats, self._forwarders)
        self._parent = parent
        app = HttpApp(self._intake, settings.access, self)
        self._grpc = build_server(
            self._intake, settings, None if parent is None else parent.grpc_connections
        )
        self._http = HttpServer(
            app,
            settings,
            settings.http_port,
            app.refuse_connection,
            port_setting="http_port",
            idle_s=settings.idle_s,
            drain_s=settings.drain_s,
            max_header_bytes=settings.max_header_bytes,
            listener=None if parent is None else parent.http_connections,
            health=HEALTH,
        )
        self._status_failed = False
        self._process = ProcessStats()

    def stop(self) -> None:
        """Ask ``serve()`` to drain and return."""
        self._http.stop()

    async def serve(self, ready: Callable[[], None] | None = None) -> None:
        """Take spans until stopped; ``ready`` is called once both ports are open."""
        self._decoder()  # one that cannot be had is an error now, not with the first request
        bind, intake = self.settings.bind, self._intake
        http, grpc = self._http, self._grpc
        with contextlib.closing(intake), contextlib.closing(http), contextlib.closing(grpc):
            http.listen()
            grpc.listen()
            self.http_address = host_port(bind, http.port)
            self.grpc_address = host_port(bind, grpc.port)
            grpc.start()
            reporting = asyncio.create_task(self._report())
            reporting.add_done_callback(lambda _: self.stop())  # a bug there ends the receiver

            async def drain() -> None:
                log.info("draining")
                intake.drain()
                await grpc.stop(self.settings.drain_s)

            try:
                await http.serve(ready, drain)
            finally:
                reporting.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await reporting
        await asyncio.to_thread(self.report)

    def faults(self) -> Sequence[str]:
        """What hangs of the processes that are the receiver; a process does not see itself hang."""
        return self._parent.faults() if self._parent is not None else ()

    def readiness(self) -> str:
        """``DRAINING``, or the level: the highest of all processes."""
        if self._intake.draining:
            return "DRAINING"
        level = self._sink.level()
        if self._parent is not None:
            level = max(level, Level[self._parent.total().get("level", level.name)])
        return level.name

    def metrics(self) -> bytes:
        """The page for Prometheus, of all processes; takes a moment."""
        total = self._parent.total() if self._parent is not None else {}
        if not total:
            return prometheus(self.status()) + render_telemetry()
        return prometheus(total) + render_telemetry_of("process", total["telemetry"])

    def status(self) -> dict[str, Any]:
        """The receiver's state and counters, as in the status file."""
        sink = self._sink.stats()
        return {
            "name": "ingest",
            "pid": os.getpid(),
            "started": self._started,
            "state": "draining" if self._intake.draining else "running",
            "http": self.http_address,
            "grpc": self.grpc_address,
            "decoder": self._decoder(),
            **self.stats.snapshot(),
            "connections": asdict(self._http.connections),
            "grpc_connections": asdict(self._grpc.connections),
            "requests_under_way": self._intake.requests,
            "bytes_under_way": self._intake.bytes,
            "queue_rows": sink.queue_rows,
            **sink.unread(),
            "level": sink.level.name,
            "forwarded": {
                signal: dict(forwarder.stats()) for signal, forwarder in self._forwarders.items()
            },
            "thresholds": thresholds(self._sink.pressure(), self._sink.measures(), sink),
        }

    def _decoder(self) -> str:
        return decoder_in_use() if self._sink.takes_packed else "python"

    async def _report(self) -> None:
        while True:
            await asyncio.to_thread(self.report)
            await asyncio.sleep(_STATUS_S)

    def report(self) -> None:
        """Write the status file, or tell the parent; done each second while it serves."""
        path = self._status_path
        if path is None and self._parent is None:
            return
        measures = self._sink.measures()
        status = self.status() | with_sink(self._process.report(), measures, self._sink.stats())
        if self._parent is not None:
            self._parent.report(status | {"telemetry": telemetry_samples()})
            return
        assert path is not None
        try:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            write_json(path, status)
            self._status_failed = False
        except OSError as error:  # a full disk must not end the receiver
            if not self._status_failed:
                log.warning("cannot write the status file: %s", error)
            self._status_failed = True
