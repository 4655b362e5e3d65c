"""A real Prometheus for tests; also a receiver of remote writes, and what a page must say."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import shutil
import subprocess
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import pyarrow as pa
import pytest
from prometheus_client.openmetrics.parser import (
    text_string_to_metric_families as open_families,
)
from prometheus_client.parser import text_string_to_metric_families as plain_families

from batchmill.export.remote_write.client import write_request_class
from batchmill.sources import bucket_end, minute_bucket
from batchmill.store import Store
from batchmill.telemetry import prometheus_names
from batchmill.telemetry.exposition import TextFormat
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
        return [(series["metric"], float(series["value"][1])) for series in answer]

    def exemplars(self, text: str, start_s: float, end_s: float) -> list[dict[str, Any]]:
        """The exemplars of the series in a query, between two moments."""
        given = {"query": text, "start": f"{start_s:.3f}", "end": f"{end_s:.3f}"}
        status, body = self._get(f"/api/v1/query_exemplars?{urlencode(given)}")
        assert status == 200, body
        answer: list[dict[str, Any]] = json.loads(body)["data"]
        return answer

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
                "--enable-feature=exemplar-storage",
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


Key = tuple[str, frozenset[tuple[str, str]]]
Samples = list[tuple[dict[str, str], float, int]]
Judge = Callable[[Samples], tuple[int, str]]
"""The status and the text that a request with such samples is answered with."""


def last_minutes(count: int) -> list[int]:
    """The last minutes, the present one at the end."""
    now = datetime.now(UTC)
    return [minute_bucket(now - timedelta(minutes=number)) for number in range(count - 1, -1, -1)]


def after(minute: int, s: float = 0.0) -> float:
    """A moment so many seconds after a minute was over, in seconds since 1970."""
    return bucket_end(minute).timestamp() + s


def texts_of(page: str, form: TextFormat) -> dict[str, str]:
    """What the official client reads as HELP, by family."""
    read = open_families if form is TextFormat.OPENMETRICS else plain_families
    return {family.name: family.documentation for family in read(page)}


def parsed(page: str, form: TextFormat = TextFormat.PROMETHEUS) -> dict[Key, float]:
    """What the official client reads in a page: values by name and labels."""
    read = open_families if form is TextFormat.OPENMETRICS else plain_families
    values: dict[Key, float] = {}
    for family in read(page):
        for sample in family.samples:
            key = (sample.name, frozenset(sample.labels.items()))
            assert key not in values, f"{key} stands there twice"
            values[key] = sample.value
    return values


def metrics_of(values: dict[Key, float]) -> dict[Key, float]:
    """The values of metrics alone, without figures about the page, the pipeline and its queues."""
    own, queues = ("batchmill_export_", "batchmill_pipeline_"), prometheus_names()
    return {
        key: value
        for key, value in values.items()
        if not key[0].startswith(own) and key[0] not in queues
    }


def expected(store: Store, minute: int) -> dict[Key, float]:
    """What a page about a minute must say of metrics, by the store's own reading of each."""
    values: dict[Key, float] = {}
    kinds = {entity.id: entity.kind for entity in store.entities()}
    for metric in store.metrics():
        for value in store.values(metric, start=minute, end=minute):
            labels = {
                "entity_id": value.entity_id,
                "name": value.entity_name,
                "kind": kinds[value.entity_id],
                "layer": ",".join(sorted(value.layers)),
            }
            by_label = value.value if isinstance(value.value, dict) else {None: value.value}
            for label, number in by_label.items():
                if label is not None:
                    text = label.replace("{p=", "p").replace("}", "")
                    named = labels | {"label": text if metric.name == "percentile" else label}
                else:
                    named = labels
                values[f"batchmill_{metric.name}", frozenset(named.items())] = float(number)
    return values


def decode(body: bytes) -> Samples:
    """The samples of a remote write: labels, value, milliseconds since 1970."""
    size, shift = 0, 0
    for byte in body:  # a block of snappy begins with the length of what it holds
        size |= (byte & 0x7F) << shift
        shift += 7
        if not byte & 0x80:
            break
    request = write_request_class()()
    request.ParseFromString(pa.Codec("snappy").decompress(body, size, asbytes=True))
    return [
        ({label.name: label.value for label in series.labels}, sample.value, sample.timestamp)
        for series in request.timeseries
        for sample in series.samples
    ]


class Receiver:
    """A receiver of remote writes that answers as it is told, and keeps what it took."""

    def __init__(self) -> None:
        self.script: list[tuple[int, dict[str, str]]] = []
        """Status and headers of the next answers; afterwards it takes what ``judge`` lets it."""
        self.judge: Judge = lambda samples: (204, "")
        self.requests: list[tuple[int, dict[str, str], bytes]] = []
        """What came: the status it was answered with, its headers, its body."""
        self.url = ""

    def samples(self, status: int = 204) -> Samples:
        """The samples that were answered so."""
        return [
            sample
            for answered, _, body in list(self.requests)
            if answered == status
            for sample in decode(body)
        ]


@contextmanager
def receiving(script: Sequence[tuple[int, dict[str, str]]] = ()) -> Iterator[Receiver]:
    """A receiver on a free port."""
    receiver = Receiver()
    receiver.script = list(script)

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            said = ""
            if receiver.script:
                status, headers = receiver.script.pop(0)
            else:
                status, said = receiver.judge(decode(body))
                headers = {}
            receiver.requests.append((status, dict(self.headers.items()), body))
            self.send_response(status)
            for name, value in ({"Content-Length": str(len(said))} | headers).items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(said.encode())

        def log_message(self, *_: Any) -> None:
            pass

    class Server(ThreadingHTTPServer):
        daemon_threads = True

    with Server(("127.0.0.1", 0), Handler) as server:
        receiver.url = f"remote+http://127.0.0.1:{server.server_port}/api/v1/write"
        thread = threading.Thread(target=server.serve_forever, args=(0.02,))
        thread.start()
        try:
            yield receiver
        finally:
            server.shutdown()
            thread.join()
