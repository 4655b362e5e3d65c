"""Receivers in processes of their own: batchmill with both decoders, and a Collector.

python -m benchmarks.ingest.receiver FOLDER
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from batchmill.spool import Spool
from benchmarks.kit.machine import cpu_s
from benchmarks.kit.report import say

OURS, PYTHON = "batchmill", "batchmill, decoding in Python"
COLLECTOR = "OpenTelemetry Collector"
CONTENDERS = (OURS, PYTHON, COLLECTOR)
_LOOK_S = 0.5
_START_S = 60.0
_SCRIPT = Path(__file__).parents[2] / "scripts" / "collector.sh"
_COLLECTOR = """
receivers:
  otlp:
    protocols:
      http: {{endpoint: "{http}"}}
      grpc: {{endpoint: "{grpc}"}}
processors: {{batch: {{}}}}
connectors: {{spanmetrics: {{}}}}
exporters:
  prometheus: {{endpoint: "{page}"}}
service:
  telemetry: {{metrics: {{level: none}}, logs: {{level: error}}}}
  pipelines:
    traces: {{receivers: [otlp], processors: [batch], exporters: [spanmetrics]}}
    metrics: {{receivers: [spanmetrics], exporters: [prometheus]}}
"""


@dataclass
class Running:
    """A receiver that runs, and what it takes."""

    pid: int
    http: str
    grpc: str
    home: Path
    memory: list[float] = field(default_factory=list)
    """MiB, every half second."""

    def address(self, protocol: str) -> str:
        return self.grpc if protocol == "gRPC" else self.http

    def cpu_s(self) -> float:
        """Processor seconds so far."""
        return cpu_s(self.pid)

    def rss(self) -> float:
        """MiB in memory now."""
        return rss_mib(self.pid)


def rss_mib(pid: int) -> float:
    """What a process has in memory."""
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


@contextlib.contextmanager
def scratch() -> Iterator[Path]:
    """A folder that is gone afterwards."""
    with tempfile.TemporaryDirectory(prefix="batchmill-bench-", ignore_cleanup_errors=True) as made:
        yield Path(made)


@contextlib.contextmanager
def receivers(folder: Path, names: Sequence[str] = CONTENDERS) -> Iterator[Mapping[str, Running]]:
    """Run receivers on free ports; the Collector only where it was built or can be."""
    with contextlib.ExitStack() as stack:
        started: dict[str, Running] = {}
        for number, name in enumerate(names):
            home = folder / str(number)
            home.mkdir()
            if name != COLLECTOR:
                started[name] = stack.enter_context(_ours(home, in_python=name == PYTHON))
            elif program := _collector_program():
                started[name] = stack.enter_context(_collector(home, program))
        yield started


@contextlib.contextmanager
def _ours(home: Path, *, in_python: bool) -> Iterator[Running]:
    """batchmill's receiver. Segments are removed, as a pipeline would that keeps up."""
    command = [sys.executable, "-m", "benchmarks.ingest.receiver", str(home)]
    decoder = {"BATCHMILL_DECODER": "python" if in_python else "compiled"}
    with running(command, home, os.environ | decoder) as started:
        over = threading.Event()
        watching = threading.Thread(target=_watch, args=(started, over), daemon=True)
        watching.start()
        try:
            yield started
        finally:
            over.set()
            watching.join()


def _collector_program() -> str | None:
    built = subprocess.run([_SCRIPT], stdout=subprocess.PIPE, text=True, check=False)
    if built.returncode:
        say("without the OpenTelemetry Collector")
        return None
    return built.stdout.strip()


@contextlib.contextmanager
def _collector(home: Path, program: str) -> Iterator[Running]:
    http, grpc, page = (f"127.0.0.1:{port}" for port in _free_ports(3))
    config = home / "collector.yaml"
    config.write_text(_COLLECTOR.format(http=http, grpc=grpc, page=page))
    with subprocess.Popen([program, "--config", str(config)]) as process:
        try:
            for address in (http, grpc):
                _wait_for(address)
            yield Running(process.pid, http, grpc, home)
        finally:
            process.kill()


def _free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        sockets = [
            stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)
        ]
        return [int(opened.getsockname()[1]) for opened in sockets]


def _wait_for(address: str) -> None:
    host, _, port = address.rpartition(":")
    until = time.monotonic() + _START_S
    while True:
        try:
            socket.create_connection((host, int(port)), 1).close()
        except OSError:
            if time.monotonic() > until:
                raise
            time.sleep(0.1)
        else:
            return


@contextlib.contextmanager
def running(
    command: list[str], home: Path, env: Mapping[str, str] | None = None
) -> Iterator[Running]:
    """A command that tells its addresses in its first line, and drains at SIGTERM."""
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=env) as process:
        try:
            line = process.stdout.readline() if process.stdout else ""
            addresses = re.search(r"https?://(\S+) \(HTTP\) and (\S+) \(gRPC\)", line)
            if addresses is None:
                raise RuntimeError(f"the receiver did not start: it printed {line!r}")
            yield Running(process.pid, addresses[1], addresses[2], home)
            process.send_signal(signal.SIGTERM)
            if process.wait(60) != 0:
                raise RuntimeError(f"the receiver ended with {process.returncode}")
        finally:
            process.kill()


def _watch(running: Running, over: threading.Event) -> None:
    while not over.wait(_LOOK_S):
        running.memory.append(running.rss())
        for segment in (running.home / "spool" / "Span").glob("[!.]*.parquet"):
            segment.unlink()


def main() -> int:
    from batchmill.ingest import Receiver, ReceiverSettings

    with Spool(Path(sys.argv[1]) / "spool") as spool:
        asyncio.run(_serve(Receiver(spool, ReceiverSettings(http_port=0, grpc_port=0))))
    return 0


async def _serve(served: Any) -> None:
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, served.stop)

    def ready() -> None:
        print(
            f"receiving at http://{served.http_address} (HTTP) and {served.grpc_address} (gRPC)",
            flush=True,
        )

    await served.serve(ready)


if __name__ == "__main__":
    raise SystemExit(main())
