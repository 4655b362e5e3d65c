"""What OTLP over HTTP and remote write share: a connection for POST requests, and headers."""

from __future__ import annotations

import contextlib
import email.utils
import http.client
import re
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass

from batchmill.errors import ConfigError

_HEADER_NAME = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~-]+")
_HEADER_VALUE = re.compile(r"[ -~]*")
"""What both HTTP and gRPC take: with another header every request would fail, for ever."""


def check_headers(headers: Mapping[str, str]) -> None:
    """Raise :class:`ConfigError` unless all headers can be sent; their values are not shown."""
    for name, value in headers.items():
        if not _HEADER_NAME.fullmatch(name) or name.lower().endswith("-bin"):
            raise ConfigError("headers", name, "a name of letters, digits and hyphens, not -bin")
        if not _HEADER_VALUE.fullmatch(value):
            raise ConfigError(f"headers[{name!r}]", "…", "visible ASCII characters and spaces")


def parse_retry_after(header: str | None, now_s: float) -> float | None:
    """The header ``Retry-After``, seconds or a date, in seconds from now; None: it is neither.

    >>> parse_retry_after("7", 0.0), parse_retry_after("Thu, 01 Jan 1970 00:01:00 GMT", 50.0)
    (7.0, 10.0)
    """
    text = (header or "").strip()
    if text.isascii() and text.isdecimal():
        return float(text)
    try:
        return max(0.0, email.utils.parsedate_to_datetime(text).timestamp() - now_s)
    except (ValueError, OverflowError):
        return None


@dataclass(frozen=True, slots=True)
class HttpAnswer:
    """The answer to a request."""

    status: int
    body: bytes
    """Its beginning, if it is long."""
    retry_after_s: float | None

    @property
    def text(self) -> str:
        """The body, for a message."""
        return self.body[:300].decode("utf-8", "replace").strip()


class HttpClient:
    """Posts bodies to one address over one connection, which is kept, and renewed after a fault.

    ``peer`` is ``host:port``. Only :meth:`interrupt` may be called by other threads.
    """

    def __init__(
        self,
        peer: str,
        *,
        path: str,
        headers: Mapping[str, str],
        tls: bool,
        timeout_s: float,
        max_answer_bytes: int,
    ) -> None:
        kind = http.client.HTTPSConnection if tls else http.client.HTTPConnection
        self._connection = kind(peer, timeout=timeout_s)
        self._path = path
        self._headers = dict(headers)
        self._max_answer_bytes = max_answer_bytes
        self._interrupted = False

    def post(self, body: bytes) -> HttpAnswer:
        """Send a body; raises OSError, or TimeoutError, if there is no answer."""
        try:
            response = self._send(body)
            answer = response.read(self._max_answer_bytes)
            if not response.isclosed():  # longer than anybody reads: the rest is in the way
                self._connection.close()
        except http.client.HTTPException as error:
            self._connection.close()
            raise ConnectionError(f"{type(error).__name__}: {error}") from error
        except OSError:
            self._connection.close()
            raise
        retry_after_s = parse_retry_after(response.headers.get("Retry-After"), time.time())
        return HttpAnswer(response.status, answer, retry_after_s)

    def _send(self, body: bytes) -> http.client.HTTPResponse:
        used = self._connection.sock is not None
        try:
            self._connection.request("POST", self._path, body, self._headers)
            return self._connection.getresponse()
        except (http.client.RemoteDisconnected, ConnectionResetError, BrokenPipeError):
            self._connection.close()
            if not used or self._interrupted:
                raise
        # The peer closed the connection while nothing was to be sent, as it may: no failure.
        self._connection.request("POST", self._path, body, self._headers)
        return self._connection.getresponse()

    def interrupt(self) -> None:
        """Have a request that is under way fail."""
        self._interrupted = True
        sock = self._connection.sock
        if sock is not None:
            with contextlib.suppress(OSError):  # it is closed already
                sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the connection; the next request makes another one."""
        self._connection.close()
