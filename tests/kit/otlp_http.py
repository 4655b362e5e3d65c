"""The HTTP under the tests' receivers of OTLP: a small real server, on the loopback."""

from __future__ import annotations

import gzip
import threading
from abc import ABC, abstractmethod
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Self


class HttpReceiver(ABC):
    """Listens while entered, and answers in protobuf what :meth:`answer` says."""

    def __init__(self, idle_s: float | None = None) -> None:
        """``idle_s``: after how long a connection on which nothing comes is closed."""
        self.closed = 0
        """How many connections are over."""
        outer = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            timeout = idle_s

            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                if self.headers["Content-Encoding"] == "gzip":
                    body = gzip.decompress(body)
                headers = {key.lower(): value for key, value in self.headers.items()}
                status, written = outer.answer(self.path, headers, body)
                self.send_response(status)
                self.send_header("Content-Type", "application/x-protobuf")
                self.send_header("Content-Length", str(len(written)))
                self.send_header("Retry-After", "0")
                self.end_headers()
                self.wfile.write(written)

            def finish(self) -> None:
                super().finish()
                self.request.close()
                outer.closed += 1

            def log_message(self, format: str, *args: Any) -> None:  # noqa: A002
                pass

        self._http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._http.daemon_threads = False
        self._thread = threading.Thread(target=self._http.serve_forever, args=(0.02,))

    @abstractmethod
    def answer(self, path: str, headers: dict[str, str], body: bytes) -> tuple[int, bytes]:
        """Take a request; the status and the body of its answer. Called by several threads."""

    @property
    def port(self) -> int:
        """Where it listens."""
        return int(self._http.server_address[1])

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._http.shutdown()
        self._http.server_close()
        self._thread.join()
