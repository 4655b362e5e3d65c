"""What names without end do to a whole run: ``python -m benchmarks.cardinality``.

Starts ``batchmill run``, sends requests with a million distinct endpoint names over ten minutes,
beside a small shop, then 200,000 distinct service names as fast as ingest takes them. Prints, every
20 seconds, the memory of each process, the size of the store, the entities in it, and how long
pages take. A goal is missed, and the exit code is 1, if the memory of a process grew from the first
third of the samples to the last, if there are more entities or a larger store than the limits
allow, or if a page takes more than a second (95 % of the answers). ``--quick`` takes a minute, to
try it: a process that has just started still grows then.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import math
import os
import random
import signal
import sqlite3
import string
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from batchmill.files import read_json
from batchmill.run import Home
from benchmarks import RESULTS
from benchmarks.ingest.receiver import scratch
from benchmarks.kit.goals import Goal, at_most
from benchmarks.kit.machine import machine, machine_line
from benchmarks.kit.report import Table, say, write_json

PAGES = ("services", "topology", "services/shop", "pipeline")
SECOND = 1.0
"""How long a page may take."""
GROWTH, SLACK_MIB = 1.2, 64.0
"""How much more memory a process may have in the last third than in the first."""
ENTITY_BYTES = 4_096
"""What an entity may take in the store: a row in each of three tables and its name, with indexes,
and as much again for pages that are not full, and the log."""
SAMPLES = 30
"""How many samples the flood of endpoints has, about."""
_SPANS = 1_000
"""In a request."""
_LETTERS = string.ascii_lowercase


def word(number: int) -> str:
    """A word that no rule takes for an id; another one for each number."""
    letters = []
    for _ in range(6):
        number, letter = divmod(number, len(_LETTERS))
        letters.append(_LETTERS[letter])
    return "".join(letters)


def body(services: Iterator[str], names: Iterator[str], count: int) -> bytes:
    """A request with so many spans, each of the next service, with the next name."""
    request = ExportTraceServiceRequest()
    by_service: dict[str, Any] = {}
    for service, name in itertools.islice(zip(services, names, strict=False), count):
        if service not in by_service:
            group = request.resource_spans.add()
            pair = group.resource.attributes.add(key="service.name")
            pair.value.string_value = service
            by_service[service] = group.scope_spans.add().spans
        end = time.time_ns()
        by_service[service].add(
            trace_id=random.randbytes(16),
            span_id=random.randbytes(8),
            name=name,
            kind=Span.SPAN_KIND_SERVER,
            start_time_unix_nano=end - 5_000_000,
            end_time_unix_nano=end,
        )
    return bytes(request.SerializeToString())


def send(address: str, content: bytes) -> None:
    """Send a request until it is acknowledged."""
    headers = {"Content-Type": "application/x-protobuf"}
    request = urllib.request.Request(f"http://{address}/v1/traces", content, headers)
    while True:
        try:
            with urllib.request.urlopen(request, timeout=30):
                return
        except urllib.error.HTTPError as error:
            if error.code != 503:
                raise
            time.sleep(float(error.headers.get("Retry-After", "1")))


@dataclass
class Sample:
    """A run at one moment."""

    at_s: float
    rss_mib: dict[str, float]
    """By process."""
    store_mib: float
    entities: int
    counted: int
    pages_s: dict[str, float] = field(default_factory=dict)


class Run:
    """A run, and what is known of it."""

    def __init__(self, folder: Path, options: list[str]) -> None:
        self.home = Home(folder / "home")
        command = [
            *(sys.executable, "-m", "batchmill", "run", f"--home={self.home.folder}"),
            *("--http-port=0", "--grpc-port=0", "--web-port=0", *options),
        ]
        self._log = (folder / "run.log").open("wb")
        self.process = subprocess.Popen(command, stdout=self._log, stderr=self._log)
        self.began = time.monotonic()

    def wait_until_ready(self) -> None:
        """Until spans are received, and pages are served."""
        deadline = time.monotonic() + 180
        while not (self.report("ingest").get("http") and self.report("web").get("address")):
            if self.process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError("the run did not start: see its log")
            time.sleep(0.2)

    def report(self, name: str) -> dict[str, Any]:
        """What a process reports."""
        return dict(read_json(getattr(self.home, name)) or {})

    @property
    def ingest(self) -> str:
        """Where spans are sent to."""
        return str(self.report("ingest")["http"])

    def page(self, name: str) -> float:
        """How long an answer takes."""
        address = str(self.report("web")["address"])
        url = address if "://" in address else f"http://{address}"
        began = time.perf_counter()
        try:
            with urllib.request.urlopen(f"{url.rstrip('/')}/api/v1/{name}", timeout=120) as answer:
                answer.read()
        except urllib.error.HTTPError as error:
            say(f"  {name}: {error.code} {error.read()[:200]!r}")
            return float("inf")
        return time.perf_counter() - began

    def sample(self) -> Sample:
        """All figures now."""
        processes = self.report("supervisor").get("processes", {})
        rss: dict[str, float] = {}
        for name, process in processes.items():
            for child, title in _tree(int(process["pid"]), name):
                rss[title] = rss.get(title, 0.0) + _rss_mib(child)
        store = Path(self.home.database)
        files = [store.with_name(store.name + end) for end in ("", "-wal")]
        with contextlib.closing(sqlite3.connect(f"file:{store}?mode=ro", uri=True)) as database:
            ((entities,),) = database.execute("SELECT count(*) FROM entity").fetchall()
            (row,) = database.execute(
                "SELECT coalesce(sum(n), 0) FROM counter WHERE what = 'rows' AND source = 'Span'"
            ).fetchall()
        return Sample(
            round(time.monotonic() - self.began, 1),
            {name: round(value, 1) for name, value in sorted(rss.items())},
            round(sum(file.stat().st_size for file in files if file.exists()) / 2**20, 1),
            entities,
            int(row[0]),
            {name: round(self.page(name), 3) for name in PAGES},
        )

    def wait_until_counted(self, least: int = 0) -> float:
        """Until all spans that are acknowledged now are in the store; how many seconds it took."""
        began = time.monotonic()
        spans = max(least, int(self.report("ingest").get("acknowledged_spans", 0)))
        while int(self.report("progress").get("spans", 0)) < spans:
            if time.monotonic() - began > 900:
                raise RuntimeError(f"not all of {spans:,} spans were counted")
            time.sleep(0.5)
        return time.monotonic() - began

    def stop(self) -> None:
        """End it."""
        self.process.send_signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(60)
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        self._log.close()


def _tree(pid: int, name: str) -> Iterator[tuple[int, str]]:
    """A process and what it has started; the JVM and its Python workers by names of their own."""
    yield pid, name
    with contextlib.suppress(OSError):
        # Any thread may have started it.
        threads = Path(f"/proc/{pid}/task").glob("*/children")
        for child in " ".join(file.read_text() for file in threads).split():
            command = Path(f"/proc/{child}/cmdline").read_bytes()
            title = "Spark's workers" if "Spark" in name else name
            yield from _tree(
                int(child), "Spark's JVM" if b"java" in command.split(b"\0")[0] else title
            )


def _rss_mib(pid: int) -> float:
    try:
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("VmRSS:"):
                return int(line.split()[1]) / 1024
    except OSError:
        pass
    return 0.0


def shop(run: Run, ended: threading.Event) -> None:
    """The traffic of a small shop, until it is ended: 50 spans a second."""
    names = itertools.cycle(["GET /", "GET /cart", "POST /orders"])
    services = itertools.cycle(["shop", "cart", "orders"])
    while not ended.wait(1.0):
        send(run.ingest, body(services, names, 50))


def flood(run: Run, *, endpoints: int, minutes: float) -> list[Sample]:
    """Distinct endpoint names at a steady pace, and samples meanwhile."""
    samples, sent, began = [run.sample()], 0, time.monotonic()
    names = (f"GET /{word(number)}" for number in itertools.count(1))
    due = interval_s = minutes * 60 / SAMPLES
    while sent < endpoints:
        content = body(itertools.repeat("shop"), names, min(_SPANS, endpoints - sent))
        send(run.ingest, content)
        sent += _SPANS
        elapsed = time.monotonic() - began
        if elapsed >= due:
            samples.append(run.sample())
            say(_line(samples[-1]))
            due += interval_s
        time.sleep(max(0.0, sent / endpoints * minutes * 60 - elapsed))
    return samples


def burst(run: Run, services: int) -> float:
    """Distinct service names as fast as they are taken; how many seconds that took."""
    began, sent = time.monotonic(), 0
    names = (f"s-{word(number)}" for number in itertools.count(1))
    while sent < services:
        send(run.ingest, body(names, itertools.repeat("GET /"), _SPANS))
        sent += _SPANS
    return time.monotonic() - began


def _line(sample: Sample) -> str:
    memory = ", ".join(f"{name} {mib:.0f}" for name, mib in sample.rss_mib.items())
    pages = ", ".join(f"{name} {took:.2f}" for name, took in sample.pages_s.items())
    return (
        f"{sample.at_s:5.0f} s: {sample.entities:,} entities, store {sample.store_mib:.0f} MiB, "
        f"MiB of {memory}; pages {pages} s"
    )


def goals_of(samples: Sequence[Sample], limit_entities: int) -> list[Goal]:
    """Of a run: pages, entities, the store, the memory of each process."""
    goals = [
        at_most(
            f"the page {page}, 95 % of the answers",
            quantile([sample.pages_s[page] for sample in samples], 0.95),
            SECOND,
            " s",
        )
        for page in PAGES
    ]
    entities = max(sample.entities for sample in samples)
    goals.append(at_most("entities in the store", entities, limit_entities, ""))
    store, most = max(sample.store_mib for sample in samples), limit_entities * ENTITY_BYTES / 2**20
    goals.append(at_most("the store", store, most, " MiB"))
    third = max(1, len(samples) // 3)
    for name in samples[-1].rss_mib:
        first, last = (
            max(sample.rss_mib.get(name, 0.0) for sample in part)
            for part in (samples[:third], samples[-third:])
        )
        most = GROWTH * first + SLACK_MIB
        goals.append(at_most(f"memory of {name}, last third of the run", last, most, " MiB"))
    return goals


def quantile(values: Sequence[float], part: float) -> float:
    """The smallest value that is not below so much of all."""
    return sorted(values)[max(0, math.ceil(part * len(values)) - 1)]


def main() -> int:
    """Run it."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.cardinality", description=__doc__)
    parser.add_argument("--endpoints", type=int, default=1_000_000)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--services", type=int, default=200_000)
    parser.add_argument("--option", action="append", default=[], help="of batchmill run")
    parser.add_argument(
        "--json", type=Path, help="file for the figures; of a full run, in benchmarks/results"
    )
    parser.add_argument("--quick", action="store_true", help="a minute, too short to quote")
    given = parser.parse_args()
    if given.quick:
        given.endpoints, given.minutes, given.services = 50_000, 1.0, 10_000
    elif given.json is None:
        given.json = RESULTS / "cardinality.json"
    print(machine_line())
    with scratch() as folder:
        run = Run(folder, given.option)
        ended = threading.Event()
        beside = threading.Thread(target=shop, args=(run, ended), daemon=True)
        try:
            run.wait_until_ready()
            beside.start()
            run.wait_until_counted(100)
            samples = flood(run, endpoints=given.endpoints, minutes=given.minutes)
            behind_s = run.wait_until_counted()
            samples.append(run.sample())
            say(f"all endpoints counted {behind_s:.0f} s after the last was sent")
            say(_line(samples[-1]))
            took_s = burst(run, given.services) if given.services else 0.0
            after_s = run.wait_until_counted()
            afterwards = [run.sample() for _ in range(3)]
            say(f"services sent in {took_s:.1f} s, counted {after_s:.0f} s later")
            say(_line(afterwards[-1]))
            offenders = run.report("progress").get("overflow", [])
        finally:
            ended.set()
            run.stop()
    rows = [
        [
            f"{sample.at_s:.0f}",
            f"{sample.counted:,}",
            f"{sample.entities:,}",
            f"{sample.store_mib:.0f}",
            f"{sum(mib for name, mib in sample.rss_mib.items() if name == 'pipeline'):.0f}",
            f"{sum(sample.rss_mib.values()):.0f}",
            *(f"{sample.pages_s[page]:.2f}" for page in PAGES),
        ]
        for sample in [*samples, *afterwards]
    ]
    headers = ["s", "spans", "entities", "store, MiB", "driver, MiB", "all, MiB", *PAGES]
    about = (__doc__ or "").split("\n\n")[1]
    print("\n" + Table("Names without end", about, headers, rows).render())
    for offender in offenders:
        print(json.dumps(offender))
    # Ten minutes and the burst's two, of five event types; and what the shop has.
    limit = int((given.minutes + 2) * 5_000 + 3 * 5 * 5_000)
    # The first sample is of a run that has just started.
    goals = goals_of([*samples[1:], *afterwards], limit)
    caption = "Limits of memory are those of the first third of the run, and a slack."
    lines = [goal.row() for goal in goals]
    print("\n" + Table("Goals", caption, ["goal", "limit", "measured", ""], lines).render())
    document = {
        "machine": machine(),
        "quick": given.quick,
        "goals": [goal.as_json() for goal in goals],
        "endpoints": given.endpoints,
        "minutes": given.minutes,
        "services": given.services,
        "services_s": round(took_s, 1),
        "samples": [asdict(sample) for sample in samples],
        "afterwards": [asdict(sample) for sample in afterwards],
        "overflow": offenders,
    }
    if given.json:
        write_json(given.json, document)
    return 1 if any(goal.verdict == "MISSED" for goal in goals) else 0


if __name__ == "__main__":
    os.environ.setdefault("PYTHONUNBUFFERED", "1")
    sys.exit(main())
