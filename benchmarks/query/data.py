"""Data for the query benchmark: calls as Parquet, and a store with their metrics.

DuckDB computes the metrics of the last day from the calls; they are written to a store with the
real schema, and repeated for the days before. So both contenders must return the same result.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import duckdb
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from batchmill.oal import LOG_BITS, Metric, core_script, load
from batchmill.sources import Grain, endpoint_id, instance_id, service_id
from batchmill.store import Batch, EntityRow, Layout, open_store

APDEX_MS = 500
"""Up to this a call is satisfied, up to four times this it is tolerated."""
PRECISION = 10
STREAM = "live"
_DIGITS = {Grain.MINUTE: 12, Grain.HOUR: 10, Grain.DAY: 8}


@dataclass(frozen=True)
class Size:
    """How much there is."""

    services: int = 500
    entities: int = 10_000
    """With endpoints and instances."""
    days: int = 30
    calls_per_minute: int = 20
    """Of a service, on the average."""
    hours: int = 24
    """Of calls, up to now; so far back there are minutes."""


@dataclass(frozen=True)
class Data:
    """Where everything is."""

    store_url: str
    parquet: Path
    end_s: int
    calls: int
    services: Sequence[str]


def make_data(folder: Path, size: Size, end_s: int) -> Data:
    """Calls of the hours before ``end_s``, and a store with them and the days before."""
    parquet, path = folder / "calls.parquet", folder / "store.db"
    names = [f"service-{number:03}" for number in range(size.services)]
    calls = _write_calls(parquet, size, end_s)
    url = f"sqlite:///{path}"
    with open_store(url, ttl_days=size.days + 1) as store:
        metrics = load(core_script())
        layout = store.register(metrics, stream=STREAM)
        epoch = store.claim(STREAM, "benchmark", fresh=True, committed=None).epoch
        newest = int(datetime.fromtimestamp(end_s - 60, UTC).strftime("%Y%m%d%H%M"))
        store.commit(Batch(STREAM, epoch, 0, newest, _entities(names, size)))
    columns = _Columns({metric.name: metric for metric in metrics}, layout)
    connection = sqlite3.connect(path)
    try:
        _write_rows(connection, parquet, columns, size, end_s)
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    finally:
        connection.close()
    return Data(url, parquet, end_s, calls, names)


def _write_calls(path: Path, size: Size, end_s: int) -> int:
    random = np.random.default_rng(7)
    busy = random.lognormal(0, 0.8, size.services)
    busy /= busy.sum()
    slow = random.uniform(3.0, 5.5, size.services)  # a median of 20 to 250 ms
    broken = random.beta(1, 60, size.services)
    schema = pa.schema(
        [("service", pa.int32()), ("time", pa.int64()), ("latency", pa.int32()), ("ok", pa.bool_())]
    )
    written = 0
    with pq.ParquetWriter(path, schema, compression="zstd") as writer:
        for hour in range(size.hours):
            count = size.services * size.calls_per_minute * 60
            service = random.choice(size.services, count, p=busy).astype(np.int32)
            start_s = end_s - (size.hours - hour) * 3600
            times = np.sort(random.integers(start_s * 10**6, (start_s + 3600) * 10**6, count))
            latency = np.minimum(random.lognormal(slow[service], 0.7), 60_000).astype(np.int32)
            ok = random.random(count) >= broken[service]
            writer.write_table(
                pa.table([service, times, latency, ok], schema=schema), row_group_size=200_000
            )
            written += count
    return written


def _entities(names: Sequence[str], size: Size) -> list[EntityRow]:
    entities = [
        EntityRow(
            "service", service_id(name, True), name, frozenset({"GENERAL"}), {"service": name}
        )
        for name in names
    ]
    number = 0
    while len(entities) < size.entities:
        service = names[number % len(names)]
        kind = "instance" if number % 8 == 0 else "endpoint"
        name = f"{kind} {number // len(names)}"
        make = instance_id if kind == "instance" else endpoint_id
        id_ = make(service_id(service, True), name)
        entities.append(
            EntityRow(kind, id_, name, frozenset({"GENERAL"}), {"service": service, "name": name})
        )
        number += 1
    return entities


@dataclass(frozen=True)
class _Columns:
    metrics: dict[str, Metric]
    layout: Layout

    def of(self, prefix: str) -> list[tuple[str, int]]:
        """The columns of a kind's metrics, each with the measure that it holds."""
        measures = {
            f"{prefix}_cpm": (0,),
            f"{prefix}_resp_time": (1, 0),
            f"{prefix}_sla": (2, 0),
            f"{prefix}_percentile": (5,),
            f"{prefix}_percentile_micros": (6,),
            f"{prefix}_resp_time_micros": (7, 8, 0),
            f"{prefix}_apdex": (3, 4, 0),
        }
        return [
            (column, measure)
            for name, given in measures.items()
            if name in self.metrics
            for column, measure in zip(self.layout.columns[name], given, strict=True)
        ]


MEASURES = """
WITH calls AS (
    SELECT service, strftime(make_timestamp(time), '{form}')::BIGINT AS bucket, latency, ok,
        latency::BIGINT * 1000 AS micros,
        greatest(length(bin(latency::BIGINT * 1000)) - {log_bits} - 1, 0) AS shift
    FROM read_parquet('{path}')),
steps AS (SELECT bucket, service, latency // {precision} AS step, count(*) AS n
    FROM calls GROUP BY ALL),
logs AS (SELECT bucket, service, (shift << {log_bits}) + (micros >> shift) AS step, count(*) AS n
    FROM calls GROUP BY ALL)
SELECT * FROM (
    SELECT bucket, service, count(*), sum(latency)::BIGINT, count(*) FILTER (ok),
        count(*) FILTER (ok AND latency <= {apdex}),
        count(*) FILTER (ok AND latency > {apdex} AND latency <= 4 * {apdex})
    FROM calls GROUP BY ALL)
JOIN (SELECT bucket, service, {text} FROM steps GROUP BY ALL) USING (bucket, service)
JOIN (SELECT bucket, service, {text} FROM logs GROUP BY ALL) USING (bucket, service)
JOIN (SELECT bucket, service, 0, sum(micros)::BIGINT FROM calls GROUP BY ALL)
    USING (bucket, service)
ORDER BY bucket, service
"""
"""Rows of a grain: bucket, service and the measures 0 to 8 that columns hold."""
TEXT = "string_agg(CASE WHEN n = 1 THEN step::VARCHAR ELSE step || ':' || n END, ',' ORDER BY step)"
_FORMS = {Grain.MINUTE: "%Y%m%d%H%M", Grain.HOUR: "%Y%m%d%H", Grain.DAY: "%Y%m%d"}


def _write_rows(
    connection: sqlite3.Connection, parquet: Path, columns: _Columns, size: Size, end_s: int
) -> None:
    keys = dict(connection.execute("SELECT name, key FROM entity WHERE kind = 'service'"))
    numbered = [keys[name] for name in sorted(keys)]
    reader = duckdb.connect()
    rows: dict[Grain, list[tuple[Any, ...]]] = {}
    for grain in Grain:
        query = MEASURES.format(
            form=_FORMS[grain],
            precision=PRECISION,
            log_bits=LOG_BITS,
            text=TEXT,
            apdex=APDEX_MS,
            path=parquet,
        )
        rows[grain] = [
            (bucket, numbered[service], *rest)
            for bucket, service, *rest in reader.execute(query).fetchall()
        ]
    reader.close()
    for grain in Grain:
        _insert(connection, f"{grain.value}_Service", columns.of("service"), rows[grain])
        if grain is not Grain.MINUTE:
            for number in range(1, size.days):
                _insert(
                    connection,
                    f"{grain.value}_Service",
                    columns.of("service"),
                    _earlier(rows[grain], grain, number, end_s, size),
                )
    for kind, source, prefix in (
        ("endpoint", "Endpoint", "endpoint"),
        ("instance", "ServiceInstance", "service_instance"),
    ):
        others = [
            key for (key,) in connection.execute("SELECT key FROM entity WHERE kind = ?", [kind])
        ]
        for grain, days in ((Grain.HOUR, 2), (Grain.DAY, size.days)):
            by_bucket: dict[int, list[tuple[Any, ...]]] = {}
            for row in rows[grain]:
                by_bucket.setdefault(row[0], []).append(row)
            spread = [
                (bucket, key, *bucket_rows[number % len(bucket_rows)][2:])
                for bucket, bucket_rows in by_bucket.items()
                for number, key in enumerate(others)
            ]
            table = f"{grain.value}_{source}"
            _insert(connection, table, columns.of(prefix), spread)
            for number in range(1, days):
                earlier = _earlier(spread, grain, number, end_s, size)
                _insert(connection, table, columns.of(prefix), earlier)


def _earlier(
    rows: Sequence[tuple[Any, ...]], grain: Grain, days: int, end_s: int, size: Size
) -> Iterator[tuple[Any, ...]]:
    """The same rows so many times 24 hours before; whole buckets only, and none twice."""
    moved: dict[int, int] = {}
    form = _FORMS[grain]
    first = rows[0][0]
    for row in rows:
        if grain is Grain.DAY and row[0] != first:
            continue
        if row[0] not in moved:
            moment = datetime.strptime(str(row[0]), form).replace(tzinfo=UTC)
            moved[row[0]] = int((moment - timedelta(days=days)).strftime(form))
        if grain is Grain.DAY or moved[row[0]] < first:
            yield (moved[row[0]], *row[1:])


def _insert(
    connection: sqlite3.Connection,
    table: str,
    columns: Sequence[tuple[str, int]],
    rows: Iterator[tuple[Any, ...]] | Sequence[tuple[Any, ...]],
) -> None:
    names = ", ".join(["bucket", "entity", *(name for name, _ in columns)])
    marks = ", ".join("?" * (2 + len(columns)))
    places = [2 + measure for _, measure in columns]
    with connection:
        connection.executemany(
            f'INSERT OR IGNORE INTO "{table}" ({names}) VALUES ({marks})',
            ((row[0], row[1], *(row[place] for place in places)) for row in rows),
        )
