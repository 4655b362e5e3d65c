"""Takes a dispatcher's stats, in one critical section."""

from __future__ import annotations

import types

from batchmill.flows.core import FlowCore
from batchmill.flows.histogram import Histogram, merged
from batchmill.flows.stats import FlowStats, LatencyStats, WorkerStats
from batchmill.flows.worker import Worker


def snapshot(core: FlowCore) -> FlowStats:
    """The dispatcher as it is now; flows whose time is up are forgotten on the way."""
    with core.lock:
        now = core.clock()
        router = core.router
        router.expire(now)
        waiting = router.waiting_per_lane()
        workers = tuple(_worker_stats(worker, waiting[worker.lane], now) for worker in core.workers)
        return FlowStats(
            name=core.name,
            running=not router.closed,
            policy=core.config.backpressure,
            workers=workers,
            ingress_depth=router.depth,
            ingress_capacity=core.config.ingress_capacity,
            blocked=router.waiting,
            dispatched=router.dispatched,
            refused=types.MappingProxyType(dict(router.refused)),
            evicted=types.MappingProxyType(dict(router.evicted)),
            unprocessed=router.unprocessed,
            active_flows=len(router.flows),
            expired_flows=router.flows.expired,
            displaced_flows=router.flows.displaced,
            handler_latency=_latency([worker.latency for worker in core.workers]),
            wait=_latency([worker.wait for worker in core.workers]),
        )


def _worker_stats(worker: Worker, waiting: int, now: float) -> WorkerStats:
    lane = worker.lane
    return WorkerStats(
        index=lane.index,
        depth=lane.depth,
        capacity=lane.capacity,
        running=len(lane.running),
        blocked=waiting,
        flows=lane.flows,
        handled=lane.handled,
        failed=lane.failed,
        rate=worker.rate.per_second(now),
    )


def _latency(histograms: list[Histogram]) -> LatencyStats:
    histogram = merged(histograms)
    p50, p95, p99 = histogram.quantiles((0.50, 0.95, 0.99))
    return LatencyStats(count=histogram.count, p50_s=p50, p95_s=p95, p99_s=p99)
