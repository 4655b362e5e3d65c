"""Compare the overview query of the web API with DuckDB over the raw calls, in one run.

    python -m benchmarks.query [--quick]

A month in an SQLite store, 10,000 entities; the query: 500 services over the last 24 hours, with
calls per minute, average, p99, success and apdex per hour and in total. It is sent over HTTP to a
real server process, then to DuckDB, in turn, so that other load on the machine affects both. The
results must agree. A missed goal does not fail the run.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import duckdb

from benchmarks import RESULTS
from benchmarks.kit.goals import Goal, at_most
from benchmarks.kit.machine import cpu_s, machine, machine_line
from benchmarks.kit.report import Table, say, spread, write_json
from benchmarks.query.data import APDEX_MS, PRECISION, Data, Size, make_data

DEFAULT_JSON = RESULTS / "query.json"
OURS, SLID, FIRST, PEER = "batchmill, HTTP", "a minute later", "the first question", "DuckDB"
LIMIT_MS = 300
SERVE = """
import asyncio, sys
from batchmill.web import WebServer, WebSettings
server = WebServer(sys.argv[1], WebSettings(port=0))
asyncio.run(server.serve(lambda: print(server.address, flush=True)))
"""
QUESTION = """
WITH calls AS (
    SELECT service, time // 3600000000 * 3600 AS hour, latency // {precision} * {precision} AS ms,
        latency, ok
    FROM read_parquet('{path}') WHERE time >= {start} AND time < {end})
SELECT service, hour, count(*) AS n, sum(latency) // count(*) AS avg,
    quantile_disc(ms, 0.99) AS p99, count(*) FILTER (ok) / count(*) AS success,
    (count(*) FILTER (ok AND latency <= {apdex})
        + count(*) FILTER (ok AND latency > {apdex} AND latency <= 4 * {apdex}) / 2) / count(*)
        AS apdex
FROM calls GROUP BY GROUPING SETS ((service, hour), (service))
"""
"""Each hour, and (where the hour is null) the whole range."""


@dataclass
class Answers:
    """How long each answer took, in milliseconds, by who gave it."""

    data: Data
    size: Size
    ms: dict[str, list[float]] = field(default_factory=dict)
    cpu_ms: dict[str, list[float]] = field(default_factory=dict)
    """How much of a core each answer took: less than that on a machine that others use as well."""
    answer_bytes: int = 0

    @property
    def cpu_ratio(self) -> float:
        """DuckDB's time of cores to ours."""
        pairs = zip(self.cpu_ms[PEER], self.cpu_ms[OURS], strict=True)
        return median(theirs / ours for theirs, ours in pairs)

    @property
    def ratio(self) -> float:
        """DuckDB's time divided by batchmill's, query by query."""
        pairs = zip(self.ms[PEER], self.ms[OURS], strict=True)
        return median(theirs / ours for theirs, ours in pairs)

    def goals(self) -> list[Goal]:
        ours = median(self.ms[OURS])
        what = f"overview of {self.size.services} services over 24 hours, median"
        return [at_most(what, ours, LIMIT_MS, " ms")]

    def tables(self) -> list[Table]:
        rows = [
            [
                name,
                str(len(times_ms)),
                f"{median(times_ms):.0f}",
                spread(times_ms, 0),
                f"{median(self.cpu_ms[name]):.0f}",
                spread(self.cpu_ms[name], 0),
            ]
            for name, times_ms in self.ms.items()
        ]
        size = self.size
        return [
            Table(
                f"The overview: {size.services} services over 24 hours",
                f"Milliseconds. SQLite, {size.days} days, {size.entities:,} entities, hours of "
                f"services, days of all entities, minutes for {size.hours} hours; DuckDB "
                f"over {self.data.calls:,} calls in Parquet. DuckDB to batchmill: "
                f"{self.ratio:.1f}x the time, {self.cpu_ratio:.1f}x the CPU time. The response has "
                f"{self.answer_bytes:,} bytes.",
                ["contender", "queries", "median", "spread", "CPU", "spread"],
                rows,
            ),
            Table(
                "Goal",
                "A missed goal does not fail the run.",
                ["goal", "limit", "measured", ""],
                [goal.row() for goal in self.goals()],
            ),
        ]

    def as_json(self) -> dict[str, Any]:
        return {
            "machine": machine(),
            "size": {**vars(self.size), "calls": self.data.calls},
            "ms": self.ms,
            "median_ms": {name: median(times_ms) for name, times_ms in self.ms.items()},
            "cpu_ms": self.cpu_ms,
            "median_cpu_ms": {name: median(times_ms) for name, times_ms in self.cpu_ms.items()},
            "ratio": self.ratio,
            "cpu_ratio": self.cpu_ratio,
            "answer_bytes": self.answer_bytes,
            "goals": [goal.as_json() for goal in self.goals()],
        }


@contextlib.contextmanager
def served(url: str) -> Iterator[tuple[str, int]]:
    """A server process; its host and port, and its id."""
    process = subprocess.Popen(
        [sys.executable, "-c", SERVE, url], stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        yield process.stdout.readline().strip().partition("://")[2], process.pid
    finally:
        process.terminate()
        process.wait()
        if process.stdout is not None:
            process.stdout.close()


def timed_request(host: str, end_s: int) -> tuple[float, bytes]:
    """The milliseconds of an answer, until all of it is there, and the answer."""
    connection = http.client.HTTPConnection(host, timeout=120)
    with contextlib.closing(connection):
        start = perf_counter()
        connection.request(
            "GET", f"/api/v1/services?from={end_s - 86_400}&to={end_s}&grain=hour&limit=500"
        )
        response = connection.getresponse()
        body = response.read()
        taken = perf_counter() - start
        if response.status != 200:
            raise SystemExit(f"HTTP {response.status}: {body[:300]!r}")
    return taken * 1000, body


def timed_query(connection: duckdb.DuckDBPyConnection, data: Data) -> tuple[float, Any]:
    """The same of DuckDB."""
    question = QUESTION.format(
        precision=PRECISION,
        path=data.parquet,
        start=(data.end_s - 86_400) * 10**6,
        end=data.end_s * 10**6,
        apdex=APDEX_MS,
    )
    start = perf_counter()
    rows = connection.execute(question).fetchall()
    return (perf_counter() - start) * 1000, rows


def agree(data: Data, body: bytes, rows: Sequence[tuple[Any, ...]]) -> None:
    """Raise unless both answered the same of the range, as far as their rounding is the same."""
    ours = {service["name"]: service["range"] for service in json.loads(body)["services"]}
    theirs = {data.services[row[0]]: row[2:] for row in rows if row[1] is None}
    if ours.keys() != theirs.keys():
        raise SystemExit("batchmill and DuckDB return different services")
    for name, (n, avg, p99, success, apdex) in theirs.items():
        mine = ours[name]
        same = (
            mine["cpm"] == round(n / 1440, 3)
            and int(mine["avg"]) == avg
            # Each takes another one of two neighbours where the rank falls between them.
            and abs(mine["p99"] - p99) <= max(3 * PRECISION, p99 // 20)
            and abs(mine["success"] - success) < 2e-4
            and abs(mine["apdex"] - apdex) < 2e-4
        )
        if not same:
            raise SystemExit(f"{name}: {mine} is not {(n, avg, p99, success, apdex)}")


def run(size: Size, rounds: int, folder: Path) -> Answers:
    """The whole benchmark."""
    say(f"making {size.days} days of data, and calls of {size.hours} hours")
    data = make_data(folder, size, int(time.time()) // 60 * 60)
    answers = Answers(data, size)
    peer = duckdb.connect()
    with served(data.store_url) as (host, pid):

        def ask(name: str, end_s: int) -> bytes:
            before = cpu_s(pid)
            taken, body = timed_request(host, end_s)
            answers.ms.setdefault(name, []).append(taken)
            answers.cpu_ms.setdefault(name, []).append((cpu_s(pid) - before) * 1000)
            return body

        body = ask(FIRST, data.end_s)
        answers.answer_bytes = len(body)
        agree(data, body, timed_query(peer, data)[1])
        for number in range(rounds):
            say(f"round {number + 1} of {rounds}")
            ask(OURS, data.end_s)
            ask(SLID, data.end_s - 60 * (number + 1))
            before = time.process_time()
            answers.ms.setdefault(PEER, []).append(timed_query(peer, data)[0])
            answers.cpu_ms.setdefault(PEER, []).append((time.process_time() - before) * 1000)
    peer.close()
    return answers


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.query", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a smaller run, too short to quote")
    parser.add_argument("--json", type=Path, default=None, help="file for the results")
    given = parser.parse_args(arguments)
    size = Size(services=50, entities=500, days=3, calls_per_minute=5) if given.quick else Size()
    with tempfile.TemporaryDirectory(prefix="batchmill-query-") as folder:
        answers = run(size, 3 if given.quick else 20, Path(folder))
    print(machine_line())
    for table in answers.tables():
        print()
        print(table.render())
    path = given.json or (None if given.quick else DEFAULT_JSON)
    if path is not None:
        write_json(path, answers.as_json())


if __name__ == "__main__":
    main()
