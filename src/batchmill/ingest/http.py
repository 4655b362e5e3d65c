"""OTLP over HTTP, and the receiver's own pages: health, readiness, metrics."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Any, Protocol

from starlette.requests import ClientDisconnect, Request
from starlette.responses import PlainTextResponse, Response

from batchmill.http import Access, ConnectionRefusal, RefusalReason
from batchmill.ingest import responses
from batchmill.ingest.decode import JSON
from batchmill.ingest.intake import LOGS, METRICS, TRACES, Body, Intake, Take
from batchmill.ingest.responses import Refusal
from batchmill.telemetry.exposition import TextFormat

log = logging.getLogger("batchmill.ingest")

_SIGNALS = {
    "/v1/traces": TRACES,
    "/v1/logs": LOGS,
    "/v1/metrics": METRICS,
    "/v1development/profiles": "profiles",
}
"""The protocol's signals, by path."""
HEALTH = ("/healthz", "/readyz")
"""What is answered even if all connections are taken."""


class ReceiverView(Protocol):
    """The receiver, as its own pages show it."""

    def faults(self) -> Sequence[str]:
        """What hangs; empty if nothing does."""

    def readiness(self) -> str:
        """``DRAINING``, or the level."""

    def metrics(self) -> bytes:
        """The page for Prometheus."""


class HttpApp:
    """The ASGI application; answers every request, and raises nothing."""

    def __init__(self, intake: Intake, access: Access, served: ReceiverView) -> None:
        self._intake = intake
        self._stats = intake.stats
        self._access = access
        self._served = served
        self._pages: dict[str, tuple[str, Callable[[Request], Awaitable[Response]]]] = {
            "/healthz": ("GET", self._healthz),
            "/readyz": ("GET", self._readyz),
            "/metrics": ("GET", self._metrics),
        }
        for path, signal in _SIGNALS.items():
            take = intake.take(signal)
            if take is not None:
                self._pages[path] = ("POST", partial(self._export, take))

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        request = Request(scope, receive)
        content_type = responses.content_type_of(request.headers.get("content-type", ""))
        try:
            response = await self._respond(request)
        except ClientDisconnect:
            self._stats.answered("http", responses.DISCONNECTED)
            return
        except Refusal as refusal:
            response = self._refuse(refusal, content_type)
        except asyncio.CancelledError:
            # Only a receiver that stops cancels requests; uvicorn would answer 500.
            response = self._refuse(responses.draining(), content_type)
        except Exception:  # whatever it is, the sender gets a response
            log.exception("a request failed")
            response = self._refuse(responses.failed(), content_type)
        try:
            async with asyncio.timeout(self._intake.settings.request_s):
                await response(scope, receive, send)
        except TimeoutError:  # the sender does not read its responses
            scope["state"]["abort"]()

    async def _respond(self, request: Request) -> Response:
        path = request.scope["path"]
        if path in _SIGNALS and path not in self._pages:
            self._authenticate(request)
            raise responses.unsupported_signal(_SIGNALS[path])
        if path not in self._pages:
            raise responses.unknown_path(path)
        method, page = self._pages[path]
        if request.method != method and not (method == "GET" and request.method == "HEAD"):
            raise responses.wrong_method(request.method, method)
        return await page(request)

    def _authenticate(self, request: Request) -> None:
        if not self._access.allows(request.headers.get("authorization")):
            raise responses.unauthenticated()
        request.scope["state"]["authenticated"]()

    async def _export(self, take: Take, request: Request) -> Response:
        self._authenticate(request)
        header = request.headers.get("content-type", "")
        content_type = responses.content_type_of(header)
        if content_type is None:
            raise responses.wrong_content_type(header)
        with self._intake.admit(":".join(map(str, request.client or ()))) as body:
            await self._read(request, body)
            rejected = await take(body, request.headers.get("content-encoding", ""), content_type)
        self._stats.answered("http", "ok")
        content = responses.success(rejected, content_type)
        return Response(content, headers={"content-type": content_type})

    async def _read(self, request: Request, body: Body) -> None:
        limit = self._intake.limits.max_body_bytes
        announced = request.headers.get("content-length", "")
        if announced.isdecimal() and int(announced) > limit:
            raise responses.body_too_large(limit)
        async with self._intake.reading(body, request.scope["state"]["request_began"]):
            async for part in request.stream():
                if body.bytes + len(part) > limit:
                    raise responses.body_too_large(limit)
                body.add(part)

    async def _healthz(self, request: Request) -> Response:
        faults = self._served.faults()
        text = "".join(f"{fault}\n" for fault in faults) or "ok\n"
        return PlainTextResponse(text, status_code=503 if faults else 200)

    async def _readyz(self, request: Request) -> Response:
        state = await asyncio.to_thread(self._served.readiness)
        ready = state in ("NORMAL", "WARNING")
        return PlainTextResponse(f"{state}\n", status_code=200 if ready else 503)

    async def _metrics(self, request: Request) -> Response:
        self._authenticate(request)
        # On a thread: a process may have many queues, and other requests need not wait for them.
        body = await asyncio.to_thread(self._served.metrics)
        return Response(body, headers={"content-type": TextFormat.PROMETHEUS.value})

    def refuse_connection(self, refusal: ConnectionRefusal) -> bytes:
        """Count a connection whose request does not get here, and return the response to it."""
        match refusal.reason:
            case RefusalReason.TOO_MANY_CONNECTIONS:  # counted as a connection, not as a request
                return responses.raw_http(responses.busy(refusal.message))
            case RefusalReason.TOO_SLOW:
                settings = self._intake.settings
                response = responses.too_slow(min(settings.header_s, settings.request_s))
            case RefusalReason.BAD_HTTP:
                response = responses.bad_http(refusal.status, refusal.message)
            case _:
                return b""
        self._stats.answered("http", response.reason)
        return responses.raw_http(response)

    def _refuse(self, refusal: Refusal, content_type: str | None) -> Response:
        self._stats.answered("http", refusal.reason)
        content_type = content_type or JSON
        return Response(
            responses.http_body(refusal, content_type),
            status_code=refusal.status,
            headers=responses.http_headers(refusal, content_type),
        )
