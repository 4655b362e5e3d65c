"""TLS of a server, with certificates that can be replaced while it runs."""

from __future__ import annotations

import logging
import ssl
import time
from collections.abc import Callable, Sequence

from batchmill.errors import ConfigError
from batchmill.http.settings import Access

log = logging.getLogger("batchmill.http")

_LOOK_EVERY_S = 1.0


class Tls:
    """The context for new connections; None without certificates.

    When their files have changed, connections from then on get the new ones. Files that cannot be
    used are reported once, and the old certificates stay.
    """

    def __init__(
        self,
        access: Access,
        protocols: Sequence[str] = (),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Read the certificates; raises `ConfigError`. ``protocols`` are for ALPN."""
        self._access = access
        self._protocols = protocols
        self._clock = clock
        self._files = [
            path for path in (access.tls_cert, access.tls_key, access.client_ca) if path is not None
        ]
        self._seen = self._look()
        self._looked_s = clock()
        self._context = self._read()

    def context(self) -> ssl.SSLContext | None:
        """The context for a connection that begins now."""
        now_s = self._clock()
        if self._files and now_s - self._looked_s >= _LOOK_EVERY_S:
            self._looked_s = now_s
            if (seen := self._look()) != self._seen:
                self._seen = seen
                self._replace()
        return self._context

    def _replace(self) -> None:
        try:
            self._context = self._read()
        except ConfigError as error:
            log.error("the new certificates are not used, the old ones stay: %s", error)
        else:
            log.warning("new certificates from %s are in use", self._access.tls_cert)

    def _read(self) -> ssl.SSLContext | None:
        context = self._access.ssl_context()
        if context is not None and self._protocols:
            context.set_alpn_protocols(list(self._protocols))
        return context

    def _look(self) -> list[tuple[int, int, int] | None]:
        """Changes when a file is replaced."""
        seen: list[tuple[int, int, int] | None] = []
        for path in self._files:
            try:
                stat = path.stat()
            except OSError:
                seen.append(None)
            else:
                seen.append((stat.st_ino, stat.st_mtime_ns, stat.st_size))
        return seen
