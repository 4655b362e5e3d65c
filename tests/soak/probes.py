"""What is measured all the time: processes, folders, lag, and how long pages take."""

from __future__ import annotations

import contextlib
import http.client
import itertools
import math
import os
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Self

import psycopg

from batchmill.files import read_json
from batchmill.run import Home, spool_backlog
from batchmill.traces import KeepSettings
from tests.soak.load import Load
from tests.soak.schedule import PIPELINES
from tests.soak.stage import TOKEN, Stage, children, comm
from tests.soak.verdict import Attempt, Bound

SAMPLE_S = 5.0
PAGE_S = 1.0
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
    "memory: alerts": Bound(slack=64, most=512),
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
    # What a JVM that was killed has left is gone with the next start.
    "files: main/tmp": Bound(ratio=1.5, slack=200, most=1_000),
    "files: side/tmp": Bound(ratio=1.5, slack=200, most=1_000),
    "bytes: main/tmp": Bound(ratio=1.5, slack=256 * MIB, most=1_024 * MIB),
    "bytes: side/tmp": Bound(ratio=1.5, slack=256 * MIB, most=1_024 * MIB),
    "files: temporary": Bound(slack=20, most=100),
    "bytes: temporary": Bound(slack=MIB, most=64 * MIB),
    "bytes: main/traces": Bound(
        ratio=1.5, slack=64 * 1024, per_second=True, most=KeepSettings().max_bytes + 256 * MIB
    ),
    "bytes: main/store": Bound(ratio=1.5, slack=64 * 1024, per_second=True),
    "bytes: side/store": Bound(ratio=1.5, slack=64 * 1024, per_second=True),
    "bytes: main/log": Bound(ratio=1.5, slack=20 * MIB, most=200 * MIB),
    # A busy machine takes minutes to start Spark again, and a burst comes meanwhile.
    "lag: ": Bound(ratio=1.5, slack=120, most=1_200),
    "unread: ": Bound(ratio=1.5, slack=600, most=20_000),
    # None takes longer than 10 s: then it is not answered, see verdict.GOAL.
    "page: ": Bound(ratio=2.0, slack=1.0, usual=2.0),
    "batches: ": Bound(ratio=10, per_second=True, slack=1),
    "rate: ": Bound(slack=math.inf),
    "pending: ": Bound(ratio=1.5, slack=100_000, most=300_000),
}
"""Beginnings of names of series, and how much each may grow: :func:`.verdict.growth_problems`."""


class Probes:
    """Takes samples while it is entered."""

    def __init__(self, stage: Stage, loads: Mapping[str, Load]) -> None:
        self._stage, self._loads = stage, loads
        self._start = time.monotonic()
        self._end = threading.Event()
        self._lock = threading.Lock()
        self._series: dict[str, list[tuple[float, float]]] = defaultdict(list)
        self.pages: list[Attempt] = []
        """When a page was asked for, and whether it was answered in time."""
        self.unknown: set[str] = set()
        """Processes that lasted, and are no victims."""
        self._strangers: Counter[int] = Counter()
        self._page = itertools.cycle(PAGES.items())
        self.load_average: list[float] = []
        self._acknowledged: dict[str, tuple[float, int]] = {}
        """When the last sample was, and how many spans were acknowledged then."""
        self._threads = [
            threading.Thread(target=self._run, args=(work, pause_s), name="probe")
            for work, pause_s in ((self._sample, SAMPLE_S), (self._ask_page, PAGE_S))
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

    def _run(self, work: Callable[[], None], pause_s: float) -> None:
        while not self._end.wait(pause_s):
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
            if not name.endswith(("-daemon", "-worker", "guard")):
                values |= _process(name, [pid])
        known = {*pids.values(), *stage.guards()}
        for name in PIPELINES:
            if f"{name}-jvm" in pids:
                workers = children(pids[f"{name}-jvm"])
                values |= _process(f"{name}-workers", workers)
                known.update(workers)
        self._look_for_others(known)
        for road, home in stage.homes.items():
            if road not in self._loads:
                continue
            values |= _folders(road, home)
            if road == "side" and stage.postgres is not None:
                values |= _database(stage.store_urls["side"])
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

    def _look_for_others(self, known: set[int]) -> None:
        """Note processes that are never killed, as nobody has thought of them."""
        pids = {pid for service in self._stage.services.values() for pid in children(service.pid)}
        self._strangers = Counter({pid: self._strangers[pid] + 1 for pid in pids - known})
        # Some last for seconds: a shell that starts Java, a process whose supervisor has to report.
        self.unknown |= {comm(pid) for pid, samples in self._strangers.items() if samples >= 12}

    def _rate(self, road: str) -> float:
        """Acknowledged spans a second since the sample before."""
        now_s, count = self.now_s, self._loads[road].counts().get("acknowledged", 0)
        before_s, before = self._acknowledged.get(road, (0.0, 0))
        self._acknowledged[road] = now_s, count
        return round((count - before) / (now_s - before_s), 1)

    def _ask_page(self) -> None:
        name, path = next(self._page)
        start = time.monotonic()
        link = http.client.HTTPConnection("127.0.0.1", self._stage.web_port, timeout=PAGE_TIMEOUT_S)
        answered = False
        with contextlib.closing(link), contextlib.suppress(OSError, http.client.HTTPException):
            link.request("GET", path, headers={"authorization": f"Bearer {TOKEN}"})
            answer = link.getresponse()
            answer.read()
            answered = answer.status == 200
        if answered:
            self._note({f"page: {name}": round(time.monotonic() - start, 4)})
        self.pages.append(Attempt(start, answered))


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
        "tmp": [home.temporary],
    }
    if road == "main":
        places["store"] = [home.database, *home.folder.glob("metrics.db-*")]
    values = {}
    for name, paths in places.items():
        sizes = [size for path in paths for size in _sizes(path)]
        values[f"files: {road}/{name}"] = float(len(sizes))
        values[f"bytes: {road}/{name}"] = float(sum(sizes))
    return values


def _database(url: str) -> dict[str, float]:
    """Bytes of a PostgreSQL store; none while the server is down."""
    with (
        contextlib.suppress(psycopg.Error),
        psycopg.connect(url, connect_timeout=2) as connection,
    ):
        row = connection.execute("SELECT pg_database_size(current_database())").fetchone()
        assert row is not None
        return {"bytes: side/store": float(row[0])}
    return {}


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
