"""A receiver in its own process, with its spool or with one that drops everything at once.

    python -m benchmarks.ingest_receiver FOLDER [--drop]

Both run the same code except for ``submit``.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from batchmill.spool import Level, Pressure, Spool

STORES, DROPS = "into the spool", "decode and drop"
_LOOK_S = 0.5
_NO_LEVEL = Pressure(Level.NORMAL)


class Dropped:
    """In the spool's place: it says at once that a batch is safe, and forgets it."""

    def level(self) -> Level:
        return Level.NORMAL

    def pressure(self) -> Pressure:
        return _NO_LEVEL

    def submit(self, source: str, batch: Any) -> Future[Any]:
        answer: Future[Any] = Future()
        answer.set_result(None)
        return answer

    def hurry(self, *, alone: bool = False) -> bool:
        return False


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
        return self.http if protocol == "HTTP" else self.grpc

    def cpu_s(self) -> float:
        """Processor seconds so far."""
        parts = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(parts[11]) + int(parts[12])) / os.sysconf("SC_CLK_TCK")

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
def receiver(home: Path, what: str) -> Iterator[Running]:
    """Run one, on free ports. Segments are removed, as a pipeline would that keeps up."""
    command = [sys.executable, "-m", "benchmarks.ingest_receiver", str(home)]
    with running([*command, "--drop"] if what == DROPS else command, home) as found:
        over = threading.Event()
        watching = threading.Thread(target=_watch, args=(found, over), daemon=True)
        watching.start()
        try:
            yield found
        finally:
            over.set()
            watching.join()


@contextlib.contextmanager
def running(command: list[str], home: Path) -> Iterator[Running]:
    """A command that tells its addresses in its first line, and drains at SIGTERM."""
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
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


def _watch(found: Running, over: threading.Event) -> None:
    while not over.wait(_LOOK_S):
        found.memory.append(found.rss())
        for each in (found.home / "spool" / "Span").glob("[!.]*.parquet"):
            each.unlink()


def main() -> int:
    from batchmill.ingest import Receiver, ReceiverSettings

    home = Path(sys.argv[1])
    settings = ReceiverSettings(http_port=0, grpc_port=0)
    with contextlib.ExitStack() as stack:
        if "--drop" in sys.argv:
            spool = cast(Spool, Dropped())
        else:
            spool = stack.enter_context(Spool(home / "spool"))
        served = Receiver(spool, settings)
        asyncio.run(_serve(served))
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
