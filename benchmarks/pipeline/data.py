"""The events, spans and metrics for the pipeline's benchmarks, reproducible for the same numbers.

Created once in a temporary folder, and kept there for the next run.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from benchmarks.kit.report import say

VERSION = 1
"""Part of a folder's name: raise it when what is in there changes."""
SEED = 20260330
SOURCE = "Endpoint"
START = datetime(2026, 3, 30, 10, tzinfo=UTC)
MINUTES = 60
SEGMENTS = 20
SERVICES, ENDPOINTS = 200, 50
SKEW = 1.595
"""Zipf's exponent, of services and of endpoints: 10 million events are 212,000 (entity, minute)."""
MILD_SKEW = 1.0
"""Nearly every entity is there in nearly every minute."""

_TYPES = ("HTTP", "RPC", "gRPC", "MQ")
_TYPE_SHARES = (0.7, 0.1, 0.1, 0.1)
_CODES = (200, 201, 204, 302, 400, 404, 500, 503)
_CODE_SHARES = (0.8, 0.05, 0.03, 0.02, 0.02, 0.05, 0.02, 0.01)

SIX = """
endpoint_cpm        = from(Endpoint.*).cpm();
endpoint_resp_time  = from(Endpoint.latency).longAvg();
endpoint_sla        = from(Endpoint.*).percent(status == true);
endpoint_percentile = from(Endpoint.latency).percentile2(10);
endpoint_apdex      = from(Endpoint.latency).apdex(serviceName, status);
endpoint_max        = from(Endpoint.latency).max();
"""
"""The metrics of the comparison."""


def sixty() -> str:
    """Ten times as many metrics of the same source: nine slices of its calls, and more on all."""
    slices = {
        "http": "type == RequestType.HTTP",
        "rpc": "type == RequestType.RPC",
        "grpc": "type == RequestType.gRPC",
        "mq": "type == RequestType.MQ",
        "failed": "status == false",
        "slow": "latency > 500",
        "server_error": "httpResponseStatusCode >= 500",
        "client_error": "httpResponseStatusCode in [400, 404]",
        "api": 'name like "%/endpoint-1%"',
    }
    lines = [SIX]
    for name, where in slices.items():
        lines += [
            f"e_{name}_cpm = from(Endpoint.*).filter({where}).cpm();",
            f"e_{name}_count = from(Endpoint.*).filter({where}).count();",
            f"e_{name}_resp_time = from(Endpoint.latency).filter({where}).longAvg();",
            f"e_{name}_max = from(Endpoint.latency).filter({where}).max();",
            f"e_{name}_sla = from(Endpoint.*).filter({where}).percent(status == true);",
        ]
    for name in ("http", "rpc", "failed"):
        lines.append(
            f"e_{name}_percentile = from(Endpoint.latency).filter({slices[name]}).percentile2(10);"
        )
    lines += [
        "e_histogram = from(Endpoint.latency).histogram(100, 20);",
        "e_http_histogram = from(Endpoint.latency).filter(type == RequestType.HTTP)"
        ".histogram(50, 10);",
        "e_total = from(Endpoint.latency).sum();",
        "e_min = from(Endpoint.latency).min();",
        "e_by_type = from(Endpoint.*).labelCount(type);",
        "e_error_rate = from(Endpoint.*).rate(status == false, latency > 0);",
    ]
    return "\n".join(lines)


def events_folder(
    events: int, *, services: int = SERVICES, skew: float = SKEW, segments: int = SEGMENTS
) -> Path:
    """A spool with ``events`` rows of one hour, in segments by time."""
    name = f"events-{events}-{services}x{ENDPOINTS}-{skew:g}-{segments}"
    return made_once(
        name,
        lambda folder: _write_events(folder / SOURCE, events, services, skew, segments),
    )


def part_of(spool: Path, segments: int) -> Path:
    """A spool with the first few segments of another."""

    def link(folder: Path) -> None:
        (folder / SOURCE).mkdir()
        for file in sorted((spool / SOURCE).glob("*.parquet"))[:segments]:
            os.link(file, folder / SOURCE / file.name)

    return made_once(f"{spool.name.removesuffix(f'-v{VERSION}')}-first{segments}", link)


def cache_folder() -> Path:
    """Where the files are kept."""
    return Path(tempfile.gettempdir()) / "batchmill-benchmarks"


def made_once(name: str, make: Any) -> Path:
    target = cache_folder() / f"{name}-v{VERSION}"
    if not target.is_dir():
        say(f"making {target}")
        fresh = target.with_name(f"{target.name}.{os.getpid()}")
        shutil.rmtree(fresh, ignore_errors=True)
        fresh.mkdir(parents=True)
        make(fresh)
        fresh.replace(target)
    return target


def _write_events(folder: Path, events: int, services: int, skew: float, segments: int) -> None:
    folder.mkdir()
    rng = np.random.default_rng(SEED)
    start_us = int(START.timestamp()) * 1_000_000
    span_us = MINUTES * 60_000_000 // segments
    names = [f"/service-{s}/endpoint-{e}" for s in range(services) for e in range(ENDPOINTS)]
    service_names = [f"service-{s}" for s in range(services)]
    for number in range(segments):
        count = events // segments + (number < events % segments)
        times = np.sort(rng.integers(0, span_us, count)) + start_us + number * span_us
        service = _zipf(rng, services, skew, count)
        endpoint = service * ENDPOINTS + _zipf(rng, ENDPOINTS, skew, count)
        # Each service has a pace of its own.
        latency = rng.lognormal(3.5, 0.9, count) * (1 + service % 7 * 0.5)
        table = pa.table(
            {
                "time": pa.array(times).cast(pa.timestamp("us", tz="UTC")),
                "name": texts(endpoint, names),
                "serviceName": texts(service, service_names),
                "serviceLayer": texts(np.zeros(count, np.int32), ["GENERAL"]),
                "latency": pa.array(np.minimum(latency, 60_000).astype(np.int32)),
                "status": pa.array(rng.random(count) < 0.97),
                "httpResponseStatusCode": pa.array(
                    rng.choice(np.asarray(_CODES, np.int32), count, p=_CODE_SHARES)
                ),
                "type": texts(rng.choice(len(_TYPES), count, p=_TYPE_SHARES), _TYPES),
            }
        )
        pq.write_table(table, folder / f"{number:05d}.parquet")


def _zipf(rng: np.random.Generator, kinds: int, skew: float, count: int) -> npt.NDArray[np.int64]:
    weights = np.arange(1, kinds + 1, dtype=np.float64) ** -skew
    edges = np.cumsum(weights / weights.sum())
    edges[-1] = 1.0
    return np.searchsorted(edges, rng.random(count), side="right").astype(np.int64)


def texts(codes: npt.NDArray[Any], values: Sequence[str]) -> pa.Array:
    coded = pa.DictionaryArray.from_arrays(pa.array(codes.astype(np.int32)), pa.array(values))
    return coded.cast(pa.string())


_MAP = pa.map_(pa.string(), pa.string())
_MOMENT = pa.timestamp("us", tz="UTC")
_SPAN = pa.schema(
    [
        *((column, pa.string()) for column in ("trace_id", "span_id", "parent_span_id", "name")),
        *((column, pa.string()) for column in ("kind", "status", "service")),
        ("time", _MOMENT),
        ("end_time", _MOMENT),
        ("resource", _MAP),
        ("attributes", _MAP),
    ]
)


def spans_table(count: int, number: int) -> pa.Table:
    """``count`` spans of one minute, whole traces but for the last; each ``number`` has its own."""
    rng = np.random.default_rng([SEED, number])
    start = START + timedelta(minutes=number % MINUTES)
    rows: list[dict[str, Any]] = []
    while len(rows) < count:
        at = start + timedelta(microseconds=int(rng.integers(60_000_000)))
        rows += _trace(rng, at)
    return pa.Table.from_pylist(rows[:count], schema=_SPAN)


def _trace(rng: np.random.Generator, at: datetime) -> Iterator[dict[str, Any]]:
    """A gateway, one to four services behind it, each with a database, a cache or a queue."""
    trace = rng.bytes(16).hex()

    def span(
        kind: str, service: int, name: str, parent: str | None, ms: float, **attributes: str
    ) -> dict[str, Any]:
        return {
            "trace_id": trace,
            "span_id": rng.bytes(8).hex(),
            "parent_span_id": parent,
            "name": name,
            "kind": kind,
            "status": "ERROR" if rng.random() < 0.02 else "UNSET",
            "service": f"service-{service}",
            "time": at,
            "end_time": at + timedelta(milliseconds=ms),
            "resource": {"service.instance.id": f"pod-{service}-{int(rng.integers(3))}"},
            "attributes": {key.replace("__", "."): value for key, value in attributes.items()},
        }

    http = {"http__request__method": "GET", "http__response__status_code": "200"}
    root = span(
        "SERVER", 0, f"GET /page/{int(rng.integers(20))}", None, rng.lognormal(4, 1), **http
    )
    yield root
    for _ in range(int(rng.integers(1, 5))):
        service, ms = int(rng.integers(1, 20)), float(rng.lognormal(3, 1))
        call = span("CLIENT", 0, "GET", root["span_id"], ms, **http)
        served = span(
            "SERVER", service, f"GET /thing/{int(rng.integers(20))}", call["span_id"], ms, **http
        )
        yield from (call, served)
        match int(rng.integers(4)):
            case 0 | 1:
                yield span(
                    "CLIENT", service, "SELECT shop", served["span_id"], rng.lognormal(3, 1.5),
                    db__system__name="postgresql", db__namespace="shop", server__address="db",
                    db__query__text=f"select * from t where id = {int(rng.integers(1000))}",
                )  # fmt: skip
            case 2:
                yield span(
                    "CLIENT", service, "GET", served["span_id"], rng.lognormal(1, 1),
                    db__system__name="redis", db__operation__name="GET", server__address="cache",
                    db__query__text=f"GET k:{int(rng.integers(1000))}",
                )  # fmt: skip
            case _:
                sent = span(
                    "PRODUCER", service, "orders publish", served["span_id"], 2.0,
                    messaging__system="kafka", messaging__destination__name="orders",
                    server__address="broker",
                )  # fmt: skip
                yield sent
                yield span(
                    "CONSUMER", 19, "orders process", sent["span_id"], rng.lognormal(2, 1),
                    messaging__system="kafka", messaging__destination__name="orders",
                    server__address="broker",
                )  # fmt: skip
