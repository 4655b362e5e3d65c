"""Compare traces by id and searches of the web API with DuckDB over the same files of kept spans.

    python -m benchmarks.traces [--spans 10000000] [--hours 10] [--no-batch]

Spans are decoded from requests, written as segments, and kept by the real keeper, whose processor
time is measured. Queries are sent over HTTP to a real server process, then to DuckDB, in turn. What
keeping costs a batch is measured with a pipeline on Spark and SQLite, with and without it. A missed
goal does not fail the run.
"""

from __future__ import annotations

import argparse
import functools
import http.client
import json
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any
from urllib.parse import urlencode

import duckdb
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from batchmill.ingest.decode import Limits, compiled
from batchmill.spool.rows import encode
from batchmill.store import open_store
from batchmill.traces import SpanKeeper
from benchmarks.ingest_bodies import bodies
from benchmarks.machine import cpu_s, machine, machine_line, tree_cpu_s
from benchmarks.report import Table, say, write_json

DEFAULT_JSON = Path(__file__).parent / "results" / "traces.json"
SEGMENT = 50_000
SERVE = """
import asyncio, sys
from pathlib import Path
from batchmill.web import WebServer, WebSettings
server = WebServer(sys.argv[1], WebSettings(port=0), traces=Path(sys.argv[2]))
asyncio.run(server.serve(lambda: print(server.address, flush=True)))
"""
GOALS = {"trace by id": 100.0, "search": 500.0}
"""Milliseconds, in the median."""


def make_segments(folder: Path, spans: int, start_s: float, seconds: float) -> list[Path]:
    """Segments of spans that are spread evenly over a time."""
    folder.mkdir(parents=True, exist_ok=True)
    made, rng, paths = bodies(100, SEGMENT // 100), np.random.default_rng(int(start_s)), []
    count = spans // SEGMENT
    for number in range(count):
        begin = start_s + seconds * number / count
        parts = []
        for place, body in enumerate(made):
            at = begin + seconds / count * place / len(made)
            sent = body.fresh(rng, int(at * 1e9))
            decoded = compiled.decode_compiled(sent, compiled.PROTOBUF, Limits())
            assert decoded is not None
            parts.append(decoded.batch)
        path = folder / f"{number:06}.parquet"
        path.write_bytes(encode(compiled.CompiledSpans.join(parts)))  # type: ignore[arg-type]
        paths.append(path)
    return paths


def keep(folder: Path, spans: int, hours: float, now: float) -> dict[str, Any]:
    """Keep spans that end now; how much processor time that took."""
    keeper = SpanKeeper(folder / "traces", clock=lambda: now)
    took, first = 0.0, now - hours * 3600
    step = 40 * SEGMENT
    for done in range(0, spans, step):
        some = min(step, spans - done)
        begin = first + hours * 3600 * done / spans
        for path in make_segments(folder / "made", some, begin, hours * 3600 * some / spans):
            keeper.take(path.rename(path.with_name(f"{done}-{path.name}")))
        started = time.process_time()
        keeper.tend(everything=True)
        took += time.process_time() - started
        say(f"{done + some:,} spans kept, {took / (done + some) * 1e6:.2f} processor s a million")
    stats = keeper.stats
    return {
        "spans": stats.spans,
        "files": stats.files,
        "bytes_per_span": round(stats.bytes / max(1, stats.spans), 1),
        "cpu_s_per_million": round(took / spans * 1e6, 2),
    }


def batch_cost(folder: Path, spans: int) -> dict[str, Any]:
    """Seconds and processor seconds of the batches of a full spool, with and without keeping."""
    from batchmill.oal import core_script
    from batchmill.spark import Pipeline, PipelineSettings

    now = time.time()
    results: dict[str, Any] = {}
    for number, name in enumerate(["warm-up", "off", "on", "off", "on", "off", "on"]):
        place = folder / f"batch-{number}"
        make_segments(place / "spool" / "Span", spans, now - 600, 300)
        with Pipeline(
            oal=core_script(),
            spool=place / "spool",
            store=f"sqlite:///{place}/metrics.db",
            checkpoint=place / "checkpoint",
            master="local[2]",
            dedup_s=600,
            settings=PipelineSettings(),
            remove_read=True,
            keep_spans=place / "traces" if name == "on" else None,
        ) as pipeline:
            keeping = [0.0]
            if name == "on":  # measured apart: it runs beside the batches, at the lowest priority
                _measure_tending(keeping)
            before, started = tree_cpu_s(_own()), time.perf_counter()
            reports = pipeline.run_available()
            seconds, used = time.perf_counter() - started, tree_cpu_s(_own()) - before
        took = sum(sum(report.phases.values()) for report in reports)
        own = results.setdefault(name, {"batch_s": [], "batch_cpu_s": [], "keeper_cpu_s": []})
        own["batch_s"].append(round(took, 3))
        own["batch_cpu_s"].append(round(used - keeping[0], 3))
        own["keeper_cpu_s"].append(round(keeping[0], 3))
        say(
            f"{name}: batches {took:.2f} s of {seconds:.2f} s, {used:.2f} processor s, "
            f"{keeping[0]:.2f} of them the keeper's"
        )
    results.pop("warm-up")
    return {"spans": spans, **results}


def _own() -> int:
    import os

    return os.getpid()


def _measure_tending(total: list[float]) -> None:
    original = SpanKeeper.tend

    def tend(keeper: SpanKeeper, *, everything: bool = False) -> None:
        started = time.thread_time()
        original(keeper, everything=everything)
        total[0] += time.thread_time() - started
        SpanKeeper.tend = original  # type: ignore[method-assign]

    SpanKeeper.tend = tend  # type: ignore[assignment,method-assign]


class Client:
    """Asks the server."""

    def __init__(self, address: str) -> None:
        self._connection = http.client.HTTPConnection(address.partition("://")[2], timeout=120)

    def get(self, path: str, **params: Any) -> Any:
        """The JSON of an answer."""
        self._connection.request("GET", f"{path}?{urlencode(params)}" if params else path)
        response = self._connection.getresponse()
        body = response.read()
        assert response.status == 200, body[:300]
        return json.loads(body)


def timed(work: Callable[[], Any], times: Sequence[float] | None = None) -> tuple[Any, float]:
    """What a call gives, and its milliseconds."""
    started = time.perf_counter()
    result = work()
    return result, (time.perf_counter() - started) * 1000


def queries(folder: Path, now: float, rounds: int) -> tuple[list[dict[str, Any]], Table]:
    """The times of the server and of DuckDB, in turn."""
    files = sorted((folder / "traces").glob("hour=*/*.parquet"))
    rng = random.Random(1)
    ids = []
    for path in rng.choices(files, k=rounds):
        file = pq.ParquetFile(path)
        group = file.read_row_group(rng.randrange(file.num_row_groups), ["trace_id"])
        ids.append(group["trace_id"][rng.randrange(group.num_rows)].as_py())
    url = f"sqlite:///{folder}/metrics.db"
    open_store(url).close()
    command = [sys.executable, "-c", SERVE, url, str(folder / "traces")]
    rows = []
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            client = Client(server.stdout.readline().strip())
            peer = duckdb.connect()
            source = f"read_parquet('{folder}/traces/hour=*/*.parquet', hive_partitioning=true)"

            def by_id(trace_id: str) -> tuple[int, int]:
                ours = client.get(f"/api/v1/traces/{trace_id}")
                return len(ours["spans"]), 0

            def ask_peer(query: str) -> list[Any]:
                return peer.execute(query).fetchall()

            first_s = now - 3600
            searches: dict[str, tuple[dict[str, Any], str]] = {
                "search: a service": ({"service": "service-3"}, "service = 'service-3'"),
                "search: service and endpoint": (
                    {"service": "service-0", "endpoint": "GET /page/9"},
                    "service = 'service-0' and name = 'GET /page/9'",
                ),
                "search: longer than 2 s": ({"min_ms": 2000}, "duration_us >= 2000000"),
                "search: an attribute": (
                    {"attribute": "http.route=/thing/15"},
                    "attributes['http.route'] = '/thing/15'",
                ),
                "search: no match": (
                    {"attribute": "user.id=none"},
                    "attributes['user.id'] = 'none'",
                ),
            }
            _, cold = timed(lambda: by_id(ids[0]))
            ours, theirs = [], []
            for trace_id in ids:
                cpu = cpu_s(server.pid)
                (count, _), took = timed(functools.partial(by_id, trace_id))
                ours.append((took, (cpu_s(server.pid) - cpu) * 1000))
                query = f"select * from {source} where trace_id = '{trace_id}'"
                found, took = timed(functools.partial(ask_peer, query))
                assert len({row[1] for row in found}) == count, (len(found), count)
                theirs.append(took)
            rows.append(_row("trace by id", ours, theirs, GOALS["trace by id"]))
            rows[-1]["first_ms"] = round(cold, 1)
            for name, (params, where) in searches.items():
                ours, theirs = [], []
                for _ in range(max(3, rounds // 10)):
                    given = {"from": first_s, "to": now, "limit": 20, **params}
                    cpu = cpu_s(server.pid)
                    result, took = timed(functools.partial(client.get, "/api/v1/traces", **given))
                    ours.append((took, (cpu_s(server.pid) - cpu) * 1000))
                    query = (
                        f"select trace_id, max(time) as newest from {source} where "
                        f"time between to_timestamp({first_s}) and to_timestamp({now}) and {where} "
                        "group by trace_id order by newest desc limit 20"
                    )
                    found, took = timed(functools.partial(ask_peer, query))
                    assert {row[0] for row in found} == {
                        trace["trace_id"] for trace in result["traces"]
                    } or len(found) == len(result["traces"]), name
                    theirs.append(took)
                rows.append(_row(name, ours, theirs, GOALS["search"]))
        finally:
            server.terminate()
    header = ("query", "batchmill ms", "its processor ms", "slowest", "DuckDB ms", "goal ms")
    lines = [
        (
            row["query"],
            *(f"{row[key]:,.0f}" for key in ("ms", "cpu_ms", "max_ms", "duckdb_ms", "goal")),
        )
        for row in rows
    ]
    return rows, Table("Queries", "Medians; DuckDB over the same files, in turn.", header, lines)


def _row(
    name: str, ours: Sequence[tuple[float, float]], theirs: Sequence[float], goal: float
) -> dict[str, Any]:
    return {
        "query": name,
        "ms": round(median(took for took, _ in ours), 1),
        "cpu_ms": round(median(used for _, used in ours), 1),
        "max_ms": round(max(took for took, _ in ours), 1),
        "duckdb_ms": round(median(theirs), 1),
        "goal": goal,
        "queries": len(ours),
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print and write the results."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--spans", type=int, default=10_000_000)
    parser.add_argument("--hours", type=float, default=10.0)
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--batch-spans", type=int, default=500_000)
    parser.add_argument("--no-batch", action="store_true")
    parser.add_argument("--json", type=Path, default=DEFAULT_JSON)
    given = parser.parse_args(arguments)
    pa.set_cpu_count(1)
    say(machine_line())
    now = float(int(time.time()))
    document: dict[str, Any] = {"machine": machine(), "hours": given.hours}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        document["kept"] = keep(folder, given.spans, given.hours, now)
        say(json.dumps(document["kept"]))
        document["queries"], table = queries(folder, now, given.rounds)
        say(table.render())
        write_json(given.json, document)
        if not given.no_batch:
            document["batch"] = batch_cost(folder, given.batch_spans)
            write_json(given.json, document)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
