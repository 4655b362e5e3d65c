"""One request to a remote write receiver, and what its answer means."""

from __future__ import annotations

import base64
import contextlib
import http.client
import re
import socket
import ssl
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from urllib.parse import unquote, urlsplit

from batchmill import __version__
from batchmill.errors import ConfigError
from batchmill.export.senders.headers import check_headers
from batchmill.export.senders.retry_after import retry_after_s

SCHEMES = {"remote+http": False, "remote+https": True}
HEADERS = {
    "Content-Encoding": "snappy",
    "Content-Type": "application/x-protobuf",
    "X-Prometheus-Remote-Write-Version": "0.1.0",
    "User-Agent": f"batchmill/{__version__}",
}
_ALLOWED = "remote+http://host:port/path or remote+https://host:port/path"
_MOST_SAID = 300
"""How much of an answer is kept for the log."""

OUT_OF_ORDER = "out of order"
ANOTHER_VALUE = "another value is there"
TOO_OLD = "too old"
_ABOUT_SAMPLES = {
    re.compile("out.of.order"): OUT_OF_ORDER,
    re.compile("duplicate"): ANOTHER_VALUE,
    re.compile("out.of.bounds|too.old"): TOO_OLD,
}
"""How Prometheus, and those who are like it, say that it is the samples that they do not want."""
_OF_SOME = (400, 409, 413, 422)
"""Answers to a whole request because of some of its samples; 409 is Thanos's."""


@dataclass(frozen=True, slots=True)
class Target:
    """Where to write: an address ``remote+http(s)://user:password@host:port/path``."""

    url: str
    """As it may be shown: without the password."""
    host: str
    port: int
    path: str
    tls: bool
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)
    """What goes with each request besides; never shown."""

    @classmethod
    def parse(
        cls, url: str, token: str | None = None, headers: Mapping[str, str] | None = None
    ) -> Target:
        """Read an address; ``token`` is shown to the receiver as a bearer's."""
        cut = urlsplit(url)
        try:
            port = cut.port
        except ValueError:
            port = -1
        shown = f"{cut.scheme}://{cut.netloc.rpartition('@')[2]}{cut.path}"
        if cut.scheme not in SCHEMES or not cut.hostname or port == -1 or cut.fragment:
            raise ConfigError("to", shown, _ALLOWED)
        more = dict(headers or {})
        if token is not None:
            more["Authorization"] = f"Bearer {token}"
        elif cut.username is not None:
            login = f"{unquote(cut.username)}:{unquote(cut.password or '')}"
            more["Authorization"] = "Basic " + base64.b64encode(login.encode()).decode()
        check_headers(more)
        tls = SCHEMES[cut.scheme]
        path = (cut.path or "/api/v1/write") + (f"?{cut.query}" if cut.query else "")
        return cls(shown, cut.hostname, port or (443 if tls else 80), path, tls, more)


@dataclass(frozen=True, slots=True)
class Answer:
    """What became of a request."""

    outcome: str
    """``sent``, ``refused`` (for good: sending it again would not help) or ``failed``."""
    why: str
    """``HTTP 400``, ``unreachable`` and the like: what it is counted as."""
    said: str = ""
    retry_after_s: float | None = None
    reason: str = ""
    """What refused samples are counted under."""
    of_some: bool = False
    """Whether it may be some of the samples that are refused, and the others would be taken."""


def remote_address(to: str) -> str:
    """The address of a remote write receiver as it may be shown; raises if it is none."""
    return Target.parse(to).url


class Connection:
    """Sends requests one after the other over one connection; made anew after a fault."""

    def __init__(self, target: Target, timeout_s: float) -> None:
        self._target = target
        self._timeout_s = timeout_s
        self._open: http.client.HTTPConnection | None = None

    def post(self, body: bytes) -> Answer:
        """Send a body; never raises for what the receiver or the network does."""
        headers = {**HEADERS, **self._target.headers}
        try:
            if self._open is None:
                self._open = self._connect()
            self._open.request("POST", self._target.path, body, headers)
            response = self._open.getresponse()
            said = response.read(_MOST_SAID).decode("utf-8", "replace").strip()
            if not response.isclosed():  # it has more to say than anybody wants to know
                self.close()
        except TimeoutError as error:
            self.close()
            return Answer("failed", "timed out", str(error))
        except (OSError, http.client.HTTPException) as error:
            self.close()
            return Answer("failed", "unreachable", f"{type(error).__name__}: {error}")
        retry_after = response.headers.get("Retry-After")
        return judged(response.status, said, retry_after, time.time())

    def close(self) -> None:
        """Let go of the connection."""
        if self._open is not None:
            self._open.close()
        self._open = None

    def abort(self) -> None:
        """End a request that is under way, from another thread."""
        sending = self._open.sock if self._open is not None else None
        if sending is not None:
            with contextlib.suppress(OSError):  # it is over already
                sending.shutdown(socket.SHUT_RDWR)

    def _connect(self) -> http.client.HTTPConnection:
        target = self._target
        if not target.tls:
            return http.client.HTTPConnection(target.host, target.port, timeout=self._timeout_s)
        context = ssl.create_default_context()
        return http.client.HTTPSConnection(
            target.host, target.port, timeout=self._timeout_s, context=context
        )


def judged(status: int, said: str, retry_after: str | None, now_s: float) -> Answer:
    """What an answer means, as the specification has it: 5xx and 429 are tried again.

    But for one: a Prometheus that takes samples out of order answers 500 to those that are too old
    even for that (2.42 does), and would do so for ever.
    """
    why = f"HTTP {status}"
    if 200 <= status < 300:
        return Answer("sent", why)
    about = next((what for text, what in _ABOUT_SAMPLES.items() if text.search(said)), "")
    too_old = status == 500 and about == TOO_OLD
    if (status == 429 or status >= 500) and not too_old:
        return Answer("failed", why, said, retry_after_s(retry_after, now_s))
    return Answer("refused", why, said, reason=about or why, of_some=too_old or status in _OF_SOME)
