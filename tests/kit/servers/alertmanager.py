"""A real Alertmanager for tests, and an HTTP server that keeps the webhooks it gets."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import shutil
import subprocess
import threading
from collections.abc import Iterator, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Self

import pytest

from tests.kit.processes import free_port
from tests.kit.threads import WAIT_S, until

MISSING = (
    "Alertmanager is not here: install it with "
    "`apt-get install --no-install-recommends prometheus-alertmanager`"
)


class Alertmanager:
    """A server that takes alerts."""

    def __init__(self, port: int) -> None:
        self.port = port

    @property
    def address(self) -> str:
        """Where it takes alerts."""
        return f"alertmanager+http://127.0.0.1:{self.port}"

    def is_ready(self) -> bool:
        """Whether it answers."""
        try:
            return self._get("/-/ready")[0] == 200
        except OSError:
            return False

    def alerts(self) -> list[dict[str, Any]]:
        """The alerts that it takes for firing."""
        status, body = self._get("/api/v2/alerts")
        assert status == 200, body
        alerts: list[dict[str, Any]] = json.loads(body)
        return alerts

    def _get(self, path: str) -> tuple[int, bytes]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=WAIT_S)
        with contextlib.closing(connection):
            connection.request("GET", path)
            response = connection.getresponse()
            return response.status, response.read()


@contextlib.contextmanager
def running_alertmanager(
    folder: Path, webhook: str = "", port: int | None = None
) -> Iterator[Alertmanager]:
    """An Alertmanager that hands alerts on to ``webhook``, if it is given; killed at the end."""
    program = shutil.which("prometheus-alertmanager")
    if program is None:
        if os.environ.get("CI"):
            pytest.fail(MISSING)
        pytest.skip(MISSING)
    hooks = [{"url": webhook, "send_resolved": True}] if webhook else []
    config = {
        "route": {
            "receiver": "test",
            "group_by": ["alertname"],
            "group_wait": "10ms",
            "group_interval": "100ms",
        },
        "receivers": [{"name": "test", "webhook_configs": hooks}],
    }
    folder.mkdir(exist_ok=True)
    (folder / "alertmanager.yml").write_text(json.dumps(config))  # which is YAML, too
    server = Alertmanager(port or free_port())
    with (folder / "log").open("w+") as output:
        process = subprocess.Popen(
            [
                program,
                f"--config.file={folder / 'alertmanager.yml'}",
                f"--storage.path={folder / 'data'}",
                f"--web.listen-address=127.0.0.1:{server.port}",
                "--cluster.listen-address=",
            ],
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
        )
        try:
            until(
                lambda: server.is_ready() or process.poll() is not None,
                "Alertmanager is ready",
                timeout_s=2 * WAIT_S,
            )
            assert process.poll() is None, (folder / "log").read_text()
            yield server
        finally:
            process.kill()
            process.wait()


class Webhooks:
    """An HTTP server that keeps the bodies it gets, and answers as it is told."""

    def __init__(self, port: int = 0) -> None:
        self.bodies: list[Any] = []
        """The bodies of requests that were answered with 200."""
        self.headers: list[dict[str, str]] = []
        self.paths: list[str] = []
        self.answers: list[int] = []
        """The status of the next answers; 200 when it is empty."""
        webhooks = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                status = webhooks.answers.pop(0) if webhooks.answers else 200
                if status == 200:
                    webhooks.headers.append(dict(self.headers.items()))
                    webhooks.paths.append(self.path)
                    webhooks.bodies.append(json.loads(body))
                self.send_response(status)
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, *args: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,))

    @property
    def address(self) -> str:
        """Where it takes webhooks."""
        return f"http://127.0.0.1:{self._server.server_port}/hook"

    def alerts(self) -> list[tuple[str, str, str]]:
        """Status, name and entity of each alert in the order in which they came."""
        return [
            (alert["status"], alert["labels"]["alertname"], alert["labels"]["entity"])
            for body in list(self.bodies)
            for alert in body["alerts"]
        ]

    def wait(self, alerts: Sequence[tuple[str, str, str]]) -> None:
        """Wait until exactly these alerts have come."""
        until(lambda: len(self.alerts()) >= len(alerts), lambda: f"{self.alerts()}")
        assert self.alerts() == list(alerts)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()
