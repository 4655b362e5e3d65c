"""What a dispatcher is doing, as numbers: frozen snapshots."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from batchmill.flows.settings import Backpressure

QUEUE_FULL = "queue_full"
INGRESS_FULL = "ingress_full"
MAX_FLOWS = "max_flows"
CLOSED = "closed"
CANCELLED = "cancelled"


@dataclass(frozen=True, slots=True)
class LatencyStats:
    """Percentiles of a duration in seconds, each within 2 % (below 100 ns: 0)."""

    count: int
    """How many durations there were."""
    p50_s: float
    """Half of them took no longer."""
    p95_s: float
    """95 % of them took no longer."""
    p99_s: float
    """99 % of them took no longer."""


@dataclass(frozen=True, slots=True)
class WorkerStats:
    """One worker at the moment of the snapshot, and its counters since the start."""

    index: int
    """Its number, from 0."""
    depth: int
    """Signals in its queue now."""
    capacity: int
    """Signals its queue can hold."""
    running: int
    """Signals in its handler call now."""
    blocked: int
    """Producers that wait for room in its queue now."""
    flows: int
    """Flows assigned to it now."""
    handled: int
    """Signals whose handler call returned."""
    failed: int
    """Signals whose handler call raised."""
    rate: float
    """Signals a second that left its handler, over about the last ten seconds."""

    @property
    def load(self) -> int:
        """What the assignment goes by: signals queued or running."""
        return self.depth + self.running


@dataclass(frozen=True, slots=True)
class FlowStats:
    """A dispatcher at one moment, and its counters since the start.

    Taken in one critical section, so it always balances:
    ``dispatched == handled + failed + sum(evicted.values()) + unprocessed + pending``.
    """

    name: str
    """The dispatcher's name."""
    running: bool
    """Whether it accepts signals."""
    policy: Backpressure
    """The policy under which all drops below happened."""
    workers: tuple[WorkerStats, ...]
    """Every worker, in order."""
    ingress_depth: int
    """Signals queued now, over all workers."""
    ingress_capacity: int
    """Signals that may be queued, over all workers."""
    blocked: int
    """Producers that wait for room now, whatever they wait for."""
    dispatched: int
    """Signals for which a producer was told True."""
    refused: Mapping[str, int]
    """Signals that were never queued, by reason.

    ``queue_full``: the worker's queue was full. ``ingress_full``: all queues together were.
    ``max_flows``: a new flow, and every known one had signals pending. Under BLOCK these three
    count waits that ended without room (timeout). ``closed``: at or after close.
    ``cancelled``: the producer's wait was cancelled or interrupted.
    """
    evicted: Mapping[str, int]
    """Signals that were queued and then dropped to make room (DROP_OLDEST), by reason.

    ``queue_full``: for a signal of the same worker. ``ingress_full``: for one of any worker.
    """
    unprocessed: int
    """Signals that ``close()`` gave back."""
    active_flows: int
    """Flows that have a worker now."""
    expired_flows: int
    """Flows forgotten because they rested for ``idle_ttl``."""
    displaced_flows: int
    """Flows forgotten while they rested, because a new one needed the place (``max_flows``)."""
    handler_latency: LatencyStats
    """How long a handler call took, successful or not: one duration per call."""
    wait: LatencyStats
    """How long a signal was queued until its handler call began: one duration per signal."""

    @property
    def handled(self) -> int:
        """Signals whose handler call returned."""
        return sum(worker.handled for worker in self.workers)

    @property
    def failed(self) -> int:
        """Signals whose handler call raised."""
        return sum(worker.failed for worker in self.workers)

    @property
    def in_handlers(self) -> int:
        """Signals in a handler call now."""
        return sum(worker.running for worker in self.workers)

    @property
    def pending(self) -> int:
        """Signals accepted and not finished: queued, or in a handler call now."""
        return self.ingress_depth + self.in_handlers

    @property
    def dropped(self) -> Mapping[tuple[str, str], int]:
        """Every drop by policy and reason: refused and evicted signals together."""
        reasons = {**self.refused}
        for reason, count in self.evicted.items():
            reasons[reason] = reasons.get(reason, 0) + count
        return {(self.policy.value, reason): count for reason, count in reasons.items()}

    @property
    def rate(self) -> float:
        """Signals a second that left the handlers, over about the last ten seconds."""
        return sum(worker.rate for worker in self.workers)

    @property
    def skew(self) -> float:
        """The largest load of a worker over the mean: 1 is even, ``len(workers)`` all on one."""
        total = sum(worker.load for worker in self.workers)
        if total == 0:
            return 1.0
        return max(worker.load for worker in self.workers) * len(self.workers) / total
