"""Traces by id and searches of the web API, beside DuckDB over the same files of kept spans."""

from __future__ import annotations

import functools
import http.client
import json
import random
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any
from urllib.parse import urlencode

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from batchmill.ingest.decode import PROTOBUF, Limits, decode_traces
from batchmill.spool import PackedSpans
from batchmill.spool.rows import encode
from batchmill.store import open_store
from batchmill.traces import SpanKeeper
from benchmarks.ingest.bodies import SEED, SPREAD_NS, Body, Made, trace
from benchmarks.ingest.receiver import scratch
from benchmarks.kit.machine import cpu_s
from benchmarks.kit.report import Table, say

SEGMENT = 50_000
"""Spans."""
BY_ID = "a trace by its id"
WITHOUT_ROUTE = {f"service-{number}" for number in range(1, 5)}
"""Services whose spans have an id in their names, and no ``http.route``."""
SERVE = """
import asyncio, sys
from pathlib import Path
from batchmill.web import WebServer, WebSettings
server = WebServer(sys.argv[1], WebSettings(port=0), traces=Path(sys.argv[2]))
asyncio.run(server.serve(lambda: print(server.address, flush=True)))
"""
SEARCHES: dict[str, tuple[dict[str, str], str]] = {
    "a service": ({"service": "service-7"}, "service = 'service-7'"),
    "a service and an endpoint": (
        {"service": "service-0", "name": "GET /page/9"},
        "service = 'service-0' and name = 'GET /page/9'",
    ),
    "an endpoint with ids in its name": (
        {"service": "service-3", "name": "GET /item/{id}"},
        "service = 'service-3' and regexp_full_match(name, 'GET /item/[0-9]+')"
        " and attributes['http.route'] is null",
    ),
    "what is called": (
        {"peer": "db:5432"},
        "kind = 'CLIENT' and attributes['server.address'] = 'db'"
        " and attributes['server.port'] = '5432'",
    ),
    "longer than 2 s": ({"min_ms": "2000"}, "duration_us >= 2000000"),
    "an attribute": (
        {"attribute": "http.route=/thing/15"},
        "attributes['http.route'] = '/thing/15'",
    ),
    "an attribute that no span has": (
        {"attribute": "user.id=none"},
        "attributes['user.id'] = 'none'",
    ),
}
"""Of the last hour: the parameters of the API, and the same for DuckDB."""
_LIMIT = 20


@dataclass
class Query:
    """How long answers to a query took, in turn with DuckDB's."""

    name: str
    ms: list[float] = field(default_factory=list)
    cpu_ms: list[float] = field(default_factory=list)
    """Processor time of the server."""
    duckdb_ms: list[float] = field(default_factory=list)

    @property
    def median_ms(self) -> float:
        """The time of an answer."""
        return median(self.ms)


@dataclass
class Kept:
    """What the keeper has made of the spans."""

    spans: int
    files: int
    bytes_per_span: float
    cpu_s_per_million: float
    """Processor seconds of sorting and merging, with nothing beside."""


@dataclass
class Queries:
    """All queries over the same files."""

    hours: float
    kept: Kept
    first_ms: float = 0.0
    """The first trace by id after the start of the server."""
    queries: list[Query] = field(default_factory=list)

    def tables(self) -> list[Table]:
        """What to print."""
        rows = [
            [
                query.name,
                *(f"{median(ms):,.0f}" for ms in (query.ms, query.cpu_ms, query.duckdb_ms)),
                f"{max(query.ms):,.0f}",
            ]
            for query in self.queries
        ]
        kept = self.kept
        return [
            Table(
                "Queries of kept spans",
                f"{kept.spans:,} spans of {self.hours:g} hours in {kept.files} files,"
                f" {kept.bytes_per_span} bytes a span; keeping took {kept.cpu_s_per_million}"
                " processor s a million. Milliseconds, medians; DuckDB over the same files, in"
                f" turn. The first answer of the server took {self.first_ms:,.0f} ms.",
                ["query", "batchmill", "its processor time", "DuckDB", "slowest of batchmill"],
                rows,
            )
        ]

    def as_json(self) -> dict[str, Any]:
        """What to keep."""
        return asdict(self)


def measure(*, spans: int, hours: float, rounds: int) -> Queries:
    """Keep spans that end now, and query them."""
    pa.set_cpu_count(1)
    now = float(int(time.time()))
    with scratch() as folder:
        result = Queries(hours, keep(folder, spans, hours, now))
        with serving(folder) as (client, pid):
            _measure(result, folder, client, pid, now, rounds)
    return result


def _requests(count: int, spans: int) -> list[Body]:
    """Requests as those of the other benchmarks, but for names with ids in them."""
    made = []
    for number in range(count):
        rng = random.Random(f"{SEED}-traces-{number}")
        rows: list[Made] = []
        while len(rows) < spans:
            for span in trace(rng, rng.randrange(SPREAD_NS)):
                if span.service in WITHOUT_ROUTE and "http.route" in span.attributes:
                    del span.attributes["http.route"]
                    span.name = f"GET /item/{rng.randrange(1_000, 100_000)}"
                rows.append(span)
        made.append(Body(rows[:spans]))
    return made


def make_segments(folder: Path, spans: int, start_s: float, seconds: float) -> list[Path]:
    """Segments of spans that are spread evenly over a time."""
    folder.mkdir(parents=True, exist_ok=True)
    made, rng, paths = _requests(100, SEGMENT // 100), np.random.default_rng(int(start_s)), []
    count, limits = spans // SEGMENT, Limits()
    for number in range(count):
        begin = start_s + seconds * number / count
        parts: list[PackedSpans] = []
        for place, body in enumerate(made):
            at = begin + seconds / count * place / len(made)
            sent = body.fresh(rng, int(at * 1e9))
            batch = decode_traces(sent, PROTOBUF, limits).batch
            assert isinstance(batch, PackedSpans)
            parts.append(batch)
        path = folder / f"{number:06}.parquet"
        path.write_bytes(encode(type(parts[0]).join(parts)))
        paths.append(path)
    return paths


def keep(folder: Path, spans: int, hours: float, now: float) -> Kept:
    """Keep spans that end now."""
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
    if stats.spans != spans:
        raise RuntimeError(f"{stats.spans:,} of {spans:,} spans are kept: {stats.dropped}")
    return Kept(spans, stats.files, round(stats.bytes / spans, 1), round(took / spans * 1e6, 2))


class Client:
    """Asks the server."""

    def __init__(self, address: str) -> None:
        self._connection = http.client.HTTPConnection(address.partition("://")[2], timeout=120)

    def get(self, path: str, **params: Any) -> Any:
        """The JSON of an answer."""
        self._connection.request("GET", f"{path}?{urlencode(params)}" if params else path)
        response = self._connection.getresponse()
        body = response.read()
        if response.status != 200:
            raise RuntimeError(f"{path}: {response.status} {body[:300]!r}")
        return json.loads(body)


@contextmanager
def serving(folder: Path) -> Iterator[tuple[Client, int]]:
    """A server of the kept spans, and its process."""
    url = f"sqlite:///{folder}/metrics.db"
    open_store(url).close()
    command = [sys.executable, "-c", SERVE, url, str(folder / "traces")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            yield Client(server.stdout.readline().strip()), server.pid
        finally:
            server.terminate()


def _measure(
    result: Queries, folder: Path, client: Client, pid: int, now: float, rounds: int
) -> None:
    import duckdb

    source = f"read_parquet('{folder}/traces/hour=*/*.parquet', hive_partitioning=true)"
    with duckdb.connect() as peer:

        def turn(query: Query, ours: Callable[[], Any], theirs: str) -> tuple[Any, list[Any]]:
            """Ask both."""
            spent = cpu_s(pid)
            answer, took = timed(ours)
            query.ms.append(took)
            query.cpu_ms.append(round((cpu_s(pid) - spent) * 1000, 1))
            rows, took = timed(lambda: peer.execute(theirs).fetchall())
            query.duckdb_ms.append(took)
            return answer, rows

        ids = _some_ids(folder, rounds + 1)
        path = "/api/v1/traces"
        _, result.first_ms = timed(lambda: client.get(f"{path}/{ids.pop()}"))
        query = Query(BY_ID)
        for trace_id in ids:
            get = functools.partial(client.get, f"{path}/{trace_id}")
            answer, rows = turn(
                query, get, f"select span_id from {source} where trace_id = '{trace_id}'"
            )
            if {span["span_id"] for span in answer["spans"]} != {row[0] for row in rows}:
                raise RuntimeError(f"{trace_id}: {len(rows)} spans of DuckDB, ours differ")
        result.queries.append(query)
        window = {"from": now - 3600, "to": now, "limit": _LIMIT}
        for name, (params, where) in SEARCHES.items():
            query = Query(f"search of the last hour: {name}")
            get = functools.partial(client.get, path, **window, **params)
            theirs = (
                f"select trace_id, max(time) as newest from {source} where time between"
                f" to_timestamp({window['from']}) and to_timestamp({now}) and {where}"
                f" group by trace_id order by newest desc limit {_LIMIT}"
            )
            for _ in range(max(3, rounds // 10)):
                answer, rows = turn(query, get, theirs)
                _check(name, answer["traces"], rows)
            result.queries.append(query)


def _check(name: str, ours: Sequence[dict[str, Any]], theirs: Sequence[tuple[Any, ...]]) -> None:
    """Both have found the same traces, but for those of one moment: which ones differs."""
    if len(ours) != len(theirs):
        raise RuntimeError(f"{name}: {len(ours)} traces, {len(theirs)} of DuckDB")
    if theirs:
        last = theirs[-1][1]
        sure = {trace_id for trace_id, newest in theirs if newest > last}
        if not sure <= {trace["trace_id"] for trace in ours}:
            raise RuntimeError(f"{name}: DuckDB has found other traces")


def _some_ids(folder: Path, count: int) -> list[str]:
    """Ids of traces, from anywhere in the files."""
    files, rng, ids = sorted((folder / "traces").glob("hour=*/*.parquet")), random.Random(1), []
    for path in rng.choices(files, k=count):
        file = pq.ParquetFile(path)
        group = file.read_row_group(rng.randrange(file.num_row_groups), ["trace_id"])
        ids.append(group["trace_id"][rng.randrange(group.num_rows)].as_py())
    return ids


def timed(work: Callable[[], Any]) -> tuple[Any, float]:
    """What a call gives, and its milliseconds."""
    started = time.perf_counter()
    answer = work()
    return answer, round((time.perf_counter() - started) * 1000, 2)
