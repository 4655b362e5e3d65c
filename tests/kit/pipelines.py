"""What the pipeline tests share: a script with every function, runs, and stores as plain dicts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from pyspark.sql import SparkSession

from batchmill.sources import Grain
from batchmill.spark import Pipeline, PipelineSettings
from batchmill.store import Store, open_store
from tests.oracle.generate import write_segments
from tests.oracle.metrics import expected_metrics

START = datetime(2026, 3, 1, 10, tzinfo=UTC)
NOW = datetime(2026, 3, 20, tzinfo=UTC).timestamp()

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

Stored = dict[tuple[str, str, int, str], Any]


INTERPRETED = {
    "spark.sql.codegen.wholeStage": "false",
    "spark.sql.codegen.factoryMode": "NO_CODEGEN",
    "spark.sql.adaptive.enabled": "false",
}
"""A test's batches have a few rows: compiling them takes longer than running them."""


def pipeline(spark: SparkSession, folder: Path, **given: Any) -> Pipeline:
    """A pipeline in ``folder``: spool, store, checkpoint, quarantine all lie there.

    Spark interprets its plans, which is quicker for so few rows. Where values are the question, the
    plans are compiled, as they are in earnest: :func:`compiled`.
    """
    given.setdefault("spark_conf", INTERPRETED)
    return compiled(spark, folder, **given)


def compiled(spark: SparkSession, folder: Path, **given: Any) -> Pipeline:
    """The same with Spark as it comes."""
    given.setdefault("oal", EVERY_FUNCTION)
    given.setdefault("spool", folder / "spool")
    given.setdefault("store", f"sqlite:///{folder / 'metrics.db'}")
    given.setdefault("checkpoint", folder / "checkpoint")
    given.setdefault("settings", PipelineSettings(ttl_days=365))
    given.setdefault("clock", lambda: NOW)
    return Pipeline(spark=spark, **given)


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


def differences(found: Stored, wanted: Stored, limit: int = 10) -> list[str]:
    """Where two stores differ; empty if they do not."""
    lines = [
        f"{key}: {found.get(key, 'missing')!r}, expected {wanted.get(key, 'nothing')!r}"
        for key in sorted(found.keys() | wanted.keys())
        if found.get(key) != wanted.get(key)
    ]
    return [*lines[:limit], f"… {len(lines)} in all"] if lines else []


def spool(events: Mapping[str, Sequence[Any]], folder: Path, files: int = 2, seed: int = 0) -> None:
    """Write events as segments."""
    write_segments({name: list(rows) for name, rows in events.items()}, folder, files, seed)
