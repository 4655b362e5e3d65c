"""Serves the page to Prometheus over HTTP: ``/metrics``, and ``/healthz`` for health checks.

It runs on a thread with an event loop of its own. A connection is closed after one response, so
that the limit of connections is also one of scrapes at a time.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import threading
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any, Protocol

from prometheus_client.core import CounterMetricFamily, Metric
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from batchmill.export.prometheus.page import (
    MetricsPage,
    PageSettings,
    StoreUnreadableError,
    TelemetryPage,
)
from batchmill.export.prometheus.series import RESERVED
from batchmill.http import (
    ConnectionRefusal,
    HttpServer,
    RefusalReason,
    ServerSettings,
    response_bytes,
)
from batchmill.lifecycle import Closing
from batchmill.store import Store
from batchmill.telemetry.exposition import TextFormat

log = logging.getLogger("batchmill.export")

PORT = 9464
"""Where exporters of OpenTelemetry metrics are scraped, by convention."""

_DRAIN_S = 1.0
_RETRY = {"retry-after": "5"}
_HEALTH = "/healthz"


class Outcome(StrEnum):
    """What became of a connection; it is counted under this."""

    OK = "ok"
    STORE_UNREADABLE = "store unreadable"
    UNAUTHORIZED = "unauthorized"
    UNKNOWN_PATH = "unknown path"
    HEALTHZ = "healthz"
    TOO_MANY_CONNECTIONS = "too many connections"
    CUT_OFF = "cut off"
    TLS_FAILED = "TLS failed"
    FAILED = "failed"


_REFUSED = {
    RefusalReason.TOO_MANY_CONNECTIONS: Outcome.TOO_MANY_CONNECTIONS,
    RefusalReason.TOO_SLOW: Outcome.CUT_OFF,
    RefusalReason.NO_REQUEST: Outcome.CUT_OFF,
    RefusalReason.TLS_FAILED: Outcome.TLS_FAILED,
}


@dataclass(frozen=True, slots=True)
class _Answer:
    outcome: str
    response: Response


@dataclass(frozen=True, kw_only=True)
class PrometheusSettings(ServerSettings):
    """Where the page is served, to whom, and to how many at a time."""

    port: int = PORT
    """0: any free one."""
    page: PageSettings = field(default_factory=PageSettings)
    max_connections: int = 32
    request_s: float = 10.0
    """From a connection's start to the last byte of its response; a slower scraper is cut off."""


class Page(Protocol):
    """What a server serves."""

    def body(self, text_format: TextFormat, *, gzipped: bool, timeout_s: float) -> bytes:
        """The page; raises :class:`StoreUnreadableError`, also after ``timeout_s``."""
        ...

    def close(self) -> None:
        """Release what it reads from."""
        ...


class PageServer(Closing):
    """Serves a page to Prometheus, on threads of its own, until it is closed."""

    def __init__(self, page: Page, settings: PrometheusSettings) -> None:
        self.settings = settings
        self._answers: Counter[str] = Counter()
        self._lock = threading.Lock()
        self._page = page
        # A thread for each connection: they wait together while one of them reads the store.
        self._readers = ThreadPoolExecutor(settings.max_connections, "batchmill-prometheus-page")
        self._http = HttpServer(
            self._serve,
            settings,
            settings.port,
            self._refuse,
            drain_s=_DRAIN_S,
            health=(_HEALTH,),
        )
        self._http.listen()
        self._thread = threading.Thread(
            target=lambda: asyncio.run(self._http.serve()), name="batchmill-prometheus"
        )
        self._thread.start()

    @property
    def port(self) -> int:
        """Where it listens."""
        return self._http.port

    @property
    def address(self) -> str:
        """The URL of the page."""
        return f"{self._http.address}/metrics"

    def answers(self) -> dict[str, int]:
        """Connections by outcome: ``ok``, or why not."""
        with self._lock:
            return dict(self._answers)

    def close(self) -> None:
        """Stop serving, and close the store."""
        self._http.stop()
        self._thread.join()
        self._readers.shutdown()
        self._page.close()

    async def _serve(self, scope: Any, receive: Any, send: Any) -> None:
        """The ASGI application."""
        try:
            deadline = scope["state"]["request_began"] + self.settings.request_s
            async with asyncio.timeout_at(deadline):
                answer = await self._answer(Request(scope))
                answer.response.headers["connection"] = "close"
                await answer.response(scope, receive, send)
            self._count(answer.outcome)
        except (TimeoutError, asyncio.CancelledError):  # too slow, or the server stops
            self._count(Outcome.CUT_OFF)
            scope["state"]["abort"]()

    async def _answer(self, request: Request) -> _Answer:
        if request.method not in ("GET", "HEAD"):
            text = f"{request.method} is not supported: use GET\n"
            return _Answer("HTTP 501", PlainTextResponse(text, 501))
        path = request.scope["path"]
        if path == _HEALTH:
            return _Answer(Outcome.HEALTHZ, PlainTextResponse("ok\n"))
        if path != "/metrics":
            text = "there is /metrics, and /healthz\n"
            return _Answer(Outcome.UNKNOWN_PATH, PlainTextResponse(text, 404))
        if not self.settings.access.allows(request.headers.get("authorization")):
            text = "a bearer token is required: send the header 'Authorization: Bearer <token>'\n"
            headers = {"www-authenticate": "Bearer"}
            return _Answer(Outcome.UNAUTHORIZED, PlainTextResponse(text, 401, headers))
        request.scope["state"]["authenticated"]()
        form = TextFormat.accepted(request.headers.get("accept", ""))
        gzipped = "gzip" in request.headers.get("accept-encoding", "").lower()
        read = functools.partial(
            self._page.body, form, gzipped=gzipped, timeout_s=self.settings.request_s / 2
        )
        try:
            body = await asyncio.get_running_loop().run_in_executor(self._readers, read)
        except StoreUnreadableError as error:
            encoded = f"{error}\n".encode("utf-8", "replace")
            return _Answer(Outcome.STORE_UNREADABLE, PlainTextResponse(encoded, 503, _RETRY))
        except Exception:  # whatever it is, the scraper gets a response
            log.exception("a scrape failed")
            text = "the scrape failed: the exporter's log says why\n"
            return _Answer(Outcome.FAILED, PlainTextResponse(text, 500))
        headers = {"content-type": form.value, "vary": "Accept, Accept-Encoding"}
        if gzipped:
            headers["content-encoding"] = "gzip"
        return _Answer(Outcome.OK, Response(body, headers=headers))

    def _refuse(self, refusal: ConnectionRefusal) -> bytes:
        self._count(_REFUSED.get(refusal.reason, f"HTTP {refusal.status}"))
        if refusal.reason not in (RefusalReason.TOO_MANY_CONNECTIONS, RefusalReason.BAD_HTTP):
            return b""
        headers = {"content-type": "text/plain; charset=utf-8"}
        if refusal.status == 503:
            headers |= _RETRY
        return response_bytes(refusal.status, f"{refusal.message}\n".encode(), headers)

    def _count(self, outcome: str) -> None:
        with self._lock:
            self._answers[outcome] += 1


class PrometheusServer(PageServer):
    """Serves the newest complete minute of a store, on threads of its own, until it is closed.

    ``open_store`` is called for the first scrape, and again after the store could not be read;
    until it can be, scrapers are answered 503 with the reason. The queues of this process are on
    the page, too. With the folder of kept spans, ``traces``, services have exemplars.

    >>> metrics = lambda: open_store("sqlite:///metrics.db", create=False)
    >>> with PrometheusServer(metrics) as server:  # doctest: +SKIP
    ...     print(server.address)
    """

    _page: MetricsPage

    def __init__(
        self,
        open_store: Callable[[], Store],
        settings: PrometheusSettings | None = None,
        *,
        traces: Path | None = None,
    ) -> None:
        settings = settings or PrometheusSettings()
        spans = None
        if traces is not None:
            from batchmill.traces import SpanReader

            spans = SpanReader(traces)
        page = MetricsPage(open_store, settings.page, server_metrics=self._metrics, spans=spans)
        super().__init__(page, settings)

    def _metrics(self) -> list[Metric]:
        scrapes = CounterMetricFamily(
            f"{RESERVED[0]}scrapes",
            "Connections answered, by outcome, up to when this page was made.",
            labels=["outcome"],
        )
        for outcome, count in sorted(self.answers().items()):
            scrapes.add_metric([outcome], count)
        return [scrapes]


class TelemetryServer(PageServer):
    """Serves the queues, batchers, thresholds and flows of this process, until it is closed."""

    def __init__(self, settings: PrometheusSettings | None = None) -> None:
        super().__init__(TelemetryPage(), settings or PrometheusSettings())
