"""A real Prometheus for tests: in a temporary folder, on the loopback, killed at the end."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import pytest

from tests.kit.processes import free_port
from tests.kit.threads import WAIT_S, until

MISSING = (
    "Prometheus is not here: install it with `apt-get install --no-install-recommends prometheus`"
)


class Prometheus:
    """A server that answers queries."""

    def __init__(self, port: int) -> None:
        self.port = port

    @property
    def remote_write(self) -> str:
        """Where it takes remote writes."""
        return f"remote+http://127.0.0.1:{self.port}/api/v1/write"

    def is_ready(self) -> bool:
        try:
            return self._get("/-/ready")[0] == 200
        except OSError:
            return False

    def query(self, text: str, at_s: float | None = None) -> list[tuple[dict[str, str], float]]:
        """What it answers to PromQL at a moment, or now: labels and value of each series."""
        moment = {} if at_s is None else {"time": f"{at_s:.3f}"}
        status, body = self._get(f"/api/v1/query?{urlencode({'query': text, **moment})}")
        assert status == 200, body
        answer = json.loads(body)["data"]["result"]
        return [(each["metric"], float(each["value"][1])) for each in answer]

    def _get(self, path: str) -> tuple[int, bytes]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=WAIT_S)
        with contextlib.closing(connection):
            connection.request("GET", path)
            response = connection.getresponse()
            return response.status, response.read()


@contextlib.contextmanager
def running_prometheus(
    folder: Path, scrape: str = "", port: int | None = None, out_of_order: str = ""
) -> Iterator[Prometheus]:
    """A Prometheus that takes remote writes, and scrapes ``scrape`` (host:port) if it is given.

    ``out_of_order`` is how far back it takes samples that are older than what it has (``30m``); by
    default it takes none.

    It is killed at the end, as kill -9 does. In the same folder, it goes on with what it had.
    """
    program = shutil.which("prometheus")
    if program is None:
        if os.environ.get("CI"):
            pytest.fail(MISSING)
        pytest.skip(MISSING)
    config: dict[str, Any] = {"global": {"scrape_interval": "1s", "scrape_timeout": "1s"}}
    if scrape:
        config["scrape_configs"] = [
            {"job_name": "batchmill", "static_configs": [{"targets": [scrape]}]}
        ]
    if out_of_order:
        config["storage"] = {"tsdb": {"out_of_order_time_window": out_of_order}}
    folder.mkdir(exist_ok=True)
    (folder / "prometheus.yml").write_text(json.dumps(config))  # which is YAML, too
    server = Prometheus(port or free_port())
    with (folder / "log").open("w+") as output:
        process = subprocess.Popen(
            [
                program,
                f"--config.file={folder / 'prometheus.yml'}",
                f"--storage.tsdb.path={folder / 'data'}",
                f"--web.listen-address=127.0.0.1:{server.port}",
                "--web.enable-remote-write-receiver",
            ],
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
        )
        try:
            until(
                lambda: server.is_ready() or process.poll() is not None,
                "Prometheus is ready",
                timeout_s=2 * WAIT_S,
            )
            assert process.poll() is None, (folder / "log").read_text()
            yield server
        finally:
            process.kill()
            process.wait()
