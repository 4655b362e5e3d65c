"""A real Collector in front of a receiver: deploy/collector, and gRPC as Go's library sends it."""

from __future__ import annotations

import contextlib
import http.client
import itertools
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.kit.files import ROOT
from tests.kit.ingest import PROTOBUF, QUICK, SMALL, Ingest, ask, ingest, request, span_id
from tests.kit.processes import Life, free_ports
from tests.kit.servers.collector import collector_program, running_collector
from tests.kit.threads import PATIENCE_S, until

pytestmark = pytest.mark.system

CONFIG = ROOT / "deploy" / "collector" / "collector.yaml"
GRPC = """
receivers: {{otlp: {{protocols: {{http: {{endpoint: "127.0.0.1:{entry}"}}}}}}}}
exporters:
  otlp/batchmill: {{endpoint: "{to}", compression: {compression}, tls: {{insecure: true}}}}
service:
  pipelines: {{traces: {{receivers: [otlp], exporters: [otlp/batchmill]}}}}
  telemetry: {{metrics: {{level: none}}}}
"""
SPANS = 200
"""Of a request."""


def test_the_collector_takes_the_configuration() -> None:
    """As it stands in deploy/, with no variable set."""
    done = subprocess.run(
        [collector_program(), "validate", "--config", str(CONFIG)],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def post(server: tuple[str, int], body: bytes) -> int:
    """Send spans to a Collector; the status of the response."""
    return ask(server, "POST", "/v1/traces", body, {"content-type": PROTOBUF}).status


class Sender(threading.Thread):
    """Sends requests to a Collector until told to stop; keeps what was acknowledged."""

    def __init__(self, server: tuple[str, int]) -> None:
        super().__init__(daemon=True)
        self.acknowledged: set[str] = set()
        self.sent: set[str] = set()
        self._server = server
        self._end = threading.Event()

    def run(self) -> None:
        for first in itertools.count(1, SPANS):
            ids = range(first, first + SPANS)
            names = {span_id(number) for number in ids}
            self.sent |= names
            while not self._end.wait(0.02):
                # It may be killed in the middle, or not have started.
                with contextlib.suppress(OSError, http.client.HTTPException):
                    if post(self._server, request(*ids)) == 200:
                        self.acknowledged |= names
                        break
            if self._end.is_set():
                return

    def goes_on(self, requests: int = 20) -> None:
        """Wait until so many more requests were acknowledged."""
        wanted = len(self.acknowledged) + requests * SPANS
        until(lambda: len(self.acknowledged) >= wanted, "no more spans were acknowledged")

    def stop(self) -> None:
        self._end.set()
        self.join()


@pytest.fixture
def sending(tmp_path: Path) -> Iterator[tuple[Sender, dict[str, str], int]]:
    """A sender, the variables of its Collector, and the port of the receiver behind it."""
    grpc, entry, health, behind = free_ports(4)
    env = {
        "COLLECTOR_DATA": str(tmp_path / "queue"),
        "COLLECTOR_GRPC": f"127.0.0.1:{grpc}",
        "COLLECTOR_HTTP": f"127.0.0.1:{entry}",
        "COLLECTOR_HEALTH": f"127.0.0.1:{health}",
        "COLLECTOR_TO": f"http://127.0.0.1:{behind}",
        "COLLECTOR_METRICS": "none",
    }
    sender = Sender(("127.0.0.1", entry))
    sender.start()
    try:
        yield sender, env, behind
    finally:
        sender.stop()


@contextlib.contextmanager
def collector(folder: Path, env: dict[str, str], name: str) -> Iterator[Life]:
    """One life of the Collector; all of them have the same queue."""
    with running_collector(CONFIG, folder / f"{name}.log", env) as process:
        yield process


def refused(running: Ingest) -> float:
    """Requests of the Collector that were answered 503."""
    return running.metric('requests_total{outcome="CRITICAL",protocol="http"}')


def test_every_acknowledged_span_arrives(
    tmp_path: Path, sending: tuple[Sender, dict[str, str], int]
) -> None:
    """The receiver is down, then refuses, then takes; the Collector is killed twice meanwhile."""
    collector_program()
    sender, env, port = sending
    home = tmp_path / "home"
    with collector(tmp_path, env, "first"):  # nobody listens behind it
        sender.goes_on()  # and is killed at the end
    with ingest(home, *QUICK, *SMALL, "--http-port", str(port)) as running:
        running.fill(1)
        running.await_level("CRITICAL")
        with collector(tmp_path, env, "second"):
            sender.goes_on()
            until(lambda: refused(running) > 0)
            assert running.metric("received_spans_total") == 0
        with collector(tmp_path, env, "third"):
            sender.goes_on()
            before = refused(running)
            until(lambda: refused(running) > before)
            running.unfill()
            running.await_level("NORMAL")
            sender.goes_on()
            sender.stop()

            def missing() -> set[str]:
                return sender.acknowledged - {row["span_id"] for row in running.spans()}

            until(lambda: not missing(), lambda: f"{len(missing())} spans did not arrive")
            assert {row["span_id"] for row in running.spans()} <= sender.sent


@pytest.mark.parametrize(
    ("compression", "outcome"),
    [("none", "ok"), ("gzip", "ok"), ("zstd", "wrong_encoding"), ("snappy", "wrong_encoding")],
)
def test_grpc_of_the_collector(tmp_path: Path, compression: str, outcome: str) -> None:
    """Taken, or refused with the encodings that are taken, in the words that its user reads."""
    collector_program()
    (entry,) = free_ports(1)
    with ingest(tmp_path / "home", *QUICK) as running:
        config, log = tmp_path / "collector.yaml", tmp_path / "collector.log"
        config.write_text(GRPC.format(entry=entry, to=running.grpc, compression=compression))
        with running_collector(config, log, {}):

            def takes() -> bool:
                with contextlib.suppress(OSError):
                    return post(("127.0.0.1", entry), request(1)) == 200
                return False

            until(takes)
            counter = f'requests_total{{outcome="{outcome}",protocol="grpc"}}'
            until(lambda: running.metric(counter) > 0)
            if outcome == "ok":
                assert {row["span_id"] for row in running.spans()} == {span_id(1)}
            else:
                until(lambda: "Unimplemented" in log.read_text())
                assert "send identity, gzip" in log.read_text()
    assert running.stderr() == ""
