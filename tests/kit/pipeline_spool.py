"""A spool with something of everything: typed events, spans, and a script over both."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.kit.pipelines import INTERPRETED, START
from tests.oracle.generate import random_events, random_spans, write_segments

# Every function, over sources that come typed, from spans, and from both.
OAL = """
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
ep_histogram = from(Endpoint.latency).histogram(100, 5);
ep_codes = from(Endpoint.*).labelCount(rpcStatusCode);
ep_slow = from(Endpoint.latency).labelAvg(rpcStatusCode, latency);
cpu = from(ServiceInstanceJVMCPU.usePercent).doubleAvg();
cpu_max = from(ServiceInstanceJVMCPU.usePercent).maxDouble();
cpu_min = from(ServiceInstanceJVMCPU.usePercent).minDouble();
cpu_sum = from(ServiceInstanceJVMCPU.usePercent).sum();
gc_time = from(ServiceInstanceJVMGC.time).filter(phase == GCPhase.NEW).sum();
relation = from(ServiceRelation.latency).filter(detectPoint == DetectPoint.CLIENT).longAvg();
relation_from = from(ServiceRelation.*).filter(detectPoint == DetectPoint.SERVER).count();
database = from(DatabaseAccess.latency).longAvg();
"""
TYPED = ("Endpoint", "ServiceInstanceJVMCPU", "ServiceInstanceJVMGC")

QUICK_SPARK = {**INTERPRETED, "spark.driver.memory": "512m"}


def spool(folder: Path, rng: random.Random, *, typed: int, spans: int) -> Mapping[str, Any]:
    """So many segments of each typed source and of spans, to be read in a random order."""
    events: dict[str, Any] = random_events(1, TYPED, 100 * typed, start=START)
    paths = write_segments(events, folder, typed, seed=1)
    events["Span"] = random_spans(1, 25 * spans, start=START)
    paths += write_segments({"Span": events["Span"]}, folder, spans, seed=2)
    # Spark takes the oldest first.
    rng.shuffle(paths)
    oldest = time.time() - 2 * len(paths)
    for number, path in enumerate(paths):
        os.utime(path, (oldest + number, oldest + number))
    return events
