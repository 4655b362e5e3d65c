"""What the server answers to one request."""

from __future__ import annotations

import http.client
import logging
import ssl
from http.server import BaseHTTPRequestHandler
from io import BufferedIOBase
from typing import TYPE_CHECKING, Any

from batchmill.export.errors import StoreUnreadableError
from batchmill.telemetry.exposition import TextFormat

if TYPE_CHECKING:
    from batchmill.export.prometheus.server import Server

log = logging.getLogger("batchmill.export")

_MAX_HEADER_BYTES = 16 * 2**10
_RETRY_AFTER_S = 5


class Handler(BaseHTTPRequestHandler):
    """One request."""

    server: Server
    protocol_version = "HTTP/1.1"
    server_version, sys_version = "batchmill", ""

    def setup(self) -> None:
        super().setup()
        self.rfile = _Bounded(self.rfile, _MAX_HEADER_BYTES)  # type: ignore[assignment]

    def handle(self) -> None:
        """Answer one request; every answer says that there will be no second one."""
        self._answered = False
        try:
            self.handle_one_request()
        except http.client.LineTooLong:
            self.send_error(414, "the address is too long")
        except (ConnectionError, TimeoutError, ssl.SSLError) as error:
            log.debug("%s is gone: %s", self.client_address[0], error)
        if not self._answered:
            self.server.owner.count("cut off")

    def do_GET(self) -> None:
        """Answer the page, or what else there is."""
        path = self.path.partition("?")[0]
        if path == "/healthz":
            self._answer(200, b"ok\n", "healthz")
        elif path != "/metrics":
            self._answer(404, b"there is /metrics, and /healthz\n", "unknown path")
        elif not self.server.owner.settings.access.allows(self.headers.get("Authorization")):
            self._answer(401, b"show the token\n", "unauthorized", {"WWW-Authenticate": "Bearer"})
        else:
            self._metrics()

    do_HEAD = do_GET  # noqa: N815 - http.server's name

    def _metrics(self) -> None:
        form = TextFormat.accepted(self.headers.get("Accept", ""))
        gzipped = "gzip" in self.headers.get("Accept-Encoding", "").lower()
        try:
            body = self.server.owner.page(form, gzipped)
        except StoreUnreadableError as error:
            more = {"Retry-After": str(_RETRY_AFTER_S)}
            self._answer(503, f"{error}\n".encode("utf-8", "replace"), "store unreadable", more)
            return
        more = {"Content-Encoding": "gzip"} if gzipped else {}
        self._answer(200, body, "ok", more | {"Vary": "Accept, Accept-Encoding"}, form.value)

    def _answer(
        self,
        status: int,
        body: bytes,
        outcome: str,
        more: dict[str, str] | None = None,
        content_type: str = "text/plain; charset=utf-8",
    ) -> None:
        headers = {
            "Content-Type": content_type,
            "Content-Length": str(len(body)),
            "Connection": "close",
            **(more or {}),
        }
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)
        self._answered = True
        self.server.owner.count(outcome)

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """What http.server itself refuses: a method, a request that is none."""
        self.requestline = getattr(self, "requestline", "")
        self.request_version = getattr(self, "request_version", self.protocol_version)
        self.command = getattr(self, "command", None) or "GET"
        self._answer(code, f"{message or 'bad request'}\n".encode(), f"HTTP {code}")

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - http.server's name
        log.debug("%s " + format, self.client_address[0], *args)


class _Bounded:
    """The bytes of a request, up to a limit; http.server answers 431 where there are more."""

    def __init__(self, stream: BufferedIOBase, limit: int) -> None:
        self._stream = stream
        self._left = limit

    def readline(self, size: int = -1) -> bytes:
        line = self._stream.readline(self._left + 1)
        self._left -= len(line)
        if self._left < 0:
            raise http.client.LineTooLong("header")
        return line

    def close(self) -> None:
        self._stream.close()

    @property
    def closed(self) -> bool:
        return self._stream.closed
