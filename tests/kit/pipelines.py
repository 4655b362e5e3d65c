"""Pipelines in tests: scripts, segments of events, and what a store must hold after a run."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from hypothesis import HealthCheck, Phase, settings
from pyspark.sql import SparkSession

from batchmill.aggregate import Aggregator, to_arrow
from batchmill.oal import load
from batchmill.sources import Grain
from batchmill.spark import Pipeline, PipelineSettings
from batchmill.spool import delta_file
from batchmill.store import Store, TopRecord, open_store
from tests.kit.stores import all_states
from tests.oracle.catalog import Row
from tests.oracle.generate import random_events, random_spans, to_table, write_segments
from tests.oracle.metrics import expected_metrics
from tests.oracle.script import read_script
from tests.oracle.spans import spans_to_events
from tests.oracle.topn import TopN, TopNKey, expected_topn, normalise

START = datetime(2026, 3, 1, 10, tzinfo=UTC)

NOW = datetime(2026, 3, 20, tzinfo=UTC).timestamp()

MTIME = START.timestamp()
"""When the first segment was modified; see :func:`set_order`."""

EVERY_FUNCTION = """
// Every function of the language, and every kind of filter.
ep_cpm = from(Endpoint.*).cpm();
ep_count = from(Endpoint.*).count();
ep_avg = from(Endpoint.latency).longAvg();
ep_sum = from(Endpoint.latency).sum();
ep_max = from(Endpoint.latency).max();
ep_min = from(Endpoint.latency).min();
ep_sla = from(Endpoint.*).percent(status == true);
ep_rate = from(Endpoint.*).rate(status == true, httpResponseStatusCode >= 400);
ep_apdex = from(Endpoint.latency).apdex(serviceName, status);
ep_p1 = from(Endpoint.latency).percentile2(1);
ep_p10 = from(Endpoint.latency).percentile2(10);
ep_old = from(Endpoint.latency).percentile(10);
ep_log = from(Endpoint.latency).percentileLog();
ep_micros = from(Endpoint.latencyMicros).longAvg();
ep_micros_log = from(Endpoint.latencyMicros).filter(status == true).percentileLog();
ep_hist = from(Endpoint.latency).histogram(100, 5);
ep_codes = from(Endpoint.*).labelCount(rpcStatusCode);
ep_types = from(Endpoint.*).labelCount(type, 2);
ep_slow = from(Endpoint.latency).labelAvg(rpcStatusCode, latency);
ep_http = from(Endpoint.latency).filter(type == RequestType.HTTP).longAvg();
ep_not_http = from(Endpoint.*).filter(type != RequestType.HTTP).filter(status == false).cpm();
ep_in = from(Endpoint.*).filter(httpResponseStatusCode in [200, 404]).count();
ep_like = from(Endpoint.*).filter(name like "/%").count();
ep_tail = from(Endpoint.*).filter(name like "%s").count();
ep_mid = from(Endpoint.*).filter(serviceName like "%a%").count();
ep_null = from(Endpoint.*).filter(rpcStatusCode == null).count();
ep_there = from(Endpoint.*).filter(rpcStatusCode != null).filter(latency > 10).count();
ep_tagged = from(Endpoint.*).filter(tags contain "a:b").count();
ep_untagged = from(Endpoint.*).filter(tags not contain "a:b").count();
ep_tag_sum = from((str->long)Endpoint.tag["n"]).filter((str->long)tag["n"] > 0).sum();
ep_side = from(Endpoint.sideCar.internalRequestLatencyNanos).longAvg();
svc_cpm = from(Service.*).cpm().decorator("ServiceDecorator");
svc_apdex = from(Service.latency).apdex(name, status);
cpu = from(ServiceInstanceJVMCPU.usePercent).doubleAvg();
cpu_max = from(ServiceInstanceJVMCPU.usePercent).maxDouble();
cpu_min = from(ServiceInstanceJVMCPU.usePercent).minDouble();
cpu_sum = from(ServiceInstanceJVMCPU.usePercent).sum();
gc_time = from(ServiceInstanceJVMGC.time).filter(phase == GCPhase.NEW).sum();
gc_count = from(ServiceInstanceJVMGC.count).max();
k8s_write = from(K8SService.write.l4.duration).filter(detectPoint == DetectPoint.CLIENT).sum();
k8s_http = from(K8SService.protocol.http.latency).filter(protocol.success == true).percentile2(10);
rel = from(ServiceRelation.latency).filter(detectPoint == DetectPoint.SERVER).percentile2(10);
inst_rel = from(ServiceInstanceRelation.*).cpm();
ep_rel = from(EndpointRelation.rpcLatency).longAvg();
ep_rel_micros = from(EndpointRelation.latencyMicros).percentileLog();
inst = from(ServiceInstance.latency).longAvg();
gone = from(Endpoint.*).count();
disable(gone);
"""

EVERY_SOURCE = (
    "Endpoint",
    "Service",
    "ServiceInstance",
    "ServiceInstanceJVMCPU",
    "ServiceInstanceJVMGC",
    "K8SService",
    "ServiceRelation",
    "ServiceInstanceRelation",
    "EndpointRelation",
)

TWO_SOURCES = ("Endpoint", "ServiceInstanceJVMCPU")

EVERY_FUNCTION_OF_TWO = "\n".join(
    line
    for line in EVERY_FUNCTION.splitlines()
    if "Endpoint." in line or "JVMCPU" in line or line.startswith("disable")
)
"""Every function of the language, over two sources."""

SMALL = """
ep_cpm = from(Endpoint.*).cpm();
ep_avg = from(Endpoint.latency).longAvg();
ep_p10 = from(Endpoint.latency).percentile2(10);
ep_types = from(Endpoint.*).labelCount(type, 2);
"""
"""A few metrics of one source: where a fact does not depend on the function."""

OF_SPANS = """
cpm = from(Service.*).cpm();
rel = from(ServiceRelation.latency).percentile2(10);
rel_micros = from(ServiceRelation.latencyMicros).longAvg();
server = from(ServiceRelation.*).filter(detectPoint == DetectPoint.SERVER).count();
ep_rel = from(EndpointRelation.rpcLatency).longAvg();
ep_rel_micros = from(EndpointRelation.latencyMicros).percentileLog();
"""
"""Metrics of sources that spans become, relations included."""

MIXED_OAL = """
ep_cpm = from(Endpoint.*).cpm();
ep_count = from(Endpoint.*).count();
ep_avg = from(Endpoint.latency).longAvg();
ep_max = from(Endpoint.latency).max();
ep_min = from(Endpoint.latency).min();
ep_sla = from(Endpoint.*).percent(status == true);
ep_rate = from(Endpoint.*).rate(status == true, httpResponseStatusCode >= 400);
ep_apdex = from(Endpoint.latency).apdex(serviceName, status);
ep_percentile = from(Endpoint.latency).percentile2(1);
ep_old = from(Endpoint.latency).percentile(10);
ep_micros = from(Endpoint.latencyMicros).longAvg();
ep_log = from(Endpoint.latencyMicros).percentileLog();
ep_histogram = from(Endpoint.latency).histogram(100, 5);
ep_codes = from(Endpoint.*).labelCount(rpcStatusCode);
ep_slow = from(Endpoint.latency).labelAvg(rpcStatusCode, latency);
cpu = from(ServiceInstanceJVMCPU.usePercent).doubleAvg();
cpu_max = from(ServiceInstanceJVMCPU.usePercent).maxDouble();
cpu_min = from(ServiceInstanceJVMCPU.usePercent).minDouble();
cpu_sum = from(ServiceInstanceJVMCPU.usePercent).sum();
gc_time = from(ServiceInstanceJVMGC.time).filter(phase == GCPhase.NEW).sum();
relation_log = from(ServiceRelation.latencyMicros).percentileLog();
relation = from(ServiceRelation.latency).filter(detectPoint == DetectPoint.CLIENT).longAvg();
relation_from = from(ServiceRelation.*).filter(detectPoint == DetectPoint.SERVER).count();
database = from(DatabaseAccess.latency).longAvg();
"""
"""Every function, over sources that come as typed events, from spans, or both."""

_TYPED = ("Endpoint", "ServiceInstanceJVMCPU", "ServiceInstanceJVMGC")

QUICK_SPARK = {"spark.driver.memory": "512m"}
"""A session of its own that starts quickly."""

ONE_AT_A_TIME = PipelineSettings(ttl_days=365, max_batch_files=1)
"""Each segment is a batch."""

FEW_EXAMPLES = settings(
    max_examples=5,
    deadline=None,
    derandomize=True,
    database=None,
    phases=[Phase.generate],
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
"""For property tests whose examples each run Spark: few, always the same, none made smaller."""


def pipeline(spark: SparkSession, folder: Path, **given: Any) -> Pipeline:
    """A pipeline in ``folder``: spool, store, checkpoint, quarantine all lie there."""
    given.setdefault("oal", EVERY_FUNCTION)
    given.setdefault("spool", folder / "spool")
    given.setdefault("store", f"sqlite:///{folder / 'metrics.db'}")
    given.setdefault("checkpoint", folder / "checkpoint")
    given.setdefault("settings", PipelineSettings(ttl_days=365))
    given.setdefault("clock", lambda: NOW)
    return Pipeline(spark=spark, **given)


def local(folder: object) -> Path:
    """A folder of a pipeline, which is on this machine."""
    return Path(str(folder))


def sqlite(folder: Path) -> str:
    """The address of the store that a pipeline in ``folder`` has."""
    return f"sqlite:///{folder / 'metrics.db'}"


def every_events(
    seed: int, names: Iterable[str], n: int, *, days: int = 3, late_share: float = 0.1
) -> dict[str, list[Row]]:
    """Random rows among which each filter of :data:`EVERY_FUNCTION` finds some."""
    events = random_events(seed, names, n, start=START, days=days, late_share=late_share)
    rng = random.Random(seed)
    for row in events.get("Endpoint", ()):
        if rng.random() < 0.3:
            row["tags"] = [*(row["tags"] or ()), "a:b"]
        if rng.random() < 0.3:
            row["tag"] = {
                **(row["tag"] or {}),
                "n": rng.choice(("7", "-7", "70000000000", "x", "7\n")),
            }
        if rng.random() < 0.3:
            row["name"] = rng.choice(("/orders", "orders", "s"))
    return events


def endpoint_events(n: int, seed: int = 1, days: int = 2, start: datetime = START) -> list[Row]:
    """Rows of Endpoint."""
    return random_events(seed, ["Endpoint"], n, start=start, days=days)["Endpoint"]


def write_spool(
    events: Mapping[str, Sequence[Any]], folder: Path, files: int = 2, seed: int = 0
) -> None:
    """Write events as segments."""
    write_segments({name: list(rows) for name, rows in events.items()}, folder, files, seed)


def mixed_spool(
    folder: Path, rng: random.Random, *, typed: int, spans: int, deltas: int = 0
) -> Mapping[str, Any]:
    """So many segments of each typed source and of spans, to be read in a random order.

    ``deltas`` of each typed source's segments are those of a client that aggregates.
    """
    events: dict[str, Any] = random_events(1, _TYPED, 100 * typed, start=START)
    made = {source: rows[: len(rows) * deltas // typed] for source, rows in events.items()}
    rest = {source: rows[len(made[source]) :] for source, rows in events.items()}
    paths = write_segments(rest, folder, typed - deltas, seed=1)
    for source, rows in made.items():
        for number in range(deltas):
            some = rows[number::deltas]
            paths.append(write_deltas(folder, source, some, MIXED_OAL, f"deltas-{number}"))
    events["Span"] = random_spans(1, 25 * spans, start=START)
    paths += write_segments({"Span": events["Span"]}, folder, spans, seed=2)
    # Spark takes the oldest first.
    rng.shuffle(paths)
    oldest = time.time() - 2 * len(paths)
    for number, path in enumerate(paths):
        os.utime(path, (oldest + number, oldest + number))
    return events


def write_segment(
    folder: Path, source: str, rows: Sequence[Row], name: str = "0", order: int = 0
) -> Path:
    """One segment of the spool ``folder``; Spark takes those of a lower ``order`` first.

    As every segment, it is whole once it has its name: a pipeline that runs may list it at once.
    """
    path = folder / source / f"{name}.parquet"
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f".{name}.part")
    pq.write_table(to_table(source, rows), unfinished)
    set_order(unfinished, order)
    return unfinished.rename(path)


def set_order(path: Path, order: int) -> None:
    """When Spark takes a segment: it goes by the time of modification."""
    os.utime(path, (MTIME + order, MTIME + order))


def deal(
    events: Mapping[str, Sequence[Row]], folder: Path, pieces: int, seed: int = 0
) -> list[Path]:
    """Shuffle all rows, cut them into ``pieces`` segments in all, in any order of arrival."""
    rng = random.Random(seed)
    rows = [(source, row) for source in events for row in events[source]]
    rng.shuffle(rows)
    cuts = sorted(rng.sample(range(1, len(rows)), pieces - 1))
    orders = rng.sample(range(pieces), pieces)
    written = []
    for number, (start, end) in enumerate(zip([0, *cuts], [*cuts, len(rows)], strict=True)):
        for source in events:
            inside = [row for name, row in rows[start:end] if name == source]
            if inside:
                written.append(write_segment(folder, source, inside, str(number), orders[number]))
    return written


def write_table(folder: Path, name: str, table: pa.Table, **options: Any) -> Path:
    """One segment of Endpoint, of any columns."""
    path = folder / "Endpoint" / f"{name}.parquet"
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(table, path, **options)
    return path


def with_column(rows: Sequence[Row], name: str, values: Sequence[Any], kind: Any) -> pa.Table:
    """Rows of Endpoint as a table, one column of it replaced or added."""
    table = to_table("Endpoint", rows)
    column = pa.array(values, kind)
    if name in table.column_names:
        return table.set_column(table.column_names.index(name), name, column)
    return table.append_column(name, column)


Stored = dict[tuple[str, str, int, str], Any]
"""Metric, grain, bucket and entity id to value."""
States = dict[tuple[Any, ...], tuple[Any, ...]]
Tops = dict[tuple[str, str, int, str], list[tuple[Any, ...]]]
Whole = dict[tuple[Any, ...], Any]
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_NEVER_CAME = {"unresolved_parent": "parent never came", "unresolved_destination": "no destination"}
# How much comes late depends on which rows came before.
_OF_THE_SPLIT = frozenset({"late"})


def stored(store: Store | str) -> Stored:
    """Every value that a store holds."""
    if isinstance(store, str):
        with open_store(store) as opened:
            return stored(opened)
    return {
        (metric.name, grain.value, value.bucket, value.entity_id): value.value
        for metric in store.metrics()
        for grain in Grain
        for value in store.values(metric, grain=grain)
    }


def expected(events: Mapping[str, Sequence[Any]], oal: str = EVERY_FUNCTION) -> Stored:
    """Every value that the oracle expects."""
    return dict(expected_metrics(oal, {name: list(rows) for name, rows in events.items()}))  # type: ignore[arg-type]


def expected_of(rows: Sequence[Row], oal: str = SMALL) -> Stored:
    """What the oracle expects of rows of Endpoint."""
    return expected({"Endpoint": rows}, oal)


def differences(actual: Mapping[Any, Any], wanted: Mapping[Any, Any], limit: int = 10) -> list[str]:
    """Where two results differ; empty if they do not."""
    lines = [
        f"{key}: {actual.get(key, 'missing')!r}, expected {wanted.get(key, 'nothing')!r}"
        for key in sorted(actual.keys() | wanted.keys(), key=repr)
        if actual.get(key) != wanted.get(key)
    ]
    return [*lines[:limit], f"… {len(lines)} in all"] if lines else []


def contents(store: Store | str) -> tuple[States, Stored]:
    """All states and all values that a store holds."""
    if isinstance(store, str):
        with open_store(store) as opened:
            return contents(opened)
    return all_states(store), stored(store)


def counted(store: Store, what: str) -> dict[tuple[str, str], int]:
    """One kind of counter, by source and reason."""
    return {key[1:]: n for key, n in store.counters().items() if key[0] == what}


def top_of(store: Store) -> Tops:
    """Every TopN list of a store, in its order."""
    tops: Tops = {}
    for stream in store.top_streams():
        for grain in Grain:
            for record in store.top(stream, grain=grain):
                key = (stream, grain.value, record.bucket, record.entity_id)
                tops.setdefault(key, []).append(_record(record))
    return tops


def _record(record: TopRecord) -> tuple[Any, ...]:
    return (record.statement, record.latency, record.trace_id, record.runs, record.total_ms)


def top_expected(tops: Mapping[TopNKey, TopN]) -> Tops:
    """The same of the oracle."""
    return {
        key: [
            (
                record.statement,
                record.latency,
                record.trace_id,
                *top.runs[normalise(record.statement)],
            )
            for record in top.records
        ]
        for key, top in tops.items()
    }


def whole(url: str) -> Whole:
    """Every value, TopN record and counter of a store; keys say which."""
    with open_store(url, create=False) as store:
        return {
            **{("metric", *key): value for key, value in stored(store).items()},
            **_top(store),
            **{
                ("counter", *key): count
                for key, count in store.counters().items()
                if key[0] not in _OF_THE_SPLIT
            },
        }


def expected_whole(oal: str, events: Mapping[str, Sequence[Any]]) -> Whole:
    """What :func:`whole` must be once these rows, those of ``Span`` included, are all in."""
    spans = events.get("Span", ())
    given = spans_to_events(spans)
    wanted = {metric.source for metric in read_script(oal)}
    rows = {source: [*events.get(source, ()), *given.events.get(source, ())] for source in wanted}
    expected: Whole = {
        ("metric", *key): value for key, value in expected_metrics(oal, rows).items()
    }
    for key, top in expected_topn(spans).items():
        for rank, record in enumerate(top.records, 1):
            ran = top.runs[normalise(record.statement)]
            expected["top", *key, rank] = (
                record.latency,
                (record.time - _EPOCH) // timedelta(microseconds=1),
                record.trace_id,
                record.statement,
                ran.times,
                ran.total_ms,
            )
    counts = {("rows", source, ""): len(source_rows) for source, source_rows in rows.items()}
    counts["rows", "Span", ""] = len(spans)
    for counter, reason in _NEVER_CAME.items():
        counts["unresolved", "Span", reason] = given.counters[counter]
    return expected | {("counter", *key): count for key, count in counts.items() if count}


def _top(store: Store) -> Whole:
    return {
        ("top", stream, grain.value, record.bucket, record.entity_id, record.rank): (
            record.latency,
            record.time_us,
            record.trace_id,
            record.statement,
            record.runs,
            record.total_ms,
        )
        for stream in store.top_streams()
        for grain in Grain
        for record in store.top(stream, grain=grain)
    }


def quarantined(folder: Path) -> dict[str, str]:
    """The segments in a quarantine, each with its reason."""
    return {
        path.name.removesuffix(".reason"): path.read_text("utf-8").partition(":")[0]
        for path in folder.glob("*/*.reason")
    }


def quarantined_rows(folder: Path) -> list[dict[str, Any]]:
    """The rows in a quarantine, each with its ``_reason``."""
    files: Iterable[Path] = sorted(folder.glob("*/rows-*/*.parquet"))
    moments = pa.timestamp("us", tz="UTC")
    rows = []
    for file in files:
        table = pq.read_table(file, coerce_int96_timestamp_unit="us")
        time = table["time"].cast(pa.timestamp("us")).cast(moments)
        rows += table.set_column(table.column_names.index("time"), "time", time).to_pylist()
    return rows


def write_deltas(
    folder: Path,
    source: str,
    rows: Sequence[Row],
    oal: str,
    name: str = "0",
    order: int = 0,
    apdex_ms: Mapping[str, int] | None = None,
) -> Path:
    """One segment of the spool ``folder``, as a client that aggregates by ``oal`` writes it."""
    metrics = load(oal)
    own = metrics.by_source()[source]
    aggregator = Aggregator(metrics.catalog.source(source), own, apdex_ms=apdex_ms)
    made = aggregator.make(to_table(source, rows))
    assert not made.invalid, made.invalid
    path = folder / source / f"{name}.parquet"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(delta_file(to_arrow(made.deltas, aggregator.plan)))
    set_order(path, order)
    return path
