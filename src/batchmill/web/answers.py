"""Answers: JSON, errors with a reason, and the headers that every one has."""

from __future__ import annotations

import json
import logging
from collections.abc import Collection, Mapping
from typing import Any

from starlette.datastructures import MutableHeaders
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from batchmill.http import Access
from batchmill.web.errors import RequestError

log = logging.getLogger("batchmill.web")

API = "/api"
HEADERS = {
    "Cache-Control": "no-store",
    "Content-Security-Policy": (
        "default-src 'self'; img-src 'self' data:; object-src 'none'; base-uri 'none'; "
        "form-action 'none'; frame-ancestors 'none'"
    ),
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
}
"""On every answer, unless it brings its own."""
_OTHER_HOST = (
    "this server is asked by the names of this machine alone, such as localhost: give it a token "
    "(--token-file), or --insecure if something in front of it sees to who may ask"
)
_TOKEN = "show the token: send the header 'Authorization: Bearer …' that the server was given"


def as_json(content: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """An answer in JSON."""
    body = json.dumps(content, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    return Response(
        body.encode("utf-8", "replace"),
        status,
        headers=dict(headers or {}),
        media_type="application/json",
    )


def as_error(status: int, reason: str, headers: Mapping[str, str] | None = None) -> Response:
    """An answer that says what is wrong."""
    return as_json({"error": reason}, status, headers)


async def refused(request: Request, error: Exception) -> Response:
    """The answer to a question that was refused."""
    assert isinstance(error, RequestError)
    return as_error(error.status, error.reason, error.headers)


async def not_served(request: Request, error: Exception) -> Response:
    """The answer to a path or a method that there is not."""
    assert isinstance(error, HTTPException)
    reason = {
        404: f"there is nothing at {request.url.path}: see /api/v1/openapi.json for what there is",
        405: f"{request.method} is not what {request.url.path} is asked by",
    }.get(error.status_code, error.detail)
    return as_error(error.status_code, reason, error.headers)


class Guard:
    """In front of everything: asks for the token, and sees to the headers."""

    def __init__(self, app: ASGIApp, access: Access, hosts: Collection[str] = ()) -> None:
        """``hosts``: by which names the server may be asked; none given: by any."""
        self._app = app
        self._access = access
        self._hosts = frozenset(each.lower() for each in hosts)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Let a request through, or answer 421 or 401; whatever fails is answered 500."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        begun = False

        async def with_headers(message: Message) -> None:
            nonlocal begun
            if message["type"] == "http.response.start":
                begun = True
                headers = MutableHeaders(scope=message)
                for name, value in HEADERS.items():
                    headers.setdefault(name, value)
            await send(message)

        if not self._is_meant(scope):
            await as_error(421, _OTHER_HOST)(scope, receive, with_headers)
            return
        if not self._may(scope):
            answer = as_error(401, _TOKEN, {"WWW-Authenticate": "Bearer"})
            await answer(scope, receive, with_headers)
            return
        try:
            await self._app(scope, receive, with_headers)
        except Exception:  # whatever it is, whoever asks gets an answer, and the next one too
            log.exception("a request failed")
            if begun:
                raise
            failed = as_error(500, "the server failed: its log says why, and asking again may help")
            await failed(scope, receive, with_headers)

    def _is_meant(self, scope: Scope) -> bool:
        """Whether it is asked by a name of its own.

        A page of a stranger can have its own name resolve to this machine, and then reads all that
        a browser here may read; the browser tells that name.
        """
        if not self._hosts:
            return True
        given = dict(scope["headers"]).get(b"host", b"").decode("latin-1").lower()
        name = given[: given.find("]") + 1] if given.startswith("[") else given.partition(":")[0]
        return name in self._hosts

    def _may(self, scope: Scope) -> bool:
        path: str = scope["path"]
        if path != API and not path.startswith(f"{API}/"):
            return True
        given = dict(scope["headers"]).get(b"authorization")
        return self._access.allows(given)
