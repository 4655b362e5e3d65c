"""The waits of ``flows_wait`` in simulated time: the real code of the router, without noise.

Every worker is a server that takes one signal at a time for exactly the service time; arrivals are
the same as in the real runs, only many more of them.
"""

from __future__ import annotations

import heapq
from statistics import quantiles

from batchmill.flows import Assignment, FlowSettings
from batchmill.flows.router import Router
from benchmarks.flows.arrivals import SERVICE_S, WORKERS, Case, Turn, build_arrivals


def simulate(rule: Assignment, case: Case, seconds: float, seed: int) -> Turn:
    """The waits under a rule."""
    config = FlowSettings(worker_count=WORKERS, batch_max=1, idle_ttl=None, assignment=rule)
    router = Router(config)
    idle = [True] * WORKERS
    ends: list[tuple[float, int]] = []
    waits_s: list[float] = []

    def begin(index: int, now: float) -> None:
        """Have a free worker take its next signal, if it has one."""
        taken = router.take(router.queues[index], now)
        idle[index] = not taken
        for _, _, _, sent, _ in taken:
            waits_s.append(now - sent)
            heapq.heappush(ends, (now + SERVICE_S, index))

    def end_first() -> None:
        now, index = heapq.heappop(ends)
        router.settle(router.queues[index], True, now)
        begin(index, now)

    for at, signal in build_arrivals(case, seconds, seed):
        while ends and ends[0][0] <= at:
            end_first()
        refused = router.offer(signal, signal.flow_id, signal.last, at)
        if refused is not None:
            raise RuntimeError(f"refused: {refused}")
        for index, queue in enumerate(router.queues):
            if idle[index] and queue.depth:
                begin(index, at)
    while ends:
        end_first()
    handled = [queue.handled for queue in router.queues]
    cuts = quantiles(waits_s, n=100)
    return Turn(
        p50_ms=cuts[49] * 1e3, p99_ms=cuts[98] * 1e3, busiest_share=max(handled) / sum(handled)
    )
