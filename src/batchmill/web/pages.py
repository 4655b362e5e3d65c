"""Serves the static files of the web UI, with a strict content security policy.

They contain no data, so they need no token; what they show is requested from ``/api``. All files
are read once, at the start: a page and its scripts are always of one version.
"""

from __future__ import annotations

import gzip
import hashlib
import html
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from urllib.parse import quote

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import HTMLResponse, RedirectResponse, Response
from starlette.routing import BaseRoute, Route

from batchmill.web.responses import not_served

_FOLDER = Path(__file__).parent / "static"
_TYPES = {
    ".css": "text/css; charset=utf-8",
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
    "": "text/plain; charset=utf-8",  # licences
}

_HEADERS = {
    "cache-control": "no-cache",  # revalidate: names carry no version
    "content-security-policy": "default-src 'self'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'; object-src 'none'; require-trusted-types-for 'script'",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "permissions-policy": "camera=(), geolocation=(), microphone=()",
    "vary": "accept-encoding",
}
"""In addition to those of every response. Only our own files: no inline script or style, no other
host, no framing, and no text that becomes markup."""

_MISSING = """<!doctype html>
<html lang="en">
  <head>
    <meta charset="utf-8">
    <title>Page not found · batchmill</title>
    <meta name="viewport" content="width=device-width, initial-scale=1">
    <meta name="color-scheme" content="light dark">
    <link rel="icon" href="{root}static/favicon.svg" type="image/svg+xml">
    <link rel="stylesheet" href="{root}static/css/base.css">
    <link rel="stylesheet" href="{root}static/css/parts.css">
  </head>
  <body>
    <main>
      <section class="state">
        <h1>There is no page “{path}”</h1>
        <p><a href="{root}">All services</a></p>
      </section>
    </main>
  </body>
</html>
"""

VIEWS = ("services", "topology", "explore", "traces", "alerts", "pipeline")
VIEWS_OF_ONE = (
    *("service", "database", "cache", "queue", "instance", "endpoint", "topic", "entity"),
    *("relation", "instance-relation", "endpoint-relation", "trace"),
)


@dataclass(frozen=True)
class _File:
    """A file as it is sent."""

    content_type: str
    etag: str
    plain: bytes
    packed: bytes

    def headers(self, packed: bool) -> dict[str, str]:
        headers = {**_HEADERS, "etag": self.etag}
        return {**headers, "content-encoding": "gzip"} if packed else headers


@cache
def _files() -> dict[str, _File]:
    """All files, by their path under ``static``."""
    files = {}
    for path in sorted(_FOLDER.rglob("*")):
        if not path.is_file() or path.suffix not in _TYPES:
            continue
        plain = path.read_bytes()
        etag = f'W/"{hashlib.sha256(plain).hexdigest()[:20]}"'
        packed = gzip.compress(plain, mtime=0)
        files[path.relative_to(_FOLDER).as_posix()] = _File(
            _TYPES[path.suffix], etag, plain, packed
        )
    return files


def _known(header: str, etag: str) -> bool:
    """Whether the client has this version; weak comparison, as RFC 9110 requires."""
    tags = {part.strip().removeprefix("W/") for part in header.split(",")}
    return "*" in tags or etag.removeprefix("W/") in tags


def _takes_gzip(header: str) -> bool:
    """Whether an ``Accept-Encoding`` allows gzip.

    >>> _takes_gzip("br, gzip"), _takes_gzip("gzip;q=0"), _takes_gzip("")
    (True, False, False)
    """
    for part in header.split(","):
        name, _, quality = part.strip().partition(";")
        if name.strip().lower() == "gzip":
            return quality.replace(" ", "").rstrip("0").rstrip(".") not in ("q=", "q=0")
    return False


def _response(request: Request, name: str) -> Response:
    file = _files().get(name)
    if file is None:
        raise HTTPException(404)
    packed = _takes_gzip(request.headers.get("accept-encoding", ""))
    headers = file.headers(packed)
    if _known(request.headers.get("if-none-match", ""), file.etag):
        return Response(status_code=304, headers=headers)
    return Response(
        file.packed if packed else file.plain, headers=headers, media_type=file.content_type
    )


async def _index(request: Request) -> Response:
    return _response(request, "index.html")


async def _static(request: Request) -> Response:
    return _response(request, request.path_params["path"])


async def _view(request: Request) -> Response:
    """The address of a view without ``#``, such as ``/explore?metric=…``: leads to the view."""
    name, slash, argument = request.url.path.lstrip("/").partition("/")
    query = f"?{request.url.query}" if request.url.query else ""
    return RedirectResponse(f"{_root(request)}#/{name}{slash}{quote(argument, safe='')}{query}")


def _root(request: Request) -> str:
    """The way to the first page, as a browser reads it.

    Relative, so that it also works behind a proxy that serves the pages under a path of its own.
    """
    path: bytes = request.scope["raw_path"]  # where %2F is no slash
    return "../" * path.lstrip(b"/").count(b"/") or "./"


async def not_found(request: Request, error: Exception) -> Response:
    """The response for an unknown path or method: a page for people, JSON for programs."""
    assert isinstance(error, HTTPException)
    accepted = request.headers.get("accept", "")
    path = request.url.path
    if error.status_code != 404 or path.startswith("/api/") or "text/html" not in accepted:
        return await not_served(request, error)
    root = _root(request)
    page = _MISSING.format(root=root, path=html.escape(path))
    return HTMLResponse(page, 404, headers={**_HEADERS, "vary": "accept"})


def routes() -> list[BaseRoute]:
    """The routes of the page and its files; GET and HEAD only."""
    _files()
    views = [Route(f"/{name}", _view) for name in VIEWS]
    # An id is base64, which may hold slashes.
    arguments = ("{argument}", "{argument}/{more:path}")
    views += [Route(f"/{name}/{one}", _view) for name in VIEWS_OF_ONE for one in arguments]
    return [Route("/", _index), Route("/static/{path:path}", _static), *views]
