"""What the tests of the Prometheus exporters share: stores of this minute, pages, a receiver."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pyarrow as pa
from prometheus_client.openmetrics.parser import (
    text_string_to_metric_families as open_families,
)
from prometheus_client.parser import text_string_to_metric_families as plain_families

from batchmill.export.remote_write.client import write_request_class
from batchmill.sources import bucket_end, minute_bucket
from batchmill.store import Store
from batchmill.telemetry.exposition import TextFormat

Key = tuple[str, frozenset[tuple[str, str]]]
Samples = list[tuple[dict[str, str], float, int]]
Judge = Callable[[Samples], tuple[int, str]]
"""The status and the text that a request with such samples is answered with."""


def last_minutes(count: int) -> list[int]:
    """The last minutes, the present one at the end."""
    now = datetime.now(UTC)
    return [minute_bucket(now - timedelta(minutes=each)) for each in range(count - 1, -1, -1)]


def after(minute: int, s: float = 0.0) -> float:
    """A moment so many seconds after a minute was over, in seconds since 1970."""
    return bucket_end(minute).timestamp() + s


def texts_of(page: str, form: TextFormat) -> dict[str, str]:
    """What the official client reads as HELP, by family."""
    read = open_families if form is TextFormat.OPENMETRICS else plain_families
    return {each.name: each.documentation for each in read(page)}


def parsed(page: str, form: TextFormat = TextFormat.PROMETHEUS) -> dict[Key, float]:
    """What the official client reads in a page: values by name and labels."""
    read = open_families if form is TextFormat.OPENMETRICS else plain_families
    found: dict[Key, float] = {}
    for family in read(page):
        for sample in family.samples:
            key = (sample.name, frozenset(sample.labels.items()))
            assert key not in found, f"{key} stands there twice"
            found[key] = sample.value
    return found


def metrics_of(found: dict[Key, float]) -> dict[Key, float]:
    """The values of metrics alone, without figures about the page and the pipeline."""
    own = ("batchmill_export_", "batchmill_pipeline_")
    return {key: value for key, value in found.items() if not key[0].startswith(own)}


def expected(store: Store, minute: int) -> dict[Key, float]:
    """What a page about a minute must say of metrics, by the store's own reading of each."""
    found: dict[Key, float] = {}
    kinds = {each.id: each.kind for each in store.entities()}
    for metric in store.metrics():
        for value in store.values(metric, start=minute, end=minute):
            labels = {
                "entity": value.entity_id,
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
                found[f"batchmill_{metric.name}", frozenset(named.items())] = float(number)
    return found


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
