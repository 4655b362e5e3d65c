"""Responses: JSON, errors with a reason and a status, and the headers of every response."""

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


class RequestError(Exception):
    """A request that gets an error response; has ``status`` and ``reason``."""

    status = 400

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason

    @property
    def headers(self) -> Mapping[str, str]:
        """Headers of the error response."""
        return {}


class BadRequest(RequestError):
    """A parameter is not valid, or the result would be too large."""


class NotFound(RequestError):
    """The requested object does not exist."""

    status = 404


class Unavailable(RequestError):
    """The server cannot handle the request now; has ``retry_after_s``."""

    status = 503

    def __init__(self, reason: str, retry_after_s: int = 5) -> None:
        super().__init__(reason)
        self.retry_after_s = retry_after_s

    @property
    def headers(self) -> Mapping[str, str]:
        """``Retry-After``."""
        return {"Retry-After": str(self.retry_after_s)}


log = logging.getLogger("batchmill.web")

API = "/api"
METRICS = "/metrics"
HEALTH = "/healthz"
"""Whether the server answers; without a token, and without a look at the store."""
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
"""On every response, unless it sets its own."""
_OTHER_HOST = (
    "this server only accepts requests for a name of this machine, such as localhost: give it a "
    "token (--token-file), or --insecure if a proxy in front of it authenticates clients"
)
_TOKEN = "a bearer token is required: send the header 'Authorization: Bearer <token>'"


def as_json(content: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """A JSON response."""
    body = json.dumps(content, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    return Response(
        body.encode("utf-8", "replace"),
        status,
        headers=dict(headers or {}),
        media_type="application/json",
    )


def as_error(status: int, reason: str, headers: Mapping[str, str] | None = None) -> Response:
    """An error response with its reason."""
    return as_json({"error": reason}, status, headers)


async def refused(request: Request, error: Exception) -> Response:
    """The response to a request that was refused."""
    assert isinstance(error, RequestError)
    return as_error(error.status, error.reason, error.headers)


async def not_served(request: Request, error: Exception) -> Response:
    """The response for an unknown path or method."""
    assert isinstance(error, HTTPException)
    reason = {
        404: f"unknown path {request.url.path}: see /api/v1/openapi.json for all paths",
        405: f"{request.url.path} does not support {request.method}",
    }.get(error.status_code, error.detail)
    return as_error(error.status_code, reason, error.headers)


class Guard:
    """Middleware for all requests: checks host name and token, adds headers, handles failures."""

    def __init__(self, app: ASGIApp, access: Access, hosts: Collection[str] = ()) -> None:
        """``hosts``: the host names that requests may use; empty for any."""
        self._app = app
        self._access = access
        self._hosts = frozenset(host.lower() for host in hosts)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, or respond with 421 or 401; with 500 if it fails."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        started = False

        async def with_headers(message: Message) -> None:
            nonlocal started
            if message["type"] == "http.response.start":
                started = True
                headers = MutableHeaders(scope=message)
                for name, value in HEADERS.items():
                    headers.setdefault(name, value)
            await send(message)

        if not self._has_own_host(scope):
            await as_error(421, _OTHER_HOST)(scope, receive, with_headers)
            return
        if not self._is_authenticated(scope):
            error = as_error(401, _TOKEN, {"WWW-Authenticate": "Bearer"})
            await error(scope, receive, with_headers)
            return
        try:
            await self._app(scope, receive, with_headers)
        except Exception:  # whatever it is, the client gets a response
            log.exception("a request failed")
            if started:
                raise
            failed = as_error(500, "the server failed: see its log; a retry may help")
            await failed(scope, receive, with_headers)

    def _has_own_host(self, scope: Scope) -> bool:
        """Whether the request is for one of ``hosts``: the defence against DNS rebinding.

        The owner of a foreign page can have its host name resolve to this machine, and the page
        could then read what a browser here may read; but the browser sends that host name.
        """
        if not self._hosts:
            return True
        header = dict(scope["headers"]).get(b"host", b"").decode("latin-1").lower()
        name = header[: header.find("]") + 1] if header[:1] == "[" else header.partition(":")[0]
        return name in self._hosts

    def _is_authenticated(self, scope: Scope) -> bool:
        path: str = scope["path"]
        if path not in (API, METRICS) and not path.startswith(f"{API}/"):
            return True
        allowed = self._access.allows(dict(scope["headers"]).get(b"authorization"))
        if allowed:
            scope.get("state", {}).get("authenticated", lambda: None)()
        return allowed
