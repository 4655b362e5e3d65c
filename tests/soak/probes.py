"""What is measured all the time: processes, folders, lag, and how long pages take."""

from __future__ import annotations

import contextlib
import http.client
import math
import os
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Self

from batchmill.files import read_json
from batchmill.run import Home, spool_backlog
from batchmill.traces import KeepSettings
from tests.soak.growth import Bound
from tests.soak.load import Load
from tests.soak.stage import TOKEN, Stage, children

SAMPLE_S = 5.0
PAGE_TIMEOUT_S = 10.0
PAGES = {
    "services": "/api/v1/services?from=now-15m",
    "topology": "/api/v1/topology?from=now-15m",
    "pipeline": "/api/v1/pipeline",
}
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
MIB = 2**20

BOUNDS: Mapping[str, Bound] = {
    # Grows within a life; kills and the collector of garbage make it jump.
    "memory: supervisor": Bound(slack=24, most=300),
    "memory: ingest": Bound(slack=64, most=512),
    "memory: side-ingest": Bound(slack=64, most=512),
    "memory: web": Bound(slack=96, most=768),
    "memory: export": Bound(slack=64, most=512),
    "memory: pipeline": Bound(slack=128, most=1_024),
    "memory: side-pipeline": Bound(slack=128, most=1_024),
    "memory: pipeline-jvm": Bound(slack=256, most=2_560),
    "memory: side-pipeline-jvm": Bound(slack=256, most=2_560),
    "memory: pipeline-workers": Bound(slack=400, most=3_072),
    "memory: side-pipeline-workers": Bound(slack=400, most=3_072),
    "descriptors: ": Bound(slack=32, most=3_000),
    "threads: ": Bound(slack=24, most=400),
    "threads: pipeline-jvm": Bound(slack=64, most=400),
    "threads: side-pipeline-jvm": Bound(slack=64, most=400),
    # A backlog of a burst, or of a pipeline that starts again, may be in either half.
    "files: ": Bound(ratio=1.5, slack=100, most=20_000),
    "files: main/spool": Bound(ratio=1.5, slack=600, most=20_000),
    "bytes: ": Bound(ratio=1.5, slack=64 * MIB),
    # A JVM that is killed leaves its folder behind, and each is killed some times.
    "files: temporary": Bound(ratio=2.0, slack=2_000),
    "bytes: temporary": Bound(ratio=2.0, slack=512 * MIB, most=4_096 * MIB),
    "bytes: main/traces": Bound(
        ratio=1.5, slack=64 * 1024, per_second=True, most=KeepSettings().max_bytes + 256 * MIB
    ),
    "bytes: main/store": Bound(ratio=1.5, slack=64 * 1024, per_second=True),
    "bytes: main/log": Bound(ratio=1.5, slack=20 * MIB, most=200 * MIB),
    # A busy machine takes minutes to start Spark again, and a burst comes meanwhile.
    "lag: ": Bound(ratio=1.5, slack=120, most=1_200),
    "unread: ": Bound(ratio=1.5, slack=600, most=20_000),
    "page: ": Bound(ratio=2.0, slack=1.0),
    "batches: ": Bound(ratio=10, per_second=True, slack=1),
    "rate: ": Bound(slack=math.inf),
    "pending: ": Bound(ratio=1.5, slack=100_000, most=300_000),
}
"""Beginnings of the names of series, and how much each may grow; see :func:`growth.problems`."""


class Probes:
    """Takes samples while it is entered."""

    def __init__(self, stage: Stage, loads: Mapping[str, Load]) -> None:
        self._stage, self._loads = stage, loads
        self._start = time.monotonic()
        self._end = threading.Event()
        self._lock = threading.Lock()
        self._series: dict[str, list[tuple[float, float]]] = defaultdict(list)
        self.unanswered = 0
        """Pages that were not answered in time, or not at all."""
        self.load_average: list[float] = []
        self._acknowledged: dict[str, tuple[float, int]] = {}
        """When the last sample was, and how many spans were acknowledged then."""
        self._threads = [
            threading.Thread(target=self._run, args=(work,), name="probe")
            for work in (self._sample, self._ask_pages)
        ]

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        for thread in self._threads:
            thread.join()

    @property
    def now_s(self) -> float:
        """Since the start."""
        return time.monotonic() - self._start

    def series(self) -> dict[str, list[tuple[float, float]]]:
        """All samples by name."""
        with self._lock:
            return {name: list(points) for name, points in sorted(self._series.items())}

    def _run(self, work: Callable[[], None]) -> None:
        while not self._end.wait(SAMPLE_S):
            work()

    def _note(self, values: Mapping[str, float]) -> None:
        at_s = round(self.now_s, 1)
        with self._lock:
            for name, value in values.items():
                self._series[name].append((at_s, value))

    def _sample(self) -> None:
        stage = self._stage
        self.load_average.append(os.getloadavg()[0])
        values: dict[str, float] = {}
        pids = stage.pids()
        for name, pid in pids.items():
            if not name.endswith("-worker"):
                values |= _process(name, [pid])
        for name in ("pipeline", "side-pipeline"):
            if f"{name}-jvm" in pids:
                values |= _process(f"{name}-workers", children(pids[f"{name}-jvm"]))
        for road, home in (("main", stage.home), ("side", stage.side)):
            if road not in self._loads:
                continue
            values |= _folders(road, home)
            with contextlib.suppress(OSError):
                backlog = spool_backlog(home.spool)
                values[f"lag: {road}"] = round(backlog.oldest_s, 2)
                values[f"unread: {road}"] = float(backlog.count)
            values[f"pending: {road}"] = float(self._loads[road].pending())
            values[f"rate: {road}"] = self._rate(road)
        sizes = list(_sizes(stage.scratch))
        values |= {"files: temporary": float(len(sizes)), "bytes: temporary": float(sum(sizes))}
        batches = (read_json(stage.home.progress) or {}).get("last_batch")
        if batches is not None:
            values["batches: main"] = float(batches)
        self._note(values)

    def _rate(self, road: str) -> float:
        """Acknowledged spans a second since the sample before."""
        now_s, count = self.now_s, self._loads[road].counts().get("acknowledged", 0)
        before_s, before = self._acknowledged.get(road, (0.0, 0))
        self._acknowledged[road] = now_s, count
        return round((count - before) / (now_s - before_s), 1)

    def _ask_pages(self) -> None:
        for name, path in PAGES.items():
            start = time.monotonic()
            link = http.client.HTTPConnection(
                "127.0.0.1", self._stage.web_port, timeout=PAGE_TIMEOUT_S
            )
            with contextlib.closing(link), contextlib.suppress(OSError, http.client.HTTPException):
                link.request("GET", path, headers={"authorization": f"Bearer {TOKEN}"})
                answer = link.getresponse()
                answer.read()
                if answer.status == 200:
                    self._note({f"page: {name}": round(time.monotonic() - start, 4)})
                    continue
            self.unanswered += 1


def _process(name: str, pids: list[int]) -> dict[str, float]:
    """Memory, descriptors and threads of processes together; none if they have just ended."""
    memory = descriptors = threads = 0
    for pid in pids:
        with contextlib.suppress(OSError):
            memory += int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * _PAGE_BYTES
            threads += len(os.listdir(f"/proc/{pid}/task"))  # noqa: PTH208 - twice as fast
            descriptors += len(os.listdir(f"/proc/{pid}/fd"))  # noqa: PTH208
    if not threads:
        return {}
    return {
        f"memory: {name}": round(memory / MIB, 1),
        f"descriptors: {name}": float(descriptors),
        f"threads: {name}": float(threads),
    }


def _folders(road: str, home: Home) -> dict[str, float]:
    """Files and bytes of each folder of a home; the store is one of them."""
    places = {
        "spool": [home.spool],
        "quarantine": [home.quarantine],
        "checkpoint": [home.checkpoint],
        "log": [home.log],
        "run": [home.run],
        "traces": [home.traces],
        "store": [home.database, *home.folder.glob("metrics.db-*")],
    }
    values = {}
    for name, paths in places.items():
        sizes = [size for path in paths for size in _sizes(path)]
        values[f"files: {road}/{name}"] = float(len(sizes))
        values[f"bytes: {road}/{name}"] = float(sum(sizes))
    return values


def _sizes(path: Path) -> Iterator[int]:
    """The bytes of a file, or of all files in a folder, but for those that vanish meanwhile."""
    with contextlib.suppress(OSError):
        if path.is_file():
            yield path.stat().st_size
            return
        with os.scandir(path) as entries:
            for entry in entries:
                with contextlib.suppress(OSError):
                    if entry.is_dir(follow_symlinks=False):
                        yield from _sizes(Path(entry.path))
                    else:
                        yield entry.stat(follow_symlinks=False).st_size
