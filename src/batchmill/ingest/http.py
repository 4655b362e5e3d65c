"""OTLP over HTTP, and the pages about the receiver itself."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from starlette.requests import ClientDisconnect, Request
from starlette.responses import PlainTextResponse, Response

from batchmill.http import Access
from batchmill.ingest import answers
from batchmill.ingest.answers import Refusal, Refused
from batchmill.ingest.figures import prometheus
from batchmill.ingest.intake import LOGS, Hold, Intake
from batchmill.telemetry.exposition import TextFormat

log = logging.getLogger("batchmill.ingest")


class Pages:
    """The ASGI application: it answers everything itself, and lets no error out."""

    def __init__(
        self, intake: Intake, access: Access, status: Callable[[], Mapping[str, Any]]
    ) -> None:
        self._intake = intake
        self._access = access
        self._status = status
        self._pages: dict[str, tuple[str, Callable[[Request], Awaitable[Response]]]] = {
            "/v1/traces": ("POST", self._traces),
            "/healthz": ("GET", self._healthz),
            "/readyz": ("GET", self._readyz),
            "/metrics": ("GET", self._metrics),
        }
        if LOGS in intake.onward:
            self._pages["/v1/logs"] = ("POST", self._logs)

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        request = Request(scope, receive)
        content_type = answers.content_type_of(request.headers.get("content-type", ""))
        try:
            response = await self._answer(request)
        except ClientDisconnect:
            self._intake.figures.answered("http", "disconnected")
            return
        except Refused as refused:
            response = self._refusal(refused.refusal, content_type)
        except asyncio.CancelledError:
            # Only a receiver that ends cancels requests, and then uvicorn would answer 500.
            response = self._refusal(answers.draining(), content_type)
        except Exception:  # whatever it is, the sender gets an answer, and the next one too
            log.exception("a request failed")
            response = self._refusal(answers.failed(), content_type)
        try:
            async with asyncio.timeout(self._intake.settings.request_s):
                await response(scope, receive, send)
        except TimeoutError:  # the sender does not read its answers
            scope["state"]["abort"]()

    async def _answer(self, request: Request) -> Response:
        path = request.scope["path"]
        if path in answers.SIGNALS and path not in self._pages:
            if not self._access.allows(request.headers.get("authorization")):
                raise Refused(answers.unauthenticated())
            raise Refused(answers.unsupported_signal(answers.SIGNALS[path]))
        if path not in self._pages:
            raise Refused(answers.unknown_path(path))
        method, page = self._pages[path]
        if request.method != method and not (method == "GET" and request.method == "HEAD"):
            raise Refused(answers.wrong_method(request.method, method))
        return await page(request)

    def _admit(self, request: Request) -> str:
        """The content type of a request that may be read."""
        if not self._access.allows(request.headers.get("authorization")):
            raise Refused(answers.unauthenticated())
        given = request.headers.get("content-type", "")
        content_type = answers.content_type_of(given)
        if content_type is None:
            raise Refused(answers.wrong_content_type(given))
        return content_type

    async def _traces(self, request: Request) -> Response:
        intake = self._intake
        content_type = self._admit(request)
        with intake.admitted() as hold:
            await self._read(request, hold)
            encoding = request.headers.get("content-encoding", "")
            rejected = await intake.take(hold, encoding, content_type)
        intake.figures.answered("http", "ok")
        answer = answers.success(*rejected, content_type)
        return Response(answer, headers={"content-type": content_type})

    async def _logs(self, request: Request) -> Response:
        """Handed on as they came; they are stored nowhere."""
        intake = self._intake
        content_type = self._admit(request)
        with intake.admitted() as hold:
            await self._read(request, hold)
            encoding = request.headers.get("content-encoding", "")
            await intake.hand_on_logs(hold, encoding, content_type)
        intake.figures.answered("http", "ok")
        answer = answers.success(0, "", content_type)
        return Response(answer, headers={"content-type": content_type})

    async def _read(self, request: Request, hold: Hold) -> None:
        intake = self._intake
        most = intake.limits.max_body_bytes
        announced = request.headers.get("content-length", "")
        if announced.isdecimal() and int(announced) > most:
            raise Refused(_too_large(most))
        began = request.scope["state"]["began"]
        size = 0
        try:
            async with asyncio.timeout_at(began + intake.settings.request_s) as timeout:
                with intake.in_time(timeout):
                    async for part in request.stream():
                        size += len(part)
                        if size > most:
                            raise Refused(_too_large(most))
                        hold.add(part)
        except TimeoutError:
            raise intake.out_of_time() from None

    async def _healthz(self, request: Request) -> Response:
        return PlainTextResponse("ok\n")

    async def _readyz(self, request: Request) -> Response:
        level = self._intake.level()
        what = "DRAINING" if self._intake.draining else level
        ready = what in ("NORMAL", "WARNING")
        return PlainTextResponse(f"{what}\n", status_code=200 if ready else 503)

    async def _metrics(self, request: Request) -> Response:
        if not self._access.allows(request.headers.get("authorization")):
            raise Refused(answers.unauthenticated())
        return Response(
            prometheus(self._status()), headers={"content-type": TextFormat.PROMETHEUS.value}
        )

    def _refusal(self, refusal: Refusal, content_type: str | None) -> Response:
        self._intake.figures.answered("http", refusal.reason)
        kind = content_type or answers.JSON
        return Response(
            answers.http_body(refusal, kind),
            status_code=refusal.status,
            headers=answers.http_headers(refusal, kind),
        )


def _too_large(most: int) -> Refusal:
    message = f"the body has more than {most} bytes: send fewer spans in a request"
    return answers.too_large(message, unread=True)
