"""Distinct endpoints without end, for ten minutes: the store is bounded, pages answer.

200,000 of them; ``python -m benchmarks.cardinality`` does the same with a million.
"""

from __future__ import annotations

import contextlib
import re
import sqlite3
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

pytest.importorskip("pyspark")
pytest.importorskip("uvicorn")

from pyspark.sql import SparkSession

from batchmill.oal import core_script
from batchmill.spark import PipelineSettings
from batchmill.store import open_store
from batchmill.testing import ManualClock
from tests.kit.pipelines import START, counted, pipeline, set_order, sqlite
from tests.web.kit import START_S, Call, CallWriter, Client, serving

pytestmark = [pytest.mark.slow(35), pytest.mark.timeout(900)]

MINUTES = 10
A_MINUTE = 20_000
LIMIT = 5_000
SHOWN = re.compile(r"(service|endpoint)_.*(cpm|sla|apdex|micros)\b.*;")
"""The metrics that pages show, and more: all of them would take twice the time."""
PAGES = ("/api/v1/services", "/api/v1/topology", "/api/v1/services/shop")


def write_minute(folder: Path, minute: int, services: int = 1) -> None:
    """A minute of spans, each with a name of its own; of one service, or of many."""
    numbers = range(minute * A_MINUTE, (minute + 1) * A_MINUTE)
    start = START + timedelta(minutes=minute)
    micros = int(start.timestamp()) * 1_000_000
    times = pa.array([micros + number % 60_000_000 for number in numbers], pa.int64())
    kind = pa.timestamp("us", tz="UTC")
    table = pa.table(
        {
            "time": times.cast(kind),
            "end_time": times.cast(kind),
            "trace_id": [f"{number:032x}" for number in numbers],
            "span_id": [f"{number:016x}" for number in numbers],
            "name": [f"GET /{_word(number)}" for number in numbers],
            "kind": ["SERVER"] * A_MINUTE,
            "status": ["UNSET"] * A_MINUTE,
            "service": ["shop"] * A_MINUTE
            if services == 1
            else [f"s-{_word(number)}" for number in numbers],
        }
    )
    path = folder / "Span" / f"{minute}.parquet"
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(table, path)
    set_order(path, minute)


def _word(number: int) -> str:
    """Letters, which no rule takes for an id."""
    return "".join("abcdefghij"[int(digit)] for digit in str(number))


def resident_mib() -> float:
    """The memory of this process, which is the driver's."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("VmRSS")).split()[1]) / 1024


PEER = """
WITH RECURSIVE line (number) AS (SELECT 1 UNION ALL SELECT number + 1 FROM line LIMIT 500000)
SELECT printf('entity-%032d', number), printf('name-%016d', number) FROM line
"""
MOST = 1.5
"""Processor time of an answer over the peer's, which takes 0.46 s on a quick machine."""


def processor_seconds(work: Callable[..., object], *given: Any, **more: Any) -> float:
    """Those of all threads of this process, so a server's in it, too."""
    began = time.process_time()
    work(*given, **more)
    return time.process_time() - began


def peer_rows(peer: sqlite3.Connection) -> list[Any]:
    """What answers are compared with: rows of an id and a name."""
    return peer.execute(PEER).fetchall()


def costs(client: Client, paths: Iterable[str], **params: Any) -> dict[str, float]:
    """The processor time of answers, over that of reading 500,000 rows from SQLite.

    Machines differ by ten times, so seconds would say nothing. The least of five, in turns.
    """
    took: defaultdict[str, list[float]] = defaultdict(list)
    with contextlib.closing(sqlite3.connect(":memory:")) as peer:
        for _ in range(5):
            took["peer"].append(processor_seconds(peer_rows, peer))
            for path in paths:
                took[path].append(processor_seconds(client.get, path, **params))
    peer_s = min(took.pop("peer"))
    ratios = {path: min(seconds) / peer_s for path, seconds in took.items()}
    sys.stdout.write(f"peer: {peer_s:.2f} processor s; answers, over it: {ratios}\n")
    return ratios


def test_endpoints_without_end_for_ten_minutes(spark: SparkSession, tmp_path: Path) -> None:
    """Ten batches, a minute each; then one of as many services."""
    clock = ManualClock(START.timestamp() + 60)
    for minute in range(MINUTES):
        write_minute(tmp_path / "spool", minute)
    write_minute(tmp_path / "spool", MINUTES, services=A_MINUTE)
    memory: list[float] = []
    sizes: list[int] = []
    settings = PipelineSettings(ttl_days=365, max_batch_files=1)
    lines = core_script().read_text("utf-8").splitlines()
    shown = "\n".join(line for line in lines if SHOWN.match(line))
    options: dict[str, Any] = {"oal": shown, "settings": settings, "clock": clock.now}
    with pipeline(spark, tmp_path, **options) as running:

        def note(report: Any) -> None:
            clock.advance(60)
            memory.append(resident_mib())
            sizes.append(sum(file.stat().st_size for file in tmp_path.glob("metrics.db*")))

        running.on_batch = note
        running.run_available()
        store = running.store
        endpoints = len(store.entities("endpoint"))
        services = len(store.entities("service"))
        everything = len(store.entities())
        spans = (MINUTES + 1) * A_MINUTE
        assert counted(store, "rows")["Span", ""] == spans
        calls = [value.value for value in store.values("service_cpm")]
        assert sum(n for n in calls if isinstance(n, int)) == spans
    # A few overflow entities are beyond the limit.
    assert MINUTES * LIMIT * 0.9 <= endpoints <= (MINUTES + 1) * LIMIT + 5
    assert services <= LIMIT + 5
    assert everything <= (MINUTES + 1 + 4) * LIMIT + 50
    report = f"driver, MiB: {[round(one) for one in memory]}; store: {sizes[-1] / 2**20:.0f} MiB"
    sys.stdout.write(f"{report}\n")
    assert memory[MINUTES - 1] - memory[3] < 100
    # Up to 256 MiB of it are SQLite's log.
    assert sizes[-1] < 450 * 2**20
    window = {"from_": int(START.timestamp()), "to": int(START.timestamp()) + 3600}
    with serving(sqlite(tmp_path)) as client:
        assert max(costs(client, PAGES, **window).values()) <= MOST


SERVICES, COPIES = 500, 100


def copy_entities(path: Path) -> None:
    """Give each entity of a store a hundred copies, with all of its rows."""
    step = 1_000_000
    with contextlib.closing(sqlite3.connect(path)) as store, store:
        store.execute("PRAGMA synchronous = OFF")
        store.execute("CREATE TEMP TABLE copy (number INTEGER)")
        store.executemany("INSERT INTO copy VALUES (?)", [(n,) for n in range(1, COPIES)])
        # The id of a relation is made of two others.
        store.execute(
            "INSERT INTO entity SELECT key + ? * number, kind, "
            "replace(id, '-', 'x' || number || '-') || 'x' || number, name || '-' || number, "
            "roles, last_day FROM copy, entity",
            (step,),
        )
        tables = store.execute(
            "SELECT name FROM sqlite_master WHERE type = 'table' AND name GLOB '*_[A-Z]*'"
        )
        for (table,) in tables.fetchall():
            columns = store.execute(f"SELECT * FROM {table} LIMIT 0").description
            cells = ", ".join(name for name, *_ in columns[2:])
            store.execute(
                f"INSERT INTO {table} SELECT bucket, entity + ? * number, {cells} "
                f"FROM copy, {table} ORDER BY bucket, entity + ? * number",
                (step, step),
            )


def test_pages_of_fifty_thousand_services(tmp_path: Path) -> None:
    """With 300,000 endpoints and 100,000 calls between them: within a bound of processor time."""
    calls = [
        Call(f"s{number}", START_S + place, endpoint=f"/{place}", caller=f"s{caller % SERVICES}")
        for number in range(SERVICES)
        for place in range(6)
        for caller in [number * 7 + place % 2 + 1]
    ]
    with open_store(sqlite(tmp_path)) as store:
        CallWriter(store).write(calls)
    copy_entities(tmp_path / "metrics.db")
    window = {"from_": START_S, "to": START_S + 3600}
    with serving(sqlite(tmp_path)) as client:
        shown = client.get("/api/v1/topology", **window)
        took = costs(client, PAGES[:2], **window)
    assert len(shown["nodes"]) + shown["left_out"]["nodes"] == SERVICES * COPIES
    assert len(shown["edges"]) + shown["left_out"]["edges"] == 2 * SERVICES * COPIES
    assert max(took.values()) <= MOST
    assert len(shown["edges"]) > 1_500
