"""Serves the page to Prometheus over HTTP: ``/metrics``, and ``/healthz`` for whoever watches us.

One thread a connection and one request a connection, so that connections, threads and the time
each of them may take have one bound. Whoever comes when all are taken is answered 503.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import socketserver
import ssl
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from prometheus_client.core import CounterMetricFamily, Metric

from batchmill.closing import Closing
from batchmill.errors import ConfigError
from batchmill.export.prometheus.handler import Handler
from batchmill.export.prometheus.page import MetricsPage, PageSettings
from batchmill.export.prometheus.series import RESERVED
from batchmill.ingest import Access
from batchmill.store import Store
from batchmill.telemetry.exposition import TextFormat

log = logging.getLogger("batchmill.export")

PORT = 9464
"""Where exporters of OpenTelemetry metrics are scraped, by convention."""

_BACKLOG = 128
_LOOK_S = 0.2
_FULL = (
    b"HTTP/1.1 503 Service Unavailable\r\nContent-Type: text/plain; charset=utf-8\r\n"
    b"Retry-After: 5\r\nContent-Length: 33\r\nConnection: close\r\n\r\n"
    b"too many scrapes are under way.\r\n"
)


@dataclass(frozen=True, kw_only=True)
class PrometheusSettings:
    """Where the page is served, to whom, and to how many at a time."""

    bind: str = "127.0.0.1"
    port: int = PORT
    """0: any free one."""
    access: Access = field(default_factory=Access)
    insecure: bool = False
    """Listen beyond this machine without asking scrapers for anything."""
    page: PageSettings = field(default_factory=PageSettings)
    max_connections: int = 32
    """One more is answered 503."""
    request_s: float = 10.0
    """From a connection's start to the last byte of its answer. Whoever is slower is cut off."""

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65535:
            raise ConfigError("port", self.port, "a port, 0 to 65535")
        for name in ("max_connections", "request_s"):
            if not 0 < getattr(self, name) < float("inf"):
                raise ConfigError(name, getattr(self, name), "above 0")
        self.access.check_bind(self.bind, self.insecure)


class PrometheusServer(Closing):
    """Serves the newest complete minute of a store, on threads of its own, until it is closed.

    ``open_store`` is called when the first page is asked for, and again after the store could not
    be read; meanwhile scrapers are answered 503 with the reason.

    >>> metrics = lambda: open_store("sqlite:///metrics.db", create=False)
    >>> with PrometheusServer(metrics) as server:  # doctest: +SKIP
    ...     print(server.address)
    """

    def __init__(
        self, open_store: Callable[[], Store], settings: PrometheusSettings | None = None
    ) -> None:
        self.settings = settings or PrometheusSettings()
        self._answers: Counter[str] = Counter()
        self._counting = threading.Lock()
        self._page = MetricsPage(open_store, self.settings.page, server_metrics=self._metrics)
        self._server = Server(self)
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=(_LOOK_S,), name="batchmill-prometheus"
        )
        self._thread.start()

    @property
    def port(self) -> int:
        """Where it listens."""
        port: int = self._server.server_address[1]
        return port

    @property
    def address(self) -> str:
        """Of the page."""
        host = self.settings.bind
        scheme = "https" if self.settings.access.tls else "http"
        return f"{scheme}://{f'[{host}]' if ':' in host else host}:{self.port}/metrics"

    def answers(self) -> dict[str, int]:
        """How many connections were answered, by what: ``ok``, or why not."""
        with self._counting:
            return dict(self._answers)

    def close(self) -> None:
        """Take no more scrapes, cut off those under way, and let go of the store."""
        if self._thread.is_alive():
            self._server.shutdown()
            self._thread.join()
        self._server.end()
        self._page.close()

    def count(self, outcome: str) -> None:
        """A connection has its answer."""
        with self._counting:
            self._answers[outcome] += 1

    def page(self, form: TextFormat, gzipped: bool) -> bytes:
        """The page, in time for the scraper to get it."""
        return self._page.body(form, gzipped=gzipped, timeout_s=self.settings.request_s / 2)

    def _metrics(self) -> list[Metric]:
        scrapes = CounterMetricFamily(
            f"{RESERVED[0]}scrapes",
            "Connections answered, by outcome, up to when this page was made.",
            labels=["outcome"],
        )
        for outcome, count in sorted(self.answers().items()):
            scrapes.add_metric([outcome], count)
        return [scrapes]


class Server(socketserver.ThreadingMixIn, socketserver.TCPServer):
    """Accepts connections, no more than so many at a time, and ends those that take too long."""

    allow_reuse_address = True
    request_queue_size = _BACKLOG
    daemon_threads = True  # none outlives request_s anyway, and end() waits for them

    def __init__(self, owner: PrometheusServer) -> None:
        self.owner = owner
        settings = owner.settings
        self._tls = settings.access.ssl_context()
        self._open: dict[socket.socket, tuple[float, socket.socket]] = {}
        self._changed = threading.Condition()
        self.address_family = socket.AF_INET6 if ":" in settings.bind else socket.AF_INET
        try:
            super().__init__((settings.bind, settings.port), Handler)
        except OSError as error:
            raise ConfigError(
                "port", settings.port, f"a free port of {settings.bind} ({error})"
            ) from error

    def process_request(self, request: Any, client_address: Any) -> None:
        deadline = time.monotonic() + self.owner.settings.request_s
        with self._changed:
            full = len(self._open) >= self.owner.settings.max_connections
            if not full:
                self._open[request] = (deadline, request)
        if full:
            self.owner.count("too many connections")
            if self._tls is None:
                request.setblocking(False)  # its buffer is empty: this fits, or nobody is there
                with contextlib.suppress(OSError):
                    request.send(_FULL)
            self.shutdown_request(request)
        else:
            super().process_request(request, client_address)

    def finish_request(self, request: Any, client_address: Any) -> None:
        left = self._left(request)
        request.settimeout(left)
        with contextlib.ExitStack() as stack:
            talking = request
            if self._tls is not None:
                try:
                    talking = self._tls.wrap_socket(request, server_side=True)
                except (OSError, ssl.SSLError):
                    self.owner.count("TLS failed")
                    return
                stack.callback(talking.close)
                with self._changed:
                    deadline, _ = self._open[request]
                    self._open[request] = (deadline, talking)
            super().finish_request(talking, client_address)

    def _left(self, request: socket.socket) -> float:
        with self._changed:
            deadline, _ = self._open[request]
        return max(0.001, deadline - time.monotonic())

    def shutdown_request(self, request: Any) -> None:
        with self._changed:
            self._open.pop(request, None)
            self._changed.notify_all()
        super().shutdown_request(request)

    def service_actions(self) -> None:
        """Called every so often: cut off whoever is too slow."""
        now = time.monotonic()
        with self._changed:
            slow = [each for deadline, each in self._open.values() if deadline < now]
        for each in slow:
            _cut(each)

    def end(self) -> None:
        """Close the port, and wait for the connections under way, which are cut off."""
        self.server_close()
        with self._changed:
            for _, each in self._open.values():
                _cut(each)
            self._changed.wait_for(lambda: not self._open, self.owner.settings.request_s)

    def handle_error(self, request: Any, client_address: Any) -> None:
        log.exception("a scrape failed")
        self.owner.count("failed")


def _cut(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):  # it is closed already
        connection.shutdown(socket.SHUT_RDWR)
